"""What is special to `grid_scan` and `grid_dag_scan`: orientations, sizes, borders."""

import numpy as np
import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, Structure, line_edges, make_case

from pyg_chimera import ops
from pyg_chimera.ops import dag_scan, explain, grid_dag_scan, grid_scan, stm_scan
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.cpu import grid_mask, grid_sweep

each_scan = pytest.mark.parametrize("name", ["grid_scan", "grid_dag_scan"])


def on(name, sizes, size=(2, 1, 3, 4, 4)):
    """Random inputs on grids, without their heights and widths."""
    nodes = sum(h * w for h, w in sizes)
    graph = torch.zeros(nodes, dtype=torch.long)
    batch = Structure(graph, sizes=tuple(sizes))
    return make_case(OPERATORS[name], batch, size).floats


def with_gradients(name, inputs, **options):
    """The output and the gradients of all inputs."""
    leaves = {k: x.detach().clone().requires_grad_() for k, x in inputs.items()}
    out = getattr(ops, name)(**leaves, **options)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return {"out": out, **{k: x.grad for k, x in leaves.items()}}


@each_scan
@pytest.mark.parametrize("orientation", range(4))
def test_where_orientations_lead(name, orientation):
    """What the middle of a 3 x 3 grid writes: the number of paths to each node."""
    query, key, value = torch.ones(9, 1, 1), torch.zeros(9, 1, 1), torch.zeros(9, 1, 1)
    key[4] = value[4] = 1
    if name == "grid_scan":
        source, gates = torch.zeros(9, 4, 2, 1), torch.ones(9, 4, 2, 2, 1)
        source[4, orientation] = 1
        rest = (source, gates, torch.ones(9, 4, 2, 1), torch.zeros(9, 1))
        out = grid_scan(query, key, value, *rest, 3, 3).view(3, 3)
    else:
        rest = (torch.ones(9, 1, 1), torch.ones(9, 1, 2, 1))
        out = grid_dag_scan(
            query, key, value, *rest, 3, 3, orientations=[orientation]
        ).view(3, 3)
    expected = torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 2]])  # paths down, right
    expected[1, 1] = name == "grid_dag_scan"  # which hears itself
    flips = {0: (), 1: (0, 1), 2: (0,), 3: (1,)}[orientation]
    assert torch.equal(out, expected.flip(flips) if flips else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "sizes", "held"),
    [
        ("grid_scan", [(130, 70), (70, 130), (2, 2)], 2 * 70),
        ("grid_dag_scan", [(90, 140), (140, 90), (2, 2)], 91),
    ],
)
def test_large_grids_hold_the_states_of_some_rows_only(name, sizes, held, dtype):
    lanes, _ = vector_lanes(np.dtype(str(dtype).removeprefix("torch.")))
    longest = max(map(max, sizes))
    assert grid_sweep.rows_held(longest, held * 16 * lanes) < longest
    orientations = 4 if name == "grid_scan" else 2
    inputs = on(name, sizes, (1, 1, 17, lanes + 1, orientations))
    height, width = torch.tensor(sizes).unbind(1)
    options = {"height": height, "width": width, "form": "state"}
    expected = with_gradients(name, inputs, **options, backend="torch")
    inputs = {k: x.to(dtype) for k, x in inputs.items()}
    found = with_gradients(name, inputs, **options, backend="numba")
    for key, x in expected.items():
        assert_near(found[key].double(), x, 1e-12 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("grid_scan", {"form": "state"}), ("grid_scan", {"form": "mask"}),
     ("grid_dag_scan", {})],
)  # fmt: skip
def test_gates_at_borders_are_nobodys(name, options):
    """They may be anything, and have no gradient."""
    inputs, sides = on(name, [(2, 3)]), {"height": 2, "width": 3}
    expected = with_gradients(name, inputs, **sides, **options)
    gates = ("source", "transition", "mark") if name == "grid_scan" else ("transition",)
    used = with_gradients(name, inputs, **sides, backend="torch")
    for gate in gates:
        mask = used[gate] != 0
        assert 0 < mask.sum() < mask.numel()
        inputs[gate] = inputs[gate].masked_fill(~mask, torch.nan)
    found = with_gradients(name, inputs, **sides, **options)
    for key, x in expected.items():
        assert torch.equal(found[key], x), key


def test_sequences_are_grids_of_height_one():
    lengths = torch.tensor([7, 1, 4])
    inputs = on("grid_scan", [(1, n) for n in lengths.tolist()], (2, 1, 3, 4, 1))
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
    inputs = on("grid_scan", [(2, 3)] * 4)
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
            call(**on("grid_scan", [(2, 3)]), height=height, width=width)


def test_sizes_that_are_not_contiguous():
    """They are taken in order, or refused by name."""
    inputs = on("grid_scan", [(2, 3), (3, 1), (1, 2), (2, 2)])
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
        grid_scan(**{**on("grid_scan", [(2, 3)]), **changes}, height=2, width=3)


def test_masks_of_large_grids_are_computed_some_columns_at_a_time():
    sizes = [(17, 19), (3, 5), (2, 150), (1, 4)]
    assert grid_mask.WIDTH < 17 * 19
    inputs = on("grid_scan", sizes, (4, 2, 3, 5, 4))
    height, width = torch.tensor(sizes).unbind(1)
    options = {"height": height, "width": width, "form": "mask"}
    expected = with_gradients(
        "grid_scan", inputs, height=height, width=width, backend="torch"
    )
    found = with_gradients("grid_scan", inputs, **options, backend="numba")
    for name, x in expected.items():
        assert_near(found[name], x, 1e-12)


def test_masks_are_for_small_grids_on_the_cpu():
    inputs = on("grid_scan", [(8, 8)], (4, 1, 16, 16, 4))
    assert explain("grid_scan", **inputs, height=8, width=8).form == "mask"
    with pytest.raises(ValueError, match="form='mask' has no torch backend; use form="):
        grid_scan(**inputs, height=8, width=8, form="mask", backend="torch")


def test_some_of_the_orientations():
    """In any order; what is read of all of them is their sum."""
    inputs = on("grid_dag_scan", [(2, 3), (4, 1)])
    sides = {"height": torch.tensor([2, 4]), "width": torch.tensor([3, 1])}
    expected = grid_dag_scan(**inputs, **sides)

    def part(*orientations):
        chosen = {k: inputs[k][:, orientations] for k in ("source", "transition")}
        return grid_dag_scan(**{**inputs, **chosen}, **sides, orientations=orientations)

    assert_near(part(3, 0) + part(2) + part(1), expected, 1e-12)
    assert_near(part(2, 0, 1, 3), expected, 1e-12)


def test_a_row_is_a_path():
    inputs = on("grid_dag_scan", [(1, 6)], (2, 1, 3, 4, 1))
    q, k, v, source, transition = inputs.values()
    path = torch.stack([torch.arange(5), torch.arange(1, 6)])
    expected = dag_scan(q, k, source[:, 0, :, None] * v, path, transition[1:, 0, 0])
    for form in ("state", "chunk"):
        assert_near(grid_dag_scan(**inputs, height=1, width=6, form=form), expected)


def test_long_rows_go_by_chunks():
    """Where matrix products take less than to sweep nodes one by one."""
    inputs = on("grid_dag_scan", [(1, 500)], (1, 1, 64, 16, 2))
    choice = explain("grid_dag_scan", **inputs, height=1, width=500)
    assert choice.form == "chunk"
    assert {"state"} == {x.form for x in choice.alternatives}
    inputs = on("grid_dag_scan", [(20, 25)], (1, 1, 16, 16, 2))
    assert explain("grid_dag_scan", **inputs, height=20, width=25).form == "state"
    with pytest.raises(ValueError, match="form='chunk' is for paths"):
        grid_dag_scan(**inputs, height=20, width=25, form="chunk")


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
def test_what_does_not_fit_together_on_dags(changes, match):
    with pytest.raises(ValueError, match=match):
        grid_dag_scan(
            **{**on("grid_dag_scan", [(2, 3)]), "height": 2, "width": 3, **changes}
        )
