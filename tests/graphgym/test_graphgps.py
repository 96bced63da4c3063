"""In GraphGPS: our mixers as global models of its layers.

GraphGPS is no package to install: these tests run on a miniature of it that has no more
than the names and the order of calls that our layer relies on. Where a checkout is on
the path, they run on GraphGPS itself, unedited; that was done by hand, see
`docs/notes/graphgym.md`.
"""

import importlib
import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REAL = importlib.util.find_spec("graphgps") is not None
# Of PyG's loaders, about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:It is not recommended to directly access"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
]

MIXERS = {
    "Chimera": "ChimeraConv",
    "PLSTM": "PLSTMConv",
    "GraphMamba": "GraphMambaConv",
    "GatedDelta": "GatedDeltaConv",
    "KHopAttention": "KHopAttentionConv",
}


@pytest.fixture
def gps(gym, monkeypatch):
    """GraphGPS as `import pyg_chimera.graphgym` finds it."""
    import pyg_chimera.graphgym

    if REAL:
        yield importlib.import_module("pyg_chimera.graphgym.gps_model")
        return
    monkeypatch.syspath_prepend(HERE / "miniature")
    importlib.reload(pyg_chimera.graphgym)
    yield importlib.import_module("pyg_chimera.graphgym.gps_model")
    for name in [name for name in sys.modules if ours(name)]:
        del sys.modules[name]


def ours(name):
    return name.split(".")[0] == "graphgps" or name.endswith(".graphgym.gps_model")


def create(seed=0):
    from torch_geometric.graphgym.loader import create_loader
    from torch_geometric.graphgym.model_builder import create_model

    torch.manual_seed(seed)
    return create_loader(), create_model()


@pytest.mark.parametrize(
    ("local", "network"),
    [("CustomGatedGCN", "GPSModel"), ("GINE", "ChimeraGPSModel"), ("None", "GPSModel")],
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_models_train(gps, load, mixer, local, network):
    options = ["gt.layer_type", f"{local}+{mixer}", "model.type", network]
    cfg = load("graphgps", *options)
    loaders, model = create()
    assert cfg.gt.layer_type == f"{local}+{mixer}"
    layers = list(model.model.layers)
    assert [type(layer.mixer).__name__ for layer in layers] == [MIXERS[mixer]] * 2
    (optimizer,), _ = model.configure_optimizers()
    before = [p.detach().clone() for p in layers[0].mixer.parameters()]
    for batch in list(loaders[0])[:2]:
        loss = model.training_step(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    after = list(layers[0].mixer.parameters())
    assert all(p.grad is not None for p in after)
    assert any(not p.equal(q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
@pytest.mark.parametrize("local", ["CustomGatedGCN", "GINE", "None"])
def test_layers_compute_what_they_should(gps, load, local, norm):
    """Both branches beside each other, then the feed-forward block, as written."""
    load(
        *("graphgps", "gt.layer_type", f"{local}+Chimera"),
        *("gt.layer_norm", norm == "layer_norm"),
        *("gt.batch_norm", norm == "batch_norm"),
    )
    loaders, model = create()
    model.train()
    model.eval()
    layer = model.model.layers[0]
    batch = next(iter(loaders[0]))
    batch.x = torch.randn(batch.num_nodes, 8)
    batch.edge_attr = torch.randn(batch.num_edges, 8)

    def normed(name, x):
        per_graph = (batch.batch,) if norm == "layer_norm" else ()
        return getattr(layer, name)(x, *per_graph)

    with torch.no_grad():
        given, x, e = batch.clone(), batch.x, batch.edge_attr
        h = torch.zeros_like(x)
        if local == "CustomGatedGCN":
            out = layer.local_model(batch.clone())
            h, e = normed("norm1_local", out.x), out.edge_attr
            assert not torch.allclose(e, batch.edge_attr)
        elif local == "GINE":
            h = normed("norm1_local", x + layer.local_model(x, batch.edge_index, e))
        mixed = layer.mixer(x, batch.edge_index, edge_attr=e)
        h = h + normed("norm1_attn", x + mixed)
        h = h + layer.ff_linear2(torch.relu(layer.ff_linear1(h)))
        expected = normed("norm2", h)
        result = layer(given)
    torch.testing.assert_close(result.x, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.edge_attr, e)
    # What is not read is not the updated edges: that would have shown.
    if local == "CustomGatedGCN":
        with torch.no_grad():
            stale = layer.mixer(x, batch.edge_index, edge_attr=batch.edge_attr)
        assert not torch.allclose(stale, mixed)


def test_own_layer_types_are_unchanged(gps, load):
    load("graphgps", "gt.layer_type", "CustomGatedGCN+None")
    loaders, model = create()
    base = type(model.model).__mro__[1]
    assert base.__module__ == "graphgps.network.gps_model"
    torch.manual_seed(0)
    create_loader = importlib.import_module("torch_geometric.graphgym.loader")
    create_loader.create_loader()
    theirs = base(5, 3)
    assert [type(layer) for layer in model.model.layers] == [
        type(layer) for layer in theirs.layers
    ]
    theirs.load_state_dict(model.model.state_dict())
    batch = next(iter(loaders[1]))
    other = batch.clone()
    assert model.model.eval()(batch)[0].equal(theirs.eval()(other)[0])
    load("graphgps", "gt.layer_type", "CustomGatedGCN+Chimaera")
    with pytest.raises(ValueError, match="Chimaera"):
        create()


def test_derivatives_with_other_names(gps, load, monkeypatch):
    """As in toenshoff/LRGB, with the same numbers; others are refused."""
    from graphgps.layer.gps_layer import GPSLayer

    load("graphgps", "gt.batch_norm", True)
    loaders, model = create()
    batch = next(iter(loaders[0]))
    torch.manual_seed(1)
    expected = model.model.train()(batch.clone())[0]
    make = GPSLayer.__init__

    def renamed(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.norm1_global, self.dropout_global = self.norm1_attn, self.dropout_attn
        del self.norm1_attn, self.dropout_attn

    monkeypatch.setattr(GPSLayer, "__init__", renamed)
    _, model = create()
    torch.manual_seed(1)
    assert model.model.train()(batch.clone())[0].equal(expected)

    def bare(self, *args, **kwargs):
        make(self, *args, **kwargs)
        del self.dropout_attn

    monkeypatch.setattr(GPSLayer, "__init__", bare)
    with pytest.raises(ValueError, match="neither 'dropout_attn' nor 'dropout_global'"):
        create()


@pytest.mark.parametrize("times", [0, 2])
def test_layers_that_do_not_reach_the_mixer_once_are_refused(
    gps, load, monkeypatch, times
):
    """As some forks have layers without a feed-forward block (`gt.ff: False`)."""
    from graphgps.layer.gps_layer import GPSLayer

    def forward(self, batch):
        for _ in range(times):
            batch.x = batch.x + self._ff_block(batch.x)
        return batch

    load("graphgps")
    loaders, model = create()
    batch = next(iter(loaders[0]))
    model.model(batch.clone())
    monkeypatch.setattr(GPSLayer, "forward", forward)
    count = "never calls it" if times == 0 else "calls it more than once"
    with pytest.raises(ValueError, match=rf"mixer Chimera .* {count}: set 'gt\.ff'"):
        model.model(batch)


def test_the_documented_stand_in_for_torch_scatter():
    page = (HERE.parents[1] / "docs/graphgym.md").read_text(encoding="utf-8")
    code = re.search(r"\n  # torch_scatter\.py\n(.*?)\n  ```", page, re.DOTALL)[1]
    names: dict = {}
    exec(textwrap.dedent(code), names)
    assert {"scatter", "scatter_add", "scatter_max"} <= names.keys()  # all imported
    src, index = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        torch.tensor([2, 0, 2]),
    )
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    # As CustomGatedGCN and SignNet call it.
    assert names["scatter"](src, index, 0, None, 4, reduce="sum").equal(expected)
    assert names["scatter"](src, index, dim=0, dim_size=4, reduce="add").equal(expected)


def test_other_spellings_and_options_without_effect(gps, load):
    load("graphgps", "gt.layer_type", "CustomGatedGCN+chimera")
    with pytest.raises(ValueError, match=r"must be 'CustomGatedGCN\+Chimera'"):
        create()
    load("graphgps", "gt.attn_dropout", 0.5)
    with pytest.warns(UserWarning, match="gt.attn_dropout=0.5 has no effect"):
        create()
    cfg = load("graphgps")
    cfg.train["mode"] = "log-attn-weights"
    with pytest.raises(ValueError, match=r"train\.mode .*'CustomGatedGCN\+Chimera'"):
        create()


def test_heads_are_those_of_graphgps_unless_given(gps, load):
    for options, heads in (((), 4), (("chimera.heads", 2), 2)):
        load("graphgps", *options)
        assert {layer.mixer.heads for layer in create()[1].model.layers} == {heads}


def test_options_that_do_not_fit_leave_the_configuration_as_it_was(gps, load):
    for option, value, message in (
        ("chimera.heads", 3, "'heads' must divide"),
        ("gt.dim_hidden", 16, "dims must match"),
    ):
        cfg = load("graphgps", option, value)
        with pytest.raises(ValueError, match=message):
            create()
        assert cfg.gt.layer_type == "CustomGatedGCN+Chimera"


def test_our_layers_and_networks_work_there_too(gps, load):
    for config in ("chimera_gps", "plstm_layer"):
        load(config)
        loaders, model = create()
        loss = model.training_step(next(iter(loaders[0])))["loss"]
        assert torch.isfinite(loss)


def test_copies_and_checkpoints(gps, load):
    load("graphgps", "gt.layer_type", "CustomGatedGCN+GraphMamba")
    loaders, model = create()
    _, other = create(seed=1)
    other.load_state_dict(model.state_dict())
    batch = next(iter(loaders[1]))
    again = batch.clone()
    assert model.eval()(batch)[0].equal(other.eval()(again)[0])


def forget(monkeypatch):
    for name in [name for name in sys.modules if ours(name)]:
        monkeypatch.delitem(sys.modules, name)


def test_the_absence_of_graphgps_is_passed_over(gym, monkeypatch):
    import pyg_chimera.graphgym

    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "graphgps", None)
    gym.network_dict.pop("ChimeraGPSModel", None)
    pyg_chimera.graphgym.register()
    assert "ChimeraGPS" in gym.network_dict
    assert "ChimeraGPSModel" not in gym.network_dict


@pytest.mark.skipif(REAL, reason="a package is found before a folder")
def test_a_folder_of_that_name_is_not_graphgps(gym, monkeypatch, tmp_path):
    import pyg_chimera.graphgym

    forget(monkeypatch)
    (tmp_path / "graphgps").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    gym.network_dict.pop("ChimeraGPSModel", None)
    pyg_chimera.graphgym.register()
    assert "ChimeraGPSModel" not in gym.network_dict


def test_what_graphgps_misses_is_not_passed_over(gym, monkeypatch, tmp_path):
    import pyg_chimera.graphgym

    forget(monkeypatch)
    (tmp_path / "graphgps").mkdir()
    (tmp_path / "graphgps" / "__init__.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        pyg_chimera.graphgym.register()
