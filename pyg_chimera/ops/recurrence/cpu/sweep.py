"""The scan of a graph of states on the CPU, jitted, in three forms.

State form: one pass over the states. A task is a (block, head, slice of channels). Its
states [S, rows of N, width of P] fit in a core's cache; each is computed from its
parents, written, and read while it is in registers. A ring buffer, as long as edges
lead back, holds the states that are still needed. The backward pass recomputes all
states, then runs the mirror image for the adjoints, in a ring buffer, and computes all
gradients on the way. On grids, nodes are swept instead: see `grid_sweep`.

Mask form: of grids with states on edges only, see `grid_mask`.

Chunk form: for states along paths, see `ops.recurrence.cpu.chunks`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import (
    arrays,
    inlined,
    jit,
    run,
    stopped,
)
from pyg_chimera.ops.common.simd import (
    first,
    fma,
    lanes,
    load,
    load_part,
    pointer,
    row_totals,
    splat,
    store,
    store_part,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, copy, even_share, inner_product
from pyg_chimera.ops.recurrence.cpu import grid_sweep
from pyg_chimera.ops.recurrence.cpu.chunks import (
    Cut,
    Operands,
    Scan,
    gradients,
    output,
    scan_of,
)
from pyg_chimera.ops.recurrence.cpu.direct_term import (
    add_direct_gradients,
    add_direct_term,
)
from pyg_chimera.ops.recurrence.cpu.grid_mask import mask_scan
from pyg_chimera.ops.recurrence.cpu.grid_sweep import (
    GridOperands,
    GridScan,
    pieces,
    sweep,
)
from pyg_chimera.ops.recurrence.plan.states import NOT_PATHS, GridStates, StateGraph
from pyg_chimera.ops.structure.csr import Rows

DEVICES = ("cpu",)

#: Bytes of states that a task may hold at a time: half of a typical L2 cache of 2 MiB.
_TILE_BYTES = 1 << 20
#: The fewest numbers of a state that are processed at a time, even if they do not fit.
_MIN_LANES = 128

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It supports all calls, but has the chunk form only for paths."""
    if call.choice.form == "chunk" and not call.structure.are_paths:
        return NOT_PATHS
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    if _is_on_grids(call):
        found = grid_sweep.forward(*_on_grids(call))
    else:
        x = _operands(call)
        found = output(*_scan_of(call, x), x)
    out = torch.from_numpy(found)
    if call.inputs.direct is not None and call.choice.form != "mask":
        add_direct_term(out, *call.inputs[:3], call.inputs.direct)
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    direct, (dy,) = call.inputs.direct, arrays(grad)
    if _is_on_grids(call):
        found = grid_sweep.backward(*_on_grids(call), dy)
        given = (x for x in call.inputs[:7] if x is not None)
        grads = tuple(
            torch.from_numpy(x).view(like.shape)
            for x, like in zip(found, given, strict=False)
        )
    else:
        graph, x = call.structure.graph, _operands(call)
        *found, by_entry = gradients(*_scan_of(call, x), x, dy)
        dw = np.empty(by_entry.shape[::-1], by_entry.dtype)
        dw[graph.parents.entry] = by_entry.T
        grads = graph.gradients(call.inputs, *map(torch.from_numpy, (*found, dw)))
    if direct is None or call.choice.form == "mask":  # which includes these gates
        return grads
    return *grads, add_direct_gradients(grads[:3], *call.inputs[:3], direct, grad)


def _is_on_grids(call: Call) -> bool:
    """Whether nodes of grids are swept instead of states of a graph."""
    return call.choice.form != "chunk" and isinstance(call.structure, GridStates)


def _on_grids(call: Call) -> tuple[GridScan, GridStates, GridOperands, int]:
    """How grids are swept, and the operands in the layout of the sweeps."""
    states, inputs, heads = call.structure, call.inputs, call.inputs.value.shape[1]
    query, key, value, source, transition = arrays(
        *inputs[:3], inputs.source, inputs.transition
    )
    shape = (len(value), len(states.orientations), 1 if states.on_nodes else 2)
    source = source.reshape(*shape, heads)
    mark = None if inputs.mark is None else arrays(inputs.mark)[0].reshape(source.shape)
    transition = transition.reshape(*shape, 2, heads)
    x = GridOperands(query, key, value, source, mark, transition, None)
    if call.choice.form == "mask":
        return mask_scan, states, x._replace(direct=arrays(inputs.direct)[0]), 1
    return sweep, states, x, pieces(len(states.grids.height), value)


def _operands(call: Call) -> Operands:
    """The operands, with weights in the order of the graph's entries."""
    graph: StateGraph = call.structure.graph
    query, key, value = arrays(*call.inputs[:3])
    source, mark, transition = arrays(*graph.gates_of(call.inputs))
    weight = np.ascontiguousarray(transition[graph.parents.entry].T)
    return Operands(weight, source, mark, query, key, value)


def _scan_of(call: Call, x: Operands) -> tuple[Scan, Cut]:
    """The scan in the chosen form, and how it is divided into tasks."""
    graph = call.structure.graph
    if call.choice.form == "chunk":
        return scan_of(graph.paths, x)
    return partial(_state_scan, graph), Cut(pieces(len(graph.sizes), x.value), 1)


# ------------------------------------------------------------------------ state form


class _Tile(NamedTuple):
    """Some key channels of the states of a component, for a head."""

    start: int  #: the first state's position
    num_states: int
    ring: int  #: how many states must be held to compute the next one
    kept: int  #: states per segment of the backward pass
    a: int  #: the first key channel
    m: int  #: how many key channels
    width: int  #: of the values, in whole vectors
    h: int


class _Ring(NamedTuple):
    """A ring buffer of states, followed by a state that is zero."""

    states: Any  #: a pointer
    length: int
    size: int  #: numbers per state
    one: Any  #: the number, of the states' dtype


def _state_scan(
    graph: StateGraph, x: Operands, y: np.ndarray, d: Operands | None, share: int
) -> None:
    """From states C = A C + S k v^T, y = sum M q^T C. With the adjoint Z = A^T Z + M q
    dy^T: dq = M C dy, dM = q^T C dy, dk = S Z v, dv = S Z^T k, dS = k^T Z v and dA_ij =
    <Z_i, C_j>. C is recomputed.
    """
    (_, heads, channels), num_keys = x.value.shape, x.query.shape[2]
    plan, room = graph.arrays(by_edge=False), _TILE_BYTES // x.value.itemsize
    vector, _ = vector_lanes(x.value.dtype)
    width = max(1, -(-channels // vector)) * vector
    scratch = 2 * (num_keys + vector) * vector
    scratch += _most_numbers(plan, max(1, num_keys), width, room, d is not None)
    work = (0.5 * graph.entries + 2.0 * graph.sizes) * num_keys * channels
    costs = np.repeat(work * (1 if d is None else 3), heads)
    run(_state_tasks, costs, scratch, x.value.dtype, plan, x, y, d, room)


@jit
def _most_numbers(plan, num_keys, width, room, is_backward):
    """The most numbers of states and adjoints, and of states before segments."""
    most = 0
    for c in range(plan.bandwidth.shape[0]):
        kept, held, rows = _cut(plan, c, num_keys, width, room, is_backward)
        if is_backward:
            n, ring = plan.ptr[c + 1] - plan.ptr[c], plan.bandwidth[c] + 1
            held += (n + kept - 1) // kept * ring
        most = max(most, held * rows * width)
    return most


@jit
def _cut(plan, c, num_keys, width, room, is_backward):
    """The states of a component per segment, how many are held at a time, and the key
    channels per tile such that these fit, in even shares.
    """
    n, ring = plan.ptr[c + 1] - plan.ptr[c], plan.bandwidth[c] + 1
    kept, held = n, ring + 1
    if is_backward:
        kept = _segment(n, ring, num_keys * width, room)
        held = kept + 2 * ring + 2
    fit = max(1, max(room // held, _MIN_LANES) // max(1, width))
    return kept, held, even_share(num_keys, fit)


@jit
def _segment(n, ring, size, room):
    """How many consecutive states are held: all, if a quarter of their channels fit, or
    if the states stored before segments would take about as much; else as many as fit
    in a quarter of the room.
    """
    if (n + 2 * ring + 2) * size <= 4 * room or n <= 32 * ring:
        return n
    fit = room // 4 // size - 2 * ring
    return max(2 * ring, min(n, max(fit, int(math.sqrt(n)))))


# Indices are plain loop variables, and arrays are indexed directly: numba counts
# references to views, and adds checks for indices that it cannot prove nonnegative. It
# also counts those to arrays of a tuple, which are therefore taken before a loop, and
# may be passed as pointers.


@inlined
def edge_pointers(edges):
    """The same edges, as pointers."""
    return Rows(pointer(edges.ptr), pointer(edges.col), pointer(edges.entry))


@inlined
def _slot(slot, step, ring):
    """The slot `step` away in a ring buffer, less than once around."""
    slot += step
    if slot < 0:
        slot += ring.length
    if slot >= ring.length:
        slot -= ring.length
    return slot


@inlined
def _accumulate(target, a, row, size):
    for at in range(0, size, lanes(target)):
        store(target + at, fma(a, load(row + at), load(target + at)))


@inlined
def _gather_inputs(ring, slot, i, edges, weights):
    """Two states and weights whose weighted sum flows into a state from its neighbours.

    If there are more than two neighbours, all but the first are summed up in the
    state's own slot. The state of zeros stands for a missing one.
    """
    states, size, x, stop = ring.states, ring.size, edges.ptr[i], edges.ptr[i + 1]
    s0, s1, w0, w1 = ring.length, ring.length, zeros(states), zeros(states)
    if x < stop:
        s0, w0 = _slot(slot, edges.col[x] - i, ring), splat(weights[edges.entry[x]])
    if x + 1 < stop:
        x += 1
        s1, w1 = _slot(slot, edges.col[x] - i, ring), splat(weights[edges.entry[x]])
    if x + 1 < stop:
        _sum_inputs(ring, slot, i, edges, weights)
        s1, w1 = slot, splat(ring.one)
    return states + s0 * size, w0, states + s1 * size, w1


@jit
def _sum_inputs(ring, slot, i, edges, weights):
    """Sets a slot to the weighted sum of a state's neighbours but the first."""
    target = ring.states + slot * ring.size
    clear(target, ring.size)
    for x in range(edges.ptr[i] + 1, edges.ptr[i + 1]):
        row = ring.states + _slot(slot, edges.col[x] - i, ring) * ring.size
        _accumulate(target, splat(weights[edges.entry[x]]), row, ring.size)


@jit
def _add_sums(target, gate, rows, factors, m):
    """Adds each row's sum times a gate to the target, and returns the inner product of
    the rows' sums and factors: the gradients of keys (or queries) and of the gate.
    """
    step, together = lanes(target), zeros(target)
    for a in range(0, m, step):
        sums = first(row_totals(rows + a * step), m - a)
        together = fma(sums, load_part(factors + a, m - a), together)
        sums = fma(splat(gate), sums, load_part(target + a, m - a))
        store_part(target + a, sums, m - a)
    return total(together)


@jit
def _state_tasks(first, last, stop, scratch, plan, x, y, d, room):
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    _, heads, w = x.value.shape
    memory, num_keys = pointer(scratch), x.query.shape[2]
    width = (w + lanes(memory) - 1) // lanes(memory) * lanes(memory)
    for task in range(first, last):
        block, h = task // heads, task % heads
        for c in range(plan.block[block], plan.block[block + 1]):
            start, n = plan.ptr[c], plan.ptr[c + 1] - plan.ptr[c]
            kept, _, rows = _cut(plan, c, num_keys, width, room, d is not None)
            for a in range(0, num_keys, rows):
                if stopped(stop):
                    return
                ring, m = plan.bandwidth[c] + 1, min(rows, num_keys - a)
                tile = _Tile(start, n, ring, kept, a, m, width, h)
                if d is None:
                    states = _Ring(memory, ring, m * width, x.value.dtype.type(1))
                    clear(memory + ring * m * width, m * width)
                    _sweep(states, 0, start, start + n, plan, x, tile, y)
                else:
                    _sweep_back(plan, x, y, d, tile, memory)


@jit
def _sweep(ring, slot, begin, end, plan, x, tile, out):
    """Computes the states from `begin` to `end`, in slots from `slot` on, and adds what
    is read from them to `out`, unless it is None.
    """
    _, heads, w = x.value.shape
    _, groups, num_keys = x.query.shape
    of_keys, of_values, step = groups * num_keys, heads * w, lanes(ring.states)
    h, width = tile.h, tile.width
    weights = pointer(x.weight) + h * x.weight.shape[1]
    at = h // (heads // groups) * num_keys + tile.a
    keys, queries = pointer(x.key) + at, pointer(x.query) + at
    at = h * w
    values = pointer(x.value) + at
    order, writer, reader = plan.state, plan.writer, plan.reader
    parents, source, mark = edge_pointers(plan.parents), x.source, x.mark
    for i in range(begin, end):
        state = order[i]
        u, z = writer[state], reader[state]
        x0, w0, x1, w1 = _gather_inputs(ring, slot, i, parents, weights)
        own = ring.states + slot * ring.size
        S, M = splat(source[state, h]), splat(mark[state, h])
        k, q, v = keys + u * of_keys, queries + z * of_keys, values + u * of_values
        for p in range(0, w, step):
            written, read = S * load_part(v + p, w - p), zeros(own)
            here = p
            for a in range(tile.m):
                flow = fma(w0, load(x0 + here), w1 * load(x1 + here))
                c = fma(splat(k[a]), written, flow)
                store(own + here, c)
                if out is not None:
                    read = fma(splat(q[a]), c, read)
                here += width
            if out is not None:
                y = pointer(out) + (at + z * of_values + p)
                store_part(y, fma(M, read, load_part(y, w - p)), w - p)
        slot = _slot(slot, 1, ring)


@jit
def _sweep_back(plan, x, grad, d, tile, memory):
    """Processes segments from the last one on. The states of each are recomputed from
    those stored before it, which precede them in their ring.
    """
    _, heads, w = x.value.shape
    _, groups, num_keys = x.query.shape
    if w == 0:
        return
    kept, width, m, h, step = tile.kept, tile.width, tile.m, tile.h, lanes(memory)
    of_keys, of_grads = groups * num_keys, heads * num_keys
    of_values = heads * w
    size, held, one = m * width, tile.ring * m * width, x.value.dtype.type(1)
    weights = pointer(x.weight) + h * x.weight.shape[1]
    # Rows of products, to be summed; then states, adjoints, and stored states.
    of_q, of_k = memory, memory + (m + step) * step
    states = _Ring(of_k + (m + step) * step, tile.ring + kept, size, one)
    adjoints = _Ring(states.states + (states.length + 1) * size, tile.ring, size, one)
    stored = adjoints.states + (held + size)
    clear(states.states + states.length * size, size)
    clear(adjoints.states + held, size)
    at = h // (heads // groups) * num_keys + tile.a
    keys, queries = pointer(x.key) + at, pointer(x.query) + at
    at = h * w
    values, d_values = pointer(x.value) + at, pointer(d.value) + at
    grads = pointer(grad) + at
    at = h * num_keys + tile.a
    d_keys, d_queries = pointer(d.key) + at, pointer(d.query) + at
    order, writer, reader = plan.state, plan.writer, plan.reader
    parents, children = edge_pointers(plan.parents), edge_pointers(plan.children)
    segments = (tile.num_states + kept - 1) // kept
    for segment in range(segments - 1):
        begin = tile.start + segment * kept
        _sweep(states, tile.ring, begin, begin + kept, plan, x, tile, None)
        copy(states.states, states.states + kept * size, held)
        copy(stored + (segment + 1) * held, states.states, held)
    slot = tile.ring
    for segment in range(segments - 1, -1, -1):
        if 0 < segment < segments - 1:
            copy(states.states, stored + segment * held, held)
        begin = tile.start + segment * kept
        end = min(tile.start + tile.num_states, begin + kept)
        _sweep(states, tile.ring, begin, end, plan, x, tile, None)
        of_segment = states.states + tile.ring * size
        for i in range(end - 1, begin - 1, -1):
            slot = _slot(slot, -1, adjoints)
            state = order[i]
            u, z = writer[state], reader[state]
            x0, w0, x1, w1 = _gather_inputs(adjoints, slot, i, children, weights)
            own = of_segment + (i - begin) * size
            adjoint = adjoints.states + slot * size
            S, M = splat(x.source[state, h]), splat(x.mark[state, h])
            k, q = keys + u * of_keys, queries + z * of_keys
            v, dv = values + u * of_values, d_values + u * of_values
            dy = grads + z * of_values
            for p in range(0, w, step):
                y, written = load_part(dy + p, w - p), load_part(v + p, w - p)
                read, d_written = M * y, zeros(memory)
                here = p
                for a in range(m):
                    flow = fma(w0, load(x0 + here), w1 * load(x1 + here))
                    c = fma(splat(q[a]), read, flow)
                    store(adjoint + here, c)
                    d_written = fma(splat(k[a]), c, d_written)
                    to_k, to_q, s = of_k + a * step, of_q + a * step, load(own + here)
                    store(to_k, c * written if p == 0 else fma(c, written, load(to_k)))
                    store(to_q, s * y if p == 0 else fma(s, y, load(to_q)))
                    here += width
                store_part(dv + p, fma(S, d_written, load_part(dv + p, w - p)), w - p)
            d.mark[state, h] += _add_sums(
                d_queries + z * of_grads, x.mark[state, h], of_q, q, m
            )
            d.source[state, h] += _add_sums(
                d_keys + u * of_grads, x.source[state, h], of_k, k, m
            )
            for e in range(parents.ptr[i], parents.ptr[i + 1]):
                other = of_segment + (parents.col[e] - begin) * size
                d.weight[h, e] += inner_product(adjoint, other, size)
