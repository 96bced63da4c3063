"""Mixing by the resolvent of a graph's adjacency."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    check_finite,
    check_graph,
    check_indices,
    check_integer,
    check_option,
    check_rank,
    trusted,
)
from pyg_chimera.ops.common.dispatch import (
    WHY_FORM,
    Call,
    Choice,
    UnsuitableSolver,
)
from pyg_chimera.ops.common.examples import mixes
from pyg_chimera.ops.common.operator import Operator
from pyg_chimera.ops.common.triton_runtime import SHORT_PATH
from pyg_chimera.ops.recurrence.costs.resolvent import cost_of, prefers_dense
from pyg_chimera.ops.recurrence.cpu import resolvent as numba_backend
from pyg_chimera.ops.recurrence.cpu.sweep_polynomial import (
    FLOATS,
    SweepPolynomial,
    polynomial_of,
    precision_of,
)
from pyg_chimera.ops.recurrence.dense import resolvent as reference
from pyg_chimera.ops.recurrence.gpu import resolvent as triton_backend
from pyg_chimera.ops.recurrence.plain import resolvent as torch_backend
from pyg_chimera.ops.recurrence.plan.conditioning import is_ill_conditioned, sums
from pyg_chimera.ops.recurrence.plan.paths import path_scans
from pyg_chimera.ops.structure.symbolic_factor import (
    Blocks,
    SymbolicFactor,
    graph_blocks,
    many,
    symbolic_factor,
)

SOLVERS = ("auto", "sparse", "dense", "iterative", "neumann")
_FORMS = ("auto", "state", "mask", "chunk")
_FORMS_OF = {
    "dense": ("auto", "mask"),
    "iterative": ("auto", "state"),
    "neumann": ("auto", "state", "mask"),
}
#: The backends that have each solver; those of the device are tried in this order.
_BACKENDS = {
    "sparse": ("numba", "triton"),
    "dense": ("triton", "torch"),
    "iterative": ("numba",),
    "neumann": ("numba", "torch"),
}

#: Bytes of resolvents that the mask form may hold if the form is not prescribed.
_MAX_MASK_BYTES = 1 << 30
#: An iteration is considered only if all other solvers take at least so many seconds.
_WORTH_WHILE = 0.02
#: Batches of fewer nodes are always factored, even if their factors fill up.
_MAX_SMALL = 4096
#: On a GPU, factors of more entries are given up: a front of as many rows as Triton's
#: kernels take has as many.
_MOST_ON_GPUS = 1 << 27
#: An optimistic guess of how many sweeps an iteration takes.
_FEW_SWEEPS = SweepPolynomial(np.zeros((0, 0, 2)), np.zeros((0, 4, 0)), 10, 1.0)


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


class _ResolventMix(Operator[Inputs, Blocks]):
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
        if inputs.backend == "reference" or (
            not trusted()
            and inputs.solver != "neumann"
            and is_ill_conditioned(inputs.edge_index, weight, len(inputs.value))
        ):
            dtype = weight.dtype
        floats = {name: getattr(inputs, name).to(dtype) for name in FLOATS}
        return inputs._replace(**floats)

    def check(self, inputs: Inputs, structure: Blocks) -> None:
        check_finite("edge_weight", inputs.edge_weight, lambda e: f"edge {e}")

    def choices(self, call: Call[Inputs, Blocks]) -> list[Choice]:
        inputs, usable = call.inputs, self.usable(call.inputs)
        if usable == ["reference"]:
            solver = "neumann" if inputs.solver == "neumann" else "dense"
            reason = self.reason(inputs)
            return [Choice(self.name, solver, "mask", "reference", reason)]
        found = list(self._candidates(call, usable))
        if usable[0] == "numba":
            found += self._iteration(call, found)
            # A backend that was not requested is only a last resort.
            found.sort(key=lambda x: (x.backend not in usable, x.cost.seconds))  # type: ignore[union-attr]
        if inputs.value.device.type != "cpu":
            found = [choice._replace(cost=None) for choice in found]
        return [
            choice._replace(alternatives=(*found[:i], *found[i + 1 :]))
            for i, choice in enumerate(found)
        ]

    def _candidates(
        self, call: Call[Inputs, Blocks], usable: list[str]
    ) -> Iterator[Choice]:
        """The better form for each solver and backend, preferred ones first."""
        reason, auto = self.reason(call.inputs), call.inputs.solver == "auto"
        solvers, why = _solvers(call, usable) if auto else ([call.inputs.solver], "")
        for solver in solvers:
            backends = [x for x in usable if x in _BACKENDS[solver]] or usable
            if auto and solver == "dense" and backends == ["numba"]:
                backends = ["torch"]  # as a last resort
            for backend in backends:
                yield self._better_form(call, solver, backend, reason + why)

    def _iteration(
        self, call: Call[Inputs, Blocks], others: list[Choice]
    ) -> list[Choice]:
        """The iteration, if it might take less than half the time of the others."""
        if call.inputs.solver != "auto" or call.inputs.form not in ("auto", "state"):
            return []
        least = min(choice.cost.seconds for choice in others if choice.cost)
        reason = self.reason(call.inputs)
        choice = self._better_form(call, "iterative", "numba", reason)
        if least < _WORTH_WHILE or choice.cost.seconds > least / 2:  # type: ignore[union-attr]
            return []
        most = least / 2 / choice.cost.seconds * _FEW_SWEEPS.sweeps  # type: ignore[union-attr]
        try:
            sweeps = polynomial_of(call, most).sweeps
        except UnsuitableSolver:
            return []
        choice = self._better_form(call, "iterative", "numba", reason)
        return [choice._replace(reason=f"{reason}; about {sweeps} sweeps are enough")]

    def _better_form(
        self, call: Call[Inputs, Blocks], solver: str, backend: str, reason: str
    ) -> Choice:
        inputs = call.inputs
        query, _, value = inputs[:3]
        sizes = (query.size(1), value.size(1), query.size(2), value.size(2))
        sweeps, dtype = inputs.num_terms or 0, value.dtype
        if solver == "iterative":
            polynomial = call.get("polynomial", _FEW_SWEEPS)
            asked, factored = solver == inputs.solver, call.structure
            if backend == "numba" and (
                asked or not isinstance(factored, SymbolicFactor)
            ):
                with suppress(UnsuitableSolver):  # it will be used anyway
                    polynomial = polynomial_of(call)
                    reason += f"; about {polynomial.sweeps} sweeps are enough"
            sweeps = polynomial.sweeps
            dtype, _ = precision_of(value.dtype, polynomial.gap)

        def choice(form: str) -> Choice:
            found = Choice(self.name, solver, form, backend, reason)
            computed = np.dtype(str(dtype).removeprefix("torch."))
            return found._replace(
                cost=cost_of(found, call.structure, sizes, computed, sweeps)
            )

        form = inputs.form
        if solver == "dense":
            form = "mask"
        elif form == "auto" and solver != "sparse":
            form = "state" if solver == "iterative" or backend == "numba" else "mask"
        elif form == "auto" and backend != "numba":
            # Only the chunk form takes weights that are not diagonally dominant.
            may_cut = path_scans(call.structure) is not None
            cut = may_cut and not triton_backend.is_dominant(call)
            form = "chunk" if cut or _is_long(call.structure) else "state"
        if form != "auto":
            return choice(form)
        mask, state = choice("mask"), choice("state")
        fits = mask.cost.memory <= _MAX_MASK_BYTES  # type: ignore[union-attr]
        found = [mask, state] if fits else [state]
        if path_scans(call.structure) is not None:
            found.insert(0, choice("chunk"))
        best = min(found, key=lambda x: x.cost.seconds)  # type: ignore[union-attr]
        why = WHY_FORM[best.form]
        if not fits and best is state:
            why = "resolvents would not fit in memory"
        return best._replace(reason=f"{reason}; {why}")


def _solvers(call: Call[Inputs, Blocks], usable: list[str]) -> tuple[list[str], str]:
    """The solvers that `auto` tries, preferred ones first, and why."""
    form, structure, on_gpu = call.inputs.form, call.structure, usable[0] == "triton"
    if form == "chunk" or (form == "state" and usable == ["torch"]):
        return ["sparse"], ""
    if usable == ["torch"]:
        return ["dense"], ""
    if not isinstance(structure, SymbolicFactor):
        iterates = not on_gpu and form != "mask"
        return ["iterative"] * iterates + ["dense"], "; factors would fill up"
    if on_gpu and form == "mask":
        return ["dense"], ""
    if usable == ["triton"] and form == "state":
        return ["sparse"], ""
    is_auto = on_gpu and form == "auto" and not _is_long(structure)
    if is_auto and prefers_dense(structure):
        why = "; blocks small or factors full enough for dense matrices"
        return ["dense", "sparse"], why
    return ["sparse", "dense"], ""


def _most_entries(inputs: Inputs) -> int:
    """The number of entries above which factors are given up."""
    if inputs.solver == "sparse":
        return sys.maxsize
    if inputs.value.device.type != "cpu":
        return _MOST_ON_GPUS
    return many(inputs.edge_index.size(1)) if _may_iterate(inputs) else sys.maxsize


def _is_long(structure: Blocks) -> bool:
    """Whether all components of a graph are paths, and one of them is not short."""
    scans = path_scans(structure)
    return scans is not None and bool((np.diff(scans.ptr) > SHORT_PATH).any())


def _may_iterate(inputs: Inputs) -> bool:
    """Whether an iteration can be used instead of factors that fill up."""
    if inputs.value.size(0) < _MAX_SMALL:
        return False
    if trusted():
        return True
    found = sums(inputs.edge_index, inputs.edge_weight.double(), len(inputs.value))
    return bool(min(x.max() for x in found) < 1) if found[0].numel() else False


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
    forms = _FORMS_OF.get(solver, _FORMS)
    if form not in forms:
        raise ValueError(
            f"'form' must be {' or '.join(map(repr, forms))} with solver={solver!r}, "
            f"got {form!r}"
        )
    inputs = Inputs(
        q, k, v, w, edge_index, batch, rank, solver, num_terms, form, backend
    )
    return _resolvent_mix(inputs).to(value.dtype)
