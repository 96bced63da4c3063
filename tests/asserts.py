"""What must hold for every operator and layer on graphs."""

from collections.abc import Callable

import torch
from dense_layers import Graphs, dense
from torch import Tensor

__all__ = [
    "assert_batched_equals_single",
    "assert_is_formula",
    "assert_near",
    "assert_permutes",
    "formula",
    "tolerance",
]


def tolerance(dtype: torch.dtype) -> float:
    """How far from the oracle a result may be, relative to its largest entry."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]


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


#: (tensors of nodes, edge_index, tensors of edges, batch) -> tensor of nodes
Layer = Callable[
    [tuple[Tensor, ...], Tensor, tuple[Tensor, ...], Tensor | None], Tensor
]


def formula(conv: torch.nn.Module, x: Tensor, graphs: Graphs) -> Tensor:
    """The nodes that a layer returns, by its formula."""
    own = dict(conv.named_parameters()) | dict(conv.named_buffers())
    return dense(conv, own, x, graphs)[0]


def assert_is_formula(
    conv: torch.nn.Module, out: Tensor, x: Tensor, graphs: Graphs, tol: float = 1e-8
) -> None:
    """So are the gradients of everything."""
    expected = formula(conv, x, graphs)
    assert_near(out, expected)
    weigh = torch.randn_like(out)
    wrt = {"x": x, **dict(conv.named_parameters())}
    options = {"allow_unused": True, "materialize_grads": True}
    got, want = (
        torch.autograd.grad(y, list(wrt.values()), weigh, **options)
        for y in (out, expected)
    )
    noise = 1e-12 * max(y.abs().max() for y in want if y.numel())
    for name, a, b in zip(wrt, got, want, strict=True):
        if b.numel() and b.abs().max() < noise:  # zero, but for rounding errors
            assert a.abs().max() < noise, name
        else:
            assert_near(a, b, tol, name)


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
    needs_batch: bool = False,
) -> None:
    """A batch gives what its graphs give one by one; without `batch`, too, or not."""
    batches = (batch,) if needs_batch else (batch, None)
    outs = [function(nodes, edge_index, edges, b) for b in batches]
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
