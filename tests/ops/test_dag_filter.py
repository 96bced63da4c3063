"""The fused filter over ancestors: against matrix powers in float64."""

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison

from pyg_chimera.ops.dag_filter import dag_filter


def oracle(x, weight, edge_index, num_dags):
    """By dense matrices of means, without the package's code."""
    size, steps = num_dags * len(x), (weight.size(1) - 1) // num_dags
    mean = torch.zeros(size, size, dtype=torch.double)
    for j, i in edge_index.t().tolist():
        mean[i, j] += 1
    mean = mean / mean.sum(1, keepdim=True).clamp(min=1)
    y, far = weight[:, 0] * x, x.repeat(num_dags, 1)
    for k in range(steps):
        far = mean @ far
        for d, part in enumerate(far.chunk(num_dags)):
            y = y + weight[:, 1 + d * steps + k] * part
    return y


def case(nodes, num_dags, steps, channels, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.double}
    ends = torch.randint(nodes, (2, edges), generator=generator).sort(0)[0]
    ends = ends[:, ends[0] < ends[1]]
    index = torch.cat([ends + d * nodes for d in range(num_dags)], 1)
    x = torch.randn(nodes, channels, **options)
    return x, torch.randn(channels, 1 + num_dags * steps, **options), index, num_dags


def results(function, x, weight, index, num_dags):
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(*leaves, index, num_dags)
    grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out).cos()
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@settings(deadline=None)
@given(
    *(st.integers(1, n) for n in (7, 3)), st.integers(0, 3), st.integers(1, 20),
    st.integers(0, 15), st.booleans(),
)  # fmt: skip
def test_outputs_and_gradients(nodes, num_dags, steps, channels, edges, narrow):
    inputs = case(nodes, num_dags, steps, channels, edges, seed=edges)
    want = results(oracle, *inputs)
    if narrow:
        inputs = (*(y.float() for y in inputs[:2]), *inputs[2:])
    for y, z in zip(results(dag_filter, *inputs), want, strict=True):
        assert_near(y, z, 1e-5 if narrow else 1e-12)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_more_channels_than_a_vector_has(num_threads):
    inputs = case(3000, 2, 3, 70, 9000)
    torch.set_num_threads(num_threads)
    found = results(dag_filter, *inputs)
    want = results(lambda *x: dag_filter(*x, lambda y, _: y), *inputs)  # by PyTorch
    for y, z in zip(found, want, strict=True):
        assert_near(y, z, 1e-12)


def test_gradcheck():
    x, weight, index, num_dags = case(4, 2, 2, 3, 8)
    leaves = x.requires_grad_(), weight.requires_grad_()

    def run(x, weight):
        return dag_filter(x, weight, index, num_dags)

    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_nan_reaches_descendants_only(monkeypatch):
    poison(monkeypatch)
    index = torch.tensor([[0, 1, 3], [1, 2, 4]])
    x = torch.ones(5, 3, dtype=torch.double)
    x[0, 1] = torch.nan
    y = dag_filter(x, torch.ones(3, 2, dtype=torch.double), index)
    assert y.isnan().any(1).tolist() == [True, True, False, False, False]
    assert y.isnan().any(0).tolist() == [False, True, False]


def test_compilers_see_operators_of_torch():
    inputs = case(5, 1, 2, 4, 9)
    compiled = torch.compile(dag_filter, fullgraph=True, backend="aot_eager")
    for y, z in zip(results(compiled, *inputs), results(oracle, *inputs), strict=True):
        assert_near(y, z, 1e-12)
