"""What layers and models have in common."""

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from asserts import assert_near
from layers import LAYERS, Floats, Layer
from torch import Tensor

from pyg_chimera import ops

every_layer = pytest.mark.parametrize("name", LAYERS)


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
