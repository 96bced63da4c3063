import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from pyg_chimera.nn import (
    GraphModel,
    HybridModel,
    ImageClassifier,
    RandomWalkEncoder,
    SequenceEncoder,
)
from pyg_chimera.nn.models._pretrained import build
from pyg_chimera.transforms import ImageToGraph, SequenceToGraph

ROOT = Path(__file__).parents[3]
C = 8
#: A layer, in which there is one of PyG's and one of this library's.
LAYER = {
    "class": "GPSLayer",
    "channels": C,
    "conv": {"class": "GINEConv", "nn": {"class": "Linear", "in_channels": C,
                                         "out_channels": C}},
    "mixer": {"class": "ChimeraConv", "in_channels": C, "reach": (2, 9)},
}  # fmt: skip


def make_model(layers=LAYER, **kwargs) -> GraphModel:
    return GraphModel([3, 5], C, 2, layers, 2, **{"edge_dim": 4, **kwargs})


def make_data() -> Data:
    nodes = torch.arange(6)
    return Data(
        x=torch.stack([nodes % 3, nodes % 5], 1),
        edge_index=torch.stack([nodes, nodes.roll(1)]),
        edge_attr=torch.randn(6, 4),
        walk=torch.rand(6, 4),
    )


def answer(model: GraphModel, data: Data) -> torch.Tensor:
    return model.eval()(**model.inputs(data))


def sage(_: int) -> SAGEConv:
    return SAGEConv(C, C)


@pytest.fixture
def saved(tmp_path) -> Path:
    make_model().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_descriptions_are_layers_of_their_own():
    model = make_model()
    assert [type(layer).__name__ for layer in model.layers] == 2 * ["GPSLayer"]
    first, second = (layer.mixer.lin_query.weight for layer in model.layers)
    assert first.data_ptr() != second.data_ptr()
    assert LAYER["conv"]["class"] == "GINEConv"  # as it was


def test_lists_of_descriptions(tmp_path):
    """One for each layer, and within arguments: lists, and mappings in them."""
    aggr = [{"class": "SoftmaxAggregation", "learn": True}, "mean"]
    sizes = {"in_channels": C, "out_channels": C}
    pooled = {"class": "SAGEConv", "aggr": aggr, **sizes}
    steps = [[{"class": "GCNConv", **sizes}, "x, edge_index -> x"]]
    composed = {"class": "Sequential", "input_args": "x, edge_index", "modules": steps}
    assert type(build(composed)[0]).__name__ == "GCNConv"
    model, data = make_model([pooled, LAYER["conv"]]), make_data()
    assert type(model.layers[0].aggr_module.aggrs[0]).__name__ == "SoftmaxAggregation"
    model.save_pretrained(tmp_path / "saved")
    loaded = GraphModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(answer(loaded, data), answer(model, data))


def test_what_is_saved_is_loaded(tmp_path):
    model, data = make_model(head="node", head_layers=np.int64(3)), make_data()
    model.train()(**model.inputs(data))  # norms have statistics
    model.save_pretrained(tmp_path / "deep" / "folder", card="# A card\n")
    assert (tmp_path / "deep" / "folder" / "README.md").read_text() == "# A card\n"
    loaded = GraphModel.from_pretrained(tmp_path / "deep" / "folder")
    assert not loaded.training
    assert torch.equal(answer(loaded, data), answer(model, data))
    assert len(loaded.mlp.lins) == 3
    loaded.save_pretrained(f"{tmp_path}/again/")  # and again
    again = GraphModel.from_pretrained(f"{tmp_path}/again/")
    assert torch.equal(answer(again, data), answer(model, data))
    assert sorted(os.listdir(tmp_path / "again")) == ["config.json", "model.pth"]
    assert sorted(os.listdir(tmp_path)) == ["again", "deep"]


def test_what_is_no_plain_data_is_passed_again(tmp_path):
    given = {"encodings": {"walk": RandomWalkEncoder(4, 2)}}
    model, data = make_model(sage, edge_dim=None, **given), make_data()
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"'encodings'.*layers=\.\.\., encodings="):
        GraphModel.from_pretrained(tmp_path / "saved")
    again = {"encodings": {"walk": RandomWalkEncoder(4, 2)}, "layers": sage}
    loaded = GraphModel.from_pretrained(tmp_path / "saved", **again)
    assert torch.equal(answer(loaded, data), answer(model, data))


class Narrow(GraphModel):
    """A model of a user's."""

    def __init__(self, width: int, **kwargs):
        super().__init__(3, width, 2, LAYER["mixer"], 2, **kwargs)


class Wrapped(GraphModel):
    """Another, which has only names of its base class."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


IMAGE, TEXT = ImageToGraph(2)(torch.rand(3, 4, 6)), SequenceToGraph("abc")("abcab")
OWN = {
    "hybrid": (lambda: HybridModel(3, C, 2, 3, kind="sequence", head="node"), None),
    "preset": (lambda: HybridModel.preset("proposed", 3, C, 2, num_layers=4), None),
    "image": (
        lambda: ImageClassifier(
            12, C, 2, 2, position="learned", size=(3, 2),
            mixer_kwargs={"window": (1, 3)},
        ),
        IMAGE,
    ),
    "text": (lambda: SequenceEncoder(3, C, num_layers=2, head="lm"), TEXT),
    "user": (lambda: Narrow(C, head="node"), None),
}  # fmt: skip


def test_arguments_without_names(tmp_path):
    model = Wrapped(3, C, 2, LAYER["mixer"], 2, head="node")
    model.save_pretrained(tmp_path / "saved")
    loaded = Wrapped.from_pretrained(tmp_path / "saved")
    data = make_data()
    data.x = torch.randn(6, 3)
    assert torch.equal(answer(loaded, data), answer(model, data))


@pytest.mark.parametrize("name", OWN)
def test_models_with_constructors_of_their_own(tmp_path, name):
    make, data = OWN[name]
    model = make()
    if data is None:
        data = make_data()
        data.x = torch.randn(6, 3)
    out = answer(model, data)
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(answer(loaded, data), out)
    with pytest.raises(ValueError, match=f"The {type(model).__name__} in .* not fit"):
        GraphModel.from_pretrained(tmp_path / "saved")


def test_arguments_can_be_changed(saved):
    assert GraphModel.from_pretrained(saved, dropout=0.3).mlp.dropout[0] == 0.3
    with pytest.raises(ValueError, match=r"does not fit(.|\n)*size mismatch"):
        GraphModel.from_pretrained(saved, out_channels=3)
    with pytest.raises(ValueError, match=r"does not fit.*'drop_out'"):
        GraphModel.from_pretrained(saved, drop_out=0.3)


def test_nothing_is_overwritten(saved):
    before = (saved / "model.pth").read_bytes()
    with pytest.raises(ValueError, match="'path' must not exist yet"):
        make_model().save_pretrained(saved)
    assert (saved / "model.pth").read_bytes() == before


def test_half_a_folder_is_none(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        make_model().save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(tmp_path, dtype):
    model = make_model(head="node").to(dtype)
    model.save_pretrained(tmp_path / "saved")
    loaded = GraphModel.from_pretrained(tmp_path / "saved")
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == value.dtype
        assert torch.equal(loaded.state_dict()[name], value)


def test_unknown_sizes(tmp_path):
    model = GraphModel(-1, C, 2, sage, 2)
    with pytest.raises(ValueError, match=r"node_encoder\.weight.*Call it once"):
        model.save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == []
    x, edge_index = torch.randn(6, 7), make_data().edge_index
    out = model.eval()(x, edge_index)
    model.save_pretrained(tmp_path / "saved")
    loaded = GraphModel.from_pretrained(tmp_path / "saved", layers=sage)
    assert torch.equal(loaded(x, edge_index), out)


@pytest.mark.parametrize(
    "name",
    ["Chimera", "chimera_conv", "functional", "GraphModel2", None, "MessagePassing.x"],
)
def test_classes_are_modules_of_the_two_libraries(name):
    with pytest.raises(ValueError, match="'class' must name a module of"):
        make_model({"class": name} if name else {"channels": C})


def test_number_of_layers_of_a_description():
    with pytest.raises(ValueError, match="'num_layers' must be a number of layers"):
        GraphModel(3, C, 2, LAYER, edge_dim=4)


class Runs:
    """What runs when it is loaded with `weights_only=False`."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def put(path, weights):
    """Writes a file of weights whose checksum is right."""
    torch.save(weights, path / "model.pth")
    config = json.loads((path / "config.json").read_text())
    config["sha256"] = hashlib.sha256((path / "model.pth").read_bytes()).hexdigest()
    (path / "config.json").write_text(json.dumps(config))


DAMAGES = {
    "no-folder": (lambda path: shutil.rmtree(path), "no config.json and no model.pth"),
    "no-weights": (lambda path: (path / "model.pth").unlink(), "no model.pth"),
    "no-json": (lambda path: (path / "config.json").write_text("{"), "is damaged"),
    "a-list": (lambda path: (path / "config.json").write_text("[]"), "is damaged"),
    "no-arguments": (
        lambda path: (path / "config.json").write_text('{"version": ""}'),
        "must hold .*'arguments'",
    ),
    "no-weights-in-it": (
        lambda path: (path / "model.pth").write_bytes(b"PK"),
        "is damaged, or not the file",
    ),
    "cut": (
        lambda path: (path / "model.pth").write_bytes(
            (path / "model.pth").read_bytes()[:-2000]
        ),
        "is damaged, or not the file",
    ),
    "empty": (lambda path: (path / "model.pth").write_bytes(b""), "is damaged"),
    "a-program": (lambda path: put(path, Runs()), "has no weights"),
    "a-tensor": (
        lambda path: put(path, torch.ones(2)),
        "does not fit: ",
    ),
    "other-weights": (
        lambda path: put(path, {"weight": torch.ones(2)}),
        r"saved by version .* does not fit: (.|\n)*Missing key",
    ),
    "unknown-option": (
        lambda path: (path / "config.json").write_text(
            (path / "config.json").read_text().replace('"reach"', '"range"')
        ),
        "does not fit: .*'range'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(saved, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harm, message = DAMAGES[damage]
    harm(saved)
    with pytest.raises(ValueError, match=message):
        GraphModel.from_pretrained(saved)
    assert not (tmp_path / "ran").exists()


def test_configuration_can_be_read(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["missing"] == []
    assert config["arguments"]["in_channels"] == [3, 5]
    assert config["arguments"]["layers"]["mixer"]["reach"] == [2, 9]
    assert config["arguments"]["decoder"] == "dot"  # defaults too, which may change
