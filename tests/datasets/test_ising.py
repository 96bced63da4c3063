import itertools

import numpy as np
import pytest
import torch
from torch_geometric.loader import DataLoader
from torch_geometric.utils import is_undirected

from pyg_chimera.datasets import LongRangeIsing
from pyg_chimera.datasets.ising import _sample


def make(root, *args, num_graphs=30, **kwargs):
    return LongRangeIsing(str(root), *args, num_graphs=num_graphs, log=False, **kwargs)


def dense_couplings(side: int, sigma: float) -> np.ndarray:
    """From the definition: the nearest of the periodic images."""
    sites = list(itertools.product(range(side), repeat=2))
    images = list(itertools.product((-side, 0, side), repeat=2))
    out = np.zeros((side**2, side**2))
    for (i, (a, b)), (j, (c, d)) in itertools.product(enumerate(sites), repeat=2):
        if i != j:
            r = min(np.hypot(a - c + u, b - d + v) for u, v in images)
            out[i, j] = r ** -(2 + sigma)
    return out


@pytest.mark.parametrize(("side", "sigma"), [(5, 0.6), (8, 1.5)])
def test_energies_are_sums_over_all_pairs(tmp_path, side, sigma):
    dataset = make(tmp_path, side, sigma, temperature=5.0)
    couplings = dense_couplings(side, sigma)
    assert len(dataset) == 24
    for data in dataset:
        s, y = data.x.double().numpy(), data.y.double().numpy()
        assert (np.abs(s) == 1).all()
        assert y.shape == (side**2, 1)
        assert np.allclose(y, s * (couplings @ s), atol=1e-5)
        # What flipping a spin costs, and the whole energy.
        flipped = s.copy()
        flipped[3] *= -1
        before, after = (
            -0.5 * float((z.T @ couplings @ z)[0, 0]) for z in (s, flipped)
        )
        assert after - before == pytest.approx(2 * y[3, 0], abs=1e-4)
        assert before == pytest.approx(-0.5 * y.sum(), abs=1e-3)


def test_graphs_are_tori(tmp_path):
    data = make(tmp_path, 6, temperature=5.0)[0]
    assert data.edge_index.shape == (2, 4 * 36)
    assert is_undirected(data.edge_index)
    assert data.edge_index.unique(dim=1).size(1) == 4 * 36
    assert (data.pos[:, 0] * 6 + data.pos[:, 1]).tolist() == list(range(36))
    u, v = data.pos[data.edge_index]
    steps = (u - v).abs()
    assert (torch.minimum(steps, 6 - steps).sum(1) == 1).all()


@pytest.mark.parametrize("sigma", [0.6, 1.5])
def test_spins_have_the_boltzmann_distribution(sigma):
    """Exactly known for all 512 states of nine spins."""
    side, temperature, samples = 3, 4.0, 40_000
    couplings = dense_couplings(side, sigma)
    spins = _sample(
        np.random.default_rng(0), couplings[0].reshape(side, side), temperature,
        samples, 20,
    )  # fmt: skip
    states = 2 * ((np.arange(512)[:, None] >> np.arange(9)) & 1) - 1
    energy = -0.5 * np.einsum("ni,ij,nj->n", states, couplings, states)
    weight = np.exp(-(energy - energy.min()) / temperature)
    weight /= weight.sum()
    found = (spins.reshape(-1, 9) > 0) @ (1 << np.arange(9))
    expected = samples * weight
    chi2 = ((np.bincount(found, minlength=512) - expected) ** 2 / expected).sum()
    assert abs(chi2 - 511) < 4 * np.sqrt(2 * 511)


@pytest.mark.parametrize("sigma", [0.6, 1.5])
def test_the_susceptibility_peaks_at_the_listed_temperature(sigma):
    temperature = LongRangeIsing.TEMPERATURES[sigma][16]
    steps = np.minimum(np.arange(16), 16 - np.arange(16)).astype(float)
    square = steps[:, None] ** 2 + steps**2
    square[0, 0] = np.inf
    couplings = square ** -(1 + sigma / 2)

    def susceptibility(factor: float) -> float:
        t = factor * temperature
        spins = _sample(np.random.default_rng(1), couplings, t, 600, 30)
        m = np.abs(spins.mean((1, 2)))
        return 256 * m.var() / t

    low, middle, high = map(susceptibility, (0.8, 1.0, 1.25))
    assert low < middle > high


def test_graphs_depend_on_position_split_and_seed(tmp_path):
    first = make(tmp_path, num_graphs=130)  # more than a block
    longer = make(tmp_path, num_graphs=150)
    assert len(first) == 104
    for short, long in zip(first, longer, strict=False):
        assert torch.equal(short.x, long.x)
        assert torch.equal(short.y, long.y)
    assert len(first.x.view(104, -1).unique(dim=0)) == 104
    kinds = [{}, {"seed": 1}, {"split": "val"}, {"split": "test"}, {"sigma": 1.5}]
    for one, other in itertools.combinations([make(tmp_path, **k) for k in kinds], 2):
        assert not torch.equal(one[0].x, other[0].x)
    # Neither sign is preferred.
    assert abs(float(longer.x.view(len(longer), -1).mean(1).sign().sum())) < 45


def test_only_the_split_is_generated_and_cached(tmp_path, monkeypatch):
    first = make(tmp_path, split="test")
    assert len(first) == 3
    assert not list(tmp_path.rglob("train.pt"))
    monkeypatch.setattr(LongRangeIsing, "generate", None)
    assert torch.equal(make(tmp_path, split="test")._data.x, first._data.x)
    for change in ({"temperature": 3.0}, {"sigma": 1.5}, {"seed": 1}, {"side": 32}):
        with pytest.raises(TypeError):
            make(tmp_path, split="test", **change)


def test_large_lattices_and_batches(tmp_path):
    dataset = make(tmp_path, 128, split="test", num_graphs=3)
    assert dataset[0].num_nodes == 128**2
    assert repr(dataset) == "LongRangeIsing(1, split='test', side=128, sigma=0.6)"
    batch = next(iter(DataLoader(make(tmp_path), 4)))
    assert batch.y.shape == batch.x.shape == (1024, 1)
    assert int(batch.edge_index.max()) == 1023


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "valid"}, "'split' must be one of"),
        ({"side": 2, "temperature": 1.0}, "'side' must be at least 3"),
        ({"sigma": 0.0}, "'sigma' must be above 0"),
        ({"num_graphs": 2}, "'num_graphs' must be at least 3"),
        ({"side": 17}, "'temperature' must be given for side=17"),
        ({"sigma": 0.7}, "'temperature' must be given"),
        ({"temperature": 0.0}, "'temperature' must be above 0"),
        ({"seed": -1}, "'seed' must not be negative"),
    ],
)
def test_rejects(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **kwargs)
