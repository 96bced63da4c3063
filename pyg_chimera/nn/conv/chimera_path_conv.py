import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn.conv._gated_block import ChimeraBlock, Projected, mean_of_ends
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.nn.conv._window import Filter
from pyg_chimera.ops import balanced_path_transition, resolvent_mix
from pyg_chimera.ops.common.checks import check_flag, readable
from pyg_chimera.ops.common.torch_private import is_followed

__all__ = ["ChimeraPathConv"]


class ChimeraPathConv(ChimeraBlock):
    r"""The Chimera layer for undirected paths, such as text or protein chains, from
    `"Chimera: State Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_
    (Appendix B.1): exact in both directions at once, in time linear in the number of
    nodes.

    It is :class:`~pyg_chimera.nn.ChimeraConv` with :obj:`input_gate="free"` and the
    transitions of :func:`~pyg_chimera.ops.path_transition`, which bound the products
    :math:`A_{ij} A_{ji}` instead of the row sums, so that a signal can keep its size
    along the whole path.

    Args:
        in_channels, out_channels, heads, state_channels, local_conv, qk_norm: As in
            :class:`~pyg_chimera.nn.ChimeraConv`.
        **kwargs (optional): The options :obj:`groups`, :obj:`edge_dim`, :obj:`gated`,
            :obj:`bias`, :obj:`reach` (here not limited), :obj:`form` and :obj:`backend`
            of :class:`~pyg_chimera.nn.ChimeraConv`, and those of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency, each edge in
          both directions,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown.

    Example:
        >>> conv = ChimeraPathConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        local_conv: bool = False,
        qk_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_flag("local_conv", local_conv)
        check_flag("qk_norm", qk_norm)
        self.qk_norm = qk_norm
        self.add_parameters(4, kernel=1 + local_conv)
        self.reset_parameters()

    def _set_reach(self, steps: Tensor) -> None:
        psi = -2 * torch.sinh(1 / steps).log() + 2 * self._start_edges()
        softplus_(self.delta_bias[2], psi.clamp(min=0.01))
        softplus_(self.delta_bias[3], self._input_gates(steps))

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes arguments of
        :meth:`ChimeraConv.forward <pyg_chimera.nn.ChimeraConv.forward>`, for edges of
        disjoint paths in both directions.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an edge has no reverse, the graph is not made of paths, or as
                in :func:`~pyg_chimera.ops.resolvent_mix`.
        """
        edge_index, edge = self.edges(x, edge_index, edge_attr, batch)
        filtered = self.over_edges(edge_index)
        nodes = self.project(x, filtered)
        query, key, value = self.query_key_value(nodes)
        gates = nodes.delta + self.delta_bias
        target, source, psi, gate = F.softplus(gates).double().unbind(1)
        edge = None if edge is None else edge.double()
        log_weight = -mean_of_ends(edge_index, target, source, edge)
        logs = _Logs(log_weight, psi, log_softplus(gates[:, 3].double(), gate))

        def mix(
            query: Tensor, key: Tensor, value: Tensor, logs: _Logs, log_value: Tensor,
            log_factor: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            """What nodes read, divided by an exponential, and its logarithm."""
            # Nodes that write nothing leave the scale to others.
            log_source = (log_value + logs.gate).detach().clamp(min=-1e12)
            weight, scale = balanced_path_transition(
                edge_index, x.size(0), logs.weight, logs.psi, log_source
            )
            weight = self.explained(weight, x.size(0)).to(value.dtype)
            rest = (logs.gate - scale).unsqueeze(2)
            rest = rest if log_factor is None else rest + log_factor
            # Infinite only for values of zero.
            most = 0.99 * math.log(torch.finfo(value.dtype).max)
            value = value * torch.exp(rest.clamp(max=most).to(value.dtype))
            if not self.qk_norm:  # their products may overflow, of states and gradients
                (query, more), (key, other) = map(_within_two, (query, key))
                scale = scale + more + other
            y = resolvent_mix(
                query, key, value, edge_index, weight, batch, rank=rank,
                form=self.form, backend=self.backend,
            )  # fmt: skip
            return y, scale

        # Too large a scale for small values is found out.
        with torch.no_grad():
            log_value = _largest(value).clamp(min=math.exp(-40)).log()
        y, scale = mix(query, key, value, logs, log_value)
        return self.output(
            y, nodes, value, scale, partial(self._mix_apart, nodes, logs, mix)
        )

    def project(
        self, x: Tensor, filtered: Filter | None = None, read: Tensor | None = None
    ) -> Projected:
        """As of other layers, but in float64 in compiled programs, which cannot compute
        rows again whose states are out of range.
        """
        nodes = super().project(x, filtered, read)
        if not is_followed():
            return nodes
        value, key, query = map(Tensor.double, nodes[:3])
        return nodes._replace(value=value, key=key, query=query)

    def _mix_apart(
        self, nodes: Projected, logs: "_Logs", mix: Callable
    ) -> tuple[Tensor, Tensor]:
        """What nodes read of each state channel, [V, heads, N, P], divided by an
        exponential of its own, and its logarithm, [V, heads, N], in float64. No factor
        of it underflows.
        """
        size, heads = self.state_channels, self.heads
        value, key, query = (y.double() for y in nodes[:3])
        value = value.unflatten(1, (heads, 1, -1))
        key, query = (
            y.unflatten(1, (-1, size)).repeat_interleave(heads // self.groups, 1)
            for y in (key, query)
        )
        log_factor = self._log_factor(key).unsqueeze(3) + F.logsigmoid(value)
        log_factor, value = (
            y.flatten(1, 2) for y in (log_factor, key.unsqueeze(3) * value)
        )
        log_value = (value.abs().log() + log_factor).amax(2)
        logs = _Logs(*(y.repeat_interleave(size, 1) for y in logs))
        ones = value.new_ones(value.size(0), 1, 1)
        y, scale = mix(ones, ones, value, logs, log_value, log_factor)
        scale = scale.view_as(query) + self._log_factor(query)
        if self.qk_norm:
            scale = scale - math.log(size) / 2
        return y.view(*query.shape, -1) * query.unsqueeze(3), scale

    def _log_factor(self, x: Tensor) -> Tensor:
        """The logarithm of the factor from projections [..., N] to queries or keys."""
        log = F.logsigmoid(x)
        if not self.qk_norm:
            return log
        return log - (F.silu(x).square().mean(-1, keepdim=True) + 1e-5).log() / 2

    def output(  # type: ignore[override]
        self,
        y: Tensor,
        nodes: Projected,
        value: Tensor,
        log_scale: Tensor,
        apart: Callable,
    ) -> Tensor:
        """As of other layers, for y divided by exp(log_scale), [V, heads]; `apart`
        computes both for each state channel.
        """
        out, lost = self._summed(y, log_scale, value)
        known = readable() and not is_followed()
        if known and bool(lost.any()):
            y, log_scale = apart()
            out, lost = self._summed(y, log_scale, value)
            known = False
        if not known:
            out = out.masked_fill(lost.unsqueeze(1), torch.nan)
        return self.finish(out, nodes.gate, nodes.x.dtype)

    def _summed(
        self, y: Tensor, log_scale: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the norm takes, [V, heads * P], and in which rows y is too inexact,
        [V], from y, [V, heads, P], or parts of it, [V, heads, parts, P].

        Parts are at most about one, and vanish below the range of their dtype. Beside
        the skip connection, or the norm's epsilon, what vanishes may be large.
        """
        most = 0.7 * math.log(torch.finfo(y.dtype).max)
        skip, of_row = self.skip.view(-1, 1) * value, tuple(range(1, log_scale.dim()))
        with torch.no_grad():
            log_size = (_largest(y).log() + log_scale).amax(of_row)
            least = _largest(skip).amax(1).clamp(min=1e-5**0.5).log()
            log_size = log_size.maximum(least)
            lost = log_scale.amax(of_row) - most > log_size
            # The norm of a row far above its epsilon is that of any multiple.
            rest = (log_size - 20).clamp(min=0).view(-1, *(1 for _ in of_row))
        y = y * torch.exp(log_scale - rest).to(y.dtype).unsqueeze(-1)
        y = y.sum(2) if y.dim() == 4 else y
        y = y + skip * torch.exp(-rest).to(skip.dtype).view(-1, 1, 1)
        return y.flatten(1), lost


def _within_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Large numbers divided by a power of two, and its logarithm."""
    if x.numel() == 0:
        return x, x.new_zeros(())
    size = x.detach().nan_to_num(0, 0, 0).abs().amax().clamp(min=1)
    power = size.log2().floor()
    return x * torch.exp2(-power), power * math.log(2)


class _Logs(NamedTuple):
    """Logarithms of gates, for transitions and states, in float64."""

    weight: Tensor  #: log a, [E, heads]
    psi: Tensor  #: [V, heads]
    gate: Tensor  #: the logarithm of the input gate, [V, heads]


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value of each last row; `vector_norm` is slower by far."""
    return x.abs().amax(-1)


def log_softplus(x: Tensor, softplus: Tensor) -> Tensor:
    """The logarithm of softplus(x), which itself underflows."""
    low = x < -40
    return torch.where(low, x, softplus.masked_fill(low, 1).log())
