import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj

from pyg_chimera.nn.conv._graphs import (
    as_edges,
    at_least_float32,
    check_edge_attr,
    for_each_dag,
)
from pyg_chimera.ops import (
    chimera_transition,
    dag_scan,
    dag_transition,
    path_transition,
    released_transition,
    resolvent_mix,
)

__all__ = ["ChimeraConv"]

_CHOICES = {
    "topology": ("graph", "dag", "path"),
    "normalization": ("paper", "released"),
    "share": ("all", "none"),
    "selectivity": ("mean", "target"),
    "roots": ("write", "silent"),
}


class ChimeraConv(MessagePassing):
    r"""The Chimera layer from `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_: a state space model whose recurrence runs
    along the graph itself, so that each node hears from all others in one layer.

    .. math::
        \mathbf{y} = \left( (\mathbf{I} - \mathbf{A})^{-1} \odot \mathbf{C}
        \bar{\mathbf{B}}^{\top} \right) \mathbf{V}, \qquad
        \mathbf{x}'_i = \mathbf{W}_{\text{out}} \left( \text{RMSNorm}(\mathbf{y}_i +
        \mathbf{D} \odot \mathbf{v}_i) \odot \text{SiLU}(\mathbf{z}_i) \right)

    where :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}` are projections of the nodes,
    followed by SiLU, and the transitions :math:`\mathbf{A}` come from selectivities
    :math:`\Delta = \text{softplus}(\mathbf{W} \mathbf{x} + \mathbf{b})` of nodes and,
    with :obj:`edge_dim`, edges. What they are depends on the :obj:`topology`:

    * :obj:`"graph"`, any graph: :func:`~pyg_chimera.ops.chimera_transition`, or with
      :obj:`normalization="released"`
      :func:`~pyg_chimera.ops.released_transition`. Solved exactly, by sparse
      elimination.
    * :obj:`"dag"`, one or several DAGs over the nodes, whose outputs are summed and
      divided by :math:`\sqrt{\text{num\_dags}}`:
      :func:`~pyg_chimera.ops.dag_transition`. Linear in nodes and edges.
    * :obj:`"path"`, undirected paths, such as text:
      :func:`~pyg_chimera.ops.path_transition`. Linear in nodes.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own :math:`\mathbf{A}`;
            divides :obj:`out_channels`. (default: :obj:`1`)
        state_channels (int, optional): Size of :math:`\mathbf{B}_i` and
            :math:`\mathbf{C}_i`. (default: :obj:`64`)
        groups (int, optional): Number of different :math:`\mathbf{B}` and
            :math:`\mathbf{C}`; divides :obj:`heads`. (default: :obj:`1`, all heads
            share them as in Mamba-2)
        edge_dim (int, optional): Size of edge features, which then decide the
            transitions too, or :obj:`-1`. (default: :obj:`None`)
        topology (str, optional): :obj:`"graph"`, :obj:`"dag"` or :obj:`"path"`.
            (default: :obj:`"graph"`)
        normalization (str, optional): Of :obj:`"graph"`: :obj:`"paper"` or
            :obj:`"released"` (as in the authors' code). (default: :obj:`"paper"`)
        gamma (float, optional): Upper bound of the row sums of :math:`\mathbf{A}`
            under :obj:`"paper"`, in (0, 1]. (default: :obj:`1.0`)
        num_dags (int, optional): Of :obj:`"dag"`: the number of DAGs. (default:
            :obj:`1`)
        share (str, optional): Whether DAGs share :math:`\mathbf{B}` and
            :math:`\mathbf{C}`: :obj:`"all"` or :obj:`"none"`. (default: :obj:`"all"`)
        selectivity (str, optional): Of an edge of a DAG: the :obj:`"mean"` of its two
            nodes', or its :obj:`"target"`'s, with which a directed path is Mamba-2.
            (default: :obj:`"mean"`)
        roots (str, optional): Whether nodes without parents in a DAG :obj:`"write"`,
            or are :obj:`"silent"` as by the letter of Equation 15. (default:
            :obj:`"write"`)
        local_conv (bool, optional): Whether to add to :math:`\mathbf{B}, \mathbf{C},
            \mathbf{V}`, before SiLU, a depthwise mean over neighbours, in place of
            Mamba's short convolution. (default: :obj:`False`)
        gated (bool, optional): Whether there is a gate :math:`\mathbf{z}`. (default:
            :obj:`True`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)
        solver (str, optional): See :func:`~pyg_chimera.ops.resolvent_mix`. (default:
            :obj:`"auto"`)
        num_terms (int, optional): Highest power of :math:`\mathbf{A}` under
            :obj:`solver="neumann"`. (default: :obj:`None`, given to :meth:`forward`)
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
        >>> conv = ChimeraConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int = 1,
        state_channels: int = 64,
        *,
        groups: int = 1,
        edge_dim: int | None = None,
        topology: str = "graph",
        normalization: str = "paper",
        gamma: float = 1.0,
        num_dags: int = 1,
        share: str = "all",
        selectivity: str = "mean",
        roots: str = "write",
        local_conv: bool = False,
        gated: bool = True,
        bias: bool = True,
        solver: str = "auto",
        num_terms: int | None = None,
        form: str = "auto",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(node_dim=0, **kwargs)
        out_channels = in_channels if out_channels is None else out_channels
        options = {
            "topology": topology,
            "normalization": normalization,
            "share": share,
            "selectivity": selectivity,
            "roots": roots,
        }
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
        if groups < 1 or heads % groups != 0:
            raise ValueError(f"'groups' must divide 'heads', got {groups} and {heads}")
        if state_channels < 1:
            raise ValueError(f"'state_channels' must be >= 1, got {state_channels}")
        if not 0 < gamma <= 1:
            raise ValueError(f"'gamma' must be in (0, 1], got {gamma}")
        if num_dags < 1 or (num_dags > 1 and topology != "dag"):
            raise ValueError(
                f"'num_dags' must be >= 1, and 1 without topology='dag', got "
                f"{num_dags} and topology={topology!r}"
            )
        if solver != "auto" and topology == "dag":
            raise ValueError(f"topology='dag' has one solver, got solver={solver!r}")

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.state_channels = state_channels
        self.groups = groups
        self.edge_dim = edge_dim
        self.topology = topology
        self.normalization = normalization
        self.gamma = gamma
        self.num_dags = num_dags
        self.share = share
        self.selectivity = selectivity
        self.roots = roots
        self.solver = solver
        self.num_terms = num_terms
        self.form = form
        self.backend = backend

        copies = num_dags if share == "none" else 1
        states = groups * state_channels * copies
        self._deltas = num_dags if topology == "dag" else 4
        self.lin_value = Linear(in_channels, out_channels, bias=bias)
        self.lin_key = Linear(in_channels, states, bias=bias)
        self.lin_query = Linear(in_channels, states, bias=bias)
        self.lin_gate = Linear(in_channels, out_channels, bias=bias) if gated else None
        self.lin_delta = Linear(in_channels, self._deltas * heads, bias=False)
        self.delta_bias = Parameter(torch.empty(self._deltas, heads))
        if edge_dim is not None:
            edge_deltas = num_dags * heads
            self.lin_edge = Linear(edge_dim, edge_deltas, bias=False)
            self.edge_bias = Parameter(torch.empty(num_dags, heads))
        else:
            self.lin_edge = None
            self.register_parameter("edge_bias", None)
        if local_conv:
            self.local_weight = Parameter(torch.empty(2, out_channels + 2 * states))
        else:
            self.register_parameter("local_weight", None)
        self.skip = Parameter(torch.empty(heads))
        self.norm = torch.nn.RMSNorm(out_channels, eps=1e-5)
        self.lin_out = Linear(out_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for lin in self.children():
            if isinstance(lin, Linear):
                lin.reset_parameters()
        for bias in (self.delta_bias, self.edge_bias):
            if bias is not None:
                # As in Mamba-2: softplus(bias) is log-uniform in [0.001, 0.1].
                low, high = math.log(1e-3), math.log(1e-1)
                delta = torch.empty_like(bias).uniform_(low, high).exp()
                bias.data.copy_(delta + torch.log(-torch.expm1(-delta)))
        if self.local_weight is not None:
            # Starts as the node itself, plus a little of its neighbours.
            torch.nn.init.ones_(self.local_weight[0])
            torch.nn.init.uniform_(self.local_weight[1], -0.5, 0.5)
        torch.nn.init.ones_(self.skip)
        self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Sequence[Tensor],
        edge_attr: Tensor | Sequence[Tensor] | None = None,
        batch: Tensor | None = None,
        rank: Tensor | Sequence[Tensor] | None = None,
        num_terms: int | Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices; with
                :obj:`num_dags > 1` a list of them, one for each DAG.
            edge_attr (torch.Tensor, optional): The edge features (or a list). Ignored
                without :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. A hint for speed:
                outputs don't depend on it. (default: :obj:`None`)
            rank (torch.Tensor, optional): The elimination rank, or of a DAG the
                topological rank (or a list), as stored by the transforms.
                (default: :obj:`None`)
            num_terms (int or torch.Tensor, optional): Under :obj:`solver="neumann"`,
                the highest power of :math:`\mathbf{A}`; of several, such as the
                stored diameters of a batch, the largest. (default: :obj:`None`)

        Raises:
            ValueError: If something does not fit the layer, or see
                :func:`~pyg_chimera.ops.resolvent_mix` and
                :func:`~pyg_chimera.ops.dag_scan`.
        """
        if not isinstance(x, Tensor) or x.dim() != 2:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"'x' must be [nodes, channels], got {got}")
        graphs = self._graphs(edge_index, edge_attr, rank, x.size(0))
        num_nodes = x.size(0)

        parts = [self.lin_value(x), self.lin_key(x), self.lin_query(x)]
        if self.local_weight is not None:
            # Over the edges of all DAGs, if there are several.
            edges = torch.cat([index for index, _, _ in graphs], dim=1)
            weights = self.local_weight.split([y.size(1) for y in parts], dim=1)
            parts = [
                y * own + _neighbour_mean(y, edges) * neighbours
                for y, (own, neighbours) in zip(parts, weights, strict=True)
            ]
        value, key, query = map(F.silu, parts)
        copies = self.num_dags if self.share == "none" else 1
        value = value.view(num_nodes, self.heads, self.out_channels // self.heads)
        key, query = (
            y.view(num_nodes, copies, self.groups, self.state_channels)
            for y in (key, query)
        )
        delta = self.lin_delta(x).view(num_nodes, self._deltas, self.heads)
        delta = at_least_float32(delta)

        outs = []
        for d, (index, attr, order) in enumerate(graphs):
            copy = d if self.share == "none" else 0
            edge_delta = self._edge_delta(attr, d, index.size(1))
            k, q = key[:, copy], query[:, copy]
            if self.topology == "dag":
                weight, write = self._dag(index, num_nodes, delta[:, d], d, edge_delta)
            else:
                weight, write = self._graph(index, num_nodes, delta, edge_delta)
            weight = self._explained(weight, num_nodes)
            # Writing more is the same for the value; it is the smaller one.
            v = value * write.unsqueeze(-1).to(value.dtype)
            if self.topology == "dag":
                out = dag_scan(
                    q, k, v, index, weight, batch, rank=order, form=self.form,
                    backend=self.backend,
                )  # fmt: skip
            else:
                out = resolvent_mix(
                    q, k, v, index, weight, batch, rank=order, solver=self.solver,
                    num_terms=self._terms(num_terms), form=self.form,
                    backend=self.backend,
                )  # fmt: skip
            outs.append(out)
        y = _mean(outs) * math.sqrt(len(outs))

        y = y + self.skip.view(-1, 1).to(y.dtype) * value
        y = self.norm(y.flatten(1))
        if self.lin_gate is not None:
            y = y * F.silu(self.lin_gate(x))
        return self.lin_out(y)

    def _graphs(
        self,
        edge_index: Adj | Sequence[Tensor],
        edge_attr: Tensor | Sequence[Tensor] | None,
        rank: Tensor | Sequence[Tensor] | None,
        num_nodes: int,
    ) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """The graphs to run on: edges, their features and the nodes' rank."""
        graphs = []
        for index, attr, order in for_each_dag(
            self.num_dags, "set topology='dag' and num_dags", edge_index=edge_index,
            edge_attr=edge_attr, rank=rank,
        ):  # fmt: skip
            graphs.append((*as_edges(index, attr, num_nodes, self.flow), order))
        return graphs

    def _edge_delta(
        self, edge_attr: Tensor | None, d: int, num_edges: int
    ) -> Tensor | None:
        if self.lin_edge is None:
            return None
        edge_attr = check_edge_attr(edge_attr, self.edge_dim, num_edges)
        delta = self.lin_edge(edge_attr)
        delta = delta.view(len(delta), self.num_dags, self.heads)[:, d]
        return F.softplus(at_least_float32(delta) + self.edge_bias[d])

    def _dag(
        self,
        edge_index: Tensor,
        num_nodes: int,
        delta: Tensor,
        d: int,
        edge: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        node = F.softplus(delta + self.delta_bias[d])
        parts = [node[edge_index[1]]]
        if self.selectivity == "mean":
            parts.append(node[edge_index[0]])
        if edge is not None:
            parts.append(edge)
        root = node if self.roots == "write" else None
        return dag_transition(edge_index, num_nodes, _mean(parts), root)

    def _graph(
        self, edge_index: Tensor, num_nodes: int, delta: Tensor, edge: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        gates = F.softplus(delta + self.delta_bias)
        target, source, slack, write = gates.unbind(1)
        if self.topology == "path":
            parts = [target[edge_index[1]], source[edge_index[0]]]
            if edge is not None:
                parts.append(edge)
            weight = torch.exp(-_mean(parts))
            return path_transition(edge_index, num_nodes, weight, slack), write
        if self.normalization == "released":
            weight = released_transition(
                edge_index, num_nodes, target, source, slack, edge
            )
            return weight, delta[:, 3]  # as it is: no bias, no softplus
        weight = chimera_transition(
            edge_index, num_nodes, target, source, slack, edge, self.gamma
        )
        return weight, write

    def _explained(self, weight: Tensor, num_nodes: int) -> Tensor:
        """Edge masks of explainers act on the transitions."""
        if not self.explain:
            return weight
        if self.num_dags > 1:
            raise ValueError("Edge masks explain one graph, not several DAGs")
        return self.explain_message(weight, num_nodes)

    def _terms(self, num_terms: int | Tensor | None) -> int | None:
        if self.solver != "neumann":
            return None
        if num_terms is None:
            num_terms = self.num_terms
        if num_terms is None:
            raise ValueError(
                "solver='neumann' needs 'num_terms': give it to the layer, or store "
                "the diameter with 'pyg_chimera.transforms.AddDiameter' and call the "
                "layer with num_terms=data.diameter"
            )
        if isinstance(num_terms, Tensor):
            num_terms = int(num_terms.max()) if num_terms.numel() > 0 else 0
        return num_terms

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}, state_channels={self.state_channels}, "
            f"topology={self.topology!r})"
        )


def _neighbour_mean(x: Tensor, edge_index: Tensor) -> Tensor:
    ones = x.new_ones(edge_index.size(1), 1)
    degree = x.new_zeros(x.size(0), 1).index_add(0, edge_index[1], ones)
    total = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
    return total / degree.clamp(min=1)


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
