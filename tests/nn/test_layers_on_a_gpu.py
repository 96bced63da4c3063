"""What layers and models compute on a GPU, beside what they compute on the CPU."""

from copy import deepcopy

import pytest
import torch
from asserts import assert_near
from layers import LAYERS, Layer
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import grid, remove_self_loops

from pyg_chimera import ops
from pyg_chimera.nn import (
    ChimeraConv,
    GatedDeltaConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    PLSTMConv,
)
from pyg_chimera.transforms import PadBatch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
#: By dtype, how far results may be off, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def results(layer: Layer, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The output, and the gradients of all that is differentiated, on the CPU."""
    layer = layer._replace(module=deepcopy(layer.module).to(device, dtype))
    leaves = {x: y.to(device, dtype).requires_grad_() for x, y in layer.floats.items()}
    out = layer(**leaves)
    assert out.device.type == device
    assert out.dtype == dtype
    grads = torch.autograd.grad(
        out.sin().sum(), list(leaves.values()), allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip
    found = dict(zip(leaves, grads, strict=True)) | {"output": out}
    return {x: y.detach().cpu() for x, y in found.items()}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype):
    layer = Layer.of(name)
    want = results(layer, torch.float64, "cpu")
    got = results(layer, dtype, "cuda")
    largest = max(float(y.abs().max()) for x, y in want.items() if x != "output")
    assert_near(got.pop("output"), want["output"], TOLERANCE[dtype])
    for x, y in got.items():  # some gradients are zero
        assert (y - want[x]).abs().max() <= TOLERANCE[dtype] * largest, x


# --------------------------------------------------------------------------- as trained

MIXERS = {
    "ChimeraConv": lambda: ChimeraConv(16, 16, heads=2),
    "PLSTMConv": lambda: PLSTMConv(16, heads=2, order="bfs"),
    "GraphMambaConv": lambda: GraphMambaConv(16),
    "GatedDeltaConv": lambda: GatedDeltaConv(16, heads=2, state_channels=8),
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and the batch vector of two grids."""
    edges, _ = grid(5, 6)
    edges, _ = remove_self_loops(edges)
    index = torch.cat([edges, edges + 30], 1)
    batch = torch.arange(2).repeat_interleave(30)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(60, 16, generator=generator), index, batch


def model(mixer: str) -> GraphModel:
    torch.manual_seed(0)
    return GraphModel(
        16, 16, 3, lambda _: GPSLayer(16, mixer=MIXERS[mixer]()), 2, head="node"
    )


@every_mixer
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_training(mixer: str, half: bool):
    """A few steps lower the loss, within autocast too."""
    x, index, batch = (y.cuda() for y in graph())
    trained = model(mixer).cuda()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.003)
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = trained(x, index, batch=batch)
        loss = torch.nn.functional.cross_entropy(out.float(), batch + (x[:, 0] > 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@every_mixer
def test_compiled(mixer: str):
    x, index, batch = (y.cuda() for y in graph())
    eager = model(mixer).cuda().eval()
    compiled = torch.compile(eager)
    for run in (0, 1):  # the second without compiling
        assert_near(
            compiled(x + run, index, batch=batch),
            eager(x + run, index, batch=batch),
            1e-4,
        )


@pytest.mark.parametrize("mixer", ["ChimeraConv", "GatedDeltaConv"])
def test_captured_in_a_cuda_graph(mixer: str):
    """A step, forward and backward, on a graph that has been seen before."""
    x, index, batch = (y.cuda() for y in graph())
    layer = MIXERS[mixer]().cuda()
    leaf = x.clone().requires_grad_()

    def step() -> Tensor:
        with ops.unchecked():
            out = layer(leaf, index, batch=batch)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        return torch.cat([out.detach(), grad])

    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(other)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = step()
    with torch.no_grad():
        leaf.copy_(2 * x)
    captured.replay()
    assert_near(out, step(), 1e-5)


def test_captured_for_other_graphs():
    """A step on padded batches, whose tables are copied over those of the first."""
    torch.manual_seed(0)
    layer, graphs = MIXERS["ChimeraConv"]().cuda(), []
    for size in (56, 54, 40, 70):
        edge_index, _ = remove_self_loops(grid(2, size // 2)[0])
        graphs.append(Data(x=torch.randn(size, 16), edge_index=edge_index))
    first, second = (PadBatch(steps=1)(x) for x in (graphs[:2], graphs[2:]))
    static = first.clone().cuda()
    leaf = static.x.requires_grad_()

    def step() -> Tensor:
        with ops.unchecked():
            out = layer(leaf, static.edge_index, batch=static.batch)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        return torch.cat([out.detach(), grad])

    tables = ops.StaticTables(static.edge_index, static.batch, room=2)
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with tables:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            step()
        torch.cuda.current_stream().wait_stream(other)
        with torch.cuda.graph(graph):
            out = step()
    for batch in (second, first):
        tables.update(batch.edge_index, batch.batch)
        with torch.no_grad():
            leaf.copy_(batch.x)
        graph.replay()
        assert_near(out, step(), 1e-5)
