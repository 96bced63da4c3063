"""Scans with states on edges: an oracle, inputs, and what must hold for them.

The oracle is written from the formula alone, edge by edge, in Python.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from asserts import assert_near, tolerance
from torch import Tensor

__all__ = ["GATES", "StmInputs", "assert_scan", "loop_scan", "make_stm", "pairs"]

#: What gradients are taken of, in the order of the operator's arguments.
GATES = ("query", "key", "value", "source", "transition", "mark", "direct")


class StmInputs(NamedTuple):
    """What `stm_scan` takes, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor
    transition: Tensor
    mark: Tensor
    direct: Tensor
    edge_index: Tensor
    line_edge_index: Tensor
    batch: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "StmInputs":
        return StmInputs(*(x.to(dtype) for x in self[:7]), *self[7:])

    def with_grad(self) -> "StmInputs":
        return StmInputs(
            *(x.detach().clone().requires_grad_() for x in self[:7]), *self[7:]
        )


def pairs(edge_index: Tensor) -> Tensor:
    """All pairs of an edge and one that begins where it ends."""
    edges = list(enumerate(edge_index.t().tolist()))
    found = [(a, b) for a, (_, w) in edges for b, (u, _) in edges if w == u]
    return torch.tensor(found, dtype=torch.long).view(-1, 2).t().contiguous()


def make_stm(
    edges: Sequence[tuple[int, int]] | Tensor,
    num_nodes: int,
    batch: Sequence[int] | Tensor | None = None,
    size: tuple[int, int, int, int] = (4, 2, 5, 3),
    *,
    components: int | None = None,
    line_edge_index: Tensor | None = None,
    seed: int = 0,
) -> StmInputs:
    """Random float64 inputs on a DAG; `size` is (heads, groups, N, P)."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    if not isinstance(edges, Tensor):
        edges = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    if batch is not None and not isinstance(batch, Tensor):
        batch = torch.tensor(batch, dtype=torch.long)
    lines = pairs(edges) if line_edge_index is None else line_edge_index
    heads, groups, states, channels = size
    E, L = edges.size(1), lines.size(1)
    J = () if components is None else (components,)
    return StmInputs(
        random(num_nodes, groups, states),
        random(num_nodes, groups, states),
        random(num_nodes, heads, channels),
        random(E, heads, *J),
        0.7 * random(L, heads, *J, *J),
        random(E, heads, *J),
        random(num_nodes, heads),
        edges,
        lines,
        batch,
    )


def loop_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    edge_index: Tensor,
    line_edge_index: Tensor,
    batch: Tensor | None = None,
) -> Tensor:
    """The recurrence, one edge after the other."""
    heads = value.size(1)
    query, key = (x.repeat_interleave(heads // x.size(1), 1) for x in (query, key))
    if source.dim() == 2:
        source, mark = source.unsqueeze(-1), mark.unsqueeze(-1)
        transition = transition[..., None, None]
    writes = key.unsqueeze(-1) * value.unsqueeze(-2)  # [V, heads, N, P]
    lines = line_edge_index.t().tolist()
    states: dict[int, Tensor] = {}

    def state(e: int) -> Tensor:
        """C_e, [heads, J, N, P]."""
        if e not in states:
            u = int(edge_index[0, e])
            total = source[e, :, :, None, None] * writes[u].unsqueeze(1)
            for x, (before, after) in enumerate(lines):
                if after == e:
                    moved = torch.einsum("hij,hjnp->hinp", transition[x], state(before))
                    total = total + moved
            states[e] = total
        return states[e]

    outs = []
    for w in range(value.size(0)):
        read = direct[w, :, None, None] * writes[w]
        for e in (edge_index[1] == w).nonzero().view(-1).tolist():
            read = read + (mark[e, :, :, None, None] * state(e)).sum(1)
        outs.append((query[w].unsqueeze(-1) * read).sum(-2))
    return torch.stack(outs) if outs else value


def assert_scan(
    function: Callable[..., Tensor], inputs: StmInputs, tol: float | None = None
) -> None:
    """The output and all seven gradients are those of the float64 oracle."""
    generator = torch.Generator().manual_seed(7)
    weigh = torch.randn(inputs.value.shape, generator=generator, dtype=torch.double)

    def run(f: Callable[..., Tensor], x: StmInputs) -> list[Tensor]:
        x = x.with_grad()
        out = f(*x)
        grads = torch.autograd.grad(
            out, x[:7], weigh.to(out.dtype), allow_unused=True, materialize_grads=True
        )
        return [out.detach(), *grads]

    expected = run(loop_scan, inputs.to(torch.double))
    got = run(function, inputs)
    for name, x, y in zip(("output", *GATES), got, expected, strict=True):
        assert x.dtype == inputs.value.dtype
        assert_near(x, y, tolerance(x.dtype) if tol is None else tol, name)
