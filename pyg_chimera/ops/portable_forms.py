"""The operators in plain tensor operations, which exporters can translate.

A batch is one dense matrix: a graph's nodes have no edges to others. What depends on
sizes or contents runs in loops that are part of the exported program.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.portability import has_form, no_form
from pyg_chimera.ops.common.torch_private import while_loop
from pyg_chimera.ops.structure.grid import parents_at

# ------------------------------------------------------------------------------- loops


def _loop(cond: Callable, body: Callable, carried: tuple, *others: Tensor) -> Any:
    """What a loop carries, at its end.

    What it begins with must be no input of the program. And it gets gradients of the
    others only if it needs them from the start.
    """
    given = [y for y in (*carried, *others) if y.dim() > 0 and y.is_floating_point()]
    nothing = sum(y[:0].sum() for y in given)
    carried = tuple(
        (y + nothing if y.is_floating_point() else y).clone(
            memory_format=torch.contiguous_format
        )
        for y in carried
    )
    return while_loop(cond, body, carried, others)


def _walks(A: Tensor) -> Tensor:
    """A + A^2 + A^3 + ..., [heads, n, n], in float64: one node after the other may be
    on the way. Pivots are as for elimination without pivoting.
    """

    def body(k: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
        column, row = X.index_select(2, k.view(1)), X.index_select(1, k.view(1))
        return k + 1, X + column * (row / (1 - row.index_select(2, k.view(1))))

    first = torch.zeros((), dtype=torch.long, device=A.device)
    return _loop(lambda k, X: k < X.size(1), body, (first, A.double()))[1]


def _by_levels(step: Callable, state: Tensor, edges: Tensor, *others: Tensor) -> Tensor:
    """Applies `step`, which computes all nodes from their parents, once for each level
    of a DAG. Self-loops stand for edges that do not exist. With cycles, which programs
    cannot refuse, numbers are NaN.
    """

    def cond(rest: Tensor, left: Tensor, *_: Tensor) -> Tensor:
        return rest.any() & (left > 0)

    def body(
        rest: Tensor, left: Tensor, state: Tensor, edges: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (source, target), size = edges, state.size(0)
        moved = (rest[source] & (source != target)).float()
        rest = _sum(moved, target, size) > 0  # nodes at the end of longer paths
        return rest, left - 1, step(state, edges, *others)

    rest = state.new_ones(state.size(0), dtype=torch.bool)
    left = torch.full((), state.size(0), dtype=torch.long, device=state.device)
    rest, _, state = _loop(cond, body, (rest, left, state), edges, *others)
    return (
        torch.where(rest.any(), torch.nan, state)
        if state.is_floating_point()
        else state
    )


def _without_loops(edges: Tensor, out: Tensor) -> Tensor:
    """The output, or NaN if there are self-loops that are edges."""
    return torch.where((edges[0] == edges[1]).any(), torch.nan, out)


def _sum(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, *x.shape[1:]).index_put((index,), x, accumulate=True)


def _passed(h: Tensor, edges: Tensor, weight: Tensor, written: Tensor) -> Tensor:
    """What nodes write and what their parents pass on: a step for `_by_levels`."""
    return written + _sum(weight * h[edges[0]], edges[1], h.size(0))


def _dense(edges: Tensor, weight: Tensor, size: int) -> Tensor:
    """The matrices A, [heads, V, V], from weights [E, heads]."""
    A = weight.new_zeros(size, size, weight.size(1))
    return A.index_put((edges[1], edges[0]), weight, accumulate=True).permute(2, 0, 1)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[V, groups, C] to [heads, V, C]."""
    return x.repeat_interleave(heads // x.size(1), 1).transpose(0, 1)


def _mixed(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(L * Q K^T) V, with L [heads, V, V]."""
    q, k, v = (_grouped(x, value.size(1)) for x in (query, key, value))
    return ((mask.to(value.dtype) * (q @ k.transpose(1, 2))) @ v).transpose(0, 1)


def _eye(A: Tensor) -> Tensor:
    return torch.eye(A.size(-1), dtype=A.dtype, device=A.device)


# --------------------------------------------------------------------------- operators


@has_form
def _resolvent_mix(x: Any) -> Tensor:
    A = _dense(x.edge_index, x.edge_weight, x.value.size(0))
    if x.num_terms is None:
        return _mixed(_walks(A) + _eye(A), x.query, x.key, x.value)
    L = _eye(A).expand_as(A)
    for _ in range(x.num_terms):
        L = _eye(A) + A @ L
    return _mixed(L, x.query, x.key, x.value)


def _scan(
    x: Any,
    edges: Tensor,
    writer: Tensor,
    reader: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor | None = None,
) -> Tensor:
    """A recurrence on a DAG of states, with gates [states or edges, heads]."""
    V = x.value.size(0)
    onehot = writer.unsqueeze(1) == torch.arange(V, device=writer.device)
    written = source.unsqueeze(2) * onehot.unsqueeze(1)
    L = _by_levels(_passed, written, edges, transition.unsqueeze(2), written)
    L = L if mark is None else L * mark.unsqueeze(2)
    L = _sum(L, reader, V).transpose(0, 1)
    if x.direct is not None:
        L = L + torch.diag_embed(x.direct.t())
    return _mixed(L, x.query, x.key, x.value)


@has_form
def _dag_scan(x: Any) -> Tensor:
    node = torch.arange(x.value.size(0), device=x.value.device)
    ones = x.value.new_ones(x.value.shape[:2])
    out = _scan(x, x.edge_index, node, node, ones, x.transition)
    return _without_loops(x.edge_index, out)


@has_form
def _stm_scan(x: Any) -> Tensor:
    J = x.num_components
    writer, reader = x.edge_index.repeat_interleave(J, 1)
    component = torch.arange(J, device=writer.device)
    tail, head = J * x.line_edge_index.view(2, -1, 1, 1)
    ends = tail + component, head + component.unsqueeze(1)
    lines = torch.stack(torch.broadcast_tensors(*ends)).flatten(1)
    out = _scan(x, lines, writer, reader, x.source, x.transition, x.mark)
    return _without_loops(x.line_edge_index, out)


@has_form
def _delta_scan(x: Any) -> Tensor:
    V, heads = x.value.shape[:2]
    q, k, v = (_grouped(y, heads) for y in (x.query, x.key, x.value))
    passed = _walks(_dense(x.edge_index, x.edge_weight, V))
    beta = x.beta.t().unsqueeze(2)
    erased = _walks(-beta * passed * (k @ k.transpose(1, 2)))
    u = (erased + _eye(erased)) @ (beta * v).double()
    read = (passed + _eye(passed)) * (q @ k.transpose(1, 2))
    out = (read @ u).transpose(0, 1).to(v.dtype)
    if not x.acyclic:
        return out
    zero = out[:, 0, :1] * 0  # or NaN, with cycles
    zero = _by_levels(_passed, zero, x.edge_index, x.edge_weight[:, :1] * 0, zero)
    return _without_loops(x.edge_index, out + zero.unsqueeze(2))


@has_form
def _channel_scan(x: Any) -> Tensor:
    (source, target), weight = x.edge_index, x.edge_weight
    if weight is None:
        weight = x.value.new_ones(source.size(0), x.value.size(1))
    if x.decay is not None:
        weight = weight * x.decay[target]
    h = _by_levels(_passed, x.value, x.edge_index, weight, x.value)
    return _without_loops(x.edge_index, h)


@has_form
def _selective_scan(x: Any) -> Tensor:
    def cond(step: Tensor, decay: Tensor, h: Tensor, place: Tensor) -> Tensor:
        return (place >= step).any()

    def body(
        step: Tensor, decay: Tensor, h: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(h.size(0), device=h.device)
        before, inside = (rows - step).clamp(min=0), (place >= step)[:, None, None]
        longer = h + decay * h[before]
        decay = torch.where(inside, decay * decay[before], decay)
        return 2 * step, decay, torch.where(inside, longer, h)

    decay = torch.exp(x.delta.unsqueeze(2) * x.A)
    h = (x.delta * x.u).unsqueeze(2) * x.B.unsqueeze(1)
    first = torch.ones((), dtype=torch.long, device=h.device)
    h = _loop(cond, body, (first, decay, h), _place(x.ptr, x.u.size(0)))[-1]
    return (h @ x.C.unsqueeze(2)).squeeze(2) + x.u * x.D


@has_form
def _causal_conv1d(x: Any) -> Tensor:
    back = torch.arange(x.weight.size(1) - 1, -1, -1, device=x.x.device)
    rows = torch.arange(x.x.size(0), device=x.x.device).unsqueeze(1)
    inside = _place(x.ptr, x.x.size(0)).unsqueeze(1) >= back
    out = _filtered(x, torch.where(inside, rows - back, rows), inside)
    return out if x.bias is None else out + x.bias


def _filtered(x: Any, index: Tensor, inside: Tensor) -> Tensor:
    """The sum over taps, [V, taps], of those that are inside."""
    seen = torch.where(inside.unsqueeze(2), x.x[index], 0)
    return (seen * x.weight.flatten(1).t()).sum(1)


@has_form
def _neighborhood_attention(x: Any) -> Tensor:
    (source, target), (V, heads) = x.edge_index, x.query.shape[:2]
    key = _grouped(x.key, heads).transpose(0, 1)
    logits = (x.query[target] * key[source]).sum(2) * x.scale
    logits = logits if x.edge_bias is None else logits + x.edge_bias
    index = target.unsqueeze(1).expand_as(logits)
    top = logits.new_full((V, heads), -torch.inf)
    top = top.scatter_reduce(0, index, logits, "amax")
    weight = torch.exp(logits - torch.where(top == -torch.inf, 0, top)[target])
    weight = weight / _sum(weight, target, V).clamp(min=1)[target]
    value = _grouped(x.value, heads).transpose(0, 1)
    return _sum(weight.unsqueeze(2) * value[source], target, V)


# --------------------------------------------------------------- sequences and grids


def _place(ptr: Tensor, num_rows: int) -> Tensor:
    """How many rows of its sequence precede each row."""
    rows = torch.arange(num_rows, device=ptr.device)
    return rows - ptr[(ptr <= rows.unsqueeze(1)).sum(1) - 1]


@has_form
def _grid_parents(
    height: Tensor, width: Tensor, num_dags: int, num_nodes: int
) -> Tensor:
    return parents_at(num_dags, *_lattice(torch.stack([height, width], 1), num_nodes))


def _lattice(sizes: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """The nodes, their column and row, and width and height of their grid, [V]."""
    (height, width), end = sizes.unbind(1), sizes.prod(1).cumsum(0)
    node = torch.arange(num_nodes, device=sizes.device)
    grid = (end <= node.unsqueeze(1)).sum(1)
    local, width = node - (end - sizes.prod(1))[grid], width[grid]
    return node, local % width, local // width, width, height[grid]


@has_form
def _grid_scale(height: Tensor, width: Tensor, num_dags: int, num_nodes: int) -> Tensor:
    parent = _grid_parents(height, width, num_dags, num_nodes)
    size = num_nodes * num_dags
    place = torch.arange(size, device=parent.device)
    edges = torch.stack([parent.flatten(), place.repeat_interleave(2)])
    return _parent_scale(edges, size, 56).view(-1, num_dags)


@has_form
def _grid_conv(x: Any) -> Tensor:
    lattice = _lattice(x.sizes.to(x.x.device), x.x.size(0))
    node, column, row, width, height = (y.unsqueeze(1) for y in lattice)
    rows, columns = x.weight.shape[1:]
    tap = torch.arange(rows * columns, device=x.x.device)
    there = row + tap // columns - (rows - 1 if x.causal else rows // 2)
    beside = column + tap % columns - (columns - 1 if x.causal else columns // 2)
    inside = (there >= 0) & (there < height) & (beside >= 0) & (beside < width)
    index = node + (there - row) * width + beside - column
    return _filtered(x, torch.where(inside, index, node), inside)


def _places(x: Any) -> tuple[Tensor, Tensor]:
    """Each node in each orientation, [V O], and those before them, [V O, 2]."""
    V, orientations = x.value.size(0), x.orientations
    before = _grid_parents(*x.sizes.unbind(1), 4, V)[:, orientations] // 4
    number = torch.arange(len(orientations)).view(-1, 1)
    before = (before * len(orientations) + number).flatten(0, 1)
    return torch.arange(before.size(0)).to(x.value.device), before.to(x.value.device)


@has_form
def _grid_dag_scan(x: Any) -> Tensor:
    place, before = _places(x)
    edges = torch.stack([before.flatten(), place.repeat_interleave(2)])
    transition = torch.where((edges[0] != edges[1]).unsqueeze(1), x.transition, 0)
    node = place // len(x.orientations)
    return _scan(x, edges, node, node, x.source, transition)


@has_form
def _grid_scan(x: Any) -> Tensor:
    """A state for each place and direction, of the edge that leads there."""
    (place, before), both = _places(x), torch.arange(2, device=x.value.device)
    exists = (before != place.unsqueeze(1)).flatten()
    state, before = torch.arange(exists.size(0), device=both.device), before.flatten()
    source = torch.where(exists.unsqueeze(1), x.source[2 * before + state % 2], 0)
    gate = (4 * before + 2 * (state % 2)).unsqueeze(1) + both
    tail = torch.where(
        exists.unsqueeze(1), 2 * before.unsqueeze(1) + both, state[:, None]
    )
    transition = x.transition[gate.flatten()]
    transition = torch.where(exists.repeat_interleave(2)[:, None], transition, 0)
    edges = torch.stack([tail.flatten(), state.repeat_interleave(2)])
    writer, reader = before // len(x.orientations), state // 2 // len(x.orientations)
    return _scan(x, edges, writer, reader, source, transition, x.mark)


# --------------------------------------------------------------------- structure


@has_form
def _topological_rank(edge_index: Tensor, num_nodes: int) -> Tensor:
    def step(rank: Tensor, edges: Tensor) -> Tensor:
        longer = rank[edges[0]] + 1
        index = edges[1].unsqueeze(1)
        return torch.zeros_like(rank).scatter_reduce(0, index, longer, "amax")

    rank = edge_index.new_zeros(num_nodes, 1)
    return _by_levels(step, rank, edge_index).view(-1)


@has_form
def _parent_scale(edge_index: Tensor, num_nodes: int, log_growth: int) -> Tensor:
    """Self-loops, which stand for edges that do not exist, do not count."""
    (source, target), most = edge_index, 2.0**log_growth
    exists = (source != target).double().unsqueeze(1)
    count = _sum(exists, target, num_nodes)

    def scaled(growth: Tensor, edges: Tensor, exists: Tensor, count: Tensor) -> Any:
        total = _sum(exists * growth[edges[0]], edges[1], growth.size(0))
        least = torch.minimum(count.clamp(min=1).rsqrt(), most / total.clamp(min=1))
        return torch.where(count > 0, least, 0), total

    def step(growth: Tensor, *others: Tensor) -> Tensor:
        scale, total = scaled(growth, *others)
        return (1 + scale * total).clamp(max=most)

    others = edge_index, exists, count
    growth = _by_levels(step, torch.ones_like(count), *others)
    return scaled(growth, *others)[0].view(-1)


def _adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Whether there is an edge from one node to another, [V, V]."""
    (source, target), ones = edge_index, torch.ones_like(edge_index[0])
    count = _sum(ones, source * num_nodes + target, num_nodes**2)
    return count.view(num_nodes, num_nodes) > 0


@has_form
def _k_hop_index(edge_index: Tensor, num_nodes: int, k: int) -> tuple[Tensor, Tensor]:
    edge = _adjacency(edge_index, num_nodes).float()
    reached = torch.eye(num_nodes, device=edge.device)
    distance = torch.where(reached > 0, 0, -1)
    for steps in range(1, k + 1):
        reached = reached @ edge
        reached = (reached > 0).float()
        distance = torch.where((distance < 0) & (reached > 0), steps, distance)
    target, source = (distance.t() >= 0).nonzero().unbind(1)
    return torch.stack([source, target]), distance[source, target]


@has_form
def _pairs_of_edges(edge_index: Tensor, pairs: Tensor, num_nodes: int) -> Tensor:
    place = pairs.new_zeros(num_nodes, num_nodes)
    number = torch.arange(pairs.size(1), device=pairs.device)
    place = place.index_put((pairs[0], pairs[1]), number)
    return place[edge_index[0], edge_index[1]]


@has_form
def _checked_distance(
    edge_index: Tensor, pairs: Tensor, distance: Tensor, num_nodes: int, k: int
) -> Tensor:
    return distance.clone()


@has_form
def _line_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    source, target = edge_index
    lines = (target.unsqueeze(1) == source).nonzero().t()
    return lines, target[lines[0]]


@has_form
def _ordered_dags(
    edge_index: Tensor, num_nodes: int, order: str, turns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    before, after = _node_order(edge_index, num_nodes, order)[edge_index]
    ids = (before != after).nonzero().view(-1)
    edges = (2 * edge_index + (before > after)).index_select(1, ids)
    source, target = edges[0], edges[1].unsqueeze(1)
    follows = target == source
    if turns:  # from v in the second DAG on to v in the first
        turned = (target % 2 == 1) & (target - 1 == source)
        follows = follows | (turned & (source.unsqueeze(1) - 1 != target.view(-1)))
    return edges, ids, follows.nonzero().t()


@has_form
def _multitree(line_edge_index: Tensor, num_states: int) -> Tensor:
    """Line after line, by state and by what comes before it; a matrix of what has been
    reached says whether a state would be reached twice.
    """
    source, target = line_edge_index
    place = _topological_rank(line_edge_index, num_states) * num_states
    key = (place[target] + target) * num_states + source
    order = torch.sort(key, descending=True).indices

    def body(
        left: Tensor, reached: Tensor, kept: Tensor, source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        line = (left - 1).view(1)
        theirs, own = reached[source[line]], reached[target[line]]
        apart = ((theirs * own).sum(1) == 0).to(own.dtype)
        reached = reached.index_put((target[line],), own + apart * theirs)
        return left - 1, reached, kept.index_put((line,), apart)

    reached = torch.eye(num_states, dtype=key.dtype, device=key.device)
    left = torch.full((), key.size(0), dtype=torch.long, device=key.device)
    carried = left, reached, torch.zeros_like(key)
    ends = source[order], target[order]
    kept = _loop(lambda left, *_: left > 0, body, carried, *ends)[-1]
    return torch.zeros_like(kept).scatter(0, order, kept) > 0


@has_form
def _node_order(edge_index: Tensor, num_nodes: int, order: str) -> Tensor:
    node = torch.arange(num_nodes, device=edge_index.device)
    if order == "order":
        return node
    score = _node_score(edge_index, None, num_nodes, order)
    ordered = torch.sort(score * num_nodes + node).indices
    return torch.empty_like(node).scatter(0, ordered, node)


@has_form
def _node_score(
    edge_index: Tensor, batch: Tensor | None, num_nodes: int, order: str
) -> Tensor:
    """The number of distinct neighbours, [V]."""
    if order != "degree":
        raise no_form(f"order={order!r}")
    edge = _adjacency(edge_index, num_nodes)
    node = torch.arange(num_nodes, device=edge.device)
    return ((edge | edge.t()) & (node != node.unsqueeze(1))).sum(1)


@has_form
def _path_reverse(edge_index: Tensor, num_nodes: int) -> Tensor:
    source, target = edge_index
    same = (source.unsqueeze(1) == target) & (target.unsqueeze(1) == source)
    return (same * torch.arange(source.size(0), device=source.device)).sum(1)


@has_form
def _path_scale(edge_index: Tensor, gain: Tensor, source: Tensor) -> Tensor:
    """The largest sum of a source and the gains over edges from it, for each node."""

    def body(
        grows: Tensor, most: Tensor, edges: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor]:
        arrived = most[edges[0]] + gain
        index = edges[1].unsqueeze(1).expand_as(arrived)
        new = most.scatter_reduce(0, index, arrived, "amax")
        return (new > most).any(), new

    first = torch.ones((), dtype=torch.bool, device=gain.device)
    return _loop(lambda x, *_: x.clone(), body, (first, source), edge_index, gain)[1]
