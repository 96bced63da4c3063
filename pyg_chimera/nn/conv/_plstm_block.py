import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.nn._inputs import check_channels, check_heads
from pyg_chimera.nn.conv._base import Mixer
from pyg_chimera.nn.conv._init import GateLinear, check_reach, head_reaches
from pyg_chimera.nn.conv._projection import projected
from pyg_chimera.nn.conv._window import Filter
from pyg_chimera.ops.common.checks import FORMS, check_integer, check_option
from pyg_chimera.ops.gated_norm import gated_norm


class Projected(NamedTuple):
    """Projections of nodes, in float32 at least, before biases of gates."""

    query: Tensor  #: [V, heads * N]
    key: Tensor
    value: Tensor  #: [V, channels]
    gate: Tensor  #: [V, DAGs * columns]


class PLSTMBlock(Mixer):
    r"""The common part of pLSTM layers: the projections :math:`\mathbf{q}, \mathbf{k},
    \mathbf{v}`, gates of nodes, and the head-wise norm.

    Its options are documented in :class:`~pyg_chimera.nn.PLSTMConv`.
    """

    edge_dim: int | None = None
    lin_out: Linear  # made by the layers, after all their other parameters

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int | None = None,
        *,
        mode: str = "P",
        normalization: str = "column",
        gate_biases: Sequence[float] = (0.0, 0.0, -3.0),
        reach: tuple[float, float] | None = (4.0, 64.0),
        form: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_option("mode", mode, ("P", "D"))
        check_option("normalization", normalization, ("column", "row"))
        in_channels, out_channels, _ = check_channels(in_channels, out_channels)
        heads, _, _ = check_heads(out_channels, heads)
        if state_channels is None:
            state_channels = out_channels // heads
        state_channels = check_integer("state_channels", state_channels, 1)
        if not isinstance(gate_biases, Sequence) or len(gate_biases) != 3:
            raise ValueError(
                "'gate_biases' must be three numbers, for source, mark and direct "
                f"gates, got {gate_biases!r}"
            )
        check_reach(reach)
        check_option("form", form, FORMS)

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.mode = mode
        self.state_channels = state_channels
        self.normalization = normalization
        self.gate_biases = tuple(gate_biases)
        self.reach = reach
        self.form = form

    def add_parameters(
        self, num_dags: int, biased: Sequence[int], columns: int
    ) -> None:
        """Adds projections and gates of each DAG.

        Args:
            num_dags: The number of DAGs, each of which has its own gates.
            biased: The sizes of a node's gates that have a bias, which come first:
                direct, source, mark, decay and possibly others.
            columns: The size of all gates of a node in a DAG.
        """
        self._biased = list(biased)
        in_channels, bias = self.in_channels, self.bias
        states = self.heads * self.state_channels
        self.lin_query = Linear(in_channels, states, bias=bias)
        self.lin_key = Linear(in_channels, states, bias=bias)
        self.lin_value = Linear(in_channels, self.out_channels, bias=bias)
        self.lin_gate = GateLinear(in_channels, num_dags * columns, std=0.0)
        self.gate_bias = Parameter(torch.empty(num_dags, sum(biased)))
        self.norm_weight = Parameter(torch.empty(self.out_channels))

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        # Initially, gates are the same for all nodes.
        source, mark, direct = self.gate_biases
        parts = self.gate_bias.data.split(self._biased, dim=1)
        for part, start in zip(parts, (direct, source, mark, 1.0), strict=False):
            part.fill_(start)
        if self.reach is not None:  # otherwise, nothing decays at first
            passed = torch.exp(-1 / head_reaches(self.reach, self.heads))
            parts[3].copy_(self._decays_of_heads(torch.atanh(passed) / 5))
        torch.nn.init.ones_(self.norm_weight)

    def _decays_of_heads(self, values: Tensor) -> Tensor:
        """The biases of all decays of a node in a DAG, given one value per head."""
        raise NotImplementedError

    def project(self, x: Tensor, filtered: Filter | None = None) -> Projected:
        """All projections of nodes, all but the gates filtered."""
        first = [self.lin_query, self.lin_key, self.lin_value]
        if filtered is None:
            return Projected(*projected(x, [*first, self.lin_gate]))
        return Projected(*projected(x, first, filtered), *projected(x, [self.lin_gate]))

    def query_key_value(self, nodes: Projected) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key, [V, heads, N], and value, [V, heads, P]."""
        # Contiguous once, not in each pass. Dividing the smallest makes a sum over DAGs
        # a mean.
        scale = 1 / (math.sqrt(self.state_channels) * self.gate_bias.size(0))
        rows = nodes.query * scale, nodes.key.contiguous(), nodes.value.contiguous()
        query, key, value = (y.unflatten(1, (self.heads, -1)) for y in rows)
        return query, key, value

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm of each head and projection, after the recurrence."""
        out = gated_norm(y, self.norm_weight.view(self.heads, -1))
        return self.lin_out(out.flatten(1).to(x.dtype))

    def __repr__(self) -> str:
        order = f", order={self.order!r}" if hasattr(self, "order") else ""
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}, mode={self.mode!r}{order})"
        )
