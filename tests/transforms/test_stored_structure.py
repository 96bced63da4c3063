"""Stored structure after transforms that change edges or nodes: it is right or refused.

Each attribute is stored before a change and after it. A model gives the same with
either, or refuses what was stored before.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data
from torch_geometric.loader.utils import filter_data
from torch_geometric.utils import dropout_edge, erdos_renyi_graph

from pyg_chimera import ops
from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    KHopAttentionConv,
    PLSTMConv,
    RGLRUConv,
)
from pyg_chimera.ops.structure import check_stored
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddKHopIndex,
    AddTopologicalOrder,
    DAGDecomposition,
    DirectedLineGraph,
    MultitreePruning,
    NodeOrder,
)

NUM_NODES = 16


class Stored(NamedTuple):
    """What a transform stores, and the layer that reads it."""

    transform: Any
    layer: Any
    structure: dict
    acyclic: bool = False
    of_edges: bool = False  # whether it holds numbers of edges


def from_same_roots(data: Data) -> Data:
    """Trees, with the same draw of roots for any edges."""
    torch.manual_seed(0)
    return DAGDecomposition(2, "bfs")(data)


PAIRS = {name: name for name in ("k_hop_index", "k_hop_distance")}
DAGS = {"mixer_edge_index": "dag_edge_index", "mixer_rank": "dag_rank"}
STORED = {
    "k_hop": Stored(AddKHopIndex(2), KHopAttentionConv(8, heads=2, k=2), PAIRS),
    "k_hop_of_dag": Stored(
        AddKHopIndex(2), KHopAttentionConv(8, k=2, flow="target_to_source"), PAIRS,
        acyclic=True,
    ),
    "elimination": Stored(
        AddEliminationOrder(), ChimeraConv(8, state_channels=4),
        {"rank": "elimination_rank"},
    ),
    "topological": Stored(
        AddTopologicalOrder(), ChimeraDAGConv(8, state_channels=4),
        {"rank": "topological_rank"}, acyclic=True,
    ),
    "channels": Stored(
        AddTopologicalOrder(), RGLRUConv(8, heads=2), {"rank": "topological_rank"},
        acyclic=True,
    ),
    "dags": Stored(
        DAGDecomposition(2), ChimeraDAGConv(8, state_channels=4, num_dags=2), DAGS
    ),
    "trees": Stored(
        from_same_roots,
        ChimeraDAGConv(8, state_channels=4, num_dags=2), DAGS,
    ),
    "lines": Stored(
        DirectedLineGraph(), PLSTMConv(8, heads=2),
        {"line_edge_index": "line_edge_index"}, acyclic=True, of_edges=True,
    ),
    "pruned": Stored(
        MultitreePruning(), PLSTMConv(8, heads=2, mode="D"),
        {"line_edge_index": "line_edge_index_pruned"}, acyclic=True, of_edges=True,
    ),
    "lines_of_dags": Stored(
        T.Compose([DAGDecomposition(2), DirectedLineGraph("dag")]),
        PLSTMConv(8, heads=2, num_dags=2),
        {
            "mixer_edge_index": "dag_edge_index",
            "mixer_line_edge_index": "dag_line_edge_index",
        },
    ),
    "score": Stored(
        NodeOrder("pagerank"), GraphMambaConv(8, order=None), {"score": "node_score"}
    ),
    "diameter": Stored(
        AddDiameter(), ChimeraConv(8, state_channels=4, solver="neumann"),
        {"num_terms": "diameter"},
    ),
}  # fmt: skip


def sampled(data: Data, node: Tensor) -> Data:
    """As a loader that samples neighbours returns it."""
    place = torch.full((data.num_nodes,), -1)
    place[node] = torch.arange(len(node))
    ends = place[data.edge_index]
    edge = (ends >= 0).all(0).nonzero().view(-1)
    return filter_data(data, node, *ends[:, edge], edge)


def with_edges(data: Data, edge_index: Tensor) -> Data:
    data = copy.copy(data)
    data.edge_index = edge_index
    return data


def with_an_edge(data: Data) -> Data:
    added = torch.tensor([[4, 9], [9, 4]])
    if not data.is_undirected():
        added = added[:, :1]
    return with_edges(data, torch.cat([data.edge_index, added], 1))


def split(data: Data) -> Data:
    kind = {"is_undirected": data.is_undirected(), "add_negative_train_samples": False}
    return T.RandomLinkSplit(0.1, 0.2, **kind)(data)[0]


def without_edges(data: Data) -> Data:
    kept = dropout_edge(data.edge_index, 0.3, force_undirected=data.is_undirected())
    return with_edges(data, kept[0])


def swapped(data: Data) -> Data:
    """Two components change places, so that all edges are as long as before."""
    node = torch.arange(NUM_NODES).roll(NUM_NODES // 2)
    return sampled(data, node)


CHANGES = {
    "split": split,
    "renumbered": lambda data: sampled(data, torch.randperm(NUM_NODES)),
    "sampled": lambda data: sampled(data, torch.randperm(NUM_NODES)[:10]),
    "swapped": swapped,
    "virtual_node": lambda data: T.VirtualNode()(data),
    "dropped": without_edges,
    "added": with_an_edge,
    "subgraph": lambda data: data.subgraph(torch.arange(NUM_NODES) > 2),
    "reversed": lambda data: with_edges(data, data.edge_index.flip(0)),
    "undirected": lambda data: T.ToUndirected()(data),
    "self_loops": lambda data: T.AddSelfLoops()(data),
    "coalesced": lambda data: data.coalesce(),
    "permuted": lambda data: with_edges(
        data, data.edge_index[:, torch.randperm(data.num_edges)]
    ),
    "batched": lambda data: Batch.from_data_list([data, data]),
    "nothing": lambda data: data,
}


def is_harmless(stored: Stored, change: str) -> bool:
    """Whether the edges are those from before, in an order that makes no difference."""
    if change in ("batched", "nothing"):
        return True
    if change in ("coalesced", "permuted"):
        return not stored.of_edges
    return change in ("reversed", "undirected", "self_loops") and not stored.acyclic


def graph(acyclic: bool = False) -> Data:
    """Of two components, whose nodes are numbered one after the other."""
    torch.manual_seed(1)
    half = erdos_renyi_graph(NUM_NODES // 2, 0.4)
    other = erdos_renyi_graph(NUM_NODES // 2, 0.4)
    edges = torch.cat([half, other + NUM_NODES // 2], dim=1)
    if acyclic:
        edges = edges[:, edges[0] < edges[1]]
    return Data(x=torch.randn(NUM_NODES, 8), edge_index=edges)


def changed(data: Data, change: str) -> Data:
    torch.manual_seed(2)
    return CHANGES[change](data)


def run(stored: Stored, data: Data) -> Tensor:
    torch.manual_seed(3)
    layer = GPSLayer(8, mixer=stored.layer, norm=None)
    model = GraphModel(8, 8, 1, [layer], head="node", structure=stored.structure)
    model.reset_parameters()
    for parameter in model.parameters():  # none are zero
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()(**model.inputs(data))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STORED)
def test_stored_structure_is_right_or_refused(name, change):
    stored = STORED[name]
    data = graph(stored.acyclic)
    try:
        before = run(stored, changed(stored.transform(data), change))
    except (ValueError, IndexError):  # an index error of PyG's split
        assert not is_harmless(stored, change)
        return
    if change == "batched":
        after = run(stored, Batch.from_data_list([stored.transform(data)] * 2))
    else:
        after = run(stored, stored.transform(changed(data, change)))
    torch.testing.assert_close(before, after)


def test_held_out_edges_are_not_heard():
    """Pairs that are stored before the split include the edges held out for testing."""
    data = AddKHopIndex(1)(graph())
    train = split(data)
    conv = KHopAttentionConv(8, 8)
    match = "'k_hop_index' must .*one at distance 1 without an edge between nodes"
    with pytest.raises(ValueError, match=match):
        conv(train.x, train.edge_index, **{name: train[name] for name in PAIRS})
    data = DAGDecomposition(2)(graph())
    with pytest.raises(ValueError, match=r"'data.dag_edge_index' must .*other edges"):
        check_stored(split(data))


@pytest.mark.parametrize(
    ("edges", "num_nodes", "got"),
    [
        ([[0], [1]], 3, "one at distance 1 without an edge between nodes 2 and 1"),
        ([[0, 1, 2], [1, 2, 0]], 3, "none at .* for an edge between nodes 0 and 2"),
        ([[0, 1, 1, 2], [1, 0, 2, 1]], 4, "3 pairs at distance 0 for 4 nodes"),
        ([[0], [1]], 2, "node 2 for 2 nodes"),
    ],
)
def test_pairs_of_other_edges(edges, num_nodes, got):
    path = torch.tensor([[0, 1], [1, 2]])
    pairs = AddKHopIndex(2)(Data(edge_index=path, num_nodes=3))
    given = {name: pairs[name] for name in PAIRS}
    conv = KHopAttentionConv(8, 8, k=2)
    with pytest.raises(ValueError, match=f"'k_hop_index' must .*got {got}"):
        conv(torch.randn(num_nodes, 8), torch.tensor(edges), **given)


def test_pairs_are_the_same_for_all_forms_of_edges():
    """Also with isolated nodes, self-loops and duplicates, and without edges."""
    edges = torch.tensor([[0, 1, 1, 2, 4, 0], [1, 0, 2, 2, 1, 1]])
    data = AddKHopIndex(2)(Data(edge_index=edges, num_nodes=6))
    given = {name: data[name] for name in PAIRS}
    conv, x = KHopAttentionConv(8, 8, k=2), torch.randn(6, 8)
    expected = conv(x, edges)
    adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(6), (6, 6))
    others = [edges.int(), EdgeIndex(edges), adj_t, adj_t.coalesce().to_sparse_csr()]
    for form in (edges, *others):
        torch.testing.assert_close(conv(x, form, **given), expected)
    narrow = {name: value.int() for name, value in given.items()}
    torch.testing.assert_close(conv(x, edges, **narrow), expected)
    for n in (0, 1, 3):
        none = Data(edge_index=edges[:, :0], num_nodes=n)
        pairs = AddKHopIndex(2)(none)
        given = {name: pairs[name] for name in PAIRS}
        assert conv(x[:n], none.edge_index, **given).shape == (n, 8)


def test_pairs_are_checked_in_compiled_layers_too():
    data = AddKHopIndex(1)(graph())
    given = {name: data[name] for name in PAIRS}
    conv = KHopAttentionConv(8, 8)
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    expected = conv(data.x, data.edge_index)
    torch.testing.assert_close(compiled(data.x, data.edge_index, **given), expected)
    with pytest.raises(ValueError, match="'k_hop_index' must hold the pairs"):
        compiled(data.x, data.edge_index[:, 2:], **given)


def items() -> list[Data]:
    """With isolated nodes, self-loops and duplicates, without edges or nodes."""
    edges = [[[0, 1, 1, 0], [1, 0, 0, 1]], [[2, 1, 1], [1, 2, 1]], [[], []], [[], []]]
    return [
        Data(edge_index=torch.tensor(index, dtype=torch.long), num_nodes=n)
        for index, n in zip(edges, (2, 5, 3, 0), strict=True)
    ]


ALL = T.Compose([NodeOrder(), AddDiameter(), DAGDecomposition(2)])


def test_check_of_a_batch():
    each = [ALL(item) for item in items()]
    for one in (*each, Batch.from_data_list(each), ALL(Batch.from_data_list(items()))):
        check_stored(one)
        check_stored(one.clone().to(torch.device("cpu")))
    for one in Batch.from_data_list(each).to_data_list():
        check_stored(one)
    each[1].edge_index = each[1].edge_index[:, :1]
    batch = Batch.from_data_list(each)
    for name in ("node_score", "diameter", "dag_edge_index", "dag_rank"):
        match = rf"'data.{name}' must .*got other edges at node 3: edges or nodes have"
        with pytest.raises(ValueError, match=match):
            check_stored(batch, [name])
    check_stored(batch, ["x", "edge_index", "node", "dag_checksum"])
    for name in ("node_score", "diameter", "dag"):
        del batch[f"{name}_checksum"]
    check_stored(batch)


def test_duplicates_count_only_where_they_are_stored():
    data = ALL(items()[0]).coalesce()
    check_stored(data, ["node_score", "diameter"])
    with pytest.raises(ValueError, match=r"'data.dag_edge_index' must .* at node 0"):
        check_stored(data)


def test_check_of_all_forms_of_edges():
    data = ALL(graph())
    for form in (data.edge_index.int(), EdgeIndex(data.edge_index)):
        check_stored(with_edges(data, form))
    size = (NUM_NODES, NUM_NODES)
    for edges in (data.edge_index, data.edge_index[:, 1:]):
        other = copy.copy(data)
        other.adj_t = torch.sparse_coo_tensor(
            edges.flip(0), torch.ones(edges.size(1)), size
        ).to_sparse_csr()
        del other.edge_index
        if edges.size(1) == data.num_edges:
            check_stored(other)
        else:
            with pytest.raises(ValueError, match=r"'data.node_score' must"):
                check_stored(other, ["node_score"])


def test_an_attribute_has_a_checksum_of_its_own():
    """Rather than that of another one, whose name it begins with."""
    data = NodeOrder()(graph(acyclic=True))
    data.edge_index = data.edge_index[:, 2:]
    data = NodeOrder("pagerank", attr_name="node_score_pagerank")(data)
    check_stored(data, ["node_score_pagerank"])
    data = DAGDecomposition(2, "dag", prefix="node_score_dag")(data)
    check_stored(data, ["node_score_dag_rank", "node_score_dag_edge_index"])
    with pytest.raises(ValueError, match=r"'data.node_score' must"):
        check_stored(data)


def test_where_a_model_checks():
    """Only what it reads, and not where contents are trusted."""
    data = ALL(graph())
    data.edge_index = data.edge_index[:, 2:]
    layer = GraphMambaConv(8, order=None)
    model = GraphModel(8, 8, 1, [layer], structure={"score": "node_score"})
    with pytest.raises(ValueError, match=r"'data.node_score' must .*'transform' of a"):
        model.inputs(data)
    with ops.unchecked():
        assert "score" in model.inputs(data)
    data.importance = data.node_score
    model.structure = {"score": "importance"}
    model.inputs(data)


def test_transforms_refuse_what_others_stored_for_other_edges():
    dags = DAGDecomposition(2)(graph())
    lines = DirectedLineGraph()(graph(acyclic=True))
    lines.edge_index = torch.cat([lines.edge_index, torch.tensor([[1], [6]])], dim=1)
    dags.edge_index = dags.edge_index[:, 2:]
    with pytest.raises(ValueError, match=r"'data.dag_edge_index' must"):
        DirectedLineGraph("dag")(dags)
    for transform in (DirectedLineGraph(), MultitreePruning()):  # these replace it
        check_stored(transform(lines))


def test_a_matrix_is_left_as_it_is():
    """Not marked as coalesced, which it is not."""
    index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    data = NodeOrder()(Data(edge_index=index, num_nodes=3))
    data.adj_t = torch.sparse_coo_tensor(index.flip(0), torch.ones(4), (3, 3))
    del data.edge_index
    check_stored(data)
    assert not data.adj_t.is_coalesced()


def test_parts_of_what_is_stored_may_be_removed():
    data = Data(torch.randn(3, 4), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    data = DAGDecomposition()(data)
    fewer = data.clone()
    fewer.num_nodes, fewer.x = 4, torch.randn(4, 4)
    del fewer["dag_edge_index"]
    with pytest.raises(ValueError, match="4 nodes instead of 3"):
        check_stored(fewer)
    changed = data.clone()
    changed.dag_edge_index[0] = changed.dag_edge_index[0].flip(0)
    for removed in ("dag_rank", "dag_edge_index"):
        left = copy.copy(data)
        del left[removed]
        check_stored(left)
        check_stored(left, [removed])
    del changed["dag_rank"]  # which is not read without ranks
    with pytest.raises(ValueError, match=r"'data\.dag_edge_index' must belong"):
        check_stored(changed)
    model = GraphModel(
        4, 8, 2, [GPSLayer(8, None, ChimeraDAGConv(8, num_dags=2))],
        structure={"mixer_edge_index": "dag_edge_index"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="no attribute 'dag_edge_index'"):
        model.inputs(left)


def test_ranks_beside_scores_of_a_similar_name():
    data = Data(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    data = NodeOrder("degree", attr_name="node")(AddTopologicalOrder("node_rank")(data))
    check_stored(data)
    data.edge_index = data.edge_index.flip(0)
    with pytest.raises(ValueError, match="must belong to the edges"):
        check_stored(data)
