"""In PyG's GraphGym: models out of YAML files, the options, the registration."""

import importlib
import subprocess
import sys

import pytest
import torch
from asserts import assert_near
from torch_geometric.data import Batch, Data

from pyg_chimera.transforms import AddEliminationOrder, NodeOrder

# Of PyG's loaders, about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:It is not recommended to directly access"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
]

MIXERS = {
    "chimera": "Chimera",
    "plstm": "PLSTM",
    "graph_mamba": "GraphMamba",
    "gated_delta": "GatedDelta",
    "k_hop_attention": "KHopAttention",
}
CONFIGS = [f"{mixer}_{kind}" for mixer in MIXERS for kind in ("layer", "gps")]
CONFIGS += ["hybrid_gps"]
NODES = ("dataset.name", "nodes", "dataset.task", "node", "gnn.head", "node")
GRAPHS = ("dataset.name", "graphs", "dataset.task", "graph", "gnn.head", "graph")
NO_EDGES = ("dataset.edge_encoder", False, "chimera.edge_dim", 0)


def create():
    """Loaders and model as GraphGym's own script makes them."""
    from torch_geometric.graphgym.loader import create_loader
    from torch_geometric.graphgym.model_builder import create_model

    torch.manual_seed(0)
    return create_loader(), create_model()


def mixers(model):
    from pyg_chimera.graphgym.mixers import MIXERS

    return [m for m in model.modules() if isinstance(m, tuple(MIXERS.values()))]


def train(loaders, model, steps=2):
    (optimizer,), _ = model.configure_optimizers()
    losses = []
    batches = [batch for _ in range(steps) for batch in loaders[0]][:steps]
    for batch in batches:
        loss = model.training_step(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("task", [NODES, GRAPHS], ids=["node", "graph"])
@pytest.mark.parametrize("config", CONFIGS)
def test_models_of_yaml_files_train(load, config, task):
    cfg = load(config, *task)
    loaders, model = create()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(loaders, model)
    assert len(losses) == 2
    assert all(torch.isfinite(torch.tensor(losses)))
    # Whatever has a part in the prediction moves, and the mixers have.
    parts = [p for m in mixers(model) for p in m.parameters()]
    assert len(mixers(model)) == cfg.gnn.layers_mp
    assert all(p.grad is not None for p in parts)
    moved = {name for name, p in model.named_parameters() if not p.equal(before[name])}
    assert any(".model." in name or ".mixer." in name for name in moved)

    model.eval()
    batch = next(iter(loaders[1]))
    again = batch.clone()
    first, second = (model.validation_step(b) for b in (batch, again))
    assert first["pred_score"].equal(second["pred_score"])


@pytest.mark.parametrize("config", CONFIGS)
def test_models_need_no_edge_features_but_read_them(load, config):
    load(config, *GRAPHS, *NO_EDGES)
    loaders, model = create()
    batch = next(iter(loaders[1]))
    assert batch.edge_attr is not None
    bare = batch.clone()
    del bare.edge_attr
    model.eval()
    with torch.no_grad():
        (out, _), (expected, _) = model(bare), model(batch)
    assert out.equal(expected)
    if "mamba" in config:
        return
    load(config, *GRAPHS)
    loaders, model = create()
    batch = next(iter(loaders[1]))
    other = batch.clone()
    other.edge_attr = other.edge_attr + torch.randn_like(other.edge_attr)
    for parameter in model.eval().parameters():  # gates start the same everywhere
        parameter.data += torch.randn_like(parameter) / 10
    with torch.no_grad():
        (out, _), (unexpected, _) = model(batch), model(other)
    assert not out.equal(unexpected)


@pytest.mark.parametrize("config", ["chimera_layer", "plstm_gps"])
def test_missing_or_other_edge_features_are_named(load, config):
    load(config, *GRAPHS, "dataset.edge_encoder", False, "chimera.edge_dim", 3)
    loaders, model = create()
    batch = next(iter(loaders[1]))
    wide = batch.clone()
    wide.edge_attr = torch.randn(batch.num_edges, 4)
    with pytest.raises(ValueError, match=r"'edge_attr' of width 3, got shape \[\d+, 4"):
        model(wide)
    del batch.edge_attr
    with pytest.raises(ValueError, match="'edge_attr' of width 3, got none"):
        model(batch)


def test_raw_edge_features_may_be_numbers(load):
    load("chimera_gps", "dataset.edge_encoder", False, "chimera.edge_dim", 1)
    _, model = create()
    data = Data(
        x=torch.randn(2, 5),
        edge_index=torch.tensor([[0, 1], [1, 0]]),
        edge_attr=torch.tensor([1, 2]),
        y=torch.tensor([0]),
    )
    pred, _ = model.eval()(Batch.from_data_list([data]))
    assert pred.shape == (1, 3)


def test_graphgym_does_not_undo_how_mixers_begin(load):
    """It resets linear layers: the bias of Graph-Mamba's step sizes would be zero."""
    load("graph_mamba_layer")
    _, model = create()
    for mixer in mixers(model):
        for scan in mixer.scans:
            steps = torch.nn.functional.softplus(scan.lin_delta.bias)
            assert steps.min() > 0.0009
            assert steps.max() < 0.11
    called = []
    model.apply(lambda module: called.append(type(module).__name__))
    assert "GraphMambaConv" in called


def test_layers_change_the_width(load):
    for mixer in MIXERS:
        load(f"{mixer}_layer", "gnn.layers_pre_mp", 0, "gnn.stage_type", "stack")
        loaders, model = create()
        assert train(loaders, model, steps=1)[0] > 0


def test_options_reach_the_mixers(load):
    load("chimera_gps", "chimera.heads", 4, "chimera.state_channels", 6)
    _, model = create()
    found = [(m.heads, m.state_channels, m.edge_dim) for m in mixers(model)]
    assert found == [(4, 6, 8)] * 2
    load("plstm_gps", "chimera.mode", "PD", "chimera.order", "degree")
    _, model = create()
    found = [(m.mode, m.order) for m in mixers(model)]
    assert found == [("P", "degree"), ("D", "degree")]
    load("graph_mamba_layer", "chimera.num_bins", 3, "chimera.order", "bfs")
    _, model = create()
    found = {(m.num_bins, m.num_eval_permutations, m.order) for m in mixers(model)}
    assert found == {(3, 2, "bfs")}
    for config, order in (("plstm_gps", "bfs"), ("graph_mamba_layer", "degree")):
        load(config, "chimera.order", "auto")  # what suits the mixer
        _, model = create()
        assert {m.order for m in mixers(model)} == {order}
    load("chimera_layer", "chimera.heads", None, "gnn.att_heads", 4)
    _, model = create()
    assert {m.heads for m in mixers(model)} == {4}


def test_options_reach_the_hybrid_model(load):
    cfg = load("hybrid_gps", "gnn.layers_mp", 5, "chimera.pattern", "rra")
    _, model = create()
    kinds = [type(layer.mixer).__name__ for layer in model.model.mp.layers]
    recurrence, attention = "GatedDeltaConv", "KHopAttentionConv"  # of the file
    assert kinds == [recurrence, recurrence, attention, recurrence, recurrence]
    assert {m.heads for m in mixers(model)} == {2}
    assert [m.state_channels for m in mixers(model) if hasattr(m, "gamma")] == [4] * 4
    assert mixers(model)[2].k == 2
    assert isinstance(model.model.mp.norm.norm, torch.nn.RMSNorm)
    cfg.chimera.kwargs.attention = "full"
    cfg.chimera.kwargs.attention_kwargs.clear()
    _, model = create()
    assert type(model.model.mp.layers[2].mixer).__name__ == "SelfAttention"
    for name in ("causal", "num_layers", "dropout"):
        cfg = load("hybrid_gps")
        cfg.chimera.kwargs[name] = 1
        with pytest.raises(ValueError, match=rf"'chimera.kwargs'.*got '{name}'"):
            create()


def test_further_arguments_reach_the_mixers(load):
    cfg = load("chimera_layer")
    assert cfg.chimera.kwargs == {"local_conv": True}  # of the file
    cfg.chimera.kwargs.gamma = 0.5
    _, model = create()
    assert {m.gamma for m in mixers(model)} == {0.5}
    assert all(m.local_weight is not None for m in mixers(model))
    for name in ("gama", "heads", "edge_dim", "in_channels"):
        cfg = load("chimera_layer")
        cfg.chimera.kwargs[name] = 1
        with pytest.raises(ValueError, match=rf"'chimera.kwargs'.*got '{name}'"):
            create()


@pytest.mark.parametrize(
    ("config", "option", "value", "message"),
    [
        ("chimera_gps", "conv", "gatedgcn", "'chimera.conv' must be one of"),
        ("chimera_gps", "arrangement", "stacked", "'parallel', 'sequential'"),
        ("chimera_gps", "heads", 3, r"ChimeraConv: 'heads' must divide"),
        ("chimera_layer", "edge_dim", -2, "'chimera.edge_dim' must be null"),
        ("chimera_gps", "edge_dim", "wide", "'chimera.edge_dim' must be null"),
        ("chimera_gps", "edge_dim", True, "'chimera.edge_dim' must be null"),
        ("chimera_layer", "state_channels", 0, "'state_channels' must be an integer"),
        ("plstm_gps", "mode", "PX", r"'mode' must be one of"),
        ("plstm_layer", "mode", "PD", r"'mode' must be one of"),
        ("plstm_gps", "mode", "", r"'mode' must be one of"),
        ("plstm_gps", "order", "size", r"PLSTMConv: 'order' must be one of"),
        ("graph_mamba_gps", "order", "size", "'order' must be one of"),
        ("graph_mamba_layer", "num_bins", 0, "'num_bins' must be an integer >= 1"),
        ("hybrid_gps", "pattern", "rx", "make no HybridModel: 'pattern' must be"),
    ],
)
def test_unknown_values_are_named(load, config, option, value, message):
    load(config, f"chimera.{option}", value)
    with pytest.raises(ValueError, match=message):
        create()
    with pytest.raises(AssertionError, match="Non-existent key"):
        load("chimera_gps", "chimera.haeds", 2)


def test_networks_say_how_to_widen_nodes(load):
    load("chimera_gps", "gnn.layers_pre_mp", 0)
    with pytest.raises(
        ValueError, match=r"'gnn.dim_inner' \(8\), got 5.*layers_pre_mp"
    ):
        create()


@pytest.mark.parametrize("arrangement", ["parallel", "sequential"])
@pytest.mark.parametrize("conv", ["gated_gcn", "gin", "gcn", "none"])
def test_local_layers(load, conv, arrangement):
    for own in ((), NO_EDGES):
        load(*("chimera_gps", *own, "chimera.conv", conv),
             *("chimera.arrangement", arrangement))  # fmt: skip
        loaders, model = create()
        assert train(loaders, model, steps=1)[0] > 0
        # None is left over, which training in several processes would refuse.
        unused = [n for n, p in model.named_parameters() if p.grad is None]
        assert [name for name in unused if not name.startswith("model.encoder")] == []


def test_without_batch_norm(load):
    load("graph_mamba_gps", "gnn.batchnorm", False, "gnn.act", "elu")
    loaders, model = create()
    assert train(loaders, model, steps=1)[0] > 0
    parts = model.model.mp.modules()
    assert not any(isinstance(part, torch.nn.BatchNorm1d) for part in parts)


def test_what_transforms_stored_is_used(load):
    """Scores of a user's own, with `chimera.order: null`, and elimination orders."""
    for config in ("graph_mamba_gps", "graph_mamba_layer"):
        load(config, *GRAPHS, *NO_EDGES, "chimera.order", None)
        loaders, model = create()
        batch = next(iter(loaders[1]))
        with pytest.raises(ValueError, match="'score' must be given"):
            model.eval()(batch.clone())
        batch.node_score = torch.arange(batch.num_nodes).float()
        other = batch.clone()
        other.node_score = -batch.node_score
        with torch.no_grad():
            (out, _), (unexpected, _) = model(batch), model(other)
        assert not out.equal(unexpected)
        batch = NodeOrder()(next(iter(loaders[1])))
        model(batch.clone())
        batch.edge_index = batch.edge_index[:, 2:]
        with pytest.raises(ValueError, match=r"'data.node_score' must belong to the"):
            model(batch)
    cfg = load("hybrid_gps", *GRAPHS, *NO_EDGES)
    cfg.chimera.kwargs.recurrence = "chimera"
    cfg.chimera.kwargs.capacity = 0.5  # where nodes are routed, ranks of all do not fit
    loaders, model = create()
    batch = next(iter(loaders[1]))
    expected = model.eval()(batch.clone())[0]
    assert_near(model(AddEliminationOrder()(batch))[0], expected, 1e-5)
    for config in ("chimera_gps", "chimera_layer"):
        load(config, *GRAPHS, *NO_EDGES)
        loaders, model = create()
        batch = next(iter(loaders[1]))
        batch.elimination_rank = torch.zeros(1, dtype=torch.long)  # of another
        with pytest.raises(ValueError, match="rank"):
            model(batch)


def test_registering_again_changes_nothing(gym):
    from torch_geometric.graphgym.config import cfg

    import pyg_chimera.graphgym

    before = [dict(gym.layer_dict), dict(gym.network_dict), dict(gym.config_dict)]
    cfg.chimera.heads = 7
    pyg_chimera.graphgym.register()
    importlib.reload(pyg_chimera.graphgym)
    assert [gym.layer_dict, gym.network_dict, gym.config_dict] == before
    assert cfg.chimera.heads == 7


def test_importing_again_takes_the_new_classes(gym, monkeypatch):
    import pyg_chimera.graphgym

    before = pyg_chimera.graphgym.GPSNetwork
    for name in [n for n in sys.modules if n.startswith("pyg_chimera.graphgym")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("pyg_chimera.graphgym", None)
    again = importlib.import_module("pyg_chimera.graphgym")
    assert again.GPSNetwork is not before
    assert gym.network_dict["ChimeraGPS"].func is again.GPSNetwork
    assert gym.layer_dict["plstm"].func is again.MixerLayer


def test_names_of_others_are_left_alone(gym):
    import pyg_chimera.graphgym

    gym.layer_dict["chimera"] = torch.nn.Linear
    with pytest.raises(KeyError, match=r"'chimera' is already registered.*torch.nn"):
        pyg_chimera.graphgym.register()
    assert gym.layer_dict["chimera"] is torch.nn.Linear


def test_a_new_configuration_has_the_group(gym):
    from torch_geometric.graphgym.config import set_cfg
    from yacs.config import CfgNode

    cfg = CfgNode()
    set_cfg(cfg)
    assert cfg.chimera.order == "auto"
    assert CfgNode.load_cfg(cfg.dump()).chimera == cfg.chimera


def test_the_package_alone_does_not_import_graphgym():
    """And without yacs, GraphGym's part says what to install."""
    code = """
import sys, pyg_chimera, pyg_chimera.nn, pyg_chimera.transforms
print([name for name in sys.modules if "graphgym" in name or "yacs" in name])
sys.modules["yacs"] = None
import pyg_chimera.graphgym
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]"
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: 'pyg_chimera.graphgym' needs")
    assert "pip install yacs" in last


@pytest.mark.parametrize("conv", ["none", "gcn"])
def test_networks_without_readers_of_edges_have_no_parameters_for_them(load, conv):
    load("graph_mamba_gps", *GRAPHS, "chimera.conv", conv, "dataset.edge_encoder",
         False, "chimera.edge_dim", 3)  # fmt: skip
    loaders, model = create()
    train(loaders, model)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
