"""What is special to `grid_dag_scan`: orientations, borders, and large grids."""

import numpy as np
import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, Structure, make_case

from pyg_chimera.ops import dag_scan, explain, grid_dag_scan
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.cpu import grid_sweep

OPERATOR = OPERATORS["grid_dag_scan"]


def on(sizes, size=(2, 1, 3, 4, 4)):
    """Random inputs on grids, without their heights and widths."""
    nodes = sum(h * w for h, w in sizes)
    graph = torch.zeros(nodes, dtype=torch.long)
    return make_case(OPERATOR, Structure(graph, sizes=tuple(sizes)), size).floats


def with_gradients(inputs, **options):
    """The output and the gradients of all inputs."""
    leaves = {k: x.detach().clone().requires_grad_() for k, x in inputs.items()}
    out = grid_dag_scan(**leaves, **options)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return {"out": out, **{k: x.grad for k, x in leaves.items()}}


@pytest.mark.parametrize("orientation", range(4))
def test_where_orientations_lead(orientation):
    """What the middle of a 3 x 3 grid writes: the number of paths to each node."""
    query, key, value = torch.ones(9, 1, 1), torch.ones(9, 1, 1), torch.ones(9, 1, 1)
    source, transition = torch.zeros(9, 1, 1), torch.ones(9, 1, 2, 1)
    source[4] = 1
    out = grid_dag_scan(
        query, key, value, source, transition, 3, 3, orientations=[orientation]
    ).view(3, 3)
    expected = torch.tensor([[0.0, 0, 0], [0, 1, 1], [0, 1, 2]])  # paths down, right
    flips = {0: (), 1: (0, 1), 2: (0,), 3: (1,)}[orientation]
    assert torch.equal(out, expected.flip(flips) if flips else expected)


def test_some_of_the_orientations():
    """In any order; what is read of all of them is their sum."""
    inputs = on([(2, 3), (4, 1)])
    sides = {"height": torch.tensor([2, 4]), "width": torch.tensor([3, 1])}
    expected = grid_dag_scan(**inputs, **sides)

    def part(*orientations):
        chosen = {k: inputs[k][:, orientations] for k in ("source", "transition")}
        return grid_dag_scan(**{**inputs, **chosen}, **sides, orientations=orientations)

    assert_near(part(3, 0) + part(2) + part(1), expected, 1e-12)
    assert_near(part(2, 0, 1, 3), expected, 1e-12)


def test_a_row_is_a_path():
    inputs = on([(1, 6)], (2, 1, 3, 4, 1))
    q, k, v, source, transition = inputs.values()
    path = torch.stack([torch.arange(5), torch.arange(1, 6)])
    expected = dag_scan(q, k, source[:, 0, :, None] * v, path, transition[1:, 0, 0])
    for form in ("state", "chunk"):
        assert_near(grid_dag_scan(**inputs, height=1, width=6, form=form), expected)


def test_long_rows_go_by_chunks():
    """Where matrix products take less than to sweep nodes one by one."""
    inputs = on([(1, 500)], (1, 1, 64, 16, 2))
    choice = explain("grid_dag_scan", **inputs, height=1, width=500)
    assert choice.form == "chunk"
    assert {"state"} == {x.form for x in choice.alternatives}
    inputs = on([(20, 25)], (1, 1, 16, 16, 2))
    assert explain("grid_dag_scan", **inputs, height=20, width=25).form == "state"
    with pytest.raises(ValueError, match="form='chunk' is for paths"):
        grid_dag_scan(**inputs, height=20, width=25, form="chunk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_grids_hold_the_states_of_some_rows_only(dtype):
    lanes, _ = vector_lanes(np.dtype(str(dtype).removeprefix("torch.")))
    assert grid_sweep.rows_held(140, 91 * 16 * lanes) < 140
    inputs = on([(90, 140), (140, 90), (2, 2)], (1, 1, 17, lanes + 1, 2))
    height, width = torch.tensor([90, 140, 2]), torch.tensor([140, 90, 2])
    options = {"height": height, "width": width, "form": "state"}
    expected = with_gradients(inputs, **options, backend="torch")
    inputs = {k: x.to(dtype) for k, x in inputs.items()}
    found = with_gradients(inputs, **options, backend="numba")
    for name, x in expected.items():
        assert_near(found[name].double(), x, 1e-12 if dtype == torch.float64 else 3e-6)


def test_transitions_at_borders_are_nobodys():
    """They may be anything, and have no gradient."""
    inputs, options = on([(2, 3)]), {"height": 2, "width": 3}
    expected = with_gradients(inputs, **options)
    used = with_gradients(inputs, **options, backend="torch")["transition"] != 0
    assert 0 < used.sum() < used.numel()
    inputs["transition"] = inputs["transition"].masked_fill(~used, torch.nan)
    found = with_gradients(inputs, **options)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source": torch.ones(6, 5, 2)}, "with 1 to 4 orientations, got"),
        ({"source": torch.ones(6, 4, 1)}, r"'source' must be .* = \[6, 4, 2\]"),
        ({"transition": torch.ones(6, 4, 2)}, r"'transition' .* = \[6, 4, 2, 2\]"),
        ({"orientations": [0, 1]}, "'orientations' must be 4 of"),
        ({"orientations": [0, 1, 1, 2]}, r"each once, got \[0, 1, 1, 2\]"),
        ({"orientations": 4}, "each once, got 4"),
        ({"orientations": [[0], [1], [2], [3]]}, r"each once, got \[\[0\]"),
        ({"orientations": [0.0, 1.0, 2.0, 3.0]}, "each once, got"),
        ({"orientations": [0, 1, 2, 4]}, r"of \(0, 1, 2, 3\), one for each"),
        ({"transition": torch.full((6, 4, 2, 2), torch.nan)},
         "but node 0 has nan in head 0"),
        ({"height": 4}, "of 6 nodes in all, got 12 in 1 grid"),
        ({"form": "mask"}, r"'form' must be one of .*'state'.*got 'mask'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(changes, match):
    with pytest.raises(ValueError, match=match):
        grid_dag_scan(**{**on([(2, 3)]), "height": 2, "width": 3, **changes})
