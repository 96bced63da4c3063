"""Layers whose memories follow the delta rule, by surprise, or several in each head."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import at_least_float32, check_inputs
from pyg_chimera.nn.conv._gated_block import Projected
from pyg_chimera.nn.conv._init import head_reaches
from pyg_chimera.nn.conv.gated_delta_conv import GatedDeltaConv
from pyg_chimera.nn.hybrid._contrast import Contrast, ResetsAll
from pyg_chimera.nn.hybrid._surprise_scan import Inputs, surprise_scan
from pyg_chimera.ops.common.checks import check_floats, check_indices, check_option

__all__ = [
    "DifferentialGatedDeltaConv",
    "HierarchicalMemoryConv",
    "SurpriseGatedDeltaConv",
]

#: The share of hierarchical memories that remains after a step, before training.
_DECAYS = (0.8, 0.99, 0.999)


class SurpriseGatedDeltaConv(GatedDeltaConv):
    r"""The gated delta rule, where a node writes more, the less it was expected: that
    of :class:`~pyg_chimera.nn.GatedDeltaConv` along DAGs, with the surprise of
    `"Titans: Learning to Memorize at Test Time" <https://arxiv.org/abs/2501.00663>`_,
    here without a gradient.

    .. math::
        \mathbf{S}_i = \mathbf{S}'_i + \beta_i s_i \mathbf{k}_i (\mathbf{v}_i -
        \mathbf{S}_i'^{\top} \mathbf{k}_i)^{\top}, \qquad
        s_i = \sigma \left( \frac{\| \mathbf{v}_i - \mathbf{S}_i'^{\top} \mathbf{q}_i
        \|^2}{P \tau} \right), \qquad
        \mathbf{S}'_i = \sum_{j \to i} A_{ij} \mathbf{S}_j

    A node's query reads what it expects of its :math:`P` values, and :math:`\tau`, the
    temperature of a head, is learned, initially 1. Nodes that expect their values write
    half as much as without surprise. The rule is not linear: states are computed by
    levels in PyTorch, on any device, so that deep graphs such as long paths are slow.

    Args:
        in_channels, out_channels, heads, state_channels, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.GatedDeltaConv`, and so are shapes and errors;
            :obj:`acyclic` is set, and :obj:`"state"` is the only form.
        order (str, optional): As in :class:`~pyg_chimera.nn.ChimeraDAGConv`: what to do
            with cycles. (default: :obj:`"auto"`)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        order: str | None = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs["acyclic"] = True
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_option("order", order, (None, "auto"))
        check_option("form", self.form, ("auto", "state"))
        self.order = order

    def add_parameters(self, num_gates: int, **kwargs: Any) -> None:
        """Adds the temperatures, too."""
        super().add_parameters(num_gates, **kwargs)
        self.log_temperature = Parameter(torch.empty(self.heads))

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.log_temperature)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes arguments of
        :meth:`GatedDeltaConv.forward <pyg_chimera.nn.GatedDeltaConv.forward>`; cycles
        are errors if :obj:`order` does not allow them.
        """
        check_inputs(x, self.in_channels, batch)
        out = self.along_halves(x, edge_index, edge_attr, batch)
        return super().forward(x, edge_index, edge_attr, batch) if out is None else out

    def recalled(
        self, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *graph: Any
    ) -> Tensor:
        """What queries read from the memories, [V, heads, P]."""
        edge_index, weight, batch = graph
        floats = check_floats(
            query=query, key=key, value=value, beta=beta, edge_weight=weight,
            temperature=at_least_float32(self.log_temperature).exp(),
        )  # fmt: skip
        (batch,) = check_indices(value, batch=batch)
        inputs = Inputs(*floats, edge_index, batch, self.backend)  # type: ignore[call-arg,arg-type]
        return surprise_scan(inputs).to(value.dtype)


class SeveralMemories(GatedDeltaConv):
    """A layer whose heads have several memories, which decay and write by gates of
    their own, [V, heads * memories], those of a head in succession.
    """

    memories: ClassVar[int]

    def add_parameters(self, num_gates: int, **kwargs: Any) -> None:
        """Adds the gates of each memory."""
        heads = self.heads
        self.heads = heads * self.memories
        super().add_parameters(num_gates, **kwargs)
        self.heads = heads
        self.skip = Parameter(torch.empty(heads))

    def _set_reach(self, steps: Tensor) -> None:
        assert self.reach is not None  # or it is not called
        super()._set_reach(head_reaches(self.reach, self.heads * self.memories))


class DifferentialGatedDeltaConv(ResetsAll, SeveralMemories):
    r"""The difference of two memories of each head: those of
    :class:`~pyg_chimera.nn.GatedDeltaConv`, and the :math:`\lambda` of the
    `"Differential Transformer" <https://arxiv.org/abs/2410.05258>`_, so that what both
    have taken up equally cancels.

    .. math::
        \mathbf{y}_i = \mathbf{S}_i^{(1) \top} \mathbf{q}_i - \lambda
        \mathbf{S}_i^{(2) \top} \mathbf{q}_i, \qquad
        \lambda = \exp(\boldsymbol{\lambda}_{q_1}^{\top}
        \boldsymbol{\lambda}_{k_1}) - \exp(\boldsymbol{\lambda}_{q_2}^{\top}
        \boldsymbol{\lambda}_{k_2}) + \lambda_0

    The memories have the same queries, keys and values, and their own transitions and
    :math:`\beta`. Each head learns its :math:`\lambda`, and :math:`\lambda_0 = 0.8 -
    0.6 \exp(-0.3 (l - 1))` in layer :math:`l`.

    Args:
        in_channels, out_channels, heads, state_channels, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.GatedDeltaConv`, and so are shapes and errors.
        depth (int, optional): The position :math:`l` of the layer in the model, counted
            from 1. (default: :obj:`1`)
    """

    memories = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        depth: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        self.contrast = Contrast(self.heads, self.state_channels, depth)

    def recalled(
        self, query: Tensor, key: Tensor, value: Tensor, *others: Any
    ) -> Tensor:
        """What queries read from the memories, [V, heads, P]."""
        y = super().recalled(query, key, value.repeat_interleave(2, 1), *others)
        return self.contrast(y.unflatten(1, (-1, 2)))


class HierarchicalMemoryConv(SurpriseGatedDeltaConv, SeveralMemories):
    r"""Three memories of each head along DAGs, and a router that weighs what is read
    from them: a fast one, a slow one, as in `"HGRN2"
    <https://arxiv.org/abs/2404.07904>`_, and one of what was surprising, as in
    `"Titans" <https://arxiv.org/abs/2501.00663>`_; the layer is that of neither.

    .. math::
        \mathbf{y}_i = \sum_{m=1}^3 w_{im} \mathbf{S}_i^{(m) \top} \mathbf{q}_i, \qquad
        \mathbf{w}_i = \textrm{softmax}(\mathbf{W}_r \mathbf{x}_i + \mathbf{b}_r)

    The first two are memories of :class:`~pyg_chimera.nn.GatedDeltaConv`, the third is
    that of :class:`~pyg_chimera.nn.SurpriseGatedDeltaConv`. They have the same queries,
    keys and values, and their own transitions and :math:`\beta`, the importance of a
    node for a memory. Before training, 0.8, 0.99 and 0.999 of them remain after a step
    along a path.

    Args:
        in_channels, out_channels, heads, state_channels, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.SurpriseGatedDeltaConv`, and so are shapes and
            errors; of :obj:`reach`, only :obj:`None` has an effect.
    """

    memories = len(_DECAYS)

    def add_parameters(self, num_gates: int, **kwargs: Any) -> None:
        """Adds the router, too."""
        super().add_parameters(num_gates, **kwargs)
        self.lin_router = Linear(self.in_channels, self.heads * self.memories)

    def _set_reach(self, steps: Tensor) -> None:
        decays = [-1 / math.log(x) for x in _DECAYS] * self.heads
        GatedDeltaConv._set_reach(self, steps.new_tensor(decays))

    def recalled(
        self, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *graph: Any
    ) -> Tensor:
        """What queries read from each memory, [V, heads, memories, P]."""
        edge_index, weight, batch = graph
        beta, weight = (y.unflatten(1, (-1, self.memories)) for y in (beta, weight))
        steady = GatedDeltaConv.recalled(
            self, query, key, value.repeat_interleave(2, 1), beta[..., :2].flatten(1),
            edge_index, weight[..., :2].flatten(1), batch,
        )  # fmt: skip
        surprised = super().recalled(
            query, key, value, beta[..., 2], edge_index, weight[..., 2], batch
        )
        return torch.cat([steady.unflatten(1, (-1, 2)), surprised.unsqueeze(2)], 2)

    def output(self, y: Tensor, nodes: Projected) -> Tensor:
        """The router, and what follows in a block."""
        logits = self.lin_router(nodes.x).unflatten(1, (self.heads, -1))
        share = at_least_float32(logits).softmax(-1).unsqueeze(-1)
        return super().output((share * y).sum(2), nodes)
