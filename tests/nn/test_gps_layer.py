import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import (
    Linear,
    MultiheadAttention,
    ReLU,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from torch.nn.utils.parametrize import (
    register_parametrization,
    remove_parametrizations,
)
from torch_geometric.nn import (
    CGConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GeneralConv,
    GINConv,
    GINEConv,
    GPSConv,
    GraphConv,
    GraphSizeNorm,
    InstanceNorm,
    MeanSubtractionNorm,
    MessagePassing,
    PairNorm,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    Sequential,
    TransformerConv,
    attention,
)
from torch_geometric.utils import to_dense_batch

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
)

C = 8
EDGE_INDEX = torch.tensor([[0, 1, 2, 2, 3, 5, 6, 6], [1, 2, 0, 1, 3, 4, 4, 5]])
BATCH = torch.tensor([0, 0, 0, 1, 2, 2, 2])

CONVS: dict[str, Callable[[], torch.nn.Module]] = {
    "GATConv": lambda: GATConv(C, C // 2, heads=2, edge_dim=C),
    "GATv2Conv": lambda: GATv2Conv(C, C, heads=2, concat=False, edge_dim=C),
    "GATv2Conv without edges": lambda: GATv2Conv(C, C),
    "GCNConv": lambda: GCNConv(C, C),
    "CGConv without edges": lambda: CGConv(C),
    "GENConv": lambda: GENConv(C, C),
    "GeneralConv": lambda: GeneralConv(C, C, in_edge_channels=C),
    "GeneralConv without edges": lambda: GeneralConv(C, C),
    "GPSConv": lambda: GPSConv(C, GINEConv(Linear(C, C))),
    "GPSConv without edges": lambda: GPSConv(C, GCNConv(C, C)),
    "GINConv": lambda: GINConv(Linear(C, C)),
    "GINEConv": lambda: GINEConv(Linear(C, C)),
    "GraphConv": lambda: GraphConv(C, C),
    "PNAConv": lambda: PNAConv(
        C, C, ["mean", "max"], ["identity"], torch.tensor([1, 2, 3]), edge_dim=C
    ),
    "ResGatedGraphConv": lambda: ResGatedGraphConv(C, C, edge_dim=C),
    "ResGatedGraphConv without edges": lambda: ResGatedGraphConv(C, C),
    "SAGEConv": lambda: SAGEConv((C, C), C),
    "TransformerConv": lambda: TransformerConv(C, C, edge_dim=C),
    "Sequential": lambda: Sequential(
        "x, edge_index, edge_attr",
        [(GATConv(C, C, edge_dim=C), "x, edge_index, edge_attr -> x"), ReLU()],
    ),
    "compiled": lambda: torch.compile(GINEConv(Linear(C, C)), backend="eager"),
    "GatedGCNConv": lambda: GatedGCNConv(C, C, edge_dim=C),
    "ChimeraConv": lambda: ChimeraConv(C, C, heads=2, state_channels=4, edge_dim=C),
}
TAKES_EDGES = {
    "GPSConv",
    "GeneralConv",
    "ChimeraConv",
    "GATConv",
    "GATv2Conv",
    "GENConv",
    "GINEConv",
    "GatedGCNConv",
    "PNAConv",
    "ResGatedGraphConv",
    "Sequential",
    "TransformerConv",
    "compiled",
}


class NodeModule(torch.nn.Module):
    """A mixer that takes no edges: the mean of the other nodes in the graph."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        same = (batch[:, None] == batch).to(x.dtype)
        return same @ x / same.sum(dim=1, keepdim=True)


class Spy(torch.nn.Module):
    """Remembers how it was called."""

    def forward(self, x, edge_index, edge_attr=None, batch=None, rank=None):
        self.seen = {
            "x": x,
            "edge_index": edge_index,
            "edge_attr": edge_attr,
            "batch": batch,
            "rank": rank,
        }
        return torch.zeros_like(x)


class EdgeSpy(Spy):
    def forward(self, x, edge_index, edge_attr=None, batch=None):
        super().forward(x, edge_index, edge_attr, batch)
        return x, torch.full_like(edge_attr, 2.0)


def make_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(7, C), EDGE_INDEX, BATCH, torch.randn(8, C)


def nodes(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("arrangement", ["parallel", "sequential"])
@pytest.mark.parametrize("name", CONVS)
def test_any_conv_as_conv_and_as_mixer(
    name: str, arrangement: str, norm_first: bool
) -> None:
    inputs = make_inputs()
    for role in ("conv", "mixer"):
        layer = GPSLayer(
            C, **{role: CONVS[name]()}, arrangement=arrangement, norm_first=norm_first
        ).eval()
        out = layer(*inputs)
        assert nodes(out).shape == (7, C)
        assert isinstance(out, tuple) == (name == "GatedGCNConv")
        assert nodes(out).isfinite().all()

        other = layer(*inputs[:3], torch.randn(8, C))
        sees_edges = not torch.equal(nodes(out), nodes(other))
        assert sees_edges == (name in TAKES_EDGES)


def test_parallel_post_norm_is_pygs_layer() -> None:
    theirs = GPSConv(C, GINConv(Linear(C, C)), heads=2)
    attention = MultiheadAttention(C, 2, batch_first=True)
    options = {"arrangement": "parallel", "norm": "batch_norm"}
    ours = GPSLayer(C, copy.deepcopy(theirs.conv), attention, **options)
    ours.mixer.load_state_dict(theirs.attn.state_dict())
    ours.mlp.load_state_dict(theirs.mlp.state_dict())
    x, edge_index, batch, _ = make_inputs()
    torch.testing.assert_close(ours(x, edge_index, batch), theirs(x, edge_index, batch))
    torch.testing.assert_close(ours.eval()(x, edge_index), theirs.eval()(x, edge_index))


def test_customary_gated_gcn_recipe() -> None:
    conv = GatedGCNConv(C, C, edge_dim=C).eval()
    layer = GPSLayer(C, conv, norm=None, mlp_channels=0, dropout=0.1).eval()
    x, edge_index, batch, edge_attr = make_inputs()
    out = layer(x, edge_index, batch, edge_attr)
    update, edge_update = conv(x, edge_index, edge_attr)
    torch.testing.assert_close(out, (x + update, edge_attr + edge_update))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_sequential_arrangement(norm_first: bool) -> None:
    conv, mixer = GatedGCNConv(C, C, edge_dim=C), GATConv(C, C, edge_dim=C)
    layer = GPSLayer(
        C,
        conv,
        mixer,
        arrangement="sequential",
        norm="layer_norm",
        norm_first=norm_first,
        act="gelu",
        mlp_channels=11,
    ).eval()
    assert [module.out_features for module in (layer.mlp[0], layer.mlp[3])] == [11, C]

    def norm(h: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(h, (C,))

    before, after = (norm, lambda h: h) if norm_first else (lambda h: h, norm)
    x, edge_index, batch, edge_attr = make_inputs()
    update, edge_update = conv(before(x), edge_index, edge_attr)
    edges = edge_attr + edge_update
    h = after(x + update)
    h = after(h + mixer(before(h), edge_index, edges))
    gelu = torch.nn.functional.gelu
    h = after(h + layer.mlp[3](gelu(layer.mlp[0](before(h)))))
    torch.testing.assert_close(layer(x, edge_index, batch, edge_attr), (h, edges))


def test_parallel_pre_norm_has_one_residual() -> None:
    conv, mixer = GCNConv(C, C), SAGEConv(C, C)
    layer = GPSLayer(
        C, conv, mixer, norm="layer_norm", norm_first=True, mlp_channels=0,
        arrangement="parallel",
    ).eval()  # fmt: skip
    x, edge_index, batch, _ = make_inputs()
    h = torch.nn.functional.layer_norm(x, (C,))
    expected = x + conv(h, edge_index) + mixer(h, edge_index)
    torch.testing.assert_close(layer(x, edge_index, batch), expected)


def test_what_the_mixer_sees() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    for arrangement, factor in (("parallel", 0.0), ("sequential", 2.0)):
        conv, mixer = EdgeSpy(), Spy()
        layer = GPSLayer(C, conv, mixer, arrangement=arrangement, norm=None)
        _, edges = layer(x, edge_index, batch, edge_attr, rank=batch)
        torch.testing.assert_close(edges, edge_attr + 2.0)
        torch.testing.assert_close(mixer.seen["edge_attr"], edge_attr + factor)
        assert mixer.seen["edge_index"] is edge_index
        assert mixer.seen["batch"] is batch
        assert mixer.seen["rank"] is batch
        assert conv.seen["edge_attr"] is edge_attr


def test_a_graph_of_its_own_for_the_mixer() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    conv, mixer = Spy(), Spy()
    layer = GPSLayer(C, conv, mixer)
    dags, ranks = [edge_index[:, :2], edge_index[:, 2:3]], [batch, batch]
    layer(x, edge_index, batch, edge_attr, rank=batch, mixer_edge_index=dags)
    assert conv.seen["edge_index"] is edge_index
    assert conv.seen["edge_attr"] is edge_attr
    assert conv.seen["rank"] is batch
    assert mixer.seen["edge_index"] is dags
    assert mixer.seen["batch"] is batch
    assert mixer.seen["edge_attr"] is None
    assert mixer.seen["rank"] is None
    layer(
        x,
        edge_index,
        mixer_edge_index=dags,
        mixer_rank=ranks,
        mixer_edge_attr=dags,
        conv_rank=batch,
    )
    assert mixer.seen["rank"] is ranks
    assert mixer.seen["edge_attr"] is dags
    assert conv.seen["rank"] is batch
    assert conv.seen["edge_attr"] is None


def test_dags_for_the_mixer() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    mixer = ChimeraDAGConv(C, C, state_channels=4, num_dags=2).eval()
    layer = GPSLayer(
        C, GatedGCNConv(C, C, edge_dim=C), mixer, arrangement="sequential"
    ).eval()
    dags = [edge_index[:, [0, 1, 6]], edge_index[:, [2, 7]]]
    out, _ = layer(x, edge_index, batch, edge_attr, mixer_edge_index=dags)
    by_hand = GPSLayer(C, mixer=mixer).eval()
    by_hand.norms.load_state_dict(
        {k: v for k, v in layer.norms.state_dict().items() if "conv" not in k}
    )
    by_hand.mlp = layer.mlp
    h = layer.norms["conv"](x + layer.conv(x, edge_index, edge_attr)[0])
    torch.testing.assert_close(out, by_hand(h, dags, batch))


def test_edge_weight_and_edge_type() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    weight, kind = torch.rand(8), torch.tensor([0, 1] * 4)
    conv, mixer = GCNConv(C, C), RGCNConv(C, C, num_relations=2)
    layer = GPSLayer(C, conv, mixer, norm=None, mlp_channels=0)
    out = layer(x, edge_index, batch, edge_attr, edge_weight=weight, edge_type=kind)
    x = x + conv(x, edge_index, weight)
    expected = x + mixer(x, edge_index, kind)
    torch.testing.assert_close(out, expected)


def test_keywords_of_an_open_forward_need_a_prefix() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    inner = GINEConv(Linear(C, C))
    mixer = GPSConv(C, inner, heads=2).eval()
    layer = GPSLayer(C, mixer=mixer, norm=None, mlp_channels=0)
    out = layer(x, edge_index, batch, mixer_edge_attr=edge_attr)
    expected = x + mixer(x, edge_index, batch, edge_attr=edge_attr)
    torch.testing.assert_close(out, expected)


def test_edge_index_that_is_not_second() -> None:
    class Pointwise(torch.nn.Module):
        def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
            return x + pos[edge_index[0].max()]

    x, edge_index, batch, _ = make_inputs()
    layer = GPSLayer(C, conv=Pointwise(), norm=None, mlp_channels=0)
    out = layer(x, edge_index, batch, pos=x)
    torch.testing.assert_close(out, 2 * x + x[6])


GLOBAL = {
    "attention": lambda: MultiheadAttention(C, 2, batch_first=True),
    "sequence first": lambda: MultiheadAttention(C, 2),
    "encoder layer": lambda: TransformerEncoderLayer(C, 2, C, batch_first=True),
    "encoder": lambda: TransformerEncoder(TransformerEncoderLayer(C, 2, C), 2),
    "nodes": NodeModule,
}


@pytest.mark.parametrize("make", GLOBAL.values(), ids=GLOBAL)
def test_global_mixers_are_reset(make: Callable) -> None:
    layer = GPSLayer(C, mixer=make())
    before = copy.deepcopy(layer.state_dict())
    for x in layer.parameters():
        torch.nn.init.constant_(x, 7.0)
    layer.reset_parameters()
    for name, x in layer.named_parameters():
        assert (x != 7).all(), name
        assert torch.equal(x, before[name]) or x.std() > 0, name


@pytest.mark.parametrize("make", GLOBAL.values(), ids=GLOBAL)
def test_global_mixers_keep_graphs_apart(make: Callable) -> None:
    mixer = make().eval()
    layer = GPSLayer(C, mixer=mixer).eval()
    x, edge_index, batch, _ = make_inputs()
    out = layer(x, edge_index, batch)

    for i in range(3):
        own = batch == i
        alone = layer(x[own], edge_index[:, :0], torch.zeros_like(batch[own]))
        torch.testing.assert_close(out[own], alone, atol=1e-5, rtol=1e-5)

    order = torch.tensor([4, 0, 3, 6, 2, 1, 5])  # The graphs' nodes interleaved.
    shuffled = layer(x[order], edge_index, batch[order])
    torch.testing.assert_close(shuffled, out[order], atol=1e-5, rtol=1e-5)

    # Graph 1 without nodes, on the way of which no NaN may be born.
    x = x[batch != 1].requires_grad_()
    out = layer(x, edge_index[:, :0], batch[batch != 1])
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention.PerformerAttention(C, 2, head_channels=4),
        pytest.param(
            lambda: attention.SGFormerAttention(C, heads=2, head_channels=C),
            marks=pytest.mark.skipif(
                not hasattr(attention, "SGFormerAttention"), reason="needs PyG 2.7"
            ),
        ),
    ],
    ids=["performer", "sgformer"],
)
def test_mixers_of_padded_graphs(make: Callable) -> None:
    mixer = make().eval()
    layer = GPSLayer(C, mixer=mixer, norm=None, mlp_channels=0)
    x, edge_index, batch, _ = make_inputs()
    out = layer(x, edge_index, batch)
    dense, mask = to_dense_batch(x, batch)
    torch.testing.assert_close(out, x + mixer(dense, mask)[mask])
    order = torch.tensor([4, 0, 3, 6, 2, 1, 5])  # The graphs' nodes interleaved.
    shuffled = layer(x[order], edge_index, batch[order])
    torch.testing.assert_close(shuffled, out[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_nodes", [0, 1, 2])
@pytest.mark.parametrize(
    "norm", ["graph_batch_norm", "batch_norm", "layer_norm", "graph_norm", None]
)
def test_few_nodes_no_edges(num_nodes: int, norm: str | None, training: bool) -> None:
    attention = MultiheadAttention(C, 2, batch_first=True)
    layer = GPSLayer(C, GatedGCNConv(C, C, edge_dim=C), attention, norm=norm).train(
        training
    )
    x = torch.randn(num_nodes, C, requires_grad=True)
    batch = torch.zeros(num_nodes, dtype=torch.long)
    for given in (batch, None):
        out, edges = layer(x, EDGE_INDEX[:, :0], given, torch.randn(0, C))
        assert out.shape == x.shape
        assert edges.shape == (0, C)
        assert out.isfinite().all()
    for tensor in layer.state_dict().values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize("norm", ["graph_norm", "layer_norm", "instance_norm"])
def test_norm_with_batch(norm: str) -> None:
    layer = GPSLayer(C, GINEConv(Linear(C, C)), norm=norm).eval()
    x, edge_index, batch, edge_attr = make_inputs()
    out = layer(x, edge_index, batch, edge_attr)
    alone = layer(x[4:], edge_index[:, 5:] - 4, None, edge_attr[5:])
    torch.testing.assert_close(out[4:], alone, atol=1e-5, rtol=1e-5)


def test_norm_given_as_module() -> None:
    norm = torch.nn.LayerNorm(C)
    layer = GPSLayer(C, GCNConv(C, C), norm=norm)
    weights = [w for w in layer.norms.parameters() if w.dim() == 1]
    assert len({id(w) for w in (*weights, *norm.parameters())}) == 6
    assert len(GPSLayer(C, GCNConv(C, C), norm=None).norms) == 0


def test_dropout() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    layer = GPSLayer(
        C, GatedGCNConv(C, C, edge_dim=C), GCNConv(C, C), dropout=1.0, norm=None
    )
    out, edges = layer(x, edge_index, batch, edge_attr)
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(edges, edge_attr)


def test_gradients_reach_everything() -> None:
    layer = GPSLayer(C, GatedGCNConv(C, C, edge_dim=C), GATConv(C, C, edge_dim=C))
    sum(part.square().sum() for part in layer(*make_inputs())).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name


def test_construction_leaves_given_modules_as_they_are() -> None:
    conv = GCNConv(C, C)
    torch.nn.init.ones_(conv.lin.weight)
    assert GPSLayer(C, conv).conv is conv
    assert (conv.lin.weight == 1.0).all()


def test_sequential_container() -> None:
    first, second = (
        GPSLayer(C, GatedGCNConv(C, C, edge_dim=C)).eval() for _ in range(2)
    )
    header = "x, edge_index, batch, edge_attr -> x, edge_attr"
    model = Sequential(
        "x, edge_index, batch, edge_attr", [(first, header), (second, header)]
    )
    x, edge_index, batch, edge_attr = make_inputs()
    h, e = first(x, edge_index, batch, edge_attr)
    expected = second(h, edge_index, batch, e)
    torch.testing.assert_close(model(x, edge_index, batch, edge_attr), expected)


@pytest.mark.parametrize(
    ("arrangement", "norm"), [("parallel", None), ("sequential", "graph_batch_norm")]
)
def test_compiles_without_graph_break(arrangement: str, norm: str | None) -> None:
    layer = GPSLayer(
        C,
        GatedGCNConv(C, C, edge_dim=C),
        GCNConv(C, C),
        arrangement=arrangement,
        norm=norm,
        norm_first=True,
    ).eval()
    inputs, weight = make_inputs(), torch.rand(8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(*inputs, edge_weight=weight), layer(*inputs, edge_weight=weight)
    )


def test_errors() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    with pytest.raises(ValueError, match="a 'conv' or a 'mixer', got neither"):
        GPSLayer(C)
    with pytest.raises(ValueError, match=r"'parallel', 'sequential'\), got 'serial'"):
        GPSLayer(C, GCNConv(C, C), arrangement="serial")
    with pytest.raises(TypeError, match=r"'norm' must be .* got 'LayerNorm'"):
        GPSLayer(C, GCNConv(C, C), norm=torch.nn.LayerNorm)
    with pytest.raises(ValueError, match="'norm_kwargs' are the arguments of a norm"):
        GPSLayer(C, GCNConv(C, C), norm=None, norm_kwargs={"eps": 1e-3})
    with pytest.raises(ValueError, match="'mlp_channels' must not be given with"):
        GPSLayer(C, GCNConv(C, C), mlp=ReLU(), mlp_channels=3)
    with pytest.raises(ValueError, match=r"'x' must be \[nodes, 8\], got \[7, 6\]"):
        GPSLayer(C, GCNConv(6, C))(x[:, :6], edge_index)
    with pytest.raises(ValueError, match=r"'conv' .* \[7, 8\], got \[7, 16\]"):
        GPSLayer(C, GATConv(C, C, heads=2))(x, edge_index)
    with pytest.raises(ValueError, match=r"'mixer' .* \[7, 8\], got \[7, 1\]"):
        GPSLayer(C, mixer=GCNConv(C, 1))(x, edge_index)
    layer = GPSLayer(C, GatedGCNConv(C, C, edge_dim=3))
    with pytest.raises(ValueError, match=r"\[8, 3\]; got .* \[\[7, 8\], \[8, 8\]\]"):
        layer(x, edge_index, batch, edge_attr[:, :3])
    with pytest.raises(TypeError, match="'edge_wieght' is not a parameter"):
        GPSLayer(C, GCNConv(C, C))(x, edge_index, edge_wieght=edge_attr)
    with pytest.raises(TypeError, match="'mixer_edge_index' is not a parameter"):
        GPSLayer(C, GCNConv(C, C))(x, edge_index, mixer_edge_index=edge_index)


def test_parametrizations_may_be_removed() -> None:
    x, edge_index, _, _ = make_inputs()
    conv = ChimeraConv(C)
    register_parametrization(conv, "skip", torch.nn.Tanh())
    layer = GPSLayer(C, conv)
    out = layer(x, edge_index)
    remove_parametrizations(conv, "skip")
    torch.testing.assert_close(layer(x, edge_index), out)


def test_parts_are_replaced_by_those_of_their_class_only() -> None:
    x, edge_index, batch, edge_attr = make_inputs()
    layer = GPSLayer(C, GCNConv(C, C))
    layer.conv = GCNConv(C, C, bias=False)
    assert layer(x, edge_index, batch).shape == x.shape
    # It takes edge features, which would be lost.
    layer.conv = GatedGCNConv(C, C, edge_dim=C)
    with pytest.raises(TypeError, match="a GCNConv has been replaced by GatedGCNConv"):
        layer(x, edge_index, batch, edge_attr)
    layer.mixer = ChimeraConv(C, C)
    layer.conv = None
    with pytest.raises(ValueError, match="'mixer' must be given to the constructor"):
        layer(x, edge_index, batch)


def test_a_part_may_be_left_out_later() -> None:
    x, edge_index, batch, _ = make_inputs()
    conv = GCNConv(C, C)
    layer = GPSLayer(C, conv, ChimeraConv(C, C)).eval()
    alone = GPSLayer(C, conv).eval()
    alone.mlp, layer.mixer = layer.mlp, None
    torch.testing.assert_close(layer(x, edge_index, batch), alone(x, edge_index, batch))


@pytest.mark.parametrize("norm", [PairNorm, MeanSubtractionNorm, GraphSizeNorm])
def test_norms_without_a_size(norm: type) -> None:
    conv = GCNConv(C, C)
    layer = GPSLayer(C, conv, norm=norm.__name__, mlp_channels=0)
    x, edge_index, batch, _ = make_inputs()
    out = layer(x, edge_index, batch)
    torch.testing.assert_close(out, norm()(x + conv(x, edge_index), batch))


def test_names_are_no_modules():
    with pytest.raises(TypeError, match=r"'mixer' must be a module.*got 'chimera'"):
        GPSLayer(8, mixer="chimera")


class Nearest(MessagePassing):
    """Finds its edges itself, as DynamicEdgeConv does: from each node to itself."""

    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        return self.propagate(torch.arange(x.size(0)).expand(2, -1), x=x)


class NearestAlone(Nearest):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("conv", [Nearest, NearestAlone])
@pytest.mark.parametrize("role", ["conv", "mixer"])
def test_parts_may_make_their_own_edges(conv: type, role: str) -> None:
    x, edge_index, batch, _ = make_inputs()
    layer = GPSLayer(C, **{role: conv()}, norm=None, mlp_channels=0)
    torch.testing.assert_close(layer(x, edge_index, batch), 2 * x)
    torch.testing.assert_close(layer(x, edge_index), 2 * x)


def test_instance_norm_of_a_lone_node() -> None:
    layer = GPSLayer(C, SAGEConv(C, C), norm="instance_norm").eval()
    x, none = torch.randn(1, C), torch.empty(2, 0, dtype=torch.long)
    expected = layer(x, none, torch.zeros(1, dtype=torch.long))
    torch.testing.assert_close(layer(x, none), expected)


class OwnBlock(torch.nn.Module):
    """A user's block, which calls a layer of ours by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GPSLayer(C, SAGEConv(C, C), MultiheadAttention(C, 2))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None):
        return self.layer(x, edge_index, batch)


@pytest.mark.parametrize("norm", [None, "instance_norm"])
def test_a_graph_alone_is_exported_within_blocks(norm: str | None) -> None:
    block = OwnBlock() if norm is None else GPSLayer(C, SAGEConv(C, C), norm=norm)
    model = GraphModel(C, C, 2, [block], head="node").eval()
    x, edge_index, _, _ = make_inputs()
    exported = torch.export.export(model, (x, edge_index)).module()
    torch.testing.assert_close(exported(x, edge_index), model(x, edge_index))


def test_statistics_of_instance_norm_hold_no_graph() -> None:
    norm = InstanceNorm(C, affine=True, track_running_stats=True)
    layer = GPSLayer(C, SAGEConv(C, C), norm=norm)
    for _ in range(2):
        layer(torch.randn(5, C), EDGE_INDEX[:, :0]).sum().backward()
    copy.deepcopy(layer)
    assert all(y.grad_fn is None for y in layer.buffers())
