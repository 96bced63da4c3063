import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset

from pyg_chimera.nn._inputs import (
    at_least_float32,
    check_heads,
    edge_features,
)
from pyg_chimera.nn._norm import RMSNorm, rms_norm
from pyg_chimera.nn.conv._base import Mixer
from pyg_chimera.nn.conv._init import (
    GateLinear,
    check_reach,
    head_reaches,
    log_uniform_softplus_,
    softplus_,
)
from pyg_chimera.nn.conv._window import Filter, projected, reset_filter_
from pyg_chimera.ops.chimera_transition import LEAST_MARGIN
from pyg_chimera.ops.common.checks import check_option

__all__ = ["ChimeraBlock"]


class ChimeraBlock(Mixer):
    r"""The common part of all Chimera layers around their recurrence: the projections
    :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}` and selectivities before it, and the
    gated block of Mamba-2 after it (Figure 6 of the paper), with the norm before the
    gate by default.

    Args:
        num_selectivities (int): The number of selectivities of a node.
        num_dags (int): The number of selectivities of an edge.
        copies (int): The number of different :math:`\mathbf{B}` and :math:`\mathbf{C}`
            of a group.
        differential (bool): Whether a head is the difference of two recurrences with
            separate transitions: what both have taken up equally cancels.
        taps (Sequence[int], optional): The shape of a channel's local filter, if
            projections include nearby nodes. (default: :obj:`None`)
        qk_norm (bool): Whether :math:`\mathbf{B}` and :math:`\mathbf{C}` are
            normalized.
        norm_before_gate (bool): Whether the norm comes before the gate or, as in
            Mamba-2, after it.
        norm (str, optional): :obj:`"rms"` or :obj:`None`. (default: :obj:`"rms"`)
    """

    #: Whether the output is linear in the values, with a sum over paths as weights.
    additive = True
    #: Initial standard deviation of selectivities, before softplus. If it is small, all
    #: nodes write equally, states mainly count nodes, and learning more takes long.
    varied = 3**0.5

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None,
        heads: int,
        state_channels: int,
        *,
        groups: int,
        edge_dim: int | None,
        taps: Sequence[int] | None,
        gated: bool,
        bias: bool,
        reach: tuple[float, float] | None,
        differential: bool,
        form: str,
        backend: str,
        num_selectivities: int,
        num_dags: int,
        copies: int,
        qk_norm: bool,
        norm_before_gate: bool = True,
        norm: str | None = "rms",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_option("norm", norm, ("rms", None))
        out_channels = in_channels if out_channels is None else out_channels
        check_heads(out_channels, heads, state_channels, groups)
        check_reach(reach)

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.state_channels = state_channels
        self.groups = groups
        self.edge_dim = edge_dim
        self.num_dags = num_dags
        self.qk_norm = qk_norm
        self.norm_before_gate = norm_before_gate
        self.reach = reach
        self.differential = differential
        #: Heads of the recurrence; the two of a difference are adjacent.
        self.scan_heads = (1 + differential) * heads
        self.form = form
        self.backend = backend

        states = copies * groups * state_channels
        self.lin_value = Linear(in_channels, out_channels, bias=bias)
        self.lin_key = Linear(in_channels, states, bias=bias)
        self.lin_query = Linear(in_channels, states, bias=bias)
        self.lin_gate = Linear(in_channels, out_channels, bias=bias) if gated else None
        std = 3**-0.5 if reach is None else self.varied
        scans = self.scan_heads
        self.lin_delta = GateLinear(in_channels, num_selectivities * scans, std)
        self.delta_bias = Parameter(torch.empty(num_selectivities, scans))
        self.lin_edge = self.edge_bias = None
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, num_dags * scans, bias=False)
            self.edge_bias = Parameter(torch.empty(num_dags, scans))
        self.local_weight = None
        if taps is not None:
            self.local_weight = Parameter(torch.empty(out_channels + 2 * states, *taps))
        self.contrast = Parameter(torch.empty(heads)) if differential else None
        self.skip = Parameter(torch.empty(heads))
        self.norm = torch.nn.Identity() if norm is None else RMSNorm(out_channels, 1e-5)
        self.lin_out = Linear(out_channels, out_channels, bias=bias)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for lin in self.children():
            if isinstance(lin, Linear):
                lin.reset_parameters()
        for bias in (self.delta_bias, self.edge_bias):
            if bias is not None:
                log_uniform_softplus_(bias)
        if self.local_weight is not None:
            self._reset_filters()
        if self.contrast is not None:
            torch.nn.init.constant_(self.contrast, 0.2)
        torch.nn.init.ones_(self.skip)
        reset(self.norm)
        if self.reach is not None:
            self._set_reach(head_reaches(self.reach, self.scan_heads))

    def _set_reach(self, steps: Tensor) -> None:
        """Sets the initial range of each head, in steps, [heads].

        After that many steps along a path, influence has fallen to 1/e.
        """
        raise NotImplementedError

    def _set_row_sums(
        self,
        steps: Tensor,
        gamma: float,
        fixed: float | None = None,
        least: float | None = None,
    ) -> Tensor:
        """Sets the ranges of heads, in steps, [heads], by how far the row sums of A (or
        the column sums, if normalized as released) are below one.

        Returns:
            torch.Tensor: The ranges that result. They are limited by the loss per step
            that cannot be learned: `fixed`, by default that due to `gamma`, and
            `least`, by default that of rounding.
        """
        # On a path, nodes pass on 2 gamma / (2 + m) = 1 / cosh(1 / steps).
        fixed = 2 * (1 - gamma) if fixed is None else fixed
        lost = 4 * gamma * torch.sinh(0.5 / steps).square()
        rounding = lowered = 0.0
        if least is None:  # added in squares: two neighbours' weights sum to 2
            rounding = 2 * LEAST_MARGIN * torch.finfo(steps.dtype).eps
            least = max(1e-9, 1.01 * rounding)
            lowered = self._start_edges()
        m = (lost - fixed).clamp(least, math.exp(-0.01))
        psi = -(m.square() - rounding**2).log() / 2
        softplus_(self.delta_bias[2], psi + lowered)
        return 0.5 / torch.asinh(((m + fixed) / (4 * gamma)).sqrt())

    def _start_edges(self) -> float:
        """Starts selectivities of edges where softplus has a slope, so that features
        of edges matter at once. Returns by how much this lowers the logarithms of
        weights, all alike.
        """
        if self.edge_bias is None:
            return 0.0
        softplus_(self.edge_bias, torch.ones_like(self.edge_bias))
        return 1 / 3

    def _loudness(self, steps: Tensor) -> Tensor:
        """The input gates for which a head's mixed values are initially ten times as
        large as the skip connection, or as large without a norm that divides by it.

        On a path, where heads pass on 1 / cosh(1 / steps), the norm of a row of
        (I - A)^-1 is coth(1 / steps)^1.5. Products of queries and keys are about one
        if these are normalized, and otherwise sqrt(state_channels) / 10 for inputs of
        variance one.
        """
        norm = torch.tanh(1 / steps) ** -1.5
        product = 1 if self.qk_norm else math.sqrt(self.state_channels) / 10
        return (10 if isinstance(self.norm, RMSNorm) else 1) / (norm * product)

    def _reset_filters(self) -> None:
        reset_filter_(cast(Tensor, self.local_weight))

    def over_edges(self, edge_index: Tensor) -> Filter | None:
        """The local filter over a node and its parents in each DAG, if there is one."""
        weight, num_dags = self.local_weight, self.num_dags
        return over_dags(weight, num_dags, edge_index, self.explained)

    def project_linearly(self, x: Tensor, filtered: Filter | None) -> list[Tensor]:
        """Value, key and query before SiLU, [V, channels]."""
        return projected(x, (self.lin_value, self.lin_key, self.lin_query), filtered)

    def project(
        self, x: Tensor, filtered: Filter | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key, [V, copies * groups, N], and value, [V, scan_heads, P]."""
        value, key, query = map(F.silu, self.project_linearly(x, filtered))
        query, key = (y.unflatten(1, (-1, self.state_channels)) for y in (query, key))
        if self.qk_norm:
            query, key = (F.rms_norm(y, y.shape[-1:], eps=1e-5) for y in (query, key))
            query = query / math.sqrt(self.state_channels)
        return query, key, self.in_scans(value.unflatten(1, (self.heads, -1)))

    def in_scans(self, value: Tensor) -> Tensor:
        """Values [V, heads, P], repeated for all heads of the recurrence."""
        return value.repeat_interleave(2, dim=1) if self.differential else value

    def out_of_scans(self, y: Tensor) -> Tensor:
        """The outputs [V, heads, P], given those of all heads of the recurrence."""
        if self.contrast is None:
            return y
        first, second = y.unflatten(1, (-1, 2)).unbind(2)
        return first - self.contrast.view(-1, 1) * second

    def gated_by(self, x: Tensor) -> Tensor:
        """What gates read: nodes or, without a norm, their directions, so that outputs
        are proportional to large inputs.
        """
        return rms_norm(x) if isinstance(self.norm, torch.nn.Identity) else x

    def selectivities(self, x: Tensor) -> Tensor:
        """Selectivities [V, num_selectivities, scan_heads], before the bias."""
        delta = self.lin_delta(self.gated_by(x))
        return at_least_float32(delta.unflatten(1, (-1, self.scan_heads)))

    def edge_selectivity(
        self, edge_attr: Tensor | None, num_edges: int, dag: int = 0
    ) -> Tensor | None:
        """Selectivities of a DAG's edges, [E, scan_heads]; None without features."""
        if self.lin_edge is None or self.edge_bias is None:
            return None
        edge_attr = edge_features(edge_attr, self.edge_dim, num_edges)
        delta = self.lin_edge(edge_attr).unflatten(1, (self.num_dags, -1))
        return F.softplus(at_least_float32(delta[:, dag]) + self.edge_bias[dag])

    def output(
        self, y: Tensor, x: Tensor, value: Tensor, log_scale: Tensor | None = None
    ) -> Tensor:
        """Skip connection, norm, gate and projection after the recurrence, whose states
        may have been divided by exp(log_scale), [V, scan_heads].
        """
        skip = self.skip.view(-1, 1)
        if log_scale is not None:
            # The norm is that of a multiple of the row, if both are far above its
            # epsilon. What is nearly zero counts as zero if its factor would overflow.
            most = 0.7 * math.log(torch.finfo(y.dtype).max)
            log_size = y.detach().abs().amax(2).log()
            zero = (log_scale > most) & (log_size < 20 - most)
            log_size = (log_scale + log_size).masked_fill(zero, 0)
            rest = (log_size.amax(1, keepdim=True) - 20).clamp(min=0)
            factor = torch.exp(log_scale - rest).masked_fill(zero, 0)
            y = y * factor.unsqueeze(-1)
            skip = skip * torch.exp(-rest).unsqueeze(-1)
        y, value = self.out_of_scans(y), value[:, :: 1 + self.differential]
        y = (y + skip * value).flatten(1)
        if self.lin_gate is None:
            y = self.norm(y)
        else:
            gate = F.silu(at_least_float32(self.lin_gate(self.gated_by(x))))
            y = self.norm(y) * gate if self.norm_before_gate else self.norm(y * gate)
        return self.lin_out(y.to(x.dtype))

    def __repr__(self) -> str:
        dags = f", num_dags={self.num_dags}" if self.num_dags > 1 else ""
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}, state_channels={self.state_channels}{dags})"
        )


def gated_value(value: Tensor, input_gate: Tensor) -> Tensor:
    """Values times input gates, [V, heads, P]; gating keys would take more memory."""
    return value * input_gate.unsqueeze(-1)


def mean_of_ends(
    edge_index: Tensor,
    target: Tensor,
    source: Tensor | None,
    edge: Tensor | None = None,
) -> Tensor:
    """The mean of an edge's selectivities: its target's and, if given, the others."""
    parts = [target[edge_index[1]]]
    if source is not None:
        parts.append(source[edge_index[0]])
    if edge is not None:
        parts.append(edge.expand_as(parts[0]))
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)


def over_dags(
    weight: Tensor | None,
    num_dags: int,
    edge_index: Tensor,
    explained: Callable[[Tensor, int], Tensor],
) -> Filter | None:
    """A filter along several DAGs, stacked as one graph; None without weights.

    Weights [F, 1 + D * steps] apply to the node itself, and in each DAG to the mean of
    its parents, the mean of their means, and so on. On a directed path, this is a
    causal convolution.
    """
    if weight is None:
        return None
    own, sides = weight[:, 0], weight[:, 1:].t().unflatten(0, (num_dags, -1))
    source, target = edge_index

    def filtered(x: Tensor) -> Tensor:
        y = at_least_float32(x)  # half precision does not count far
        out, far = y * own, y if num_dags == 1 else y.repeat(num_dags, 1)
        ones = y.new_ones(source.size(0), 1)
        degree = y.new_zeros(far.size(0), 1).index_add(0, target, ones).clamp(min=1)
        for side in sides.unbind(1):
            passed = explained(far[source], far.size(0))
            far = torch.zeros_like(far).index_add(0, target, passed) / degree
            for d, part in enumerate(far.view(num_dags, *y.shape)):
                out = torch.addcmul(out, part, side[d].to(y.dtype))
        return out.to(x.dtype)

    return filtered
