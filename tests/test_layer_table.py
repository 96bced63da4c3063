"""The table of layers says what the layers do."""

import importlib.util
import inspect
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pyg_chimera import nn
from pyg_chimera.ops import portable
from pyg_chimera.ops.common.operator import Operator

DOCS = Path(__file__).parents[1] / "docs"
C, EDGE = 8, 3
PATH = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
EDGES = {
    "any": torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 0, 0, 4, 4]]),
    "DAG": torch.tensor([[0, 1, 0, 2], [1, 2, 3, 4]]),
    "path": torch.cat([PATH, PATH.flip(0)], 1),
}


def _script():
    path = DOCS / "layer_table.py"
    spec = importlib.util.spec_from_file_location("layer_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()
every = pytest.mark.parametrize("name", script.ROWS)


def run(conv, kind, edge_attr=None, **kwargs):
    """The layer on five nodes."""
    x = torch.randn(5, C)
    if kind == "grid":
        return conv(x, height=1, width=5, **kwargs)
    edges = EDGES[kind]
    if "pos" in inspect.signature(conv.forward).parameters:
        kwargs["pos"] = torch.arange(5)
    if edge_attr is not None:
        kwargs["edge_attr"] = edge_attr(edges)
    out = conv(x, edges, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def kinds(name):
    """The graphs that the table lists."""
    words = script.ROWS[name].graphs.replace(",", "").replace(";", "").split()
    return [kind for kind in (*EDGES, "grid") if kind in words]


def layer(name, **kwargs):
    return getattr(nn, name)(kwargs.pop("in_channels", C), C, **kwargs)


def test_page_is_up_to_date():
    """If not: python docs/layer_table.py"""
    assert script.PAGE.read_text(encoding="utf-8") == script.page()


def test_all_layers_are_there():
    assert sorted(script.ROWS) == sorted(script.convs())


@every
def test_graphs(name):
    listed = kinds(name)
    assert listed
    for kind in listed:
        assert run(layer(name), kind).shape == (5, C)
    if "any" not in listed:
        with pytest.raises((TypeError, ValueError)):
            run(layer(name), "any")
    if "order" in script.ROWS[name].graphs:
        for order in ("order", "degree"):
            assert run(layer(name, order=order), "any").isfinite().all()


@every
def test_edge_features(name):
    kind = kinds(name)[0]
    if not script.takes_edges(name):
        with pytest.raises((TypeError, ValueError), match="edge_dim"):
            layer(name, edge_dim=EDGE)
        return
    conv = layer(name, edge_dim=EDGE)
    with torch.no_grad():
        for parameter in conv.parameters():  # some are zero at first
            parameter.add_(torch.randn_like(parameter))
    torch.manual_seed(0)
    zeros = run(conv, kind, lambda edges: torch.zeros(edges.size(1), EDGE))
    torch.manual_seed(0)
    ones = run(conv, kind, lambda edges: torch.ones(edges.size(1), EDGE))
    assert not torch.equal(zeros, ones)


@every
def test_lazy_sizes(name):
    if script.is_lazy(name):
        conv = layer(name, in_channels=-1)
        run(conv, kinds(name)[0])
        assert all(p.numel() for p in conv.parameters())


@every
def test_batches(name):
    assert script.takes_batches(name)
    if kinds(name)[0] == "grid":
        x = torch.randn(4, C)
        whole = torch.tensor([2, 2])
        batch, single = torch.tensor([0, 0, 1, 1]), layer(name).eval()
        out = single(x, batch=batch, height=torch.ones_like(whole), width=whole)
        assert torch.allclose(out[:2], single(x[:2], height=1, width=2), atol=1e-5)
        return
    run(layer(name), kinds(name)[0], batch=torch.zeros(5, dtype=torch.long))


#: Options with which sequences are continued.
FORWARD = {
    "GraphMambaConv": {"order": "order", "bidirectional": False, "num_bins": 1},
    "ChimeraGridConv": {"num_dags": 1, "window": None},
    "PLSTMGridConv": {"num_dags": 1, "window": None},
    "RGLRUConv": {"conv_kernel": 1},
}


@every
def test_steps(name):
    ways = script.continued(name)
    assert ("sequences" in ways) == (name in FORWARD)
    if "sequences" in ways:
        conv, x, state = layer(name, **FORWARD[name]).eval(), torch.randn(3, C), None
        outs = []
        for row in x:
            out, state = conv.step(row[None], state)
            outs.append(out)
        edges = torch.tensor([[0, 1], [1, 2]])
        on_grid = kinds(name)[0] == "grid"
        whole = conv(x, height=1, width=3) if on_grid else conv(x, edges)
        assert torch.allclose(torch.cat(outs), whole, atol=1e-5)
    if "DAGs" in ways:
        conv = layer(name, **FORWARD[name]).eval()
        assert conv.resume(torch.randn(5, C), EDGES["DAG"])[0].shape == (5, C)


@every
def test_onnx(name):
    """`tests/test_onnx.py` exports: here, whether there are portable forms."""
    conv, listed = layer(name).eval(), kinds(name)
    kind = "DAG" if "DAG" in listed else listed[0]  # "auto" is for DAGs there
    if script.ROWS[name].onnx:
        with portable():
            assert run(conv, kind).isfinite().all()
    else:
        with portable(), pytest.raises(NotImplementedError, match="portable form"):
            run(conv, kind)


@every
def test_gpu_kernels(name):
    called, original = [], Operator._called

    def spied(self, *args):
        called.append(self)
        return original(self, *args)

    with patch.object(Operator, "_called", spied):
        run(layer(name), kinds(name)[0])
    has_kernels = any("triton" in operator.backends for operator in called)
    assert has_kernels == (script.ROWS[name].gpu != "")


@every
def test_values_to_start_with(name):
    """They are options of the layer, and of a kind that it accepts."""
    (option,) = script.options(script.ROWS[name]).items()
    assert run(layer(name, **dict([option])), kinds(name)[0]).isfinite().all()
