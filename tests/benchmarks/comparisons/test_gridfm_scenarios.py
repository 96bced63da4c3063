"""The files that gridfm-graphkit reads."""

import gridfm_scenarios
import numpy as np
import pandas as pd
import power_states
import pytest


@pytest.fixture
def grid(tmp_path):
    return power_states.write_grid(tmp_path / "mine.npz", 40, seed=0)


@pytest.fixture
def tables(grid, tmp_path):
    """Of nodes and edges, three states."""
    gridfm_scenarios.main([str(grid), "--states", "3", "--out", str(tmp_path / "out")])
    raw = tmp_path / "out" / "mine" / "raw"
    return [pd.read_csv(raw / f"pf_{name}.csv") for name in ("node", "edge")]


def test_states_satisfy_the_balance_of_power(tables):
    """In what is written alone, as the package computes it."""
    nodes, edges = tables
    assert list(nodes.scenario.unique()) == list(edges.scenario.unique()) == [0, 1, 2]
    seen = []
    for i in range(3):
        node, edge = nodes[nodes.scenario == i], edges[edges.scenario == i]
        matrix = np.zeros((40, 40), complex)
        matrix[edge.index1, edge.index2] = edge.G + 1j * edge.B
        voltage = (node.Vm * np.exp(1j * np.deg2rad(node.Va))).to_numpy()
        power = (node.Pg - node.Pd + 1j * (node.Qg - node.Qd)).to_numpy() / 100
        assert np.allclose(voltage * (matrix @ voltage).conj(), power, atol=1e-7)
        seen.append(power)
        assert abs(power).max() > 0.01
    assert abs(seen[0] - seen[1]).max() > 0.01


def test_types_say_what_is_unknown(tables, grid):
    nodes, edges = tables
    kind = np.tile(power_states.read_grid(grid).kind, 3)
    types = ("REF", "PV", "PQ")  # SLACK, PV, PQ
    assert (nodes[list(types)].to_numpy() == (kind[:, None] == range(3))).all()
    assert (nodes.Va[nodes.REF == 1].abs() < 1e-9).all()
    load = nodes[nodes.PQ == 1]
    assert (load[["Pg", "Qg"]] == 0).all(axis=None)
    assert (load.Pd > 0).any()
    assert (edges.groupby("scenario").index1.nunique() == 40).all()


def test_files_are_not_overwritten(grid, tables, tmp_path, refused):
    argv = [str(grid), "--states", "3", "--out", str(tmp_path / "out")]
    assert "remove it" in refused(gridfm_scenarios.main, argv)
