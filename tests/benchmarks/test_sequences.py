from functools import partial
from pathlib import Path

import pytest
import torch

from pyg_chimera.ops import selective_scan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sequences

    return sequences


@pytest.mark.parametrize(
    "part", ["scan", "layers", "evaluation", "sequences", "channels"]
)
def test_cases_agree(sequences, part):
    """Also those that stand beside ours: both loops, and passes one by one."""
    graphs = sequences.tiny(part)
    rows = sequences.check(graphs, sequences.names(graphs), "cpu")

    expected = [x for x in sequences.names(graphs) if sequences.CASES[x].exact]
    assert [row["case"] for row in rows] == expected
    assert {row["against"] for row in rows} == {"float64 reference backend"}
    assert all(row["worst"] <= 1e-5 for row in rows)


def test_loops_compute_the_scan(sequences):
    """All of their gradients, in float64, with an only row in a graph."""
    batch = torch.tensor([0, 0, 0, 1, 2, 2])
    graphs = sequences.tiny("scan")._replace(batch=batch, num_nodes=6)
    scan = partial(sequences.scan, graphs=graphs, dtype=torch.float64, device="cpu")
    expected = scan(None, backend="reference").results()

    assert len(expected) == 9
    for loop in (sequences.published_loop, sequences.careful_loop):
        found = scan(loop).results()
        assert set(found) == set(expected)
        for name, x in found.items():
            assert sequences.compare("", "", {name: x}, {name: expected[name]}, "")


def test_wrong_results_are_not_timed(sequences, monkeypatch):
    def wrong(u, *args, **kwargs):
        return selective_scan(1.001 * u, *args, **kwargs)

    right = sequences.CASES["selective_scan"].make

    def make(*args):
        with monkeypatch.context() as patch:
            patch.setattr(sequences, "selective_scan", wrong)
            return right(*args)

    case = sequences.CASES["selective_scan"]._replace(make=make)
    monkeypatch.setitem(sequences.CASES, "selective_scan", case)
    with pytest.raises(SystemExit, match="selective_scan is wrong on planar graphs"):
        sequences.check(sequences.tiny("scan"), ["selective_scan"], "cpu")


def test_many_rows_are_compared_with_the_torch_backend(sequences, monkeypatch):
    monkeypatch.setattr(sequences, "MAX_LOOP", 0)
    (row,) = sequences.check(sequences.tiny("scan"), ["selective_scan"], "cpu")

    assert row["against"] == "float64 torch backend"
    assert row["worst"] <= 1e-5


@pytest.mark.parametrize(("total", "count"), [(9, 1), (10, 1), (39, 3)])
def test_batches_of_a_size(sequences, total, count):
    """Whole copies of a graph, as many as fit but one at least."""
    graphs = sequences.of_size(10, total)
    graph = sequences.planar(10).edge_index

    assert (graphs.num_nodes, graphs.size) == (10 * count, 10)
    assert graphs.batch.bincount().tolist() == [10] * count
    assert graphs.num_edges == count * graph.size(1) == graphs.edge_index.size(1)
    last = graphs.edge_index[:, -graph.size(1) :]
    assert torch.equal(last - 10 * (count - 1), graph)
    assert graphs.name.startswith(f"{count} planar graph")


def test_targets(sequences):
    """Ratios the right way around, and nothing reached that was not measured."""
    attention = {"case": "GPSConv multihead", "by_auto": 4.0}
    sized = {"part": "graphs", "workload": "x", "nodes_per_graph": 2000}
    real = {"workload": "x, batch of 64", "nodes_per_graph": None}
    small = {"workload": "x, batch of 2", "nodes_per_graph": None, "part": "scan"}
    step = {"case": "selective_scan", "memory": None}
    results = {
        "layers": [
            sized | attention,
            real | attention | {"part": "layers"},
            real | {"part": "scan", "case": "loop as published", "by_auto": 120.0},
            small | {"case": "loop over steps", "by_auto": 120.0},
        ],
        "growth": [
            step | {"from": 1024, "time": 2.0},
            step | {"from": 4096, "time": 9.0},
        ],
        "errors": [],
    }
    found = {x["what"]: (x["value"], x["reached"]) for x in sequences.targets(results)}

    layer = "GraphMambaConv / GPSConv multihead"
    assert found[f"64 peptides: {layer}"] == (0.25, True)
    assert found[f"graphs of 2,000 nodes: {layer}"] == (0.25, False)
    loops = ("loop as published", "loop over steps")
    found_loops = [found[f"64 sequences: {name} / selective_scan"] for name in loops]
    assert found_loops == [(120.0, True), (None, None)]
    text = "selective_scan, {} rows, growth of time"
    assert found[text.format("1,024 -> 4,096")] == (2.0, True)
    assert found[text.format("4,096 -> 16,384")] == (9.0, False)
    assert found["largest relative error"] == (None, None)
