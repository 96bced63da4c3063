import itertools

import numpy as np
import pytest
import torch
from torch_geometric.utils import is_undirected


def dense_couplings(side: int) -> np.ndarray:
    """From the definition: the nearest of the periodic images."""
    sites = list(itertools.product(range(side), repeat=2))
    images = list(itertools.product((-side, 0, side), repeat=2))
    out = np.zeros((side**2, side**2))
    for (i, (a, b)), (j, (c, d)) in itertools.product(enumerate(sites), repeat=2):
        if i != j:
            r = min(np.hypot(a - c + u, b - d + v) for u, v in images)
            out[i, j] = r**-2.6
    return out


@pytest.mark.parametrize("side", [5, 8])
def test_energies_are_sums_over_all_pairs(long_range_data, side):
    dataset = long_range_data.ising_graphs(side, "train", 30, temperature=5.0)
    couplings = dense_couplings(side)
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


def test_graphs_are_tori(long_range_data):
    data = long_range_data.ising_graphs(6, "train", 3, temperature=5.0)[0]
    assert data.edge_index.shape == (2, 4 * 36)
    assert is_undirected(data.edge_index)
    assert data.edge_index.unique(dim=1).size(1) == 4 * 36
    assert (data.pos[:, 0] * 6 + data.pos[:, 1]).tolist() == list(range(36))
    u, v = data.pos[data.edge_index]
    steps = (u - v).abs()
    assert (torch.minimum(steps, 6 - steps).sum(1) == 1).all()


def test_spins_have_the_boltzmann_distribution(long_range_data):
    """Exactly known for all 512 states of nine spins."""
    side, temperature, samples = 3, 4.0, 40_000
    couplings = dense_couplings(side)
    near = long_range_data.couplings_of(side)
    assert np.allclose(near.ravel(), couplings[0])
    rng = np.random.default_rng(0)
    spins = long_range_data.ising.sample(rng, near, temperature, samples, 20)
    states = 2 * ((np.arange(512)[:, None] >> np.arange(9)) & 1) - 1
    energy = -0.5 * np.einsum("ni,ij,nj->n", states, couplings, states)
    weight = np.exp(-(energy - energy.min()) / temperature)
    weight /= weight.sum()
    found = (spins.reshape(-1, 9) > 0) @ (1 << np.arange(9))
    expected = samples * weight
    chi2 = ((np.bincount(found, minlength=512) - expected) ** 2 / expected).sum()
    assert abs(chi2 - 511) < 4 * np.sqrt(2 * 511)


def test_the_susceptibility_peaks_at_the_listed_temperature(long_range_data):
    ising = long_range_data.ising
    temperature, couplings = ising.TEMPERATURES[16], ising.couplings_of(16)

    def susceptibility(factor: float) -> float:
        t = factor * temperature
        spins = ising.sample(np.random.default_rng(1), couplings, t, 600, 30)
        m = np.abs(spins.mean((1, 2)))
        return 256 * m.var() / t

    low, middle, high = map(susceptibility, (0.8, 1.0, 1.25))
    assert low < middle > high


def test_graphs_depend_on_position_and_split(long_range_data):
    make = long_range_data.ising_graphs
    first, longer = make(16, "train", 130), make(16, "train", 150)  # more than a block
    assert len(first) == 104
    for short, long in zip(first, longer, strict=False):
        assert torch.equal(short.x, long.x)
        assert torch.equal(short.y, long.y)
    assert len(torch.cat([data.x.T for data in first]).unique(dim=0)) == 104
    made = [make(16, split, 30)[0].x for split in ("train", "val", "test")]
    for one, other in itertools.combinations(made, 2):
        assert not torch.equal(one, other)
    # Neither sign is preferred.
    assert abs(sum(float(data.x.mean().sign()) for data in longer)) < 45


def test_large_lattices(long_range_data):
    (data,) = long_range_data.ising_graphs(128, "test", 3)
    assert data.num_nodes == 128**2
