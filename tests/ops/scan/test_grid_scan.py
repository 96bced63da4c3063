from itertools import product

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import loop_scan, pairs

from pyg_chimera.ops import explain, grid_scan, stm_scan
from pyg_chimera.ops.scan import stm

DISTINCT = [*product(("state", "mask"), ("numba", "torch")), ("auto", "reference")]
OPTIONS = [*DISTINCT, ("auto", "auto")]
distinct = pytest.mark.parametrize(
    ("form", "backend"), OPTIONS, ids=map("-".join, OPTIONS)
)
#: How far each orientation goes along (columns, rows).
STEPS = [(1, 1), (-1, -1), (1, -1), (-1, 1)]


def make_grid(sizes, orientations=4, size=(2, 1, 3, 4), seed=0):
    """Random float64 arguments of `grid_scan`, but for height and width."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.double)

    heads, groups, states, channels = size
    V, O = sum(h * w for h, w in sizes), orientations  # noqa: E741
    return [
        random(V, groups, states),
        random(V, groups, states),
        random(V, heads, channels),
        random(V, O, 2, heads),
        0.6 * random(V, O, 2, 2, heads),
        random(V, O, 2, heads),
        random(V, heads),
    ]


def expand(inputs, sizes):
    """One call of `stm_scan` for each orientation, on edges listed one by one."""
    query, key, value, source, transition, mark, direct = inputs
    calls = []
    for o in range(source.size(1)):
        edges, S, M = [], [], []
        first = 0
        for height, width in sizes:
            for r, c, d in product(range(height), range(width), range(2)):
                step = STEPS[o][d]
                i, j = (r, c + step) if d == 0 else (r + step, c)
                if 0 <= i < height and 0 <= j < width:
                    u, w = first + r * width + c, first + i * width + j
                    edges.append((u, w, d))
                    S.append(source[u, o, d])
                    M.append(mark[w, o, d])
            first += height * width
        edge_index = torch.tensor([e[:2] for e in edges]).view(-1, 2).t()
        lines = pairs(edge_index)
        T = [
            transition[edges[b][0], o, edges[b][2], edges[a][2]]
            for a, b in lines.t().tolist()
        ]
        heads = value.size(1)
        stacked = [
            torch.stack(x) if x else value.new_zeros(0, heads) for x in (S, T, M)
        ]
        own = direct if o == 0 else torch.zeros_like(direct)
        calls.append((query, key, value, *stacked, own, edge_index, lines))
    return calls


def check(function, sizes, **kwargs):
    """The output and all gradients are those of the loop over edges."""
    inputs = [x.requires_grad_() for x in make_grid(sizes, **kwargs)]
    expected = sum(loop_scan(*call) for call in expand(inputs, sizes))
    height = torch.tensor([h for h, _ in sizes])
    width = torch.tensor([w for _, w in sizes])
    out = function(*inputs, height, width)
    weigh = torch.randn_like(out)
    assert_near(out, expected, 1e-9)
    options = {"allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad(out, inputs, weigh, **options)
    wanted = torch.autograd.grad(expected, inputs, weigh, **options)
    for x, y in zip(got, wanted, strict=True):
        assert_near(x, y, 1e-9)


@distinct
@pytest.mark.parametrize("orientations", [1, 2, 4])
def test_oracle(form, backend, orientations):
    def function(*args):
        return grid_scan(*args, form=form, backend=backend)

    for sizes in ([(3, 4)], [(1, 5), (4, 1), (1, 1), (2, 3)]):
        check(function, sizes, orientations=orientations)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
)
def test_any_sizes(sizes, orientations):
    check(grid_scan, sizes, orientations=orientations)


@pytest.mark.parametrize("orientation", range(4))
def test_where_orientations_lead(orientation):
    """What the middle of a 3 x 3 grid writes, with all gates open."""
    V = 9
    inputs = [torch.zeros(V, 1, 1), torch.zeros(V, 1, 1), torch.zeros(V, 1, 1),
              torch.zeros(V, 4, 2, 1), torch.ones(V, 4, 2, 2, 1),
              torch.ones(V, 4, 2, 1), torch.zeros(V, 1)]  # fmt: skip
    inputs[0][:] = 1
    inputs[1][4] = inputs[2][4] = 1
    inputs[3][4, orientation] = 1
    out = grid_scan(*inputs, 3, 3).view(3, 3)
    expected = torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 2]])  # paths down, right
    flips = {0: (), 1: (0, 1), 2: (0,), 3: (1,)}[orientation]
    assert torch.equal(out, expected.flip(flips) if flips else expected)


def test_sequences_are_grids_of_height_one():
    lengths = torch.tensor([7, 1, 4])
    inputs = make_grid([(1, int(n)) for n in lengths], orientations=1)
    out = grid_scan(*inputs, 1, lengths)
    begin = 0
    for n in lengths.tolist():
        part = [x[begin : begin + n] for x in inputs]
        assert_near(grid_scan(*part, 1, n), out[begin : begin + n], 1e-12)
        path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        q, k, v, source, transition, mark, direct = part
        expected = stm_scan(
            q, k, v, source[:-1, 0, 0], transition[1:-1, 0, 0, 0], mark[1:, 0, 0],
            direct, path, pairs(path),
        )  # fmt: skip
        assert_near(out[begin : begin + n], expected, 1e-12)
        begin += n


def test_alike_grids_need_one_size():
    inputs = make_grid([(2, 3)] * 4)
    expected = grid_scan(*inputs, torch.tensor([2] * 4), torch.tensor([3] * 4))
    assert torch.equal(grid_scan(*inputs, 2, 3), expected)
    assert torch.equal(grid_scan(*inputs, 2, torch.tensor([3] * 4)), expected)


def test_no_grids():
    inputs = [x.requires_grad_() for x in make_grid([])]
    none = torch.empty(0, dtype=torch.long)
    for form, backend in DISTINCT:
        out = grid_scan(*inputs, none, none, form=form, backend=backend)
        assert out.shape == (0, 2, 4)
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    inputs = make_grid([(4, 4)])
    out = grid_scan(*(x.to(dtype) for x in inputs), 4, 4)
    assert out.dtype == dtype
    assert_near(out, grid_scan(*inputs, 4, 4), 1e-5 if dtype == torch.float32 else 0.2)


def test_compile():
    compiled = torch.compile(grid_scan, fullgraph=True, backend="aot_eager")
    inputs = [x.requires_grad_() for x in make_grid([(3, 4)] * 2)]
    out, expected = compiled(*inputs, 3, 4), grid_scan(*inputs, 3, 4)
    assert_near(out, expected, 1e-12)
    got = torch.autograd.grad(out.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for x, y in zip(got, wanted, strict=True):
        assert_near(x, y, 1e-12)


def test_opcheck():
    inputs = [x.requires_grad_() for x in make_grid([(2, 3)])]
    args = stm._grid_call(*inputs, 2, 3, "auto", "auto").arguments()
    args = tuple(x.detach().requires_grad_(x.requires_grad)
                 if isinstance(x, torch.Tensor) else x for x in args)  # fmt: skip
    torch.library.opcheck(torch.ops.pyg_chimera.scan.default, args)


def test_explain():
    inputs = make_grid([(2, 3)])
    assert explain("grid_scan", *inputs, 2, 3, backend="torch").backend == "torch"
    assert explain("grid_scan", *inputs, 2, 3, form="mask").form == "mask"
    choice = explain("grid_scan", *inputs, 2, 3, backend="reference")
    assert choice[:4] == ("grid_scan", "dense", "mask", "reference")


BAD = [
    ({"height": 4}, r"of 6 nodes in all, got 12 in 1 grid$"),
    ({"height": 0}, "'height' must be a positive integer, .* got 0"),
    ({"width": torch.tensor([3.0])}, "'width' must be a positive integer, .* got 3.0"),
    ({"width": "3"}, "'width' must be a positive integer"),
    (
        {"height": torch.tensor([1, 1]), "width": torch.tensor([3, 2])},
        "of 6 nodes in all, got 5 in 2 grids",
    ),
    (
        {"height": torch.tensor([1, 1, 1]), "width": torch.tensor([3, 3])},
        "as many grids, got 3 and 2",
    ),
    ({3: torch.ones(6, 3, 2, 2)}, "with 1, 2 or 4 orientations"),
    ({3: torch.ones(6, 4, 1, 2)}, r"'source' must be .* = \[6, 4, 2, 2\]"),
    ({4: torch.ones(6, 4, 2, 2)}, r"'transition' must be .* = \[6, 4, 2, 2, 2\]"),
    ({5: torch.ones(6, 2, 2, 2)}, r"'mark' must be .* = \[6, 4, 2, 2\]"),
    ({6: torch.ones(6, 1)}, r"'direct' must be"),
    ({0: torch.ones(5, 1, 3)}, "'query' and 'key' must have the same shape"),
    ({4: torch.full((6, 4, 2, 2, 2), torch.nan)}, "but at node 1 it is nan in head 0"),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_bad_input(changes, match):
    inputs = make_grid([(2, 3)])
    size = {"height": 2, "width": 3}
    for name, x in changes.items():
        if isinstance(name, str):
            size[name] = x
        else:
            inputs[name] = x
    with pytest.raises(ValueError, match=match):
        grid_scan(*inputs, **size)


def test_inference_first():
    inputs = make_grid([(3, 7)])
    for form, backend in OPTIONS:
        with torch.inference_mode():
            expected = grid_scan(*inputs, 3, 7, form=form, backend=backend)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = grid_scan(*leaves, 3, 7, form=form, backend=backend)
        out.sum().backward()
        assert torch.equal(out, expected)


def test_one_grid_is_not_several():
    """Sizes in tensors say how many grids there are."""
    inputs = make_grid([(2, 3)] * 2)
    assert grid_scan(*inputs, 2, 3).shape == (12, 2, 4)
    with pytest.raises(ValueError, match="of 12 nodes in all, got 6 in 1 grid"):
        grid_scan(*inputs, torch.tensor([2]), 3)
