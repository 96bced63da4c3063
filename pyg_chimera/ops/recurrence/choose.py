"""Which algorithm computes a call of a recurrence: one table of all of them.

A row says whether an algorithm fits a call, and what it costs there. On a CPU, that is
how many steps of each kind it takes, times what `ops/common/coefficients.py` has for a
step: it is linear in these, so fitting them to measured times is linear least squares.
On a GPU, costs are rules of thumb, in units of their own, and are not reported.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.coefficients import ON_GPUS, STEPS, nanoseconds
from pyg_chimera.ops.common.dispatch import Call, Choice, Cost, UnsuitableSolver
from pyg_chimera.ops.common.operator import Inputs, Operator, Structure
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.cpu import grid_sweep
from pyg_chimera.ops.recurrence.cpu.chunks import CHUNK, ROWS
from pyg_chimera.ops.recurrence.cpu.sweep_polynomial import (
    SweepPolynomial,
    polynomial_of,
    precision_of,
)
from pyg_chimera.ops.recurrence.gpu.resolvent import is_dominant
from pyg_chimera.ops.recurrence.plain.levels import depth_of
from pyg_chimera.ops.recurrence.plain.scan import lanes_at_once
from pyg_chimera.ops.recurrence.plan.delta_forms import bytes_of_matrices
from pyg_chimera.ops.recurrence.plan.paths import path_scans, required_path_scans
from pyg_chimera.ops.recurrence.plan.states import GridStates
from pyg_chimera.ops.structure.symbolic_factor import Blocks, SymbolicFactor

#: Bytes of resolvents that the mask form may hold if the form is not prescribed.
_MAX_MASK_BYTES = 1 << 30
#: States of one vector of all nodes that are read from the cache in an iteration.
NEAR_BYTES = 1 << 20
#: An iteration is considered only if all other solvers take at least so many seconds.
_WORTH_WHILE = 0.02
#: An optimistic guess of how many sweeps an iteration takes.
_FEW_SWEEPS = SweepPolynomial(np.zeros((0, 0, 2)), np.zeros((0, 4, 0)), 10, 1.0)
#: The share of entries above which factors are full enough for dense matrices on a GPU.
_FULL = 0.2


class Size(NamedTuple):
    """A call, and the sizes that its cost depends on."""

    call: Call
    structure: Any  #: what depends on the graph alone
    blocks: int
    groups: int
    heads: int
    keys: int  #: state channels
    channels: int  #: value channels
    dtype: torch.dtype  #: of the computation
    threads: int  #: that have work
    sweeps: int  #: of an iteration, or the terms of a finite sum
    least: float = math.inf  #: seconds of the fastest of the rows before

    @classmethod
    def of(cls, call: Call) -> "Size":
        """That of a call."""
        value, blocks = call.inputs.value, len(call.structure.sizes)
        (_, groups, keys), (_, heads, channels) = call.inputs.query.shape, value.shape
        threads = max(1, min(torch.get_num_threads(), heads * blocks))
        terms = getattr(call.inputs, "num_terms", None) or 0
        sizes = (blocks, groups, heads, keys, channels)
        return cls(call, call.structure, *sizes, value.dtype, threads, terms)


class Work(NamedTuple):
    """What an algorithm does, forward and backward."""

    steps: dict[str, float]  #: how many of each of `STEPS`
    memory: float  #: bytes

    def cost(self, threads: int) -> Cost:
        """What it takes on this CPU, without what all calls take."""
        each, steps = nanoseconds(), tuple(self.steps.items())
        operations = sum(number * STEPS[name].operations for name, number in steps)
        time = sum(number * each[name] for name, number in steps)
        return Cost(operations, 1e-9 * time / threads, self.memory, steps)


# --------------------------------------------------------------------------- resolvents


class _Totals(NamedTuple):
    """Sums over the blocks of a graph, cached in its tables."""

    largest: float  #: most nodes of a block
    nodes: float
    squares: float
    cubes: float
    entries: float  #: of the factor L
    solves: float  #: multiply-adds of solving for all columns of the inverses
    updates: float  #: multiply-adds of the factorisation

    @classmethod
    def of(cls, blocks: Blocks) -> "_Totals":
        if cls not in blocks.tables:
            n, entries, updates = blocks.sizes.astype(float), np.zeros(1), np.zeros(1)
            if isinstance(blocks, SymbolicFactor):
                entries, updates = blocks.entries, blocks.updates
            sums = (n, n**2, n**3, entries, n * (2.0 * entries + 3.0 * n), updates)
            largest = float(n.max(initial=0))
            blocks.tables[cls] = cls(largest, *(float(x.sum()) for x in sums))
        return blocks.tables[cls]


def _resolvent(x: Size, total: _Totals, held: float, **steps: float) -> Work:
    """With what all forms but chunks do, and so many numbers `held` at a time."""
    edges = float(x.heads * x.structure.num_edges)
    steps |= {"resolvent: node": x.heads * total.nodes, "resolvent: edge": edges}
    return Work(steps, x.dtype.itemsize * (held + 2 * edges))


def _masks(x: Size, total: _Totals, **steps: float) -> Work:
    """Products with resolvents, beside what computes these."""
    steps["mask: key of a pair"] = x.groups * x.keys * total.squares
    steps["mask: channel of a pair"] = x.heads * x.channels * total.squares
    steps["mask: pair"] = x.heads * total.squares
    return _resolvent(x, total, x.threads * 3 * total.largest**2, **steps)


def _solved_masks(x: Size) -> Work:
    total = _Totals.of(x.structure)
    steps = {"mask: solving": x.heads * total.solves, "mask: block": x.blocks}
    return _masks(x, total, **steps)


def _dense_masks(x: Size) -> Work:
    """Inverses, or by doubling the sums of powers."""
    total = _Totals.of(x.structure)
    products = 1 + 2 * math.ceil(math.log2(x.sweeps + 1)) if x.sweeps else 1
    steps = {"dense: multiply-add": 3.0 * x.heads * total.cubes * products}
    return _masks(x, total, **steps, **{"dense: block": x.heads * x.blocks})


def _lanes(x: Size) -> tuple[float, int]:
    """Numbers of states of a node, in whole quarters of a vector; those of a vector."""
    vector, _ = vector_lanes(np.dtype(f"f{x.dtype.itemsize}"))
    return x.heads * x.keys * (-(-4 * x.channels // vector) * vector / 4), vector


def _elimination(x: Size) -> Work:
    total, (lanes, _) = _Totals.of(x.structure), _lanes(x)
    panels = 2.1 * total.entries + 5.0 * total.nodes  # of all supernodes, about
    steps = {
        "elimination: entry and lane": total.entries * lanes,
        "elimination: node and lane": total.nodes * lanes,
        "elimination: multiply-add": x.heads * total.updates,
    }
    return _resolvent(x, total, x.heads * panels, **steps)


def _sweeps(x: Size) -> Work:
    """Products with A; those of finite sums are kept for the backward pass."""
    total, (lanes, vector) = _Totals.of(x.structure), _lanes(x)
    swept = (3.0 * x.sweeps + 1) * x.structure.num_edges
    swept += (6.0 * x.sweeps + 20) * total.nodes
    states = total.largest * vector
    is_near = states * x.dtype.itemsize < NEAR_BYTES
    kept = x.sweeps * _is_finite_sum(x.call)
    steps = {"iteration: near" if is_near else "iteration: far": swept * lanes}
    return _resolvent(x, total, x.threads * (4 + kept) * states, **steps)


def _iteration(x: Size) -> Work | None:
    """None where it would hardly be faster than the rows before."""
    call = x.call

    def work(polynomial: SweepPolynomial) -> Work:
        dtype, _ = precision_of(x.dtype, polynomial.gap)
        return _sweeps(x._replace(dtype=dtype, sweeps=polynomial.sweeps))

    few, most = work(call.get("polynomial", _FEW_SWEEPS)), math.inf
    is_optional = call.inputs.solver == "auto" and _may_eliminate(call) is True
    if is_optional and x.least < _WORTH_WHILE:
        return None
    if is_optional and (most := x.least / 2 / few.cost(x.threads).seconds) < 1:
        return None
    try:
        return work(polynomial_of(call, most * _FEW_SWEEPS.sweeps))
    except UnsuitableSolver:
        return None if is_optional else few


def _may_eliminate(call: Call) -> bool | str:
    return isinstance(call.structure, SymbolicFactor) or "factors would fill up"


def _may_hold_resolvents(call: Call) -> bool | str:
    fits = _may_eliminate(call)
    if fits is not True or call.inputs.form != "auto":
        return fits
    needed = _solved_masks(Size.of(call)).memory
    return needed <= _MAX_MASK_BYTES or "resolvents would not fit in memory"


def _is_finite_sum(call: Call) -> bool:
    return call.inputs.solver == "neumann"


def _are_undirected_paths(call: Call) -> bool:
    return path_scans(call.structure) is not None


def _must_cut(call: Call) -> bool:
    """On a GPU: whether paths are long, or have weights that only chunks take."""
    if call.inputs.form == "chunk" or not _are_undirected_paths(call):
        return _are_undirected_paths(call)
    return _is_long(call) or not is_dominant(call)


def _is_long(call: Call) -> bool:
    """Whether one of the paths is long."""
    lengths = np.diff(required_path_scans(call.structure).ptr)
    return bool((lengths > ON_GPUS["chunk: nodes"]).any())


def _dense_on_gpus(x: Size) -> float:
    """Relative to elimination: at most one where blocks are small or factors full."""
    total = _Totals.of(x.structure)
    emptiness = _FULL * total.squares / max(total.entries, 1)
    return min(total.largest / ON_GPUS["dense: nodes"], emptiness)


# -------------------------------------------------------------------------------- scans


def _chunks(x: Size) -> Work:
    """Matrix products within chunks of paths, and states between them."""
    if isinstance(x.structure, Blocks):
        ptr = required_path_scans(x.structure).states.ptr
    else:
        ptr = x.structure.graph.component_ptr
    lengths = np.diff(ptr)
    within = x.heads * float((lengths * (np.minimum(lengths, CHUNK) + ROWS)).sum())
    several = x.heads * float(lengths[lengths > CHUNK].sum())
    steps = {
        "chunk: within": within * (2.0 * x.keys + 1.5 * x.channels),
        "chunk: between": several * 8.0 * x.keys * x.channels,
        "chunk: decay": within,
        "chunk: path": float(x.heads * len(lengths)),
    }
    held = float(lengths.max(initial=0)) * x.keys * x.channels / CHUNK
    return Work(steps, x.dtype.itemsize * x.threads * held)


def _scan(x: Size, held: float, **steps: float) -> Work:
    """From what one head does."""
    steps = {name: x.heads * float(number) for name, number in steps.items()}
    return Work(steps, x.dtype.itemsize * x.threads * held)


def _states(x: Size) -> Work:
    lanes = x.keys * (-(-x.channels // 16) * 16)  # in whole vectors
    if isinstance(x.structure, GridStates):
        return _states_of_grids(x, lanes)
    sizes, entries = x.structure.sizes, x.structure.entries.sum()
    far = sizes * np.log2(1 + sizes * lanes / (1 << 17))
    steps = {
        "scan: state and lane": sizes.sum() * lanes,
        "scan: edge and lane": entries * lanes,
        "scan: state": sizes.sum(),
        "scan: edge": entries,
        "scan: far state and lane": far.sum() * lanes,
    }
    return _scan(x, float(min(1 << 18, sizes.max(initial=0) * lanes)), **steps)


def _states_of_grids(x: Size, lanes: int) -> Work:
    grids, on_nodes = x.structure.grids, x.structure.on_nodes
    states = len(x.structure.orientations) * grids.height * grids.width
    rows = states / np.maximum(np.minimum(grids.height, grids.width), 1)
    held, number = float(grid_sweep.most_held(grids, on_nodes, 16)), states.sum()
    kind = "grid nodes" if on_nodes else "grid edges"
    steps = {f"{kind}: state and lane": number * lanes, f"{kind}: state": number}
    if on_nodes:
        steps["grid nodes: row and lane"] = rows.sum() * lanes
    return _scan(x, held, **steps)


def _grid_masks(x: Size) -> Work:
    number = len(x.structure.orientations)
    nodes = 1.0 * x.structure.grids.height * x.structure.grids.width
    pairs, largest = (nodes**2).sum(), float(nodes.max(initial=0))
    steps = {
        "grid mask: multiply-add": (4.0 * x.keys + 3.0 * x.channels) * pairs,
        "grid mask: pair": number * pairs,
        "grid mask: node": number * nodes.sum(),
    }
    return _scan(x, 5 * largest * min(largest, 256), **steps)


def _walk_on_gpus(x: Size) -> float:
    """Seconds: the longest walk, and how many run at once, count."""
    graph = x.structure.graph
    longest = int(np.diff(graph.component_ptr).max(initial=0))
    slices = -(-x.keys // 64) * -(-x.channels // 32)
    walks = slices * x.heads * len(graph.state)
    return ON_GPUS["walk: position"] * max(longest, walks / ON_GPUS["walk: at once"])


def _levels_on_gpus(x: Size) -> float:
    """Seconds in plain PyTorch, level by level."""
    graph, level = x.structure.graph, ON_GPUS["level"]
    levels = depth_of(graph) * -(-x.keys // lanes_at_once(x.call))
    entries = len(graph.state) * x.heads * x.channels * x.keys
    return max(5 * level, levels * level + entries * ON_GPUS["level: entry"])


# ----------------------------------------------------------------------- the delta rule


def _delta_masks(x: Size) -> Work:
    graph, n = x.structure, x.structure.sizes.astype(float)
    products = 8.0 * x.keys * x.groups + 6.0 * x.channels * x.heads
    products += 0.67 * n * graph.is_cyclic * x.heads
    steps = {
        "delta mask: multiply-add": float((n**2 * products).sum()),
        "delta mask: pair": x.heads * float((n**2).sum()),
        "delta mask: node": x.heads * float(n.sum()),
        "delta mask: block": float(x.heads * len(n)),
    }
    return Work(steps, bytes_of_matrices(graph, x.call.inputs, x.threads))


def _delta_states(x: Size) -> Work:
    graph, state = x.structure, x.keys * x.channels
    numbers = float(x.heads * (graph.num_nodes + len(graph.row)) * state)
    largest, size = float(graph.sizes.max(initial=0)), x.dtype.itemsize
    is_far = size * largest * state > 1 << 23  # states do not fit in the cache
    steps = {
        "delta state: number": numbers,
        "delta state: byte": size * numbers,
        "delta state: far byte": is_far * size * numbers,
        "delta state: node": float(x.heads * graph.num_nodes),
    }
    return Work(steps, size * x.threads * largest * (x.keys + 3) * x.channels)


def _is_acyclic(call: Call) -> bool | str:
    return not call.structure.on_cycle.any() or "cycles need matrices"


def _needs_matrices(call: Call) -> bool:
    return call.inputs.form == "mask" or bool(call.structure.on_cycle.any())


def _has_long_paths(call: Call) -> bool:
    graph, most = call.structure, ON_GPUS["chunk: nodes"]
    return graph.are_paths and (call.inputs.form == "chunk" or graph.depth > most)


def _delta_levels(x: Size) -> float:
    """Relative to a walk, node by node."""
    levels = ON_GPUS["delta: nodes a level"] * x.structure.depth
    return max(ON_GPUS["delta: nodes"], levels) / x.structure.sizes.max(initial=1)


# ---------------------------------------------------------------------------- the table


class Row(NamedTuple):
    """Where an algorithm fits, and what it takes there."""

    #: Whether it fits a call: True, False, or why it does not.
    fits: Callable[[Call], bool | str] = lambda call: True
    #: On a CPU, its work, or None if it is not worth while; on a GPU, in any unit.
    cost: Callable[[Size], Work | float | None] = lambda size: math.inf


#: Why a form is faster than others.
_WHY = {
    "state": "states along edges are faster",
    "mask": "blocks are small, or factors full: matrix products are faster",
    "chunk": "paths: matrix products in chunks are faster",
    "levels": "shallow: level by level is faster",
}
#: Rows by solver, form and backend. Where costs are equal, the first is preferred.
Table = dict[str, Row]
_SCANS: Table = {
    "scan state numba": Row(cost=_states),
    "scan chunk numba": Row(lambda call: call.structure.are_paths, _chunks),
    "scan state torch": Row(),
}
ON_CPUS: dict[str, Table] = {
    "resolvent_mix": {
        "sparse chunk numba": Row(_are_undirected_paths, _chunks),
        "sparse mask numba": Row(_may_hold_resolvents, _solved_masks),
        "sparse state numba": Row(_may_eliminate, _elimination),
        "dense mask torch": Row(cost=_dense_masks),
        "iterative state numba": Row(cost=_iteration),
        "neumann state numba": Row(_is_finite_sum, _sweeps),
        "neumann mask torch": Row(_is_finite_sum, _dense_masks),
    },
    **dict.fromkeys(("dag_scan", "stm_scan", "grid_dag_scan"), _SCANS),
    "grid_scan": {**_SCANS, "scan mask numba": Row(cost=_grid_masks)},
    "delta_scan": {
        "scan state numba": Row(_is_acyclic, _delta_states),
        "dense mask numba": Row(_needs_matrices, _delta_masks),
        "scan state torch": Row(_is_acyclic),
        # Its matrices take more memory.
        "dense mask torch": Row(
            lambda call: call.inputs.backend == "torch" and _needs_matrices(call)
        ),
    },
}
_SCANS_ELSEWHERE: Table = {
    "scan state triton": Row(cost=_walk_on_gpus),
    "scan chunk triton": Row(
        lambda call: call.structure.are_paths, lambda size: ON_GPUS["chunk: scan"]
    ),
    "scan state torch": Row(cost=_levels_on_gpus),
}
_ELSEWHERE: dict[str, Table] = {
    "resolvent_mix": {
        "dense mask triton": Row(cost=_dense_on_gpus),
        "dense mask torch": Row(cost=_dense_on_gpus),
        "sparse chunk triton": Row(_must_cut, lambda size: 1.0 - _is_long(size.call)),
        "sparse state triton": Row(_may_eliminate, lambda size: 1.0),
        "neumann mask torch": Row(_is_finite_sum),
    },
    **dict.fromkeys(
        ("dag_scan", "stm_scan", "grid_scan", "grid_dag_scan"), _SCANS_ELSEWHERE
    ),
    "delta_scan": {
        "scan chunk triton": Row(_has_long_paths, lambda size: 1.0),
        "scan state triton": Row(_is_acyclic, lambda size: 1.0),
        "scan state torch": Row(_is_acyclic, _delta_levels),
        "dense mask torch": Row(_needs_matrices),
    },
}


class Recurrence(Operator[Inputs, Structure]):
    """An operator whose algorithms are in the table."""

    def choices(self, call: Call[Inputs, Structure]) -> list[Choice]:
        """The algorithms that a call may take, the best first, each with the others
        that have costs; if there is none, what was asked for, whose backend says why
        not.
        """
        inputs: Any = call.inputs
        tables: dict[Any, Any] = call.structure.tables  # type: ignore[attr-defined]
        usable, reason = self.usable(inputs), self.reason(inputs)
        solver, form = getattr(inputs, "solver", "auto"), inputs.form
        if usable == ["reference"]:
            solver = "neumann" if solver == "neumann" else "dense"
            return [Choice(self.name, solver, "mask", "reference", reason)]
        is_cpu = inputs.value.device.type == "cpu" and usable[0] != "triton"
        if not is_cpu:
            return _sorted(call, usable, reason, is_cpu)
        # On a CPU, contents only matter to iterations, and to whether to iterate at all
        # if a call is long.
        sizes = inputs.query.shape, inputs.value.shape, inputs.value.dtype
        terms = getattr(inputs, "num_terms", None)
        asked = self.name, solver, form, terms, *usable, reason
        key = (*sizes, *asked, torch.get_num_threads(), *nanoseconds().values())
        known = tables.get(key)
        if known is None:
            known = _sorted(call, usable, reason, is_cpu)
            cost = known[0].cost
            is_short = cost is not None and cost.seconds < _WORTH_WHILE
            if is_short and all(x.solver != "iterative" for x in known):
                tables[key] = known
        return known


def _sorted(call: Call, usable: list[str], reason: str, is_cpu: bool) -> list[Choice]:
    """The same, computed anew."""
    name, inputs = call.choice.operator, call.inputs
    solver, form = getattr(inputs, "solver", "auto"), inputs.form
    table = (ON_CPUS if is_cpu else _ELSEWHERE)[name]
    fits = {
        key: table[key].fits(call)
        for key, (its_solver, its_form, backend) in ((x, x.split()) for x in table)
        if solver in ("auto", its_solver) and form in ("auto", its_form)
        and backend in usable
    }  # fmt: skip
    why_not = [x for x in fits.values() if isinstance(x, str)]
    suited = [x for x in fits if fits[x] and fits[x] not in why_not]
    last = [x for x in table if x not in fits and _is_last_resort(x, call, usable)]
    if not suited + last:
        solver = "sparse" if solver == "auto" else solver
        form = "mask" if solver == "dense" else "state" if form == "auto" else form
        return [
            Choice(name, *_parts(x), reason)
            for x in fits or [f"{solver} {form} {usable[0]}"]
        ]
    reason = "; ".join(dict.fromkeys([reason, *why_not]))
    found: list[tuple[bool, float, Choice]] = []
    size = Size.of(call)
    for key in suited + last:
        cost, choice = table[key].cost(size), Choice(name, *_parts(key), reason)
        if cost is None:
            continue
        if isinstance(cost, Work):
            choice = choice._replace(cost=cost.cost(size.threads))
            cost = choice.cost.seconds  # type: ignore[union-attr]
            size = size._replace(least=min(size.least, cost))
        polynomial = call.get("polynomial", None)
        if choice.solver == "iterative" and polynomial is not None:
            more = f"about {polynomial.sweeps} sweeps are enough"
            choice = choice._replace(reason=f"{reason}; {more}")
        found.append((key in last, cost, choice))
    found.sort(key=lambda x: x[:2])
    best = [choice for *_, choice in found]
    others = [choice for _, cost, choice in found if cost < math.inf]
    if len(others) > 1:
        is_by_level = not is_cpu and best[0][1:4] == ("scan", "state", "torch")
        why = _WHY["levels" if is_by_level else best[0].form]
        best[0] = best[0]._replace(reason=f"{best[0].reason}; {why}")
    return [
        x._replace(alternatives=tuple(y for y in others if x[1:4] != y[1:4]))
        for x in best
    ]


def _parts(key: str) -> tuple[str, str, str]:
    solver, form, backend = key.split()
    return solver, form, backend


def _is_last_resort(key: str, call: Call, usable: list[str]) -> bool:
    """Whether an algorithm is used, though it is not as asked for, where no other can
    be: dense matrices, which take any weights.
    """
    (solver, _, backend), inputs = key.split(), call.inputs
    if solver != "dense" or getattr(inputs, "solver", "") != "auto":
        return False
    if inputs.form == "chunk" or inputs.backend == "torch":
        return False
    if inputs.backend == "triton" and _may_eliminate(call) is True:
        return False
    return backend in usable or usable == ["numba"]
