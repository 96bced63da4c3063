from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj
from torch_geometric.utils import scatter

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.nn._norm import RMSNorm, rms_norm
from pyg_chimera.nn.conv._gated_block import ChimeraBlock
from pyg_chimera.nn.conv._init import GateLinear, softplus_
from pyg_chimera.ops import released_transition, resolvent_mix
from pyg_chimera.ops.chimera_transition import transition_and_rest
from pyg_chimera.ops.common.checks import (
    check_flag,
    check_integer,
    check_number,
    check_option,
)
from pyg_chimera.ops.recurrence.positive_sums import positive_sums
from pyg_chimera.ops.recurrence.resolvent_mix import SOLVERS
from pyg_chimera.ops.structure.node_sequences import dense_rank

__all__ = ["ChimeraConv"]

#: The bound of logarithms of sources, at which their sums fit in float64.
MOST_LOG = 300.0


class LogSums(torch.nn.Module):
    """Projected logarithms of sums of positive sources."""

    def __init__(
        self, in_channels: int, out_channels: int, heads: int, sums: int
    ) -> None:
        super().__init__()
        self.heads = heads
        self.lin_source = GateLinear(in_channels, heads * sums, std=3.0)
        self.lin_out = Linear(heads * sums, out_channels, bias=False)

    def reset_parameters(self) -> None:
        self.lin_source.reset_parameters()
        self.lin_out.reset_parameters()

    def forward(self, x: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
        """The sums are those of sources [V, heads, K] in float64."""
        logits = self.lin_source(x).unflatten(1, (self.heads, -1)).double()
        found = sums(torch.exp(MOST_LOG * torch.tanh(logits / MOST_LOG)))
        return self.lin_out((0.1 * found.log().flatten(1)).to(x.dtype))


class ChimeraConv(ChimeraBlock):
    r"""The Chimera layer for any graph from `"Chimera: State Space Models Beyond
    Sequences" <https://arxiv.org/abs/2510.12111>`_: a state space model whose
    recurrence runs along the edges of the graph, so that in one layer, each node is
    reached from all others.

    .. math::
        \mathbf{y} &= \left( (\mathbf{I} - \mathbf{A})^{-1} \odot \mathbf{C}
        \bar{\mathbf{B}}^{\top} \right) \mathbf{V}

        \mathbf{x}'_i &= \mathbf{W}_{\text{out}} \left( \text{RMSNorm}(\mathbf{y}_i +
        \mathbf{D} \odot \mathbf{v}_i) \odot \text{SiLU}(\mathbf{z}_i) \right)

    where :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}` are projections of the nodes,
    followed by SiLU, the first two also normalized, with :math:`\bar{\mathbf{B}}_i =
    s_i \mathbf{B}_i` for an input gate :math:`s_i`. The transitions
    :math:`\mathbf{A}`, see :func:`~pyg_chimera.ops.chimera_transition`, and
    :math:`s_i` come from selectivities :math:`\Delta = \text{softplus}(\mathbf{W}
    \mathbf{x} + \mathbf{b})` of nodes and, with :obj:`edge_dim`, edges.
    :math:`\mathbf{D}` is one learned number for each head, with which a node's own
    value passes by the recurrence, and :math:`\mathbf{z}` a projection of the nodes
    that gates each output channel.

    The system is solved up to rounding, by default with the fastest of sparse
    elimination, dense matrices and iteration (:obj:`solver`). By elimination, time and
    memory are linear in the non-zeros of the factors of
    :math:`\mathbf{I} - \mathbf{A}` times :obj:`state_channels`: about one for each edge
    on trees and molecules, three to six on planar graphs, and up to
    :math:`|\mathcal{V}|^2` in all on dense and random ones
    (:func:`~pyg_chimera.ops.explain` predicts them).

    :class:`~pyg_chimera.nn.ChimeraDAGConv` runs along directed acyclic graphs and
    :class:`~pyg_chimera.nn.ChimeraPathConv` along undirected paths, both in linear
    time.

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own :math:`\mathbf{A}`;
            divides :obj:`out_channels`. (default: the largest of 4, 2 and 1 that does)
        state_channels (int, optional): Size of :math:`\mathbf{B}_i` and
            :math:`\mathbf{C}_i`. (default: :obj:`16`)
        groups (int, optional): Number of different :math:`\mathbf{B}` and
            :math:`\mathbf{C}`; divides :obj:`heads`. (default: :obj:`1`, all heads
            share them as in Mamba-2)
        edge_dim (int, optional): Size of edge features, on which the transitions then
            also depend, or :obj:`-1`. (default: :obj:`None`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)

    Recurrence:
        normalization (str, optional): :obj:`"paper"` or :obj:`"released"`, as in the
            authors' code, see :func:`~pyg_chimera.ops.released_transition`. (default:
            :obj:`"paper"`)
        gamma (float, optional): Upper bound of the row sums of :math:`\mathbf{A}`
            under :obj:`"paper"`, in (0, 1]. (default: :obj:`1.0`)
        input_gate (str, optional): With :obj:`"tied"`, a node takes from itself what
            its row of :math:`\mathbf{A}` leaves of one, :math:`s_i = 1 - \sum_j
            A_{ij}`, as :math:`1 - \bar{A}` in the exact discretization of a leaky
            state. Rows of :math:`(\mathbf{I} - \mathbf{A})^{-1} \,
            \text{diag}(\mathbf{s})` then sum to one, unless :obj:`solver` truncates:
            nodes read weighted means of values times products of keys and queries, of
            one scale whatever the range, and one whose row is zero reads itself alone,
            as boundaries do. With :obj:`"free"`, :math:`s_i` is a selectivity of its
            own, as in the paper. (default: :obj:`"tied"`, and :obj:`"free"` with
            :obj:`normalization="released"`, which takes no other)
        reach (tuple[float, float], optional): The interval of initial ranges, in steps.
            It is divided evenly among the heads on a log scale, and the range of a head
            is the middle of its part: 8 and 32 for two heads. A range is the distance
            along a path at which influence has fallen to :math:`1/e` before training,
            for inputs of zero; other inputs change it, and on average halve it. It is
            at most 512 steps in float32, :math:`1 / \mathrm{arcosh}(1 / \gamma)` with
            :obj:`gamma` below one, and 4.5 with :obj:`normalization="released"`. The
            mixed signal starts a fifth to a half as large as the skip connection, and
            with :obj:`input_gate="free"` about ten times as large, or as large without
            :obj:`norm` (not with :obj:`"released"`). With :obj:`None`, selectivities
            start as in the paper, log-uniform in [0.001, 0.1].
            (default: :obj:`(4, 64)`)
        reach_nodes (int, optional): The number of nodes of the graphs that ranges are
            meant for. In a graph of n nodes (graphs are told apart by :obj:`batch`;
            without it, all nodes count as one), :math:`\exp(-\Psi)` is divided by
            n / :obj:`reach_nodes`, before and after training, so that ranges grow with
            the square root of n, as the width of a planar mesh does: up to 512 steps on
            larger graphs (by less if :obj:`gamma` is below one), and shorter on smaller
            ones. Not for :obj:`normalization="released"`. (default: :obj:`None`, ranges
            are numbers of steps, whatever the size)
        qk_norm (bool, optional): Whether to divide each :math:`\mathbf{B}_i` and
            :math:`\mathbf{C}_i` by its root mean square, and the latter by
            :math:`\sqrt{N}`, so that their product is a cosine times :math:`\sqrt{N}`.
            With one state channel, only signs are left. The Chimera paper has no such
            norm; `"Mamba-3" <https://arxiv.org/abs/2603.15569>`_ has. (default:
            :obj:`True`)
        norm (str, optional): :obj:`"rms"`, or :obj:`None` to leave out
            :math:`\text{RMSNorm}`, which keeps directions and drops magnitudes. Without
            it, outputs are linear in :math:`\mathbf{V}`, and selectivities and gates
            read :math:`\text{RMSNorm}(\mathbf{x})`, so that outputs are proportional to
            large inputs: to be tried where targets are amplitudes, such as potentials.
            With :obj:`input_gate="free"`, they may be large where ranges are long.
            (default: :obj:`"rms"`)
        gated (bool, optional): Whether to apply the gate :math:`\mathbf{z}`. (default:
            :obj:`True`)
        local_conv (bool, optional): Whether to add a depthwise mean over neighbours to
            :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}`, before SiLU, in place of Mamba's
            short convolution. (default: :obj:`False`)
        log_sums (int, optional): The number of channels of each head that measure
            distance: logarithms :math:`\ln (\mathbf{L} \mathbf{m})_i` with
            :math:`\mathbf{L} = (\mathbf{I} - \mathbf{A})^{-1}` and positive
            :math:`\mathbf{m} = \exp(\mathbf{W} \mathbf{x})`. As entries of
            :math:`\mathbf{L}` decay exponentially with distance, they are soft minima
            over all nodes :math:`j` of the distance from :math:`j` minus
            :math:`\ln m_j` (bounded by 300). They are computed in float64, small ones
            as exactly as large ones (where contents cannot be read, as within
            compilers, those that an iteration rounds off are NaN), and a linear
            projection of them is added to the output. Not for
            :obj:`normalization="released"`. (default: :obj:`0`)

    Execution:
        solver (str, optional): See :func:`~pyg_chimera.ops.resolvent_mix`. (default:
            :obj:`"auto"`)
        num_terms (int, optional): Highest power of :math:`\mathbf{A}` under
            :obj:`solver="neumann"`. (default: :obj:`None`, to be passed to
            :meth:`forward`)
        form (str, optional): The same sums in another order: :obj:`"state"` carries a
            matrix for each node through the factors, :obj:`"mask"` computes
            :math:`(\mathbf{I} - \mathbf{A})^{-1}` of each graph and multiplies
            matrices, which is faster on small graphs, and :obj:`"chunk"` does both, on
            paths. (default: :obj:`"auto"`, the fastest by prediction)
        backend (str, optional): What computes: kernels for CPUs (:obj:`"numba"`) or
            GPUs (:obj:`"triton"`), dense matrices on any device (:obj:`"torch"`), or a
            slow :obj:`"reference"` to test against. (default: :obj:`"auto"`, the
            fastest of those at hand)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`, :obj:`aggr` excepted.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or options are unknown or
            incompatible.

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
        heads: int | None = None,
        state_channels: int = 16,
        *,
        normalization: str = "paper",
        gamma: float = 1.0,
        input_gate: str | None = None,
        reach_nodes: int | None = None,
        local_conv: bool = False,
        qk_norm: bool = True,
        norm: str | None = "rms",
        log_sums: int = 0,
        solver: str = "auto",
        num_terms: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_flag("local_conv", local_conv)
        check_flag("qk_norm", qk_norm)
        check_option("normalization", normalization, ("paper", "released"))
        if input_gate is None:
            input_gate = "free" if normalization == "released" else "tied"
        check_option("input_gate", input_gate, ("free", "tied"))
        if input_gate == "tied" and normalization == "released":
            raise ValueError(
                "'input_gate' must be 'free' with normalization='released', as rows of "
                f"A may sum to more than one there, got {input_gate!r}"
            )
        check_option("solver", solver, SOLVERS)
        check_number("gamma", gamma)
        if not 0 < gamma <= 1 or (gamma != 1 and normalization == "released"):
            raise ValueError(
                "'gamma' must be in (0, 1], and 1 with normalization='released', got "
                f"{gamma} and normalization={normalization!r}"
            )
        if num_terms is not None:
            num_terms = check_integer("num_terms", num_terms, 0)
        if num_terms is not None and solver != "neumann":
            raise ValueError(
                f"'num_terms' must be None unless solver='neumann', got {num_terms} "
                f"and solver={solver!r}"
            )
        if reach_nodes is not None:
            reach_nodes = check_integer("reach_nodes", reach_nodes, 1)
            if normalization == "released":
                raise ValueError(
                    "'reach_nodes' must be None with normalization='released', got "
                    f"{reach_nodes}"
                )
        log_sums = check_integer("log_sums", log_sums, 0)
        if log_sums > 0 and normalization == "released":
            raise ValueError(
                f"'log_sums' must be 0 with normalization='released', got {log_sums}"
            )
        self.normalization = normalization
        self.gamma = gamma
        self.input_gate = input_gate
        self.reach_nodes = reach_nodes
        self.qk_norm = qk_norm
        self.solver = solver
        self.num_terms = num_terms
        self.add_parameters(4 - self._tied, kernel=1 + local_conv, norm=norm)
        self.log_sums = None
        if log_sums > 0:
            self.log_sums = LogSums(
                in_channels, self.out_channels, self.heads, log_sums
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        reset(self.log_sums)

    @property
    def _tied(self) -> bool:
        return self.input_gate == "tied"

    def _set_reach(self, steps: Tensor) -> None:
        if self.normalization == "released":  # its input gate has no bias
            self._set_row_sums(steps, self.gamma, fixed=0.05, least=1e-4)
            return
        reached = self._set_row_sums(steps, self.gamma)
        if not self._tied:
            softplus_(self.delta_bias[3], self._input_gates(reached))

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        rank: Tensor | None = None,
        num_terms: int | Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features, for layers with
                :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. Used for speed only,
                unless the layer has :obj:`reach_nodes`, for which batches of several
                graphs need it. (default: :obj:`None`)
            rank (torch.Tensor, optional): The elimination rank, as stored by
                :class:`~pyg_chimera.transforms.AddEliminationOrder`. (default:
                :obj:`None`)
            num_terms (int or torch.Tensor, optional): Under :obj:`solver="neumann"`,
                the highest power of :math:`\mathbf{A}`. If several are given, such as
                the diameters of a batch stored by
                :class:`~pyg_chimera.transforms.AddDiameter`, the largest is used.
                (default: :obj:`None`)

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.resolvent_mix`.
        """
        edge_index, edge = self.edges(x, edge_index, edge_attr, batch)
        num_nodes = x.size(0)
        # Without a norm, gates read directions only, so that outputs are proportional
        # to large inputs.
        read = None if isinstance(self.norm, RMSNorm) else rms_norm(x)
        nodes = self.project(x, self.over_edges(edge_index), read)

        delta = F.softplus(nodes.delta + self.delta_bias)
        target, source, psi, *free = delta.unbind(1)
        if self.reach_nodes is not None:
            psi = psi + _log_size(psi, batch, self.reach_nodes)
        given = edge_index, num_nodes, target, source, psi, edge
        if self.normalization == "released":
            full = released_transition(*given)
            input_gate = nodes.delta[:, 3]  # without bias and softplus
        else:
            full, rest = transition_and_rest(*given, self.gamma, torch.float64)
            input_gate = rest if self._tied else free[0]
        weight = self.explained(full, num_nodes)
        if self._tied and weight is not full:  # a node reads from itself what is masked
            masked = (full - weight).to(rest.dtype)
            input_gate = rest.index_add(0, edge_index[1].long(), masked)
        graph = edge_index, weight, batch
        options: dict[str, Any] = {
            "rank": rank, "solver": self.solver, "num_terms": self._terms(num_terms),
            "form": self.form, "backend": self.backend,
        }  # fmt: skip
        y = resolvent_mix(*self.query_key_value(nodes, input_gate), *graph, **options)
        out = self.output(y, nodes)
        if self.log_sums is None:
            return out
        return out + self.log_sums(x, lambda m: positive_sums(m, *graph, **options))

    def _terms(self, num_terms: int | Tensor | None) -> int | None:
        if self.solver != "neumann":
            if num_terms is not None:
                raise ValueError(
                    "'num_terms' must be None unless solver='neumann', got "
                    f"solver={self.solver!r}"
                )
            return None
        num_terms = self.num_terms if num_terms is None else num_terms
        if num_terms is None:
            raise ValueError(
                "solver='neumann' needs 'num_terms': give it to the layer, or store "
                "the diameter with 'pyg_chimera.transforms.AddDiameter' and call the "
                "layer with num_terms=data.diameter"
            )
        if isinstance(num_terms, Tensor):
            num_terms = int(num_terms.max()) if num_terms.numel() > 0 else 0
        return num_terms


def _log_size(psi: Tensor, batch: Tensor | None, reach_nodes: int) -> Tensor:
    """The logarithm of how many times as large as `reach_nodes` each node's graph is,
    [V, 1] or [].
    """
    ones = torch.ones_like(at_least_float32(psi[:, :1]))
    if batch is None:
        size = ones.sum()
    else:
        graph = dense_rank(batch)
        size = scatter(ones, graph, dim_size=len(ones))[graph]
    return (size / reach_nodes).log().to(psi.dtype)
