"""The public operators: checks, the choice of an algorithm, and the registered op."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.resolvent import cost, numba_, numba_scan, torch_
from pyg_chimera.ops.resolvent.reference import reference_mix
from pyg_chimera.ops.structure.system import System, build_system

__all__ = ["Choice", "dag_scan", "explain_mix", "resolvent_mix"]

_SOLVERS = ("auto", "sparse", "dense", "neumann")
_FORMS = ("auto", "state", "mask")
_BACKENDS = ("auto", "reference", "torch", "numba")

#: Elimination without pivoting may magnify rounding errors by this much.
_MAX_GROWTH = 100.0


class Choice(NamedTuple):
    """The algorithm a call takes, as `explain` reports it."""

    operator: str  #: such as ``"resolvent_mix"``
    solver: str  #: ``"sparse"``, ``"dense"``, ``"neumann"`` or ``"scan"``
    form: str  #: ``"state"`` or ``"mask"``
    backend: str  #: ``"reference"``, ``"torch"``, ``"numba"`` or ``"mamba_ssm"``
    reason: str  #: why


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
            (quadratic in its nodes). Same numbers. (default: :obj:`"auto"`)
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
    _check_solver(solver, num_terms)
    return _mix(
        "resolvent_mix", query, key, value, edge_index, edge_weight, batch, rank,
        solver, form, backend, num_terms,
    )  # fmt: skip


def dag_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None = None,
    *,
    form: str = "auto",
    backend: str = "auto",
    rank: Tensor | None = None,
) -> Tensor:
    r"""Runs a linear recurrence along a directed acyclic graph, from `"Chimera: State
    Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Section 4.1):

    .. math::
        \mathbf{H}_i = \sum_{j \to i} A_{ij} \mathbf{H}_j +
        \mathbf{k}_i \mathbf{v}_i^{\top}, \qquad
        \mathbf{y}_i = \mathbf{H}_i^{\top} \mathbf{q}_i.

    It is :func:`resolvent_mix` where :math:`\mathbf{I} - \mathbf{A}` is triangular:
    one pass in topological order, for weights of any size. On a path it is Mamba-2's
    SSD. Arguments, dtypes and gradients are those of :func:`resolvent_mix`.

    Args:
        query (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        key (torch.Tensor): :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): :math:`[|\mathcal{V}|, H, P]`.
        edge_index (torch.Tensor): The edges of a DAG, integer
            :math:`[2, |\mathcal{E}|]`. Duplicates count.
        edge_weight (torch.Tensor): :math:`[|\mathcal{E}|, H]`.
        batch (torch.Tensor, optional): The graph of each node. (default: :obj:`None`)
        form (str, optional): :obj:`"state"`, :obj:`"mask"` or :obj:`"auto"`.
        backend (str, optional): :obj:`"numba"`, :obj:`"torch"`, :obj:`"reference"` or
            :obj:`"auto"`.
        rank (torch.Tensor, optional): A topological rank, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddTopologicalOrder`. Found if absent.
            (default: :obj:`None`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        CycleError: If the graph has a cycle, or a self-loop; it is named. A
            :class:`ValueError`.
        ValueError: As :func:`resolvent_mix`, and if :obj:`rank` does not grow along
            every edge.
        TypeError: If a tensor has a wrong dtype.
    """
    return _mix(
        "dag_scan", query, key, value, edge_index, edge_weight, batch, rank,
        "sparse", form, backend, None,
    )  # fmt: skip


def explain_mix(
    operator: str,
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
) -> Choice:
    """What `explain` says of `resolvent_mix` and `dag_scan`."""
    if operator == "dag_scan":
        solver, num_terms = "sparse", None
    _check_solver(solver, num_terms)
    _check(query, key, value, edge_index, edge_weight, form, backend)
    if backend == "reference":
        _check_contents(operator, value, edge_index, edge_weight, batch, rank)
        dense = "neumann" if solver == "neumann" else "dense"
        return Choice(operator, dense, "mask", backend, "asked for")
    query, _, value, edge_weight = (
        x.detach() for x in promoted(query, key, value, edge_weight)
    )
    terms = -1 if num_terms is None else num_terms
    return _mix_plan(
        query, value, edge_index, edge_weight, batch, rank, operator, solver, form,
        backend, terms,
    ).choice  # fmt: skip


# ---------------------------------------------------------------------------- checks


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    form: str,
    backend: str,
) -> None:
    """What can be checked without looking into a tensor, so also while tracing."""
    named = {"query": query, "key": key, "value": value, "edge_weight": edge_weight}
    for name, x in named.items():
        if not x.is_floating_point():
            raise TypeError(f"'{name}' must be floating point, got {x.dtype}")
    check_nodes(query, key, value)
    heads = value.size(1)
    if edge_weight.dim() != 2 or edge_weight.size(1) != heads:
        raise ValueError(
            f"'edge_weight' must be [edges, heads] with {heads} heads, got "
            f"{list(edge_weight.shape)}"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"'edge_index' must be [2, edges], got {list(edge_index.shape)}"
        )
    if edge_index.size(1) != edge_weight.size(0):
        raise ValueError(
            f"'edge_index' and 'edge_weight' must have as many edges, got "
            f"{list(edge_index.shape)} and {list(edge_weight.shape)}"
        )
    if edge_index.is_floating_point() or edge_index.dtype == torch.bool:
        raise TypeError(f"'edge_index' must be integer, got {edge_index.dtype}")
    check_options(form, backend)


def check_shape(name: str, x: Tensor, layout: str, expected: list[int]) -> None:
    """Whether an argument has the shape that goes with the others."""
    if list(x.shape) != expected:
        raise ValueError(f"'{name}' must be {layout} = {expected}, got {list(x.shape)}")


def check_floats(**tensors: Tensor) -> None:
    """Whether all arguments are floating point."""
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise TypeError(f"'{name}' must be floating point, got {x.dtype}")


def check_nodes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Whether what nodes read and write fits together."""
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.dim() != 3:
            raise ValueError(
                f"'{name}' must be [nodes, heads, channels], got {list(x.shape)}"
            )
    if query.shape != key.shape:
        raise ValueError(
            f"'query' and 'key' must have the same shape, got {list(query.shape)} and "
            f"{list(key.shape)}"
        )
    if query.size(0) != value.size(0):
        raise ValueError(
            f"'query' and 'value' must have as many nodes, got {list(query.shape)} and "
            f"{list(value.shape)}"
        )
    groups, heads = query.size(1), value.size(1)
    if groups < 1 or heads % groups != 0:
        raise ValueError(
            f"'query' must have as many heads as 'value', or a divisor, got "
            f"{list(query.shape)} and {list(value.shape)}"
        )


def check_options(form: str, backend: str) -> None:
    """Whether there are such a form and such a backend."""
    if form not in _FORMS:
        raise ValueError(f"'form' must be one of {_FORMS}, got {form!r}")
    if backend not in _BACKENDS:
        raise ValueError(f"'backend' must be one of {_BACKENDS}, got {backend!r}")


def check_device(backend: str, device: torch.device) -> None:
    """Whether a backend runs there."""
    if backend == "numba" and device.type != "cpu":
        raise ValueError(
            f"backend='numba' runs on the CPU, but 'value' is on {device}; use "
            "'torch' or 'auto'"
        )


def _check_solver(solver: str, num_terms: int | None) -> None:
    if solver not in _SOLVERS:
        raise ValueError(f"'solver' must be one of {_SOLVERS}, got {solver!r}")
    if (solver == "neumann") != (num_terms is not None):
        raise ValueError(
            "'num_terms' must be given with solver='neumann' and only with it (the "
            "diameter of the graph reaches all pairs; see "
            "'pyg_chimera.transforms.AddDiameter'), got "
            f"solver={solver!r}, num_terms={num_terms!r}"
        )
    if num_terms is not None and (not isinstance(num_terms, int) or num_terms < 0):
        raise ValueError(f"'num_terms' must be an integer >= 0, got {num_terms!r}")


def promoted(*tensors: Tensor) -> list[Tensor]:
    """All in the widest of their dtypes, and float32 at least."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return [x.to(dtype) for x in tensors]


def _mix(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    solver: str,
    form: str,
    backend: str,
    num_terms: int | None,
) -> Tensor:
    _check(query, key, value, edge_index, edge_weight, form, backend)
    query, key, value_, edge_weight = promoted(query, key, value, edge_weight)
    edge_index = edge_index.long()
    if backend == "reference":
        _check_contents(operator, value, edge_index, edge_weight, batch, rank)
        with torch.autocast(value.device.type, enabled=False), _singular_is_named():
            out = reference_mix(
                query, key, value_, edge_index, edge_weight, batch, num_terms
            )
        return out.to(value.dtype)
    terms = -1 if num_terms is None else num_terms
    out = _mix_op(
        query, key, value_, edge_index, edge_weight, batch, rank, operator, solver,
        form, backend, terms,
    )  # fmt: skip
    return out.to(value.dtype)


def _check_contents(
    operator: str,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
) -> System:
    """What only contents tell; returns the system of the graph."""
    system = build_system(
        edge_index, value.size(0), batch, rank, triangular=operator == "dag_scan"
    )
    _check_finite(edge_weight)
    return system


def _check_finite(edge_weight: Tensor) -> None:
    if not bool(torch.isfinite(edge_weight).all()):
        e, h = (~torch.isfinite(edge_weight)).nonzero()[0].tolist()
        raise ValueError(
            f"'edge_weight' must be finite, but edge {e} has "
            f"{edge_weight[e, h].item()} in head {h}"
        )


@contextmanager
def _singular_is_named() -> Iterator[None]:
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            "'edge_weight' makes I - A singular: some combination of nodes returns to "
            "itself undiminished. Scale the weights"
        ) from error


# ------------------------------------------------------------------------- the choice


class Plan(NamedTuple):
    """How to compute a call: the inputs below are query, key and value."""

    choice: Choice
    warning: str | None
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: With the gradient of the output, the gradients of query, key, value and weight.
    backward: Callable[..., tuple[Tensor, ...]]


def make_plan(
    operator: str,
    system: System,
    shape: cost.Shape,
    edge_index: Tensor,
    edge_weight: Tensor,
    solver: str,
    form: str,
    backend: str,
    num_terms: int = -1,
) -> Plan:
    """Decide how to compute a call, and factor if that is the decision."""
    cpu = edge_weight.device.type == "cpu"
    check_device(backend, edge_weight.device)
    if backend == "numba" and solver in ("dense", "neumann"):
        raise ValueError(
            f"solver={solver!r} has no numba backend; use backend='torch' or 'auto'"
        )
    why = []
    asked, warning = solver, None
    if backend == "auto":
        backend = "numba" if cpu and solver in ("auto", "sparse") else "torch"
        why.append(f"tensors on {edge_weight.device.type}")
    if solver == "auto":
        solver = "sparse"
        if backend == "torch" and cost.prefers_dense(system, edge_weight.device.type):
            solver = "dense"
            why.append("blocks small or factors full enough for dense matrices")
    if form == "auto":
        form, reason = cost.cheaper_form(
            system, shape, solver, backend, edge_weight.element_size()
        )
        why.append(reason)
    reason = "; ".join(why) or "asked for"
    if solver == "sparse":
        if (system.triangular, form, backend) == (True, "state", "numba"):
            gates = numba_scan.identity_gates(system, edge_weight)
            return Plan(
                Choice(operator, solver, form, backend, reason),
                None,
                partial(numba_scan.state_forward, system, gates, edge_weight),
                partial(_without_gates, system, gates, edge_weight),
            )
        plan, growth = _sparse_plan(system, edge_weight, form, backend)
        if growth <= _MAX_GROWTH:
            return Plan(Choice(operator, solver, form, backend, reason), None, *plan)
        problem = (
            "'edge_weight' makes I - A too far from diagonally dominant to be "
            f"eliminated without pivoting (growth {growth:.1e})"
        )
        if asked == "sparse" or system.triangular:
            raise ValueError(
                f"{problem}; scale the weights (rows of |A| that sum to less than 1 "
                "are always safe), or use solver='dense' or 'auto'"
            )
        warning = f"{problem}: solver='dense' is used"
        solver, backend = "dense", "torch"
        why.append("too far from diagonally dominant for elimination")
        reason = "; ".join(why)
    choice = Choice(operator, solver, form, backend, reason)
    family = "neumann" if (solver, form) == ("neumann", "state") else "dense"
    terms = num_terms if solver == "neumann" else None
    dense = torch_.Dense(system, edge_index, edge_weight, terms)
    return Plan(
        choice,
        warning,
        partial(getattr(torch_, f"{family}_{form}_forward"), dense),
        partial(getattr(torch_, f"{family}_{form}_backward"), dense),
    )


def _without_gates(*args: Any) -> tuple[Tensor, ...]:
    dq, dk, dv, _, _, dw = numba_scan.state_backward(*args)
    return dq, dk, dv, dw


def _sparse_plan(
    system: System, edge_weight: Tensor, form: str, backend: str
) -> tuple[tuple[Callable, Callable], float]:
    module: Any = numba_ if backend == "numba" else torch_
    factors, growth = module.factorize(system, edge_weight)
    forward = getattr(module, f"{form}_forward")
    backward = getattr(module, f"{form}_backward")
    return (
        partial(forward, system, factors),
        partial(backward, system, factors),
    ), growth


def _mix_plan(
    query: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    operator: str,
    solver: str,
    form: str,
    backend: str,
    num_terms: int,
) -> Plan:
    system = _check_contents(operator, value, edge_index, edge_weight, batch, rank)
    shape = cost.Shape(query.size(1), value.size(1), query.size(2), value.size(2))
    return make_plan(
        operator, system, shape, edge_index, edge_weight, solver, form, backend,
        num_terms,
    )  # fmt: skip


# ------------------------------------------------------------- the registered operator


@torch.library.custom_op("pyg_chimera::mix", mutates_args=())
def _mix_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    operator: str,
    solver: str,
    form: str,
    backend: str,
    num_terms: int,
) -> Tensor:
    with (
        torch.no_grad(),
        torch.autocast(value.device.type, enabled=False),
        _singular_is_named(),
    ):
        plan = _mix_plan(
            query, value, edge_index, edge_weight, batch, rank, operator, solver, form,
            backend, num_terms,
        )  # fmt: skip
        if plan.warning is not None:
            warnings.warn(plan.warning, stacklevel=2)
        # Contiguous, as the fake ones are: compilers count on it.
        return plan.forward(query, key, value).contiguous()


@_mix_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: object) -> Tensor:
    return value.new_empty(value.shape)


@torch.library.custom_op("pyg_chimera::mix_backward", mutates_args=())
def _mix_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    operator: str,
    solver: str,
    form: str,
    backend: str,
    num_terms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with (
        torch.no_grad(),
        torch.autocast(value.device.type, enabled=False),
        _singular_is_named(),
    ):
        plan = _mix_plan(
            query, value, edge_index, edge_weight, batch, rank, operator, solver, form,
            backend, num_terms,
        )  # fmt: skip
        dq, dk, dv, dw = plan.backward(query, key, value, grad)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), dw.contiguous()


@_mix_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    *args: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, w = (x.new_empty(x.shape) for x in (query, key, value, edge_weight))
    return q, k, v, w


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    dq, dk, dv, dw = _mix_backward_op(
        grad.contiguous(), *ctx.saved_tensors, *ctx.options
    )
    return dq, dk, dv, None, dw, *[None] * 7


_mix_op.register_autograd(_backward, setup_context=_setup_context)
