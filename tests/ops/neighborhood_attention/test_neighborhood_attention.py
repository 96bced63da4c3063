"""What is special to `neighborhood_attention`: the softmax itself, and its limits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near

from pyg_chimera.ops import explain, k_hop_index, neighborhood_attention

backends = pytest.mark.parametrize("backend", ["torch", "reference"])


def inputs(num_nodes, heads=4, groups=2, size=5, channels=3):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_nodes, *shape, generator=generator, dtype=torch.double)
        for shape in ((heads, size), (groups, size), (groups, channels))
    ]


def complete(num_nodes):
    return torch.ones(num_nodes, num_nodes).nonzero().t()


def results(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weigh = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weigh).sum(), leaves)]


@backends
def test_means_worked_out_by_hand(backend):
    """Node 2 reads 0 once and 1 twice; node 3 reads itself; the others read nobody."""
    edge_index = torch.tensor([[0, 1, 1, 3], [2, 2, 2, 3]])
    query, key = torch.ones(4, 1, 1), torch.zeros(4, 1, 1)
    value = torch.tensor([3.0, 6.0, 0.0, 7.0]).view(4, 1, 1)
    out = neighborhood_attention(query, key, value, edge_index, backend=backend)
    assert_near(out.view(4), torch.tensor([0.0, 0.0, 5.0, 7.0]), 1e-6)
    bias = torch.tensor([2.0, 1.0, 1.0, 9.0]).log().view(4, 1)
    out = neighborhood_attention(
        query, key, value, edge_index, edge_bias=bias, backend=backend
    )
    assert_near(out.view(4), torch.tensor([0.0, 0.0, 4.5, 7.0]), 1e-6)


@backends
@pytest.mark.parametrize("causal", [False, True])
def test_all_pairs_are_pytorchs_attention(backend, causal):
    tensors, edge_index = inputs(67, size=33, channels=18), complete(67)
    if causal:
        edge_index = edge_index[:, edge_index[0] <= edge_index[1]]

    def dense(*x):
        q, k, v = (y.transpose(0, 1) for y in x)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
        )
        return out.transpose(0, 1)

    def sparse(*x):
        return neighborhood_attention(*x, edge_index, scale=0.3, backend=backend)

    for x, y in zip(results(sparse, tensors), results(dense, tensors), strict=True):
        assert_near(x, y)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_any_size(backend, dtype):
    """Of thousands, the largest one takes all; differences of them count."""
    edge_index = torch.tensor([[0, 1, 2], [2, 2, 2]])
    query, key = torch.ones(3, 1, 1, dtype=dtype), torch.zeros(3, 1, 1, dtype=dtype)
    value = torch.tensor([1.0, 2.0, 4.0], dtype=dtype).view(3, 1, 1)
    for shift in (1e4, -1e4, 0.0):
        bias = torch.tensor([0.0, 0.0, -2000.0], dtype=dtype).view(3, 1) + shift
        out = neighborhood_attention(
            query, key, value, edge_index, edge_bias=bias, backend=backend
        )
        assert_near(out.view(3), torch.tensor([0, 0, 1.5]), 1e-6)


@backends
@pytest.mark.parametrize("name", ["query", "key", "value", "edge_bias"])
def test_rows_that_read_nan_are_nan(backend, name):
    """Whether some of their logits are, or all; the other rows are as before."""
    edge_index = torch.tensor(
        [[0, 1, 1, 2, 0, 1, 2, 3, 0], [1, 0, 2, 1, 0, 1, 2, 3, 4]]
    )
    source, target = edge_index  # node 3 reads itself only, 4 reads 0 only
    args = dict(zip(("query", "key", "value"), inputs(5), strict=True))
    args["edge_bias"] = torch.randn(9, 4).double()
    expected = neighborhood_attention(**args, edge_index=edge_index, backend=backend)
    bad = torch.tensor([True, False, False, True, False])
    args[name] = args[name].clone()
    args[name][bad[target] if name == "edge_bias" else bad] = torch.nan
    out = neighborhood_attention(**args, edge_index=edge_index, backend=backend)
    if name in ("key", "value"):
        bad = torch.zeros(5).index_add(0, target, bad[source].float()) > 0
    assert out[bad].isnan().all()
    assert out[~bad].equal(expected[~bad])


@backends
def test_minus_infinity_removes_edges(backend):
    """And a node with none left has zeros, and gradients of zero, like one without."""
    edge_index = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 1, 2]])
    tensors = inputs(3)
    removed = torch.zeros(5, 4).double()
    removed[[0, 2, 3]] = -torch.inf
    left = edge_index[:, [1, 4]]

    def masked(*x):
        return neighborhood_attention(
            *x, edge_index, edge_bias=removed, backend=backend
        )

    def without(*x):
        return neighborhood_attention(*x, left, backend=backend)

    got, want = results(masked, tensors), results(without, tensors)
    assert (got[0][1] == 0).all()
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() < 1e-12
    bias = removed.clone().requires_grad_()
    out = neighborhood_attention(*tensors, edge_index, edge_bias=bias, backend=backend)
    out.sum().backward()
    assert bias.grad.isfinite().all()


@backends
def test_duplicates_are_logarithms(backend):
    """Three edges from one node to another weigh as one with a bias of log 3."""
    once = torch.tensor([[0, 1, 2], [2, 2, 0]])
    thrice = torch.cat([once, once[:, :1], once[:, :1]], dim=1)
    bias = torch.tensor([3.0, 1.0, 1.0]).double().log().view(3, 1).expand(3, 4)
    tensors = inputs(3)
    got = neighborhood_attention(*tensors, thrice, backend=backend)
    want = neighborhood_attention(*tensors, once, edge_bias=bias, backend=backend)
    assert_near(got, want)


def test_memory_is_linear_in_edges():
    """A path of a hundred thousand nodes, beside the windows of every hundredth."""
    num_nodes = 100_000
    node = torch.arange(num_nodes)
    window = k_hop_index(torch.stack([node[:-1], node[1:]]), num_nodes, 3).edge_index
    tensors = [x.float() for x in inputs(num_nodes, heads=2, groups=1)]
    out, *_ = results(lambda *x: neighborhood_attention(*x, window), tensors)
    few = window[:, window[1] % 100 == 0]
    some = torch.unique(few)
    few = torch.searchsorted(some, few)
    want = neighborhood_attention(*(x[some] for x in tensors), few)
    own = some % 100 == 0
    assert_near(out[some[own]], want[own], 1e-5)


@pytest.mark.parametrize("degree", [1, 15, 16, 17, 31, 700])
def test_nodes_of_any_degree(degree):
    source = torch.arange(degree) % 23
    edge_index = torch.stack([source, torch.full_like(source, 5)])
    tensors = inputs(23, size=19, channels=70)

    def run(*x, backend):
        return neighborhood_attention(*x, edge_index, backend=backend)

    got = results(lambda *x: run(*x, backend="torch"), tensors)
    want = results(lambda *x: run(*x, backend="reference"), tensors)
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() <= 1e-12 * y.abs().max().clamp(min=1)


def test_explain():
    tensors, edge_index = inputs(3), complete(3)
    choice = explain("neighborhood_attention", *tensors, edge_index)
    assert choice[1:4] == ("softmax", "edge", "torch")
    choice = explain("neighborhood_attention", *tensors, edge_index, backend="torch")
    assert (choice.backend, choice.reason) == ("torch", "asked for")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"key": torch.zeros(3, 3, 5)}, ValueError, "'key' must have as many heads"),
        ({"key": torch.zeros(3, 0, 5)}, ValueError, "'key' must have as many heads"),
        ({"query": torch.zeros(3, 0, 5)}, ValueError, "'key' must have as many heads"),
        ({"key": torch.zeros(3, 2, 4)}, ValueError, r"'key' must be .*\[3, 2, 5\]"),
        ({"key": torch.zeros(4, 2, 5)}, ValueError, r"'key' must be .*\[3, 2, 5\]"),
        ({"value": torch.zeros(3, 1, 3)}, ValueError, r"'value' must be .*\[3, 2, 3\]"),
        ({"query": torch.zeros(3, 5)}, ValueError, r"'query' must be \[nodes, heads"),
        ({"edge_bias": torch.zeros(2, 4)}, ValueError, r"'edge_bias' .*= \[9, 4\]"),
        ({"edge_bias": torch.zeros(9, 2)}, ValueError, r"'edge_bias' .*= \[9, 4\]"),
        ({"edge_index": complete(4)}, ValueError, "'edge_index' must hold node"),
        ({"batch": torch.tensor([0, 0, 1])}, ValueError, "joins different graphs"),
        ({"scale": "1"}, TypeError, "'scale' must be a number, got '1'"),
        ({"backend": "cuda"}, ValueError, "'backend' must be one of"),
    ],
)  # fmt: skip
def test_bad_input(change, error, match):
    names = ("query", "key", "value", "edge_index")
    given = dict(zip(names, [*inputs(3), complete(3)], strict=True))
    with pytest.raises(error, match=match):
        neighborhood_attention(**{**given, **change})


def test_more_edges_than_pairs_of_nodes():
    edge_index = torch.tensor([[0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]])
    tensors = inputs(2)
    call = partial(neighborhood_attention, edge_index=edge_index)
    found, expected = (
        results(partial(call, backend=backend), tensors)
        for backend in ("torch", "reference")
    )
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y, 1e-12)
