import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    at_least_float32,
    check_inputs,
    edge_features,
    has_edge_mask,
    side_by_side,
)
from pyg_chimera.nn.conv._gated_block import GatedBlock
from pyg_chimera.nn.conv._init import check_reach, head_reaches, softplus_
from pyg_chimera.nn.conv._window import Continued, reset_filter_
from pyg_chimera.ops import channel_scan
from pyg_chimera.ops.common.checks import (
    check_flag,
    check_float,
    check_integer,
    check_option,
    readable,
)
from pyg_chimera.ops.structure import parent_scale
from pyg_chimera.ops.structure.parent_scale import continued_scale

__all__ = ["RGLRUConv"]

#: The factor of log(sigmoid(Lambda)) for open gates: c in the paper.
_SHARPNESS = 8.0
#: What all parents have in common grows a thousandfold at most, as no norm follows.
_LOG_GROWTH = 10


class RGLRUConv(GatedBlock):
    r"""The recurrent block of `"Griffin: Mixing Gated Linear Recurrences with Local
    Attention for Efficient Language Models" <https://arxiv.org/abs/2402.19427>`_
    (Section 2.4) on directed acyclic graphs: a real-gated linear recurrent unit, with a
    scalar state for each channel, and the parents :math:`p(i)` of a node in place of
    the previous step.

    .. math::
        \mathbf{h}_i = \mathbf{a}_i \odot \frac{1}{\sqrt{|p(i)|}} \sum_{j \in p(i)}
        \mathbf{h}_j + \sqrt{1 - \mathbf{a}_i^2} \odot \mathbf{g}_i \odot \mathbf{u}_i,
        \qquad
        \mathbf{x}'_i = \mathbf{W}_{\text{out}} (\mathbf{h}_i \odot
        \text{GELU}(\mathbf{W}_{\text{gate}} \mathbf{x}_i))

        \mathbf{a}_i = \sigma(\boldsymbol{\Lambda})^{8 \mathbf{r}_i}, \qquad
        \mathbf{r}_i = \sigma(\mathbf{W}_a \mathbf{u}_i + \mathbf{b}_a), \qquad
        \mathbf{g}_i = \sigma(\mathbf{W}_x \mathbf{u}_i + \mathbf{b}_x)

    Here :math:`\mathbf{u}` is a projection of the nodes followed by a local
    convolution: a filter for each channel over the node itself, the mean of its
    parents, the mean of their means, and so on. :math:`\mathbf{W}_a` and
    :math:`\mathbf{W}_x` are block-diagonal, with a block for each head. For a node
    without parents, the sum is empty. Dividing by :math:`\sqrt{|p(i)|}` keeps the scale
    of independent states; where paths part and meet again, what is divided by is such
    that sums over all of them stay below :math:`2^{10}`
    (:func:`~pyg_chimera.ops.structure.parent_scale`). On a directed path, the layer is
    Griffin's block, and with :obj:`released` that of the released code, but for the
    bias of its convolution.

    With :obj:`edge_dim`, each edge has its own gate, :math:`\mathbf{r}_{ij} =
    \sigma(\mathbf{W}_a \mathbf{u}_i + \mathbf{b}_a + \mathbf{W}_e \mathbf{e}_{ij})`,
    hence a decay :math:`\mathbf{a}_{ij}`, and the input of a node is scaled by
    :math:`\sqrt{1 - \text{mean}_j \mathbf{a}_{ij}^2}`, which keeps the scale, too.

    Several DAGs over the same nodes, such as those of
    :class:`~pyg_chimera.transforms.DAGDecomposition`, have separate gates and
    :math:`\boldsymbol{\Lambda}`; their states are summed and divided by
    :math:`\sqrt{\text{num\_dags}}`. Along a single DAG, a node is influenced by its
    ancestors only. Unless this is intended, add its reverse as a second DAG, as in the
    example.

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample, and of the states.
            (default: :obj:`in_channels`)
        heads (int, optional): Number of blocks of the gates; divides
            :obj:`out_channels`. (default: the largest of 4, 2 and 1 that does)
        num_dags (int, optional): The number of DAGs. (default: :obj:`1`)
        conv_kernel (int, optional): The number of generations in the filters of the
            local convolution, including the node itself; with :obj:`1`, there is no
            convolution. (default: :obj:`4`)

    Recurrence:
        order (str, optional): As in :class:`~pyg_chimera.nn.ChimeraDAGConv`: what to do
            with cycles. (default: :obj:`"auto"`)
        reach (tuple[float, float], optional): The interval of initial ranges, in steps,
            over which the channels of each head are spread evenly on a log scale: the
            distance along a path at which influence has fallen to :math:`1/e` before
            training, for inputs of zero, where :math:`\mathbf{r} = 1/2`. With
            :obj:`None`, :math:`\sigma(\boldsymbol{\Lambda})^8` starts uniform in
            [0.9, 0.999], as in the paper, which gives ranges of 19 to 2,000 steps.
            (default: :obj:`(1, 1000)`)
        released (bool, optional): Whether to follow the `released code
            <https://github.com/google-deepmind/recurrentgemma>`_ where it departs from
            the paper: nodes without parents write with 1 in place of :math:`\sqrt{1 -
            \mathbf{a}_i^2}`, and GELU is its tanh approximation. (default:
            :obj:`False`)

    Execution:
        **kwargs (optional): The options :obj:`edge_dim`, :obj:`gated`, :obj:`bias` and
            :obj:`backend` of :class:`~pyg_chimera.nn.ChimeraConv`, and those of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*;
          with :obj:`num_dags > 1` lists of edge indices and of edge features
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown or
            out of range.

    Example:
        >>> conv = RGLRUConv(16, 32, heads=2, num_dags=2)
        >>> there = torch.tensor([[0, 1, 1], [1, 2, 3]])
        >>> conv(torch.randn(4, 16), [there, there.flip(0)]).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        *,
        num_dags: int = 1,
        order: str | None = "auto",
        conv_kernel: int = 4,
        reach: tuple[float, float] | None = (1.0, 1000.0),
        released: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, **kwargs)
        num_dags = check_integer("num_dags", num_dags, 1)
        conv_kernel = check_integer("conv_kernel", conv_kernel, 1)
        check_option("order", order, (None, "auto"))
        check_reach(reach)
        check_flag("released", released)
        self.num_dags = num_dags
        self.order = order
        self.conv_kernel = conv_kernel
        self.reach = reach
        self.released = released
        self.act = partial(F.gelu, approximate="tanh" if released else "none")

        out_channels, bias = self.out_channels, self.bias
        heads = self.heads
        block = out_channels // heads
        self.lin_value = Linear(in_channels, out_channels, bias=bias)
        self.lin_gate = None
        if self.gated:
            self.lin_gate = Linear(in_channels, out_channels, bias=bias)
        # The recurrence gate r, then the input gate g.
        self.gate_weight = Parameter(torch.empty(2, num_dags, heads, block, block))
        self.gate_bias = Parameter(torch.empty(2, num_dags, out_channels))
        self.Lambda = Parameter(torch.empty(num_dags, out_channels))
        self.lin_edge = None
        if self.edge_dim is not None:
            self.lin_edge = Linear(self.edge_dim, num_dags * out_channels, bias=False)
        if conv_kernel > 1:
            self.add_filter(out_channels, 1 + num_dags * (conv_kernel - 1))
        self.norm = torch.nn.Identity()
        self.lin_out = Linear(out_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        # Gates of variance one, before the sigmoid, for inputs of variance one.
        bound = math.sqrt(3 / self.gate_weight.size(-1))
        torch.nn.init.uniform_(self.gate_weight, -bound, bound)
        torch.nn.init.zeros_(self.gate_bias)
        if self.local_weight is not None:
            reset_filter_(self.local_weight)
        with torch.no_grad():
            if self.reach is None:
                rate = -torch.empty_like(self.Lambda).uniform_(0.9, 0.999).log()
            else:  # at r = 1/2
                steps = head_reaches(self.reach, self.out_channels // self.heads)
                rate = (2 / steps).repeat(self.heads).expand_as(self.Lambda)
            softplus_(self.Lambda, rate / _SHARPNESS)
            self.Lambda.neg_()

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Sequence[Adj],
        edge_attr: Tensor | Sequence[Tensor] | None = None,
        batch: Tensor | None = None,
        rank: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes the arguments of
        :meth:`ChimeraDAGConv.forward <pyg_chimera.nn.ChimeraDAGConv.forward>`.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.channel_scan`.
            CycleError: If there is a cycle where :obj:`order` does not allow it.
        """
        check_inputs(x, self.in_channels, batch)
        if rank is None:
            out = self.along_halves(x, edge_index, edge_attr, batch)
            if out is not None:
                return out
        num_nodes, D = x.size(0), self.num_dags
        index, features, batch, rank = side_by_side(
            num_nodes, D, self.flow, self.edge_dim, edge_index, edge_attr, batch, rank
        )
        h = self._states(x, index, features, batch, rank)
        h = h.unflatten(0, (D, num_nodes)).sum(0) / math.sqrt(D)
        return self._gated(h, x)

    def resume(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Computes the next part of a DAG, as in the whole, given the states of the
        nodes in earlier parts on which it depends. Requires :obj:`num_dags=1` and
        :obj:`conv_kernel=1`. It reads the edges, so it cannot be traced.

        Args:
            x (torch.Tensor): The node features. The first :math:`K` nodes belong to
                earlier parts; theirs matter for their own outputs only.
            edge_index (torch.Tensor): The edge indices. No edge leads to one of the
                first :math:`K` nodes.
            edge_attr (torch.Tensor, optional): The edge features, for layers with
                :obj:`edge_dim`. (default: :obj:`None`)
            state (torch.Tensor, optional): What the calls with their own parts returned
                for the first nodes, :math:`(K, 1 + F_{out})`; not rows of zeros, as in
                a memory that has not been written. (default: :obj:`None`, for the first
                part)

        Returns:
            tuple: The output, :math:`(|\mathcal{V}|, F_{out})`, and the states of all
            nodes, :math:`(|\mathcal{V}|, 1 + F_{out})`.

        Raises:
            ValueError: If the layer has several DAGs or a convolution, or the states
                do not fit or are not those that a call returned.
        """
        check_inputs(x, self.in_channels)
        if self.num_dags != 1 or self.conv_kernel != 1:
            raise ValueError(
                "DAGs are continued with num_dags=1 and conv_kernel=1, got "
                f"{self.num_dags} and {self.conv_kernel}"
            )
        num_nodes, width = x.size(0), 1 + self.out_channels
        state = at_least_float32(x).new_zeros(0, width) if state is None else state
        check_float("state", state)
        if state.dim() != 2 or state.size(1) != width or len(state) > num_nodes:
            raise ValueError(
                f"'state' must have shape [K, {width}] for the first K of {num_nodes} "
                f"nodes, got {list(state.shape)}"
            )
        if readable() and not bool((state[:, 0] >= 1).all()):
            rows = (~(state[:, 0] >= 1)).nonzero().view(-1).tolist()
            raise ValueError(
                "'state' must hold rows that 'resume' returned, which begin with 1 or "
                f"more, got {state[rows[0], 0].item()} in row {rows[0]}, one of "
                f"{len(rows)}: compute the parts of a DAG in order, and store the "
                "states of each before they are read"
            )
        index, features, _, _ = side_by_side(
            num_nodes, 1, self.flow, self.edge_dim, edge_index, edge_attr, None, None
        )
        if readable() and bool((index[1] < len(state)).any()):
            raise ValueError(
                f"No edge of 'edge_index' may lead to the first {len(state)} nodes, "
                f"whose states are given, got one to {int(index[1].min())}"
            )
        scale, growth = continued_scale(index, num_nodes, _LOG_GROWTH, state[:, 0])
        h = self._states(x, index, features, scale=scale, known=state[:, 1:])
        return self._gated(h, x), torch.cat([growth.to(h).unsqueeze(1), h], 1)

    def _states(
        self,
        x: Tensor,
        index: Tensor,
        features: list[tuple[Tensor | None, int]],
        batch: Tensor | None = None,
        rank: Tensor | None = None,
        scale: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """The states of all DAGs, [D * V, F]; those of the first nodes may be known."""
        u = self.lin_value(x)
        filtered = self.over_edges(index)
        u = u if filtered is None else filtered(u)
        forget, write = (gates.flatten(0, 1) for gates in self._gates(u))
        decay, weight, fresh = self._transition(index, forget, features, scale)
        written = _root(fresh) * write.sigmoid() * u.repeat(self.num_dags, 1)
        if known is not None:
            written = torch.cat([known.to(written), written[len(known) :]])
        return channel_scan(
            written, index, weight, batch, decay=decay, rank=rank, backend=self.backend
        )

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each directed path by one node, as
        :meth:`GPSLayer.step <pyg_chimera.nn.GPSLayer.step>`, in time independent of how
        many nodes came before. Requires :obj:`num_dags=1`.

        Raises:
            ValueError: If there are several DAGs, or edge features.
        """
        check_inputs(x, self.in_channels)
        if self.num_dags != 1 or self.edge_dim is not None:
            raise ValueError(
                "Sequences are continued with num_dags=1 and edge_dim=None, got "
                f"{self.num_dags} and {self.edge_dim}"
            )
        h, seen = (0.0, None) if state is None else state
        u = self.lin_value(x)
        if self.local_weight is not None:
            window = Continued(self.local_weight.flip(1).unsqueeze(1), seen)
            u = window(u)
            seen = window.seen
        forget, write = self._gates(u).squeeze(1)
        lost = self._rates() * forget.sigmoid()
        fresh = -torch.expm1(-2 * lost)
        if state is None and self.released:
            fresh = torch.ones_like(fresh)
        written = _root(fresh) * write.sigmoid() * u
        h = torch.exp(-lost) * h + written
        return self._gated(h, x), (h, seen)

    def _gated(self, h: Tensor, x: Tensor) -> Tensor:
        gate = None if self.lin_gate is None else at_least_float32(self.lin_gate(x))
        return self.finish(h, gate, x.dtype)

    def _rates(self) -> Tensor:
        """-log a at open gates, [D, F]."""
        return _SHARPNESS * F.softplus(-at_least_float32(self.Lambda))

    def _gates(self, u: Tensor) -> Tensor:
        """The gates r and g, before the sigmoid, [2, D, V, F]."""
        heads = u.unflatten(1, (self.heads, -1))
        gates = torch.einsum("vhp,gdhpq->gdvhq", heads, self.gate_weight.to(u.dtype))
        bias = at_least_float32(self.gate_bias).unsqueeze(2)
        return at_least_float32(gates).flatten(-2) + bias

    def _transition(
        self,
        edge_index: Tensor,
        forget: Tensor,
        features: list[tuple[Tensor | None, int]],
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Decays of nodes, weights of edges (or None) for `channel_scan`; 1 - a^2."""
        num_nodes, target, rates = forget.size(0), edge_index[1], self._rates()
        ones = forget.new_ones(target.size(0), 1)
        parents = forget.new_zeros(num_nodes, 1).index_add(0, target, ones)
        if scale is None:
            scale = parent_scale(edge_index, num_nodes, _LOG_GROWTH)
        scale = scale.to(forget.dtype).unsqueeze(1)
        lost = rates.unsqueeze(1) * forget.sigmoid().unflatten(0, (self.num_dags, -1))
        lost = lost.flatten(0, 1)
        decay, weight, fresh = scale * torch.exp(-lost), None, -torch.expm1(-2 * lost)
        if self.lin_edge is not None:
            lost = self._edge_rates(target, forget, rates, features)
            decay, weight = scale.expand_as(fresh), torch.exp(-lost)
            total = torch.zeros_like(fresh)
            total = total.index_add(0, target, -torch.expm1(-2 * lost))
            fresh = torch.where(parents > 0, total / parents.clamp(min=1), fresh)
        if self.released:
            fresh = fresh.masked_fill(parents == 0, 1)
        if has_edge_mask(self, self.num_dags):
            if weight is None:
                like = self.Lambda
                weight = like.new_ones(target.size(0), like.size(1))
            weight = self.explain_message(weight, num_nodes)
        return decay, weight, fresh

    def _edge_rates(
        self,
        target: Tensor,
        forget: Tensor,
        rates: Tensor,
        features: list[tuple[Tensor | None, int]],
    ) -> Tensor:
        """-log a of the edges of all DAGs, [E, F]."""
        lost = []
        targets = target.split([num_edges for _, num_edges in features])
        for d, index in enumerate(targets):
            attr = edge_features(features[d][0], self.edge_dim, index.size(0))
            gates = self.lin_edge(attr).unflatten(1, (self.num_dags, -1))  # type: ignore[misc]
            gates = forget[index] + at_least_float32(gates[:, d])
            lost.append(rates[d] * gates.sigmoid())
        return torch.cat(lost)


def _root(x: Tensor) -> Tensor:
    """The square root, with a finite gradient at zero."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).sqrt() * (x > 0)
