"""Kernels are tried before they are used; the CPU stands in for a GPU."""

import json
import threading
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from pyg_chimera.ops import causal_conv1d, explain, unchecked
from pyg_chimera.ops.causal_conv1d import op, torch_backend
from pyg_chimera.ops.common import compilation, operator, triton_runtime, verdicts
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.examples import Draw
from pyg_chimera.ops.common.operator import OPERATORS

CPU = torch.device("cpu")


def _backend(forward=lambda call, out: out, backward=lambda call, grads: grads):
    """Kernels that may change what PyTorch computes, and count their calls."""
    calls = Counter()

    def run_forward(call):
        calls["forward"] += 1
        out, saved = torch_backend.forward(call)
        return forward(call, out), saved

    def run_backward(call, saved, grad):
        calls["backward"] += 1
        return tuple(backward(call, torch_backend.backward(call, saved, grad)))

    return SimpleNamespace(
        DEVICES=("cpu",),
        why_not=lambda call: None,
        forward=run_forward,
        backward=run_backward,
        calls=calls,
    )


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Makes a backend the first choice on a device where it has to be tried."""
    monkeypatch.setattr(operator, "_TESTED", ("cpu",))
    monkeypatch.setattr(verdicts, "_KNOWN", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def prefer(backend):
        backends = {"kernels": backend, "torch": torch_backend}
        monkeypatch.setattr(op._causal_conv1d, "backends", backends)
        return backend

    return prefer


def _inputs(dtype=torch.float32):
    x, weight, bias = torch.ones(5, 3), torch.ones(3, 2), torch.zeros(3)
    return [y.to(dtype).requires_grad_() for y in (x, weight, bias)]


def _chosen():
    return explain("causal_conv1d", *_inputs())


def _is_right():
    """Whether a call gives the right output and gradients."""
    inputs = _inputs()
    out = causal_conv1d(*inputs)
    grads = torch.autograd.grad(out.sum(), inputs)
    right = torch.full((5, 3), 2.0).index_fill(0, torch.tensor([0]), 1.0)
    right_grads = [right.flip(0), torch.tensor([[4.0, 5.0]] * 3), torch.full((3,), 5.0)]
    return torch.equal(out, right) and all(map(torch.equal, grads, right_grads))


def _raise(*_):
    raise RuntimeError("no such instruction\nin line 7")


def _spoil(call, grads):
    dx, dweight, dbias = grads
    return dx, dweight, dbias * 1.001


def _invalid(x):
    return x.index_fill(0, torch.tensor([len(x) - 1]), float("nan"))


LIES = {
    "output": (_backend(lambda call, out: out + 0.01), "the output is off by"),
    "gradient": (_backend(backward=_spoil), "the gradient of 'bias' is off by 0.001"),
    "float32": (
        _backend(lambda call, out: out + 0.01 * (out.dtype == torch.float32)),
        "in torch.float32",
    ),
    "nan": (_backend(lambda call, out: _invalid(out)), "the output is off by"),
    "nan_gradient": (
        _backend(backward=lambda call, grads: map(_invalid, grads)),
        "the gradient of 'x' is off by",
    ),
    "raises": (_backend(_raise), "it raises RuntimeError: no such instruction (see"),
    "raises_later": (_backend(backward=_raise), "it raises RuntimeError"),
}


@pytest.mark.parametrize(("backend", "said"), LIES.values(), ids=LIES)
def test_a_backend_that_lies(backend, said, gpu):
    gpu(backend)
    for _ in range(2):  # as if in a new process, which reads the verdict
        with pytest.warns(UserWarning, match="'kernels' failed its test on cpu") as log:
            assert _is_right()
        assert said in str(log[0].message)
        backend.calls.clear()
        with warnings.catch_warnings(action="error"):  # said once
            assert _is_right()
            choice = _chosen()
        assert choice.backend == "torch"
        assert said in choice.reason
        assert not backend.calls
        verdicts._KNOWN.clear()
    lied = False  # as it was asked for
    try:
        x, weight, bias = _inputs()
        out = causal_conv1d(x, weight, bias, backend="kernels")
        (grad,) = torch.autograd.grad(out.sum(), bias)
        lied = not torch.equal(out, causal_conv1d(x, weight, bias, backend="torch"))
        lied |= not torch.equal(grad, torch.full((3,), 5.0))
    except RuntimeError:
        lied = True
    assert lied
    assert backend.calls["forward"] == 1


def test_a_backend_that_is_right(gpu, monkeypatch, tmp_path):
    backend = gpu(_backend())
    state = torch.get_rng_state()
    assert _is_right()
    assert torch.equal(torch.get_rng_state(), state)
    assert backend.calls == {"forward": 3, "backward": 3}  # two dtypes, and the call
    assert _chosen().backend == "kernels"
    verdicts._KNOWN.clear()
    assert _is_right()
    assert backend.calls == {"forward": 4, "backward": 4}
    (file,) = tmp_path.rglob("*.*")
    ((machine, found),) = json.loads(file.read_text()).items()
    assert f"torch {torch.__version__}" in machine
    assert found == {"causal_conv1d scan state kernels": ""}
    # Other sources, and a file that something else has written.
    for _ in range(2):
        verdicts._KNOWN.clear()
        backend.calls.clear()
        monkeypatch.setattr(verdicts, "stamp", lambda module: ("other",))
        assert _is_right()
        assert backend.calls["forward"] == 3
        assert len(json.loads(file.read_text())) in (1, 2)
        file.write_text('["what is this?"]')
    verdicts._KNOWN.clear()
    for i in range(40):
        verdicts.remember(f"machine {i}", {"algorithm": ""})
    assert "machine 39" in verdicts._remembered()
    assert len(verdicts._remembered()) == verdicts._MOST_MACHINES


@pytest.mark.parametrize("home", ["file", "nowhere"])
def test_a_folder_that_cannot_be_written_to(home, gpu, monkeypatch, tmp_path):
    if home == "file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(verdicts.Path, "home", _raise)
    backend = gpu(_backend())
    assert _is_right()
    assert _is_right()
    assert backend.calls["forward"] == 4  # tried once, all the same


def _compiled(*inputs):
    torch.compiler.reset()
    return torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")(*inputs)


def _mapped(x, *others):
    return torch.vmap(causal_conv1d, (0, None, None))(x[None], *others)[0]


def _under(context):
    def call(*inputs):
        with context():
            return causal_conv1d(*inputs)

    return call


MODES = {
    "compiled": _compiled,
    "vmap": _mapped,
    "autocast": _under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": _under(torch.no_grad),
    "inference": _under(torch.inference_mode),
    "unchecked": _under(unchecked),
    "default_device": _under(lambda: torch.device("meta")),
}


@pytest.mark.parametrize("call", MODES.values(), ids=MODES)
def test_modes_of_the_caller_do_not_matter(call, gpu):
    backend = gpu(_backend())
    out = call(*_inputs())[:2].tolist()
    assert out == [[1.0] * 3, [2.0] * 3]
    assert backend.calls["forward"] == 3
    assert list(verdicts._KNOWN.values()) == [""]


def test_threads_try_it_once(gpu):
    backend, right = gpu(_backend()), []
    threads = [
        threading.Thread(target=lambda: right.append(_is_right())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 4
    assert backend.calls["forward"] == 2 + 4


def test_a_backend_that_calls_the_operator_itself(gpu):
    choices = []

    def forward(call, out):
        choices.append(_chosen())
        return out

    backend = gpu(_backend(forward))
    assert _is_right()
    assert [x.backend for x in choices] == ["torch", "torch", "kernels"]
    assert "is being tested" in choices[0].reason
    assert backend.calls["forward"] == 3


def test_what_is_not_the_time_to_try(gpu, monkeypatch):
    """PyTorch is used, unless the verdict is known; later it is tried."""
    backend = gpu(_backend())

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            choices.append(_chosen())
            return grad

    choices = []
    with pytest.warns(UserWarning, match="cannot be tested first in a backward pass"):
        Inside.apply(torch.ones(1, requires_grad=True)).backward()
    assert choices.pop().backend == "torch"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(verdicts, "machine_of", lambda device: "a GPU")
    choice = Choice("causal_conv1d", "scan", "state", "kernels", "")
    cuda = torch.device("cuda:0")
    with pytest.warns(UserWarning, match="while a CUDA graph is captured; call the"):
        assert "while a CUDA graph is captured" in verdicts.reason_against(
            op._causal_conv1d, choice, cuda
        )
    assert not backend.calls
    verdicts.remember("a GPU", {"causal_conv1d scan state kernels": ""})
    assert verdicts.reason_against(op._causal_conv1d, choice, cuda) is None
    assert _chosen().backend == "kernels"


def test_what_a_verdict_depends_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(verdicts, "_driver", lambda: "550.1")
    monkeypatch.setattr(verdicts, "WITH_TRITON", True)
    triton = SimpleNamespace(__version__="3.9.1")
    monkeypatch.setattr(verdicts, "import_module", lambda name: triton)
    before, read = verdicts.stamp("pyg_chimera.ops"), compilation._read
    # It is imported when first used.
    kernels = "pyg_chimera.ops.recurrence.gpu.delta_chunks"

    def edited(folder, name):
        return (b"", []) if name == kernels else read(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(compilation, "_read", edited)
        assert verdicts.stamp("pyg_chimera.ops") != before
    monkeypatch.setattr(verdicts, "stamp", lambda module: ("0.1", "abc"))
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        products = "TF32" if precision == "high" else "float32"
        said = verdicts.machine_of(torch.device("cuda:0"))
        torch.set_float32_matmul_precision("highest")
        assert said == (
            f"A GPU, driver 550.1, torch {torch.__version__}, triton 3.9.1, "
            f"products in {products}, sources abc"
        )


def test_memory_that_is_full_says_nothing_of_a_kernel(gpu):
    full = []

    def forward(call, out):
        if full:
            raise torch.OutOfMemoryError
        return out

    gpu(_backend(forward))
    full.append(True)
    with pytest.warns(UserWarning, match="the memory is full"):
        assert _chosen().backend == "torch"
    full.clear()
    assert _chosen().backend == "kernels"


def test_pytorch_that_fails(gpu, monkeypatch):
    gpu(_backend())
    monkeypatch.setattr(verdicts, "_by", _raise)
    with pytest.warns(UserWarning, match="cannot be tested: RuntimeError.'no such in"):
        assert _chosen().backend == "torch"
    assert verdicts._remembered() == {}


def test_a_cpu_needs_no_trial(monkeypatch):
    monkeypatch.setattr(operator, "reason_against", _raise)
    assert _is_right()
    assert operator._TESTED == ("cuda",)


# ----------------------------------------------------------------------- the real ones


def test_all_kernels_have_something_to_be_tried_on(monkeypatch):
    """Each algorithm of each Triton backend, on the tiny inputs."""
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: None)
    found = set()
    for declared in OPERATORS.values():
        backends = declared.backends
        if "triton" not in backends:
            continue
        monkeypatch.setattr(backends["triton"], "DEVICES", ("cpu",))
        for inputs in declared.examples(Draw()):
            given = verdicts.cast(inputs, torch.float32, CPU)
            for options in verdicts.all_options(declared):
                if options["backend"] == "triton":
                    choice = verdicts.algorithm(declared, given, options)
                    found |= {choice and choice[:3]}
    states = ("dag_scan", "stm_scan", "grid_scan", "grid_dag_scan")
    assert found - {None} == {
        *((name, "scan", form) for name in states for form in ("state", "chunk")),
        *(("delta_scan", "scan", form) for form in ("state", "chunk")),
        *(("resolvent_mix", "sparse", form) for form in ("state", "chunk")),
        ("resolvent_mix", "dense", "mask"),
        *((x, "scan", "state") for x in ("selective_scan", "channel_scan")),
        ("causal_conv1d", "scan", "state"),
    }


def test_a_real_backend_is_tried(monkeypatch, tmp_path):
    """Of all algorithms of an operator, the one that is taken."""
    monkeypatch.setattr(operator, "_TESTED", ("cpu",))
    monkeypatch.setattr(verdicts, "_KNOWN", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inputs = next(OPERATORS["dag_scan"].examples(Draw()))
    choice = explain("dag_scan", **inputs)
    assert choice.backend == "numba"
    ((key, problem),) = verdicts._KNOWN.items()
    assert key[:4] == choice[:4]
    assert problem == ""


@pytest.mark.skipif(not triton_runtime.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "kind",
    [
        ("causal_conv1d", "scan", "state"),
        ("dag_scan", "scan", "chunk"),
        ("resolvent_mix", "dense", "mask"),
    ],
    ids=lambda kind: kind[0],
)
def test_triton_passes_in_its_interpreter(kind, monkeypatch):
    declared, choice = OPERATORS[kind[0]], Choice(*kind, "triton", "")
    assert verdicts._tested(declared, choice, CPU) == ""
    backend = declared.backends["triton"]
    forward = backend.forward
    monkeypatch.setattr(
        backend, "forward", lambda call: (1.001 * forward(call)[0], forward(call)[1])
    )
    said = verdicts._tested(declared, choice, CPU)
    assert said.startswith("the output is off by 0.001")
