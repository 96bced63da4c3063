from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from asserts import GRAPHS, make_inputs
from hypothesis import given, settings
from strategies import Batch, Graph, batches, dags, graphs

from pyg_chimera.ops.structure import CycleError, system
from pyg_chimera.ops.structure.system import System, build_system


def check(made: System, edge_index, num_nodes: int, batch) -> None:
    """Everything a system promises, from the definitions."""
    V, E, F = num_nodes, edge_index.size(1), made.num_entries
    assert made.num_nodes == V
    for name in made._fields[1:]:
        assert getattr(made, name).dtype == np.int64, name

    # Blocks: positions in a row, nodes of a graph together, no edge between two.
    assert made.ptr[0] == 0
    assert made.ptr[-1] == V
    assert (made.sizes > 0).all()
    assert sorted(made.node) == sorted(made.order) == list(range(V))
    position = np.empty(V, np.int64)
    position[made.node] = np.arange(V)
    block = np.searchsorted(made.ptr, position, side="right") - 1
    source, target = edge_index.numpy()
    assert (block[source] == block[target]).all()
    if batch is not None:
        labels = {(int(g), int(b)) for g, b in zip(batch, block, strict=True)}
        assert len(labels) == len({g for g, _ in labels})
    for t in range(len(made.sizes)):
        inside = slice(made.ptr[t], made.ptr[t + 1])
        assert list(made.order[inside]) == sorted(made.node[inside])
        assert (made.order[inside][made.local[inside]] == made.node[inside]).all()

    # The pattern of L by rows and by columns.
    rows = np.repeat(np.arange(V), np.diff(made.lower_ptr))
    assert (made.lower_col < rows).all()
    lower = list(zip(rows, made.lower_col, strict=True))
    assert lower == sorted(lower)
    columns = np.repeat(np.arange(V), np.diff(made.upper_ptr))
    upper = list(zip(columns, made.upper_row, strict=True))
    assert upper == sorted(upper)
    for (j, i), x in zip(upper, made.upper_entry, strict=True):
        assert lower[x] == (i, j)
    assert len(made.upper_entry) == F

    # Edges, and where each stands in I - A.
    assert sorted(made.edge) == list(range(E))
    assert (made.edge_row == position[target[made.edge]]).all()
    assert (made.edge_col == position[source[made.edge]]).all()
    for t in range(len(made.sizes)):
        edges = made.edge[made.edge_ptr[t] : made.edge_ptr[t + 1]]
        assert (block[source[edges]] == t).all()
    assert made.edge_ptr[-1] == E
    for e in range(E):
        i, j, slot = position[target[e]], position[source[e]], made.slot[e]
        if slot < V:
            assert i == j == slot
        elif slot < V + F:
            assert lower[slot - V] == (i, j)
        else:
            assert lower[slot - V - F] == (j, i)
    if made.triangular:
        assert len(set(made.slot)) == E == F
    elif F:
        # No more entries than the filled graph has: elimination in order of position.
        assert len(set(lower)) == F
        neighbours = {i: set() for i in range(V)}
        for j, i in zip(position[source], position[target], strict=True):
            if i != j:
                neighbours[min(i, j)].add(max(i, j))
        for k in range(V):
            for i in neighbours[k]:
                neighbours[i] |= {x for x in neighbours[k] if x > i}
        assert set(lower) == {(i, k) for k in range(V) for i in neighbours[k]}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=8)))
def test_general_system(batch: Batch):
    args = batch.edge_index, batch.num_nodes
    check(build_system(*args, batch.batch), *args, batch.batch)
    check(build_system(*args), *args, None)
    rank = torch.randint(5, (batch.num_nodes,))
    made = build_system(*args, batch.batch, rank)
    check(made, *args, batch.batch)
    for t in range(len(made.sizes)):
        ranks = rank[torch.from_numpy(made.node[made.ptr[t] : made.ptr[t + 1]])]
        assert ranks.equal(ranks.sort().values)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(dags(max_nodes=8)))
def test_triangular_system(batch: Batch):
    args = batch.edge_index, batch.num_nodes
    for b in (batch.batch, None):
        made = build_system(*args, b, triangular=True)
        assert made.triangular
        check(made, *args, b)


@pytest.mark.parametrize("graph", GRAPHS)
def test_literal_graphs(graph):
    inputs = make_inputs(*GRAPHS[graph])
    args = inputs.edge_index, inputs.value.size(0)
    for batch in (inputs.batch, None):
        made = build_system(*args, batch)
        check(made, *args, batch)
        assert made.num_entries <= 2 * inputs.edge_index.size(1)


def test_small_graphs_share_blocks_and_large_ones_do_not():
    edges = torch.empty(2, 0, dtype=torch.long)
    batch = torch.arange(10).repeat_interleave(8)
    assert build_system(edges, 80, batch).sizes.tolist() == [32, 32, 16]
    batch = torch.tensor([0] * 100 + [1] * 200 + [2] * 3)
    assert build_system(edges, 303, batch).sizes.tolist() == [100, 200, 3]
    assert len(build_system(edges, 10_000).sizes) == 313


@settings(max_examples=40, derandomize=True, deadline=None)
@given(graph=graphs(max_nodes=6))
def test_cycles_are_found(graph: Graph):
    try:
        made = build_system(*graph, triangular=True)
    except CycleError as error:
        ends = [*error.cycle, error.cycle[0]]
        edges = set(map(tuple, graph.edge_index.t().tolist()))
        assert set(pairwise(ends)) <= edges
    else:
        check(made, *graph, None)


# ------------------------------------------------------------------------------ cache


@pytest.fixture(autouse=True)
def _empty_cache():
    system._CACHE.values.clear()


EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
BATCH = torch.tensor([0, 0, 0, 0])


def test_equal_graphs_share_a_system():
    first = build_system(EDGES, 4, BATCH)
    assert build_system(EDGES.clone(), 4, BATCH.clone()) is first
    assert build_system(EDGES.int(), 4, BATCH) is not None
    strided = EDGES.t().contiguous().t()
    assert build_system(strided, 4, BATCH) is first


def test_different_graphs_do_not():
    rank = torch.arange(4)
    variants = [
        build_system(EDGES, 4),
        build_system(EDGES, 4, BATCH),
        build_system(EDGES, 4, None, BATCH),
        build_system(EDGES, 4, BATCH, rank),
        build_system(EDGES, 4, BATCH, triangular=True),
        build_system(EDGES, 4, rank=rank, triangular=True),
        build_system(EDGES, 5),
        build_system(EDGES.flip(0), 4),
    ]
    assert len({id(x) for x in variants}) == len(variants)


def test_changed_in_place():
    edges = EDGES.clone()
    first = build_system(edges, 4)
    edges[0, 0] = 3
    second = build_system(edges, 4)
    assert second is not first
    check(second, edges, 4, None)
    edges[0, 0] = 0
    assert build_system(edges, 4) is first


def test_cache_is_small_and_keeps_what_is_used():
    first = build_system(EDGES, 4)
    for i in range(40):
        build_system(EDGES, 5 + i)
        assert build_system(EDGES, 4) is first
    assert len(system._CACHE.values) == system._CACHE.size
    for i in range(system._CACHE.size):
        build_system(EDGES, 100 + i)
    assert build_system(EDGES, 4) is not first


def test_cache_forgets_what_is_large():
    cache = system._Cache(size=32, num_bytes=10 * 80)
    for i in range(20):
        cache.put((i,), (np.zeros(10), torch.zeros(5)))
    assert len(cache.values) == 8  # at least, however large
    assert cache.get((19,)) is not None
    assert cache.get((0,)) is None
    cache = system._Cache(size=32, num_bytes=10 * 100)
    for i in range(20):
        cache.put((i % 10,), (np.zeros(10), torch.zeros(5)))
    assert cache.held == 8 * 100 + 2 * 100
    assert len(cache.values) == 10


def test_nothing_bad_is_remembered():
    bad = torch.tensor([[0], [9]])
    for _ in range(2):
        with pytest.raises(ValueError, match="got 9"):
            build_system(bad, 4)
    build_system(EDGES, 4, BATCH)
    with pytest.raises(TypeError, match="'batch' must hold integers"):
        build_system(EDGES, 4, BATCH.float())
    with pytest.raises(TypeError, match="'batch' must hold integers"):
        build_system(EDGES, 4, BATCH.bool())
    with pytest.raises(TypeError, match="'edge_index' must hold integers"):
        build_system(EDGES.float(), 4, BATCH)


def test_many_threads():
    def build(i):
        num_nodes = 4 + i % 12
        return num_nodes, build_system(EDGES, num_nodes)

    with ThreadPoolExecutor(4) as pool:
        for num_nodes, made in pool.map(build, range(400)):
            assert made.num_nodes == num_nodes


def test_errors():
    with pytest.raises(ValueError, match=r"one entry per node, \[4\], got \[3\]"):
        build_system(EDGES, 4, rank=torch.arange(3))
    with pytest.raises(ValueError, match=r"from node 0 \(rank 5\) to node 1"):
        build_system(EDGES, 4, rank=torch.tensor([5, 1, 2, 3]), triangular=True)
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        build_system(torch.tensor([[0, 1], [1, 0]]), 2, triangular=True)
    with pytest.raises(ValueError, match="from node 2 of graph 0 to node 3"):
        build_system(EDGES, 4, torch.tensor([0, 0, 0, 1]))
