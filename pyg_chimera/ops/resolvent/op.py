"""Mixing by the resolvent of a graph's adjacency."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_finite,
    check_graph,
    check_indices,
    check_integer,
    check_option,
)
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.operator import Operator
from pyg_chimera.ops.resolvent import numba_backend, reference, torch_backend
from pyg_chimera.ops.resolvent.cost_model import cheaper_form, prefers_dense
from pyg_chimera.ops.structure.cache import Recipe
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor

__all__ = ["resolvent_mix"]

_SOLVERS = ("auto", "sparse", "dense", "neumann")
_FORMS = ("auto", "state", "mask", "chunk")


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


class _ResolventMix(Operator[Inputs, SymbolicFactor]):
    name = "resolvent_mix"
    inputs = Inputs
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        tensors = (inputs.edge_index, inputs.batch, inputs.rank)
        return Recipe(symbolic_factor, tensors, (inputs.value.size(0),))

    def check(self, inputs: Inputs, structure: SymbolicFactor) -> None:
        check_finite("edge_weight", inputs.edge_weight, lambda e: f"edge {e}")

    def choices(self, inputs: Inputs, structure: SymbolicFactor) -> Iterator[Choice]:
        device = inputs.value.device.type
        backends = self.usable(inputs)
        asked = self.reason(inputs)
        if backends == ["reference"]:
            solver = "neumann" if inputs.solver == "neumann" else "dense"
            yield Choice(self.name, solver, "mask", "reference", asked)
            return
        solvers = [inputs.solver]
        if inputs.solver == "auto":
            solvers = ["sparse", "dense"]
            if backends[0] == "torch" and prefers_dense(structure, device):
                solvers.reverse()
                asked += "; blocks small or factors full enough for dense matrices"
        if inputs.form == "chunk":
            solvers, backends = solvers[:1], backends[:1]
        sizes = (inputs.query.size(1), inputs.value.size(1), inputs.query.size(2),
                 inputs.value.size(2))  # fmt: skip
        for solver in solvers:
            others = ["torch"] if solver == "dense" and "torch" not in backends else []
            for backend in backends + (others if inputs.solver == "auto" else []):
                form, reason = inputs.form, asked
                if form == "auto":
                    form, why = cheaper_form(
                        structure, sizes, solver, backend, inputs.value.element_size()
                    )
                    reason = f"{asked}; {why}"
                yield Choice(self.name, solver, form, backend, reason)


_resolvent_mix = _ResolventMix()


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
        query (torch.Tensor): What a node reads, :math:`[|\mathcal{V}|, G, N]`, with as
            many groups :math:`G` as heads, or a divisor (then heads share it).
        key (torch.Tensor): Under what a node writes, :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): What a node writes, :math:`[|\mathcal{V}|, H, P]`.
        edge_index (torch.Tensor): The edges, integer :math:`[2, |\mathcal{E}|]`.
            Self-loops and duplicates count.
        edge_weight (torch.Tensor): Their weights, :math:`[|\mathcal{E}|, H]`.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order: a hint for speed. Without it,
            connected components are found and used. (default: :obj:`None`)
        solver (str, optional): :obj:`"sparse"` (exact, by elimination in a
            fill-reducing order), :obj:`"dense"` (exact, cubic in a graph's nodes),
            :obj:`"neumann"` (the first powers of :math:`\mathbf{A}`, Section 4.2), or
            :obj:`"auto"`: exact, whichever is faster. (default: :obj:`"auto"`)
        num_terms (int, optional): The highest power :math:`k` in
            :math:`\sum_{t=0}^{k} \mathbf{A}^t`, for :obj:`"neumann"`; the diameter or
            more reaches every pair. (default: :obj:`None`)
        form (str, optional): :obj:`"state"` carries :math:`\mathbf{H}` along the graph
            (linear in edges and fill-in), :obj:`"mask"` makes each graph's resolvent
            (quadratic in its nodes), :obj:`"chunk"` does both in chunks of paths, on
            the CPU. Same numbers. (default: :obj:`"auto"`)
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"torch"` (any device),
            :obj:`"reference"` (dense, slow, for tests). (default: :obj:`"auto"`)
        rank (torch.Tensor, optional): An elimination order, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddEliminationOrder`. Found if absent.
            (default: :obj:`None`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, a weight is not finite, :math:`\mathbf{I} - \mathbf{A}` is singular
            or, with :obj:`solver="sparse"`, too far from diagonally dominant to be
            eliminated without pivoting (:obj:`"auto"` warns and takes
            :obj:`"dense"`), or if an option is unknown or does not fit.
        TypeError: If a tensor has a wrong dtype.
    """
    q, k, v, w, edge_index = check_graph(query, key, value, edge_index, edge_weight)
    batch, rank = check_indices(value, batch=batch, rank=rank)
    check_option("solver", solver, _SOLVERS)
    check_option("form", form, _FORMS)
    if (solver == "neumann") != (num_terms is not None):
        raise ValueError(
            "'num_terms' must be given with solver='neumann' and only with it (the "
            "diameter of the graph reaches all pairs; see "
            "'pyg_chimera.transforms.AddDiameter'), got "
            f"solver={solver!r}, num_terms={num_terms!r}"
        )
    if num_terms is not None:
        check_integer("num_terms", num_terms, least=0)
    inputs = Inputs(
        q, k, v, w, edge_index, batch, rank, solver, num_terms, form, backend
    )
    return _resolvent_mix(inputs).to(value.dtype)
