"""What is special to `grid_scan`: orientations, and the sizes of grids."""

import numpy as np
import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, Structure, line_edges, make_case

from pyg_chimera.ops import explain, grid_scan, stm_scan
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.cpu import grid_mask, grid_sweep

OPERATOR = OPERATORS["grid_scan"]


def on(sizes, size=(2, 1, 3, 4, 4)):
    """Random inputs on grids, without their heights and widths."""
    nodes = sum(h * w for h, w in sizes)
    graph = torch.zeros(nodes, dtype=torch.long)
    return make_case(OPERATOR, Structure(graph, sizes=tuple(sizes)), size).floats


@pytest.mark.parametrize("orientation", range(4))
def test_where_orientations_lead(orientation):
    """What the middle of a 3 x 3 grid writes, with all gates open."""
    inputs = [torch.zeros(9, 1, 1), torch.zeros(9, 1, 1), torch.zeros(9, 1, 1),
              torch.zeros(9, 4, 2, 1), torch.ones(9, 4, 2, 2, 1),
              torch.ones(9, 4, 2, 1), torch.zeros(9, 1)]  # fmt: skip
    inputs[0][:] = 1
    inputs[1][4] = inputs[2][4] = 1
    inputs[3][4, orientation] = 1
    out = grid_scan(*inputs, 3, 3).view(3, 3)
    expected = torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 2]])  # paths down, right
    flips = {0: (), 1: (0, 1), 2: (0,), 3: (1,)}[orientation]
    assert torch.equal(out, expected.flip(flips) if flips else expected)


def test_sequences_are_grids_of_height_one():
    lengths = torch.tensor([7, 1, 4])
    inputs = on([(1, n) for n in lengths.tolist()], (2, 1, 3, 4, 1))
    out = grid_scan(**inputs, height=1, width=lengths)
    parts = zip(
        *(x.split(lengths.tolist()) for x in (*inputs.values(), out)), strict=True
    )
    for *part, y in parts:
        n = len(y)
        assert_near(grid_scan(*part, 1, n), y, 1e-12)
        q, k, v, source, transition, mark, direct = part
        path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        expected = stm_scan(
            q, k, v, source[:-1, 0, 0], transition[1:-1, 0, 0, 0], mark[1:, 0, 0],
            direct, path, line_edges(path),
        )  # fmt: skip
        assert_near(y, expected, 1e-12)


def test_alike_grids_need_one_size():
    inputs = on([(2, 3)] * 4)
    height, width = torch.tensor([2] * 4), torch.tensor([3] * 4)
    expected = grid_scan(**inputs, height=height, width=width)
    for size in ((2, 3), (2, width), (height, 3), (height.int(), width.tolist()[0])):
        out = grid_scan(**inputs, height=size[0], width=size[1])
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("height", "width", "match"),
    [
        (4, 3, r"of 6 nodes in all, got 12 in 1 grid$"),
        (0, 3, "'height' must be a positive integer, .* got 0"),
        (2, torch.tensor([3.0]), "'width' must be a positive integer, .* got 3.0"),
        (torch.tensor([1, 1]), torch.tensor([3, 2]), "nodes in all, got 5 in 2 grids"),
        (torch.tensor([1, 1, 1]), torch.tensor([3, 3]), "as many grids, got 3 and 2"),
        (torch.tensor([1]), 3, "of 6 nodes in all, got 3 in 1 grid"),
    ],
)  # fmt: skip
def test_bad_sizes(height, width, match):
    for call in (grid_scan, lambda **x: explain("grid_scan", **x)):
        with pytest.raises((TypeError, ValueError), match=match):
            call(**on([(2, 3)]), height=height, width=width)


def test_sizes_that_are_not_contiguous():
    """They are taken in order, or refused by name."""
    inputs = on([(2, 3), (3, 1), (1, 2), (2, 2)])
    height, width = torch.tensor([[2, 1], [3, 2]]).t(), torch.tensor([3, 1, 2, 2])
    expected = grid_scan(**inputs, height=height.flatten(), width=width)
    refused = ""
    try:
        out = grid_scan(**inputs, height=height, width=width)
    except ValueError as refusal:
        refused = str(refusal)
    assert "'height'" in refused if refused else torch.equal(out, expected)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source": torch.ones(6, 3, 2, 2)}, "with 1, 2 or 4 orientations"),
        ({"source": torch.ones(6, 4, 1, 2)}, r"'source' must be .* = \[6, 4, 2, 2\]"),
        ({"transition": torch.full((6, 4, 2, 2, 2), torch.nan)},
         "but node 0 has nan in head 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(changes, match):
    with pytest.raises(ValueError, match=match):
        grid_scan(**{**on([(2, 3)]), **changes}, height=2, width=3)


def with_gradients(inputs, **options):
    """The output and the gradients of all inputs."""
    leaves = {k: x.detach().clone().requires_grad_() for k, x in inputs.items()}
    out = grid_scan(**leaves, **options)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return {"out": out, **{k: x.grad for k, x in leaves.items()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_grids_hold_the_states_of_some_rows_only(dtype):
    lanes, _ = vector_lanes(np.dtype(str(dtype).removeprefix("torch.")))
    assert grid_sweep.rows_held(130, 2 * 70 * 16 * lanes) < 130
    inputs = on([(130, 70), (70, 130), (2, 2)], (1, 1, 17, lanes + 1, 4))
    height, width = torch.tensor([130, 70, 2]), torch.tensor([70, 130, 2])
    options = {"height": height, "width": width, "form": "state"}
    expected = with_gradients(inputs, **options, backend="torch")
    inputs = {k: x.to(dtype) for k, x in inputs.items()}
    found = with_gradients(inputs, **options, backend="numba")
    for name, x in expected.items():
        assert_near(found[name].double(), x, 1e-12 if dtype == torch.float64 else 3e-6)


def test_masks_of_large_grids_are_computed_some_columns_at_a_time():
    sizes = [(17, 19), (3, 5), (2, 150), (1, 4)]
    assert grid_mask.WIDTH < 17 * 19
    inputs = on(sizes, (4, 2, 3, 5, 4))
    height, width = torch.tensor(sizes).unbind(1)
    options = {"height": height, "width": width, "form": "mask"}
    expected = with_gradients(inputs, height=height, width=width, backend="torch")
    found = with_gradients(inputs, **options, backend="numba")
    for name, x in expected.items():
        assert_near(found[name], x, 1e-12)


def test_masks_are_for_small_grids_on_the_cpu():
    inputs = on([(8, 8)], (4, 1, 16, 16, 4))
    assert explain("grid_scan", **inputs, height=8, width=8).form == "mask"
    with pytest.raises(ValueError, match="form='mask' has no torch backend; use form="):
        grid_scan(**inputs, height=8, width=8, form="mask", backend="torch")


@pytest.mark.parametrize("form", ["state", "mask"])
def test_gates_at_borders_are_nobodys(form):
    """They may be anything, and have no gradient."""
    inputs = on([(2, 3)], (2, 1, 3, 4, 4))
    expected = with_gradients(inputs, height=2, width=3, form=form)
    used = {
        k: with_gradients(inputs, height=2, width=3, backend="torch")[k] != 0
        for k in ("source", "transition", "mark")
    }
    for name, mask in used.items():
        assert 0 < mask.sum() < mask.numel()
        inputs[name] = inputs[name].masked_fill(~mask, torch.nan)
    found = with_gradients(inputs, height=2, width=3, form=form)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
