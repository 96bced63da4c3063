import itertools

import long_range_data
import numpy as np
import pytest


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
def test_energies_are_sums_over_all_pairs(side):
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


def test_spins_have_the_boltzmann_distribution():
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
