"""Edges as compressed neighbour lists (CSR), in numpy."""

from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.compilation import compiled


class Rows(NamedTuple):
    """The entries of a sparse matrix by row, then column."""

    ptr: np.ndarray  #: first entry of each row, and their number
    col: np.ndarray  #: the column of each entry
    entry: np.ndarray  #: the index of each entry before sorting

    @property
    def row(self) -> np.ndarray:
        """The row of each entry."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


def to_numpy(indices: Tensor) -> np.ndarray:
    """Integer indices as a contiguous int64 array on the CPU."""
    if isinstance(indices, EdgeIndex):  # has no memory of its own
        indices = indices.as_tensor()
    return as_array(indices.cpu().long())


def inverse(order: np.ndarray) -> np.ndarray:
    """The place of each number in an order of them."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def starts(count: np.ndarray) -> np.ndarray:
    """The first index of each of several contiguous runs of the given lengths."""
    return np.cumsum(count) - count


def runs(start: np.ndarray | int, count: np.ndarray) -> np.ndarray:
    """Runs of consecutive numbers, from the given starts, one after the other."""
    return np.arange(count.sum()) + np.repeat(start - starts(count), count)


def places(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The index of each wanted key among distinct keys, or -1."""
    order = np.append(np.argsort(keys, kind="stable"), -1)  # fast if nearly sorted
    found = order[np.searchsorted(keys, wanted, sorter=order[:-1])]
    return np.where(np.append(keys, -1)[found] == wanted, found, -1)


def grouped(label: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of each label, ascending, and the bounds of the groups [G + 1]."""
    ptr = np.zeros(num_groups + 1, np.int64)
    np.cumsum(np.bincount(label, minlength=num_groups), out=ptr[1:])
    return np.argsort(label, kind="stable"), ptr


def sorted_rows(row: np.ndarray, col: np.ndarray, num_rows: int) -> Rows:
    """Sorts coordinates by row, then column, and keeps the original indices."""
    entry = np.lexsort((col, row))
    ptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=ptr[1:])
    return Rows(ptr, col[entry], entry)


@compiled()
def compress(key, value, n):
    """The bounds of each key's values, and the values by key, in their order."""
    ptr = np.zeros(n + 1, np.int64)
    for e in range(key.shape[0]):
        ptr[key[e] + 1] += 1
    for i in range(n):
        ptr[i + 1] += ptr[i]
    grouped = np.empty(key.shape[0], np.int64)
    free = ptr[:n].copy()
    for e in range(key.shape[0]):
        grouped[free[key[e]]] = value[e]
        free[key[e]] += 1
    return ptr, grouped


@compiled()
def enlarged(numbers, used, size):
    """A longer array with the used numbers (assigning slices takes 3 s to compile)."""
    grown = np.empty(size, np.int64)
    for i in range(used):
        grown[i] = numbers[i]
    return grown


@compiled()
def simple(source, target, n):
    """Compressed, ascending out-neighbours, without self-loops and duplicates."""
    in_ptr, tail = compress(target, source, n)
    count = np.zeros(n, np.int64)
    last = np.full(n, -1, np.int64)
    for i in range(n):
        for x in range(in_ptr[i], in_ptr[i + 1]):
            j = tail[x]
            if j != i and last[j] != i:
                last[j] = i
                count[j] += 1
    ptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        ptr[i + 1] = ptr[i] + count[i]
    head = np.empty(ptr[n], np.int64)
    free = ptr[:n].copy()
    last[:] = -1
    for i in range(n):
        for x in range(in_ptr[i], in_ptr[i + 1]):
            j = tail[x]
            if j != i and last[j] != i:
                last[j] = i
                head[free[j]] = i
                free[j] += 1
    return ptr, head


@compiled()
def adjacency(row, col, n):
    """Compressed, ascending neighbours in the undirected simple graph."""
    return simple(np.concatenate((row, col)), np.concatenate((col, row)), n)
