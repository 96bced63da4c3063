"""The public operators with states on edges: checks, states, the registered op."""

from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple, Sequence  # noqa: UP035 (for PyTorch 2.5)

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.resolvent import cost, numba_scan
from pyg_chimera.ops.resolvent.mix import (
    Choice,
    Plan,
    check_device,
    check_floats,
    check_nodes,
    check_options,
    check_shape,
    make_plan,
    promoted,
)
from pyg_chimera.ops.scan import numba_mask
from pyg_chimera.ops.scan.numba_mask import Nodes, block_nodes
from pyg_chimera.ops.scan.reference import reference_scan
from pyg_chimera.ops.scan.states import (
    GridStates,
    States,
    edge_states,
    expanded_states,
    grid_states,
)
from pyg_chimera.ops.structure.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.elimination import to_numpy
from pyg_chimera.ops.structure.errors import CycleError
from pyg_chimera.ops.structure.line_graph import check_line_edges
from pyg_chimera.ops.structure.system import System, make_system, remembered

__all__ = ["explain_grid_scan", "explain_stm_scan", "grid_scan", "stm_scan"]


def stm_scan(
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
    *,
    form: str = "auto",
    backend: str = "auto",
) -> Tensor:
    r"""Runs a linear recurrence along the edges of a directed acyclic graph, from
    `"pLSTM: parallelizable Linear Source Transition Mark networks"
    <https://arxiv.org/abs/2506.11997>`_ (Equations 5 and 6):

    .. math::
        \mathbf{C}_e = \sum_{e^{\prime} \to e} T_{e^{\prime} e}
        \mathbf{C}_{e^{\prime}} + S_e \mathbf{k}_u \mathbf{v}_u^{\top}, \qquad
        \mathbf{y}_w = \Bigl( \sum_{e \in \mathrm{in}(w)} M_e \mathbf{C}_e + D_w
        \mathbf{k}_w \mathbf{v}_w^{\top} \Bigr)^{\top} \mathbf{q}_w

    for each head, where the edge :math:`e` leads from :math:`u` to :math:`w`, and
    :math:`e^{\prime} \to e` are line edges: :math:`e^{\prime}` leads to :math:`u`. It
    is :func:`dag_scan` on a graph of states: one state for each edge.

    For state tracking (Appendix A.5), a state has :math:`J` components: :math:`S_e` and
    :math:`M_e` are vectors, and :math:`T_{e^{\prime} e}` is a matrix.

    Differentiable once in the seven tensors of floating point. float16 and bfloat16
    are computed in float32. The query is not scaled.

    Args:
        query (torch.Tensor): What a node reads, :math:`[|\mathcal{V}|, G, N]`, with as
            many groups :math:`G` as heads, or a divisor (then heads share it).
        key (torch.Tensor): Under what a node writes, :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): What a node writes, :math:`[|\mathcal{V}|, H, P]`.
        source (torch.Tensor): How much of it an edge takes from its source,
            :math:`[|\mathcal{E}|, H]`, or :math:`[|\mathcal{E}|, H, J]`.
        transition (torch.Tensor): How much goes from edge to edge,
            :math:`[|\mathcal{L}|, H]`, or :math:`[|\mathcal{L}|, H, J, J]`, where
            entry :math:`ij` leads from component :math:`j` to :math:`i`.
        mark (torch.Tensor): How much an edge gives to its target,
            :math:`[|\mathcal{E}|, H]`, or :math:`[|\mathcal{E}|, H, J]`.
        direct (torch.Tensor): How much of its own a node reads,
            :math:`[|\mathcal{V}|, H]`.
        edge_index (torch.Tensor): The edges of a DAG, in any order, integer
            :math:`[2, |\mathcal{E}|]`. Duplicates are states of their own. Several
            DAGs over the same nodes may lie side by side, as long as no line edge
            leads from one to another.
        line_edge_index (torch.Tensor): From which edge to which, integer
            :math:`[2, |\mathcal{L}|]`: all of :func:`line_graph`, or some, such as
            those of a :func:`multitree`. Duplicates count.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order: a hint for speed. Without it,
            connected components are found and used. (default: :obj:`None`)
        form (str, optional): :obj:`"state"`, :obj:`"mask"` or :obj:`"auto"`, as in
            :func:`dag_scan`. (default: :obj:`"auto"`)
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"torch"` (any device),
            :obj:`"reference"` (dense, slow, for tests). (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        CycleError: If a cycle of edges, or a self-loop, is joined by line edges; its
            nodes are named. A :class:`ValueError`.
        ValueError: If shapes disagree, an index is out of range, a line edge joins
            two edges without a common node or against their direction, an edge joins
            two graphs, a transition is not finite, or an option is unknown or does not
            fit.
        TypeError: If a tensor has a wrong dtype.
    """
    call = _stm_call(
        query, key, value, source, transition, mark, direct, edge_index,
        line_edge_index, batch, form, backend,
    )  # fmt: skip
    return _scan(call, value.dtype)


def grid_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    height: int | Tensor,
    width: int | Tensor,
    *,
    form: str = "auto",
    backend: str = "auto",
) -> Tensor:
    r"""Runs :func:`stm_scan` on regular grids, in up to four orientations, from
    `"pLSTM: parallelizable Linear Source Transition Mark networks"
    <https://arxiv.org/abs/2506.11997>`_ (Section 4.3).

    An orientation leads every edge of a grid one way along the rows (direction 0) and
    one way along the columns (direction 1):

    ===========  =====  =====  =====  =====
    orientation    0      1      2      3
    ===========  =====  =====  =====  =====
    direction 0  right  left   right  left
    direction 1  down   up     up     down
    ===========  =====  =====  =====  =====

    Gates belong to a node, an orientation and directions; those of edges that a grid
    does not have are ignored. The output is the sum over the orientations. A sequence
    is a grid of height 1. No graph has to be built: this is what to use for images and
    sequences of any size.

    Args:
        query (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`, as in :func:`stm_scan`.
            The nodes of a grid are in row-major order, grid after grid.
        key (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): :math:`[|\mathcal{V}|, H, P]`.
        source (torch.Tensor): How much of what a node writes goes into the edge that
            leaves it in each direction, :math:`[|\mathcal{V}|, O, 2, H]` for :math:`O`
            orientations (1, 2 or 4).
        transition (torch.Tensor): How much goes on at a node, in
            :obj:`[v, o, to, from]` from the edge that arrived in direction :obj:`from`
            to the edge that leaves in direction :obj:`to`,
            :math:`[|\mathcal{V}|, O, 2, 2, H]`.
        mark (torch.Tensor): How much a node reads of the edge that arrived in each
            direction, :math:`[|\mathcal{V}|, O, 2, H]`.
        direct (torch.Tensor): How much of its own a node reads, once,
            :math:`[|\mathcal{V}|, H]`.
        height (int or torch.Tensor): The rows of each grid, integer
            :math:`[\textrm{grids}]`, or one number if all are alike.
        width (int or torch.Tensor): The columns of each grid.
        form (str, optional): As in :func:`stm_scan`. (default: :obj:`"auto"`)
        backend (str, optional): As in :func:`stm_scan`. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        ValueError: If shapes disagree, grids and nodes are not of the same number, a
            transition is not finite, or an option is unknown or does not fit.
        TypeError: If a tensor has a wrong dtype.
    """
    call = _grid_call(
        query, key, value, source, transition, mark, direct, height, width, form,
        backend,
    )  # fmt: skip
    return _scan(call, value.dtype)


def explain_stm_scan(
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
    *,
    form: str = "auto",
    backend: str = "auto",
) -> Choice:
    """What `explain` says of `stm_scan`."""
    call = _stm_call(
        query, key, value, source, transition, mark, direct, edge_index,
        line_edge_index, batch, form, backend,
    )  # fmt: skip
    return _explained("stm_scan", call)


def explain_grid_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    height: int | Tensor,
    width: int | Tensor,
    *,
    form: str = "auto",
    backend: str = "auto",
) -> Choice:
    """What `explain` says of `grid_scan`."""
    call = _grid_call(
        query, key, value, source, transition, mark, direct, height, width, form,
        backend,
    )  # fmt: skip
    return _explained("grid_scan", call)


# -------------------------------------------------------------------------- the calls


class _EdgeStates(NamedTuple):
    """A call's states: on the edges of a DAG."""

    edge_index: Tensor
    line_edge_index: Tensor
    batch: Tensor | None
    size: int  #: components of a state

    def arguments(self) -> tuple:
        return *self, []


class _GridStates(NamedTuple):
    """A call's states: on the edges of grids."""

    sizes: tuple[tuple[int, int], ...]
    num_orientations: int
    size: int = 1  #: components of a state

    def arguments(self) -> tuple:
        return None, None, None, 1, [self.num_orientations, *chain(*self.sizes)]


class _Call(NamedTuple):
    """Checked arguments; gates are [any, heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor
    mark: Tensor
    transition: Tensor
    direct: Tensor
    graph: _EdgeStates | _GridStates
    form: str
    backend: str

    def arguments(self) -> tuple:
        """Those of the registered operator."""
        return *self[:6], *self.graph.arguments(), self.form, self.backend


def _stm_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    edge_index: Tensor,
    line_edge_index: Tensor,
    batch: Tensor | None,
    form: str,
    backend: str,
) -> _Call:
    _check_stm(
        query, key, value, source, transition, mark, direct, edge_index,
        line_edge_index,
    )  # fmt: skip
    check_options(form, backend)
    tensors = promoted(query, key, value, source, transition, mark, direct)
    query, key, value, source, transition, mark, direct = tensors
    size = 1
    if source.dim() == 3:
        # Components are states of their own, [states * J, heads].
        size = source.size(2)
        source, mark = (x.transpose(1, 2).flatten(0, 1) for x in (source, mark))
        transition = transition.permute(0, 2, 3, 1).flatten(0, 2)
    graph = _EdgeStates(edge_index.long(), line_edge_index.long(), batch, size)
    return _Call(
        query, key, value, source, mark, transition, direct, graph, form, backend
    )


def _grid_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    height: int | Tensor,
    width: int | Tensor,
    form: str,
    backend: str,
) -> _Call:
    sizes = _check_grid(
        query, key, value, source, transition, mark, direct, height, width
    )
    check_options(form, backend)
    tensors = promoted(query, key, value, source, transition, mark, direct)
    query, key, value, source, transition, mark, direct = tensors
    graph = _GridStates(sizes, source.size(1))
    source, mark = source.flatten(0, 2), mark.flatten(0, 2)
    transition = transition.flatten(0, 3)
    return _Call(
        query, key, value, source, mark, transition, direct, graph, form, backend
    )


def _scan(call: _Call, dtype: torch.dtype) -> Tensor:
    query, key, value, direct = call.query, call.key, call.value, call.direct
    with torch.autocast(value.device.type, enabled=False):
        if call.backend == "reference":
            graph = _resolve(value.size(0), value.device, *call.graph.arguments())
            gates = graph.select(call.source, call.mark, call.transition)
            _check_finite(graph, call.transition, gates[2], call.graph.size)
            source, mark, transition = gates
            out = reference_scan(
                query, key, value, source, mark, transition, graph.states
            )
        else:
            out = _scan_op(*call.arguments())
        scores = (query * key).sum(-1)
        scores = scores.repeat_interleave(value.size(1) // scores.size(1), 1)
        out = out + (scores * direct).unsqueeze(-1) * value
    return out.to(dtype)


def _explained(operator: str, call: _Call) -> Choice:
    if call.backend == "reference":
        _resolve(call.value.size(0), call.value.device, *call.graph.arguments())
        return Choice(operator, "dense", "mask", "reference", "asked for")
    with torch.no_grad():
        return _plan(*call.arguments())[0]


# ---------------------------------------------------------------------------- checks


def _check_stm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    edge_index: Tensor,
    line_edge_index: Tensor,
) -> None:
    """What can be checked without looking into a tensor, so also while tracing."""
    check_floats(
        query=query, key=key, value=value, source=source, transition=transition,
        mark=mark, direct=direct,
    )  # fmt: skip
    check_nodes(query, key, value)
    check_shape("direct", direct, "[nodes, heads]", list(value.shape[:2]))
    for name, x in {
        "edge_index": edge_index,
        "line_edge_index": line_edge_index,
    }.items():
        if x.dim() != 2 or x.size(0) != 2:
            raise ValueError(f"'{name}' must be [2, edges], got {list(x.shape)}")
        if x.is_floating_point() or x.dtype == torch.bool:
            raise TypeError(f"'{name}' must be integer, got {x.dtype}")
    heads = value.size(1)
    edges, line_edges = edge_index.size(1), line_edge_index.size(1)
    if source.dim() == 3:
        size = source.size(2)
        layout = "[edges, heads, components]"
        check_shape("source", source, layout, [edges, heads, size])
        check_shape("mark", mark, layout, [edges, heads, size])
        check_shape(
            "transition", transition, "[line edges, heads, components, components]",
            [line_edges, heads, size, size],
        )  # fmt: skip
    else:
        check_shape("source", source, "[edges, heads]", [edges, heads])
        check_shape("mark", mark, "[edges, heads]", [edges, heads])
        check_shape(
            "transition", transition, "[line edges, heads]", [line_edges, heads]
        )


def _check_grid(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    height: int | Tensor,
    width: int | Tensor,
) -> tuple[tuple[int, int], ...]:
    """Checks all arguments; returns the height and width of each grid."""
    check_floats(
        query=query, key=key, value=value, source=source, transition=transition,
        mark=mark, direct=direct,
    )  # fmt: skip
    check_nodes(query, key, value)
    check_shape("direct", direct, "[nodes, heads]", list(value.shape[:2]))
    nodes, heads = value.shape[:2]
    if source.dim() != 4 or source.size(1) not in (1, 2, 4):
        raise ValueError(
            "'source' must be [nodes, orientations, 2, heads] with 1, 2 or 4 "
            f"orientations, got {list(source.shape)}"
        )
    orientations = source.size(1)
    layout = "[nodes, orientations, 2, heads]"
    check_shape("source", source, layout, [nodes, orientations, 2, heads])
    check_shape("mark", mark, layout, [nodes, orientations, 2, heads])
    check_shape(
        "transition", transition, "[nodes, orientations, 2, 2, heads]",
        [nodes, orientations, 2, 2, heads],
    )  # fmt: skip
    lists = []
    for name, x in {"height": height, "width": width}.items():
        numbers = x.view(-1).tolist() if isinstance(x, Tensor) else [x]
        wrong = [n for n in numbers if not isinstance(n, Integral) or n < 1]
        if wrong:
            raise ValueError(
                f"'{name}' must be a positive integer, or a vector of them, got "
                f"{wrong[0]!r}"
            )
        lists.append(numbers)
    heights, widths = lists
    if not isinstance(height, Tensor):
        heights = heights * len(widths)
    if not isinstance(width, Tensor):
        widths = widths * len(heights)
    count = len(heights)
    if len(heights) != len(widths):
        raise ValueError(
            f"'height' and 'width' must be of as many grids, got {len(heights)} and "
            f"{len(widths)}"
        )
    covered = sum(h * w for h, w in zip(heights, widths, strict=True))
    plain = not isinstance(height, Tensor) and not isinstance(width, Tensor)
    if plain and nodes % covered == 0:  # grids that are all alike
        return ((heights[0], widths[0]),) * (nodes // covered)
    if covered != nodes:
        raise ValueError(
            f"'height' and 'width' must be of grids of {nodes} nodes in all, got "
            f"{covered} in {count} grid{'s' * (count != 1)}"
        )
    return tuple(zip(heights, widths, strict=True))


# ------------------------------------------------------------------------- the states


class _Graph:
    """What a call runs on.

    Args:
        num_nodes: The number of nodes.
        states: The states.
        system: Their system.
        grids: Where the gates of the states are, if they are not in order.
    """

    def __init__(
        self,
        num_nodes: int,
        states: States,
        system: System,
        grids: GridStates | None = None,
    ) -> None:
        self.num_nodes, self.states = num_nodes, states
        self.system, self.grids = system, grids
        nodes = 2 * system.node.nbytes  # about what those of the blocks will take
        arrays = sum(x.nbytes for x in system if isinstance(x, np.ndarray))
        self.nbytes = nodes + arrays + sum(x.nbytes for x in states)

    @cached_property
    def nodes(self) -> Nodes:
        """The nodes that the states of each block join."""
        return block_nodes(self.system, *self.states[:2], self.num_nodes)

    def select(self, source: Tensor, mark: Tensor, transition: Tensor) -> list[Tensor]:
        """The gates of the states and of the edges between them."""
        gates = [source, mark, transition]
        if self.grids is None:
            return gates
        return [x[index] for x, index in zip(gates, self.grids[1:], strict=True)]

    def spread(
        self, grads: tuple[Tensor, ...], like: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """The other way; gates that nobody has asked for have gradient zero."""
        if self.grids is None:
            return list(grads)
        return [
            torch.zeros_like(x).index_copy_(0, index, grad)
            for x, index, grad in zip(like, self.grids[1:], grads, strict=True)
        ]


def _checked_edges(
    edge_index: Tensor,
    line_edge_index: Tensor,
    batch: Tensor | None,
    num_nodes: int,
    size: int,
) -> _Graph:
    """What to run on for the edges of a DAG, or what is wrong with them."""
    check_edge_index(edge_index, num_nodes)
    check_line_edges(line_edge_index, edge_index.size(1))
    tail, head = line_edge_index
    left, entered = edge_index[1, tail], edge_index[0, head]
    wrong = (left != entered).nonzero()
    if wrong.numel():
        x = int(wrong[0])
        a, b = int(tail[x]), int(head[x])
        shown = [f"edge {e} ({' -> '.join(map(str, edge_index[:, e].tolist()))})"
                 for e in (a, b)]  # fmt: skip
        backwards = bool(edge_index[1, b] == edge_index[0, a])
        raise ValueError(
            f"'line_edge_index' must lead from an edge to one that begins where it "
            f"ends, but line edge {x} leads from {shown[0]} to {shown[1]}"
            + (
                ": it runs against the graph. Is row 0 the edge that is left?"
                if backwards
                else ". Is it of another edge list, or of another order of its edges? "
                "'pyg_chimera.ops.line_graph' makes it anew"
            )
        )
    if batch is None:
        part = connected_components(edge_index.cpu(), num_nodes)
    else:
        check_batch(batch, num_nodes)
        part = batch.cpu()
        col, row = to_numpy(edge_index)
        check_within_graphs(col, row, part.numpy())
    states = expanded_states(edge_states(edge_index, line_edge_index), size)
    try:
        return _Graph(num_nodes, states, _system(states, part))
    except CycleError as error:
        edges = [state // size for state in error.cycle]
        raise CycleError(edge_index[0, edges].tolist()) from None


def _system(states: States, part: Tensor) -> System:
    """The system of the states, in blocks that share no node."""
    batch = part[states.writer.cpu()]
    return make_system(states.edge_index, batch, None, states.writer.numel(), True)


def _grid_graph(
    sizes: tuple[tuple[int, int], ...], num_orientations: int, device: torch.device
) -> _Graph:
    """What to run on for grids."""
    grids = grid_states(sizes, num_orientations)
    nodes = torch.tensor([h * w for h, w in sizes], dtype=torch.int64)
    part = torch.arange(len(sizes)).repeat_interleave(nodes)
    system = _system(grids.states, part)
    grids = GridStates(
        States(*(x.to(device) for x in grids.states)),
        *(x.to(device) for x in grids[1:]),
    )
    return _Graph(int(nodes.sum()), grids.states, system, grids)


# ------------------------------------------------------------- the registered operator


def _resolve(
    num_nodes: int,
    device: torch.device,
    edge_index: Tensor | None,
    line_edge_index: Tensor | None,
    batch: Tensor | None,
    size: int,
    grids: Sequence[int],
) -> _Graph:
    """What a call runs on, on its device."""
    if edge_index is not None:
        tensors = (edge_index, line_edge_index, batch)
        return remembered(_checked_edges, tensors, num_nodes, size)
    sizes = tuple(zip(grids[1::2], grids[2::2], strict=True))
    return remembered(_grid_graph, (), sizes, grids[0], device)


def _check_finite(
    graph: _Graph, transition: Tensor, selected: Tensor, size: int
) -> None:
    finite = torch.isfinite(selected)
    if not bool(finite.all()):
        x, h = (~finite).nonzero()[0].tolist()
        place = f"line edge {x // size**2}"
        if graph.grids is not None:
            x = int(graph.grids.transition[x])
            place = f"node {x // (transition.size(0) // graph.num_nodes)}"
        raise ValueError(
            f"'transition' must be finite, but at {place} it is "
            f"{transition[x, h].item()} in head {h}"
        )


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    mark: Tensor,
    transition: Tensor,
    edge_index: Tensor | None,
    line_edge_index: Tensor | None,
    batch: Tensor | None,
    size: int,
    grids: Sequence[int],
    form: str,
    backend: str,
) -> tuple[Choice, Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]:
    """How to compute a call, with query, key and value, and its gradients."""
    check_device(backend, value.device)
    graph = _resolve(
        value.size(0), value.device, edge_index, line_edge_index, batch, size, grids
    )
    gates = graph.select(source, mark, transition)
    _check_finite(graph, transition, gates[2], size)
    arguments: tuple
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    operator = "grid_scan" if grids else "stm_scan"
    shape = cost.Shape(query.size(1), value.size(1), query.size(2), value.size(2))
    numba = backend == "numba" or (backend == "auto" and value.device.type == "cpu")
    reason = ""
    if numba and form == "auto":
        form, reason = cost.cheaper_scan(graph.system, graph.nodes.ptr, shape)
    if numba:
        reason = reason or ("tensors on cpu" if backend == "auto" else "asked for")
        choice = Choice(operator, "sparse", form, "numba", reason)
        if form == "mask":
            arguments = (graph.system, graph.nodes, *gates)
            forward, backward = numba_mask.mask_forward, numba_mask.mask_backward
        else:
            written = numba_scan.Gates(*graph.states[:2], *gates[:2])
            arguments = (graph.system, written, gates[2])
            forward, backward = numba_scan.state_forward, numba_scan.state_backward
    else:
        # States take copies of what their nodes write.
        plan = make_plan(
            operator, graph.system, shape._replace(groups=shape.heads),
            graph.states.edge_index, gates[2], "auto", form, backend,
        )  # fmt: skip
        choice = plan.choice
        arguments = (plan, graph.states, *gates[:2])
        forward, backward = _copied_forward, _copied_backward

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        *nodes, ds, dm, dw = backward(*arguments, *inputs)
        return *nodes, *graph.spread((ds, dm, dw), (source, mark, transition))

    return choice, partial(forward, *arguments), gradients


def _copies(
    states: States, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of each state, [S, heads, channels]."""
    repeats = value.size(1) // query.size(1)
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    return query[states.reader], key[states.writer], value[states.writer]


def _copied_forward(
    plan: Plan,
    states: States,
    source: Tensor,
    mark: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    q, k, v = _copies(states, query, key, value)
    y = plan.forward(mark.unsqueeze(-1) * q, source.unsqueeze(-1) * k, v)
    return torch.zeros_like(value).index_add_(0, states.reader, y)


def _copied_backward(
    plan: Plan,
    states: States,
    source: Tensor,
    mark: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> tuple[Tensor, ...]:
    q, k, v = _copies(states, query, key, value)
    source, mark = source.unsqueeze(-1), mark.unsqueeze(-1)
    dq, dk, dv, dw = plan.backward(mark * q, source * k, v, grad[states.reader])
    groups = query.size(1)
    outs = []
    for x, node in ((mark * dq, states.reader), (source * dk, states.writer)):
        x = x.unflatten(1, (groups, -1)).sum(2)
        outs.append(torch.zeros_like(query).index_add_(0, node, x))
    grad_value = torch.zeros_like(value).index_add_(0, states.writer, dv)
    return *outs, grad_value, (k * dk).sum(-1), (q * dq).sum(-1), dw


@torch.library.custom_op("pyg_chimera::scan", mutates_args=())
def _scan_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    mark: Tensor,
    transition: Tensor,
    edge_index: Tensor | None,
    line_edge_index: Tensor | None,
    batch: Tensor | None,
    size: int,
    grids: Sequence[int],
    form: str,
    backend: str,
) -> Tensor:
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        _, forward, _ = _plan(
            query, key, value, source, mark, transition, edge_index, line_edge_index,
            batch, size, grids, form, backend,
        )  # fmt: skip
        return forward(query, key, value).contiguous()


@_scan_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: object) -> Tensor:
    return value.new_empty(value.shape)


@torch.library.custom_op("pyg_chimera::scan_backward", mutates_args=())
def _scan_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    mark: Tensor,
    transition: Tensor,
    edge_index: Tensor | None,
    line_edge_index: Tensor | None,
    batch: Tensor | None,
    size: int,
    grids: Sequence[int],
    form: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        _, _, backward = _plan(
            query, key, value, source, mark, transition, edge_index, line_edge_index,
            batch, size, grids, form, backend,
        )  # fmt: skip
        grads = backward(query, key, value, grad)
        dq, dk, dv, ds, dm, dw = (x.contiguous() for x in grads)
        return dq, dk, dv, ds, dm, dw


@_scan_backward_op.register_fake
def _(
    grad: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, ds, dm, dw = (x.new_empty(x.shape) for x in inputs[:6])
    return dq, dk, dv, ds, dm, dw


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    tensors, ctx.options = inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    grads = _scan_backward_op(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * 7


_scan_op.register_autograd(_backward, setup_context=_setup_context)
