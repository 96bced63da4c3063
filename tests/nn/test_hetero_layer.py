"""A layer on types of nodes and edges, next to the layer on a graph merged by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.typing
from asserts import assert_near
from torch import Tensor
from torch_geometric.data import Batch, HeteroData
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_hetero_masks
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GINEConv, GPSConv, HeteroConv, SAGEConv
from torch_geometric.nn import Sequential as GraphSequential

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    HeteroLayer,
    KHopAttentionConv,
    PLSTMConv,
    SelfAttention,
)
from pyg_chimera.ops import unchecked

C = 8
LIKES, SIMILAR, SHOWN = (
    ("user", "likes", "film"), ("film", "similar", "film"), ("film", "shown", "cinema")
)  # fmt: skip
SIZES = {"cinema": 2, "film": 4, "user": 3}
WIDTHS = {"user": 5, "film": 3, "cinema": 2}
RATED = {LIKES: 2, SHOWN: 1}
METADATA = (["user", "film", "cinema"], [LIKES, SIMILAR, SHOWN])


def drawn(sizes: dict[str, int] = SIZES) -> HeteroData:
    """A DAG, with edge features of two types."""
    data = HeteroData()
    for name, size in sizes.items():
        data[name].x = torch.randn(size, WIDTHS[name], dtype=torch.double)
    for key in (SIMILAR, LIKES, SHOWN):  # not the order of METADATA
        index = torch.stack([torch.randint(sizes[name], (5,)) for name in key[::2]])
        if key == SIMILAR:
            index = index.sort(dim=0).values
            index = index[:, index[0] != index[1]]
        data[key].edge_index = index
        if key in RATED:
            data[key].edge_attr = torch.randn(5, RATED[key], dtype=torch.double)
    return data


def gps(mixer: torch.nn.Module) -> GPSLayer:
    return GPSLayer(
        C, GatedGCNConv(C, C, edge_dim=C, norm="layer_norm"), mixer, norm="layer_norm"
    )


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "ChimeraConv": lambda: ChimeraConv(C, edge_dim=C),
    "ChimeraDAGConv": lambda: ChimeraDAGConv(C, edge_dim=C),
    "GatedDeltaConv": lambda: GatedDeltaConv(C, edge_dim=C, acyclic=True),
    "KHopAttentionConv": lambda: KHopAttentionConv(C, k=2, edge_dim=C),
    "PLSTMConv": lambda: PLSTMConv(C, edge_dim=C),
    "GPSLayer": lambda: gps(ChimeraConv(C, edge_dim=C)),
    "GPSLayer-attention": lambda: gps(SelfAttention(C, 2)),
    "GATConv": lambda: GATConv(C, C, edge_dim=C, add_self_loops=False),
    "GINEConv": lambda: GINEConv(torch.nn.Linear(C, C)),
    # Which mixes up the nodes of graphs that are not side by side.
    "GPSConv": lambda: GPSConv(C, GINEConv(torch.nn.Linear(C, C)), 2, norm=None),
    "GraphModel": lambda: GraphModel(
        C, C, C, [ChimeraConv(C, edge_dim=C), KHopAttentionConv(C, edge_dim=C)],
        edge_dim=C, head="node",
    ),
    "Sequential": lambda: GraphSequential(
        "x, edge_index, edge_attr", [
            (PLSTMConv(C, edge_dim=C), "x, edge_index, edge_attr -> x"),
            (ChimeraConv(C, edge_dim=C), "x, edge_index, edge_attr -> x"),
        ],
    ),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def made(name: str, **kwargs: Any) -> HeteroLayer:
    kwargs = {"edge_dim": RATED, "in_channels": WIDTHS, **kwargs}
    return HeteroLayer(LAYERS[name](), C, METADATA, **kwargs).double().eval()


def called(layer: torch.nn.Module, data: HeteroData) -> dict[str, Tensor]:
    given = (data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    return layer(*given, data.batch_dict if "batch" in data["film"] else None)


def assert_same(out: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(out) == set(expected)
    for name, x in out.items():
        assert_near(x, expected[name], 1e-8, name)


def by_hand(layer: HeteroLayer, data: HeteroData) -> dict[str, Tensor]:
    """By PyG's conversion, node by node and edge by edge."""
    graph = data.to_homogeneous()
    nodes, edges = [], []
    for name in graph._node_type_names:
        nodes += [layer.lins[name](x) for x in data[name].x]
    for key in graph._edge_type_names:
        vector = layer.type_vectors.weight[METADATA[1].index(key)]
        rows = data[key].edge_attr if key in RATED else data[key].edge_index[0]
        lin = layer.edge_lins[key] if key in RATED else lambda _: 0
        edges += [vector + lin(row) for row in rows]
    x, edge_attr = torch.stack(nodes), torch.stack(edges)
    out = layer.layer(x, graph.edge_index, edge_attr=edge_attr)
    out = out[0] if isinstance(out, tuple) else out
    kinds = enumerate(graph._node_type_names)
    return {name: out[graph.node_type == i] for i, name in kinds}


@every_layer
def test_as_on_the_homogeneous_graph(name: str):
    layer, data = made(name), drawn()
    assert_same(called(layer, data), by_hand(layer, data))


def test_gradients_reach_all_parameters_and_types():
    layer, data = made("GPSLayer"), drawn()
    grads = []
    for function in (called, by_hand):
        layer.zero_grad()
        sum(x.sin().sum() for x in function(layer, data).values()).backward()
        grads.append({name: x.grad.clone() for name, x in layer.named_parameters()})
    for name, grad in grads[0].items():
        assert_near(grad, grads[1][name], 1e-8, name)
    assert (grads[0]["type_vectors.weight"].abs().sum(dim=1) > 0).all()


@every_layer
def test_permutations_of_the_nodes_of_a_type(name: str):
    layer, data = made(name), drawn()
    expected = called(layer, data)
    order = torch.randperm(SIZES["film"])
    data["film"].x = data["film"].x[order]
    for key, side in ((LIKES, 1), (SIMILAR, 0), (SIMILAR, 1), (SHOWN, 0)):
        index = data[key].edge_index.clone()
        index[side] = order.argsort()[index[side]]
        data[key].edge_index = index
    assert_same(called(layer, data), {**expected, "film": expected["film"][order]})


@every_layer
@pytest.mark.filterwarnings("ignore:'edge_weight' makes I - A:UserWarning")
def test_batches_and_nan(name: str):
    """Graphs of a batch give what they give alone; NaN stays in its graph."""
    layer = made(name)
    graphs = [drawn(), drawn({"cinema": 1, "film": 3, "user": 6}), drawn()]
    expected = [called(layer, graph) for graph in graphs]
    for spoilt in (False, True):
        if spoilt:
            graphs[1]["user"].x[:, 1] = torch.nan
        batch = Batch.from_data_list(graphs)
        with unchecked():
            out = called(layer, batch)
        for i in {0, 1, 2} - {1 if spoilt else -1}:
            own = {key: x[batch[key].batch == i] for key, x in out.items()}
            assert_same(own, expected[i])
    assert out["film"][batch["film"].batch == 1].isnan().any()


@pytest.mark.parametrize("name", ["ChimeraConv", "GPSLayer"])
def test_edge_masks_reach_the_layer(name: str):
    """A mask of zeros is no edges, one of ones is all; and nothing is left behind."""
    layer, data = made(name), drawn()
    out = called(layer, data)
    index = {key: data[key].edge_index for key in METADATA[1]}
    ones = {key: torch.ones(5, dtype=torch.double) for key in METADATA[1]}
    ones[SIMILAR] = ones[SIMILAR][: index[SIMILAR].size(1)]
    none = data.clone()
    for key in METADATA[1]:
        none[key].edge_index = index[key][:, :0]
        if key in RATED:
            none[key].edge_attr = data[key].edge_attr[:0]
    cut, zeros = called(layer, none), {key: 0 * x for key, x in ones.items()}
    set_hetero_masks(layer, zeros, index, apply_sigmoid=False)
    assert_same(called(layer, data), cut)
    set_hetero_masks(layer, {**ones, LIKES: zeros[LIKES]}, index, apply_sigmoid=False)
    assert not torch.allclose(called(layer, data)["film"], out["film"])
    set_hetero_masks(layer, ones, index, apply_sigmoid=False)
    assert_same(called(layer, data), out)
    mask = {key: x[:2] for key, x in ones.items()}
    set_hetero_masks(layer, mask, index, apply_sigmoid=False)
    with pytest.raises(ValueError, match=r"Of type .*: an edge mask must have"):
        called(layer, data)
    clear_masks(layer)
    assert_same(called(layer, data), out)


def test_an_explainer_of_several_types():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = HeteroLayer(gps(ChimeraConv(C, edge_dim=C)), C, METADATA)

        def forward(self, x_dict, edge_index_dict):
            return self.layer(x_dict, edge_index_dict)["film"]

    data = drawn()
    for name in METADATA[0]:
        data[name].x = data[name].x.float()
    data[LIKES].edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
    data[SIMILAR].edge_index = torch.tensor([[0], [2]])
    data[SHOWN].edge_index = torch.tensor([[0, 1, 2], [0, 0, 1]])
    model = Model().eval()
    model(data.x_dict, data.edge_index_dict)
    explainer = Explainer(
        model, GNNExplainer(epochs=2), explanation_type="model",
        node_mask_type="attributes", edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification", "task_level": "node",
            "return_type": "raw",
        },
    )  # fmt: skip
    found = explainer(data.x_dict, data.edge_index_dict, index=torch.tensor([2]))
    read = {key: (mask > 0).tolist() for key, mask in found.edge_mask_dict.items()}
    assert read == {LIKES: [True, True, False], SIMILAR: [True], SHOWN: [False] * 3}
    assert model.layer.layer.mixer.explain is None


def test_missing_types():
    """Nodes and edges that a sample lacks change nothing, except for nodes left out."""
    layer, data = made("ChimeraConv"), drawn()
    data[LIKES].edge_index = data[LIKES].edge_index[:, :0]
    data[LIKES].edge_attr = data[LIKES].edge_attr[:0]
    del data[SIMILAR]
    expected = called(layer, data)
    del data[LIKES]
    assert_same(called(layer, data), expected)
    del data["user"]
    del expected["user"]
    assert_same(called(layer, data), expected)
    only = {"user": torch.randn(2, 5, dtype=torch.double)}
    assert layer(only, {})["user"].shape == (2, C)
    assert layer({}, {}) == {}
    empty = {name: x[:0] for name, x in data.x_dict.items()}
    assert {name: x.shape for name, x in layer(empty, {}).items()} == {
        "film": (0, C), "cinema": (0, C)
    }  # fmt: skip


def test_types_without_features():
    """PyG has 0 for these in `data.num_edge_features`."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(METADATA[1], 0) | RATED
    layer = HeteroLayer(ChimeraConv(C, edge_dim=C), C, METADATA, edge_dim=sizes)
    assert [*layer.edge_lins.keys()] == [*RATED]
    layer, data = layer.double(), drawn()
    assert_same(called(layer, data), by_hand(layer, data))
    with pytest.raises(ValueError, match=r"'edge_dim' must be .* >= -1.*got -2"):
        HeteroLayer(ChimeraConv(C, edge_dim=C), C, METADATA, edge_dim=-2)


def test_lazy():
    torch.manual_seed(0)
    layer = HeteroLayer(
        ChimeraConv(-1, C, edge_dim=-1), C, METADATA, edge_dim=dict.fromkeys(RATED, -1)
    )
    layer = copy.deepcopy(layer).double()
    data = drawn()
    partial = data.clone()
    del partial["user"], partial[LIKES]
    called(layer, partial)  # the first batch has no users
    assert layer.lins["user"].in_channels == -1
    assert_same(called(layer, data), by_hand(layer, data))
    assert layer.lins["user"].in_channels == 5
    layer.reset_parameters()
    assert_same(called(layer, data), by_hand(layer, data))


class TwoLayers(torch.nn.Module):
    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            HeteroLayer(gps(ChimeraConv(C, edge_dim=C)), C, metadata) for _ in range(2)
        )

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        for layer in self.layers:
            x_dict = layer(x_dict, edge_index_dict)
        return x_dict


def test_a_model_of_two_layers_learns_and_compiles():
    torch.manual_seed(0)
    data, model = drawn(), TwoLayers(METADATA).double()
    given = (data.x_dict, data.edge_index_dict)
    model(*given)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    target = torch.tensor([1.0, -2, 3, -4])
    losses = []
    for _ in range(30):
        loss = (model(*given)["film"].sum(dim=1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*given), model(*given))


needs_sampling = pytest.mark.skipif(
    not torch_geometric.typing.WITH_PYG_LIB
    and not torch_geometric.typing.WITH_TORCH_SPARSE,
    reason="needs pyg-lib or torch-sparse",
)


@needs_sampling
def test_neighbour_batches():
    data = drawn({"cinema": 5, "film": 40, "user": 60})
    model = TwoLayers(METADATA).double()
    loader = NeighborLoader(data, [2, 2], batch_size=4, input_nodes="film")
    seen = 0
    for part in loader:
        out = model(part.x_dict, part.edge_index_dict)
        assert {name: x.size(0) for name, x in out.items()} == part.num_nodes_dict
        assert out["film"].isfinite().all()
        seen += part["film"].batch_size
    assert seen == 40


@pytest.mark.filterwarnings("ignore:Sparse invariant.*:UserWarning")
def test_sparse_adjacencies():
    layer, data = made("ChimeraConv"), drawn()
    data = data.coalesce()
    expected = called(layer, data)
    graphs = {}
    for key, index in data.edge_index_dict.items():
        values = data[key].edge_attr if key in RATED else torch.ones(index.size(1))
        size = (SIZES[key[2]], SIZES[key[0]], *values.shape[1:])
        graphs[key] = torch.sparse_coo_tensor(index.flip(0), values, size).coalesce()
    assert_same(layer(data.x_dict, graphs), expected)
    graphs[LIKES] = graphs[SHOWN]
    with pytest.raises(ValueError, match=r"Of type \('user', .* size .* \[4, 3\]"):
        layer(data.x_dict, graphs)


def test_unknown_types_are_named():
    layer, data = made("ChimeraConv"), drawn()
    x, edges, attrs = data.x_dict, data.edge_index_dict, data.edge_attr_dict
    by = ("film", "by", "user")
    for given, message in (
        (
            ({**x, "actor": x["user"]}, edges),
            r"'x_dict' .*'actor'.* known are",
        ),
        ((x, {by: edges[SIMILAR]}), r"'edge_index_dict' .*'by'.* known are .*'likes'"),
        ((x, edges, {SIMILAR: attrs[LIKES]}), r"'edge_attr_dict' .*'similar'.*'likes'"),
        ((x, edges, attrs, {"film": torch.zeros(4).long()}), r"'x_dict' .*'user'"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*given)
    with pytest.raises(ValueError, match=r"'metadata' .*'actor'.* known are"):
        HeteroLayer(layer.layer, C, (["film"], [("actor", "in", "film")]))
    for kwargs in ({"in_channels": {"actor": 3}}, {"in_channels": {"film": 3}},
                   {"edge_dim": {by: 3}}):  # fmt: skip
        with pytest.raises(ValueError, match=f"'{next(iter(kwargs))}'.* known"):
            HeteroLayer(layer.layer, C, METADATA, **kwargs)


def test_wrong_inputs_name_their_type():
    layer, data = made("ChimeraConv"), drawn()
    x, edges, attrs = data.x_dict, data.edge_index_dict, data.edge_attr_dict
    wrong = edges[LIKES].clone()
    wrong[1, 0] = 4  # a number of a node of the next type, if types are merged
    film = r"Of type 'film': "
    likes = r"Of type \('user', 'likes', 'film'\): "
    for error, given, message in (
        (ValueError, ({**x, "film": x["user"]}, edges), film + r".*\[nodes, 3\]"),
        (TypeError, ({**x, "film": torch.ones(4, 3).int()}, edges), film + "'x'"),
        (ValueError, (x, {LIKES: wrong}, attrs), likes + "'edge_index' .* 4 target"),
        (ValueError, ({"film": x["film"]}, edges, attrs), likes + ".* 0 source"),
        (TypeError, (x, {LIKES: edges[LIKES].double()}), likes + "'edge_index'"),
        (ValueError, (x, edges), likes + "'edge_attr' must be given"),
        (ValueError, (x, edges, {**attrs, LIKES: attrs[LIKES][1:]}), likes + ".*a row"),
        (
            ValueError, (x, edges, attrs, {**dict.fromkeys(x, torch.zeros(2).long())}),
            "Of type 'user': 'batch'",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            layer(*given)


def test_layers_that_cannot_tell_types_apart():
    for conv in (GraphMambaConv(C), ChimeraConv(C), SAGEConv(C, C),
                 GPSLayer(C, mixer=GraphMambaConv(C))):  # fmt: skip
        with pytest.raises(ValueError, match="'layer' must read 'edge_attr'"):
            HeteroLayer(conv, C, METADATA)
    pooling = GraphModel(C, C, 1, [ChimeraConv(C, edge_dim=C)], edge_dim=C)
    layer = HeteroLayer(pooling, C, METADATA, edge_dim=RATED).double()
    with pytest.raises(ValueError, match="'layer' must return a row for each of 9"):
        called(layer, drawn())


def test_layers_on_pairs_of_types_refer_to_this_one():
    data = drawn()
    conv = HeteroConv({LIKES: ChimeraConv(C), LIKES[::-1]: ChimeraConv(C)})
    with pytest.raises(TypeError, match=r"several types of nodes, see .*HeteroLayer"):
        conv(data.x_dict, data.edge_index_dict)


def test_repr():
    layer = HeteroLayer(ChimeraConv(C, edge_dim=C), C, METADATA)
    assert repr(layer).startswith("HeteroLayer(ChimeraConv(")
    types = f"8, node_types={METADATA[0]}, edge_types={METADATA[1]}"
    assert repr(layer).endswith(f"{types})")


def test_norms_know_that_a_graph_alone_is_one():
    key = ("a", "to", "a")
    layer = HeteroLayer(
        GatedGCNConv(8, 8, edge_dim=8), 8, (["a"], [key]), in_channels=3
    )
    edges = {key: torch.tensor([[0, 1, 2], [1, 2, 0]])}
    xs = [torch.randn(3, 3) for _ in range(2)]
    both = {key: torch.cat([edges[key], edges[key] + 3], dim=1)}
    batch = {"a": torch.tensor([0, 0, 0, 1, 1, 1])}
    for _ in range(20):
        layer({"a": torch.cat(xs)}, both, batch_dict=batch)
    layer.eval()
    alone = torch.cat([layer({"a": x}, edges)["a"] for x in xs])
    assert_near(layer({"a": torch.cat(xs)}, both, batch_dict=batch)["a"], alone, 1e-5)
