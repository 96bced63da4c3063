"""The fused gates of pLSTM on grids: against their formula, entry by entry."""

import math

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison

from pyg_chimera.ops.common.numba_runtime import ANNOUNCER
from pyg_chimera.ops.grid_gates import _GATES, Layout, grid_gates

LAYOUTS = [(True, True), (True, False), (False, True)]


def oracle(rows, bias, heads, shared, by_column):
    """Number by number, without the package's code."""
    V, (D, _) = len(rows), bias.shape
    x = rows.view(V, D, -1) + bias
    names = ["direct", *("right", "down") * 2]
    names += [(0, 0), (0, 1), (1, 0), (1, 1)] if shared else [(0, 0), (1, 0), (1, 1)]
    kinds = dict(enumerate(x.split(heads, dim=2)))
    direct = sum(kinds[0][:, d].sigmoid() for d in range(D))
    source = torch.stack([kinds[1].sigmoid(), kinds[2].sigmoid()], 2)
    mark = torch.stack([kinds[3].sigmoid(), kinds[4].sigmoid()], 2)
    turned = {}
    for k, name in enumerate(names[5:], 5):
        turned[name] = torch.tanh(5 * kinds[k])
        if shared:
            share = kinds[9].sigmoid()
            is_down = name[0] if by_column else name[1]
            turned[name] = turned[name] * (1 - share if is_down else share)
    zero = torch.zeros_like(kinds[0])
    rows = [[turned.get((to, at), zero) for at in (0, 1)] for to in (0, 1)]
    transition = torch.stack([torch.stack(row, 2) for row in rows], 2)
    return source, transition, mark, direct


def case(nodes, dags, heads, shared, dtype=torch.double):
    generator = torch.Generator().manual_seed(nodes)
    columns = sum(Layout(heads, shared).kinds)
    draw = lambda *s: torch.randn(*s, generator=generator, dtype=torch.double)  # noqa: E731
    return draw(nodes, dags * columns).to(dtype), draw(dags, columns).to(dtype)


def results(function, rows, bias):
    leaves = [x.detach().requires_grad_() for x in (rows, bias)]
    outs = function(*leaves)
    total = sum((x * (x.detach() + math.pi).cos()).sum() for x in outs)
    return [*outs, *torch.autograd.grad(total, leaves)]


@settings(deadline=None)
@given(
    st.integers(1, 300), st.sampled_from([1, 2, 4]), st.integers(1, 5),
    st.sampled_from(LAYOUTS),
)  # fmt: skip
def test_outputs_and_gradients(nodes, dags, heads, layout):
    inputs = case(nodes, dags, heads, layout[0])
    want = results(lambda *x: oracle(*x, heads, *layout), *inputs)
    for function in (_GATES, _GATES.composed):
        got = results(lambda *x, f=function: f(*unpacked(f, x, heads, layout)), *inputs)
        for x, y in zip(got, want, strict=True):
            assert_near(x, y, 1e-12)


def unpacked(function, tensors, heads, layout):
    options = Layout(heads, *layout)
    return (tensors, options) if function is _GATES else (*tensors, options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_and_large_numbers(layout):
    rows, bias = case(20, 4, 3, layout[0], torch.float32)
    for scale in (1e-3, 1, 1e5):
        got = results(lambda *x: grid_gates(*x, Layout(3, *layout)), rows * scale, bias)
        double = [x.double() for x in (rows * scale, bias)]
        want = results(lambda *x: oracle(*x, 3, *layout), *double)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == torch.float32
            assert_near(x.double(), y, 2e-5)


def test_second_derivatives():
    rows, bias = case(3, 2, 2, shared=True)
    function = lambda *x: grid_gates(*x, Layout(2, shared=True))  # noqa: E731
    leaves = [x.requires_grad_() for x in (rows, bias)]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_uninitialised_and_nan_stays_in_its_node(layout, monkeypatch):
    poison(monkeypatch)
    rows, bias = case(200, 4, 2, layout[0])
    rows[7] = torch.nan
    outs = grid_gates(rows.requires_grad_(), bias, Layout(2, *layout))
    sum(x[8:].sum() + x[:7].sum() for x in outs).backward()
    others = torch.arange(200) != 7
    assert all(x[others].isfinite().all() for x in (*outs, rows.grad))
    assert all(x[7].isnan().any() for x in outs)


def test_no_nodes_and_another_dtype():
    rows, bias = case(0, 4, 2, shared=True)
    layout, before = Layout(2, shared=True), ANNOUNCER.count
    assert [len(x) for x in grid_gates(rows, bias, layout)] == [0] * 4
    rows, bias = case(3, 4, 2, shared=True)
    outs = grid_gates(rows, bias.float(), layout)
    assert {x.dtype for x in outs} == {torch.double}
    assert ANNOUNCER.count == before  # by PyTorch's operators
