"""The fused norm: against the formula in float64, on all that it may be given."""

import math
from itertools import product

import pytest
import torch
from asserts import assert_near
from poison import poison
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from pyg_chimera.ops import gated_norm as gated_norm_module
from pyg_chimera.ops.gated_norm import gated_inputs, gated_norm, gated_output

OPTIONS = list(product([False, True], repeat=3))
#: With SiLU or not, with or without weights, with or without a gate.
every_option = pytest.mark.parametrize(("activated", "weighted", "gated"), OPTIONS)
DTYPES = [torch.float32, torch.float64]


def oracle(x, weight, gate, activated=False, scale=1.0):
    """The formula, without the package's code."""
    y = x * torch.sigmoid(x) if activated else x
    y = scale * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = y if weight is None else y * weight
    return y if gate is None else y * gate * torch.sigmoid(gate)


def inputs(shape, weighted=True, gated=True, dtype=torch.double):
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, *shape, generator=generator, dtype=torch.double).to(dtype)
    weight = torch.randn(shape[1:], generator=generator, dtype=torch.double).to(dtype)
    return x, weight if weighted else None, gate if gated else None


def results(function, given, **kwargs):
    """The output, and the gradients of all that is given."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in given]
    out = function(*leaves, **kwargs)
    grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).cos()
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def wide(given):
    return [x if x is None else x.double() for x in given]


def assert_same(got, want, tol):
    for x, y in zip(got, want, strict=True):
        assert_near(x, y, tol)


@pytest.fixture
def runs(monkeypatch):
    """The kernels that are run, in order."""
    found, run = [], gated_norm_module._run

    def spy(kernel, *args):
        found.append(kernel)
        return run(kernel, *args)

    monkeypatch.setattr(gated_norm_module, "_run", spy)
    return found


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients(activated, weighted, gated, dtype, runs):
    options = {"activated": activated, "scale": 0.3}
    for shape in ((5, 3), (1, 64), (300, 2, 16), (130, 33), (7, 3, 40), (2, 3, 2, 5)):
        given = inputs(shape, weighted, gated, dtype)
        got = results(gated_norm, given, **options)
        assert {x.dtype for x in got} == {dtype}
        want = results(oracle, wide(given), **options)
        assert_same(got, want, 3e-6 if dtype == torch.float32 else 1e-13)
    assert len(runs) == 2 * 6


def test_columns_of_a_joint_projection(runs):
    """Without a copy, and whatever the layout."""
    joint, grad = torch.randn(9, 40).double(), torch.randn(9, 2, 8).double()
    layouts = {
        "columns": lambda y: y[:, 16:32].unflatten(1, (2, 8)),
        "every second": lambda y: y[:, 1:33:2].unflatten(1, (2, 8)),
        "transposed": lambda y: y[:8, :18].t().unflatten(0, (9, 2)),
        "expanded": lambda y: y[:1, 16:32].unflatten(1, (2, 8)).expand(9, 2, 8),
        "one row for all": lambda y: y[0, :8].expand(9, 2, 8),
    }
    for name, layout in layouts.items():
        found = []
        for function in (gated_norm, oracle):
            leaf = joint.clone().requires_grad_()
            weight = layout(joint)[0].clone().requires_grad_()
            x = layout(leaf)
            out = function(x, weight, x.cos() if name == "columns" else layout(leaf))
            assert function is oracle or out.is_contiguous()
            found.append([out, *torch.autograd.grad(out, (leaf, weight), grad)])
        assert_same(*found, 1e-12)
    assert len(runs) == 2 * len(layouts)
    x = joint[:, 16:32]
    flat, stride = gated_norm_module._rows(x, x.dtype)
    assert (flat.ctypes.data, stride) == (x.data_ptr(), 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activated", [False, True])
def test_rows_of_any_size(dtype, activated):
    """By hand: sizes do not matter once they are far above the root of eps."""
    largest = math.log10(torch.finfo(dtype).max) - 0.5
    sizes = torch.logspace(4, largest, 40, dtype=dtype).view(-1, 1)
    row = torch.tensor([1.0, -0.5, 0.25, 2.0] * 5, dtype=dtype)
    x = (sizes * row).requires_grad_()
    y = gated_norm(x, activated=activated)
    f = row.relu() if activated else row
    assert_near(y, (f / f.square().mean().sqrt()).expand_as(y), 1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    slope = (1 - f * f.sum() / f.square().sum()) / f.square().mean().sqrt()
    slope = slope * (row > 0) if activated else slope
    normal = sizes[:, 0] < torch.finfo(dtype).max / 1e4  # and so are gradients
    assert_near((grad * sizes)[normal], slope.expand_as(x)[normal], 1e-5)


@every_option
def test_nan_and_infinity_stay_in_their_row(activated, weighted, gated):
    given = inputs((6, 2, 20), weighted, gated, torch.float32)
    want = results(gated_norm, given, activated=activated)
    for bad, name in product((torch.nan, torch.inf), range(3)):
        if given[name] is None or name == 1:
            continue
        spoilt = [x if x is None else x.clone() for x in given]
        spoilt[name][3, 1, 18] = bad
        got = results(gated_norm, spoilt, activated=activated)
        rest = torch.ones(6, 2, dtype=torch.bool)
        rest[3, 1] = False
        for x, y in zip(got, want, strict=True):
            if x.dim() == 3:
                assert torch.equal(x[rest], y[rest])
        wrong = got[0][3, 1] if name == 0 else got[0][3, 1, 18]
        assert wrong.isnan().all() or (name == 2 and bad == torch.inf)
        assert got[1][3, 1].isnan().all() or (name == 2 and bad == torch.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    given = inputs((4, 8), dtype=dtype)
    got = gated_norm(*given)
    assert got.dtype == dtype
    assert_near(got.double(), oracle(*wide(given)), 4 * torch.finfo(dtype).eps)
    x, weight, gate = inputs((4, 8))
    mixed = gated_norm(x.float(), weight, gate)
    assert_near(mixed.double(), oracle(x, weight, gate), 1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8), (8,)])
def test_no_rows_and_one_vector(shape):
    given = inputs(shape, weighted=len(shape) > 1)
    assert_same(results(gated_norm, given), results(oracle, given), 1e-12)


def test_eps():
    x = torch.tensor([[3e-3, -4e-3]])
    for eps in (0.0, 1e-5, 0.1):
        want = x / (x.square().mean() + eps).sqrt()
        assert_near(gated_norm(x, eps=eps), want, 1e-6)
    assert torch.equal(gated_norm(x, eps=None), gated_norm(x, eps=2.0**-23))
    assert gated_norm(torch.zeros(2, 3)).eq(0).all()


def test_what_follows_operations_sees_those_of_torch(runs):
    """Compilers, transforms, forward mode and tensors of other devices."""
    given = inputs((6, 4))
    want = oracle(*given)
    compiled = torch.compile(gated_norm, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, given), results(oracle, given), 1e-12)

    def positional(x, weight, gate):
        return gated_norm(x, weight, gate)

    assert_near(make_fx(positional)(*given)(*given), want)
    assert_near(torch.jit.trace(positional, given, check_trace=False)(*given), want)
    each = torch.func.vmap(lambda x: gated_norm(x, *given[1:]))
    assert_near(each(torch.stack([given[0]] * 2))[1], want)
    got, want = (
        torch.func.jacrev(lambda x, f=f: f(x, *given[1:]))(given[0])
        for f in (gated_norm, oracle)
    )
    assert_near(got, want)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0], given[2])
        got, want = (
            forward_ad.unpack_dual(f(dual, *given[1:])).tangent
            for f in (gated_norm, oracle)
        )
    assert_near(got, want)
    assert gated_norm(*(x.to("meta") for x in given)).shape == (6, 4)
    assert not runs


def test_export(runs):
    class Layer(torch.nn.Module):
        def forward(self, x, weight, gate):
            return gated_norm(x, weight, gate, activated=True)

    given = inputs((6, 4))
    rows = torch.export.Dim("rows", min=2)
    shapes = ({0: rows}, None, {0: rows})
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes)
    x, weight, gate = inputs((9, 4))
    got = program.module()(x, weight, gate)
    assert_near(got, oracle(x, weight, gate, activated=True))
    assert not runs


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_uninitialised_is_read(activated, weighted, gated, dtype, monkeypatch):
    poison(monkeypatch)
    for shape in ((3, 5), (2, 2, 17), (1, 33)):
        given = inputs(shape, weighted, gated, dtype)
        got = results(gated_norm, given, activated=activated)
        want = results(oracle, wide(given), activated=activated)
        assert_same(got, want, 3e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(num_threads):
    given = inputs((3000, 2, 48))
    torch.set_num_threads(num_threads)
    assert_same(results(gated_norm, given), results(oracle, given), 1e-11)


def test_inference_mode_and_some_gradients():
    given = inputs((5, 2, 8))
    with torch.inference_mode():
        assert_near(gated_norm(*given), oracle(*given))
    want = results(oracle, given)
    for i, x in enumerate(given):
        leaf = x.clone().requires_grad_()
        changed = [*given[:i], leaf, *given[i + 1 :]]
        out = gated_norm(*changed)
        grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape).cos()
        assert_near(torch.autograd.grad(out, leaf, grad)[0], want[i + 1])


def second(function, leaves):
    """All gradients, and those of the sum of their squares."""
    found = torch.autograd.grad(function().square().sum(), leaves, create_graph=True)
    return *found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)


@pytest.mark.parametrize("gate", [torch.sin, lambda x: x])
def test_second_derivatives_where_the_gate_depends_on_the_rows(gate):
    x, weight, _ = (y.requires_grad_() for y in inputs((5, 6)))
    got, want = (
        second(lambda f=f: f(x, weight, gate(x)), (x, weight))
        for f in (gated_norm, oracle)
    )
    for y, z in zip(got, want, strict=True):
        assert_near(y, z, 1e-12)


@pytest.mark.parametrize("frozen", range(3))
def test_second_derivatives_with_frozen_inputs(frozen):
    given = [x.requires_grad_(i != frozen) for i, x in enumerate(inputs((5, 6)))]
    leaves = [x for x in given if x.requires_grad]
    got, want = (second(lambda f=f: f(*given), leaves) for f in (gated_norm, oracle))
    for y, z in zip(got, want, strict=True):
        assert_near(y, z, 1e-12)


def test_gradients_alone_keep_no_graph():
    x, weight, gate = (y.requires_grad_() for y in inputs((5, 6)))
    out = gated_norm(x, weight, gate)
    (dx,) = torch.autograd.grad(out, x, out.detach()[None], is_grads_batched=True)
    assert not dx.requires_grad


@pytest.mark.parametrize("activated", [False, True])
def test_rows_of_zeros_without_eps(activated):
    x = torch.ones(2, 3).index_fill(0, torch.tensor([1]), 0)
    y = gated_norm(x, eps=0.0, activated=activated)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


def output_oracle(y, value, skip, weight, gate):
    heads = len(skip), -1
    silu = (value * torch.sigmoid(value)).unflatten(1, heads)
    x = (y.unflatten(1, heads) + skip.unsqueeze(1) * silu).flatten(1)
    if weight is not None:
        x = weight * x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return x if gate is None else x * gate * torch.sigmoid(gate)


def inputs_oracle(query, key, value, factor, normed):
    query, key, value = (x * torch.sigmoid(x) for x in (query, key, value))
    if normed:
        query, key = (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x in (query, key)
        )
        query = query / query.size(-1) ** 0.5
    return query, key, value if factor is None else value * factor.unsqueeze(2)


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.double)


OUTPUTS = list(product([False, True], repeat=2))


@pytest.mark.parametrize(("weighted", "gated"), OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_a_recurrence(weighted, gated, dtype, runs):
    for rows, heads, size in ((5, 1, 3), (1, 2, 8), (300, 4, 16), (7, 3, 5)):
        wide = random(rows, 3 * heads * size).split(heads * size, dim=1)
        weight = random(heads * size) if weighted else None
        given = [*wide[:2], random(heads), weight, wide[2] if gated else None]
        narrow = [x if x is None else x.to(dtype) for x in given]
        got = results(lambda *x: gated_output(*x, 1e-5), narrow)
        want = results(output_oracle, given)
        assert_same(got, want, 3e-6 if dtype == torch.float32 else 1e-12)
    assert len(runs) == 2 * 4


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_recurrence_reads(normed, factored, dtype, runs):
    for rows, groups, heads, states, size in ((5, 1, 2, 3, 3), (200, 2, 4, 16, 8)):
        widths = [groups * states, groups * states, heads * size, heads]
        *parts, factor = random(rows, sum(widths)).split(widths, dim=1)
        query, key = (x.unflatten(1, (groups, states)) for x in parts[:2])
        value = parts[2].unflatten(1, (heads, size))
        given = [query, key, value, factor if factored else None]
        narrow = [x if x is None else x.to(dtype) for x in given]

        def joined(function, *x):
            outs = function(*x, normed)
            return torch.cat([y.flatten(1) for y in outs], dim=1)

        got = results(lambda *x: joined(gated_inputs, *x), narrow)
        want = results(lambda *x: joined(inputs_oracle, *x), given)
        assert_same(got, want, 3e-6 if dtype == torch.float32 else 1e-12)
    assert len(runs) == 2 * 2 * 3 * normed


@pytest.mark.parametrize(("weighted", "gated"), OUTPUTS)
def test_gradcheck_of_outputs(weighted, gated):
    given = [random(3, 4), random(3, 4) - 1, random(2)]
    given += [random(4)] if weighted else []
    given += [random(3, 4) + 1] if gated else []
    leaves = [x.requires_grad_() for x in given]

    def run(y, value, skip, *rest):
        weight, gate = rest[0] if weighted else None, rest[-1] if gated else None
        return gated_output(y, value, skip, weight, gate, 1e-5)

    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("normed", [False, True])
def test_gradcheck_of_inputs(normed):
    given = [random(3, 1, 4), random(3, 1, 4) - 1, random(3, 2, 3), random(3, 2)]
    leaves = [x.requires_grad_() for x in given]

    def run(*x):
        return gated_inputs(*x, normed)

    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_values_of_the_skip_connection_keep_nan_to_their_row():
    value = random(6, 8)
    value[3, 5] = torch.nan
    given = [random(6, 8), value, random(2), random(8), random(6, 8)]
    out, *_, dgate = results(lambda *x: gated_output(*x, 1e-5), given)
    for x in (out, dgate):
        assert x[3].isnan().all()
        assert x[[0, 1, 2, 4, 5]].isfinite().all()
