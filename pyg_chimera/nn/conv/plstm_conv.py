import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj
from torch_geometric.utils import softmax

from pyg_chimera.nn.conv._graphs import (
    as_edges,
    at_least_float32,
    check_edge_attr,
    for_each_dag,
)
from pyg_chimera.ops import (
    grid_scan,
    householder_product,
    line_graph,
    multitree,
    node_order,
    stm_scan,
)
from pyg_chimera.ops.structure.line_graph import check_line_edges
from pyg_chimera.ops.structure.system import remembered

__all__ = ["PLSTMConv"]

_CHOICES = {
    "mode": ("P", "D"),
    "orient": (None, "order", "degree", "bfs", "grid"),
    "normalization": ("column", "row"),
}


class _DAGs(NamedTuple):
    """All DAGs of a call as one graph: node v in DAG d of D is its node v * D + d."""

    edge_index: Tensor  # [2, E]
    line_edge_index: Tensor  # [2, L]
    kept: Tensor | None  # [L], the line edges of a multitree, where others are left
    edge_attr: Tensor | None  # [E, edge_dim]
    mask: Tensor | None  # [E, 1], of an explainer


class PLSTMConv(MessagePassing):
    r"""The pLSTM layer from `"pLSTM: parallelizable Linear Source Transition Mark
    networks" <https://arxiv.org/abs/2506.11997>`_: a linear recurrence along a
    directed acyclic graph, whose states belong to its edges, so that a signal may
    keep its direction.

    .. math::
        \mathbf{C}_e = \sum_{e^{\prime} \rightarrow e} T_{e^{\prime} e}
        \mathbf{C}_{e^{\prime}} + S_e \mathbf{k}_u \mathbf{v}_u^{\top}, \qquad
        \mathbf{x}^{\prime}_w = \mathbf{W}_{\textrm{out}} \, \textrm{RMSNorm} \Big(
        \mathbf{q}_w^{\top} \big( \sum_{e \rightarrow w} M_e \mathbf{C}_e + D_w
        \mathbf{k}_w \mathbf{v}_w^{\top} \big) \Big)

    for edges :math:`e = (u, w)`, where :math:`\mathbf{q}, \mathbf{k}, \mathbf{v}` are
    projections of the nodes. The source, mark and direct gates :math:`S, M, D` are
    sigmoids of the nodes (both ends of an edge) and, with :obj:`edge_dim`, of the
    edge. The transitions :math:`T` come from decays :math:`g = \tanh(5 \cdot)` of the
    three nodes and both edges. How they stay bounded depends on the :obj:`mode`:

    * :obj:`"P"`, propagation: :math:`T_{e^{\prime} e} = g \, \alpha_e` with a softmax
      :math:`\alpha` over the edges that leave a node. A signal spreads like a drop of
      ink: its sum does not grow.
    * :obj:`"D"`, distribution: :math:`T_{e^{\prime} e} = g`, on a part of the line
      graph in which at most one path joins any two edges
      (:func:`~pyg_chimera.ops.multitree`). A signal reaches whatever it reaches
      unattenuated.

    What the DAGs are depends on :obj:`orient`. Each of several has its own gates, and
    their outputs are averaged. The layer is a mixer: residual connection, dropout and
    a second, wider projection belong to the layer around it, such as
    :class:`~pyg_chimera.nn.GPSLayer`.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own gates; divides
            :obj:`out_channels`. (default: :obj:`1`)
        mode (str, optional): :obj:`"P"` or :obj:`"D"`; layers of both kinds in turn
            are advised. (default: :obj:`"P"`)
        state_channels (int, optional): Size of :math:`\mathbf{q}_i` and
            :math:`\mathbf{k}_i` of a head. (default: :obj:`out_channels // heads`)
        edge_dim (int, optional): Size of edge features, which then decide the gates
            too, or :obj:`-1`. (default: :obj:`None`)
        orient (str, optional): How the graph becomes DAGs.

            * :obj:`None`: it is a DAG, and is used as it is.
            * :obj:`"order"`, :obj:`"degree"`, :obj:`"bfs"`: the nodes are ordered by
              :func:`~pyg_chimera.ops.node_order`. One DAG has the edges from earlier
              to later nodes, the other those from later to earlier ones. Self-loops
              are dropped.
            * :obj:`"grid"`: the nodes of each graph are a grid, row by row, whose
              sizes are given to :meth:`forward`. There are four DAGs: right and down,
              left and up, right and up, left and down.

            (default: :obj:`None`)
        num_dags (int, optional): The number of DAGs with :obj:`orient=None`.
            (default: :obj:`1`)
        normalization (str, optional): Under :obj:`"P"`: :obj:`"column"`, as above, or
            :obj:`"row"`, a softmax over the edges that enter a node, with which a
            signal's largest state does not grow. (default: :obj:`"column"`)
        tracking (int, optional): The number :math:`J` of components of a state,
            between which transitions rotate: :math:`\mathbf{T} = \alpha \mathbf{U} \,
            \textrm{diag}(\mathbf{g}) \, \mathbf{W}^{\top}` with
            :func:`~pyg_chimera.ops.householder_product` of the node in the middle.
            Not for grids. (default: :obj:`1`)
        gate_biases (Sequence[float], optional): Where the source, mark and direct gates
            start, before the sigmoid. (default: :obj:`(-5, -5, -5)`, and
            :obj:`(-4, -4, -6)` for grids, as in the paper: nearly closed, which takes
            many steps to open)
        gate_std (float, optional): How far, as a standard deviation, gates start apart
            from each other for inputs of variance one. (default: :obj:`0.0`, at first
            gates are the same everywhere)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            Gates have one in any case. (default: :obj:`True`)
        form (str, optional): :obj:`"state"`, :obj:`"mask"` or :obj:`"auto"`.
        backend (str, optional): :obj:`"numba"`, :obj:`"torch"`, :obj:`"reference"` or
            :obj:`"auto"`.
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes don't divide, or an option is unknown.

    Example:
        >>> conv = PLSTMConv(16, 32, heads=2, mode="D", orient="order")
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int = 1,
        mode: str = "P",
        *,
        state_channels: int | None = None,
        edge_dim: int | None = None,
        orient: str | None = None,
        num_dags: int = 1,
        normalization: str = "column",
        tracking: int = 1,
        gate_biases: Sequence[float] | None = None,
        gate_std: float = 0.0,
        bias: bool = True,
        form: str = "auto",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(node_dim=0, **kwargs)
        out_channels = in_channels if out_channels is None else out_channels
        options = {"mode": mode, "orient": orient, "normalization": normalization}
        for name, option in options.items():
            if option not in _CHOICES[name]:
                raise ValueError(
                    f"'{name}' must be one of {_CHOICES[name]}, got {option!r}"
                )
        if out_channels < 1:
            raise ValueError(f"'out_channels' must be given, got {out_channels}")
        if heads < 1 or out_channels % heads != 0:
            raise ValueError(
                f"'heads' must divide 'out_channels', got {heads} and {out_channels}"
            )
        if state_channels is None:
            state_channels = out_channels // heads
        if state_channels < 1:
            raise ValueError(f"'state_channels' must be >= 1, got {state_channels}")
        if num_dags < 1 or (num_dags > 1 and orient is not None):
            raise ValueError(
                "'num_dags' must be >= 1, and 1 unless orient=None, got "
                f"{num_dags} and orient={orient!r}"
            )
        if tracking < 1 or (tracking > 1 and orient == "grid"):
            raise ValueError(
                "'tracking' must be >= 1, and 1 with orient='grid', got "
                f"{tracking} and orient={orient!r}; a grid given as DAGs, with "
                "orient=None, can track states"
            )
        if gate_biases is None:
            gate_biases = (-4.0, -4.0, -6.0) if orient == "grid" else (-5.0, -5.0, -5.0)
        if len(gate_biases) != 3:
            raise ValueError(
                "'gate_biases' must be three numbers, for source, mark and direct "
                f"gates, got {gate_biases!r}"
            )
        if gate_std < 0:
            raise ValueError(f"'gate_std' must be >= 0, got {gate_std}")
        if edge_dim is not None and orient == "grid":
            raise ValueError(
                f"'edge_dim' must be None with orient='grid', got {edge_dim}"
            )

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.mode = mode
        self.state_channels = state_channels
        self.edge_dim = edge_dim
        self.orient = orient
        self.num_dags = num_dags
        self.normalization = normalization
        self.tracking = tracking
        self.gate_biases = tuple(gate_biases)
        self.gate_std = gate_std
        self.form = form
        self.backend = backend

        # Columns of the gates of one DAG. Those with a bias come first.
        copies = {None: num_dags, "grid": 4}.get(orient, 2)
        states, alpha = heads * tracking, heads if mode == "P" else 0
        if orient == "grid":
            # direct; source, mark, decay, angle. D has no turn from down to right.
            self._biased = [heads, 2 * heads, 2 * heads]
            self._biased += [4 * heads, alpha] if mode == "P" else [3 * heads, 0]
            columns = sum(self._biased)
        else:
            # direct; then what an edge takes from its source: source, mark, decay
            # as the line edge's second edge, decay as its first one, softmax (of
            # rows); then what it takes from its target: all but the second last.
            self._biased = [heads, states, states, states]
            row = alpha if normalization == "row" else 0
            self._parts = [heads, 4 * states + row, 3 * states + alpha - row]
            columns = sum(self._parts)
        self._copies = copies
        self.lin_query = Linear(in_channels, heads * state_channels, bias=bias)
        self.lin_key = Linear(in_channels, heads * state_channels, bias=bias)
        self.lin_value = Linear(in_channels, out_channels, bias=bias)
        self.lin_gate = _GateLinear(in_channels, copies * columns, gate_std)
        self.gate_bias = Parameter(torch.empty(copies, sum(self._biased)))
        if edge_dim is not None:
            edge_columns = copies * (4 * states + alpha)
            self.lin_edge: Linear | None = _GateLinear(edge_dim, edge_columns, gate_std)
        else:
            self.lin_edge = None
        if tracking > 1:
            shape = (copies, 2, heads, tracking, tracking)
            self.lin_track: Linear | None = _GateLinear(
                in_channels, math.prod(shape), gate_std
            )
            self.track_bias = Parameter(torch.empty(shape))
        else:
            self.lin_track = None
            self.register_parameter("track_bias", None)
        self.norm_weight = Parameter(torch.empty(out_channels))
        self.lin_out = Linear(out_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for lin in self.children():
            if isinstance(lin, Linear):
                lin.reset_parameters()
        # At first, gates are the same everywhere: nearly closed, without decay.
        parts = self.gate_bias.data.split(self._biased, dim=1)
        source, mark, direct = self.gate_biases
        constants = [direct, source, mark, 1.0]
        if self.orient == "grid":
            angle = torch.linspace(-2, 2, self.heads) if self.heads > 1 else 0.0
            if self.mode == "P":  # heads look into different directions
                parts[-1].copy_(torch.as_tensor(angle).expand_as(parts[-1]))
        for part, constant in zip(parts, constants, strict=False):
            part.fill_(constant)
        if self.track_bias is not None:
            torch.nn.init.normal_(self.track_bias)
        torch.nn.init.ones_(self.norm_weight)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Sequence[Tensor] | None,
        edge_attr: Tensor | Sequence[Tensor] | None = None,
        batch: Tensor | None = None,
        line_edge_index: Tensor | Sequence[Tensor] | None = None,
        height: int | Tensor | None = None,
        width: int | Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices; with
                :obj:`num_dags > 1` a list of them, one for each DAG. Not used with
                :obj:`orient="grid"`.
            edge_attr (torch.Tensor, optional): The edge features (or a list). Ignored
                without :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. A hint for speed:
                outputs don't depend on it. (default: :obj:`None`)
            line_edge_index (torch.Tensor, optional): With :obj:`orient=None`, the
                line graph, as stored by the transforms, or a part of it (or a list).
                Under :obj:`"D"`, a multitree is taken from it unless it is one.
                (default: :obj:`None`)
            height (int or torch.Tensor, optional): With :obj:`orient="grid"`, the
                number of rows, of all grids or of each. (default: :obj:`None`)
            width (int or torch.Tensor, optional): With :obj:`orient="grid"`, the
                number of columns, of all grids or of each. (default: :obj:`None`)

        Raises:
            ValueError: If something does not fit the layer, or see
                :func:`~pyg_chimera.ops.stm_scan` and
                :func:`~pyg_chimera.ops.grid_scan`.
            CycleError: If there is a cycle where a DAG must be.
        """
        if not isinstance(x, Tensor) or x.dim() != 2:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"'x' must be [nodes, channels], got {got}")
        if self.orient is not None and line_edge_index is not None:
            raise ValueError(
                f"'line_edge_index' must be None with orient={self.orient!r}, which "
                f"makes its own DAGs, got {type(line_edge_index).__name__}"
            )
        H, N = self.heads, self.state_channels
        query = self.lin_query(x).unflatten(1, (H, N))
        key = self.lin_key(x).unflatten(1, (H, N))
        value = self.lin_value(x).unflatten(1, (H, self.out_channels // H))
        # The mean over DAGs is taken here, where it is cheapest.
        query = query * (1 / (math.sqrt(N) * self._copies))

        if self.orient == "grid":
            gates = self._grid_gates(x, edge_attr, height, width)
            if batch is not None and not torch.compiler.is_compiling():
                _check_grid_batch(batch, height, width)
            y = grid_scan(
                query, key, value, *gates, form=self.form, backend=self.backend
            )
        else:
            dags = self._dags(x.size(0), edge_index, edge_attr, line_edge_index)
            y = stm_scan(
                query, key, value, *self._gates(x, dags),
                dags.edge_index // self._copies, dags.line_edge_index, batch,
                form=self.form, backend=self.backend,
            )  # fmt: skip
        weight = self.norm_weight.view(H, -1)
        y = F.rms_norm(at_least_float32(y), y.shape[2:], eps=1e-5) * weight
        return self.lin_out(y.flatten(1).to(value.dtype))

    def _dags(
        self,
        num_nodes: int,
        edge_index: Adj | Sequence[Tensor] | None,
        edge_attr: Tensor | Sequence[Tensor] | None,
        line_edge_index: Tensor | Sequence[Tensor] | None,
    ) -> _DAGs:
        graphs: list[tuple[Tensor, Tensor, Tensor | None]] = []
        num_edges = 0
        dags = for_each_dag(
            self.num_dags, "set num_dags", edge_index=edge_index, edge_attr=edge_attr,
            line_edge_index=line_edge_index,
        )  # fmt: skip
        for d, (index, attr, line) in enumerate(dags):
            index, attr = as_edges(index, attr, num_nodes, self.flow)
            if self.lin_edge is None:
                attr = None
            else:
                attr = check_edge_attr(attr, self.edge_dim, index.size(1))
            if line is not None and self.flow == "target_to_source":
                line = line.flip(0)
            if self.orient is not None:
                return self._oriented(index, num_nodes, attr)
            if line is None:
                line = line_graph(index, num_nodes).edge_index
            elif not torch.compiler.is_compiling():
                check_line_edges(line, index.size(1))
            graphs.append((index * self.num_dags + d, line + num_edges, attr))
            num_edges += index.size(1)
        indices, lines, attrs = zip(*graphs, strict=True)
        index, line = torch.cat(indices, dim=1), torch.cat(lines, dim=1)
        attr = None if self.lin_edge is None else torch.cat(attrs)
        if self.explain and self.num_dags > 1:
            raise ValueError("Edge masks explain one graph, not several DAGs")
        return _DAGs(index, *self._pruned(line, num_edges), attr, self._mask(index))

    def _oriented(
        self, edge_index: Tensor, num_nodes: int, edge_attr: Tensor | None
    ) -> _DAGs:
        """The edges to later nodes, and those to earlier ones."""
        mask = self._mask(edge_index)
        made = remembered(_orientation, (edge_index,), num_nodes, self.orient)
        edge_index, line, proper = made
        if proper is not None:
            edge_attr = None if edge_attr is None else edge_attr[proper]
            mask = None if mask is None else mask[proper]
        lines = self._pruned(line, edge_index.size(1))
        return _DAGs(edge_index, *lines, edge_attr, mask)

    def _pruned(
        self, line_edge_index: Tensor, num_edges: int
    ) -> tuple[Tensor, Tensor | None]:
        """The line edges to use; while tracing all, and which of them to use."""
        if self.mode == "P":
            return line_edge_index, None
        kept = _multitree(line_edge_index, num_edges)
        if torch.compiler.is_compiling():  # nobody knows yet how many there will be
            return line_edge_index, kept
        return line_edge_index[:, kept], None

    def _mask(self, edge_index: Tensor) -> Tensor | None:
        if not self.explain:
            return None
        ones = torch.ones(edge_index.size(1), 1, device=edge_index.device)
        return self.explain_message(ones, None)

    def _gates(self, x: Tensor, dags: _DAGs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source [E, heads(, J)], transition [L, heads(, J, J)], mark, direct."""
        D, S = self._copies, self.heads * self.tracking
        row, col = dags.edge_index
        direct, tail, head = self._node_gates(x).flatten(0, 1).split(self._parts, dim=1)
        tail, head = tail.index_select(0, row), head.index_select(0, col)
        gate = tail[:, : 3 * S] + head[:, : 3 * S]
        first = tail[:, 3 * S : 4 * S]
        score = tail[:, 4 * S :] if self.normalization == "row" else head[:, 3 * S :]
        if self.lin_edge is not None:
            edge = at_least_float32(self.lin_edge(dags.edge_attr))
            if D > 1:  # each edge is in one of the DAGs
                rows = torch.arange(edge.size(0), device=edge.device) * D + row % D
                edge = edge.view(rows.numel() * D, edge.size(1) // D)
                edge = edge.index_select(0, rows)
            gate = gate + edge[:, : 3 * S]
            first = first + edge[:, 3 * S : 4 * S]
            score = score + edge[:, 4 * S :]

        source, mark = gate[:, : 2 * S].sigmoid().split(S, dim=1)
        second = gate[:, 2 * S :]
        out, into = dags.line_edge_index
        decay = first.index_select(0, out) + second.index_select(0, into)
        transition = torch.tanh(5 * decay)
        if self.lin_track is not None:
            shape = (self.heads, self.tracking)
            source, mark, transition = (
                y.unflatten(1, shape) for y in (source, mark, transition)
            )
            transition = self._rotated(self.lin_track(x), transition, row[into])
        if self.mode == "P":
            ends = row if self.normalization == "column" else col
            alpha = softmax(score, ends, num_nodes=x.size(0) * D)
            alpha = alpha.index_select(
                0, into if self.normalization == "column" else out
            )
            transition = transition * _like(alpha, transition)
        if dags.kept is not None:
            kept = dags.kept.to(transition.dtype).unsqueeze(1)
            transition = transition * _like(kept, transition)
        if dags.mask is not None:
            mask = dags.mask.to(source.dtype)
            source = source * _like(mask, source)
            transition = transition * _like(mask[into], transition)
        direct = direct.sigmoid().view(x.size(0), D, self.heads).sum(1)
        return source, transition, mark, direct

    def _grid_gates(
        self,
        x: Tensor,
        edge_attr: Tensor | Sequence[Tensor] | None,
        height: int | Tensor | None,
        width: int | Tensor | None,
    ) -> tuple[Any, ...]:
        """What `grid_scan` takes after the value."""
        if height is None or width is None:
            raise ValueError(
                "'height' and 'width' must be given with orient='grid' (to a "
                "'GraphModel' as structure={'height': 'height', 'width': 'width'}), "
                f"got {height} and {width}"
            )
        if edge_attr is not None:
            raise ValueError(
                "'edge_attr' must be None with orient='grid', got "
                f"{type(edge_attr).__name__}"
            )
        if self.explain:
            raise ValueError("Edge masks explain edges, not grids with orient='grid'")
        V, H = x.size(0), self.heads
        direct, source, mark, decay, angle = self._node_gates(x).split(self._biased, 2)
        direct = direct.sigmoid().sum(1)
        source, mark = (y.sigmoid().view(V, 4, 2, H) for y in (source, mark))
        decay = torch.tanh(5 * decay)
        if self.mode == "P":
            angle = torch.stack([angle, -angle], dim=2).sigmoid()
            to = 3 if self.normalization == "column" else 2
            transition = decay.view(V, 4, 2, 2, H) * angle.unsqueeze(to)
        else:  # no turn from down to right
            right, rest = decay.split([H, 2 * H], dim=2)
            transition = torch.cat([right, torch.zeros_like(right), rest], dim=2)
            transition = transition.view(V, 4, 2, 2, H)
        return source, transition, mark, direct, height, width

    def _node_gates(self, x: Tensor) -> Tensor:
        """[V, DAGs, columns], with biases, before any sigmoid."""
        gates = at_least_float32(self.lin_gate(x))
        columns = self.lin_gate.out_channels // self._copies
        gates = gates.view(x.size(0), self._copies, columns)
        bias = self.gate_bias.to(gates.dtype)
        return gates + F.pad(bias, (0, gates.size(2) - bias.size(1)))

    def _rotated(self, vectors: Tensor, decay: Tensor, node: Tensor) -> Tensor:
        """U diag(decay) W^T of nodes of DAGs, one for each line edge."""
        vectors = at_least_float32(vectors).unflatten(1, self.track_bias.shape)
        vectors = vectors + self.track_bias
        matrices = householder_product(vectors.flatten(0, 1)).index_select(0, node)
        U, W = matrices.unbind(1)
        # Rounded factors would not be orthogonal enough for a long way.
        with torch.autocast(decay.device.type, enabled=False):
            return (U * decay.unsqueeze(-2)) @ W.transpose(-2, -1)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}, mode={self.mode!r}, orient={self.orient!r})"
        )


def _orientation(
    edge_index: Tensor, num_nodes: int, method: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The edges of both DAGs, their line graph, and which edges are no self-loops."""
    proper = edge_index[0] != edge_index[1]
    edge_index = edge_index[:, proper]
    row, col = node_order(edge_index, num_nodes, method)[edge_index]
    edge_index = 2 * edge_index + (row > col)
    line = line_graph(edge_index, 2 * num_nodes).edge_index
    return edge_index, line, None if bool(proper.all()) else proper


def _check_grid_batch(
    batch: Tensor, height: int | Tensor | None, width: int | Tensor | None
) -> None:
    """Whether grids of these sizes, one after the other, are the graphs of a batch."""
    sizes = (torch.as_tensor(height) * torch.as_tensor(width)).view(-1).cpu()
    counts = batch.bincount().cpu()
    counts = counts[counts > 0]
    fits = sizes.numel() in (1, counts.numel()) and bool((counts == sizes).all())
    if not fits or bool((batch.diff() < 0).any()):
        raise ValueError(
            "'height' and 'width' must be those of the graphs of 'batch', which must "
            f"be sorted: got graphs of {counts.tolist()[:8]} nodes and grids of "
            f"{sizes.view(-1).tolist()[:8]}"
        )


@torch.library.custom_op("pyg_chimera::multitree", mutates_args=())
def _multitree(line_edge_index: Tensor, num_edges: int) -> Tensor:
    kept = remembered(multitree, (line_edge_index,), num_edges)
    return kept.clone()  # what an operator returns must be its own


@_multitree.register_fake
def _(line_edge_index: Tensor, num_edges: int) -> Tensor:
    return line_edge_index.new_empty(line_edge_index.size(1), dtype=torch.bool)


class _GateLinear(Linear):
    """A projection that starts near zero, also if it is lazy."""

    def __init__(self, in_channels: int, out_channels: int, std: float) -> None:
        self.std = std
        super().__init__(in_channels, out_channels, bias=False)

    def reset_parameters(self) -> None:
        if self.in_channels > 0:
            std = self.std / math.sqrt(self.in_channels)
            torch.nn.init.normal_(self.weight, std=std)


def _like(x: Tensor, other: Tensor) -> Tensor:
    """With trailing dimensions of size one, as many as the other one has."""
    return x.view(*x.shape, *[1] * (other.dim() - x.dim()))
