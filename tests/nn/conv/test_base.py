"""Layers as modules of PyTorch and PyG: hooks, explainers, TorchScript, weights."""

import inspect

import pytest
import torch
from asserts import assert_near
from convs import CASES, CHANNELS, Case, every_conv
from torch_geometric.explain import Explainer, GraphMaskExplainer
from torch_geometric.nn import ASAPooling, MessagePassing, to_hetero_with_bases

from pyg_chimera.nn import (
    ChimeraConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    KHopAttentionConv,
)

HOOKS = [name for name in vars(MessagePassing) if name.startswith("register_")]
MIXERS = {
    name: case
    for name, case in CASES.items()
    if "-" not in name and name not in ("GatedGCNConv", "GraphMambaConv")
}
mixers = pytest.mark.parametrize("case", MIXERS.values(), ids=MIXERS)
METADATA = ["a"], [("a", "one", "a"), ("a", "two", "a")]
INDEX = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])


class Model(torch.nn.Module):
    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def typed_edges() -> dict:
    halves = INDEX[:, :3], INDEX[:, 3:]
    return dict(zip(METADATA[1], halves, strict=True))


# ------------------------------------------------------------------------------- hooks


@mixers
def test_hooks_on_messages_are_refused(case: Case):
    """They would never be called."""
    conv = case.conv()
    assert HOOKS
    for name in HOOKS:
        with pytest.raises(NotImplementedError, match=rf"{type(conv).__name__} comp"):
            getattr(conv, name)(print)
    seen = []
    conv.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert case.call(conv, case.inputs(torch.float)).equal(seen[0])


@mixers
def test_feature_decomposition_is_refused(case: Case):
    """It would have no effect."""
    with pytest.raises(TypeError, match="argument 'decomposed_layers'"):
        case.conv(decomposed_layers=2)


def test_types_of_edges_are_not_ignored():
    with pytest.raises(NotImplementedError, match=r"'to_hetero_with_bases'.*edge_attr"):
        to_hetero_with_bases(Model(ChimeraConv(CHANNELS)), METADATA, num_bases=2)


def test_gated_gcn_conv_has_messages():
    conv = GatedGCNConv(CHANNELS, CHANNELS, norm=None, act=None)
    x, called = torch.randn(4, CHANNELS), []
    for name in HOOKS:
        getattr(conv, name)(lambda *_, name=name: called.append(name))
    conv(x, INDEX)
    assert called == [
        f"register_{name}_forward_{hook}"
        for name in ("edge_update", "propagate", "message", "aggregate")
        for hook in (("pre_hook",) if name == "propagate" else ("pre_hook", "hook"))
    ] + ["register_propagate_forward_hook"]

    # Without messages of the second type, its edges might as well be absent.
    model = to_hetero_with_bases(Model(conv), METADATA, num_bases=1)
    (basis,) = model.conv.convs
    basis.edge_type_weight.data = torch.tensor([[1.0, 0.0]])
    out = model({"a": x}, typed_edges())["a"]
    basis.edge_type_weight.data = torch.tensor([[1.0, 3.0]])
    more = model({"a": x}, typed_edges())["a"]
    root = conv.lin_root(x)
    assert_near(out[3:], root[3:], 1e-6)  # which only edges of the second type reach
    assert not torch.allclose(more[3], out[3])
    more.sum().backward()
    assert basis.edge_type_weight.grad.all()


# -------------------------------------------------------------------------- explainers


def graph_mask(conv: torch.nn.Module, x: torch.Tensor, edge_index: torch.Tensor):
    explainer = Explainer(
        Model(conv), GraphMaskExplainer(1, epochs=2, log=False),
        explanation_type="model", edge_mask_type="object",
        node_mask_type="attributes",
        model_config={
            "mode": "multiclass_classification", "task_level": "node",
            "return_type": "raw",
        },
    )  # fmt: skip
    return explainer(x, edge_index, index=1)


@pytest.mark.parametrize("name", [name for name in MIXERS if "Grid" not in name])
def test_explainers_that_read_messages_are_refused(name: str):
    case = MIXERS[name]
    inputs = case.inputs(torch.float)
    with pytest.raises(ValueError, match=r"'GraphMaskExplainer' does|join pairs of"):
        graph_mask(case.conv(edge_dim=None), inputs.x, inputs.edge_index)


def test_explainers_read_the_messages_of_gated_gcn_conv():
    conv = GatedGCNConv(CHANNELS, 3).eval()
    explanation = graph_mask(conv, torch.randn(4, CHANNELS), INDEX)
    assert explanation.edge_mask.shape == (6,)
    assert explanation.edge_mask.isfinite().all()


MASKED = [
    "ChimeraConv", "ChimeraConv-torch", "GatedDeltaConv-edges",
    "GatedDeltaConv-acyclic", "RGLRUConv", "PLSTMConv",
]  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_edge_masks_apply_to_local_filters_too(name: str):
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    index, attr, dag = inputs.edge_index, inputs.edge_attr, inputs.dag
    without = inputs._replace(edge_index=index[:, :0], edge_attr=attr[:0], dag=dag[:0])
    outs = case.call(conv, inputs), case.call(conv, without)
    conv.explain, conv._apply_sigmoid = True, False
    for mask, expected in zip((torch.ones, torch.zeros), outs, strict=True):
        conv._edge_mask = mask(index.size(1), dtype=torch.double)
        assert_near(case.call(conv, inputs), expected)
    assert not torch.allclose(*outs)


def test_explainers_may_scale_messages_in_their_own_way():
    """As PyG invites them to: this one cuts all edges."""
    conv = ChimeraConv(CHANNELS).eval()
    x = torch.randn(4, CHANNELS)
    conv.explain, conv.explain_message = True, lambda inputs, dim_size: 0 * inputs
    assert_near(conv(x, INDEX), conv(x, INDEX[:, :0]), 1e-6)


# ------------------------------------------------------------------------- TorchScript


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in CASES if "-" not in name])
def test_torchscript_is_refused(name: str):
    conv, inputs = CASES[name].conv(), CASES[name].inputs(torch.float)
    for model in (conv, torch.nn.Sequential(Model(conv))):
        with pytest.raises(NotImplementedError, match=rf"{name}: .*torch\.export"):
            torch.jit.script(model)
    if name == "GatedGCNConv":  # which can be traced
        return

    class Run(Model):
        def forward(self, x, edge_index):
            given = inputs._replace(x=x, edge_index=edge_index)
            return CASES[name].call(self.conv, given)

    with pytest.raises(NotImplementedError, match=r"TorchScript.*torch\.export"):
        torch.jit.trace(Run(conv), (inputs.x, inputs.edge_index), check_trace=False)


# ------------------------------------------------------------------------ edge weights


@every_conv
def test_edge_weights_are_edge_features(case: Case):
    if case.on_grids or isinstance(case.conv(), GraphMambaConv):
        pytest.skip("reads no edge features")
    if len(case.edges) > 1:
        pytest.skip("takes lists of graphs")
    conv, inputs = case.conv(edge_dim=1), case.inputs(torch.float)
    x, index, weight = inputs.x, inputs.edge_index, inputs.edge_attr[:, 0]
    outs = [conv(x, index, edge_weight=weight), conv(x, index, weight)]
    outs = [out[0] if isinstance(out, tuple) else out for out in outs]
    assert outs[0].equal(outs[1])
    with pytest.raises(TypeError, match="'edge_weight' must be None if there are edge"):
        conv(x, index, weight, edge_weight=weight)


@pytest.mark.parametrize(
    "make", [ChimeraConv, GatedDeltaConv, KHopAttentionConv, GatedGCNConv]
)
def test_in_asa_pooling(make: type[torch.nn.Module]):
    x, weight = torch.randn(4, CHANNELS), torch.rand(6)
    last = {"update_edges": False} if make is GatedGCNConv else {}
    pool = ASAPooling(CHANNELS, ratio=0.5, GNN=make, edge_dim=1, **last)
    out = pool(x, INDEX, weight)[0]
    assert out.shape == (2, CHANNELS)
    out.sum().backward()
    assert pool.gnn_intra_cluster.lin_edge.weight.grad.any()
    assert ASAPooling(CHANNELS, GNN=make)(x, INDEX)[0].shape == (2, CHANNELS)
    with pytest.raises(ValueError, match=r"'edge_weight' must be None.*'edge_dim=1'"):
        ASAPooling(CHANNELS, GNN=make)(x, INDEX, weight)


def test_edge_weights_in_gps_layer_are_for_whoever_accepts_them():
    layer = GPSLayer(CHANNELS, mixer=ChimeraConv(CHANNELS))
    with pytest.raises(TypeError, match="'edge_weight' is not a parameter"):
        layer(torch.randn(4, CHANNELS), INDEX, edge_weight=torch.rand(6))


def test_edge_weights_that_cannot_be_read():
    x, weight = torch.randn(3, 8), torch.rand(4)
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    conv = ChimeraConv(8, edge_dim=1)
    out = conv(x, edge_index, None, edge_weight=weight)
    assert torch.equal(out, conv(x, edge_index, weight))
    with pytest.raises(TypeError, match="must be None if there are edge features"):
        conv(x, edge_index, weight, edge_weight=weight)
    with pytest.raises(ValueError, match="GraphMambaConv reads no features or weights"):
        GraphMambaConv(8)(x, edge_index, edge_weight=weight)
    with pytest.raises(TypeError, match="pass a batch vector as"):
        GraphMambaConv(8)(x, edge_index, torch.zeros(3).long())


def test_layers_may_be_subclassed_with_arguments_of_their_own():
    class Configured(ChimeraConv):
        def __init__(self, config=None, **kwargs):
            super().__init__(8, 8, **kwargs)

    class Counted(ChimeraConv):
        def __init__(self, num=2, *args, **kwargs):
            super().__init__(8, 8, *args, **kwargs)

    for kind, first in ((Configured, "config"), (Counted, "num")):
        assert kind(heads=2).heads == 2
        parameters = inspect.signature(kind).parameters
        assert next(iter(parameters)) == first
        assert parameters["heads"].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match=r"Configured has no argument 'head'.*'config'"):
        Configured(head=2)
