import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, LazyLinear, Linear, Parameter
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_channels,
    check_inputs,
    check_no_edge_attr,
    check_size,
)
from pyg_chimera.nn._norm import LazyLayerNorm
from pyg_chimera.nn.conv._base import Layer
from pyg_chimera.nn.conv._init import log_uniform_softplus_
from pyg_chimera.nn.conv._projection import is_plain, projected
from pyg_chimera.nn.conv._window import Continued
from pyg_chimera.ops import causal_conv1d, node_score, node_sequences, selective_scan
from pyg_chimera.ops.common.checks import BACKENDS, check_integer, check_option
from pyg_chimera.ops.common.torch_private import is_in_forward_mode
from pyg_chimera.ops.structure import ORDERS

__all__ = ["GraphMambaConv"]


class _Packed(NamedTuple):
    """The sequences of m permutations of V nodes, concatenated."""

    node: Tensor  # [m * V], the node at each position
    copy: Tensor  # [m * V], the same, where node v of permutation p is p * V + v
    place: Tensor  # [m * V], the position of each copy: the inverse of `copy`
    ptr: Tensor  # [S + 1], where sequences begin

    def reversed(self) -> "_Packed":
        length = self.node.size(0)
        node, copy, ptr = (x.flip(0) for x in (self.node, self.copy, self.ptr))
        return _Packed(node, copy, length - 1 - self.place, length - ptr)


class GraphMambaConv(Layer, torch.nn.Module):
    r"""The Graph-Mamba block from `"Graph-Mamba: Towards Long-Range Graph Sequence
    Modeling with Selective State Spaces" <https://arxiv.org/abs/2402.00789>`_: the
    nodes of each graph are sorted into a sequence :math:`v_1, \ldots, v_L`, most
    important last, so that important nodes are influenced by most others. Mamba's
    selective state space model runs along this sequence.

    .. math::
        \mathbf{u}_t &= \textrm{SiLU} \Big( \mathbf{b} + \sum_{k < K} \mathbf{w}_k \odot
        \mathbf{W}_{\textrm{in}} \, \textrm{LN}(\mathbf{x}_{v_{t-k}}) \Big), \qquad
        (\boldsymbol{\delta}_t, \mathbf{B}_t, \mathbf{C}_t) = \mathbf{W} \mathbf{u}_t

        \boldsymbol{\Delta}_t &= \textrm{softplus}(\mathbf{W}_{\Delta}
        \boldsymbol{\delta}_t + \mathbf{b}_{\Delta}), \qquad
        \mathbf{h}_t = \exp(\boldsymbol{\Delta}_t \mathbf{A}) \odot \mathbf{h}_{t-1} +
        \boldsymbol{\Delta}_t \mathbf{u}_t \mathbf{B}_t^{\top}

        \mathbf{x}^{\prime}_{v_t} &= \mathbf{W}_{\textrm{out}} \big( (\mathbf{h}_t
        \mathbf{C}_t + \mathbf{D} \odot \mathbf{u}_t) \odot
        \textrm{SiLU}(\mathbf{W}_{\textrm{gate}} \, \textrm{LN}(\mathbf{x}_{v_t}))
        \big)

    where :math:`\boldsymbol{\delta}_t` has a sixteenth of the output channels.

    Nodes of equal importance are in random order. In training, each call draws one
    permutation. In evaluation, there are :obj:`num_eval_permutations` fixed ones, and
    :math:`\mathbf{h}_t \mathbf{C}_t + \mathbf{D} \odot \mathbf{u}_t` is averaged over
    them: the same input gives the same output, bit for bit. All sequences of a batch
    run as one, without padding, in time and memory linear in the number of nodes.

    The layer is a mixer: the residual connection and dropout belong to the layer around
    it, such as :class:`~pyg_chimera.nn.GPSLayer`.

    .. code-block:: python

        conv = GatedGCNConv(96, 96, edge_dim=96)
        layer = GPSLayer(96, conv=conv, mixer=GraphMambaConv(96), dropout=0.1)
        x, edge_attr = layer(x, edge_index, batch, edge_attr)

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        state_channels (int, optional): Size of :math:`\mathbf{B}_t` and
            :math:`\mathbf{C}_t`, and of the state of a channel. (default: :obj:`16`)
        conv_kernel (int, optional): The number of nodes in the kernel of the
            convolution along the sequence. (default: :obj:`4`)
        expand (int, optional): The width of the state space model, as a multiple of
            :obj:`out_channels`. (default: :obj:`1`)
        bias (bool, optional): If :obj:`True`, :math:`\mathbf{W}_{\textrm{in}},
            \mathbf{W}_{\textrm{gate}}` and :math:`\mathbf{W}_{\textrm{out}}` have an
            additive bias. (default: :obj:`False`)

    Recurrence:
        order (str, optional): The score by which nodes are sorted, see
            :func:`~pyg_chimera.ops.node_score`: one of :obj:`"order"`, :obj:`"degree"`,
            :obj:`"eigenvector"`, :obj:`"pagerank"`, :obj:`"closeness"`, :obj:`"bfs"`,
            :obj:`"random"` and :obj:`"cluster"` (which puts clusters, and the nodes
            within each, in random order). With :obj:`None`, :obj:`score` must be given
            to :meth:`forward`. (default: :obj:`"degree"`)
        num_bins (int, optional): The number of parts into which the nodes of each graph
            are divided at random; each part is a separate sequence. For graphs of
            hundreds of nodes. (default: :obj:`1`)
        bidirectional (bool, optional): Whether a second model, whose outputs are added
            to those of the first, runs along the reversed sequences. (default:
            :obj:`False`)
        norm (bool, optional): If :obj:`False`, the layer norm :math:`\textrm{LN}` of
            the input is left out. (default: :obj:`True`)

    Execution:
        num_eval_permutations (int, optional): The number of permutations in
            evaluation. (default: :obj:`5`)
        backend (str, optional): :obj:`"numba"`, :obj:`"triton"`, :obj:`"torch"`,
            :obj:`"reference"` or :obj:`"auto"`, see
            :func:`~pyg_chimera.ops.selective_scan`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*,
          scores :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If a size is not positive, or :obj:`order` is unknown.

    Example:
        >>> conv = GraphMambaConv(16, 32)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    edge_dim = None  #: none are read
    seed = 0  #: of the fixed permutations in evaluation

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        state_channels: int = 16,
        conv_kernel: int = 4,
        expand: int = 1,
        order: str | None = "degree",
        num_eval_permutations: int = 5,
        num_bins: int = 1,
        bidirectional: bool = False,
        norm: bool = True,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        in_channels, out_channels, _ = check_channels(in_channels, out_channels)
        self.state_channels = check_integer("state_channels", state_channels, 1)
        self.conv_kernel = check_integer("conv_kernel", conv_kernel, 1)
        self.expand = check_integer("expand", expand, 1)
        self.num_eval_permutations = check_integer(
            "num_eval_permutations", num_eval_permutations, 1
        )
        self.num_bins = check_integer("num_bins", num_bins, 1)
        check_option("backend", backend, BACKENDS)
        if order is not None and order not in ORDERS:
            raise ValueError(
                f"'order' must be one of {list(ORDERS)}, or None for scores that are "
                f"given to the forward method, got {order!r}"
            )

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.order = order
        self.dt_rank = math.ceil(out_channels / 16)
        self.bidirectional = bidirectional
        self.backend = backend

        inner = self.expand * out_channels
        lazy = in_channels == -1
        self.norm = None
        if norm:
            self.norm = LazyLayerNorm() if lazy else LayerNorm(in_channels)
        self.lin_in, self.lin_gate = (
            LazyLinear(inner, bias) if lazy else Linear(in_channels, inner, bias)
            for _ in range(2)
        )
        self.scans = torch.nn.ModuleList(
            _Scan(inner, self.state_channels, self.conv_kernel, self.dt_rank)
            for _ in range(1 + bidirectional)
        )
        self.lin_out = Linear(inner, out_channels, bias=bias)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for module in self.children():
            reset(module)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        edge_attr: None = None,
        batch: Tensor | None = None,
        score: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor, optional): The edge indices, from
                which scores are computed unless they are given. (default: :obj:`None`)
            edge_attr (None, optional): Not supported; accepted for containers that call
                all their layers in the same way. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node, sorted or not.
                (default: :obj:`None`, one graph)
            score (torch.Tensor, optional): The score by which nodes are sorted,
                ascending, as stored by :class:`~pyg_chimera.transforms.NodeOrder`; with
                :obj:`order="cluster"`, the cluster of each node. (default: :obj:`None`,
                computed according to :obj:`order`)
            generator (torch.Generator, optional): Draws the permutation in training;
                not with checkpoints of activations, which restore PyTorch's global one
                alone. (default: :obj:`None`, the global one)

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If :obj:`x`, :obj:`batch` or :obj:`score` has the wrong shape, a
                score is NaN, or neither scores nor the edges needed to compute them are
                given.
        """
        check_inputs(x, self.in_channels, batch)
        check_no_edge_attr(self, edge_attr)
        check_size(edge_index, x.size(0))
        packed = self._packed(x, edge_index, batch, score, generator)
        if self.norm is not None:
            x = self.norm(x)
        # Node-wise operations are shared by all permutations.
        inputs, gate = projected(x, (self.lin_in, self.lin_gate))
        y = self.scans[0](inputs, packed, self.backend)
        if self.bidirectional:
            y = y + self.scans[1](inputs, packed.reversed(), self.backend)
        return self._gated(y, gate, x.dtype)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each sequence by one node, as
        :meth:`GPSLayer.step <pyg_chimera.nn.GPSLayer.step>`, in time independent of how
        many nodes came before. Requires :obj:`order="order"` and a single direction.

        Raises:
            ValueError: If the layer sorts nodes, or is bidirectional.
        """
        check_inputs(x, self.in_channels)
        if self.order != "order" or self.bidirectional or self.num_bins > 1:
            raise ValueError(
                "Sequences are continued with order='order', bidirectional=False and "
                f"num_bins=1, got {self.order!r}, {self.bidirectional} and "
                f"{self.num_bins}"
            )
        if self.norm is not None:
            x = self.norm(x)
        scan: Any = self.scans[0]
        inputs, gate = projected(x, (self.lin_in, self.lin_gate))
        y, state = scan.step(inputs, state)
        return self._gated(y, gate, x.dtype), state

    def _gated(self, y: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        return self.lin_out((y * F.silu(gate)).to(dtype))

    def _packed(
        self,
        x: Tensor,
        edge_index: Adj | None,
        batch: Tensor | None,
        score: Tensor | None,
        generator: torch.Generator | None,
    ) -> _Packed:
        V, order = x.size(0), self.order
        if score is None and order in ("order", "random"):  # all nodes are equal
            score = torch.zeros(V, dtype=torch.long, device=x.device)
        elif score is None:
            if order is None:
                raise ValueError("'score' must be given with order=None, got None")
            if edge_index is None:
                raise ValueError(
                    f"'edge_index' or 'score' must be given with order={order!r}, got "
                    "None"
                )
            edge_index, _ = as_edges(edge_index, None, V, "source_to_target", None)
            score = node_score(edge_index, V, order, batch)
        if isinstance(score, Tensor) and score.shape != (V,):
            raise ValueError(
                f"'score' must be [nodes] = [{V}], got {list(score.shape)}"
            )
        shuffle = order != "order"
        m = self.num_eval_permutations if shuffle and not self.training else 1
        node, ptr = node_sequences(
            score, batch, num_permutations=m, num_bins=self.num_bins,
            clusters=order == "cluster", shuffle=shuffle,
            generator=generator if self.training else None,
            seed=None if self.training else self.seed,
        )  # fmt: skip
        first = torch.arange(m, device=node.device).view(-1, 1) * V
        copy = (node.view(m, V) + first).view(-1)
        place = torch.arange(copy.size(0), device=copy.device)
        return _Packed(node, copy, torch.empty_like(copy).scatter_(0, copy, place), ptr)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"state_channels={self.state_channels}, conv_kernel={self.conv_kernel}, "
            f"expand={self.expand}, order={self.order!r})"
        )


class _Scan(torch.nn.Module):
    """Convolution and selective scan along sequences, from nodes to nodes."""

    def __init__(
        self, channels: int, state_channels: int, conv_kernel: int, dt_rank: int
    ) -> None:
        super().__init__()
        self._parts = [dt_rank, state_channels, state_channels]
        self.conv_weight = Parameter(torch.empty(channels, conv_kernel))
        self.conv_bias = Parameter(torch.empty(channels))
        self.lin_states = Linear(channels, sum(self._parts), bias=False)
        # Its weight and bias are read apart from each other; it is small anyway.
        self.lin_delta = NonDynamicallyQuantizableLinear(dt_rank, channels)
        self.A_log = Parameter(torch.empty(channels, state_channels))
        self.D = Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.conv_weight.size(1) ** -0.5
        for parameter in (self.conv_weight, self.conv_bias):
            torch.nn.init.uniform_(parameter, -bound, bound)
        self.lin_states.reset_parameters()
        bound = self.lin_delta.in_features**-0.5
        torch.nn.init.uniform_(self.lin_delta.weight, -bound, bound)
        with torch.no_grad():
            log_uniform_softplus_(self.lin_delta.bias)
            # States decay at rates 1 to N.
            rates = torch.arange(1, self.A_log.size(1) + 1, device=self.A_log.device)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        torch.nn.init.ones_(self.D)

    def forward(self, x: Tensor, packed: _Packed, backend: str) -> Tensor:
        """The outputs of nodes, averaged over permutations, [V, channels]."""
        u = causal_conv1d(
            _taken(x, packed.node, packed.place),
            self.conv_weight,
            self.conv_bias,
            packed.ptr,
            activation="silu",
            backend=backend,
        )
        states = self.lin_states(u.to(self.D.dtype))
        delta, B, C = states.split(self._parts, dim=1)
        # The scan adds the bias, unless the projection is more than its weights.
        fused = is_plain(self.lin_delta)
        y = selective_scan(
            u,
            F.linear(delta, self.lin_delta.weight) if fused else self.lin_delta(delta),
            -torch.exp(at_least_float32(self.A_log)),
            B,
            C,
            self.D,
            delta_bias=self.lin_delta.bias if fused else None,
            delta_softplus=True,
            ptr=packed.ptr,
            backend=backend,
        )
        y = _taken(y, packed.place, packed.copy)
        return y if y.size(0) == x.size(0) else y.view(-1, *x.shape).mean(0)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The output for one more node per sequence; the state includes last inputs."""
        seen, hidden = (None, 0.0) if state is None else state
        window = Continued(self.conv_weight.unsqueeze(1), seen)
        u = F.silu(window(x) + self.conv_bias)
        states = self.lin_states(u.to(self.D.dtype))
        delta, B, C = states.split(self._parts, dim=1)
        delta = F.softplus(at_least_float32(self.lin_delta(delta))).unsqueeze(2)
        decay = torch.exp(-delta * torch.exp(at_least_float32(self.A_log)))
        hidden = decay * hidden + delta * B.unsqueeze(1) * u.unsqueeze(2)
        y = (hidden * C.unsqueeze(1)).sum(2) + self.D * u
        return y, (window.seen, hidden)


def _taken(x: Tensor, index: Tensor, place: Tensor) -> Tensor:
    if is_in_forward_mode():  # which `_Take` has not: compilers refuse a `jvp`
        return x.index_select(0, index)
    return _Take.apply(x, index, place)


class _Take(torch.autograd.Function):
    """Takes rows by index, each of them equally often.

    As the place of each row in the result is known, the gradient is gathered from there
    instead of scattered by index: this is faster, and deterministic on any device.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, place: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, _, place = inputs
        ctx.save_for_backward(place)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        grad = grad.index_select(0, place)
        if grad.size(0) != ctx.shape[0]:
            grad = grad.view(-1, *ctx.shape).sum(0)
        return grad, None, None
