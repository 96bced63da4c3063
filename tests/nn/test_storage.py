"""Nobody's storage is marked as not resizable: FSDP2 resizes parameters between calls,
and users resize what they fill by `out=`.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asserts import assert_near
from convs import CASES, GRAPH, Case, every_conv
from layers import LAYERS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from pyg_chimera import ops, transforms

every_layer = pytest.mark.parametrize("name", LAYERS)


def assert_resizable(*given: Any) -> None:
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    assert tensors
    for x in tensors:
        assert x.untyped_storage().resizable(), x.shape


def watched(module: torch.nn.Module) -> list:
    """What it will be called with."""
    given: list = []
    module.register_forward_pre_hook(
        lambda module, args, kwargs: given.extend([args, kwargs]), with_kwargs=True
    )
    return given


@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "unchecked"])
@every_conv
def test_of_layers(case: Case, trusted: bool):
    """Of their parameters, buffers and all inputs, after both passes."""
    conv, inputs = case.trained(), case.inputs()
    given, leaves = watched(conv), [inputs.x, inputs.edge_attr]
    for x in leaves:
        x.requires_grad_()
    for _ in range(2):
        with ops.unchecked() if trusted else torch.enable_grad():
            out = case.call(conv, inputs)
        out.sum().backward()
    assert_resizable(given, inputs, *(x.grad for x in leaves if x.grad is not None))
    assert_resizable(list(conv.parameters()), list(conv.buffers()))


@pytest.mark.parametrize("name", [x for x in LAYERS if x not in CASES])
def test_of_models(name: str):
    module = LAYERS[name]()
    model, given = module.model, watched(module.model)

    x = torch.randn(7, 8, dtype=torch.double, requires_grad=True)
    module(x).sum().backward()
    assert_resizable(given, list(model.parameters()), list(model.buffers()))


@pytest.mark.parametrize(
    "transform",
    [
        transforms.AddDiameter(), transforms.AddEliminationOrder(),
        transforms.AddKHopIndex(2), transforms.DAGDecomposition(),
        transforms.LaplacianEncoding(2), transforms.NodeOrder("pagerank"),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_of_graphs(transform):
    edges = to_undirected(torch.tensor(GRAPH).t())
    data = Data(edge_index=edges, x=torch.randn(7, 8), num_nodes=7)
    given = data.to_dict()
    transform(data)
    assert_resizable(given)


# ------------------------------------------------------------------------------- FSDP2


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every_layer
def test_fully_sharded(name: str, mesh: DeviceMesh):
    """Results and gradients are those of the layer itself, in all steps."""
    torch.manual_seed(1)
    plain = LAYERS[name]()
    torch.manual_seed(1)
    sharded = LAYERS[name]()  # which nobody has called before
    for part in sharded.children():
        fully_shard(part, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(7, 8, dtype=torch.double)
    for _ in range(2):
        found = []
        for module in (plain, sharded):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            out.sin().sum().backward()
            grads = [p.grad for p in module.parameters()]
            full = [getattr(g, "full_tensor", lambda g=g: g)() for g in grads]
            found.append([out.detach(), leaf.grad, *full])
        for got, want in zip(*reversed(found), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                assert_near(got, want, 1e-12)


@pytest.mark.slow
def test_random_combinations_in_two_processes():
    """One of each at least: FSDP2, DDP, compilers and both kinds of programs; more by
    `distributed_combinations.py`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parents[1] / "distributed_combinations.py"
    command = [sys.executable, str(script), "--seed", "10", "--cases", "6"]
    command += ["--port", str(port)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.count(": right\n") + out.stdout.count(": refused\n") >= 6
