from functools import partial
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scanning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scanning

    return scanning


def test_wrong_results_are_not_timed(scanning, monkeypatch):
    right = scanning.CASES["stm_scan"]

    def wrong(*args):
        query, *rest = args
        return scanning.stm_scan(1.001 * query, *rest)

    case = right._replace(make=partial(scanning.on_dag, wrong))
    monkeypatch.setitem(scanning.CASES, "stm_scan", case)
    with pytest.raises(SystemExit, match="stm_scan is wrong on planar graphs, 46"):
        scanning.check(scanning.tiny("peptides"), ["stm_scan"], "cpu")


def test_large_workloads_are_compared_with_other_kernels(scanning, monkeypatch):
    """Which themselves agree with the loop over edges."""
    for part in scanning.BASES:
        graphs = scanning.tiny(part)
        computed = {scanning.CASES[name].computes for name in scanning.names(graphs)}
        for kind in computed - {None}:
            loop, other = (
                make(graphs, torch.float64, "cpu").results()
                for make in scanning.EXACT[kind]
            )
            assert set(loop) == set(other)
            for name, x in loop.items():
                assert scanning.compare("", "", {name: other[name]}, {name: x}, "")
    monkeypatch.setattr(scanning, "MAX_LOOP", 0)
    (row,) = scanning.check(scanning.tiny("grids"), ["grid_scan"], "cpu")
    assert row["against"] == "float64 torch backend"


def test_orientations_are_all_states_of_a_grid(scanning):
    """By hand: 2 x 2, where each orientation has 4 edges and 2 ways on."""
    grids = scanning.all_grids(4, 4, 2, 2)
    splits = list(scanning.orientations(grids, 4))

    assert [sorted(x.edge_index.t().tolist()) for x in splits] == [
        [[0, 1], [0, 2], [1, 3], [2, 3]],
        [[1, 0], [2, 0], [3, 1], [3, 2]],
        [[0, 1], [2, 0], [2, 3], [3, 1]],
        [[0, 2], [1, 0], [1, 3], [3, 2]],
    ]
    for split in splits:
        left, entered = split.edge_index[:, split.line_edge_index].unbind(1)
        assert left.size(1) == 2
        assert torch.equal(left[1], entered[0])


@pytest.mark.parametrize(
    ("part", "height", "width", "count", "edges"),
    [
        ("grids", 3, 4, 1, 4 * 17),
        ("sequences", 1, 5, 1, 2 * 4),
        ("grid-layers", 2, 2, 3, 4 * 4 * 3),
    ],
)
def test_states_are_counted_without_a_graph(
    scanning, part, height, width, count, edges
):
    graphs = scanning.on_grids(part, height, width, count)
    number = scanning.ORIENTATIONS.get(part, 4)
    found = scanning.all_grids(graphs.num_nodes, number, height, width)

    assert graphs.num_nodes == height * width * count
    assert graphs.num_edges == edges == found.states.writer.numel()


def test_targets(scanning):
    """Ratios the right way around, and nothing reached that was not measured."""
    row = {"part": "peptides", "workload": "x, batch of 64", "base": "stm_scan"}
    results = {
        "layers": [
            row | {"case": "dag_scan", "by_auto": 0.5},
            row | {"case": "loop over edges", "by_auto": 120.0},
        ],
        "growth": [
            {"part": part, "case": "grid_scan", "from": 256, "time": x, "memory": None}
            for part, x in (("grids", 4.0), ("sequences", 9.0))
        ],
        "errors": [],
    }
    found = {x["what"]: (x["value"], x["reached"]) for x in scanning.targets(results)}

    assert found["batch of 64: stm_scan / dag_scan"] == (2.0, False)
    assert found["batch of 64: loop over edges / stm_scan"] == (120.0, True)
    assert found["batch of 64: loop as released / stm_scan"] == (None, None)
    assert found["grid_scan, 16 -> 32 a side, growth of time"] == (4.0, True)
    assert found["grid_scan, 16 -> 32 a side, growth of memory"] == (None, None)
