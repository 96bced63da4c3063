import long_range_data
import numpy as np
import pytest
import torch

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
    (tmp_path / "small.m").write_text(CASE)
    return tmp_path


@pytest.fixture
def make():
    def make(folder, grids=("small",), split="train", num_samples=10):
        return long_range_data.power_flow_graphs(folder, grids, split, num_samples)

    return make


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


def test_case_files(root, make):
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
    power = torch.stack([data.x[:, 0] for data in dataset])
    assert (power[:, 2] < 0).all()
    assert (power[:, 0] + power[:, 3] > 0).all()


def test_both_formats_give_the_same_samples(root, make):
    plain = make(root)
    other = root / "other"
    other.mkdir()
    bus = np.zeros((6, 13))
    bus[:, 0], bus[[1, 2, 4], 2] = [1, 2, 3, 7, 8, 9], [30, 50, 9]
    gen = np.zeros((4, 10))
    gen[:, 0], gen[:, 7], gen[:, 8] = [1, 7, 9, 2], [1, 1, 1, 0], [90, 60, 500, 500]
    branch = np.zeros((7, 11))
    branch[:, :2] = [[1, 2], [2, 3], [3, 2], [3, 7], [7, 1], [1, 3], [8, 9]]
    branch[:, 3] = [0.1, 0.2, 0.5, -0.04, 0, 0.3, 0.3]
    branch[3, 8], branch[:, 10] = 1.25, [1, 1, 1, 1, 1, 0, 1]
    np.savez(other / "small.npz", bus=bus, gen=gen, branch=branch)
    for one, again in zip(plain, make(other), strict=True):
        assert torch.equal(again.x, one.x)
        assert torch.equal(again.y, one.y)


@pytest.mark.parametrize("name", ["ACTIVSg200", "ACTIVSg500", "1354pegase"])
def test_angles_of_real_grids_are_those_of_a_dense_solver(shared_data, make, name):
    for data in make(shared_data / "power-grids", [name], "test"):
        assert_solved(data)
