"""Numbers of the released implementations, inputs, outputs and gradients."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from asserts import assert_near
from scans import GATES

from pyg_chimera.ops import grid_scan, stm_scan

GOLDEN = Path(__file__).parents[2] / "golden"
OPTIONS = [*product(("state", "mask"), ("numba", "torch")), ("auto", "reference")]
options = pytest.mark.parametrize(
    ("form", "backend"), OPTIONS, ids=map("-".join, OPTIONS)
)


def load(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


@options
def test_dag(form, backend):
    data = load("plstm_dag")
    # [heads, nodes or edges, ...] there.
    inputs = [data[x].transpose(0, 1).contiguous().requires_grad_() for x in GATES]
    out = stm_scan(
        *inputs, data["edge_index"], data["line_edge_index"], form=form, backend=backend
    )
    assert_near(out.transpose(0, 1), data["out"])
    out.backward(data["grad_out"].transpose(0, 1))
    for name, x in zip(GATES, inputs, strict=True):
        assert_near(x.grad.transpose(0, 1), data[f"grad_{name}"], what=name)


def by_node(x: torch.Tensor) -> torch.Tensor:
    """[batch, column, row, ...] -> [nodes, ...]: axis 1 leads to the right there."""
    return x.transpose(1, 2).flatten(0, 2)


@options
def test_grid(form, backend):
    data = load("plstm_grid")
    names = [name for name in data if f"grad_{name}" in data and name != "out"]
    x = {name: data[name].clone().requires_grad_() for name in names}
    heads = {name: by_node(y).unsqueeze(1) for name, y in x.items()}  # one of them

    def directions(first: str, second: str) -> torch.Tensor:
        return torch.stack([heads[first], heads[second]], dim=1)

    right = directions("t_right_from_left", "t_right_from_up")
    down = directions("t_down_from_left", "t_down_from_up")
    _, width, height, states = data["query"].shape
    out = grid_scan(
        heads["query"] / states**0.5,
        heads["key"],
        heads["value"],
        directions("source_right", "source_down").unsqueeze(1),
        torch.stack([right, down], dim=1).unsqueeze(1),
        directions("mark_left", "mark_up").unsqueeze(1),
        heads["direct"],
        height,
        width,
        form=form,
        backend=backend,
    )
    assert_near(out.squeeze(1), by_node(data["out"]))
    out.backward(by_node(data["grad_out"]).unsqueeze(1))
    assert len(names) == 12
    for name in names:
        assert_near(x[name].grad, data[f"grad_{name}"], what=name)
