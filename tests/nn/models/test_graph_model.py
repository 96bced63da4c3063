from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GCNConv,
    GENConv,
    GINEConv,
    GPSConv,
    SAGEConv,
    Sequential,
)

from pyg_chimera.nn import (
    CategoricalEncoder,
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
)
from pyg_chimera.nn.encoders import LaplacianEncoder, RandomWalkEncoder
from pyg_chimera.transforms import AddEliminationOrder

C = 8


def make_data(num_nodes: int, seed: int, **kwargs: Any) -> Data:
    """A directed cycle with categorical features, labelled by how nodes begin."""
    g = torch.Generator().manual_seed(seed)
    x = torch.stack(
        [torch.randint(n, (num_nodes,), generator=g) for n in (3, 5)], dim=1
    )
    nodes = torch.arange(num_nodes)
    edge_index = torch.stack([nodes, nodes.roll(1)])
    return Data(
        x=x,
        edge_index=edge_index,
        edge_attr=torch.randint(2, (num_nodes, 1), generator=g),
        edge_label_index=torch.randint(num_nodes, (2, 3), generator=g),
        **kwargs,
    )


def make_batch(*sizes: int) -> Batch:
    return Batch.from_data_list(
        [make_data(num_nodes, seed) for seed, num_nodes in enumerate(sizes)]
    )


def gps(index: int) -> GPSLayer:
    conv = GatedGCNConv(C, C, edge_dim=C, update_edges=index == 0)
    return GPSLayer(C, conv, norm="layer_norm")


def make_model(**kwargs: Any) -> GraphModel:
    kwargs.setdefault("edge_dim", [2])
    return GraphModel([3, 5], C, kwargs.pop("out_channels", 2), gps, 2, **kwargs)


HEADS = {
    "graph": {"head": "graph", "out_channels": 2},
    "max": {"head": "graph", "out_channels": 2, "pool": "max", "head_layers": 4},
    "node": {"head": "node", "out_channels": 3},
    "dot": {"head": "edge", "out_channels": 1},
    "mlp": {"head": "edge", "out_channels": 2, "decoder": "mlp"},
}
SHAPES = {"graph": (3, 2), "max": (3, 2), "node": (10, 3), "dot": (9, 1), "mlp": (9, 2)}


@pytest.mark.parametrize("name", HEADS)
def test_a_few_steps_lower_the_loss(name: str) -> None:
    model, batch = make_model(**HEADS[name]), make_batch(4, 3, 3)
    target = torch.randn(SHAPES[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        out = model(**model.inputs(batch))
        assert out.shape == SHAPES[name]
        loss = (out - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", HEADS)
def test_batched_equals_one_by_one(name: str) -> None:
    model = make_model(**HEADS[name], norm="graph_norm").eval()
    batch = make_batch(4, 3, 3)
    single = [model(**model.inputs(data)) for data in batch.to_data_list()]
    torch.testing.assert_close(
        model(**model.inputs(batch)), torch.cat(single), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("pool", ["mean", "sum", "max"])
def test_graph_head_by_hand(pool: str) -> None:
    model = GraphModel(3, C, 2, [], head_layers=1, pool=pool)
    x, batch = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    h = model.node_encoder(x)
    pooled = []
    for i in range(2):
        rows = h[batch == i]
        pooled.append(rows.amax(0) if pool == "max" else getattr(rows, pool)(0))
    expected = model.mlp.lins[0](torch.stack(pooled))
    edge_index = torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(model(x, edge_index, batch=batch), expected)
    torch.testing.assert_close(
        model(x, edge_index, batch=batch, batch_size=3)[:2], expected
    )


def test_edge_heads_by_hand() -> None:
    x, pairs = torch.randn(5, 3), torch.tensor([[0, 4], [1, 1]])
    edge_index = torch.empty(2, 0, dtype=torch.long)

    model = GraphModel(3, C, 1, [], head="edge")
    z = model.mlp(model.node_encoder(x))
    assert z.shape == (5, C)
    expected = torch.stack([z[0] @ z[1], z[4] @ z[1]]).view(2, 1)
    out = model(x, edge_index, edge_label_index=pairs)
    torch.testing.assert_close(out, expected)

    model = GraphModel(3, C, 4, [], head="edge", decoder="mlp")
    z = model.node_encoder(x)
    expected = model.mlp(
        torch.stack([torch.cat([z[0], z[1]]), torch.cat([z[4], z[1]])])
    )
    out = model(x, edge_index, edge_label_index=pairs)
    torch.testing.assert_close(out, expected)


def test_head_widths() -> None:
    assert make_model(head_layers=4).mlp.channel_list == [C, C, C, C, 2]
    assert make_model(head="edge", decoder="mlp").mlp.channel_list == [2 * C, C, 2]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", None])
def test_head_norm(head: str, norm: str | None) -> None:
    model = make_model(**HEADS[head] | {"head_layers": 4}, head_norm=norm)
    found = [type(x).__name__ for x in model.mlp.norms]
    names = {"batch_norm": "BatchNorm", "layer_norm": "LayerNorm", None: "Identity"}
    assert found == 3 * [names[norm]]
    model.eval()
    batch = make_batch(4, 3, 3)
    single = [model(**model.inputs(data)) for data in batch.to_data_list()]
    torch.testing.assert_close(
        model(**model.inputs(batch)), torch.cat(single), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("head_norm", "expected"), [("batch_norm", 0.5), (None, 0.06)])
def test_the_head_keeps_differences_between_graphs(
    head_norm: str | None, expected: float
) -> None:
    torch.manual_seed(0)
    pooled = 1 + 0.1 * torch.randn(128, 64)
    model = GraphModel(1, 64, 64, [GCNConv(64, 64)], head_layers=4, head_norm=head_norm)
    for _ in range(2):
        assert 0.5 < model.mlp(pooled).std(dim=0).mean() / expected < 2
        model.reset_parameters()


def test_inner_products_start_small() -> None:
    torch.manual_seed(0)
    layers = [GPSLayer(64, mixer=torch.nn.Linear(64, 64)) for _ in range(2)]
    model = GraphModel(8, 64, 1, layers, head="edge", decoder="dot", head_layers=2)
    edge_index = torch.randint(200, (2, 800))
    logits = model(torch.randn(200, 8), edge_index, edge_label_index=edge_index)
    assert logits.abs().mean() < 5


@pytest.mark.parametrize("sizes", [(0,), (0, 3), (3, 0), (1,), (1, 1)])
@pytest.mark.parametrize("head_norm", ["batch_norm", None])
def test_small_graphs(sizes: tuple[int, ...], head_norm: str | None) -> None:
    model = make_model(head_norm=head_norm)
    batch = Batch.from_data_list([small_graph(num) for num in sizes])
    out = model(**model.inputs(batch))
    assert out.shape == (len(sizes), 2)
    assert out.isfinite().all()
    if len(sizes) == 1:
        data = small_graph(*sizes)
        torch.testing.assert_close(model(**model.inputs(data)), out)


def small_graph(num_nodes: int) -> Data:
    return Data(
        x=torch.zeros(num_nodes, 2, dtype=torch.long),
        edge_index=torch.empty(2, 0, dtype=torch.long),
        edge_attr=torch.empty(0, 1, dtype=torch.long),
        num_nodes=num_nodes,
    )


def test_float_features_and_lazy_encoders() -> None:
    layer = GPSLayer(C, GINEConv(torch.nn.Linear(C, C)))
    model = GraphModel(-1, C, 2, [layer], edge_dim=-1, head="node")
    x, edge_index = torch.randn(4, 6), torch.tensor([[0, 1], [1, 2]])
    assert model(x, edge_index, torch.randn(2, 3)).shape == (4, 2)
    assert model.node_encoder.in_channels == 6
    assert model.edge_encoder.in_channels == 3
    model = GraphModel(1, C, 2, [GINEConv(torch.nn.Linear(C, C))], edge_dim=1)
    column = torch.randn(4, 1), edge_index, torch.randn(2, 1)
    torch.testing.assert_close(
        model(column[0][:, 0], edge_index, column[2][:, 0]), model(*column)
    )


def test_layers_of_any_kind() -> None:
    x, edge_index = torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    weight = torch.rand(2)
    layers = torch.nn.ModuleList(
        [GCNConv(C, C), SAGEConv(C, C), GPSLayer(C, GCNConv(C, C))]
    )
    model = GraphModel(3, C, 2, layers, head="node").eval()
    assert list(model.layers) == list(layers)
    h = layers[0](model.node_encoder(x), edge_index, weight)
    h = layers[2](layers[1](h, edge_index), edge_index, edge_weight=weight)
    out = model(x, edge_index, edge_weight=weight)
    torch.testing.assert_close(out, model.mlp(h))

    seen = []
    GraphModel(3, C, 2, lambda i: seen.append(i) or GCNConv(C, C), 3)
    assert seen == [0, 1, 2]


def test_structure_from_data() -> None:
    class Ranked(torch.nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, rank: Tensor) -> Tensor:
            return x + rank.view(-1, 1)

    layer = GPSLayer(C, mixer=Ranked(), norm=None, mlp_channels=0)
    structure = {"rank": "elimination_rank"}
    model = GraphModel([3, 5], C, 2, [layer], head="node", structure=structure)
    data = make_data(4, 0, elimination_rank=torch.arange(4))
    batch = next(iter(DataLoader([data, data], batch_size=2)))
    rank = batch.elimination_rank
    assert rank.tolist() == [0, 1, 2, 3] * 2
    inputs = model.inputs(batch)
    assert set(inputs) == {"x", "edge_index", "batch", "rank"}
    h = model.node_encoder(batch.x)
    torch.testing.assert_close(model(**inputs), model.mlp(2 * h + rank.view(-1, 1)))

    model = GraphModel([3, 5], C, 2, [layer], structure={"mixer_rank": "other_rank"})
    data.other_rank = torch.ones(4)
    assert model(**model.inputs(data)).shape == (1, 2)
    with pytest.raises(ValueError, match=r"no attribute 'other_rank', .* 'mixer_rank'"):
        model.inputs(make_data(4, 0))


def encoded(data: Data, k: int = 3) -> Data:
    data.laplacian_pe = torch.randn(data.num_nodes, k, 2)
    data.random_walk_pe = torch.rand(data.num_nodes, 4)
    return data


def with_encodings(**kwargs: Any) -> GraphModel:
    encodings = {
        "laplacian_pe": LaplacianEncoder(4),
        "random_walk_pe": RandomWalkEncoder(4, 3),
    }
    return make_model(encodings=encodings, **kwargs)


def test_encodings_from_data() -> None:
    model = with_encodings(head="node").eval()
    assert model.node_encoder.out_channels == C - 4 - 3
    data = [encoded(make_data(num, num)) for num in (4, 3)]
    batch = Batch.from_data_list(data)
    inputs = model.inputs(batch)
    assert set(inputs["encodings"]) == {"laplacian_pe", "random_walk_pe"}

    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out = model(**inputs)
    assert seen[0].shape == (7, C)
    pe = batch.laplacian_pe, batch.random_walk_pe
    parts = [
        encoder(p) for encoder, p in zip(model.encodings.values(), pe, strict=True)
    ]
    expected = torch.cat([model.node_encoder(batch.x), *parts], dim=1)
    torch.testing.assert_close(seen[0], expected)
    single = torch.cat([model(**model.inputs(graph)) for graph in data])
    torch.testing.assert_close(out, single, atol=1e-5, rtol=1e-5)

    model.train()
    model(**inputs).square().sum().backward()
    for encoder in model.encodings.values():
        assert sum(float(p.grad.abs().sum()) for p in encoder.parameters()) > 0


def test_encodings_and_the_rest_of_a_model() -> None:
    model, data = with_encodings().eval(), encoded(make_data(4, 0))
    inputs = model.inputs(data)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), model(**inputs))
    other = with_encodings()
    for fresh in (model, other):
        torch.manual_seed(1)
        fresh.reset_parameters()
    torch.testing.assert_close(model.state_dict(), other.state_dict())

    del data.random_walk_pe
    with pytest.raises(ValueError, match=r"'random_walk_pe', which 'encodings' has"):
        model.inputs(data)
    del inputs["encodings"]["random_walk_pe"]
    with pytest.raises(
        ValueError, match=r"must hold \['lapl.*, got \['laplacian_pe'\]"
    ):
        model(**inputs)
    with pytest.raises(ValueError, match=r"'encodings' must hold \[\], .*, got \['l"):
        make_model()(**inputs)
    too_wide = {"laplacian_pe": LaplacianEncoder(C)}
    with pytest.raises(ValueError, match=f"than 'channels', {C}, got {C}"):
        make_model(encodings=too_wide)


def test_compiled_layer() -> None:
    layer = GPSLayer(C, GCNConv(C, C)).eval()
    compiled = torch.compile(layer, backend="eager")
    x, edge_index = torch.randn(4, C), torch.tensor([[0, 1], [1, 2]])
    model = GraphModel(C, C, 2, [compiled], head="node").eval()
    out = model(x, edge_index, edge_weight=torch.rand(2))
    assert out.shape == (4, 2)
    assert not torch.equal(out, model(x, edge_index))


def test_adj_t_in_data() -> None:
    model = GraphModel([3, 5], C, 2, [GPSLayer(C, SAGEConv(C, C))]).eval()
    data = make_data(4, 0)
    out = model(**model.inputs(data))
    adj = torch.sparse_coo_tensor(data.edge_index.flip(0), torch.ones(4), (4, 4))
    data.adj_t, data.edge_index = adj.coalesce(), None
    torch.testing.assert_close(model(**model.inputs(data)), out)


def test_explainer() -> None:
    explainer = Explainer(
        make_model(),
        GNNExplainer(epochs=2),
        explanation_type="model",
        edge_mask_type="object",
        model_config={
            "mode": "regression",
            "task_level": "graph",
            "return_type": "raw",
        },
    )
    data = make_data(5, 0)
    explanation = explainer(data.x, data.edge_index, edge_attr=data.edge_attr)
    assert explanation.edge_mask.shape == (5,)
    assert (explanation.edge_mask > 0).all()


@pytest.mark.parametrize("name", ["max", "mlp"])
def test_compiles_without_graph_break(name: str) -> None:
    model = GraphModel(
        [3, 5],
        C,
        HEADS[name]["out_channels"],
        lambda i: GPSLayer(C, GatedGCNConv(C, C, edge_dim=C)),
        2,
        edge_dim=[2],
        **{key: v for key, v in HEADS[name].items() if key != "out_channels"},
    ).eval()
    inputs = model.inputs(make_batch(4, 3, 3))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), model(**inputs))


def released(num_layers: int) -> GraphModel:
    def layer(index: int) -> GPSLayer:
        return GPSLayer(
            64,
            conv=GatedGCNConv(64, 64, edge_dim=64, act="gelu"),
            mixer=ChimeraConv(64, 64, heads=2, edge_dim=64),
            arrangement="sequential",
            norm_first=True,
            dropout=0.1,
            act="gelu",
        )

    return GraphModel(
        [3, 5],
        64,
        10,
        layer,
        num_layers,
        edge_dim=[2],
        head_layers=4,
        act="gelu",
        structure={"rank": "elimination_rank"},
    )


def test_released_recipe() -> None:
    model = released(8)
    data = [make_data(num, 0, elimination_rank=torch.arange(num)) for num in (7, 5, 9)]
    batch = Batch.from_data_list(data)
    out = model(**model.inputs(batch))
    assert out.shape == (3, 10)
    out.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    single = [model.eval()(**model.inputs(d)) for d in data]
    out = model(**model.inputs(batch))
    torch.testing.assert_close(out, torch.cat(single), atol=1e-4, rtol=1e-4)


def test_categorical_encoder() -> None:
    encoder = CategoricalEncoder([3, 5], 4)
    first, second = (embedding.weight for embedding in encoder.embeddings)
    out = encoder(torch.tensor([[2, 0], [1, 4]]))
    expected = torch.stack([first[2] + second[0], first[1] + second[4]])
    torch.testing.assert_close(out, expected)
    single = CategoricalEncoder([3], 4)
    torch.testing.assert_close(
        single(torch.tensor([2, 0])), single.embeddings[0].weight[[2, 0]]
    )
    assert encoder(torch.empty(0, 2, dtype=torch.long)).shape == (0, 4)


def test_encoder_errors() -> None:
    encoder = CategoricalEncoder([3, 5], 4)
    for categories in ([], [3, 0]):
        with pytest.raises(ValueError, match="'num_categories' must be"):
            CategoricalEncoder(categories, 4)
    with pytest.raises(TypeError, match=r"needs integers, got torch\.float32"):
        encoder(torch.randn(2, 2))
    for shape in ([2, 3], [2]):
        with pytest.raises(ValueError, match="Expected 2 columns"):
            encoder(torch.zeros(shape, dtype=torch.long))
    for row in ([3, 0], [-1, 0]):
        with pytest.raises(ValueError, match=r"num_categories=\[3, 5\]; got up to"):
            encoder(torch.tensor([row]))


def test_errors() -> None:
    data = make_data(4, 0)
    for kwargs, message in (
        ({"head": "graphs"}, "'head' must be .* got 'graphs'"),
        ({"decoder": "cos"}, "'decoder' must be .* got 'cos'"),
        ({"head": "edge"}, "'out_channels' must be 1 .* got 2"),
        ({"head_norm": "graph_norm"}, "'head_norm' must be .* got 'graph_norm'"),
        ({"head_layers": 0}, "'head_layers' must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_model(**kwargs)
    with pytest.raises(ValueError, match=r"'num_layers' must be .* got None"):
        GraphModel(3, C, 2, gps)
    with pytest.raises(ValueError, match="'num_layers' is 3, but 'layers' has 1"):
        GraphModel(3, C, 2, [gps(0)], 3)
    with pytest.raises(ValueError, match="'edge_attr' is missing"):
        make_model()(data.x, data.edge_index)
    with pytest.raises(ValueError, match="'edge_attr' is given"):
        make_model(edge_dim=None)(data.x, data.edge_index, data.edge_attr)
    model = make_model(head="edge", out_channels=1)
    for bad in (data.edge_index - 1, data.edge_index + data.num_nodes):
        with pytest.raises(ValueError, match=r"'edge_label_index' must hold node ind"):
            model(data.x, data.edge_index, data.edge_attr, edge_label_index=bad)
    with pytest.raises(ValueError, match=r"'edge_label_index' must .* got none"):
        model(data.x, data.edge_index, data.edge_attr)
    with pytest.raises(ValueError, match=r"'edge_label_index' must .* got one"):
        make_model()(
            data.x, data.edge_index, data.edge_attr, edge_label_index=data.edge_index
        )
    with pytest.raises(ValueError, match="'edge_dim' is 3, but no layer reads edge"):
        GraphModel(3, C, 2, [GPSLayer(C, GCNConv(C, C))], edge_dim=3)
    with pytest.raises(TypeError, match=r"'layers' must be a list .* single GPSLayer"):
        GraphModel(3, C, 2, gps(0), 3)
    with pytest.raises(TypeError, match="'ranks' is not a parameter"):
        make_model()(data.x, data.edge_index, data.edge_attr, ranks=data.x)
    with pytest.raises(TypeError, match=r"'x' must hold floating .* torch\.int64"):
        GraphModel(2, C, 2, gps, 1)(data.x, data.edge_index)


@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_in_wrappers_get_what_they_take(when):
    """Those of PyTorch, whose forward methods take anything."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    def layer(_):
        block = GPSLayer(
            C, GatedGCNConv(C, C, edge_dim=C), ChimeraConv(C, C, edge_dim=C)
        )
        return wrappers.checkpoint_wrapper(block) if when == "before" else block

    structure = {"rank": "elimination_rank"}
    model = GraphModel([3, 5], C, 2, layer, 2, edge_dim=[2], structure=structure)
    if when == "after":
        wrappers.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, GPSLayer)
        )
    model.eval()
    graphs = [make_data(n, n) for n in (3, 6)]
    for data in graphs:
        data.edge_index = torch.randint(data.num_nodes, (2, 12))
        data.edge_attr = torch.randint(2, (12, 1))
    graphs = [AddEliminationOrder()(data) for data in graphs]
    batch = Batch.from_data_list(graphs)
    out = model(**model.inputs(batch))
    each = [model(**model.inputs(data)) for data in graphs]
    assert torch.allclose(out, torch.cat(each), atol=1e-5)
    batch.edge_attr = 1 - batch.edge_attr
    assert not torch.allclose(out, model(**model.inputs(batch)), atol=1e-3)


def test_pairs_that_are_no_edge_features_are_refused():
    class Layer(torch.nn.Module):
        def forward(self, x, edge_index):
            return x, edge_index

    data = make_data(4, 0)
    model = GraphModel([3, 5], C, 2, [Layer()])
    with pytest.raises(ValueError, match="Layer 0 must return nodes, or a pair of"):
        model(**model.inputs(data))


def test_layers_that_do_not_say_what_they_take_are_refused():
    class Layer(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return args[0]

    with pytest.raises(TypeError, match="'forward' of Layer must name what it takes"):
        GraphModel([3, 5], C, 2, [Layer()])


def test_an_attribute_of_ones_own_layer_called_accepts_is_not_called():
    class Own(torch.nn.Module):
        accepts = True

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x

    model = GraphModel(C, C, 2, [Own(), Own()], head="node")
    edge_index = torch.tensor([[0, 1], [1, 0]])
    assert model(torch.randn(2, C), edge_index).shape == (2, 2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GatedGCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None):
        return self.conv(x, edge_index, batch=batch)


KINDS = ["bare", "in a sequence", "sequence in a layer", "in a block"]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_know_that_a_graph_alone_is_one(kind: str) -> None:
    """As in a batch: `GatedGCNConv` takes no batch to mean that graphs are unknown."""
    layer: torch.nn.Module = GatedGCNConv(C, C)
    if kind != "bare":
        layer = Sequential("x, edge_index, edge_attr, batch", [
            (layer, "x, edge_index, edge_attr, batch -> x"),
        ])  # fmt: skip
    if kind == "in a block":
        layer = Block()
    if kind == "sequence in a layer":
        layer = GPSLayer(C, layer)
    model = GraphModel([3, 5], C, 2, [layer], head="node")
    graphs = [make_data(4, 0), make_data(6, 1)]
    batch = Batch.from_data_list(graphs)
    for _ in range(20):
        model(**model.inputs(batch))
    model.eval()
    alone = torch.cat([model(**model.inputs(data)) for data in graphs])
    torch.testing.assert_close(model(**model.inputs(batch)), alone)


def test_gps_conv_reads_edge_features() -> None:
    conv = GPSConv(C, GINEConv(torch.nn.Linear(C, C)))
    model = GraphModel([3, 5], C, 2, [conv], edge_dim=2, head="node").eval()
    data = make_data(4, 0)
    x, index = data.x, torch.tensor([[0, 1], [1, 2]])
    out = [model(x, index, edge_attr=torch.randn(2, 2)) for _ in range(2)]
    assert not torch.allclose(*out)
    with pytest.raises(ValueError, match="no layer reads edge features"):
        GraphModel([3, 5], C, 2, [GPSConv(C, GCNConv(C, C))], edge_dim=2)

    class Plain(GPSConv):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None):
            return super().forward(x, edge_index, batch)

    model = GraphModel([3, 5], C, 2, [Plain(C, GENConv(C, C))], head="node")
    assert model(x, index).shape == (4, 2)


def test_no_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'in_channels' must be positive.*Constant"):
        GraphModel(0, C, 2, [gps(0)])
    with pytest.raises(ValueError, match=r"'in_channels' must be positive.*Constant"):
        GatedGCNConv((4, 0), C)
    x, index = torch.ones(3, 0), torch.tensor([[0, 1], [1, 2]])
    for module in (GraphModel(-1, C, 2, [gps(0)]), GatedGCNConv(-1, C)):
        with pytest.raises(ValueError, match="'x' must have features"):
            module(x, index)
