"""Layers and encoders of sequences in onnxruntime, for graphs of other sizes than the
exported one (a `GraphModel`: docs/export.md).
"""

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from asserts import assert_near
from torch import Tensor
from torch.export import Dim
from torch_geometric.data import Batch

from pyg_chimera import nn, ops
from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GraphModel,
    SequenceEncoder,
)
from pyg_chimera.transforms import SequenceToGraph

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CHANNELS, EDGE = 8, 3
Inputs = dict[str, Any]
slow = partial(pytest.param, marks=pytest.mark.slow)

#: Layers with options that differ in what they compute, and their kind of graph.
LAYERS: dict[str, tuple[Callable[..., torch.nn.Module], str]] = {
    "ChimeraConv": (partial(ChimeraConv, heads=2, edge_dim=EDGE), "any"),
    "ChimeraConv-released": (
        partial(ChimeraConv, normalization="released", local_conv=True,
                solver="neumann", num_terms=3), "any"),
    "ChimeraConv-log_sums": (partial(ChimeraConv, heads=2, log_sums=2), "any"),
    "ChimeraDAGConv": (partial(nn.ChimeraDAGConv, heads=2, edge_dim=EDGE), "dag"),
    "ChimeraPathConv": (partial(nn.ChimeraPathConv, heads=2), "path"),
    "GatedDeltaConv": (partial(nn.GatedDeltaConv, heads=2), "any"),
    "GatedDeltaConv-acyclic": (partial(nn.GatedDeltaConv, acyclic=True), "dag"),
    "RGLRUConv": (partial(nn.RGLRUConv, heads=2, edge_dim=EDGE), "dag"),
    "KHopAttentionConv": (
        partial(nn.KHopAttentionConv, k=2, heads=2, edge_dim=EDGE), "any"),
    "KHopAttentionConv-rotary": (
        partial(nn.KHopAttentionConv, k=3, rotary=True), "dag"),
    "PLSTMConv": (partial(nn.PLSTMConv, heads=2, edge_dim=EDGE, tracking=2), "dag"),
    "PLSTMConv-D": (partial(nn.PLSTMConv, mode="D"), "dag"),
    "PLSTMConv-degree": (partial(nn.PLSTMConv, order="degree"), "any"),
    "GraphMambaConv": (
        partial(nn.GraphMambaConv, order=None, num_bins=2, bidirectional=True), "any"),
    "GatedGCNConv": (partial(GatedGCNConv, CHANNELS, edge_dim=EDGE), "any"),
    "ChimeraGridConv": (partial(nn.ChimeraGridConv, heads=2, window=(3, 3)), "grid"),
    "PLSTMGridConv": (partial(nn.PLSTMGridConv, heads=2, num_dags=4), "grid"),
}  # fmt: skip


def varied(module: torch.nn.Module) -> torch.nn.Module:
    """With gates that differ between nodes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return module.eval()


def graphs(kind: str, sizes: list[int]) -> Inputs:
    """A batch of graphs, their nodes in any order."""
    edges, counts = [], torch.tensor(sizes)
    for first, size in zip((counts.cumsum(0) - counts).tolist(), sizes, strict=True):
        node = torch.arange(first, first + size)
        edges.append(torch.stack([node[:-1], node[1:]]))
        if kind != "path":
            edges.append(torch.stack([node[:-3:2], node[3::2]]))
    name = torch.randperm(int(counts.sum()))
    index, batch = name[torch.cat(edges, 1)], torch.empty_like(name)
    batch[name] = torch.arange(len(sizes)).repeat_interleave(counts)
    if kind != "dag":
        index = torch.cat([index, index.flip(0)], 1)
    return {"x": torch.randn(len(name), CHANNELS), "edge_index": index, "batch": batch}


def grids(kind: str, sizes: list[tuple[int, int]]) -> Inputs:
    height, width = torch.tensor(sizes).t().contiguous()
    x = torch.randn(int((height * width).sum()), CHANNELS)
    return {"x": x, "height": height, "width": width}


def sequences(model: GraphModel, lengths: list[int]) -> Inputs:
    data = [SequenceToGraph()(torch.randint(5, (n,))) for n in lengths]
    return model.inputs(Batch.from_data_list(data))


class _ByPosition(torch.nn.Module):
    """PyTorch exports arguments in `**kwargs` for one size only."""

    def __init__(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.module, self.names = module, list(names)

    def forward(self, *args: Any) -> Any:
        return self.module(**dict(zip(self.names, args, strict=True)))


def exported(module: torch.nn.Module, inputs: Inputs) -> Callable[[Inputs], Tensor]:
    """What onnxruntime computes, for any number of nodes, edges and graphs."""
    sizes = {"edge_index": {1: Dim.DYNAMIC}, "batch_size": Dim.DYNAMIC}
    shapes = {name: sizes.get(name, {0: Dim.DYNAMIC}) for name in inputs}
    program = torch.onnx.export(
        _ByPosition(module, inputs), tuple(inputs.values()),
        dynamic_shapes={"args": tuple(shapes.values())}, input_names=list(inputs),
        dynamo=True, verbose=False,
    )  # fmt: skip
    file = io.BytesIO()
    program.save(file)
    assert {x.domain for x in program.model_proto.opset_import} <= {"", "pkg"}
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]

    def run(inputs: Inputs) -> Tensor:
        given = {name: torch.as_tensor(inputs[name]).numpy() for name in names}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def assert_exports(module: torch.nn.Module, *inputs: Inputs) -> None:
    """Exported for the first inputs, it gives the same for all."""
    run = exported(module, inputs[0])
    for given in inputs:
        with torch.no_grad():
            out = module(**given)
        assert_near(run(given), out[0] if isinstance(out, tuple) else out, 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str):
    make, kind = LAYERS[name]
    conv = varied(make(CHANNELS))
    some = grids if kind == "grid" else graphs
    sizes = [[9], [5, 14]]
    if kind == "grid":
        sizes = [[(4, 5), (2, 2)], [(2, 3), (5, 1), (3, 4)]]
    batches = [some(kind, x) for x in sizes]
    for inputs in batches:
        if isinstance(conv, GatedGCNConv):
            del inputs["batch"]
        if getattr(conv, "edge_dim", None):
            inputs["edge_attr"] = torch.randn(inputs["edge_index"].size(1), EDGE)
        if getattr(conv, "order", "") is None and isinstance(conv, nn.GraphMambaConv):
            inputs["score"] = torch.randn(len(inputs["x"]))
    assert_exports(conv, *batches)


@pytest.mark.parametrize("mixer", ["graph_mamba", slow("plstm")])
def test_sequence_encoders(mixer: str):
    model = varied(
        SequenceEncoder(
            5, CHANNELS, 3, 1, mixer, 2, head="classify", position="sinusoidal"
        )
    )
    assert_exports(model, *(sequences(model, x) for x in ([4, 6], [3, 9, 7])))


# ------------------------------------------------------------------- programs, errors


def test_programs_of_plain_operations():
    """Without onnxruntime, such as for C++."""
    conv, inputs = ChimeraConv(CHANNELS, heads=2).eval(), graphs("any", [9])
    args = inputs["x"], inputs["edge_index"]
    shapes = {"x": {0: Dim.DYNAMIC}, "edge_index": {1: Dim.DYNAMIC}}
    with ops.portable():
        program = torch.export.export(conv, args, dynamic_shapes=shapes)
    assert "pyg_chimera" not in str(program.graph)
    inputs = graphs("any", [5, 14])
    args = inputs["x"], inputs["edge_index"]
    assert_near(program.module()(*args), conv(*args), 1e-5)


def test_errors():
    args = tuple(graphs("any", [9]).values())[:2]
    program = torch.export.export(ChimeraConv(CHANNELS).eval(), args)
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"ops\.portable\(\)"):
        torch.onnx.export(program, verbose=False)
    searched = nn.PLSTMConv(CHANNELS, order="bfs").eval()
    with pytest.raises(torch.onnx.OnnxExporterError, match="order='bfs' has no"):
        torch.onnx.export(searched, args, dynamo=True, verbose=False)
