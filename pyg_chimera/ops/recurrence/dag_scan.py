"""Linear recurrences on DAGs: on their nodes, on their edges, and on grids."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    check_edges,
    check_finite,
    check_floats,
    check_graph,
    check_indices,
    check_nodes,
    check_option,
    check_shape,
    in_one_dtype,
    trusted,
)
from pyg_chimera.ops.common.examples import Draw, Example, mixes
from pyg_chimera.ops.recurrence.choose import Recurrence
from pyg_chimera.ops.recurrence.cpu import sweep as numba_backend
from pyg_chimera.ops.recurrence.dense import scan as reference
from pyg_chimera.ops.recurrence.gpu import scan as triton_backend
from pyg_chimera.ops.recurrence.plain import scan as torch_backend
from pyg_chimera.ops.recurrence.plan.states import (
    GridStates,
    StateGraph,
    edge_states,
    node_states,
)
from pyg_chimera.ops.structure.grid import flat_sizes

States = StateGraph | GridStates

_FORMS = ("auto", "state", "chunk")


class Inputs(NamedTuple):
    """The inputs of the registered operators; gates are [any, heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor | None
    mark: Tensor | None
    transition: Tensor
    direct: Tensor | None = None
    edge_index: Tensor | None = None
    line_edge_index: Tensor | None = None
    batch: Tensor | None = None
    rank: Tensor | None = None
    num_components: int = 1
    sizes: list[int] | None = None  #: height and width of each grid
    orientations: list[int] | None = None  #: of grids
    form: str = "auto"
    backend: str = "auto"


class _StateScan(Recurrence[Inputs, States]):
    """An operator on a graph of states; one instance per public function."""

    inputs = Inputs
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "triton": triton_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__()

    def recipe(self, inputs: Inputs) -> Recipe:
        if inputs.orientations:
            options = (tuple(inputs.sizes or ()), tuple(inputs.orientations))
            return Recipe(GridStates, (), (*options, inputs.mark is None))
        edge_index, num_nodes = inputs.edge_index, inputs.value.size(0)
        if inputs.line_edge_index is None:
            tensors = (edge_index, inputs.batch, inputs.rank)
            return Recipe(node_states, tensors, (num_nodes,))
        tensors = (edge_index, inputs.line_edge_index, inputs.batch)
        return Recipe(edge_states, tensors, (num_nodes, inputs.num_components))

    def check(self, inputs: Inputs, structure: States) -> None:
        name, transition = "transition", inputs.transition
        if trusted() or math.isfinite(transition.sum().item()):  # then each entry is
            return
        place = "line edge", inputs.num_components**2
        if inputs.source is None:
            name, place = "edge_weight", ("edge", 1)
        elif inputs.orientations:  # gates of edges that do not exist are ignored
            graph = structure.graph
            rows = torch.from_numpy(graph.gates[2]).to(transition.device)  # type: ignore[index]
            ignored = torch.ones_like(transition, dtype=torch.bool)
            ignored[rows] = False
            transition = transition.masked_fill(ignored, 0)
            place = "node", transition.size(0) // graph.num_nodes
        check_finite(name, transition, lambda row: f"{place[0]} {row // place[1]}")


_dag_scan, _stm_scan, _grid_scan, _grid_dag_scan = map(
    _StateScan, ("dag_scan", "stm_scan", "grid_scan", "grid_dag_scan")
)


@_dag_scan.public(lambda draw: mixes(draw, "dag", "path"))
def dag_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None = None,
    *,
    form: str = "auto",
    backend: str = "auto",
    rank: Tensor | None = None,
) -> Tensor:
    r"""Runs a linear recurrence along a directed acyclic graph, from `"Chimera: State
    Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Section 4.1):

    .. math::
        \mathbf{H}_i = \sum_{j \to i} A_{ij} \mathbf{H}_j +
        \mathbf{k}_i \mathbf{v}_i^{\top}, \qquad
        \mathbf{y}_i = \mathbf{H}_i^{\top} \mathbf{q}_i.

    This is :func:`resolvent_mix` where :math:`\mathbf{I} - \mathbf{A}` is triangular: a
    single pass in topological order, for weights of any size. On a path, it is
    Mamba-2's SSD. Arguments, dtypes and gradients are those of :func:`resolvent_mix`.

    Args:
        query (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        key (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): :math:`[|\mathcal{V}|, H, P]`.
        edge_index (torch.Tensor): The edges of a DAG, integer
            :math:`[2, |\mathcal{E}|]`. Duplicates count.
        edge_weight (torch.Tensor): :math:`[|\mathcal{E}|, H]`.
        batch (torch.Tensor, optional): The graph of each node. (default: :obj:`None`)
        form (str, optional): :obj:`"state"`, :obj:`"chunk"` (matrix products in chunks
            of paths, with numba and triton) or :obj:`"auto"`. (default: :obj:`"auto"`)
        backend (str, optional): :obj:`"numba"`, :obj:`"triton"`, :obj:`"torch"`,
            :obj:`"reference"` or :obj:`"auto"`.
        rank (torch.Tensor, optional): A topological rank, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddTopologicalOrder`. Computed if absent.
            (default: :obj:`None`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        CycleError: If the graph has a cycle or a self-loop, which the error names. A
            :class:`ValueError`.
        ValueError: As for :func:`resolvent_mix`, and if :obj:`rank` does not increase
            along every edge.
        TypeError: If a tensor has the wrong dtype.
    """
    *floats, edge_index = check_graph(query, key, value, edge_index, edge_weight)
    q, k, v, w = in_one_dtype(floats)
    batch, rank = check_indices(value, batch=batch, rank=rank)
    check_option("form", form, _FORMS)
    graph = (edge_index, None, batch, rank)
    inputs = Inputs(q, k, v, None, None, w, None, *graph, form=form, backend=backend)
    return _dag_scan(inputs).to(value.dtype)


def _lines(draw: Draw) -> Iterator[Example]:
    for kind, parts in (("dag", ()), ("dag", (2,)), ("path", ())):
        graph = draw.graph(kind)
        tail, head = graph["edge_index"]
        lines = (head[:, None] == tail).nonzero().t().contiguous()
        yield {
            **draw.nodes(len(graph["batch"])),
            "source": draw(len(tail), 2, *parts),
            "transition": draw(lines.size(1), 2, *parts, *parts, scale=0.25),
            "mark": draw(len(tail), 2, *parts),
            "direct": draw(len(graph["batch"]), 2),
            "line_edge_index": lines,
            **graph,
        }


@_stm_scan.public(_lines)
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
    :math:`e^{\prime} \to e` are line edges: :math:`e^{\prime}` leads to :math:`u`. This
    is :func:`dag_scan` on a graph of states, one for each edge.

    For state tracking (Appendix A.5), a state has :math:`J` components: :math:`S_e` and
    :math:`M_e` are vectors, and :math:`T_{e^{\prime} e}` is a matrix.

    Differentiable once in the seven floating-point tensors. float16 and bfloat16 are
    computed in float32. The query is not scaled.

    Args:
        query (torch.Tensor): The queries, :math:`[|\mathcal{V}|, G, N]`. The number of
            groups :math:`G` divides the number of heads; the heads of a group share
            them.
        key (torch.Tensor): The keys, :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): The values, :math:`[|\mathcal{V}|, H, P]`.
        source (torch.Tensor): The source gates :math:`S`,
            :math:`[|\mathcal{E}|, H]`, or :math:`[|\mathcal{E}|, H, J]`.
        transition (torch.Tensor): The transitions :math:`T`,
            :math:`[|\mathcal{L}|, H]`, or :math:`[|\mathcal{L}|, H, J, J]`, where
            entry :math:`ij` leads from component :math:`j` to :math:`i`.
        mark (torch.Tensor): The mark gates :math:`M`,
            :math:`[|\mathcal{E}|, H]`, or :math:`[|\mathcal{E}|, H, J]`.
        direct (torch.Tensor): The direct gates :math:`D`,
            :math:`[|\mathcal{V}|, H]`.
        edge_index (torch.Tensor): The edges of a DAG, in any order, integer
            :math:`[2, |\mathcal{E}|]`. Duplicates are separate states. It may hold
            several DAGs over the same nodes, as long as the line edges form no cycle.
        line_edge_index (torch.Tensor): The line edges, integer
            :math:`[2, |\mathcal{L}|]`: all of :func:`line_graph`, or only some, such as
            those of a :func:`multitree`. Duplicates count.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. Used for speed only; without it,
            connected components are computed and used instead. (default: :obj:`None`)
        form (str, optional): :obj:`"state"`, :obj:`"chunk"` (where edges form paths) or
            :obj:`"auto"`, as in :func:`dag_scan`. (default: :obj:`"auto"`)
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"triton"` (GPU),
            :obj:`"torch"` (any device), :obj:`"reference"` (dense, slow, for tests).
            (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        CycleError: If line edges join a cycle of edges, or a self-loop, whose nodes the
            error names. A :class:`ValueError`.
        ValueError: If shapes disagree, an index is out of range, a line edge joins two
            edges without a common node or against their direction, an edge joins two
            graphs, a transition is not finite, or an option is unknown or incompatible.
        TypeError: If a tensor has the wrong dtype.
    """
    gates = {"source": source, "transition": transition, "mark": mark}
    q, k, v, S, T, M, D = check_floats(
        query=query, key=key, value=value, **gates, direct=direct
    )
    check_nodes(query, key, value)
    check_shape("direct", direct, "[nodes, heads]", list(value.shape[:2]))
    check_option("form", form, _FORMS)
    edge_index = check_edges("edge_index", edge_index, value)
    line_edge_index = check_edges("line_edge_index", line_edge_index, value)
    (batch,) = check_indices(value, batch=batch)
    edges = [edge_index.size(1), value.size(1)]
    line_edges = [line_edge_index.size(1), value.size(1)]
    J = source.size(2) if source.dim() == 3 else 1
    if source.dim() == 3:
        layout = "[edges, heads, components]"
        check_shape("source", source, layout, [*edges, J])
        check_shape("mark", mark, layout, [*edges, J])
        layout = "[line edges, heads, components, components]"
        check_shape("transition", transition, layout, [*line_edges, J, J])
        # Each component is a state of its own, [states * J, heads].
        S, M = (x.transpose(1, 2).flatten(0, 1) for x in (S, M))
        T = T.permute(0, 2, 3, 1).flatten(0, 2)
    else:
        check_shape("source", source, "[edges, heads]", edges)
        check_shape("mark", mark, "[edges, heads]", edges)
        check_shape("transition", transition, "[line edges, heads]", line_edges)
    graph = (edge_index, line_edge_index, batch, None, J)
    inputs = Inputs(q, k, v, S, M, T, D, *graph, form=form, backend=backend)
    return _stm_scan(inputs).to(value.dtype)


def _grids(draw: Draw, on_edges: bool) -> Iterator[Example]:
    for height, width in ((5, 7), (1, 70)):
        size = height * width
        inputs = {**draw.nodes(size), "height": height, "width": width}
        if on_edges:
            inputs["source"] = draw(size, 4, 2, 2)
            inputs["transition"] = draw(size, 4, 2, 2, 2, scale=0.25)
            inputs["mark"] = draw(size, 4, 2, 2)
            inputs["direct"] = draw(size, 2)
        else:
            inputs["source"] = draw(size, 4, 2)
            inputs["transition"] = draw(size, 4, 2, 2, scale=0.25)
        yield inputs


@_grid_scan.public(partial(_grids, on_edges=True))
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

    An orientation directs the edges of a grid along the rows (direction 0) and along
    the columns (direction 1):

    ===========  =====  =====  =====  =====
    orientation    0      1      2      3
    ===========  =====  =====  =====  =====
    direction 0  right  left   right  left
    direction 1  down   up     up     down
    ===========  =====  =====  =====  =====

    Gates belong to a node, an orientation and directions; those of edges that do not
    exist are ignored. The output is the sum over the orientations. A sequence is a grid
    of height 1. Images and sequences may have any size, and no graph has to be built.

    Args:
        query (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`, as in :func:`stm_scan`.
            The nodes of a grid are in row-major order, grid after grid.
        key (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): :math:`[|\mathcal{V}|, H, P]`.
        source (torch.Tensor): The source gates, from a node to its outgoing edge in
            each direction, :math:`[|\mathcal{V}|, O, 2, H]` for :math:`O` orientations
            (1, 2 or 4).
        transition (torch.Tensor): The transitions at a node: entry
            :obj:`[v, o, to, from]` is that from the incoming edge in direction
            :obj:`from` to the outgoing edge in direction :obj:`to`,
            :math:`[|\mathcal{V}|, O, 2, 2, H]`.
        mark (torch.Tensor): The mark gates, from the incoming edge in each direction
            to a node, :math:`[|\mathcal{V}|, O, 2, H]`.
        direct (torch.Tensor): The direct gates, from a node to itself, added once,
            :math:`[|\mathcal{V}|, H]`.
        height (int or torch.Tensor): The number of rows of each grid, integer
            :math:`[\textrm{grids}]`, or one number for all.
        width (int or torch.Tensor): The number of columns of each grid.
        form (str, optional): As in :func:`stm_scan`, or :obj:`"mask"` (matrix products
            for each grid, with numba). (default: :obj:`"auto"`)
        backend (str, optional): As in :func:`stm_scan`. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        ValueError: If shapes disagree, sizes of grids do not match the number of nodes,
            a transition is not finite, or an option is unknown or incompatible.
        TypeError: If a tensor has the wrong dtype.
    """
    gates = {"source": source, "transition": transition, "mark": mark}
    q, k, v, S, T, M, D = check_floats(
        query=query, key=key, value=value, **gates, direct=direct
    )
    check_nodes(query, key, value)
    check_shape("direct", direct, "[nodes, heads]", list(value.shape[:2]))
    check_option("form", form, (*_FORMS, "mask"))
    if source.dim() != 4 or source.size(1) not in (1, 2, 4):
        raise ValueError(
            "'source' must be [nodes, orientations, 2, heads] with 1, 2 or 4 "
            f"orientations, got {list(source.shape)}"
        )
    nodes, number, heads = value.size(0), source.size(1), value.size(1)
    layout, shape = "[nodes, orientations, 2, heads]", [nodes, number, 2, heads]
    check_shape("source", source, layout, shape)
    check_shape("mark", mark, layout, shape)
    layout, shape = "[nodes, orientations, 2, 2, heads]", [nodes, number, 2, 2, heads]
    check_shape("transition", transition, layout, shape)
    inputs = Inputs(
        *(q, k, v, S.flatten(0, 2), M.flatten(0, 2), T.flatten(0, 3), D),
        sizes=flat_sizes(height, width, value),
        orientations=list(range(number)),
        form=form,
        backend=backend,
    )
    return _grid_scan(inputs).to(value.dtype)


@_grid_dag_scan.public(partial(_grids, on_edges=False))
def grid_dag_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    height: int | Tensor,
    width: int | Tensor,
    *,
    orientations: Sequence[int] | None = None,
    form: str = "auto",
    backend: str = "auto",
) -> Tensor:
    r"""Runs :func:`dag_scan` on regular grids, in up to four orientations, from
    `"Chimera: State Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_
    (Section 5):

    .. math::
        \mathbf{H}^o_i = \sum_{d} T^o_{id} \mathbf{H}^o_{p(i, o, d)} +
        S^o_i \mathbf{k}_i \mathbf{v}_i^{\top}, \qquad
        \mathbf{y}_i = \sum_o {\mathbf{H}^o_i}^{\top} \mathbf{q}_i,

    where node :math:`i` comes after node :math:`p(i, o, d)` in direction :math:`d` of
    orientation :math:`o`: along the row or along the column, as in the table of
    :func:`grid_scan`. There, states are on edges; here, they are on nodes. A sequence
    is a grid of height 1.

    Transitions from nodes that do not exist are ignored. No graph has to be built.
    Dtypes and gradients are those of :func:`stm_scan`.

    Args:
        query (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`, as in :func:`grid_scan`.
        key (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): :math:`[|\mathcal{V}|, H, P]`.
        source (torch.Tensor): The source gates :math:`S`, which scale what a node
            writes, :math:`[|\mathcal{V}|, O, H]` for :math:`O` orientations.
        transition (torch.Tensor): The transitions :math:`T` to a node, from the one
            before it in each direction, :math:`[|\mathcal{V}|, O, 2, H]`.
        height (int or torch.Tensor): As in :func:`grid_scan`.
        width (int or torch.Tensor): As in :func:`grid_scan`.
        orientations (Sequence[int], optional): The orientations to which the gates
            belong, in this order; orientations with other queries and keys need a
            separate call. (default: :obj:`None`, the first ones)
        form (str, optional): As in :func:`dag_scan`. (default: :obj:`"auto"`)
        backend (str, optional): As in :func:`dag_scan`. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        ValueError: If shapes disagree, sizes of grids do not match the number of nodes,
            a transition is not finite, orientations are not distinct numbers from 0 to
            3, or an option is unknown or incompatible.
        TypeError: If a tensor has the wrong dtype.
    """
    q, k, v, S, T = check_floats(
        query=query, key=key, value=value, source=source, transition=transition
    )
    check_nodes(query, key, value)
    check_option("form", form, _FORMS)
    if source.dim() != 3 or not 1 <= source.size(1) <= 4:
        raise ValueError(
            "'source' must be [nodes, orientations, heads] with 1 to 4 orientations, "
            f"got {list(source.shape)}"
        )
    number = source.size(1)
    if orientations is None:
        orientations = range(number)
    if not (
        isinstance(orientations, Sequence)
        and all(type(o) is int and 0 <= o < 4 for o in orientations)
        and len(set(orientations)) == len(orientations) == number
    ):
        raise ValueError(
            f"'orientations' must be {number} of (0, 1, 2, 3), one for each that "
            f"'source' has, each once, got {orientations!r}"
        )
    shape = [value.size(0), number, value.size(1)]
    check_shape("source", source, "[nodes, orientations, heads]", shape)
    shape.insert(2, 2)
    check_shape("transition", transition, "[nodes, orientations, 2, heads]", shape)
    inputs = Inputs(
        *(q, k, v, S.flatten(0, 1), None, T.flatten(0, 2)),
        sizes=flat_sizes(height, width, value),
        orientations=list(orientations),
        form=form,
        backend=backend,
    )
    return _grid_dag_scan(inputs).to(value.dtype)
