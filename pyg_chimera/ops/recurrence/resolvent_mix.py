"""Mixing by the resolvent of a graph's adjacency."""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    FORMS,
    check_finite,
    check_graph,
    check_indices,
    check_integer,
    check_option,
    check_rank,
    trusted,
)
from pyg_chimera.ops.common.coefficients import ON_GPUS
from pyg_chimera.ops.common.examples import mixes
from pyg_chimera.ops.recurrence.choose import Recurrence
from pyg_chimera.ops.recurrence.cpu import resolvent as numba_backend
from pyg_chimera.ops.recurrence.cpu.sweep_polynomial import FLOATS
from pyg_chimera.ops.recurrence.dense import resolvent as reference
from pyg_chimera.ops.recurrence.gpu import resolvent as triton_backend
from pyg_chimera.ops.recurrence.plain import resolvent as torch_backend
from pyg_chimera.ops.recurrence.plan.conditioning import (
    has_small_sums,
    is_ill_conditioned,
)
from pyg_chimera.ops.structure.symbolic_factor import (
    Blocks,
    graph_blocks,
    many,
    symbolic_factor,
)

SOLVERS = ("auto", "sparse", "dense", "iterative", "neumann")
_FORMS_OF = {
    "dense": ("auto", "mask"),
    "iterative": ("auto", "state"),
    "neumann": ("auto", "state", "mask"),
}
#: Batches of fewer nodes are always factored, even if their factors fill up.
_MAX_SMALL = 4096


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    edge_weight: Tensor
    edge_index: Tensor
    batch: Tensor | None
    rank: Tensor | None
    solver: str
    num_terms: int | None
    form: str
    backend: str


class _ResolventMix(Recurrence[Inputs, Blocks]):
    name = "resolvent_mix"
    inputs = Inputs
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "triton": triton_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        graph, num_nodes = (inputs.edge_index, inputs.batch), inputs.value.size(0)
        eliminates = self.usable(inputs)[0] in ("numba", "triton")
        if inputs.solver == "sparse" or (inputs.solver == "auto" and eliminates):
            most = _most_entries(inputs)
            return Recipe(symbolic_factor, (*graph, inputs.rank), (num_nodes, most))
        return Recipe(graph_blocks, graph, (num_nodes,))

    def in_one_dtype(self, inputs: Inputs) -> Inputs:
        dtype, weight = inputs.value.dtype, inputs.edge_weight
        if weight.dtype == dtype:
            return inputs
        if dtype == torch.float32 and (
            inputs.backend == "reference"
            or (
                not trusted()
                and inputs.solver != "neumann"
                and is_ill_conditioned(inputs.edge_index, weight, len(inputs.value))
            )
        ):
            dtype = weight.dtype
        floats = {name: getattr(inputs, name).to(dtype) for name in FLOATS}
        return inputs._replace(**floats)

    def check(self, inputs: Inputs, structure: Blocks) -> None:
        check_finite("edge_weight", inputs.edge_weight, lambda e: f"edge {e}")


def _most_entries(inputs: Inputs) -> int:
    """The number of entries above which factors are given up."""
    if inputs.solver == "sparse":
        return sys.maxsize
    if inputs.value.device.type != "cpu":
        return int(ON_GPUS["elimination: entries"])
    return many(inputs.edge_index.size(1)) if _may_iterate(inputs) else sys.maxsize


def _may_iterate(inputs: Inputs) -> bool:
    """Whether an iteration can be used instead of factors that fill up."""
    if inputs.value.size(0) < _MAX_SMALL or inputs.edge_weight.numel() == 0:
        return False
    if trusted():
        return True
    return has_small_sums(inputs.edge_index, inputs.edge_weight, len(inputs.value))


_resolvent_mix = _ResolventMix()


@_resolvent_mix.public(lambda draw: mixes(draw, "graph", "undirected path"))
def resolvent_mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None = None,
    *,
    solver: str = "auto",
    num_terms: int | None = None,
    form: str = "auto",
    backend: str = "auto",
    rank: Tensor | None = None,
) -> Tensor:
    r"""Mixes nodes along all paths of a graph, by the resolvent of its adjacency, from
    `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_ (Section 3):

    .. math::
        \mathbf{H} = \mathbf{A} \mathbf{H} + \mathbf{k} \mathbf{v}^{\top}, \qquad
        \mathbf{y}_i = \mathbf{H}_i^{\top} \mathbf{q}_i,

    which is :math:`\mathbf{y} = ((\mathbf{I} - \mathbf{A})^{-1} \odot \mathbf{Q}
    \mathbf{K}^{\top}) \mathbf{V}`, for each head, where :math:`A_{ij}` is the sum of
    the weights of the edges :math:`j \to i`. Differentiable once in :obj:`query`,
    :obj:`key`, :obj:`value` and :obj:`edge_weight`. float16 and bfloat16 are computed
    in float32.

    Args:
        query (torch.Tensor): The queries, :math:`[|\mathcal{V}|, G, N]`. The number of
            groups :math:`G` divides the number of heads; the heads of a group share
            them.
        key (torch.Tensor): The keys, :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): The values, :math:`[|\mathcal{V}|, H, P]`.
        edge_index (torch.Tensor): The edges, integer :math:`[2, |\mathcal{E}|]`.
            Self-loops and duplicates count.
        edge_weight (torch.Tensor): Their weights, :math:`[|\mathcal{E}|, H]`. Those of
            float64 need not be rounded for nodes of float32: if float32 would lose
            digits, as :math:`\mathbf{I} - \mathbf{A}` is nearly singular, the result
            is computed in float64. Contents that are trusted (see
            :func:`~pyg_chimera.ops.unchecked`) are computed in float32.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. Used for speed only; without it,
            connected components are computed and used instead. (default: :obj:`None`)
        solver (str, optional): :obj:`"sparse"` (exact, by elimination in a
            fill-reducing order), :obj:`"dense"` (exact, cubic in a graph's nodes),
            :obj:`"iterative"` (exact up to rounding, by products with
            :math:`\mathbf{A}` on the CPU, for graphs whose factors would fill in; rows,
            or columns, of :math:`|\mathbf{A}|` must sum to less than one, and if nearly
            to one, float32 is computed in float64), :obj:`"neumann"` (the first powers
            of :math:`\mathbf{A}`, Section 4.2), or :obj:`"auto"`: whichever is fastest
            and exact up to rounding. (default: :obj:`"auto"`)
        num_terms (int, optional): The highest power :math:`k` in
            :math:`\sum_{t=0}^{k} \mathbf{A}^t`, for :obj:`"neumann"`; with at least the
            diameter, every pair is reached. (default: :obj:`None`)
        form (str, optional): :obj:`"state"` carries :math:`\mathbf{H}` along the graph
            (linear in edges and fill-in), :obj:`"mask"` computes each graph's resolvent
            (quadratic in its nodes), :obj:`"chunk"` combines both, in chunks of paths.
            All give the same result; :obj:`"iterative"` supports the state form only,
            :obj:`"dense"` the mask form only. (default: :obj:`"auto"`)
        backend (str, optional): :obj:`"numba"` (CPU; all but :obj:`"dense"`),
            :obj:`"triton"` (GPU; eliminates), :obj:`"torch"` (any device; mask form of
            :obj:`"dense"` and :obj:`"neumann"`), :obj:`"reference"` (dense, slow, for
            tests). (default: :obj:`"auto"`)
        rank (torch.Tensor, optional): An elimination order, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddEliminationOrder`, which
            :obj:`solver="sparse"` follows and others do not read. Computed if absent.
            (default: :obj:`None`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, a weight is not finite, :math:`\mathbf{I} - \mathbf{A}` is singular
            or, with :obj:`solver="sparse"`, too far from diagonally dominant to be
            eliminated without pivoting (:obj:`"auto"` warns and uses :obj:`"dense"`),
            the iteration may not converge, or if an option is unknown or incompatible.
        TypeError: If a tensor has the wrong dtype.
    """
    q, k, v, w, edge_index = check_graph(query, key, value, edge_index, edge_weight)
    batch, rank = check_indices(value, batch=batch, rank=rank)
    if rank is not None:
        check_rank(rank, value.size(0))
    check_option("solver", solver, SOLVERS)
    check_option("form", form, FORMS)
    if (solver == "neumann") != (num_terms is not None):
        raise ValueError(
            "'num_terms' must be given with solver='neumann' and only with it (the "
            "diameter of the graph reaches all pairs; see "
            "'pyg_chimera.transforms.AddDiameter'), got "
            f"solver={solver!r}, num_terms={num_terms!r}"
        )
    if num_terms is not None:
        num_terms = check_integer("num_terms", num_terms, least=0)
    forms = _FORMS_OF.get(solver, FORMS)
    if form not in forms:
        raise ValueError(
            f"'form' must be {' or '.join(map(repr, forms))} with solver={solver!r}, "
            f"got {form!r}"
        )
    inputs = Inputs(
        q, k, v, w, edge_index, batch, rank, solver, num_terms, form, backend
    )
    return _resolvent_mix(inputs).to(value.dtype)
