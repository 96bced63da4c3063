"""Batches padded to few shapes: graphs are what they were, and norms leave it out."""

import copy
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from asserts import assert_near
from host_waits import host_waits
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import AddRandomWalkPE, Compose, Pad

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphBatchNorm,
    GraphMambaConv,
    GraphModel,
    KHopAttentionConv,
    PLSTMConv,
    RandomWalkEncoder,
    RGLRUConv,
    SelfAttention,
)
from pyg_chimera.nn._norm import Norm
from pyg_chimera.ops import unchecked
from pyg_chimera.ops.structure import check_stored, topological_rank
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddKHopIndex,
    AddTopologicalOrder,
    DAGDecomposition,
    DirectedLineGraph,
    ImageToGraph,
    LaplacianEncoding,
    NodeOrder,
    PadBatch,
)

C = 8


def tree(num_nodes: int, directed: bool = False) -> Data:
    child = torch.arange(1, num_nodes)
    edges = torch.stack([(child - 1) // 2, child])
    if not directed:
        edges = torch.cat([edges, edges.flip(0)], 1)
    return Data(
        x=torch.randn(num_nodes, C).double(),
        edge_index=edges,
        edge_attr=torch.randn(edges.size(1), 3).double(),
        y=torch.randn(1, 2).double(),
    )


def trees(*sizes: int, directed: bool = False) -> list[Data]:
    return [tree(n, directed) for n in sizes]


SIZES = (5, 1, 12, 3)


def test_attributes():
    """4 graphs are padded to 6, with 2 nodes at least in each."""
    graphs = trees(*SIZES)
    for i, graph in enumerate(graphs):
        graph.name, graph.weight, graph.label = f"tree {i}", 1.5 + i, torch.tensor(i)
        graph.train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
        graph.root_index = torch.zeros(1, dtype=torch.long)
        graph.kind = torch.full((graph.num_nodes, 2), 7)
    out = PadBatch(follow_batch=["x"])(graphs)
    plain = Batch.from_data_list(graphs, follow_batch=["x"])
    n, e = plain.num_nodes, plain.num_edges
    assert (n, e, out.num_nodes, out.num_edges, out.num_graphs) == (21, 34, 32, 48, 6)
    rows = {"node": n, "edge": e, "graph": 4}
    for kind, number in rows.items():
        mask = out[f"pad_{kind}_mask"]
        assert mask[:number].all()
        assert not mask[number:].any()
    for key, value in plain.items():
        if key not in ("num_nodes", "edge_index", "name"):
            assert torch.equal(out[key][: len(value)], value), key
    assert torch.equal(out.edge_index[:, :e], plain.edge_index)
    assert out.name[:4] == plain.name
    for key in ("x", "edge_attr", "y", "weight", "label", "train_mask", "kind"):
        assert not out[key][len(plain[key]) :].any(), key
    assert out.name[4:] == ["", ""]
    assert out.root_index.tolist() == [0, 5, 6, 18, 21, 27]
    assert out.ptr.tolist() == out.x_ptr.tolist() == [0, 5, 6, 18, 21, 27, 32]
    assert torch.equal(out.x_batch, out.batch)
    source, target = out.edge_index[:, e:]
    assert ((target - source).abs() == 1).all()
    assert torch.equal(out.batch[source], out.batch[target])
    assert (out.batch[source] >= 4).all()
    assert torch.equal(out[2].x, graphs[2].x)
    assert out[5].num_nodes == 5


def test_a_batch_of_a_loader_is_padded_as_a_list_is():
    graphs = [AddEliminationOrder()(graph) for graph in trees(*SIZES)]
    batch = next(iter(DataLoader(graphs, batch_size=4, follow_batch=["y"])))
    given = copy.copy(batch)
    out, like = PadBatch()(batch), PadBatch(follow_batch=["y"])(graphs)
    assert out.to_dict().keys() == like.to_dict().keys()
    for key, value in like.items():
        assert torch.equal(torch.as_tensor(out[key]), torch.as_tensor(value)), key
    assert batch.to_dict().keys() == given.to_dict().keys()
    loader = torch.utils.data.DataLoader(
        graphs, batch_size=4, collate_fn=PadBatch(), num_workers=1
    )
    assert torch.equal(next(iter(loader)).edge_index, out.edge_index)


def test_what_transforms_have_stored_belongs_to_the_padded_graphs():
    add = Compose([AddEliminationOrder(), AddDiameter(), NodeOrder("degree")])
    add.transforms += [AddTopologicalOrder(), LaplacianEncoding(3, is_undirected=False)]
    out = PadBatch()([add(graph) for graph in trees(*SIZES, directed=True)])
    check_stored(out)
    assert torch.equal(out.topological_rank, topological_rank(out.edge_index, 32))
    assert out.elimination_rank.shape == (32,)
    assert out.laplacian_pe.shape == (32, 3, 2)
    other = Batch.from_data_list([AddDiameter()(tree(3)), AddDiameter()(tree(3))])
    padded = PadBatch()(other)
    padded.edge_index = padded.edge_index[:, :8]
    with pytest.raises(ValueError, match="must belong to the edges"):
        check_stored(padded)


def test_few_shapes_in_an_epoch():
    """Sizes as of peptides, mean 151 and standard deviation 84, in tenths."""
    torch.manual_seed(0)
    sizes = (torch.randn(64 * 30) * 0.5).exp() * 13.5 + 2
    graphs = [tree(int(n)) for n in sizes]
    shapes = set()
    for batch in torch.utils.data.DataLoader(graphs, 64, collate_fn=PadBatch()):
        shapes.add((batch.num_nodes, batch.num_edges, batch.num_graphs))
        added = batch.num_graphs - 64
        assert (~batch.pad_node_mask).sum() / added < 1.25 * sizes.mean()
    assert len(shapes) <= 6
    assert len({PadBatch()._size(n) for n in range(1, 4097)}) <= 3 * 12 + 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_sizes_are_on_a_geometric_grid(steps):
    pad = PadBatch(steps)
    sizes = sorted({pad._size(n) for n in range(1, 1025)})
    assert all(pad._size(n) >= n for n in range(1, 1025))
    assert all(pad._size(n) == n for n in sizes)
    assert {2**k for k in range(11)} <= {*sizes}
    assert len([n for n in sizes if 256 < n <= 512]) == steps


def test_limits():
    graphs = trees(*SIZES)
    out = PadBatch(max_num_nodes=25, max_num_edges=34)(graphs)
    assert (out.num_nodes, out.num_edges) == (25, 34)
    assert PadBatch(max_num_nodes=1000)(graphs).num_nodes == 32
    with pytest.raises(ValueError, match="'max_num_nodes' must be at least 25, for a"):
        PadBatch(max_num_nodes=24)(graphs)
    with pytest.raises(ValueError, match="'max_num_edges' must be at least 34"):
        PadBatch(max_num_edges=33)(graphs)


def test_misuse():
    for wrong in (tree(3), HeteroData(), [HeteroData()], [tree(3), 1]):
        with pytest.raises(TypeError, match="a batch of homogeneous graphs or a list"):
            PadBatch()(wrong)
    with pytest.raises(ValueError, match="at least one graph"):
        PadBatch()([])
    for steps, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="'steps' must be an integer"):
            PadBatch(steps)
    for add, key in (
        (AddKHopIndex(2), "k_hop"),
        (DirectedLineGraph(), "line_edge"),
        (lambda data: data.update({"parts": [data.x]}), "parts"),
    ):
        with pytest.raises(ValueError, match=rf"'data.{key}\S*' cannot be padded"):
            PadBatch()([add(graph) for graph in trees(5, 9, directed=True)])


def test_batches_are_padded_once():
    padded = PadBatch()(trees(*SIZES))
    for data in (padded, padded.to_data_list()):
        if isinstance(data, list):
            data[0].pad_node_mask = torch.ones(5, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"no padding yet.*Pad once"):
            PadBatch()(data)


@pytest.mark.parametrize("of_first", [True, False])
def test_attributes_that_some_graphs_lack(of_first):
    graphs = trees(5, 9)
    graphs[0 if of_first else 1].weight = torch.ones(1)
    with pytest.raises(ValueError, match=r"'data.weight' must be an attribute of each"):
        PadBatch()(graphs)
    batch = next(iter(DataLoader(trees(5, 9), 2, follow_batch=["x"])))
    batch.weight = torch.ones(2)
    with pytest.raises(ValueError, match=r"'data.weight' must be an attribute of each"):
        PadBatch()(batch)


POINT = Data(x=torch.randn(1, C), y=torch.ones(1))
PATH = Data(x=torch.randn(5, C), y=torch.ones(5))


@pytest.mark.parametrize("graphs", [[POINT] * 3, [PATH], [PATH, PATH]])
def test_whether_targets_are_of_graphs_or_of_nodes(graphs):
    with pytest.raises(
        ValueError, match=r"'data.y' may belong to graphs.*'graph_attrs'"
    ):
        PadBatch()(graphs)
    out = PadBatch(graph_attrs=["y"])(graphs)
    assert out.y.size(0) == out.num_graphs * graphs[0].y.size(0)
    assert out.x.size(0) == out.num_nodes
    out = PadBatch(graph_attrs=[])(graphs)
    assert out.y.size(0) == out.num_nodes
    out = PadBatch()([PATH, POINT])  # sizes tell
    assert out.y.size(0) == out.num_nodes
    assert out.y[out.pad_node_mask].all()


def test_ranks_are_those_of_this_package_alone():
    graphs = [AddEliminationOrder()(graph) for graph in trees(*SIZES)]
    for graph in graphs:
        graph.pagerank = torch.ones(graph.num_nodes)
        graph.is_rank = torch.ones(graph.num_nodes, dtype=torch.bool)
    out = PadBatch()(graphs)
    assert out.elimination_rank[~out.pad_node_mask].any()
    assert not out.pagerank[~out.pad_node_mask].any()
    assert not out.is_rank[~out.pad_node_mask].any()


def test_grids():
    """Padding is a grid of one row, whether sizes are integers or of a batch."""
    shapes = ((1, 5, 7), (1, 3, 4))
    graphs = [ImageToGraph()(torch.randn(shape)) for shape in shapes]
    layer = GPSLayer(C, mixer=ChimeraGridConv(C))
    structure = {"height": "height", "width": "width"}
    model = GraphModel(1, C, 2, [layer], structure=structure)
    batch = Batch.from_data_list(graphs)
    out = model(**model.inputs(batch))
    for data in (graphs, batch):
        padded = PadBatch()(data)
        sizes = padded.batch.bincount()
        assert torch.equal(padded.height * padded.width, sizes)
        assert padded.height.tolist()[2:] == [1] * (padded.num_graphs - 2)
        got = model(**model.inputs(padded))
        assert_near(got[padded.pad_graph_mask], out, 1e-5)


def test_further_edges_join_the_same_pairs():
    graphs = trees(*SIZES)
    for graph in graphs:
        graph.other_index = graph.edge_index.flip(1)
    out = PadBatch()(graphs)
    added = ~out.pad_edge_mask
    assert torch.equal(out.other_index[:, added], out.edge_index[:, added])


@pytest.mark.parametrize("loops", [0, 1])
def test_undirected_graphs_remain_so(loops):
    graphs = trees(5, 2, 12)
    index = torch.cat([graphs[0].edge_index, torch.zeros(2, loops).long()], 1)
    graphs[0] = Data(x=graphs[0].x, edge_index=index)
    graphs = [Data(x=graph.x, edge_index=graph.edge_index) for graph in graphs]
    out = PadBatch()(graphs)
    assert out.is_undirected()
    added = out.edge_index[:, ~out.pad_edge_mask]
    assert int((added[0] == added[1]).sum()) == loops
    dags = DAGDecomposition()(out)
    x = torch.randn(out.num_nodes, C)
    conv = ChimeraDAGConv(C, edge_dim=None)
    assert conv(x, dags.dag_edge_index[0]).isfinite().all()
    alone = Data(x=graphs[1].x, edge_index=torch.zeros(2, loops).long())
    added = PadBatch()([alone, alone])
    added = added.edge_index[:, ~added.pad_edge_mask]
    assert (added[0] < added[1]).all()  # there is none to be undirected
    mixed = PadBatch()([graphs[0], Data(x=graphs[1].x, edge_index=index[:, :1])])
    added = mixed.edge_index[:, ~mixed.pad_edge_mask]
    assert (added[0] < added[1]).all()


def test_graphs_without_nodes_or_edges():
    nothing = Data(x=torch.randn(0, C), edge_index=torch.empty(2, 0, dtype=torch.long))
    point = Data(x=torch.randn(1, C), edge_index=nothing.edge_index)
    out = PadBatch()([nothing, point])
    assert (out.num_nodes, out.num_edges, out.num_graphs) == (16, 16, 3)
    assert out.ptr.tolist() == [0, 0, 1, 16]
    cloud = PadBatch()([Data(pos=torch.randn(5, 3)), Data(pos=torch.randn(4, 3))])
    assert (cloud.num_nodes, cloud.num_edges) == (16, 0)
    assert cloud.batch.tolist() == [0] * 5 + [1] * 4 + [2] * 7


CONVS = {
    "ChimeraConv": (partial(ChimeraConv, C, edge_dim=3), False),
    "GatedDeltaConv": (partial(GatedDeltaConv, C), False),
    "GraphMambaConv": (partial(GraphMambaConv, C, order="order"), False),
    "KHopAttentionConv": (partial(KHopAttentionConv, C, k=2), False),
    "SelfAttention": (partial(SelfAttention, C), False),
    "ChimeraDAGConv": (partial(ChimeraDAGConv, C), True),
    "PLSTMConv": (partial(PLSTMConv, C), True),
    "RGLRUConv": (partial(RGLRUConv, C), True),
}


def gradients(loss, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_model_on_a_padded_batch(name, norm_first):
    """Outputs, gradients and running statistics are those without padding."""
    make, directed = CONVS[name]
    torch.manual_seed(0)
    pe = AddRandomWalkPE(4, attr_name="pe")
    graphs = [pe(graph) for graph in trees(*SIZES, 9, directed=directed)]
    for graph in graphs:
        graph.pe = graph.pe.double()

    def layer(index: int) -> GPSLayer:
        conv = GatedGCNConv(C, C, edge_dim=C)
        options = {"edge_dim": C} if name == "ChimeraConv" else {}
        return GPSLayer(C, conv, make(**options), norm_first=norm_first)

    model = GraphModel(
        C, C, 2, layer, 2, edge_dim=3, head_norm="batch_norm", head_layers=3,
        norm="batch_norm", encodings={"pe": RandomWalkEncoder(4, 3)},
    ).double()  # fmt: skip
    batch, padded = Batch.from_data_list(graphs), PadBatch()(graphs)
    other = copy.deepcopy(model)
    out, got = model(**model.inputs(batch)), other(**other.inputs(padded))
    assert_near(got[padded.pad_graph_mask], out, 1e-9)
    assert (padded.num_graphs, out.shape) == (7, (5, 2))
    want = gradients((out - batch.y).square().mean(), model)
    rest = (got - padded.y)[padded.pad_graph_mask]
    for x, y in zip(gradients(rest.square().mean(), other), want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-12)
    buffers = dict(other.named_buffers())
    for key, value in model.named_buffers():
        torch.testing.assert_close(buffers[key], value, rtol=1e-9, atol=1e-12)
    model.eval(), other.eval()
    out, got = model(**model.inputs(batch)), other(**other.inputs(padded))
    assert_near(got[padded.pad_graph_mask], out, 1e-9)
    # Without the mask, they would differ: the test above tests something.
    inputs = other.train().inputs(padded)
    wrong = other(**{**inputs, "pad_node_mask": None})[padded.pad_graph_mask]
    assert (wrong - model.train()(**model.inputs(batch))).abs().max() > 1e-4


@pytest.mark.slow
def test_compiles_once_for_each_shape():
    """Also without 'fullgraph': operators break no graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GraphModel(C, C, 2, [ChimeraConv(C)], head_layers=1)
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model.double(), dynamic=False, backend=counted)
    shapes = set()
    for _ in range(20):
        sizes = torch.randint(4, 9, (8,)).tolist()
        batch = PadBatch()(trees(*sizes))
        shapes.add((batch.num_nodes, batch.num_edges, batch.num_graphs))
        inputs = model.inputs(batch)
        with torch.no_grad():
            assert_near(compiled(**inputs), model(**inputs), 1e-9)
    assert 1 < len(shapes) <= 4
    assert counted.frame_count == len(shapes)


def test_the_host_waits_for_no_mask():
    """A padded step without operators of graphs, which a CUDA graph repeats."""
    layers = [GPSLayer(C, GatedGCNConv(C, C, edge_dim=C)) for _ in range(2)]
    model = GraphModel(C, C, 2, layers, edge_dim=3, head_norm="batch_norm").double()
    batch = PadBatch()(trees(*SIZES))
    inputs, rows = model.inputs(batch), batch.pad_graph_mask
    with unchecked(), host_waits() as found:
        loss = (model(**inputs) - batch.y).square().mean(1).where(rows, 0.0)
        (loss.sum() / rows.sum()).backward()
    assert found == set()


@pytest.mark.parametrize("norm", ["batch_norm", "graph_batch_norm"])
def test_a_layer_whose_mixer_has_edges_of_its_own(norm):
    graphs = trees(*SIZES)
    batch, padded = Batch.from_data_list(graphs), PadBatch()(graphs)
    conv, mixer = GatedGCNConv(C, C, norm=norm), GatedGCNConv(C, C, norm=norm)
    options = {"arrangement": "parallel", "norm": norm}
    layer = GPSLayer(C, conv, mixer, **options).double()
    outs = [
        layer(
            data.x, data.edge_index, data.batch,
            mixer_edge_index=data.edge_index.flip(0), **masks,
        )
        for data, masks in (
            (batch, {}), (padded, {"pad_node_mask": padded.pad_node_mask})
        )
    ]  # fmt: skip
    assert_near(outs[1][: batch.num_nodes], outs[0], 1e-9)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_norm_of_few_rows(momentum):
    """Masks of one row, and of none, leave running statistics as they are."""
    for number in (0, 1, 5):
        norm, plain = (GraphBatchNorm(C, momentum=momentum).double() for _ in "12")
        x = torch.randn(6, C).double()
        mask = torch.arange(6) < number
        got = norm(x, torch.arange(6) // 5, mask)
        if number > 0:
            want = plain(x[:number], torch.zeros(number, dtype=torch.long))
            assert_near(got[:number], want, 1e-9)
        for key, value in plain.named_buffers():
            assert_near(dict(norm.named_buffers())[key], value, 1e-9)


def test_padding_within_graphs_is_refused():
    """As by PyG's transform: pooling would count it."""
    graphs = [
        Pad(12, 30, add_pad_mask=True)(Data(torch.randn(n, C), tree(n).edge_index))
        for n in (5, 9)
    ]
    model = GraphModel(C, C, 2, [GPSLayer(C, GatedGCNConv(C, C))])
    for data in (graphs[0], Batch.from_data_list(graphs)):
        with pytest.raises(ValueError, match="must not mark padding in a graph that"):
            model.inputs(data)
        with unchecked():
            assert "pad_node_mask" in model.inputs(data)
    data = graphs[0]
    with pytest.raises(ValueError, match="'batch' must be given with 'pad_node_mask'"):
        model(data.x, data.edge_index, pad_node_mask=data.pad_node_mask)


def test_wrong_masks():
    model = GraphModel(C, C, 2, [GPSLayer(C, GatedGCNConv(C, C))], head="node")
    x, edge_index = torch.randn(4, C), tree(4).edge_index
    for mask in (torch.ones(4), [True] * 4):
        with pytest.raises(TypeError, match="'pad_node_mask' must be a tensor of bool"):
            model(x, edge_index, pad_node_mask=mask)
    for size in ((3,), (4, 1), ()):
        mask = torch.ones(size, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"'pad_node_mask' must be of shape .* = "):
            model(x, edge_index, pad_node_mask=mask)


@pytest.mark.parametrize("norm", ["batch_norm", "graph_batch_norm"])
def test_synchronized_statistics_are_refused_in_training(norm):
    model = GraphModel(C, C, 2, [GPSLayer(C, GatedGCNConv(C, C), norm=norm)], norm=norm)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).double()
    graphs = [Data(g.x, g.edge_index) for g in trees(*SIZES)]
    padded = PadBatch()(graphs)
    with pytest.raises(ValueError, match="must be None in training with a SyncBatchNo"):
        model(**model.inputs(padded))
    batch = Batch.from_data_list(graphs)
    got = model.eval()(**model.inputs(padded))[padded.pad_graph_mask]
    assert_near(got, model(**model.inputs(batch)), 1e-9)


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_one_graph_with_padding(training, with_batch):
    """Of the same graph, as far as the batch vector says."""
    layer = GPSLayer(C, GatedGCNConv(C, C)).double()
    x, edge_index = torch.randn(9, C).double() + 3, tree(9).edge_index
    for _ in range(20):
        layer(x, edge_index)
    mask = torch.arange(12) < 9
    padded = torch.cat([x, 100 * torch.randn(3, C).double()])
    batch = torch.zeros(12, dtype=torch.long) if with_batch else None
    out = copy.deepcopy(layer).train(training)(x, edge_index)
    got = layer.train(training)(padded, edge_index, batch, pad_node_mask=mask)
    assert_near(got[:9], out, 1e-9)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["batch_norm", "graph_batch_norm"])
def test_padding_that_is_not_finite(norm, training):
    norm = Norm(norm, C).double().train(training)
    x = torch.randn(6, C).double()
    batch, mask = torch.arange(6) // 4, torch.arange(6) < 4
    x[4:] = torch.tensor([[float("nan")], [float("inf")]])
    x.requires_grad_()
    norm(x, batch, mask)[:4].square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in norm.parameters())


@pytest.mark.parametrize("head_norm", ["batch_norm", "layer_norm", None])
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_of_all_rows_changes_nothing_in_the_head(head_norm, training):
    options = {"head_norm": head_norm, "head_layers": 3, "dropout": 0.5}
    model = GraphModel(C, C, 2, [], **options).double().train(training)
    x, mask = torch.randn(7, C).double(), torch.ones(7, dtype=torch.bool)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    out = model.mlp(x)
    torch.manual_seed(1)
    assert_near(other._predict(x, mask), out, 1e-9)
    for key, value in model.state_dict().items():
        assert_near(other.state_dict()[key], value, 1e-9)
