import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj
from torch_geometric.utils import softmax

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_channels,
    check_inputs,
    edge_features,
    for_each_dag,
    has_edge_mask,
    may_be_divided,
)
from pyg_chimera.nn.conv._init import GateLinear
from pyg_chimera.nn.conv._plstm_block import PLSTMBlock
from pyg_chimera.ops import householder_product, line_graph, multitree, stm_scan
from pyg_chimera.ops.common.checks import (
    check_edges,
    check_flag,
    check_integer,
    check_option,
    trusted,
)
from pyg_chimera.ops.common.memory import check_memory
from pyg_chimera.ops.structure.line_graph import check_line_edges, ordered_dags
from pyg_chimera.ops.structure.node_order import dag_halves

__all__ = ["PLSTMConv"]


class _DAGs(NamedTuple):
    """All DAGs of a call as one graph: node v in DAG d of D is its node v * D + d."""

    number: int
    edge_index: Tensor  # [2, E]
    line_edge_index: Tensor  # [2, L], turns between the DAGs included
    kept: Tensor | None  # [L], mask of a multitree, if its line edges are not selected
    edge_attr: Tensor | None  # [E, edge_dim]
    mask: Tensor | None  # [E, 1], an explainer's


class PLSTMConv(PLSTMBlock):
    r"""The pLSTM layer for directed acyclic graphs, and for graphs with ordered nodes,
    from `"pLSTM: parallelizable Linear Source Transition Mark networks"
    <https://arxiv.org/abs/2506.11997>`_: a linear recurrence whose states live on the
    edges, so that a signal can keep its direction.

    .. math::
        \mathbf{C}_e = \sum_{e^{\prime} \rightarrow e} T_{e^{\prime} e}
        \mathbf{C}_{e^{\prime}} + S_e \mathbf{k}_u \mathbf{v}_u^{\top}, \qquad
        \mathbf{x}^{\prime}_w = \mathbf{W}_{\textrm{out}} \, \textrm{RMSNorm} \Big(
        \mathbf{q}_w^{\top} \big( \sum_{e \rightarrow w} M_e \mathbf{C}_e + D_w
        \mathbf{k}_w \mathbf{v}_w^{\top} \big) \Big)

    for edges :math:`e = (u, w)`, where :math:`\mathbf{q}, \mathbf{k}, \mathbf{v}` are
    projections of the nodes. The source, mark and direct gates :math:`S, M, D` are
    sigmoids of the nodes (for an edge, of both its ends) and, with :obj:`edge_dim`, of
    the edge. The transitions :math:`T` come from decays :math:`g = \tanh(5 \cdot)` of
    the three nodes and both edges. How they stay bounded depends on the :obj:`mode`:

    * :obj:`"P"`, propagation: :math:`T_{e^{\prime} e} = g \, \alpha_e` with a softmax
      :math:`\alpha` over the edges of a DAG that leave a node, so that the sum of a
      signal over the edges of a DAG does not grow (with :obj:`turns`, what turns is
      added to the first DAG at each step).
    * :obj:`"D"`, distribution: :math:`T_{e^{\prime} e} = g`, on a part of the line
      graph in which at most one path joins any two edges
      (:func:`~pyg_chimera.ops.multitree`).

    Each of several DAGs has its own gates, and their outputs are averaged. Along a
    single DAG, a node is influenced by its ancestors only. Unless this is intended, add
    its reverse as a second DAG. Other graphs are divided into two DAGs by an
    :obj:`order` of their nodes. A signal that comes to a node from a later one then
    also turns to other later ones, from the second DAG to the first. In an undirected
    graph ordered by :obj:`"bfs"`, each node thus influences all others of its component
    (under :obj:`"D"`, on graphs with cycles, most of them). The layer is a mixer: the
    residual connection, dropout and a second, wider projection belong to the layer
    around it, such as :class:`~pyg_chimera.nn.GPSLayer`. For images and sequences,
    there is :class:`~pyg_chimera.nn.PLSTMGridConv`.

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own gates; divides
            :obj:`out_channels`. (default: the largest of 4, 2 and 1 that does)
        state_channels (int, optional): Size of :math:`\mathbf{q}_i` and
            :math:`\mathbf{k}_i` of a head. (default: :obj:`out_channels // heads`)
        num_dags (int, optional): The number of given DAGs. (default: :obj:`1`)
        edge_dim (int, optional): Size of edge features, on which the gates then also
            depend, or :obj:`-1`. (default: :obj:`None`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias. Gates
            always have one. (default: :obj:`True`)

    Recurrence:
        mode (str, optional): :obj:`"P"` or :obj:`"D"`; alternating layers of both modes
            are recommended. (default: :obj:`"P"`)
        order (str, optional): With :obj:`"order"`, :obj:`"degree"` or :obj:`"bfs"`, the
            nodes are ordered by :func:`~pyg_chimera.ops.node_order`, and there are two
            DAGs: the edges from earlier to later nodes, and those from later to earlier
            ones. Self-loops are dropped. With :obj:`"auto"`, a DAG is used unaltered,
            and components with cycles are divided as by :obj:`"bfs"`, but the two DAGs
            have the same gates (not in compiled and exported models, which take DAGs
            only). With :obj:`None`, cycles are an error. (default: :obj:`"auto"`)
        turns (bool, optional): With :obj:`order`, whether signals turn from the second
            DAG to the first. If set to :obj:`False`, as in the paper, only ancestors
            and descendants influence each other. Turns take time and memory for each
            pair of later neighbours of a node, which are many if a hub comes early in
            the order, as by :obj:`"bfs"`. (default: :obj:`True`)
        normalization (str, optional): Under :obj:`"P"`: :obj:`"column"`, as above, or
            :obj:`"row"`, a softmax over the edges that enter a node, so that a signal's
            largest state in a DAG does not grow. :obj:`"D"` has no normalization.
            (default: :obj:`"column"`)
        tracking (int, optional): The number :math:`J` of components of a state,
            between which transitions rotate: :math:`\mathbf{T} = \alpha \mathbf{U} \,
            \textrm{diag}(\mathbf{g}) \, \mathbf{W}^{\top}` with
            :func:`~pyg_chimera.ops.householder_product` of the node in the middle.
            (default: :obj:`1`)
        gate_biases (Sequence[float], optional): The initial values of the source, mark
            and direct gates, before the sigmoid. In the released code for graphs they
            start nearly closed, at :obj:`(-5, -5, -5)`, and learning begins with a
            plateau. (default: :obj:`(0, 0, -3)`)
        reach (tuple[float, float], optional): The interval of initial ranges, in steps,
            divided evenly among the heads on a log scale, as in
            :class:`~pyg_chimera.nn.ChimeraDAGConv`. With :obj:`None`, nothing decays at
            first, as in the paper, and learning to tell near from far takes longer.
            (default: :obj:`(4, 64)`)

    Execution:
        form (str, optional): :obj:`"state"`, :obj:`"chunk"` (on paths) or
            :obj:`"auto"`.
        backend (str, optional): :obj:`"numba"`, :obj:`"triton"`, :obj:`"torch"`,
            :obj:`"reference"` or :obj:`"auto"`.
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`, :obj:`aggr` excepted.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*,
          line edges :math:`(2, |\mathcal{L}|)` *(optional)*;
          with :obj:`num_dags > 1` lists of edge indices, edge features and line edges
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or options are unknown or
            incompatible.

    Example:
        >>> conv = PLSTMConv(16, 32, heads=2, mode="D", order="bfs")
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    lin_edge: Linear | None
    lin_track: Any
    track_bias: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int | None = None,
        *,
        mode: str = "P",
        edge_dim: int | None = None,
        order: str | None = "auto",
        turns: bool = True,
        num_dags: int = 1,
        tracking: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, heads, state_channels, mode=mode, **kwargs
        )
        *_, edge_dim = check_channels(in_channels, out_channels, edge_dim)
        heads = self.heads
        check_option("order", order, (None, "auto", "order", "degree", "bfs"))
        check_flag("turns", turns)
        num_dags = check_integer("num_dags", num_dags, 1)
        divided = order not in (None, "auto")  # whatever the graph
        if num_dags > 1 and divided:
            raise ValueError(
                f"'num_dags' must be 1 with order={order!r}, which makes two DAGs, got "
                f"{num_dags}"
            )
        tracking = check_integer("tracking", tracking, 1)
        # Columns of a node's gates in a DAG: direct; what edges read of their source:
        # source, mark, decay as second edge of a line edge, decay as first one, score
        # (of rows); what edges read of their target: source, mark, decay as second
        # edge, score (of columns). Gates with a bias come first.
        states, alpha = heads * tracking, heads if mode == "P" else 0
        row = alpha if self.normalization == "row" else 0
        tail, head = [3 * states, states, row], [3 * states, alpha - row]
        self._ends = [[size for size in end if size] for end in (tail, head)]
        self._parts = [heads, *map(sum, self._ends)]
        copies = 2 if divided else num_dags
        self.add_parameters(copies, [heads, states, states, states], sum(self._parts))
        self.edge_dim = edge_dim
        self.order = order
        self.turns = turns
        self.num_dags = num_dags
        self.tracking = tracking

        self.lin_edge = self.lin_track = self.track_bias = None
        if edge_dim is not None:
            columns = copies * (4 * states + alpha)
            self.lin_edge = GateLinear(edge_dim, columns, std=0.0)
        if tracking > 1:
            shape = (copies, 2, heads, tracking, tracking)
            self.lin_track = GateLinear(in_channels, math.prod(shape), std=0.0)
            self.track_bias = Parameter(torch.empty(shape))
        self.lin_out = Linear(self.out_channels, self.out_channels, bias=self.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        if self.track_bias is not None:
            torch.nn.init.normal_(self.track_bias)

    def _decays_of_heads(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.tracking)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Sequence[Adj],
        edge_attr: Tensor | Sequence[Tensor] | None = None,
        batch: Tensor | None = None,
        line_edge_index: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices; with
                :obj:`num_dags > 1` a list of them, one for each DAG.
            edge_attr (torch.Tensor, optional): The edge features (or a list), for
                layers with :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. Used for speed only:
                outputs don't depend on it. (default: :obj:`None`)
            line_edge_index (torch.Tensor, optional): The line graph of a given DAG, as
                stored by the transforms, or a part of it (or a list). Under
                :obj:`"D"`, it is pruned to a multitree unless it already is one.
                (default: :obj:`None`)

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.stm_scan`.
            CycleError: If there is a cycle where :obj:`order` does not allow it.
        """
        check_inputs(x, self.in_channels, batch)
        num_nodes, order = x.size(0), self.order
        if order not in (None, "auto") and line_edge_index is not None:
            raise ValueError(
                f"'line_edge_index' must be None with order={order!r}, which makes its "
                f"own DAGs, got {type(line_edge_index).__name__}"
            )
        given = [
            (*self._edges(index, attr, num_nodes), line)
            for index, attr, line in for_each_dag(
                self.num_dags, edge_index=edge_index, edge_attr=edge_attr,
                line_edge_index=line_edge_index,
            )
        ]  # fmt: skip
        if order == "auto":
            may_be = line_edge_index is None and may_be_divided(self, edge_index)
            is_dag = not may_be or dag_halves(given[0][0], num_nodes) is None
            order = None if is_dag else order
        if order is None:
            dags = self._given(num_nodes, given)
        else:
            dags = self._ordered(num_nodes, order, *given[0][:2])
        nodes = self.project(x)
        query, key, value = self.query_key_value(nodes)
        index, D = dags.edge_index, dags.number
        index = index if D == 1 else index // D
        y = stm_scan(
            query, key, value, *self._gates(x, nodes.gate, dags), index,
            dags.line_edge_index, batch, form=self.form, backend=self.backend,
        )  # fmt: skip
        return self.output(y, x)

    def _edges(
        self, edge_index: Adj, edge_attr: Tensor | None, num_nodes: int
    ) -> tuple[Tensor, Tensor | None]:
        """The checked edges of a graph, and the features that are read."""
        index, attr = as_edges(
            edge_index, edge_attr, num_nodes, self.flow, self.edge_dim
        )
        if self.lin_edge is not None:
            attr = edge_features(attr, self.edge_dim, index.size(1))
        return index, attr

    def _given(self, num_nodes: int, given: list[tuple]) -> _DAGs:
        """The given DAGs, of their edges, features and line edges."""
        indices, lines, num_edges = [], [], 0
        for index, _, line in given:
            if line is None:
                line = line_graph(index, num_nodes).edge_index
            else:
                if torch.compiler.is_compiling():
                    pass  # the operator checks it anyway
                elif trusted():
                    check_edges("line_edge_index", line, index)
                else:
                    check_line_edges(line, index.size(1))
                line = line.long()
                line = line.flip(0) if self.flow == "target_to_source" else line
            if self.num_dags > 1:  # else keep the tensors: graphs are known by them
                line = line + num_edges
            indices.append(index)
            lines.append(line)
            num_edges += index.size(1)
        if self.num_dags > 1:
            copies = [x * self.num_dags + d for d, x in enumerate(indices)]
            index, line = torch.cat(copies, dim=1), torch.cat(lines, dim=1)
        edges = None
        if self.lin_edge is not None:
            edges = torch.cat([attr for _, attr, _ in given])
        line, kept = self._pruned(line, num_edges)
        return _DAGs(self.num_dags, index, line, kept, edges, self._mask(index))

    def _ordered(
        self, num_nodes: int, order: str, index: Tensor, attr: Tensor | None
    ) -> _DAGs:
        """Two DAGs, of the edges to later and to earlier nodes, and turns."""
        mask = self._mask(index)
        index, edge, line = ordered_dags(index, num_nodes, order, self.turns)
        attr, mask = (y if y is None else y.index_select(0, edge) for y in (attr, mask))
        return _DAGs(2, index, *self._pruned(line, index.size(1)), attr, mask)

    def _pruned(
        self, line_edge_index: Tensor, num_edges: int
    ) -> tuple[Tensor, Tensor | None]:
        """The line edges to use; while tracing, all of them and a mask."""
        if self.mode == "P":
            return line_edge_index, None
        kept = multitree(line_edge_index, num_edges)
        if torch.compiler.is_compiling():  # their number depends on the graph
            return line_edge_index, kept
        return line_edge_index[:, kept], None

    def _mask(self, edge_index: Tensor) -> Tensor | None:
        if not has_edge_mask(self, self.num_dags):
            return None
        ones = torch.ones(edge_index.size(1), 1, device=edge_index.device)
        return self.explain_message(ones, None)

    def _gates(
        self, x: Tensor, gate: Tensor, dags: _DAGs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source [E, heads(, J)], transition [L, heads(, J, J)], mark, direct."""
        D, S = dags.number, self.heads * self.tracking
        copies = self.gate_bias.size(0)  # D, or one that DAGs share
        row, col = dags.edge_index
        gates = gate.unflatten(1, (copies, -1))
        bias = self.gate_bias.to(gates.dtype)
        gates = gates + F.pad(bias, (0, gates.size(2) - bias.size(1)))
        if copies < D:
            gates = gates.expand(-1, D, -1)
        direct, *ends = gates.flatten(0, 1).split(self._parts, dim=1)
        (tail, first, *score), (head, *score_of_head) = (
            part.index_select(0, end).split(sizes, dim=1)
            for part, end, sizes in zip(ends, (row, col), self._ends, strict=True)
        )
        gate, score = tail + head, score + score_of_head
        if self.lin_edge is not None:
            edge = at_least_float32(self.lin_edge(dags.edge_attr))
            if copies > 1:  # each edge is in one of the DAGs
                rows = torch.arange(edge.size(0), device=edge.device) * D + row % D
                edge = edge.view(rows.numel() * D, edge.size(1) // D)
                edge = edge.index_select(0, rows)
            sizes = [3 * S, S, *(y.size(1) for y in score)]
            of_gate, of_first, *of_score = edge.split(sizes, dim=1)
            gate, first = gate + of_gate, first + of_first
            score = [y + other for y, other in zip(score, of_score, strict=True)]

        written, second = gate.split([2 * S, S], dim=1)
        source, mark = written.sigmoid().split(S, dim=1)
        out, into = dags.line_edge_index
        if not torch.compiler.is_compiling():  # where numbers are symbols
            check_memory(
                f"Gates of {self.heads} heads for {out.numel():,} pairs of edges",
                16 * out.numel() * S * self.tracking,  # four numbers of float32 each
                "use fewer heads, samples of the graph, or turns=False",
                x.device,
            )
        decay = first.index_select(0, out) + second.index_select(0, into)
        transition = torch.tanh(5 * decay)
        if self.lin_track is not None:
            shape = (self.heads, self.tracking)
            source, mark, transition = (
                y.unflatten(1, shape) for y in (source, mark, transition)
            )
            node = row[into] if copies == D else row[into] // D
            transition = self._rotated(x, transition, node)
        if self.mode == "P":
            ends = row if self.normalization == "column" else col
            alpha = softmax(*score, ends, num_nodes=x.size(0) * D)
            to = into if self.normalization == "column" else out
            transition = transition * _like(alpha.index_select(0, to), transition)
        if dags.kept is not None:
            kept = dags.kept.to(transition.dtype).unsqueeze(1)
            transition = transition * _like(kept, transition)
        if dags.mask is not None:
            mask = dags.mask.to(source.dtype)
            source = source * _like(mask, source)
            transition = transition * _like(mask[into], transition)
        direct = direct.sigmoid()
        if D > 1:  # once where they share gates: nodes read edges of both at once
            direct = direct.view(x.size(0), D, self.heads)[:, :copies].sum(1)
        return source, transition, mark, direct

    def _rotated(self, x: Tensor, decay: Tensor, node: Tensor) -> Tensor:
        """U diag(decay) W^T for each line edge, given its node of a DAG."""
        vectors = at_least_float32(self.lin_track(x))
        vectors = vectors.unflatten(1, self.track_bias.shape) + self.track_bias
        matrices = householder_product(vectors.flatten(0, 1)).index_select(0, node)
        U, W = matrices.unbind(1)
        # Products of rounded factors would lose orthogonality along a path.
        with torch.autocast(decay.device.type, enabled=False):
            return (U * decay.unsqueeze(-2)) @ W.transpose(-2, -1)


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Appends dimensions of size one to x, up to the dimensions of the other."""
    return x.view(*x.shape, *[1] * (other.dim() - x.dim()))
