import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, graphs
from torch_geometric.data import Data
from torch_geometric.transforms import ToUndirected
from torch_geometric.utils import degree

from pyg_chimera.ops import CycleError
from pyg_chimera.ops.structure import topological_rank
from pyg_chimera.transforms import (
    DAGDecomposition,
    ImageToGraph,
    MultitreePruning,
    SequenceToGraph,
)

KEYS = ["dag_edge_index", "dag_edge_attr", "dag_rank"]
SCORES = ["degree", "pagerank", "closeness"]
ORDERS = ["order", *SCORES, "random"]
SEARCHES = ["bfs", "bfs_dense"]
EVERY = [*ORDERS, *SEARCHES]

undirected = graphs(undirected=True, max_edges=40)


def data_of(graph: Graph) -> Data:
    """Data whose edge features are the numbers of the edges."""
    num_edges = graph.edge_index.size(1)
    return Data(
        edge_index=graph.edge_index,
        edge_attr=torch.arange(num_edges).view(-1, 1),
        num_nodes=graph.num_nodes,
    )


def random_data(num_nodes: int, num_edges: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return data_of(Graph(torch.cat([pairs, pairs.flip(0)], dim=1), num_nodes))


def pairs_of(edge_index: torch.Tensor) -> list[tuple[int, int]]:
    return [tuple(edge) for edge in edge_index.t().tolist()]


def assert_same(a: Data, b: Data) -> None:
    for key in KEYS:
        assert len(a[key]) == len(b[key])
        for x, y in zip(a[key], b[key], strict=True):
            assert x.dtype == y.dtype
            assert x.equal(y), key


def from_first_node(data: Data, method: str) -> Data:
    """The decomposition by the first seed that makes node 0 a root."""
    outs = (DAGDecomposition(2, method, seed=seed)(data) for seed in range(99))
    return next(out for out in outs if out.dag_rank[0][0] == 0)


def test_path():
    edge_index = torch.tensor([[1, 0, 1, 2, 3, 2], [0, 1, 2, 1, 2, 3]])
    edge_attr = torch.tensor([10, 1, 12, 21, 32, 23])
    data = Data(edge_index=edge_index, edge_attr=edge_attr, num_nodes=4)
    out = DAGDecomposition()(data)
    assert not any(key in data for key in KEYS)
    assert out.edge_index is data.edge_index
    assert [dag.tolist() for dag in out.dag_edge_index] == [
        [[0, 1, 2], [1, 2, 3]],
        [[1, 2, 3], [0, 1, 2]],
    ]
    assert [attr.tolist() for attr in out.dag_edge_attr] == [[1, 12, 23], [10, 21, 32]]
    assert [rank.tolist() for rank in out.dag_rank] == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_hexagon_with_tail():
    # A ring 0 .. 5 and a node 6 at 3: the ring closes at 3, seen from 0.
    ring = [(i, (i + 1) % 6) for i in range(6)] + [(3, 6)]
    edge_index = torch.tensor(ring + [(v, u) for u, v in ring]).t()
    data = Data(edge_index=edge_index, num_nodes=7)
    tree, dense = from_first_node(data, "bfs"), from_first_node(data, "bfs_dense")
    edges = {(0, 1), (1, 2), (2, 3), (3, 6), (0, 5), (5, 4)}
    assert set(pairs_of(tree.dag_edge_index[0])) == edges
    assert set(pairs_of(dense.dag_edge_index[0])) == edges | {(4, 3)}
    for out in (tree, dense):
        assert out.dag_rank[0].tolist() == [0, 1, 2, 3, 2, 1, 4]
        back = out.dag_edge_index[1].flip(0)
        assert set(pairs_of(back)) == set(pairs_of(out.dag_edge_index[0]))
    assert dense.dag_rank[1].tolist() == [4, 3, 2, 1, 2, 3, 0]


@given(undirected, st.sampled_from(EVERY), st.integers(1, 5))
def test_dags_of_any_graph(graph: Graph, order: str, num_dags: int):
    if order in ("order", *SCORES):
        num_dags = min(num_dags, 2)
    transform = DAGDecomposition(num_dags, order, seed=num_dags)
    data = data_of(graph)
    out = transform(data)
    assert all(len(out[key]) == num_dags for key in KEYS)
    assert_same(out, transform(data))
    loops = graph.edge_index[0] == graph.edge_index[1]
    ids = [attr.view(-1) for attr in out.dag_edge_attr]
    for d in range(num_dags):
        dag, rank = out.dag_edge_index[d], out.dag_rank[d]
        # Edges keep their order and their features.
        assert (ids[d].diff() > 0).all()
        assert dag.equal(graph.edge_index[:, ids[d]])
        # It is a DAG, and these are its ranks.
        assert nx.is_directed_acyclic_graph(nx.DiGraph(pairs_of(dag)))
        assert rank.equal(topological_rank(dag, graph.num_nodes))
        if order in ORDERS:
            covered = {tuple(sorted(edge)) for edge in pairs_of(dag)}
            every = graph.edge_index[:, ~loops].sort(dim=0).values
            assert covered == set(pairs_of(every))
    for d in range(0, num_dags - 1, 2):
        turned = pairs_of(out.dag_edge_index[d + 1].flip(0))
        assert set(turned) == set(pairs_of(out.dag_edge_index[d]))
        if order in ORDERS:
            both = torch.cat([ids[d], ids[d + 1]]).sort().values
            assert both.equal((~loops).nonzero().view(-1))


@given(undirected, st.sampled_from(SEARCHES), st.integers(0, 3))
def test_searches(graph: Graph, order: str, seed: int):
    out = DAGDecomposition(5, order, seed=seed)(data_of(graph))
    full = nx.Graph()
    full.add_nodes_from(range(graph.num_nodes))
    full.add_edges_from(pairs_of(graph.edge_index))
    components = list(nx.connected_components(full))
    for dag, rank in zip(out.dag_edge_index[::2], out.dag_rank[::2], strict=True):
        for nodes in components:
            (root,) = [i for i in nodes if rank[i] == 0]
            distance = nx.single_source_shortest_path_length(full, root)
            assert distance == {i: int(rank[i]) for i in nodes}
        if order == "bfs":
            incoming = degree(dag[1], graph.num_nodes)
            assert incoming.equal((rank > 0).float())
        else:
            down = rank[graph.edge_index[0]] + 1 == rank[graph.edge_index[1]]
            assert dag.equal(graph.edge_index[:, down])


def test_roots_are_different_while_there_are_others():
    # A path of three nodes, a pair and a single node.
    edges = [(0, 1), (1, 2), (3, 4)]
    edge_index = torch.tensor(edges + [(v, u) for u, v in edges]).t()
    data = Data(edge_index=edge_index, num_nodes=6)
    out = DAGDecomposition(11, "bfs")(data)
    roots = torch.stack(out.dag_rank[::2]) == 0
    assert roots.sum(dim=0).tolist() == [2, 2, 2, 3, 3, 6]
    assert roots[:3].sum(dim=0).tolist()[:3] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_scores_grow_along_edges(seed):
    data = random_data(20, 24, seed)
    graph = nx.Graph(e for e in pairs_of(data.edge_index) if e[0] != e[1])
    graph.add_nodes_from(range(20))
    expected = {
        "degree": dict(graph.degree),
        "pagerank": nx.pagerank(graph, tol=1e-12, max_iter=1000),
        "closeness": nx.closeness_centrality(graph),
    }
    for order, scores in expected.items():
        score = torch.tensor([float(scores[i]) for i in range(20)])
        source, target = DAGDecomposition(1, order)(data).dag_edge_index[0]
        assert (score[source] <= score[target] + 1e-6).all(), order
        tied = score[source] == score[target]
        assert (source < target)[tied].all(), order


def test_custom_score():
    data = random_data(30, 60, seed=0)
    data.height = torch.randn(30)
    for dtype in (torch.float, torch.bfloat16, torch.double):
        transform = DAGDecomposition(2, lambda d, dtype=dtype: d.height.to(dtype))
        source, target = transform(data).dag_edge_index[0]
        assert source.numel() > 0
        assert (data.height[source] < data.height[target] + 0.1).all()
    assert "method='<lambda>'" in repr(transform)


def test_ties():
    ring = torch.arange(40)
    edge_index = torch.stack([ring, (ring + 1) % 40])
    data = Data(edge_index=torch.cat([edge_index, edge_index.flip(0)], 1), num_nodes=40)
    for order in SCORES:
        in_order = DAGDecomposition(2, order)(data)
        expected = DAGDecomposition(2, "order")(data)
        assert in_order.dag_edge_index[0].equal(expected.dag_edge_index[0]), order


@pytest.mark.parametrize("order", ["random", *SEARCHES])
def test_seed(order):
    data = random_data(50, 80, seed=0)
    seeded = DAGDecomposition(4, order, seed=3)
    out = seeded(data)
    seeded(random_data(40, 80, seed=1))
    assert_same(out, seeded(data))
    other = DAGDecomposition(4, order, seed=4)(data)
    assert pairs_of(other.dag_edge_index[0]) != pairs_of(out.dag_edge_index[0])

    free = DAGDecomposition(4, order)
    torch.manual_seed(5)
    first, second = free(data), free(data)
    assert pairs_of(first.dag_edge_index[0]) != pairs_of(second.dag_edge_index[0])
    torch.manual_seed(5)
    assert_same(first, free(data))


def test_seed_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    DAGDecomposition(2, "random", seed=0)(random_data(10, 20, seed=0))
    DAGDecomposition(2, "degree")(random_data(10, 20, seed=0))
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
@pytest.mark.parametrize("order", EVERY)
def test_no_edges(num_nodes, order):
    data = data_of(Graph(torch.empty(2, 0, dtype=torch.long), num_nodes))
    out = DAGDecomposition(2, order)(data)
    for d in range(2):
        assert out.dag_edge_index[d].size() == (2, 0)
        assert out.dag_edge_index[d].dtype == torch.long
        assert out.dag_edge_attr[d].size() == (0, 1)
        assert out.dag_rank[d].tolist() == [0] * num_nodes


def test_duplicates_and_self_loops():
    edge_index = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 0, 1]])
    data = data_of(Graph(edge_index, 2))
    out = DAGDecomposition(2, "order")(data)
    assert [attr.view(-1).tolist() for attr in out.dag_edge_attr] == [[1, 2], [3]]
    out = from_first_node(data, "bfs")
    assert [attr.view(-1).tolist() for attr in out.dag_edge_attr] == [[1], [3]]
    out = from_first_node(data, "bfs_dense")
    assert [attr.view(-1).tolist() for attr in out.dag_edge_attr] == [[1, 2], [3]]


ITEMS = [
    random_data(12, 20, seed=0),
    data_of(Graph(torch.empty(2, 0, dtype=torch.long), 3)),
    random_data(7, 9, seed=1),
    data_of(Graph(torch.empty(2, 0, dtype=torch.long), 1)),
    random_data(30, 70, seed=2),
]


def test_attributes():
    data = DAGDecomposition()(ITEMS[0])
    del data.edge_attr
    out = DAGDecomposition(1)(data)
    assert len(out.dag_edge_index) == 1
    assert "dag_edge_attr" not in out
    assert "dag_edge_attr" in data


def test_one_way_edge():
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 3]])
    data = Data(edge_index=edge_index, num_nodes=4)
    for order in EVERY:
        with pytest.raises(ValueError, match="got edge 1 -> 2 without 2 -> 1"):
            DAGDecomposition(2, order)(data)
    out = DAGDecomposition()(ToUndirected()(data))
    assert pairs_of(out.dag_edge_index[0]) == [(0, 1), (1, 2), (2, 3)]


@given(st.integers(1, 5), st.integers(1, 5), st.randoms())
def test_grids(height, width, random):
    data = ImageToGraph()(torch.rand(1, height, width))
    edges = random.sample(range(data.num_edges), data.num_edges)
    edges += edges[:1]  # one of them twice
    data.edge_index = data.edge_index[:, edges]
    data.edge_attr = torch.tensor(edges).view(-1, 1)
    out = DAGDecomposition(method="grid")(data)
    place = [(i // width, i % width) for i in range(data.num_nodes)]
    ways = [(1, 1), (-1, -1), (-1, 1), (1, -1)]  # down or up, right or left
    parts = zip(out.dag_edge_index, out.dag_rank, out.dag_edge_attr, ways, strict=True)
    for index, rank, attr, (down, right) in parts:
        expected = [
            (s, t)
            for s, t in pairs_of(data.edge_index)
            if (place[t][0] - place[s][0]) * down + (place[t][1] - place[s][1]) * right
            == 1
        ]
        assert sorted(pairs_of(index)) == sorted(expected)
        assert torch.equal(rank, topological_rank(index, data.num_nodes))
        own = [edges.index(e) for e in attr.view(-1).tolist()]
        assert torch.equal(data.edge_index[:, own], index)
    there, back = out.dag_edge_index[:2]
    assert set(pairs_of(back)) == set(pairs_of(there.flip(0)))
    for n in (1, 2, 3):
        fewer = DAGDecomposition(n, method="grid")(data).dag_edge_index
        assert [x.tolist() for x in fewer] == [
            x.tolist() for x in out.dag_edge_index[:n]
        ]


@given(st.integers(1, 9))
def test_paths(length):
    data = SequenceToGraph()(list(range(length)))
    out = DAGDecomposition(method="path")(data)
    there = [(i, i + 1) for i in range(length - 1)]
    assert pairs_of(out.dag_edge_index[0]) == there
    assert pairs_of(out.dag_edge_index[1]) == [(j, i) for i, j in there]
    assert out.dag_rank[0].tolist() == list(range(length))
    assert out.dag_rank[1].tolist() == list(range(length))[::-1]


def test_small_and_looped_paths_and_grids():
    for n in (0, 1, 3):
        edges = [(i, i + 1) for i in range(n - 1)]
        edges = [*edges, *((j, i) for i, j in edges), *((i, i) for i in range(n))]
        index = torch.tensor(edges, dtype=torch.long).view(-1, 2).t()
        data = Data(edge_index=index, num_nodes=n, height=1, width=n)
        expected = DAGDecomposition(method="order")(data)
        for method in ("path", "grid") if n else ("path",):
            out = DAGDecomposition(2, method)(data)
            for key in ("dag_edge_index", "dag_rank"):
                assert [x.tolist() for x in out[key]] == [
                    x.tolist() for x in expected[key]
                ]


def test_neither_grid_nor_path():
    grid = ImageToGraph()(torch.rand(1, 2, 3))
    with pytest.raises(ValueError, match="must be a path with nodes numbered in order"):
        DAGDecomposition(method="path")(grid)
    transform = DAGDecomposition(method="grid")
    with pytest.raises(ValueError, match=r"of a grid of 6 nodes.*, got None and None"):
        transform(Data(edge_index=grid.edge_index, num_nodes=6))
    with pytest.raises(ValueError, match=r", got 4 and 2"):
        transform(Data(edge_index=grid.edge_index, num_nodes=6, height=4, width=2))
    for edge_index in (
        grid.edge_index[:, 1:],  # an edge is missing
        torch.cat([grid.edge_index, torch.tensor([[0], [4]])], dim=1),  # a diagonal
        torch.cat([grid.edge_index, torch.tensor([[2], [3]])], dim=1),  # to a next row
    ):
        with pytest.raises(ValueError, match="must be a grid of 2 x 3 nodes"):
            transform(Data(edge_index=edge_index, num_nodes=6, height=2, width=3))


def test_default_number_of_dags():
    assert DAGDecomposition().num_dags == 2
    assert DAGDecomposition(method="bfs").num_dags == 2
    assert DAGDecomposition(method="grid").num_dags == 4


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_dags": 0}, "'num_dags' must be an integer >= 1"),
        ({"method": "dfs"}, r"'method' must be .*'order'.*got 'dfs'"),
        ({"num_dags": 3}, "'num_dags' must be at most 2.*method='random' for more"),
        ({"num_dags": 3, "method": "path"}, "at most 2 .* no others"),
        ({"num_dags": 5, "method": "grid"}, "at most 4 .* no others"),
        ({"num_dags": 4, "method": "degree"}, "at most 2.*method='random' for more"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        DAGDecomposition(**kwargs)


def test_bad_data():
    with pytest.raises(ValueError, match=r"one row per edge, 40, got shape \[3, 1\]"):
        DAGDecomposition()(
            Data(None, ITEMS[0].edge_index, torch.ones(3, 1), num_nodes=12)
        )
    with pytest.raises(ValueError, match=r"score per node.*\[12\].*got shape \[5\]"):
        DAGDecomposition(2, lambda data: torch.zeros(5))(ITEMS[0])
    with pytest.raises(ValueError, match="must not return NaN"):
        DAGDecomposition(2, lambda data: torch.full((12,), torch.nan))(ITEMS[0])
    data = Data(None, ITEMS[0].edge_index, [[1]] * 40, num_nodes=12)
    with pytest.raises(TypeError, match=r"'data.edge_attr' must be a tensor.*'list'"):
        DAGDecomposition()(data)
    with pytest.raises(TypeError, match=r"'num_dags' must be an integer, got \d"):
        DAGDecomposition(2.0)


def test_a_dag_and_its_reverse():
    """Whatever the numbers of its nodes."""
    edges = torch.tensor([[4, 4, 2, 0, 3], [2, 0, 1, 1, 0]])
    attr = torch.arange(10.0).view(5, 2)
    data = Data(edge_index=edges, edge_attr=attr, num_nodes=6)
    out = DAGDecomposition(method="dag")(data)
    assert [x.tolist() for x in out.dag_edge_index] == [
        edges.tolist(), edges.flip(0).tolist(),
    ]  # fmt: skip
    assert all(x.equal(attr) for x in out.dag_edge_attr)
    assert [x.tolist() for x in out.dag_rank] == [
        [1, 2, 1, 0, 0, 0],
        [1, 0, 1, 2, 2, 0],
    ]
    (one,) = DAGDecomposition(1, "dag")(data).dag_edge_index
    assert one.equal(edges)
    data.edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    data.edge_attr = None
    with pytest.raises(CycleError, match="0 -> 1 -> 2"):
        DAGDecomposition(method="dag")(data)
    with pytest.raises(ValueError, match="method='dag'"):  # the way out
        DAGDecomposition()(Data(edge_index=edges, num_nodes=6))
    with pytest.raises(ValueError, match="must be at most 2"):
        DAGDecomposition(3, "dag")


def test_line_graphs_of_earlier_dags_are_removed():
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    data = DAGDecomposition()(Data(edge_index=edges, num_nodes=3))
    data = MultitreePruning("dag")(data)
    assert "dag_line_edge_index_pruned" in data
    again = DAGDecomposition(method="random")(data)
    assert not [name for name in again.keys() if "line" in name]  # noqa: SIM118
