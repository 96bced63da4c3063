"""Graphs of paths: states along them, and the scans that compute their resolvents."""

from typing import Any, NamedTuple

import numpy as np

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import adjacency, inverse, runs
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.symbolic_factor import Blocks, SymbolicFactor

#: Why backends refuse other graphs.
NOT_PATHS = "form='chunk' is for graphs whose components are paths; use form='auto'"


class PathStates(NamedTuple):
    """The states along paths, each computed from the one before.

    Positions are numbered path by path, and in order along each path. Each position but
    a path's first has one weight entry, from its predecessor, in the same order.
    """

    block: np.ndarray  #: [T + 1], first path of each block; blocks share no nodes
    ptr: np.ndarray  #: [C + 1], first position of each path
    state: np.ndarray  #: [S], state at each position
    writer: np.ndarray  #: [S], the node that writes each state
    reader: np.ndarray  #: [S], the node that reads each state


class PathScans(NamedTuple):
    """The scans along the paths of a graph, whose nodes have places path by path."""

    states: PathStates  #: the state at place i is i there, and V + i back
    entry: np.ndarray  #: [L], index of each entry's weight in [a | b]
    ptr: np.ndarray  #: [C + 1], first place of each path
    slot: np.ndarray  #: [E], index of each edge in [d | w | u]


class Pivots(NamedTuple):
    """The entries of I - A, with w and u negated, and its pivots, in float64: arrays
    [heads, V] here, tensors [V, heads] on other devices.

    All are in the order of places; w and u are zero where a path begins.
    """

    d: Any
    w: Any  #: weight from the node before
    u: Any  #: weight to the node before
    there: Any  #: p
    back: Any  #: p'


def path_scans(symbolic: Blocks) -> PathScans | None:
    """The scans of a graph; None unless all its components are paths.

    Edges may lead along a path either way or both; there may be duplicates and loops.
    """
    if PathScans not in symbolic.tables:
        symbolic.tables[PathScans] = _path_scans(symbolic)
    return symbolic.tables[PathScans]


def required_path_scans(symbolic: Blocks) -> PathScans:
    """The scans of a graph of paths."""
    scans = path_scans(symbolic)
    assert scans is not None
    return scans


def _path_scans(symbolic: Blocks) -> PathScans | None:
    num_nodes, row, col = symbolic.num_nodes, symbolic.edge_row, symbolic.edge_col
    if not isinstance(symbolic, SymbolicFactor) or symbolic.num_entries > num_nodes:
        return None  # paths are factored, and without fill-in
    beside, neighbour = adjacency(row, col, num_nodes)
    if np.diff(beside).max(initial=0) > 2:
        return None
    position, ptr = _walk(beside, neighbour)
    if ptr[-1] < num_nodes:  # the other nodes are on cycles
        return None
    place = inverse(position)
    row, col = place[row], place[col]
    slot = np.empty_like(row)
    part = np.where(row == col, 0, np.where(row > col, 1, 2))
    slot[symbolic.edge] = part * num_nodes + np.maximum(row, col)

    # Of each path, a scan of all places there, and back of all but the last.
    count = np.stack([np.diff(ptr), np.diff(ptr) - 1], 1).ravel()
    start = np.stack([ptr[:-1], num_nodes + ptr[1:] - 2], 1).ravel()
    step = np.tile([1, -1], len(ptr) - 1)
    state = np.repeat(start, count) + np.repeat(step, count) * runs(0, count)
    first = np.append(0, np.cumsum(count[count > 0]))
    node = symbolic.node[position]
    states = PathStates(
        # Paths are in the order of blocks, so these bound the places of blocks, too.
        block=np.searchsorted(state[first[:-1]] % max(num_nodes, 1), symbolic.ptr),
        ptr=first,
        state=state,
        writer=np.concatenate([node, np.roll(node, -1)]),
        reader=np.concatenate([node, node]),
    )
    return PathScans(states, np.delete(state, first[:-1]), ptr, slot)


@compiled()
def _walk(ptr, neighbour):
    """Positions path by path, from one end of each, and the bounds of the paths."""
    n = ptr.shape[0] - 1
    walk, first = np.empty(n, np.int64), np.zeros(n + 1, np.int64)
    level, seen, at, paths = np.empty(n, np.int64), np.zeros(n, np.int64), 0, 0
    for end in range(n):
        if ptr[end + 1] - ptr[end] < 2 and seen[end] == 0:
            at += search(ptr, neighbour, end, walk[at:], level, seen, 1, n)
            paths += 1
            first[paths] = at
    return walk, first[: paths + 1]
