"""What all operators refuse: wrong types, dtypes, shapes, devices and options."""

import inspect

import pytest
import torch
from operators import OPERATORS, example

from pyg_chimera.ops import explain

#: `neumann` is `resolvent_mix`.
KEYS = [key for key, operator in OPERATORS.items() if key == operator.name]
every = pytest.mark.parametrize("key", KEYS)


def arguments(*kinds):
    """Each operator with each of its arguments."""
    params = [(key, name) for key in KEYS for kind in kinds
              for name in getattr(example(key), kind)]  # fmt: skip
    return pytest.mark.parametrize(("key", "name"), params, ids=map("-".join, params))


def backends_of(key):
    variants = OPERATORS[key].variants.values()
    return dict.fromkeys(x.get("backend", "auto") for x in variants)


def assert_refused(key, changes, errors, *said):
    """Whatever the backend; and `explain` refuses alike."""
    case = example(key)
    case()  # nothing that is remembered may let bad input pass
    backends = ["auto"] if "backend" in changes else backends_of(key)
    for backend in backends:
        inputs = {**case.inputs, "backend": backend, **changes}
        messages = []
        for call in (
            case.operator.function,
            lambda **x: explain(case.operator.name, **x),
        ):
            with pytest.raises(errors) as info:
                call(**inputs)
            messages.append(str(info.value))
            for text in said:
                assert text in messages[-1]
        assert messages[0] == messages[1]


# --------------------------------------------------------------------- types and dtypes

NO_TENSORS = [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: "x", lambda x: None]
NO_DTYPES = {
    "floats": [torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn],
    "integers": [torch.float64, torch.bool, torch.complex128, torch.float8_e4m3fn],
}


@arguments("floats", "integers")
def test_wrong_types(key, name):
    inputs = example(key).inputs
    parameter = inspect.signature(OPERATORS[key].function).parameters[name]
    for change in NO_TENSORS:
        bad = change(inputs[name])
        if bad is None and parameter.default is not parameter.empty:
            continue
        if name in ("height", "width"):  # may be a number, too
            assert_refused(key, {name: bad}, (TypeError, ValueError), f"'{name}'")
        else:
            assert_refused(key, {name: bad}, TypeError, f"'{name}'", type(bad).__name__)


@arguments("floats", "integers")
def test_wrong_dtypes(key, name):
    case = example(key)
    kind = "floats" if name in case.floats else "integers"
    for dtype in NO_DTYPES[kind]:
        bad = case.inputs[name].to(dtype)
        if name in ("height", "width"):
            assert_refused(key, {name: bad}, (TypeError, ValueError), f"'{name}'")
        else:
            assert_refused(key, {name: bad}, TypeError, f"'{name}'", str(dtype))


@arguments("integers")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_rare_integers_are_right_or_refused(key, name, dtype):
    case, error = example(key), ""
    try:
        out = case(**{name: case.integers[name].to(dtype)})
    except TypeError as refusal:
        error = str(refusal)
    assert f"'{name}'" in error if error else torch.equal(out, case())


# ------------------------------------------------------------------------------- shapes


@arguments("floats", "integers")
def test_too_many_dimensions(key, name):
    bad = example(key).inputs[name][None]
    if name in ("height", "width"):
        return  # of any shape
    assert_refused(key, {name: bad}, ValueError, f"'{name}'", str(list(bad.shape)))


#: Axes that may be of any length.
FREE = {("value", 2), ("weight", 1), ("weight", 2)}


@arguments("floats", "integers")
def test_lengths_that_disagree(key, name):
    x = example(key).inputs[name]
    for axis in range(x.dim()):
        if (name, axis) not in FREE:
            bad = x.narrow(axis, 1, x.size(axis) - 1)
            assert_refused(key, {name: bad}, ValueError, "'", "got ")


@arguments("integers")
def test_numbers_out_of_range(key, name):
    x = example(key).integers[name]
    for bad in (
        x - x.max() - 1,
        x + (name != "batch") * 10**6 - (name == "batch") * 10,
    ):
        assert_refused(key, {name: bad}, ValueError, f"'{name}'")


# ------------------------------------------------------------------------------ devices


@arguments("floats", "integers")
def test_tensors_on_different_devices(key, name):
    moved = example(key).inputs[name].to("meta")
    assert_refused(key, {name: moved}, ValueError, f"'{name}'", "cpu", "meta")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@arguments("floats", "integers")
def test_tensors_on_different_gpus(key, name):
    moved = example(key).inputs[name].cuda()
    if name in ("height", "width"):
        return  # numbers, wherever they are
    assert_refused(key, {name: moved}, ValueError, f"'{name}'", "cpu", "cuda")


@every
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_all_tensors_on_meta(key, backend):
    case = example(key).to(torch.bfloat16)
    inputs = {name: x.to("meta") for name, x in case.inputs.items()}
    for name in {"height", "width"} & set(inputs):
        inputs[name] = case.inputs[name]
    for name in case.floats:
        inputs[name].requires_grad_()
    out = case.operator.function(**inputs, backend=backend)
    want = case()
    assert (out.device.type, out.shape, out.dtype) == ("meta", want.shape, want.dtype)
    out.sum().backward()
    for name, x in case.floats.items():
        assert inputs[name].grad.shape == x.shape


@pytest.mark.parametrize("key", [x for x in KEYS if "numba" in backends_of(x)])
def test_numba_is_for_the_cpu(key):
    moved = {name: x.to("meta") for name, x in example(key).inputs.items()
             if name not in ("height", "width")}  # fmt: skip
    assert_refused(key, {**moved, "backend": "numba"}, ValueError, "'numba'", "meta")


# ------------------------------------------------------------------------------ options

BAD_OPTIONS = {
    "solver": ["lu", None, 3, ["dense"]],
    "form": ["states", None, 3, ["mask"]],
    "backend": ["cuda", None, 3, ["torch"]],
    "activation": ["relu", 3, ["silu"]],
    "rank": ["degree", [0, 1, 2, 3, 4, 5, 6], torch.arange(7.0), torch.arange(6),
             torch.arange(7)[None], torch.arange(7) * 1j, torch.arange(7).to("meta")],
}  # fmt: skip


@every
def test_bad_options(key):
    known = inspect.signature(OPERATORS[key].function).parameters
    for name in set(BAD_OPTIONS) & set(known):
        for bad in BAD_OPTIONS[name]:
            assert_refused(key, {name: bad}, (TypeError, ValueError), f"'{name}'")


@pytest.mark.parametrize("bad", [None, -1, 2.5, "3", 2**70, torch.tensor(3.0)], ids=str)
def test_bad_num_terms(bad):
    options = {"solver": "neumann", "num_terms": bad, "backend": "auto"}
    assert_refused("resolvent_mix", options, (TypeError, ValueError), "'num_terms'")


def test_unknown_operator_to_explain():
    with pytest.raises(ValueError, match=r"'operator' must be one of .*, got 'mix'"):
        explain("mix")
