import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, batches, dags, graphs
from torch import Tensor
from torch_geometric.utils import to_undirected

from pyg_chimera.ops import CycleError, line_graph, multitree, node_order
from pyg_chimera.ops.structure import LineGraph, find_cycle, topological_rank
from pyg_chimera.ops.structure.line_graph import ordered_dags


def naive_lines(edge_index: Tensor) -> list[tuple[int, int]]:
    edges = edge_index.t().tolist()
    numbers = range(len(edges))
    return [(a, b) for a in numbers for b in numbers if edges[a][1] == edges[b][0]]


def num_paths(lines: Tensor, num_states: int) -> np.ndarray:
    """How many paths there are from state j (column) to state i (row)."""
    step = np.zeros((num_states, num_states))
    np.add.at(step, (lines[1].numpy(), lines[0].numpy()), 1)
    total = power = np.eye(num_states)
    while power.any():
        power = step @ power
        total = total + power
    return total


def naive_multitree(lines: Tensor, num_states: int) -> list[bool]:
    """The greedy choice with Python's sets."""
    rank = topological_rank(lines, num_states).tolist()
    source, target = lines.tolist()
    reached_by = [{i} for i in range(num_states)]
    kept = [False] * len(source)
    for i in sorted(range(num_states), key=lambda i: (rank[i], i)):
        entering = [x for x, t in enumerate(target) if t == i]
        for x in sorted(entering, key=lambda x: (source[x], x)):
            if not reached_by[source[x]] & reached_by[i]:
                kept[x] = True
                reached_by[i] |= reached_by[source[x]]
    return kept


def grid(height: int, width: int) -> Graph:
    node = torch.arange(height * width).view(height, width)
    right = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    down = torch.stack([node[:-1].flatten(), node[1:].flatten()])
    return Graph(torch.cat([right, down], dim=1), height * width)


def test_line_graph_of_diamond():
    #   edge      0  1  2  3  4       with 4 parallel to 0
    edge_index = torch.tensor([[0, 0, 1, 2, 0], [1, 2, 3, 3, 1]])
    out = line_graph(edge_index, 4)
    assert isinstance(out, LineGraph)
    assert out.edge_index.tolist() == [[0, 1, 4], [2, 3, 2]]
    assert out.node.tolist() == [1, 2, 1]
    assert out.edge_index.dtype == out.node.dtype == torch.long


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_without_edges(num_nodes):
    out = line_graph(torch.empty(2, 0, dtype=torch.long), num_nodes)
    assert out.edge_index.shape == (2, 0)
    assert out.node.shape == (0,)
    assert multitree(out.edge_index, 0).shape == (0,)
    assert multitree(out.edge_index, 5).shape == (0,)
    assert multitree(out.edge_index, 5).dtype == torch.bool


def test_edges_without_lines():
    out = line_graph(torch.tensor([[0, 0, 3], [1, 2, 2]]), 4)
    assert out.edge_index.shape == (2, 0)
    assert out.node.shape == (0,)


@given(dags())
def test_line_graph_is_the_definition(graph: Graph):
    out = line_graph(*graph)
    assert list(map(tuple, out.edge_index.t().tolist())) == naive_lines(
        graph.edge_index
    )
    left, entered = out.edge_index
    assert out.node.equal(graph.edge_index[1, left])
    assert out.node.equal(graph.edge_index[0, entered])


@given(graphs())
def test_cycle_is_named(graph: Graph):
    cycle = find_cycle(*graph)
    if cycle is None:
        assert line_graph(*graph).node.numel() >= 0
        return
    with pytest.raises(CycleError) as info:
        line_graph(*graph)
    assert info.value.cycle == cycle


def test_multitree_of_diamond():
    # Two ways from state 0 to state 3; the one by the smaller number stays.
    lines = torch.tensor([[0, 0, 2, 1], [1, 2, 3, 3]])
    assert multitree(lines, 4).tolist() == [True, True, False, True]
    # Two states may share a successor, and two a predecessor.
    lines = torch.tensor([[0, 1, 2, 2], [2, 2, 3, 4]])
    assert multitree(lines, 5).all()


def test_multitree_keeps_the_first_of_duplicates():
    lines = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 2]])
    assert multitree(lines, 3).tolist() == [True, False, False, True]
    # The row of state 1 is taken over by the first and not there for the second.
    lines = torch.tensor([[1, 0, 1], [2, 2, 2]])
    assert multitree(lines, 3).tolist() == [True, True, False]


def test_multitree_of_long_shortcut():
    # 0 -> 1 -> ... -> 199, and the shortcut 0 -> 199, which turns up later.
    path = torch.arange(200)
    lines = torch.stack([path[:-1], path[1:]])
    assert multitree(lines, 200).all()
    lines = torch.cat([lines, torch.tensor([[0], [199]])], dim=1)
    kept = multitree(lines, 200)
    # State 0 comes first among the predecessors of 199.
    assert kept.nonzero().flatten().tolist() == [*range(198), 199]


@given(dags(max_nodes=14, max_edges=30))
def test_multitree_is_the_greedy_choice(graph: Graph):
    assert multitree(*graph).tolist() == naive_multitree(*graph)


def assert_maximal_multitree(lines: Tensor, num_states: int) -> None:
    kept = multitree(lines, num_states)
    paths = num_paths(lines[:, kept], num_states)
    assert paths.max(initial=0) <= 1
    for j, i in lines[:, ~kept].t().tolist():
        # A path takes the edge that comes back at most once.
        more = paths + np.outer(paths[:, i], paths[j])
        assert more.max() > 1


@given(dags())
def test_multitree_of_any_dag_is_maximal(graph: Graph):
    assert_maximal_multitree(*graph)


@given(dags(max_edges=16))
def test_multitree_of_a_line_graph_is_maximal(graph: Graph):
    lines = line_graph(*graph).edge_index
    assert_maximal_multitree(lines, graph.edge_index.size(1))


@pytest.mark.parametrize("density", [0.03, 0.1, 0.5])
def test_multitree_with_several_words(density):
    """More than 64 states, whose numbers say nothing of their order."""
    n = 150
    pairs = torch.triu(torch.rand(n, n) < density, diagonal=1).nonzero().t()
    lines = torch.randperm(n)[pairs]
    lines = torch.cat([lines, lines[:, :20]], dim=1)
    assert multitree(lines, n).tolist() == naive_multitree(lines, n)
    assert_maximal_multitree(lines, n)


def test_multitree_of_large_components_side_by_side():
    """Each has rows of its own length, in memory that the last one has used."""
    sizes = [70, 3, 200, 1, 130]
    parts, kept, n = [], [], 0
    for size in sizes:
        pairs = torch.triu(torch.rand(size, size) < 4 / size, diagonal=1)
        part = torch.randperm(size)[pairs.nonzero().t()]
        parts.append(part + n)
        kept.append(multitree(part, size))
        assert kept[-1].tolist() == naive_multitree(part, size)
        n += size
    assert multitree(torch.cat(parts, dim=1), n).equal(torch.cat(kept))


@given(dags(), st.randoms(use_true_random=False))
def test_order_of_line_edges_does_not_matter(graph: Graph, random):
    lines = line_graph(*graph).edge_index
    num_states = graph.edge_index.size(1)
    order = list(range(lines.size(1)))
    random.shuffle(order)
    expected = multitree(lines, num_states)[order]
    assert multitree(lines[:, order], num_states).equal(expected)


@given(batches(dags(max_nodes=6, max_edges=12), ordered=True))
def test_batch_is_its_graphs(batch):
    """Edges of all graphs in any order: the same line edges, and the same choice."""
    owner = batch.batch[batch.edge_index[0]]
    lines = line_graph(batch.edge_index, batch.num_nodes).edge_index
    kept = multitree(lines, batch.edge_index.size(1))
    assert lines.size(1) == 0 or owner[lines[0]].equal(owner[lines[1]])
    for i, place in enumerate(batch.node_map):
        edges = (owner == i).nonzero().flatten()
        first = int(place[0]) if len(place) > 0 else 0
        alone = line_graph(batch.edge_index[:, edges] - first, len(place)).edge_index
        here = owner[lines[0]] == i
        assert edges[alone].equal(lines[:, here])
        assert multitree(alone, len(edges)).equal(kept[here])


@given(st.lists(dags(), max_size=4))
def test_concatenation_is_exact(items: list[Graph]):
    each = [line_graph(*item) for item in items]
    parts, kept, nodes = [], [], []
    num_nodes = num_edges = 0
    for item, lines in zip(items, each, strict=True):
        parts.append(item.edge_index + num_nodes)
        nodes.append(lines.node + num_nodes)
        kept.append(multitree(lines.edge_index, item.edge_index.size(1)))
        num_nodes += item.num_nodes
        num_edges += item.edge_index.size(1)
    empty = torch.empty(0, dtype=torch.long)
    out = line_graph(torch.cat([empty.view(2, 0), *parts], dim=1), num_nodes)
    assert out.node.equal(torch.cat([empty, *nodes]))
    assert multitree(out.edge_index, num_edges).equal(torch.cat([empty.bool(), *kept]))


def test_multitree_of_a_grid_reaches_all_below():
    """On a grid one turn is cut, but each state still reaches what it can."""
    edge_index, num_nodes = grid(6, 7)
    lines = line_graph(edge_index, num_nodes).edge_index
    kept = multitree(lines, edge_index.size(1))
    paths = num_paths(lines[:, kept], edge_index.size(1))
    assert paths.max() == 1
    # Everything on from the first node is within reach of its two edges.
    first = (edge_index[0] == 0).nonzero().flatten().tolist()
    assert paths[:, first].any(axis=1).sum() == edge_index.size(1)


def test_ten_thousand_edges():
    torch.manual_seed(0)
    edge_index = torch.randint(5_000, (2, 10_000)).sort(dim=0).values
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    lines = line_graph(edge_index, 5_000).edge_index
    left, entered = lines
    assert edge_index[1, left].equal(edge_index[0, entered])
    code = left * edge_index.size(1) + entered
    assert bool((code[1:] > code[:-1]).all())  # sorted, without duplicates
    kept = multitree(lines, edge_index.size(1))
    # Any state with predecessors keeps the first of them.
    has = torch.zeros(edge_index.size(1), dtype=torch.bool)
    has[entered] = True
    keeps = torch.zeros_like(has)
    keeps[entered[kept]] = True
    assert keeps.equal(has)


ORDERS = ("order", "degree", "bfs")


@given(graphs(max_nodes=7, max_edges=14), st.sampled_from(ORDERS), st.booleans())
def test_ordered_dags_are_the_definition(graph: Graph, order: str, turns: bool):
    edge_index, num_nodes = graph
    place = node_order(edge_index, num_nodes, order).tolist()
    index, edge_id, lines = ordered_dags(edge_index, num_nodes, order, turns)
    edges = edge_index.t().tolist()
    assert edge_id.tolist() == [e for e, (u, w) in enumerate(edges) if u != w]
    edges = [edges[e] for e in edge_id.tolist()]
    dag = [int(place[u] > place[w]) for u, w in edges]
    ends = [(2 * u + d, 2 * w + d) for (u, w), d in zip(edges, dag, strict=True)]
    assert index.t().tolist() == [list(end) for end in ends]

    def joined(a: int, b: int) -> bool:
        if edges[a][1] != edges[b][0]:
            return False
        turned = dag[a] == 1 and dag[b] == 0 and edges[a][0] != edges[b][1]
        return dag[a] == dag[b] or (turns and turned)

    numbers = range(len(edges))
    expected = [(a, b) for a in numbers for b in numbers if joined(a, b)]
    assert sorted(map(tuple, lines.t().tolist())) == expected
    assert find_cycle(lines, len(edges)) is None


def paths_between_nodes(dags: tuple[Tensor, ...], num_nodes: int) -> np.ndarray:
    """How many paths lead from node j (column) to another node i (row)."""
    edge_index, _, lines = dags
    begin, end = (x.numpy() // 2 for x in edge_index)
    paths = num_paths(lines, begin.size)
    first, last = np.eye(num_nodes)[begin], np.eye(num_nodes)[end]
    return last.T @ paths @ first


@given(st.data())
def test_turns_join_all_nodes(data: st.DataObject):
    num_nodes = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(0, i)) for i in range(num_nodes - 1)]
    tree = torch.tensor([parents, list(range(1, num_nodes))]).view(2, -1).long()
    name = torch.tensor(data.draw(st.permutations(range(num_nodes))))
    tree = to_undirected(name[tree], num_nodes=num_nodes)
    others = 1 - np.eye(num_nodes)
    # Any two nodes of a tree, by the only path between them.
    found = paths_between_nodes(ordered_dags(tree, num_nodes, "bfs", True), num_nodes)
    assert (found * others == others).all()
    # Without turns, only ancestors and descendants, of the first node all others.
    found = paths_between_nodes(ordered_dags(tree, num_nodes, "bfs", False), num_nodes)
    assert (found * others <= others).all()
    assert found[0, 1:].all()
    assert found[1:, 0].all()
    # With further edges by one path or more.
    node = st.integers(0, num_nodes - 1)
    more = torch.tensor(data.draw(st.lists(st.tuples(node, node), max_size=8)))
    graph = torch.cat([tree, more.view(-1, 2).t().long()], dim=1)
    graph = to_undirected(graph, num_nodes=num_nodes)
    found = paths_between_nodes(ordered_dags(graph, num_nodes, "bfs", True), num_nodes)
    assert (found >= others).all()


def test_multitree_with_turns_joins_most():
    torch.manual_seed(0)
    joined = {False: 0.0, True: 0.0}
    pairs = 0
    for _ in range(100):
        num_nodes = int(torch.randint(4, 12, ()))
        child = torch.arange(1, num_nodes)
        tree = torch.stack([(torch.rand(child.size(0)) * child).long(), child])
        more = torch.randint(num_nodes, (2, num_nodes // 2))
        graph = to_undirected(torch.cat([tree, more], dim=1), num_nodes=num_nodes)
        others = 1 - np.eye(num_nodes)
        pairs += int(others.sum())
        for turns in joined:
            index, edge_id, lines = ordered_dags(graph, num_nodes, "bfs", turns)
            kept = multitree(lines, index.size(1))
            found = paths_between_nodes((index, edge_id, lines[:, kept]), num_nodes)
            joined[turns] += float(((found > 0) * others).sum())
    assert joined[False] < 0.75 * pairs
    assert 0.9 * pairs < joined[True] < pairs  # on some graphs with cycles, not all


def test_leaves_of_a_star_hear_each_other_only_with_turns():
    star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])
    for turns, expected in ((False, 0), (True, 1)):
        found = paths_between_nodes(ordered_dags(star, 4, "bfs", turns), 4)
        assert found[1, 2] == found[3, 1] == expected
        assert found.diagonal().sum() == 0


def test_cycle_of_states():
    with pytest.raises(CycleError, match=r"'line_edge_index'.*0 -> 2 -> 0") as info:
        multitree(torch.tensor([[0, 1, 2], [2, 2, 0]]), 3)
    assert info.value.cycle == [0, 2]
