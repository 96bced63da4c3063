import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.loader import DataLoader
from torch_geometric.utils import to_networkx

from pyg_chimera.datasets import PowerFlow

GRIDS = {
    "1354pegase": (1354, 3420),
    "13659pegase": (13659, 37250),
    "1888rte": (1888, 4616),
    "1951rte": (1951, 4750),
    "2848rte": (2848, 6884),
    "2868rte": (2868, 6942),
    "2869pegase": (2869, 7936),
    "6468rte": (6468, 16130),
    "6515rte": (6515, 16208),
    "9241pegase": (9241, 28414),
    "ACTIVSg10k": (10000, 24434),
    "ACTIVSg200": (200, 490),
    "ACTIVSg2000": (2000, 5334),
    "ACTIVSg500": (500, 1168),
}

CASE = """function mpc = small
%% the buses 2 and 3 are joined by two lines, 8 and 9 belong to another island
mpc.version = '2';
mpc.baseMVA = 100;
mpc.bus = [
	1	3	0	0	0	0	1	1	0	230	1	1.1	0.9;
	2	1	30	5	0	0	1	1	0	230	1	1.1	0.9;   % a load
	3	1	50	5	0	0	1	1	0	230	1	1.1	0.9;
	7	2	0	0	0	0	1	1	0	230	1	1.1	0.9;
	8	1	9	0	0	0	1	1	0	230	1	1.1	0.9;
	9	2	0	0	0	0	1	1	0	230	1	1.1	0.9;
];
mpc.gen = [1, 0, 0, 0, 0, 1, 100, 1, 90, 0; 7, 0, 0, 0, 0, 1, 100, 1, 60, 0
	9	0	0	0	0	1	100	1	500	0;
	2	0	0	0	0	1	100	0	500	0];
mpc.branch = [
	1	2	0	0.1	0	0	0	0	0	0	1	-360	360;
	2	3	0	0.2	0	0	0	0	0	0	1	-360	360;
	3	2	0	0.5	0	0	0	0	0	0	1	-360	360;
	3	7	0	-0.04	0	0	0	0	1.25	...
		0	1	-360	360;
	7	1	0	0	0	0	0	0	0	0	1	-360	360;
	1	3	0	0.3	0	0	0	0	0	0	0	-360	360;
	8	9	0	0.3	0	0	0	0	0	0	1	-360	360;
];
"""
#: Of the largest component, after renumbering.
SUSCEPTANCE = {(0, 1): 10.0, (1, 2): 7.0, (2, 3): 20.0, (0, 3): 1e5}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "small.m").write_text(CASE)
    return tmp_path


@pytest.fixture
def real(shared_data, tmp_path):
    """A folder with links to the real grids."""
    (tmp_path / "raw").symlink_to(shared_data / "power-grids")
    return tmp_path


def make(root, grids=("small",), *args, num_samples=10, **kwargs):
    return PowerFlow(str(root), grids, *args, num_samples=num_samples, log=False,
                     **kwargs)  # fmt: skip


def dense(data) -> np.ndarray:
    """The Laplacian of susceptances."""
    out = np.zeros((data.num_nodes, data.num_nodes))
    u, v = data.edge_index.numpy()
    np.add.at(out, (u, v), -np.exp(data.edge_attr[:, 0].double().numpy()))
    return out - np.diag(out.sum(1))


def assert_solved(data) -> None:
    matrix, power = dense(data), data.x[:, 0].double().numpy()
    assert power.sum() == pytest.approx(0, abs=1e-4 * len(power))
    assert (power**2).mean() == pytest.approx(1, rel=1e-5)
    expected = np.linalg.lstsq(matrix, power, rcond=None)[0]
    y = data.y[:, 0].double().numpy()
    assert y.mean() == pytest.approx(0, abs=1e-6)
    assert ((y - expected) ** 2).sum() < 1e-9 * (expected**2).sum()
    total = np.diag(matrix)
    assert np.allclose(data.x[:, 1], 50 * power / total, rtol=1e-3)
    assert np.allclose(data.x[:, 2], (np.log(total) - 5) / 2, atol=1e-5)


def test_case_files(root):
    dataset = make(root)
    assert len(dataset) == 8
    for data in dataset:
        edges = data.edge_index.T.tolist()
        weights = data.edge_attr[:, 0].double().exp().tolist()
        found = {tuple(edge): b for edge, b in zip(edges, weights, strict=True)}
        assert len(found) == len(edges) == 2 * len(SUSCEPTANCE)
        for (u, v), b in SUSCEPTANCE.items():
            assert found[u, v] == pytest.approx(b, rel=1e-5)
            assert found[v, u] == pytest.approx(b, rel=1e-5)
        assert_solved(data)
    # Generators cover the loads, but for the buses' small random injections.
    power = dataset.x[:, 0].view(-1, 4)
    assert (power[:, 2] < 0).all()
    assert (power[:, 0] + power[:, 3] > 0).all()


def test_both_formats_give_the_same_samples(root, tmp_path):
    plain = make(root)
    other = tmp_path / "other"
    (other / "raw").mkdir(parents=True)
    bus = np.zeros((6, 13))
    bus[:, 0], bus[[1, 2, 4], 2] = [1, 2, 3, 7, 8, 9], [30, 50, 9]
    gen = np.zeros((4, 10))
    gen[:, 0], gen[:, 7], gen[:, 8] = [1, 7, 9, 2], [1, 1, 1, 0], [90, 60, 500, 500]
    branch = np.zeros((7, 11))
    branch[:, :2] = [[1, 2], [2, 3], [3, 2], [3, 7], [7, 1], [1, 3], [8, 9]]
    branch[:, 3] = [0.1, 0.2, 0.5, -0.04, 0, 0.3, 0.3]
    branch[3, 8], branch[:, 10] = 1.25, [1, 1, 1, 1, 1, 0, 1]
    np.savez(other / "raw" / "small.npz", bus=bus, gen=gen, branch=branch)
    again = make(other)
    assert torch.equal(again._data.x, plain._data.x)
    assert torch.equal(again._data.y, plain._data.y)


@pytest.mark.parametrize("name", ["ACTIVSg200", "ACTIVSg500", "1354pegase"])
def test_angles_of_real_grids_are_those_of_a_dense_solver(real, name):
    for data in make(real, [name], "test"):
        assert_solved(data)


def test_all_grids_load(real):
    dataset = make(real, list(GRIDS), "test", num_samples=3)
    assert len(dataset) == len(GRIDS)
    for i, data in enumerate(dataset):
        assert int(data.grid) == i
        assert (data.num_nodes, data.num_edges) == GRIDS[dataset.grids[i]]
        assert nx.is_connected(to_networkx(data, to_undirected=True))
        x, y = data.x.double(), data.y.double()
        rms = x.square().mean(0).sqrt()
        assert ((rms > 0.2) & (rms < 10)).all()
        assert 0.03 < float(y.square().mean().sqrt()) < 3
        u, v = data.edge_index
        flow = data.edge_attr.double().exp() * (y[u] - y[v])
        out = torch.zeros_like(y).index_add(0, u, flow)
        assert (out[:, 0] - x[:, 0]).abs().max() < 0.02  # angles are in float32


def test_samples_depend_on_grid_position_split_and_seed(root):
    (root / "raw" / "twin.m").write_text(CASE)
    plain = make(root)
    pair = make(root, ("twin", "small"), num_samples=20)
    assert [int(data.grid) for data in pair[:4]] == [0, 1, 0, 1]
    for one, other in zip(plain, pair[1::2], strict=False):
        assert torch.equal(one.x, other.x)
    kinds = [{}, {"seed": 1}, {"split": "val"}, {"split": "test"}, {"grids": ["twin"]}]
    for one, other in itertools.combinations([make(root, **k) for k in kinds], 2):
        assert not torch.equal(one[0].x, other[0].x)
    assert len(plain.y.view(8, -1).unique(dim=0)) == 8


def test_caching_and_batches(root, tmp_path, monkeypatch):
    kwargs = {"processed_root": str(tmp_path / "elsewhere")}
    first = make(root, **kwargs)
    assert sorted(path.name for path in root.iterdir()) == ["elsewhere", "raw"]
    batch = next(iter(DataLoader(first, 4)))
    assert batch.x.shape == (16, 3)
    assert batch.edge_attr.shape == (32, 1)
    assert batch.grid.tolist() == [0] * 4
    assert repr(first) == "PowerFlow(8, split='train', grids=1)"
    monkeypatch.setattr(PowerFlow, "generate", None)
    assert torch.equal(make(root, **kwargs)._data.x, first._data.x)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "valid"}, "'split' must be one of"),
        ({"grids": "small"}, "'grids' must be a sequence of different names"),
        ({"grids": []}, "'grids' must be"),
        ({"grids": ["small", "small"]}, "'grids' must be"),
        ({"num_samples": 2}, "'num_samples' must be at least 3"),
        ({"seed": -1}, "'seed' must not be negative"),
    ],
)
def test_rejects(root, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(root, **kwargs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mpc.gen =", "mpc.generators =", "matrix 'gen'"),
        ("\t3\t7\t0\t-0.04", "\t3\t6\t0\t-0.04", "no bus 6"),
        ("-360\t360", "-360", None),
    ],
)
def test_broken_files(root, old, new, message):
    (root / "raw" / "small.m").write_text(CASE.replace(old, new))
    if message is None:  # a column less, of those that are not read
        assert len(make(root)) == 8
        return
    with pytest.raises(ValueError, match=message):
        make(root)


def test_missing_files(root):
    with pytest.raises(FileNotFoundError, match="absent"):
        make(root, ["absent"])
