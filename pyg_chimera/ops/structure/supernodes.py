"""Supernodes: columns of a factor that are processed together, as dense matrices."""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor


class Merging(NamedTuple):
    """How far nodes are merged into supernodes."""

    #: A subtree of up to this many nodes is one supernode, a *leaf*.
    max_leaf: int
    #: Costs of a row and of a supernode in a sweep, relative to that of a pair of rows:
    #: small supernodes are merged if that saves time.
    per_row: int
    per_supernode: int


#: As measured on a CPU.
_ON_CPU = Merging(max_leaf=16, per_row=4, per_supernode=40)


class Supernodes(NamedTuple):
    """Runs of positions whose columns of L have (nearly) the same rows.

    All arrays are int64: ``V`` positions, ``T`` blocks, ``S`` supernodes with ``R``
    rows below them in total. States of leaves are never stored; each other position
    has a *slot* in its block.
    """

    start: np.ndarray  #: [T + 1], first position of each block
    node: np.ndarray  #: [V], node at each position
    ptr: np.ndarray  #: [S + 1], first position of each supernode
    parent: np.ndarray  #: [S], the parent of each in the tree, or -1
    row_ptr: np.ndarray  #: [S + 1], first of the rows below each supernode ...
    row: np.ndarray  #: [R], ... their positions, ascending ...
    row_slot: np.ndarray  #: [R], ... and their slots
    subtree: np.ndarray  #: [S], size of the subtree of each, including itself
    leaf: np.ndarray  #: [S], whether it has no children in the tree, 0 or 1
    slot: np.ndarray  #: [V], or -1
    panel_ptr: np.ndarray  #: [S + 1], first number of its three dense matrices
    block_ptr: np.ndarray  #: [T + 1], first supernode of each block
    slots: np.ndarray  #: [T], number of slots of each block
    edge_ptr: np.ndarray  #: [S + 1], first of the edges ...
    edge: np.ndarray  #: [E], ... whose earlier end is in each supernode
    edge_row: np.ndarray  #: [E], position of the target of ``edge[x]``
    edge_col: np.ndarray  #: [E], position of the source of ``edge[x]``
    stack: np.ndarray  #: [1], most numbers of updates that are pending at any time
    identity: np.ndarray  #: 0, 1, 2 ..., as many as a supernode has positions or rows

    @property
    def widths(self) -> np.ndarray:
        """[S], the number of positions of each supernode."""
        return np.diff(self.ptr)

    @property
    def heights(self) -> np.ndarray:
        """[S], the number of rows below each supernode."""
        return np.diff(self.row_ptr)

    @property
    def sides(self) -> np.ndarray:
        """[S], the sum of both."""
        return self.widths + self.heights

    def by_block(self, x: np.ndarray) -> np.ndarray:
        """[T], the sums over the supernodes of each block."""
        return np.diff(np.append(0.0, np.cumsum(x))[self.block_ptr])


def supernodes(symbolic: SymbolicFactor, merging: Merging = _ON_CPU) -> Supernodes:
    """Finds the supernodes of a symbolic factor; cached in its tables.

    Positions must be in postorder, so that subtrees of the elimination tree are
    contiguous; those of `symbolic_factor` are.
    """
    found = symbolic.tables.get(merging)
    if found is None:
        found = symbolic.tables[merging] = _supernodes(symbolic, merging)
    return found


def _supernodes(symbolic: SymbolicFactor, merging: Merging) -> Supernodes:
    ptr, row_ptr, row = _amalgamate(symbolic.upper_ptr, symbolic.upper_row, *merging)
    widths, heights = np.diff(ptr), np.diff(row_ptr)
    number = np.repeat(np.arange(len(widths)), widths)
    parent = np.full(len(widths), -1)
    below = heights > 0
    parent[below] = number[row[row_ptr[:-1][below]]]
    subtree, stack = _subtrees(parent, heights)
    leaf = (subtree == 1).astype(np.int64)

    kept = np.repeat(leaf == 0, widths)
    count = np.append(0, np.cumsum(kept))
    first = np.repeat(count[symbolic.ptr[:-1]], symbolic.sizes)
    slot = np.where(kept, count[:-1] - first, -1)

    earlier = number[np.minimum(symbolic.edge_row, symbolic.edge_col)]
    edge = np.argsort(earlier, kind="stable")
    return Supernodes(
        start=symbolic.ptr,
        node=symbolic.node,
        ptr=ptr,
        parent=parent,
        row_ptr=row_ptr,
        row=row,
        row_slot=slot[row],
        subtree=subtree,
        leaf=leaf,
        slot=slot,
        panel_ptr=np.append(0, np.cumsum(widths * (widths + 2 * heights))),
        block_ptr=np.searchsorted(ptr, symbolic.ptr),
        slots=np.diff(count[symbolic.ptr]),
        edge_ptr=np.searchsorted(earlier[edge], np.arange(len(widths) + 1)),
        edge=symbolic.edge[edge],
        edge_row=symbolic.edge_row[edge],
        edge_col=symbolic.edge_col[edge],
        stack=stack,
        identity=np.arange(np.concatenate([widths, heights]).max(initial=0)),
    )


@compiled()
def _subtrees(parent, heights):
    """The sizes of subtrees, and of the update stack of a postorder traversal."""
    subtree = np.ones(len(parent), np.int64)
    waiting = np.zeros(len(parent), np.int64)  # numbers of the children's updates
    stack, held = np.zeros(1, np.int64), 0
    for x in range(len(parent)):
        held += heights[x] ** 2 - waiting[x]
        stack[0] = max(stack[0], held)
        if parent[x] >= 0:
            subtree[parent[x]] += subtree[x]
            waiting[parent[x]] += heights[x] ** 2
    return subtree, stack


@compiled()
def _cost(width, height, per_row, per_supernode):
    """The cost of a supernode in a sweep."""
    pairs = width * width + 2 * width * height
    return pairs + per_row * (width + height) + per_supernode


@compiled()
def _amalgamate(upper_ptr, upper_row, max_leaf, per_row, per_supernode):
    """The first positions of relaxed supernodes, and the rows below them.

    These are small subtrees and, elsewhere, fundamental supernodes (chains in which
    each column has the next one's rows, and the next one itself), then merged with the
    supernodes right before them as long as that saves time.
    """
    n = upper_ptr.shape[0] - 1
    count = upper_ptr[1:] - upper_ptr[:-1]
    size = np.ones(n, np.int64)  # of subtrees
    for i in range(n):
        if count[i] > 0:
            size[upper_row[upper_ptr[i]]] += size[i]
    subtree = np.full(n, -1, np.int64)  # the root of each position's small subtree
    for i in range(n - 1, -1, -1):
        if count[i] > 0 and subtree[upper_row[upper_ptr[i]]] >= 0:
            subtree[i] = subtree[upper_row[upper_ptr[i]]]
        elif size[i] <= max_leaf:
            subtree[i] = i

    # A stack of supernodes: later ones may still absorb those on its top.
    start, last = np.empty(n, np.int64), np.empty(n, np.int64)
    top, i = 0, 0
    while i < n:
        start[top], end = i, i + 1
        while end < n and subtree[end] == subtree[i]:
            reached = upper_row[upper_ptr[end - 1]] if count[end - 1] > 0 else n
            if subtree[i] < 0 and (reached > end or count[end] != count[end - 1] - 1):
                break
            end += 1
        last[top] = i = end - 1
        i += 1
        top += 1
        while top > 1:
            below, above = last[top - 2], last[top - 1]
            if count[below] == 0 or upper_row[upper_ptr[below]] > above:
                break  # not its child
            w0, w1 = below - start[top - 2] + 1, above - start[top - 1] + 1
            apart = _cost(w0, count[below], per_row, per_supernode)
            apart += _cost(w1, count[above], per_row, per_supernode)
            if _cost(w0 + w1, count[above], per_row, per_supernode) > apart:
                break
            last[top - 2] = above
            top -= 1

    ptr, row_ptr = np.empty(top + 1, np.int64), np.zeros(top + 1, np.int64)
    for x in range(top):
        ptr[x] = start[x]
        row_ptr[x + 1] = row_ptr[x] + count[last[x]]
    ptr[top] = n
    row = np.empty(row_ptr[top], np.int64)
    for x in range(top):
        end = last[x]
        row[row_ptr[x] : row_ptr[x + 1]] = upper_row[
            upper_ptr[end] : upper_ptr[end + 1]
        ]
    return ptr, row_ptr, row
