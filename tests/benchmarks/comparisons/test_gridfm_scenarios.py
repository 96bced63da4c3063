"""The files that gridfm-graphkit reads."""

import gridfm_scenarios
import numpy as np
import pandas as pd
import power_states
import pytest

TYPES = ("REF", "PV", "PQ")  # SLACK, PV, PQ


@pytest.fixture
def grid(tmp_path):
    return power_states.write_grid(tmp_path / "mine.npz", 40, seed=0)


@pytest.fixture
def write(grid, tmp_path):
    """Writes three states, and returns the tables of nodes and edges."""

    def write(name: str = "out", *argv: str) -> list[pd.DataFrame]:
        out = tmp_path / name
        gridfm_scenarios.main([str(grid), "--states", "3", "--out", str(out), *argv])
        assert [path.name for path in (out / "mine").iterdir()] == ["raw"]
        names = [f"pf_{x}.csv" for x in ("node", "edge")]
        return [pd.read_csv(out / "mine" / "raw" / name) for name in names]

    return write


def test_states_satisfy_the_balance_of_power(write):
    """In what is written alone, as the package computes it."""
    nodes, edges = write()
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
    outages = edges.groupby("scenario")[["G", "B"]].sum()
    assert outages.B.nunique() == 3  # another branch is out in each


def test_types_say_what_is_unknown(write, grid):
    nodes, edges = write()
    kind = np.tile(power_states.read_grid(grid).kind, 3)
    assert (nodes[list(TYPES)].to_numpy() == (kind[:, None] == range(3))).all()
    assert (nodes.Va[nodes.REF == 1].abs() < 1e-9).all()
    load = nodes[nodes.PQ == 1]
    assert (load[["Pg", "Qg"]] == 0).all(axis=None)
    assert (load.Pd > 0).any()
    assert (edges.groupby("scenario").index1.nunique() == 40).all()


def test_seeds_decide(write):
    first, again, other = write("a"), write("b"), write("c", "--seed", "1")
    assert all(x.equals(y) for x, y in zip(first, again, strict=True))
    assert not first[0].equals(other[0])


def test_baselines(write, capsys):
    nodes, _ = write()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {" ".join(row[:-6]): [float(x) for x in row[-6:]] for row in rows[1:]}
    names = ["DC start", "Newton's step", "mean of the bus"]
    assert list(found) == names
    assert rows[0][:4] == ["PQ", "Vm", "PQ", "Va"]
    load = nodes[nodes.PQ == 1]
    for column, shown in zip(("Vm", "Va"), found["mean of the bus"], strict=False):
        wide = load.pivot(index="scenario", columns="bus", values=column)
        assert shown == pytest.approx(wide.std(ddof=0).pow(2).mean() ** 0.5, rel=1e-3)
    start, step = (np.array(found[name]) for name in names[:2])
    assert (step < 0.5 * start).all()
    assert (step > 0).all()


def test_what_cannot_be_is_refused(grid, write, tmp_path, refused, monkeypatch):
    argv = [str(grid), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("power_states.draw", lambda *_: None)
    message = refused(gridfm_scenarios.main, [*argv, "--states", "2"])
    assert "solves only 0 of 10 states" in message
    monkeypatch.undo()
    write()
    assert "remove it" in refused(gridfm_scenarios.main, argv)
    argv[0] = str(tmp_path / "nope.npz")
    assert "there is no" in refused(gridfm_scenarios.main, argv)
    assert not (tmp_path / "out" / "nope").exists()
