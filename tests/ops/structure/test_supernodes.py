import numpy as np
import pytest
import torch
from hypothesis import given, settings
from operators import GRAPHS
from strategies import Batch, batches, graphs
from torch import Tensor

from pyg_chimera.ops.structure import supernodes as module
from pyg_chimera.ops.structure.supernodes import supernodes
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor


def check(symbolic: SymbolicFactor) -> None:
    """Everything that is promised, from the definitions."""
    made, V = supernodes(symbolic), symbolic.num_nodes
    assert supernodes(symbolic) is made
    assert all(x.dtype == np.int64 for x in made)
    number = np.repeat(np.arange(len(made.leaf)), made.widths)
    assert len(number) == V
    assert (made.widths > 0).all()

    # None is in two blocks.
    block = np.repeat(np.arange(len(symbolic.sizes)), symbolic.sizes)
    assert (block[made.ptr[:-1]] == block[made.ptr[1:] - 1]).all()
    assert (symbolic.ptr == np.append(made.ptr, V)[made.block_ptr]).all()

    # All entries are in a panel, and rows are those of the last column.
    rows = [made.row[a:b] for a, b in zip(made.row_ptr, made.row_ptr[1:], strict=False)]
    for x, below in enumerate(rows):
        end = made.ptr[x + 1]
        a, b = symbolic.upper_ptr[end - 1 : end + 1]
        assert below.tolist() == symbolic.upper_row[a:b].tolist()
        for j in range(made.ptr[x], end):
            reached = symbolic.upper_row[
                symbolic.upper_ptr[j] : symbolic.upper_ptr[j + 1]
            ]
            assert {i for i in reached if i >= end} <= set(below)
    size = made.widths * (made.widths + 2 * made.heights)
    assert (np.diff(made.panel_ptr) == size).all()

    # Slots are those of all that are above another one.
    above = {int(number[i]) for below in rows for i in below}
    assert [x for x in range(len(rows)) if not made.leaf[x]] == sorted(above)

    # Subtrees are contiguous, and their updates a stack.
    children = {x: [] for x in range(len(rows))}
    for x, below in enumerate(rows):
        if len(below):
            children[int(number[below[0]])].append(x)
            assert made.parent[x] == number[below[0]]
        else:
            assert made.parent[x] == -1
    waiting, most = [], 0
    for x, below in enumerate(rows):
        assert made.subtree[x] == 1 + sum(made.subtree[y] for y in children[x])
        if children[x]:
            waiting, mine = waiting[: -len(children[x])], waiting[-len(children[x]) :]
            assert [y for y, _ in mine] == children[x]
        if len(below):
            waiting.append((x, len(below) ** 2))
        most = max(most, sum(size for _, size in waiting))
    assert most == made.stack[0]
    for t in range(len(symbolic.sizes)):
        slots = made.slot[symbolic.ptr[t] : symbolic.ptr[t + 1]]
        assert slots[slots >= 0].tolist() == list(range(made.slots[t]))
    assert ((made.slot < 0) == (made.leaf[number] == 1)).all()
    assert (made.row_slot == made.slot[made.row]).all()
    assert (made.row_slot >= 0).all()

    # Each edge is with its earlier end.
    assert sorted(made.edge) == list(range(len(symbolic.edge)))
    place = np.argsort(symbolic.edge)[made.edge]
    assert (made.edge_row == symbolic.edge_row[place]).all()
    assert (made.edge_col == symbolic.edge_col[place]).all()
    owner = np.repeat(np.arange(len(rows)), np.diff(made.edge_ptr))
    assert (owner == number[np.minimum(made.edge_row, made.edge_col)]).all()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=8)))
def test_random_batches(batch: Batch):
    rank = torch.randperm(batch.num_nodes)
    for hint in (batch.batch, None):
        for order in (rank, None):
            check(symbolic_factor(batch.edge_index, hint, order, batch.num_nodes))


@pytest.mark.parametrize("graph", GRAPHS)
def test_literal_graphs(graph):
    batch, edge_index = GRAPHS[graph][:2]
    check(symbolic_factor(edge_index, batch, None, len(batch)))


def dissected(grid: Tensor) -> Tensor:
    """The nodes of a grid by nested dissection: its halves, and what joins them."""
    if grid.numel() <= 16:
        return grid.flatten()
    if grid.size(0) < grid.size(1):
        grid = grid.t()
    middle = grid.size(0) // 2
    return torch.cat(
        [dissected(grid[:middle]), dissected(grid[middle + 1 :]), grid[middle]]
    )


@pytest.mark.parametrize(("side", "leaves"), [(3, 1), (26, 20)])
def test_grids(side, leaves):
    """Small ones are a leaf, of large ones most nodes are in some."""
    node = torch.arange(side * side).view(side, side)
    pairs = torch.cat([
        torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()]),
        torch.stack([node[:-1].flatten(), node[1:].flatten()]),
    ], dim=1)  # fmt: skip
    check(symbolic_factor(pairs, None, None, side * side))
    rank = dissected(node).argsort()
    symbolic = symbolic_factor(pairs, None, rank, side * side)
    check(symbolic)
    made = supernodes(symbolic)
    assert made.leaf.sum() >= leaves
    assert made.widths[made.leaf == 1].sum() > 0.5 * side * side
    assert made.widths[made.leaf == 1].max() >= 0.5 * module._ON_CPU.max_leaf
