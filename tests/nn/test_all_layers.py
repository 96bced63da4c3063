"""What layers and models have in common."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from asserts import assert_near
from convs import CHANNELS
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layers import LAYERS, Floats, Layer
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from pyg_chimera import ops
from pyg_chimera.nn import (
    GraphModel,
    HybridModel,
    KHopAttentionConv,
    PLSTMConv,
)

every_layer = pytest.mark.parametrize("name", LAYERS)
# Of PyTorch's own attention, which has no batching rule.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

# ------------------------------------------------------------------------- NaN


def results(layer: Layer, floats: Floats) -> Floats:
    """The output, and a gradient of the features."""
    x = floats.get("x", layer.floats["x"]).clone().requires_grad_()
    out = layer(**{**floats, "x": x})
    return {"output": out.detach(), "x": torch.autograd.grad(out.square().sum(), x)[0]}


def changed(x: Tensor, where: Tensor, factor: float) -> Tensor:
    return torch.where(where, factor * x + 0.01, x)


def places(
    floats: Floats, inside: Tensor, with_parameters: bool
) -> Iterator[tuple[str, Tensor]]:
    """One number of a graph, one of its edges, all of its nodes, and parameters."""
    for key, x in floats.items():
        every = torch.ones_like(x, dtype=torch.bool)
        one = torch.zeros_like(every)
        if key == "x":
            one[int(inside.nonzero()[1]), 1] = True
            yield key, one
            yield key, every & inside[:, None]
        elif key == "edge_attr":
            one[0, 1] = True
            yield key, one
        elif with_parameters:  # of a step that diverged
            yield key, every


@every_layer
@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "unchecked"])
def test_nan_reaches_all_that_depends_on_it(name: str, trusted: bool):
    """And no other graph; or it is refused, unless contents are trusted."""
    layer = Layer.of(name)
    want = results(layer, {})
    inside = layer.batch == 2
    others = ~inside
    if want["output"].size(0) != inside.size(0):  # one row for each graph
        others = torch.arange(want["output"].size(0)) != 2
    for key, where in places(layer.floats, inside, with_parameters=trusted):
        x = layer.floats[key]
        moved = results(layer, {key: changed(x, where, 1.01)})
        try:
            with ops.unchecked() if trusted else nullcontext():
                got = results(layer, {key: changed(x, where, torch.nan)})
        except ValueError as error:
            if trusted:
                raise
            assert re.search("must be finite|must not hold NaN", str(error))  # noqa: PT017
            continue
        for result, y in want.items():
            depends = (moved[result] - y).abs() > 1e-7 * (y.abs() + 0.01)
            assert got[result][depends].isnan().all(), f"{result}, {key}"
        if key in ("x", "edge_attr"):  # solvers may change, with their rounding
            assert_near(got["output"][others], want["output"][others], 1e-12)


# ------------------------------------------------------------------ derivatives


def assert_all_near(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Up to rounding errors of the largest number: some gradients are zero."""
    largest = max(float(x.abs().max()) for x in want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() < 1e-9 * largest


@every_layer
def test_gradients_per_sample(name: str):
    """By `torch.func.vmap`, where the graph is the same for all."""
    layer = Layer.of(name)
    x, *parameters = layer.floats.values()
    samples = torch.stack([x, x.flip(1)])

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        return (
            layer(**dict(zip(layer.floats, (x, *parameters), strict=True))).sin().sum()
        )

    gradients = torch.func.grad(loss, tuple(range(len(layer.floats))))
    want = []
    for sample in samples:
        leaves = [y.clone().requires_grad_() for y in (sample, *parameters)]
        out = loss(*leaves)
        grads = torch.autograd.grad(
            out, leaves, allow_unused=True, materialize_grads=True
        )
        assert_all_near(gradients(sample, *parameters), grads)
        want.append(grads)
    batched = torch.vmap(gradients, (0, *[None] * len(parameters)))
    want = [torch.stack(x) for x in zip(*want, strict=True)]
    assert_all_near(batched(samples, *parameters), want)
    # The parameters of an ensemble.
    ensemble = [torch.stack([y, y * 1.1]) for y in parameters]
    out = torch.vmap(loss, (None, *[0] * len(parameters)))(x, *ensemble)
    each = [loss(x, *(y[i] for y in ensemble)) for i in range(2)]
    assert_near(out, torch.stack(each))


@every_layer
def test_jacobians(name: str):
    layer = Layer.of(name)
    x = layer.floats["x"].clone().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return layer(x=x).flatten()[::7]

    out = function(x)
    rows = torch.eye(out.numel(), dtype=out.dtype)
    want = [torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in rows]
    (batched,) = torch.autograd.grad(out, x, rows, is_grads_batched=True)
    vectorized = torch.autograd.functional.jacobian(function, x, vectorize=True)
    for got in (batched, vectorized, torch.func.jacrev(function)(x.detach())):
        assert_near(got, torch.stack(want))


# ----------------------------------------------------------------- compiled models


def stack(conv: Callable[[], torch.nn.Module]) -> GraphModel:
    """Two layers that compute the same structure of a graph."""
    return GraphModel(CHANNELS, CHANNELS, 3, [conv(), conv()], head="node")


COMPILED = {
    "KHopAttentionConv": (lambda: stack(partial(KHopAttentionConv, CHANNELS, k=2)), 1),
    "PLSTMConv": (lambda: stack(partial(PLSTMConv, CHANNELS, heads=2)), 2),
    "PLSTMConv-bfs": (
        lambda: stack(partial(PLSTMConv, CHANNELS, heads=2, mode="D", order="bfs")), 1
    ),
    "HybridModel": (
        lambda: HybridModel(
            CHANNELS, CHANNELS, 3, num_layers=2, pattern="a", attention="khop",
            attention_kwargs={"k": 2}, heads=2, head="node",
        ),
        1,
    ),
}  # fmt: skip


def compiles(name: str, backend: Any, dynamic: bool, sizes: Sequence[int]) -> None:
    """As in training, in one piece; on paths, DAGs if edges go one way only."""
    make, step = COMPILED[name]
    model = make().double()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    for num_nodes in sizes:
        pairs = torch.arange(num_nodes).unfold(0, 2, 1).t()
        edges = torch.stack([pairs, pairs.flip(0)], 2).flatten(1)[:, ::step]
        x = torch.randn(num_nodes, CHANNELS, dtype=torch.double, requires_grad=True)
        outs = [run(x, edges) for run in (compiled, model)]
        grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in outs]
        assert_near(*outs)
        assert_near(*grads)


def with_known_sizes(graph: torch.fx.GraphModule, _: Any) -> Callable:
    """A compiler that checks what native code needs: each size that an operator makes
    is read from a result of it that is left.
    """
    known: set = set()
    for node in graph.graph.nodes:
        sizes = free_unbacked_symbols(node.meta.get("val"))
        if node.op == "placeholder" or "pyg_chimera" in str(node.target):
            known |= sizes
        assert sizes <= known, f"{node} has an unknown size"
    return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("KHopAttentionConv", True),
        ("PLSTMConv", False),
        pytest.param("PLSTMConv-bfs", True, marks=pytest.mark.slow),
        ("HybridModel", False),
    ],
)
def test_layers_of_one_model_do_not_lose_sizes(name: str, dynamic: bool):
    """Compilers merge equal calls of two layers, and so must not find any."""
    backend = aot_autograd(
        fw_compiler=with_known_sizes,
        bw_compiler=with_known_sizes,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiles(name, backend, dynamic, sizes=[5])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs C++"
)
def test_a_model_compiles_to_native_code():
    """One stack; of the others, only sizes are checked above. `test_all_convs` has
    native code of a single layer.
    """
    compiles("KHopAttentionConv", "inductor", dynamic=True, sizes=[5, 8])
