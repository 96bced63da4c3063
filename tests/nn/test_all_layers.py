"""What layers and models have in common."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from asserts import assert_near
from layers import LAYERS, Floats, Layer
from torch import Tensor

from pyg_chimera import ops
from pyg_chimera.nn import MixtureOfDepths

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
    if any(isinstance(x, MixtureOfDepths) for x in layer.module.modules()):
        with pytest.raises(NotImplementedError, match=r"MixtureOfDepths .* use a loop"):
            batched(samples, *parameters)
        return
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
