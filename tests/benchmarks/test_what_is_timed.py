"""Only what is right is timed, and targets are reached only by what was measured."""

from functools import partial

import gpu
import mixing
import pytest
import scanning
import sequences
import torch


def wrong(function):
    return lambda x, *args, **kwargs: function(1.001 * x, *args, **kwargs)


def test_wrong_sequences_are_not_timed(monkeypatch):
    right = sequences.CASES["selective_scan"].make

    def make(*args):
        with monkeypatch.context() as patch:
            scan = wrong(sequences.selective_scan)
            patch.setattr(sequences, "selective_scan", scan)
            return right(*args)

    case = sequences.CASES["selective_scan"]._replace(make=make)
    monkeypatch.setitem(sequences.CASES, "selective_scan", case)
    with pytest.raises(SystemExit, match="selective_scan is wrong on planar graphs"):
        sequences.check(sequences.tiny("scan"), ["selective_scan"], "cpu")


def test_wrong_scans_are_not_timed(monkeypatch):
    make = partial(scanning.on_dag, wrong(scanning.stm_scan))
    case = scanning.CASES["stm_scan"]._replace(make=make)
    monkeypatch.setitem(scanning.CASES, "stm_scan", case)
    with pytest.raises(SystemExit, match="stm_scan is wrong on planar graphs, 46"):
        scanning.check(scanning.tiny("peptides"), ["stm_scan"], "cpu")


def test_wrong_layers_are_not_timed(monkeypatch):
    right = mixing.CASES["auto"]

    def make():
        conv = right.make()
        conv.lin_out.register_forward_hook(lambda *args: 1.001 * args[-1])
        return conv

    monkeypatch.setitem(mixing.CASES, "auto", right._replace(make=make))
    with pytest.raises(SystemExit, match="auto is wrong on planar graph, 9 nodes: its"):
        mixing.check(mixing.planar(9), ["auto"], "cpu")


def test_wrong_results_of_a_gpu_are_not_timed():
    call = next(gpu.calls(gpu.parse(["--smoke", "--only", "molecules"])))
    function = gpu.Measured(
        call, lambda **x: 1.001 * call.function(**x), "cpu", trust=False
    )
    with pytest.raises(SystemExit, match="ours is wrong on two small graphs"):
        gpu.check(call, function, "cpu")


@pytest.mark.parametrize(
    "part", ["scan", "layers", "evaluation", "sequences", "channels"]
)
def test_sequences_agree(part):
    """Also those that stand beside ours: both loops, and passes one by one."""
    graphs = sequences.tiny(part)
    rows = sequences.check(graphs, sequences.names(graphs), "cpu")
    expected = [x for x in sequences.names(graphs) if sequences.CASES[x].exact]
    assert [row["case"] for row in rows] == expected
    assert {row["against"] for row in rows} == {"float64 reference backend"}
    assert all(row["worst"] <= 1e-5 for row in rows)


def test_large_workloads_are_compared_with_other_kernels(monkeypatch):
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
    for script, part, case in (
        (scanning, "grids", "grid_scan"),
        (sequences, "scan", "selective_scan"),
    ):
        monkeypatch.setattr(script, "MAX_LOOP", 0)
        (row,) = script.check(script.tiny(part), [case], "cpu")
        assert row["against"] == "float64 torch backend"
        assert row["worst"] <= 1e-5


def test_targets_of_sequences():
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
