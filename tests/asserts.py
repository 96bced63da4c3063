"""Operators on graphs: an oracle, inputs of all shapes, and what must hold for them.

The oracle is written from the formula alone. It shares nothing with the library, its
reference backend included.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DAGS",
    "GRAPHS",
    "SIZES",
    "Inputs",
    "assert_batched_equals_single",
    "assert_gradients_match",
    "assert_near",
    "assert_permutes",
    "dense_mix",
    "make_inputs",
    "ring",
    "tolerance",
]

Edges = list[tuple[int, int]]


def dense_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    num_terms: int | None = None,
) -> Tensor:
    """``((I - A)^-1 * Q K^T) V`` head by head, of all graphs in one dense matrix."""
    num_nodes, num_heads, _ = value.shape
    identity = torch.eye(num_nodes, dtype=value.dtype)
    source, target = (identity[x] for x in edge_index.long())  # [E, V], one-hot
    outs = []
    for h in range(num_heads):
        A = target.t() @ (edge_weight[:, h, None] * source)
        if num_terms is None:
            L = torch.linalg.solve(identity - A, identity)
        else:
            L = power = identity
            for _ in range(num_terms):
                power = A @ power
                L = L + power
        g = h * query.size(1) // num_heads
        outs.append((L * (query[:, g] @ key[:, g].t())) @ value[:, h])
    return torch.stack(outs, dim=1)


# ---------------------------------------------------------------------------- inputs


def ring(num_nodes: int) -> Tensor:
    """One directed cycle through all nodes."""
    node = torch.arange(num_nodes)
    return torch.stack([node, (node + 1) % num_nodes])


def _several_blocks(acyclic: bool) -> tuple[Edges, int, list[int]]:
    """Sparse graphs of 40, 36, 33, 34 and 5 nodes with mixed up numbers."""
    generator = torch.Generator().manual_seed(1)
    edges, batch = [], []
    for graph, size in enumerate((40, 36, 33, 34, 5)):
        first = len(batch)
        batch += [graph] * size
        for i in range(1, size):
            parents = torch.randint(i, (1 + i % 2,), generator=generator).tolist()
            edges += [(first + j, first + i) for j in parents]
            if not acyclic:
                edges += [(first + i, first + j) for j in parents]
    name = torch.randperm(len(batch), generator=generator).tolist()
    place = sorted(range(len(batch)), key=name.__getitem__)
    mixed = [(name[j], name[i]) for j, i in edges]
    return mixed, len(batch), [batch[i] for i in place]


#: name -> (edges, num_nodes, batch); any graph is fine for `resolvent_mix` ...
GRAPHS: dict[str, tuple[Edges, int, list[int] | None]] = {
    "zero_nodes": ([], 0, None),
    "one_node": ([], 1, None),
    "one_loop": ([(0, 0)], 1, [0]),
    "no_edges": ([], 4, None),
    # Two components, an isolated node, self-loops and duplicate edges.
    "mixed": (
        [(0, 1), (1, 0), (1, 2), (2, 2), (2, 2), (2, 0), (0, 1), (5, 4), (4, 5)],
        7,
        None,
    ),
    "one_graph": ([(0, 1), (1, 2), (3, 4), (4, 3), (2, 0), (2, 1)], 6, [0] * 6),
    # Graph 2 has no nodes.
    "unsorted_batch": (
        [(0, 2), (2, 6), (6, 0), (6, 2), (1, 5), (5, 3), (5, 5), (3, 1), (1, 5)],
        7,
        [1, 0, 1, 0, 3, 0, 1],
    ),
    "several_blocks": _several_blocks(acyclic=False),
}

#: ... and these for `dag_scan`.
DAGS: dict[str, tuple[Edges, int, list[int] | None]] = {
    "zero_nodes": ([], 0, None),
    "one_node": ([], 1, [0]),
    "no_edges": ([], 4, None),
    # A diamond with a duplicate edge against the order of nodes, an isolated node.
    "diamonds": (
        [(5, 3), (5, 3), (3, 0), (5, 1), (1, 0), (5, 0), (2, 6)],
        7,
        None,
    ),
    "unsorted_batch": (
        [(0, 2), (2, 6), (0, 6), (5, 1), (3, 1), (5, 3), (5, 3)],
        7,
        [1, 0, 1, 0, 3, 0, 1],
    ),
    "several_blocks": _several_blocks(acyclic=True),
}

#: (heads, groups, state channels, channels of a head)
SIZES = [(1, 1, 1, 1), (4, 2, 5, 3), (2, 1, 17, 33)]


class Inputs(NamedTuple):
    """What an operator takes, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    edge_index: Tensor
    edge_weight: Tensor
    batch: Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(x.to(dtype) if x is not None and x.is_floating_point() else x
                        for x in self))  # fmt: skip

    def with_grad(self) -> "Inputs":
        return Inputs(*(x.detach().clone().requires_grad_()
                        if x is not None and x.is_floating_point() else x
                        for x in self))  # fmt: skip


def make_inputs(
    edges: Edges | Tensor,
    num_nodes: int,
    batch: Sequence[int] | Tensor | None = None,
    size: tuple[int, int, int, int] = (4, 2, 5, 3),
    *,
    bound: float = 0.9,
    seed: int = 0,
) -> Inputs:
    """Random float64 inputs on a graph, with rows of ``|A|`` that sum to `bound`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    heads, groups, states, channels = size
    if not isinstance(edges, Tensor):
        edges = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    if batch is not None and not isinstance(batch, Tensor):
        batch = torch.tensor(batch, dtype=torch.long)
    weight = random(edges.size(1), heads)
    total = torch.zeros(num_nodes, heads, dtype=torch.double)
    total.index_add_(0, edges[1], weight.abs())
    weight = bound * weight / total[edges[1]]
    query, key = (random(num_nodes, groups, states) for _ in range(2))
    return Inputs(query, key, random(num_nodes, heads, channels), edges, weight, batch)


def tolerance(dtype: torch.dtype) -> float:
    """How far from the oracle a result may be, relative to its largest entry."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]


# --------------------------------------------------------------------------- asserts


def assert_near(
    out: Tensor, expected: Tensor, tol: float = 1e-9, what: str = "output"
) -> None:
    """Equal shapes, and entries up to `tol` times the largest one expected."""
    assert out.shape == expected.shape, what
    if expected.numel() == 0:
        return
    error = (out.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    assert error <= tol * scale, f"{what}: off by {error:.1e}, largest is {scale:.1e}"


def _run(
    function: Callable[..., Tensor], inputs: Inputs, weigh: Tensor
) -> list[Tensor]:
    inputs = inputs.with_grad()
    out = function(*inputs)
    wrt = [inputs.query, inputs.key, inputs.value, inputs.edge_weight]
    grads = torch.autograd.grad(
        out, wrt, weigh.to(out.dtype), allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]


def assert_gradients_match(
    function: Callable[..., Tensor],
    inputs: Inputs,
    tol: float | None = None,
    num_terms: int | None = None,
) -> None:
    """The output and all four gradients are those of the float64 oracle."""
    generator = torch.Generator().manual_seed(7)
    weigh = torch.randn(inputs.value.shape, generator=generator, dtype=torch.double)

    def oracle(*args: Tensor) -> Tensor:
        return dense_mix(*args[:5], num_terms)

    expected = _run(oracle, inputs.to(torch.double), weigh)
    got = _run(function, inputs, weigh)
    names = ("output", "query", "key", "value", "edge_weight")
    for name, x, y in zip(names, got, expected, strict=True):
        assert x.dtype == inputs.value.dtype
        assert_near(x, y, tolerance(x.dtype) if tol is None else tol, name)


#: (tensors of nodes, edge_index, tensors of edges, batch) -> tensor of nodes
Layer = Callable[
    [tuple[Tensor, ...], Tensor, tuple[Tensor, ...], Tensor | None], Tensor
]


def assert_permutes(
    function: Layer,
    nodes: tuple[Tensor, ...],
    edge_index: Tensor,
    edges: tuple[Tensor, ...] = (),
    batch: Tensor | None = None,
    tol: float = 1e-9,
) -> None:
    """Renumbered nodes and shuffled edges give the same output, renumbered."""
    expected = function(nodes, edge_index, edges, batch)
    order = torch.randperm(expected.size(0))
    name = torch.argsort(order)
    shuffle = torch.randperm(edge_index.size(1))
    out = function(
        tuple(x[order] for x in nodes),
        name[edge_index][:, shuffle],
        tuple(x[shuffle] for x in edges),
        None if batch is None else batch[order],
    )
    assert_near(out, expected[order], tol)


def assert_batched_equals_single(
    function: Layer,
    nodes: tuple[Tensor, ...],
    edge_index: Tensor,
    edges: tuple[Tensor, ...],
    batch: Tensor,
    tol: float = 1e-9,
) -> None:
    """A batch gives what its graphs give one by one, with and without `batch`."""
    outs = [function(nodes, edge_index, edges, b) for b in (batch, None)]
    expected = torch.zeros_like(outs[0])
    place = torch.empty_like(batch)
    for graph in batch.unique():
        node = (batch == graph).nonzero().view(-1)
        place[node] = torch.arange(node.numel())
        edge = batch[edge_index[0]] == graph
        expected[node] = function(
            tuple(x[node] for x in nodes),
            place[edge_index[:, edge]],
            tuple(x[edge] for x in edges),
            None,
        )
    for out in outs:
        assert_near(out, expected, tol)
