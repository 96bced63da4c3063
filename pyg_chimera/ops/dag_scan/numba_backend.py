"""The scan of a graph of states on the CPU, jitted, in three forms.

State form: one pass over the states. A task is a (block, head, slice of channels). Its
states [S, rows of N, width of P] fit in a core's cache; each is computed from its
parents, written, and read while it is in registers. A ring buffer, as long as edges
lead back, holds the states that are still needed. The backward pass recomputes all
states, then runs the mirror image for the adjoints, in a ring buffer, and computes all
gradients on the way. On grids, nodes are swept instead: see `grid_sweeps` and
`grid_node_sweeps`.

Mask form: y = (G * Q K^T) V, where :math:`G = M (I - A)^{-1} S` is a matrix between
nodes, however many states lie between them: a grid has eight per node in its four
orientations, which add up to one G. A task is a (block, heads that share keys). G is
computed some columns (writers) at a time: a sweep over all states, to which nodes that
write add their sources, and whose rows are added up at the nodes that read.

Chunk form: both combined, for states along paths: see `ops.common.chunk_form`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common import chunk_form
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import (
    arrays,
    heads_a_task,
    inlined,
    jit,
    run,
    stopped,
    summed,
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
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    clear,
    copy,
    even_share,
    inner_product,
    matmul,
    multiply,
    take,
    take_columns,
    take_transposed,
    transpose,
)
from pyg_chimera.ops.dag_scan import grid_node_sweeps, grid_sweeps
from pyg_chimera.ops.dag_scan.own import add_own, add_own_gradients
from pyg_chimera.ops.dag_scan.states import NOT_PATHS, GridStates, StateGraph

DEVICES = ("cpu",)

#: Bytes of states that a task may hold at a time: half of a typical L2 cache of 2 MiB.
_TILE_BYTES = 1 << 20
#: The fewest numbers of a state that are processed at a time, even if they do not fit.
_MIN_LANES = 128
#: The most columns of G at a time.
_WIDTH = 256

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It supports all calls, but has the chunk form only for paths."""
    if call.choice.form == "chunk" and not call.structure.are_paths:
        return NOT_PATHS
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    forms = {"state": _state_forward, "mask": _mask_forward, "chunk": _chunk_forward}
    if _is_on_grids(call):
        out = torch.from_numpy(_grid_forward(call))
    else:
        compute, operands = forms[call.choice.form], _Operands.of(call)
        out = torch.from_numpy(compute(call.structure.graph, operands))
    if call.inputs.direct is not None:
        add_own(out, *call.inputs[:3], call.inputs.direct)
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    forms = {
        "state": _state_backward,
        "mask": _mask_backward,
        "chunk": _chunk_backward,
    }
    if _is_on_grids(call):
        grads = _grid_backward(call, grad)
    else:
        compute, operands = forms[call.choice.form], _Operands.of(call)
        found = compute(call.structure.graph, operands, *arrays(grad))
        tensors = map(torch.from_numpy, found)
        grads = call.structure.graph.gradients(call.inputs, *tensors)
    direct = call.inputs.direct
    if direct is None:
        return grads
    return *grads, add_own_gradients(grads[:3], *call.inputs[:3], direct, grad)


class _Operands(NamedTuple):
    """The kernels' operands besides the graph, in their order."""

    weight: np.ndarray  #: [heads, L], in the order of the graph's entries
    source: np.ndarray  #: [S, heads]
    mark: np.ndarray  #: [S, heads]
    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]

    @classmethod
    def of(cls, call: Call) -> "_Operands":
        graph: StateGraph = call.structure.graph
        query, key, value = arrays(*call.inputs[:3])
        source, mark, transition = arrays(*graph.gates_of(call.inputs))
        weight = np.empty((value.shape[1], graph.edge.shape[0]), value.dtype)
        _to_entries(weight, transition, graph.edge)
        return cls(weight, source, mark, query, key, value)


def _by_edge(graph: StateGraph, grad_weight: np.ndarray) -> np.ndarray:
    """[heads, L] in the order of entries -> [L, heads] in the order of edges."""
    out = np.empty(grad_weight.shape[::-1], grad_weight.dtype)
    _to_edges(out, grad_weight, graph.edge)
    return out


@jit
def _to_entries(weight, transition, edge):
    for x in range(edge.shape[0]):
        for h in range(weight.shape[0]):
            weight[h, x] = transition[edge[x], h]


@jit
def _to_edges(transition, weight, edge):
    for x in range(edge.shape[0]):
        for h in range(weight.shape[0]):
            transition[edge[x], h] = weight[h, x]


# ------------------------------------------------------------------------ chunk form


def _chunk_forward(graph: StateGraph, operands: _Operands) -> np.ndarray:
    """The output, computed in chunks of paths."""
    return chunk_form.forward(graph.paths, *operands)


def _chunk_backward(
    graph: StateGraph, operands: _Operands, dy: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, source, mark and transition."""
    *grads, dw = chunk_form.backward(graph.paths, *operands, dy)
    return *grads, _by_edge(graph, dw)


# --------------------------------------------------------------- state form of grids


def _is_on_grids(call: Call) -> bool:
    """Whether nodes of grids are swept instead of states of a graph."""
    return call.choice.form == "state" and isinstance(call.structure, GridStates)


def _grid_operands(call: Call) -> list[Any]:
    """The grids, gates, query, key and value in the layout of the grid sweeps."""
    states: GridStates = call.structure
    query, key, value = arrays(*call.inputs[:3])
    gates = arrays(*(x for x in call.inputs[3:6] if x is not None))
    nodes, heads, _ = value.shape
    shape = (nodes, len(states.orientations))
    first: list[Any] = [states.grids]
    sizes: tuple = ((2, heads), (2, heads), (2, 2, heads))
    if states.on_nodes:
        sizes = ((heads,), (2, heads))
        first.append(np.array(states.orientations))
    gates = [x.reshape(*shape, *y) for x, y in zip(gates, sizes, strict=True)]
    return [*first, *gates, query, key, _sliced(len(states.grids.height), value)]


def _grid_forward(call: Call) -> np.ndarray:
    """The output from sweeps of grids, with states on nodes or edges."""
    sweeps = grid_node_sweeps if call.structure.on_nodes else grid_sweeps
    out = sweeps.forward(*_grid_operands(call))
    return out.reshape(call.inputs.value.shape)


def _grid_backward(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all inputs but `direct`."""
    operands, inputs = _grid_operands(call), call.inputs
    _, heads, slices, _ = operands[-1].shape
    operands.append(grad.contiguous().numpy().reshape(operands[-1].shape))
    nodes, groups, num_keys = inputs.key.shape
    if call.structure.on_nodes:
        num_grids = len(call.structure.grids.height)
        parts = heads_a_task(num_grids, groups, heads * slices)
        dq, dk, dv, *of_gates = grid_node_sweeps.backward(*operands, parts=parts)
        dq, dk = (summed(x, (0,)) for x in (dq, dk))
    else:
        dq, dk, dv, *of_gates = grid_sweeps.backward(*operands)
        shape = (slices, nodes, groups, heads // groups, num_keys)
        dq, dk = (summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    found = (dq, dk, dv, *(summed(x, (0,)) for x in of_gates))
    likes = (x for x in inputs[:6] if x is not None)
    return tuple(
        torch.from_numpy(x).view(like.shape)
        for x, like in zip(found, likes, strict=True)
    )


# ------------------------------------------------------------------------ state form


def _sliced(num_blocks: int, value: np.ndarray) -> np.ndarray:
    """[V, heads, P] -> [V, heads, slices, P / slices], to have tasks for all threads.

    Slices of one (block, head) are summed at the end, so there are no more than needed.
    """
    num_nodes, num_heads, num_channels = value.shape
    enough = num_blocks * num_heads >= 4 * torch.get_num_threads()
    widths = [w for w in range(8, 17) if num_channels % w == 0]
    width = num_channels if enough or not widths else widths[-1]
    slices = num_channels // width if width else 1
    return value.reshape(num_nodes, num_heads, slices, width)


def _state_scratch(
    graph: StateGraph, num_keys: int, value: np.ndarray, kept: bool
) -> int:
    """Numbers of scratch memory per tile."""
    vector, _ = vector_lanes(value.dtype)
    width = max(1, -(-value.shape[3] // vector)) * vector
    if kept:
        most = _most_numbers(
            graph.component_ptr, graph.bandwidth, max(1, num_keys), width, _tile(value)
        )
    else:
        held = int(graph.bandwidth.max(initial=0)) + 2
        most = max(_tile(value), held * max(_MIN_LANES, width))
    return most + (num_keys + LANES) * LANES


def _tile(value: np.ndarray) -> int:
    """Numbers of states per tile."""
    return _TILE_BYTES // value.itemsize


def _state_costs(graph: StateGraph, query: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The cost of each task, in order: block, head, slice."""
    _, heads, slices, width = value.shape
    work = 0.5 * graph.entries + 2.0 * graph.sizes
    return np.repeat(work * query.shape[2] * width, heads * slices)


def _components(graph: StateGraph) -> tuple[np.ndarray, ...]:
    return (
        graph.block_component,
        graph.component_ptr,
        graph.bandwidth,
        graph.state,
        graph.parent_ptr,
        graph.parent,
    )


def _state_forward(graph: StateGraph, operands: _Operands) -> np.ndarray:
    """The output from states C = A C + S k v^T, y = sum M q^T C."""
    weight, source, mark, q, k, v = operands
    v = _sliced(graph.sizes.shape[0], v)
    out = np.zeros_like(v)
    run(
        _state_forward_blocks,
        _state_costs(graph, q, v),
        _state_scratch(graph, q.shape[2], v, kept=False),
        v.dtype,
        *_components(graph),
        weight,
        graph.writer,
        graph.reader,
        source,
        mark,
        q,
        k,
        v,
        out,
        _tile(v),
    )
    return out.reshape(operands.value.shape)


def _state_backward(
    graph: StateGraph, operands: _Operands, dy: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, source, mark and transition.

    With the adjoint Z = A^T Z + M q dy^T: dq = M C dy, dM = q^T C dy, dk = S Z v,
    dv = S Z^T k, dS = k^T Z v and dA_ij = <Z_i, C_j>. C is recomputed.
    """
    weight, source, mark, q, k, v = operands
    v = _sliced(graph.sizes.shape[0], v)
    num_nodes, num_heads, slices, _ = v.shape
    groups, num_keys = q.shape[1:]
    # Each slice, and each head of a group, has its own part, summed below.
    dq = np.zeros((slices, num_nodes, num_heads, num_keys), v.dtype)
    dk = np.zeros_like(dq)
    dv = np.zeros_like(v)
    ds, dm = (np.zeros((slices, *source.shape), v.dtype) for _ in range(2))
    dw = np.zeros((slices, *weight.shape), v.dtype)
    run(
        _state_backward_blocks,
        3 * _state_costs(graph, q, v),
        _state_scratch(graph, q.shape[2], v, kept=True),
        v.dtype,
        *_components(graph),
        weight,
        graph.writer,
        graph.reader,
        source,
        mark,
        q,
        k,
        v,
        graph.child_ptr,
        graph.child,
        graph.child_entry,
        dy.reshape(v.shape),
        dq,
        dk,
        dv,
        ds,
        dm,
        dw,
        _tile(v),
    )
    shape = (slices, num_nodes, groups, num_heads // groups, num_keys)
    grad_query, grad_key = (summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    grad_source, grad_mark, grad_weight = (summed(x, (0,)) for x in (ds, dm, dw))
    return (
        grad_query,
        grad_key,
        dv.reshape(dy.shape),
        grad_source,
        grad_mark,
        _by_edge(graph, grad_weight),
    )


@jit
def _rows(held, num_keys, width, room):
    """The key channels per tile such that `held` states fit, in even shares."""
    fit = max(1, max(room // held, _MIN_LANES) // max(1, width))
    return even_share(num_keys, fit)


# Indices are plain loop variables, and arrays are indexed directly: numba counts
# references to views, and adds checks for indices that it cannot prove nonnegative.


@inlined
def _slot(slot, step, ring):
    """The slot `step` away in a ring buffer, less than once around."""
    slot += step
    if slot < 0:
        slot += ring
    if slot >= ring:
        slot -= ring
    return slot


@inlined
def _combine(target, a, left, b, right, size):
    for at in range(0, size, lanes(target)):
        store(target + at, fma(a, load(left + at), b * load(right + at)))


@inlined
def _accumulate(target, a, row, size):
    for at in range(0, size, lanes(target)):
        store(target + at, fma(a, load(row + at), load(target + at)))


@inlined
def _before(states, ring, size, slot, i, x, stop, other, entry, weight, h):
    """Two slots and weights whose weighted sum flows into a state from its neighbours.

    If there are more than two neighbours, all but the first are summed up in the
    state's own slot. The slot at index `ring`, which is zero, stands for a missing one.
    """
    zero = weight.dtype.type(0)
    r0, r1, c0, c1 = ring, ring, zero, zero
    if x < stop:
        r0, c0 = _slot(slot, other[x] - i, ring), weight[h, entry[x]]
    if x + 1 < stop:
        r1, c1 = _slot(slot, other[x + 1] - i, ring), weight[h, entry[x + 1]]
    if x + 2 < stop:
        _join(
            states, ring, size, slot, i, x + 1, stop, other, entry, weight, h
        )  # fmt: skip
        r1, c1 = slot, weight.dtype.type(1)
    return r0, c0, r1, c1


@jit
def _join(states, ring, size, slot, i, x, stop, other, entry, weight, h):
    """Sets a slot to the weighted sum of a state's neighbours x to `stop`."""
    target = states + slot * size
    clear(target, size)
    for y in range(x, stop):
        row = states + _slot(slot, other[y] - i, ring) * size
        _accumulate(target, splat(weight[h, entry[y]]), row, size)


@jit
def _whole(width, p):
    """A width rounded up to whole vectors."""
    return (width + lanes(p) - 1) // lanes(p) * lanes(p)


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
def _state_forward_blocks(
    first, last, stop, scratch, block_component, component_ptr, bandwidth, order,
    before_ptr, before, weight, writer, reader, source, mark, query, key, value, out,
    room,
):  # fmt: skip
    num_heads, slices = value.shape[1], value.shape[2]
    states = pointer(scratch)
    width = _whole(value.shape[3], states)
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        if stopped(stop):
            return
        block, slice_ = task // (num_heads * slices), task % slices
        h = (task // slices) % num_heads
        for c in range(block_component[block], block_component[block + 1]):
            s, n = component_ptr[c], component_ptr[c + 1] - component_ptr[c]
            held = bandwidth[c] + 2
            rows = _rows(held, query.shape[2], width, room)
            for a0 in range(0, query.shape[2], rows):
                if stopped(stop):
                    return
                _state_forward_tile(
                    states, held - 1, width, s, n, a0, min(rows, query.shape[2] - a0),
                    h, slice_, order, before_ptr, before, entries, weight, writer,
                    reader, source, mark, query, key, value, out,
                )  # fmt: skip


@jit
def _state_forward_tile(
    states, ring, width, s, n, a0, m, h, slice_, order, before_ptr, before, entries,
    weight, writer, reader, source, mark, query, key, value, out,
):  # fmt: skip
    _, num_heads, slices, w = value.shape
    _, groups, num_keys = query.shape
    g, size, step = h // (num_heads // groups), m * width, lanes(states)
    keys, queries = (
        pointer(key) + (g * num_keys + a0),
        pointer(query) + (g * num_keys + a0),
    )
    values, outs = (pointer(value) + (h * slices + slice_) * w,
                    pointer(out) + (h * slices + slice_) * w)  # fmt: skip
    clear(states + ring * size, size)
    slot = -1
    for i in range(s, s + n):
        slot = _slot(slot, 1, ring)
        state = order[i]
        u, z = writer[state], reader[state]
        s0, c0, s1, c1 = _before(
            states, ring, size, slot, i, before_ptr[i], before_ptr[i + 1], before,
            entries, weight, h,
        )  # fmt: skip
        x0, x1, x = states + s0 * size, states + s1 * size, states + slot * size
        w0, w1 = splat(c0), splat(c1)
        S, M = splat(source[state, h]), splat(mark[state, h])
        k, q = keys + u * groups * num_keys, queries + z * groups * num_keys
        v, y = values + u * num_heads * slices * w, outs + z * num_heads * slices * w
        for p in range(0, w, step):
            written, read = S * load_part(v + p, w - p), zeros(states)
            at = p
            for a in range(m):
                flow = fma(w0, load(x0 + at), w1 * load(x1 + at))
                c = fma(splat(k[a]), written, flow)
                store(x + at, c)
                read = fma(splat(q[a]), c, read)
                at += width
            store_part(y + p, fma(M, read, load_part(y + p, w - p)), w - p)


@jit
def _state_backward_blocks(
    first, last, stop, scratch, block_component, component_ptr, bandwidth, order,
    before_ptr, before, weight, writer, reader, source, mark, query, key, value,
    after_ptr, after, after_entry, grad, grad_query, grad_key, grad_value, grad_source,
    grad_mark, grad_weight, room,
):  # fmt: skip
    num_heads, slices = value.shape[1], value.shape[2]
    states = pointer(scratch)
    width = _whole(value.shape[3], states)
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        if stopped(stop):
            return
        block, slice_ = task // (num_heads * slices), task % slices
        h = (task // slices) % num_heads
        for c in range(block_component[block], block_component[block + 1]):
            s, n = component_ptr[c], component_ptr[c + 1] - component_ptr[c]
            ring = bandwidth[c] + 1
            kept = _segment(n, ring, query.shape[2] * width, room)
            rows = _rows(kept + 2 * ring + 2, query.shape[2], width, room)
            for a0 in range(0, query.shape[2], rows):
                if stopped(stop):
                    return
                _state_backward_tile(
                    states, ring, kept, width, s, n, a0,
                    min(rows, query.shape[2] - a0), h, slice_, order, before_ptr,
                    before, entries, weight, writer, reader, source, mark, query, key,
                    value, after_ptr, after, after_entry, grad, grad_query, grad_key,
                    grad_value, grad_source, grad_mark, grad_weight,
                )  # fmt: skip


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


@jit
def _most_numbers(component_ptr, bandwidth, num_keys, width, room):
    """The most numbers of held states and adjoints, and of states before segments."""
    most = 0
    for c in range(bandwidth.shape[0]):
        n, ring = component_ptr[c + 1] - component_ptr[c], bandwidth[c] + 1
        kept = _segment(n, ring, num_keys * width, room)
        held = kept + 2 * ring + 2
        rows = _rows(held, num_keys, width, room)
        most = max(most, (held + (n + kept - 1) // kept * ring) * rows * width)
    return most


@jit
def _state_backward_tile(
    states, ring, kept, width, s, n, a0, m, h, slice_, order, before_ptr, before,
    entries, weight, writer, reader, source, mark, query, key, value, after_ptr, after,
    after_entry, grad, grad_query, grad_key, grad_value, grad_source, grad_mark,
    grad_weight,
):  # fmt: skip
    """Processes segments from the last one on. The states of each are recomputed from
    those stored before it, which precede them in `states`.
    """
    num_nodes, num_heads, slices, w = value.shape
    _, groups, num_keys = query.shape
    if w == 0:
        return
    g, size, step = h // (num_heads // groups), m * width, lanes(states)
    of_keys, of_values = groups * num_keys, num_heads * slices * w
    of_grads = num_heads * num_keys
    segments, line = (n + kept - 1) // kept, ring + kept
    rows = states  # rows of products, to be summed
    states = rows + (m + step) * step
    adjoints = states + (line + 1) * size
    stored = adjoints + (ring + 1) * size
    at = g * num_keys + a0
    keys, queries = pointer(key) + at, pointer(query) + at
    at = (h * slices + slice_) * w
    values, grads = pointer(value) + at, pointer(grad) + at
    d_values = pointer(grad_value) + at
    at = (slice_ * num_nodes * num_heads + h) * num_keys + a0
    d_keys, d_queries = pointer(grad_key) + at, pointer(grad_query) + at
    clear(states + line * size, size)
    clear(adjoints + ring * size, size)
    for segment in range(segments - 1):
        for i in range(s + segment * kept, s + (segment + 1) * kept):
            state, slot = order[i], ring + i - s - segment * kept
            u = writer[state]
            s0, c0, s1, c1 = _before(
                states, line, size, slot, i, before_ptr[i], before_ptr[i + 1], before,
                entries, weight, h,
            )  # fmt: skip
            x0, x1, x = states + s0 * size, states + s1 * size, states + slot * size
            w0, w1, S = splat(c0), splat(c1), splat(source[state, h])
            k, v = keys + u * of_keys, values + u * of_values
            for p in range(0, w, step):
                written = S * load_part(v + p, w - p)
                at = p
                for a in range(m):
                    flow = fma(w0, load(x0 + at), w1 * load(x1 + at))
                    store(x + at, fma(splat(k[a]), written, flow))
                    at += width
        copy(states, states + kept * size, ring * size)
        copy(stored + (segment + 1) * ring * size, states, ring * size)
    slot = ring
    for segment in range(segments - 1, -1, -1):
        if 0 < segment < segments - 1:
            copy(states, stored + segment * ring * size, ring * size)
        begin, end = s + segment * kept, s + min(n, (segment + 1) * kept)
        for i in range(begin, end):
            state, place = order[i], ring + i - begin
            u, z = writer[state], reader[state]
            s0, c0, s1, c1 = _before(
                states, line, size, place, i, before_ptr[i], before_ptr[i + 1], before,
                entries, weight, h,
            )  # fmt: skip
            x0, x1, x = states + s0 * size, states + s1 * size, states + place * size
            w0, w1, S = splat(c0), splat(c1), splat(source[state, h])
            k, q = keys + u * of_keys, queries + z * of_keys
            v, dy = values + u * of_values, grads + z * of_values
            for p in range(0, w, step):
                written, read = S * load_part(v + p, w - p), load_part(dy + p, w - p)
                at = p
                for a in range(m):
                    flow = fma(w0, load(x0 + at), w1 * load(x1 + at))
                    c = fma(splat(k[a]), written, flow)
                    store(x + at, c)
                    row = rows + a * step
                    store(row, c * read if p == 0 else fma(c, read, load(row)))
                    at += width
            grad_mark[slice_, state, h] += _add_sums(
                d_queries + z * of_grads, mark[state, h], rows, q, m
            )
        for i in range(end - 1, begin - 1, -1):
            slot = _slot(slot, -1, ring)
            state = order[i]
            u, z = writer[state], reader[state]
            s0, c0, s1, c1 = _before(
                adjoints, ring, size, slot, i, after_ptr[i], after_ptr[i + 1], after,
                after_entry, weight, h,
            )  # fmt: skip
            x0, x1 = adjoints + s0 * size, adjoints + s1 * size
            w0, w1, x = splat(c0), splat(c1), adjoints + slot * size
            S, M = splat(source[state, h]), splat(mark[state, h])
            k, q = keys + u * of_keys, queries + z * of_keys
            v, dv = values + u * of_values, d_values + u * of_values
            dy = grads + z * of_values
            for p in range(0, w, step):
                read, written = M * load_part(dy + p, w - p), load_part(v + p, w - p)
                d_written = zeros(states)
                at = p
                for a in range(m):
                    flow = fma(w0, load(x0 + at), w1 * load(x1 + at))
                    c = fma(splat(q[a]), read, flow)
                    store(x + at, c)
                    d_written = fma(splat(k[a]), c, d_written)
                    row = rows + a * step
                    store(row, c * written if p == 0 else fma(c, written, load(row)))
                    at += width
                store_part(dv + p, fma(S, d_written, load_part(dv + p, w - p)), w - p)
            grad_source[slice_, state, h] += _add_sums(
                d_keys + u * of_grads, source[state, h], rows, k, m
            )
            for y in range(before_ptr[i], before_ptr[i + 1]):
                place = ring + before[y] - begin
                inner = inner_product(x, states + place * size, size)
                grad_weight[slice_, h, y] += inner


# ------------------------------------------------------------------------- mask form


def _share(graph: StateGraph, query: np.ndarray, value: np.ndarray) -> int:
    return heads_a_task(len(graph.sizes), query.shape[1], value.shape[1])


def _mask_costs(graph: StateGraph, operands: _Operands, share: int) -> np.ndarray:
    nodes = np.diff(graph.nodes.ptr).astype(float)
    _, _, _, q, _, v = operands
    products = 0.2 * nodes * (q.shape[2] + share * v.shape[2])
    work = nodes * (2.0 * share * graph.sizes + products)
    return np.repeat(work, v.shape[1] // share)


def _mask_scratch(graph: StateGraph, operands: _Operands) -> int:
    """Numbers of scratch memory per task of the backward pass; forward needs fewer."""
    n = int(np.diff(graph.nodes.ptr).max(initial=0)) + LANES
    states = int((graph.sizes + graph.block_bandwidth).max(initial=0)) + 3
    channels = operands.query.shape[2] + operands.value.shape[2]
    return _WIDTH * (states + 5 * n + 2 * channels) + 2 * n * channels


def _joined(graph: StateGraph) -> tuple[np.ndarray, ...]:
    return *graph.nodes, graph.block_bandwidth


def _mask_forward(graph: StateGraph, operands: _Operands) -> np.ndarray:
    """The output from gating matrices between nodes."""
    share = _share(graph, operands.query, operands.value)
    out = np.zeros_like(operands.value)
    run(
        _mask_forward_blocks,
        _mask_costs(graph, operands, share),
        _mask_scratch(graph, operands),
        out.dtype,
        graph.ptr,
        graph.state,
        graph.child_ptr,
        graph.child,
        graph.child_entry,
        *_joined(graph),
        *operands,
        out,
        share,
    )
    return out


def _mask_backward(
    graph: StateGraph, operands: _Operands, dy: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, source, mark and transition.

    With L = (I - A)^-1 S and Z = (I - A)^-T M^T dG: dM is the row-wise <dG, L>, dS is
    the entry of Z for a state and its writer, and dA_ij = <Z_i, L_j>.
    """
    weight, source, _, q, _, v = operands
    share = _share(graph, q, v)
    num_nodes, num_heads, _ = v.shape
    groups, num_keys = q.shape[1:]
    dq = np.zeros((num_nodes, num_heads // share, num_keys), v.dtype)
    dk, dv = np.zeros_like(dq), np.zeros_like(v)
    ds, dm, dw = np.zeros_like(source), np.zeros_like(source), np.zeros_like(weight)
    run(
        _mask_backward_blocks,
        3 * _mask_costs(graph, operands, share),
        _mask_scratch(graph, operands),
        v.dtype,
        graph.ptr,
        graph.state,
        graph.parent_ptr,
        graph.parent,
        *_joined(graph),
        *operands,
        graph.child_ptr,
        graph.child,
        graph.child_entry,
        dy,
        dq,
        dk,
        dv,
        ds,
        dm,
        dw,
        share,
    )
    shape = (num_nodes, groups, num_heads // groups // share, num_keys)
    grad_query, grad_key = (summed(x.reshape(shape), (2,)) for x in (dq, dk))
    return grad_query, grad_key, dv, ds, dm, _by_edge(graph, dw)


@jit
def _width(n):
    """Columns at a time: even shares, rounded up to whole vectors."""
    return (even_share(n, _WIDTH) + LANES - 1) // LANES * LANES


@jit
def _feed(
    states, ring, width, slot, i, c0, before_ptr, before, entries, weight, h, writer,
    source,
):  # fmt: skip
    """Sets and returns a state's row of L: what flows into it, and its own source.

    Or of the transposed matrix, with readers for writers and marks for sources.
    """
    s0, w0, s1, w1 = _before(
        states, ring, width, slot, i, before_ptr[i], before_ptr[i + 1], before, entries,
        weight, h,
    )  # fmt: skip
    row = states + slot * width
    _combine(row, splat(w0), states + s0 * width, splat(w1), states + s1 * width, width)
    column = writer[i] - c0
    if column >= 0 and column < width:
        row[column] += source
    return row


@jit
def _mask_forward_blocks(
    first, last, stop, scratch, ptr, order, after_ptr, after, after_entry, node_ptr,
    node, writer, reader, bandwidth, weight, source, mark, query, key, value, out,
    share,
):  # fmt: skip
    """Uses the transposed sweep: y^T = V^T (G * Q K^T)^T needs no transposed copy."""
    heads, channels, num_keys = value.shape[1], value.shape[2], query.shape[2]
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, head = task // tasks, (task % tasks) * share
        g = head * query.shape[1] // heads
        nodes = node[node_ptr[block] : node_ptr[block + 1]]
        n, ring = nodes.shape[0], bandwidth[block] + 1
        width = _width(n)
        m = (n + LANES - 1) // LANES * LANES
        at = n * num_keys
        k = scratch[:at].reshape(n, num_keys)
        vt = scratch[at : at + m * channels].reshape(channels, m)
        at += m * channels
        qt = scratch[at : at + num_keys * width].reshape(num_keys, width)
        at += num_keys * width
        yt = scratch[at : at + width * channels].reshape(channels, width)
        at += width * channels
        tall = scratch[at : at + 2 * n * width].reshape(2, n, width)
        G, scores = tall[0], tall[1]
        at += 2 * n * width
        states = pointer(scratch) + at
        take(k, key, nodes, g)
        for c0 in range(0, n, width):
            count = min(width, n - c0)
            take_columns(qt, query, nodes, g, c0, count)
            matmul(scores, k, qt)
            for h in range(head, head + share):
                G[:] = 0
                clear(states + ring * width, width)
                slot = ring
                for i in range(ptr[block + 1] - 1, ptr[block] - 1, -1):
                    slot = _slot(slot, -1, ring)
                    row = _feed(
                        states, ring, width, slot, i, c0, after_ptr, after, after_entry,
                        weight, h, reader, mark[order[i], h],
                    )  # fmt: skip
                    S = splat(source[order[i], h])
                    _accumulate(pointer(G) + writer[i] * width, S, row, width)
                multiply(G, G, scores)
                take_transposed(vt, value, nodes, h)
                matmul(yt, vt, G)
                for i in range(count):
                    for c in range(channels):
                        out[nodes[c0 + i], h, c] = yt[c, i]


@jit
def _mask_gradients(d_scores, G, dG, scores, size):
    """Given the gradient dG of G * scores, adds to that of the scores; in place, dG
    becomes the gradient of G, and G becomes G * scores.
    """
    for at in range(0, size, lanes(G)):
        g, d, score = load(G + at), load(dG + at), load(scores + at)
        store(d_scores + at, fma(d, g, load(d_scores + at)))
        store(dG + at, d * score)
        store(G + at, g * score)


@jit
def _mask_backward_blocks(
    first, last, stop, scratch, ptr, order, before_ptr, before, node_ptr, node, writer,
    reader, bandwidth, weight, source, mark, query, key, value, after_ptr, after,
    after_entry, grad, grad_query, grad_key, grad_value, grad_source, grad_mark,
    grad_weight, share,
):  # fmt: skip
    heads, channels, num_keys = value.shape[1], value.shape[2], query.shape[2]
    entries = np.arange(before.shape[0])
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, part = task // tasks, task % tasks
        g = part * share * query.shape[1] // heads
        s, num_states = ptr[block], ptr[block + 1] - ptr[block]
        nodes = node[node_ptr[block] : node_ptr[block + 1]]
        n, ring = nodes.shape[0], bandwidth[block] + 1
        width = _width(n)
        m = (n + LANES - 1) // LANES * LANES
        at = n * num_keys
        q = scratch[:at].reshape(n, num_keys)
        dqt = scratch[at : at + m * num_keys].reshape(num_keys, m)
        at += m * num_keys
        dy = scratch[at : at + n * channels].reshape(n, channels)
        at += n * channels
        narrow = scratch[at : at + 2 * num_keys * width].reshape(2, num_keys, width)
        kt, dkt = narrow[0], narrow[1]
        at += 2 * num_keys * width
        slim = scratch[at : at + 2 * channels * width].reshape(2, channels, width)
        vt, dvt = slim[0], slim[1]
        at += 2 * channels * width
        turned = scratch[at : at + m * width].reshape(width, m)
        at += m * width
        tall = scratch[at : at + 3 * n * width].reshape(3, n, width)
        G, scores, dG = tall[0], tall[1], tall[2]
        at += 3 * n * width
        d_scores = scratch[at : at + m * width].reshape(m, width)
        at += m * width
        states = pointer(scratch) + at
        adjoints = states + (num_states + 1) * width
        take(q, query, nodes, g)
        for c0 in range(0, n, width):
            count = min(width, n - c0)
            take_columns(kt, key, nodes, g, c0, count)
            matmul(scores, q, kt)
            d_scores[:] = 0
            for h in range(part * share, part * share + share):
                G[:] = 0
                clear(states + num_states * width, width)
                for i in range(s, s + num_states):
                    row = _feed(
                        states, num_states, width, i - s, i, c0, before_ptr, before,
                        entries, weight, h, writer, source[order[i], h],
                    )  # fmt: skip
                    M = splat(mark[order[i], h])
                    _accumulate(pointer(G) + reader[i] * width, M, row, width)
                take(dy, grad, nodes, h)
                take_columns(vt, value, nodes, h, c0, count)
                matmul(dG, dy, vt)  # so far the gradient of G * scores
                _mask_gradients(
                    pointer(d_scores), pointer(G), pointer(dG), pointer(scores),
                    n * width,
                )  # fmt: skip
                matmul(dvt, dy.T, G)
                for i in range(count):
                    for c in range(channels):
                        grad_value[nodes[c0 + i], h, c] = dvt[c, i]

                clear(adjoints + ring * width, width)
                slot = ring
                for i in range(s + num_states - 1, s - 1, -1):
                    slot = _slot(slot, -1, ring)
                    state, row = order[i], adjoints + slot * width
                    s0, w0, s1, w1 = _before(
                        adjoints, ring, width, slot, i, after_ptr[i], after_ptr[i + 1],
                        after, after_entry, weight, h,
                    )  # fmt: skip
                    _combine(
                        row, splat(w0), adjoints + s0 * width, splat(w1),
                        adjoints + s1 * width, width,
                    )  # fmt: skip
                    read = pointer(dG) + reader[i] * width
                    _accumulate(row, splat(mark[state, h]), read, width)
                    own = states + (i - s) * width
                    grad_mark[state, h] += inner_product(read, own, width)
                    column = writer[i] - c0
                    if column >= 0 and column < width:
                        grad_source[state, h] += row[column]
                    for x in range(before_ptr[i], before_ptr[i + 1]):
                        own = states + (before[x] - s) * width
                        grad_weight[h, x] += inner_product(row, own, width)
            matmul(dkt, q.T, d_scores[:n])
            transpose(pointer(turned), m, pointer(d_scores), width, n, width)
            matmul(dqt, kt, turned)
            for i in range(n):
                for c in range(num_keys):
                    grad_query[nodes[i], part, c] += dqt[c, i]
            for i in range(count):
                for c in range(num_keys):
                    grad_key[nodes[c0 + i], part, c] = dkt[c, i]
