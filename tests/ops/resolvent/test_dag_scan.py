from itertools import product

import pytest
import torch
from asserts import (
    DAGS,
    SIZES,
    assert_batched_equals_single,
    assert_gradients_match,
    assert_near,
    assert_permutes,
    dense_mix,
    make_inputs,
)
from hypothesis import given, settings
from strategies import Batch, batches, dags

from pyg_chimera.ops import CycleError, dag_scan, resolvent_mix
from pyg_chimera.ops.structure import topological_rank

COMBINATIONS = list(
    product(("auto", "state", "mask"), ("auto", "numba", "torch", "reference"))
)
DISTINCT = [*product(("state", "mask"), ("numba", "torch")), ("auto", "reference")]

combinations = pytest.mark.parametrize(
    ("form", "backend"), COMBINATIONS, ids=map("-".join, COMBINATIONS)
)
distinct = pytest.mark.parametrize(
    ("form", "backend"), DISTINCT, ids=map("-".join, DISTINCT)
)


def scanner(form, backend):
    return lambda *args, **kwargs: dag_scan(*args, form=form, backend=backend, **kwargs)


@combinations
@pytest.mark.parametrize("graph", DAGS)
def test_oracle(graph, form, backend):
    for size in SIZES:
        inputs = make_inputs(*DAGS[graph], size)
        for dtype in (torch.float64, torch.float32):
            assert_gradients_match(scanner(form, backend), inputs.to(dtype))


@distinct
def test_weights_of_any_size(form, backend):
    # Far from diagonally dominant: 1e3 along a path, 1e-3 beside it.
    edges = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]
    inputs = make_inputs(edges, 4)
    factor = torch.tensor([1e3, 1e3, 1e3, 1e-3, 1e-3, -1.0], dtype=torch.double)
    inputs = inputs._replace(edge_weight=inputs.edge_weight * factor.unsqueeze(-1))
    assert_gradients_match(scanner(form, backend), inputs)


@distinct
@settings(max_examples=30, derandomize=True, deadline=None)
@given(batch=batches(dags(max_nodes=6, max_edges=12)))
def test_oracle_on_random_batches(form, backend, batch: Batch):
    inputs = make_inputs(batch.edge_index, batch.num_nodes, batch.batch, bound=2.0)
    assert_gradients_match(scanner(form, backend), inputs)
    out = scanner(form, backend)(*inputs)
    rank = topological_rank(batch.edge_index, batch.num_nodes)
    assert_near(scanner(form, backend)(*inputs, rank=rank), out, 1e-12)
    assert_near(scanner(form, backend)(*inputs[:5], rank=3 * rank - 7), out, 1e-12)


@distinct
def test_permutation_and_batching(form, backend):
    inputs = make_inputs(*DAGS["unsorted_batch"])

    def layer(nodes, edge_index, edges, batch):
        return scanner(form, backend)(*nodes, edge_index, *edges, batch)

    args = (inputs[:3], inputs.edge_index, (inputs.edge_weight,), inputs.batch)
    assert_permutes(layer, *args)
    assert_batched_equals_single(layer, *args)


@distinct
def test_future_is_not_seen(form, backend):
    inputs = make_inputs([(i, i + 1) for i in range(49)], 50)
    scan = scanner(form, backend)
    value = inputs.value.clone().requires_grad_()
    out = scan(*inputs._replace(value=value))
    (grad,) = torch.autograd.grad(out[20].sum(), value)
    assert (grad[21:] == 0).all()
    assert (grad[:21] != 0).any(-1).all()


@distinct
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(form, backend, dtype):
    inputs = make_inputs(*DAGS["diamonds"]).to(dtype).with_grad()
    out = scanner(form, backend)(*inputs)
    assert out.dtype == dtype
    expected = dense_mix(*inputs.to(torch.double)[:5])
    assert_near(out, expected, torch.finfo(dtype).eps)
    out.sum().backward()
    assert inputs.edge_weight.grad.dtype == dtype


@distinct
def test_autocast(form, backend):
    inputs = make_inputs(*DAGS["diamonds"]).to(torch.float32)

    def scan(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scanner(form, backend)(*args)

    assert_gradients_match(scan, inputs)


@distinct
def test_gradcheck(form, backend):
    inputs = make_inputs(*DAGS["diamonds"], (2, 1, 2, 3)).with_grad()
    scan = scanner(form, backend)
    assert torch.autograd.gradcheck(scan, tuple(inputs), fast_mode=True)


def test_is_a_resolvent():
    inputs = make_inputs(*DAGS["several_blocks"])
    assert_near(dag_scan(*inputs), resolvent_mix(*inputs), 1e-12)


def test_long_path():
    # Half of a state survives a step: geometric sums, far beyond any recursion limit.
    n = 20_000
    edge_index = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    one = torch.ones(n, 1, 1, dtype=torch.double)
    weight = torch.full((n - 1, 1), 0.5, dtype=torch.double)
    out = dag_scan(one, one, one, edge_index, weight)
    expected = 2 - 0.5 ** torch.arange(n, dtype=torch.double)
    assert_near(out.view(-1), expected, 1e-12)


@distinct
def test_cycle_is_named(form, backend):
    inputs = make_inputs([(0, 1), (1, 4), (4, 2), (2, 1), (2, 3)], 5)
    scan = scanner(form, backend)
    with pytest.raises(CycleError, match="cycle 1 -> 4 -> 2 -> 1") as info:
        scan(*inputs)
    assert info.value.cycle == [1, 4, 2]
    assert isinstance(info.value, ValueError)
    with pytest.raises(CycleError, match="cycle 1 -> 4 -> 2 -> 1"):
        scan(*inputs, rank=torch.arange(5))


@distinct
def test_self_loop_is_a_cycle(form, backend):
    inputs = make_inputs([(0, 1), (2, 2)], 3)
    with pytest.raises(CycleError, match="cycle 2 -> 2"):
        scanner(form, backend)(*inputs)


@distinct
def test_bad_rank(form, backend):
    inputs = make_inputs([(0, 1), (0, 2)], 3)
    scan = scanner(form, backend)
    with pytest.raises(
        ValueError, match=r"grow along every edge, but edge 1 goes from node 0 "
        r"\(rank 1\) to node 2 \(rank 1\)",
    ):  # fmt: skip
        scan(*inputs, rank=torch.tensor([1, 2, 1]))
    with pytest.raises(ValueError, match=r"one entry per node, \[3\], got \[2\]"):
        scan(*inputs, rank=torch.tensor([0, 1]))
