import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_channels,
    check_heads,
    check_inputs,
    edge_features,
    has_edge_mask,
    may_be_divided,
)
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.nn.conv._base import Mixer
from pyg_chimera.nn.conv._init import (
    GateLinear,
    check_reach,
    head_reaches,
    log_uniform_softplus_,
    softplus_,
)
from pyg_chimera.nn.conv._projection import is_plain, projected
from pyg_chimera.nn.conv._window import Filter, reset_filter_
from pyg_chimera.ops.chimera_transition import LEAST_MARGIN
from pyg_chimera.ops.common.checks import FORMS, check_flag, check_option
from pyg_chimera.ops.common.operator import without_autocast
from pyg_chimera.ops.dag_filter import dag_filter
from pyg_chimera.ops.gated_norm import gated_inputs, gated_output
from pyg_chimera.ops.structure.node_order import dag_halves


class GatedBlock(Mixer):
    r"""The part of layers around the recurrence: projections and a local filter before
    it, and a norm, a gate and a projection after it. Subclasses make the parameters.
    """

    lin_gate: Linear | None
    norm: torch.nn.Module
    lin_out: Linear
    #: The activation of the gate.
    act: Callable[[Tensor], Tensor] = staticmethod(F.silu)
    norm_before_gate = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        *,
        edge_dim: int | None = None,
        gated: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels, self.edge_dim = check_channels(
            in_channels, out_channels, edge_dim
        )
        self.heads, _, _ = check_heads(self.out_channels, heads)
        check_flag("gated", gated)
        self.gated = gated
        self.num_dags = 1
        self.local_weight: Parameter | None = None

    def add_filter(self, channels: int, *taps: int) -> None:
        """Adds a local filter for each of the channels of the projections."""
        self.local_weight = Parameter(torch.empty(channels, *taps))

    def along_halves(
        self,
        x: Tensor,
        edge_index: Any,
        edge_attr: Any,
        batch: Tensor | None,
    ) -> Tensor | None:
        """The mean of the outputs along the two DAGs into which a graph with cycles is
        divided; None for a DAG, or where the option `order` says so.
        """
        if not may_be_divided(self, edge_index):
            return None
        # To which end edges lead does not matter here.
        index, attr = as_edges(
            edge_index, edge_attr, x.size(0), "source_to_target", self.edge_dim
        )
        halves = dag_halves(index, x.size(0))
        if halves is None:
            return None
        if self.edge_dim is not None:
            attr = edge_features(attr, self.edge_dim, index.size(1))
        if self.explain:
            raise ValueError(
                f"Edge masks explain a {type(self).__name__} on DAGs only, as it "
                "divides a graph with cycles into two; use 'ChimeraConv' or 'PLSTMConv'"
            )

        def along(ids: Tensor) -> Tensor:
            own = None if attr is None else attr[ids]
            return self.forward(x, index[:, ids], own, batch)

        later = along(halves.later)
        if halves.earlier.numel() == 0:  # a DAG, but for self-loops
            return later
        mean = (later + along(halves.earlier)) / 2
        cyclic = halves.cyclic.view(-1, *[1] * (later.dim() - 1))
        return torch.where(cyclic, mean, later)

    def over_edges(self, edge_index: Tensor) -> Filter | None:
        """The local filter over a node and its parents in each DAG, if there is one."""
        weight, num_dags, explained = self.local_weight, self.num_dags, None
        if weight is None:
            return None
        if has_edge_mask(self, num_dags):
            explained = self.explain_message

        def filtered(x: Tensor) -> Tensor:
            y = at_least_float32(x)  # half precision does not count far
            return dag_filter(y, weight, edge_index, num_dags, explained).to(x.dtype)

        return filtered

    def finish(self, y: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Norm, gate and projection."""
        if gate is None:
            y = self.norm(y)
        elif not self.norm_before_gate:
            y = self.norm(y * self.act(gate))
        elif is_plain(self.norm) and self.act is F.silu:
            y = self.norm(y, gate)
        else:
            y = self.norm(y) * self.act(gate)
        return self.project_out(y, dtype)

    def project_out(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The last projection. Without a norm, its input may be too large for half
        precision where its output, which terms of both signs make up, is not.
        """
        lin, device = self.lin_out, y.device.type
        narrow = torch.finfo(dtype).bits < 32 or (
            torch.amp.is_autocast_available(device)
            and torch.is_autocast_enabled(device)
        )
        if not (narrow and type(self.norm) is torch.nn.Identity and is_plain(lin)):
            return lin(y.to(dtype))
        weight = lin.weight.to(y.dtype)
        bias = None if lin.bias is None else lin.bias.to(y.dtype)
        with without_autocast(y):
            return F.linear(y, weight, bias).to(dtype)

    def __repr__(self) -> str:
        dags = f", num_dags={self.num_dags}" if self.num_dags > 1 else ""
        states = getattr(self, "state_channels", None)
        states = "" if states is None else f", state_channels={states}"
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}{states}{dags})"
        )


class Projected(NamedTuple):
    """Projections of nodes, in float32 at least, before biases of gates and SiLU."""

    value: Tensor  #: [V, channels]
    key: Tensor
    query: Tensor
    gate: Tensor | None
    delta: Tensor  #: selectivities, [V, number, heads]
    x: Tensor  #: the nodes


class ChimeraBlock(GatedBlock):
    r"""The common part of all layers with queries, keys and selectivities: the
    projections :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}` before the recurrence, and
    the gated block of Mamba-2 after it (Figure 6 of the paper), with the norm before
    the gate by default. Heads start with ranges of their own. Options are documented in
    :class:`~pyg_chimera.nn.ChimeraConv`.
    """

    #: Whether the output is linear in the values, with a sum over paths as weights.
    additive = True
    #: Whether queries and keys are normalized.
    qk_norm = False
    #: Initial standard deviation of selectivities before softplus, if `reach` is given.
    #: If it is small, all nodes write equally, states mainly count nodes, and learning
    #: more takes long (but along DAGs, where it would shorten ranges).
    gate_std = 3**0.5

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        groups: int = 1,
        reach: tuple[float, float] | None = (4.0, 64.0),
        form: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, **kwargs)
        _, self.state_channels, self.groups = check_heads(
            self.out_channels, self.heads, state_channels, groups
        )
        check_reach(reach)
        check_option("form", form, FORMS)
        self.reach = reach
        self.form = form

    def add_parameters(
        self,
        num_gates: int,
        *,
        num_dags: int = 1,
        copies: int = 1,
        kernel: int = 1,
        norm: str | None = "rms",
    ) -> None:
        """Adds the parameters of the block.

        Args:
            num_gates: The number of selectivities of a node and head.
            num_dags: The number of DAGs, each with a selectivity of its edges.
            copies: The number of different queries and keys of a group.
            kernel: The number of generations in the local filter, with the node itself.
            norm: ``"rms"``, or None to leave the norm out.
        """
        check_option("norm", norm, ("rms", None))
        self.num_dags = num_dags
        size, heads = self.in_channels, self.heads
        states = copies * self.groups * self.state_channels
        self.lin_value = Linear(size, self.out_channels, bias=self.bias)
        self.lin_key = Linear(size, states, bias=self.bias)
        self.lin_query = Linear(size, states, bias=self.bias)
        self.lin_gate = None
        if self.gated:
            self.lin_gate = Linear(size, self.out_channels, bias=self.bias)
        std = 3**-0.5 if self.reach is None else self.gate_std
        self.lin_delta = GateLinear(size, num_gates * heads, std)
        self.delta_bias = Parameter(torch.empty(num_gates, heads))
        self.lin_edge = self.edge_bias = None
        if self.edge_dim is not None:
            self.lin_edge = Linear(self.edge_dim, num_dags * heads, bias=False)
            self.edge_bias = Parameter(torch.empty(num_dags, heads))
        if kernel > 1:
            self.add_filter(self.out_channels + 2 * states, 1 + num_dags * (kernel - 1))
        self.skip = Parameter(torch.empty(heads))
        self.norm = torch.nn.Identity()
        if norm is not None:
            self.norm = RMSNorm(self.out_channels, 1e-5)
        self.lin_out = Linear(self.out_channels, self.out_channels, bias=self.bias)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for bias in (self.delta_bias, self.edge_bias):
            if bias is not None:
                log_uniform_softplus_(bias)
        self._reset_filters()
        torch.nn.init.ones_(self.skip)
        reset(self.norm)
        if self.reach is not None:
            self._set_reach(head_reaches(self.reach, self.heads))

    def _reset_filters(self) -> None:
        if self.local_weight is not None:
            reset_filter_(self.local_weight)

    def edges(
        self, x: Tensor, edge_index: Adj, edge_attr: Tensor | None, batch: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The checked edges of one graph, and their selectivities [E, heads], which are
        None without features.
        """
        check_inputs(x, self.in_channels, batch)
        edge_index, edge_attr = as_edges(
            edge_index, edge_attr, x.size(0), self.flow, self.edge_dim
        )
        return edge_index, self.edge_selectivity(edge_attr, edge_index.size(1))

    def project(
        self, x: Tensor, filtered: Filter | None = None, read: Tensor | None = None
    ) -> Projected:
        """All projections of nodes, the first three filtered; the gate and
        selectivities are those of `read`, if it is given.
        """
        first = [self.lin_value, self.lin_key, self.lin_query]
        rest = [self.lin_delta]
        if self.lin_gate is not None:
            rest.append(self.lin_gate)
        if filtered is None and read is None:
            parts = projected(x, first + rest)
        else:
            parts = projected(x, first, filtered)
            parts += projected(x if read is None else read, rest)
        value, key, query, delta, *gate = parts
        delta = delta.unflatten(1, self.delta_bias.shape)
        return Projected(value, key, query, gate[0] if gate else None, delta, x)

    def query_key_value(
        self, nodes: Projected, input_gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key, [V, copies * groups, N], after SiLU and norms, and value,
        [V, heads, P], after SiLU and times the gate [V, heads].
        """
        query, key = (
            y.unflatten(1, (-1, self.state_channels)) for y in (nodes.query, nodes.key)
        )
        value = nodes.value.unflatten(1, (self.heads, -1))
        return gated_inputs(query, key, value, input_gate, self.qk_norm)

    def edge_selectivity(
        self, edge_attr: Tensor | None, num_edges: int, dag: int = 0
    ) -> Tensor | None:
        """Selectivities of a DAG's edges, [E, heads]; None without features."""
        if self.lin_edge is None or self.edge_bias is None:
            return None
        edge_attr = edge_features(edge_attr, self.edge_dim, num_edges)
        delta = self.lin_edge(edge_attr).unflatten(1, (self.num_dags, -1))
        return F.softplus(at_least_float32(delta[:, dag]) + self.edge_bias[dag])

    def output(self, y: Tensor, nodes: Projected) -> Tensor:
        """Skip connection, norm, gate and projection after the recurrence."""
        y, value, gate = y.flatten(1), nodes.value, nodes.gate
        if self.norm_before_gate and isinstance(self.norm, torch.nn.Identity):
            y = gated_output(y, value, self.skip, None, gate, 0.0)
        elif self.norm_before_gate and is_plain(self.norm):
            norm: Any = self.norm
            y = gated_output(y, value, self.skip, norm.weight, gate, norm.eps)
        else:
            y = gated_output(y, value, self.skip, None, None, 0.0)
            return self.finish(y, gate, nodes.x.dtype)
        return self.project_out(y, nodes.x.dtype)

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

    def _input_gates(self, steps: Tensor) -> Tensor:
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
        parts.append(edge)
    return sum(parts[1:], parts[0]) / len(parts)
