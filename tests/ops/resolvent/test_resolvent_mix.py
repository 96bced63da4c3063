from itertools import product

import pytest
import torch
from asserts import (
    GRAPHS,
    SIZES,
    Inputs,
    assert_batched_equals_single,
    assert_gradients_match,
    assert_near,
    assert_permutes,
    dense_mix,
    make_inputs,
)
from hypothesis import given, settings
from strategies import Batch, batches
from torch_geometric import EdgeIndex

from pyg_chimera.ops import resolvent_mix
from pyg_chimera.ops.resolvent import numba_, torch_
from pyg_chimera.ops.structure import elimination_rank

FORMS = ("auto", "state", "mask")
COMBINATIONS = [
    *product(("auto", "sparse"), FORMS, ("auto", "numba", "torch")),
    *product(("dense", "neumann"), FORMS, ("auto", "torch")),
    *product(("auto", "sparse", "dense", "neumann"), ("auto",), ("reference",)),
]
#: One of each implementation.
DISTINCT = [
    *product(("sparse",), ("state", "mask"), ("numba", "torch")),
    *product(("dense", "neumann"), ("state", "mask"), ("torch",)),
    ("auto", "auto", "reference"),
]
NUM_TERMS = 4

combinations = pytest.mark.parametrize(
    ("solver", "form", "backend"), COMBINATIONS, ids=map("-".join, COMBINATIONS)
)
distinct = pytest.mark.parametrize(
    ("solver", "form", "backend"), DISTINCT, ids=map("-".join, DISTINCT)
)


def mixer(solver, form, backend, num_terms=NUM_TERMS):
    options = {"solver": solver, "form": form, "backend": backend}
    if solver == "neumann":
        options["num_terms"] = num_terms
    return lambda *args, **kwargs: resolvent_mix(*args, **options, **kwargs)


def terms(solver):
    return NUM_TERMS if solver == "neumann" else None


@combinations
@pytest.mark.parametrize("graph", GRAPHS)
def test_oracle(graph, solver, form, backend):
    for size in SIZES:
        inputs = make_inputs(*GRAPHS[graph], size)
        for dtype in (torch.float64, torch.float32):
            assert_gradients_match(
                mixer(solver, form, backend), inputs.to(dtype), num_terms=terms(solver)
            )


@distinct
@settings(max_examples=30, derandomize=True, deadline=None)
@given(batch=batches())
def test_oracle_on_random_batches(solver, form, backend, batch: Batch):
    inputs = make_inputs(batch.edge_index, batch.num_nodes, batch.batch)
    mix = mixer(solver, form, backend)
    assert_gradients_match(mix, inputs, num_terms=terms(solver))
    out = mix(*inputs[:5])
    assert_near(out, mix(*inputs), 1e-12)


@distinct
def test_permutation_and_batching(solver, form, backend):
    inputs = make_inputs(*GRAPHS["unsorted_batch"])

    def layer(nodes, edge_index, edges, batch):
        return mixer(solver, form, backend)(*nodes, edge_index, *edges, batch)

    args = (inputs[:3], inputs.edge_index, (inputs.edge_weight,), inputs.batch)
    assert_permutes(layer, *args)
    assert_batched_equals_single(layer, *args)


@distinct
def test_graphs_do_not_touch(solver, form, backend):
    edges, num_nodes, batch = GRAPHS["unsorted_batch"]
    inputs = make_inputs(edges, num_nodes, batch).with_grad()
    out = mixer(solver, form, backend)(*inputs)
    inside = inputs.batch == 1
    wrt = inputs.query, inputs.key, inputs.value, inputs.edge_weight
    *nodes, weight = torch.autograd.grad(out[inside].sum(), wrt)
    for grad in nodes:
        assert (grad[inside] != 0).any()
        assert (grad[~inside] == 0).all()
    inside = inside[inputs.edge_index[0]]
    assert (weight[inside] != 0).any()
    assert (weight[~inside] == 0).all()


@pytest.mark.parametrize("form", ["state", "mask"])
@pytest.mark.parametrize("num_terms", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_neumann_is_the_sum_of_powers(num_terms, form, backend):
    for graph in ("mixed", "unsorted_batch"):
        # Rows may sum to more than one: a finite sum always exists.
        inputs = make_inputs(*GRAPHS[graph], bound=1.5)
        mix = mixer("neumann", form, backend, num_terms)
        assert_gradients_match(mix, inputs, num_terms=num_terms)


@pytest.mark.parametrize("form", ["state", "mask"])
def test_enough_terms_are_exact_on_nilpotent_graphs(form):
    # A binary tree of depth 3: all powers beyond the third vanish.
    edges = [((i - 1) // 2, i) for i in range(1, 15)]
    inputs = make_inputs(edges, 15)
    exact = dense_mix(*inputs[:5])
    out = resolvent_mix(*inputs, solver="neumann", num_terms=3, form=form)
    assert_near(out, exact, 1e-12)
    out = resolvent_mix(*inputs, solver="neumann", num_terms=2, form=form)
    assert not torch.allclose(out, exact)


@distinct
def test_rank_changes_nothing(solver, form, backend):
    inputs = make_inputs(*GRAPHS["several_blocks"])
    mix = mixer(solver, form, backend)
    num_nodes = inputs.value.size(0)
    good = elimination_rank(inputs.edge_index, num_nodes)
    bad = torch.randperm(num_nodes)
    # Ranks within graphs, as they come from a loader, tie across graphs.
    tied = torch.arange(num_nodes) // 3
    for rank in (good, bad, tied, good.int()):
        assert_gradients_match(
            lambda *args, rank=rank: mix(*args, rank=rank),
            inputs,
            num_terms=terms(solver),
        )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_tiles(num_threads, monkeypatch):
    """Cuts of states, tasks and threads that small inputs would not meet."""
    inputs = make_inputs(*GRAPHS["several_blocks"], (4, 2, 21, 37))
    one_block = make_inputs(*GRAPHS["mixed"], (1, 1, 21, 37))
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    # Some four states of 40 nodes fit: 21 are no multiple.
    monkeypatch.setattr(numba_, "_TILE_BYTES", 40 * 16 * 8 * 4)
    monkeypatch.setattr(torch_, "_MAX_NUMEL", 4 * 148 * 37 * 10)
    for solver, form, backend in DISTINCT:
        for x in (inputs, one_block):
            mix = mixer(solver, form, backend)
            assert_gradients_match(mix, x, num_terms=terms(solver))


@combinations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(solver, form, backend, dtype):
    """Half in, half out, float32 between: off by one rounding of the output."""
    inputs = make_inputs(*GRAPHS["mixed"]).to(dtype)
    expected = dense_mix(*inputs.to(torch.double)[:5], terms(solver))
    inputs = inputs.with_grad()
    out = mixer(solver, form, backend)(*inputs)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_near(out, expected, eps)
    out.sum().backward()
    double = inputs.to(torch.double).with_grad()
    dense_mix(*double[:5], terms(solver)).sum().backward()
    for x, y in zip(inputs, double, strict=True):
        if x is not None and x.is_floating_point():
            assert x.grad.dtype == dtype
            assert_near(x.grad, y.grad, 2 * eps)


@distinct
def test_mixed_dtypes(solver, form, backend):
    q, k, v, edge_index, w, batch = make_inputs(*GRAPHS["mixed"])
    mix = mixer(solver, form, backend)
    expected = dense_mix(q.float().double(), k, v.bfloat16().double(), edge_index, w,
                         terms(solver))  # fmt: skip
    out = mix(q.float(), k, v.bfloat16(), edge_index, w, batch)
    assert out.dtype == torch.bfloat16
    assert_near(out, expected, 2**-8)


@distinct
def test_autocast(solver, form, backend):
    inputs = make_inputs(*GRAPHS["mixed"]).to(torch.float32)
    mix = mixer(solver, form, backend)

    def autocast(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mix(*args)

    assert_gradients_match(autocast, inputs, num_terms=terms(solver))


@distinct
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_integer_dtypes(solver, form, backend, dtype):
    inputs = make_inputs(*GRAPHS["unsorted_batch"])
    narrow = inputs._replace(
        edge_index=inputs.edge_index.to(dtype), batch=inputs.batch.to(dtype)
    )
    mix = mixer(solver, form, backend)
    assert_gradients_match(mix, narrow, num_terms=terms(solver))


@distinct
def test_edge_index_of_pyg(solver, form, backend):
    inputs = make_inputs(*GRAPHS["unsorted_batch"])
    index = EdgeIndex(inputs.edge_index, sparse_size=(7, 7))
    mix = mixer(solver, form, backend)
    assert_gradients_match(
        lambda *args: mix(*args[:3], index, *args[4:]),
        inputs,
        num_terms=terms(solver),
    )


@distinct
def test_strange_batch_numbers(solver, form, backend):
    inputs = make_inputs(*GRAPHS["unsorted_batch"])
    mix = mixer(solver, form, backend)
    renamed = torch.tensor([10**12, 5, 7, 77])[inputs.batch]
    assert_near(mix(*inputs[:5], renamed), mix(*inputs), 1e-12)


@distinct
@pytest.mark.parametrize("size", [(2, 1, 0, 3), (2, 1, 3, 0)], ids=["N=0", "P=0"])
def test_no_channels(solver, form, backend, size):
    inputs = make_inputs(*GRAPHS["mixed"], size)
    assert_gradients_match(
        mixer(solver, form, backend), inputs, num_terms=terms(solver)
    )


@distinct
def test_strided_inputs(solver, form, backend):
    inputs = make_inputs(*GRAPHS["unsorted_batch"])
    strided = Inputs(
        *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]),
        inputs.edge_index.t().contiguous().t(),
        inputs.edge_weight.repeat_interleave(2, dim=0)[::2],
        inputs.batch.repeat_interleave(2)[::2],
    )

    def mix(*args):  # autograd must see the strides too
        return mixer(solver, form, backend)(
            *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in args[:3]),
            *args[3:],
        )

    assert_gradients_match(mix, strided, num_terms=terms(solver))


@distinct
def test_gradcheck(solver, form, backend):
    inputs = make_inputs(*GRAPHS["mixed"], (2, 1, 2, 3)).with_grad()
    mix = mixer(solver, form, backend)
    assert torch.autograd.gradcheck(mix, tuple(inputs), fast_mode=True)


def test_only_some_gradients():
    inputs = make_inputs(*GRAPHS["mixed"])
    weight = inputs.edge_weight.clone().requires_grad_()
    resolvent_mix(*inputs._replace(edge_weight=weight)).sum().backward()
    assert weight.grad.abs().sum() > 0
    assert not resolvent_mix(*inputs).requires_grad


def test_second_derivatives_are_refused():
    inputs = make_inputs(*GRAPHS["mixed"]).with_grad()
    out = resolvent_mix(*inputs)
    (grad,) = torch.autograd.grad(out.sum(), inputs.edge_weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grad.sum(), inputs.value)


def test_long_ring_is_exact():
    # Nothing decays: the first node hears itself through all of the others.
    n = 3000
    edge_index = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    one = torch.ones(n, 1, 1, dtype=torch.double)
    weight = torch.full((n, 1), 0.999, dtype=torch.double)
    expected = torch.full((n, 1, 1), 1000.0, dtype=torch.double)
    options = {"backend": "numba", "form": "state", "rank": torch.arange(n)}
    out = resolvent_mix(one, one, one, edge_index, weight, **options)
    assert_near(out, expected, 1e-9)
