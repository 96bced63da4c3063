import mpmath
import pytest
import torch
from asserts import assert_near

from pyg_chimera.ops import unchecked
from pyg_chimera.ops.recurrence.positive_sums import positive_sums


def example():
    """Weights of all sizes, of which sums are far apart, and these, by mpmath."""
    generator = torch.Generator().manual_seed(15)
    size = torch.rand(6, 6, generator=generator).double().square()
    A = 10 ** (-40 * size)
    A *= 0.9999 / A.sum(1, keepdim=True)
    A[1] *= 1e-25 / A[1].sum()
    A[1, 1] = 0
    source = torch.eye(6)[0].double()
    with mpmath.workdps(60):
        system = mpmath.eye(6) - mpmath.matrix(A.tolist())
        sums = mpmath.lu_solve(system, mpmath.matrix(source.tolist()))
        want = torch.tensor([float(x) for x in sums], dtype=torch.double)
    edges = torch.ones(6, 6).nonzero().t().flip(0)
    return source.view(-1, 1, 1), edges, A.view(-1, 1), want.view(-1, 1, 1)


@pytest.mark.parametrize("solver", ["auto", "sparse", "dense", "iterative"])
def test_small_sums_are_as_exact_as_large_ones(solver):
    source, edges, weight, want = example()
    found = positive_sums(source, edges, weight, solver=solver)
    assert want.min() < 1e-30 * want.max()
    assert_near(found / want, torch.ones_like(want), 1e-9)
    with unchecked():  # where contents are not read, they are right or NaN
        found = positive_sums(source, edges, weight, solver=solver)
    right = ~found.isnan()
    assert right.any()
    assert_near((found / want)[right], torch.ones_like(want)[right], 1e-9)
