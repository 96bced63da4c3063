from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.resolvent.mix import (
    Choice,
    check_floats,
    check_shape,
    promoted,
)
from pyg_chimera.ops.selective_scan import mamba_ssm_, numba_, torch_
from pyg_chimera.ops.selective_scan.reference import reference_conv, reference_scan

__all__ = ["causal_conv1d", "explain_conv", "explain_scan", "selective_scan"]

_BACKENDS = ("auto", "reference", "torch", "numba")
_SCAN_BACKENDS = (*_BACKENDS, "mamba_ssm")


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    ptr: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    r"""Runs the recurrence of Mamba over packed sequences, from `"Mamba: Linear-Time
    Sequence Modeling with Selective State Spaces" <https://arxiv.org/abs/2312.00752>`_
    (Section 3.2):

    .. math::
        \mathbf{H}_t = \exp(\boldsymbol{\delta}_t \mathbf{1}^{\top} \odot \mathbf{A})
        \odot \mathbf{H}_{t-1} + (\boldsymbol{\delta}_t \odot \mathbf{u}_t)
        \mathbf{b}_t^{\top}, \qquad
        \mathbf{y}_t = (\mathbf{H}_t \mathbf{c}_t + \mathbf{D} \odot \mathbf{u}_t)
        \odot \textrm{SiLU}(\mathbf{z}_t),

    where :math:`\mathbf{H}` is zero before the first row of each sequence. Sequences
    of any length follow each other without padding, and none sees another. Time and
    memory are linear in :math:`T`. Differentiable once, in reverse mode, in all
    arguments but :obj:`ptr`. float16 and bfloat16 are computed in float32.

    Args:
        u (torch.Tensor): The input, :math:`[T, F]`.
        delta (torch.Tensor): The step sizes, :math:`[T, F]`.
        A (torch.Tensor): The rates of decay, negative as a rule, :math:`[F, N]`.
        B (torch.Tensor): What the states write, :math:`[T, N]`.
        C (torch.Tensor): What is read of the states, :math:`[T, N]`.
        D (torch.Tensor, optional): The way past the states, :math:`[F]`.
            (default: :obj:`None`)
        z (torch.Tensor, optional): The gate of the output, :math:`[T, F]`.
            (default: :obj:`None`)
        delta_bias (torch.Tensor, optional): Added to :obj:`delta`, :math:`[F]`.
            (default: :obj:`None`)
        delta_softplus (bool, optional): Whether the step sizes are the softplus of
            :obj:`delta`, after its bias. (default: :obj:`False`)
        ptr (torch.Tensor, optional): Where each sequence begins, and last :math:`T`,
            integer :math:`[S + 1]`, as :obj:`ptr` of a PyG batch. Sequences may be
            empty. Without it, all rows are one sequence. (default: :obj:`None`)
        backend (str, optional): ``"reference"`` (a loop, in float64), ``"torch"``
            (any device, as many passes over all states as the longest sequence has
            binary digits), ``"numba"`` (CPU), ``"mamba_ssm"`` (that package's kernel,
            CUDA, float32, on sequences padded to one length), or ``"auto"``: numba on
            the CPU; elsewhere mamba_ssm if it is installed, passes a test of its
            results, and padding makes at most four rows of one, or else torch.
            (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[T, F]`, in the dtype of :obj:`u`.

    Raises:
        ValueError: If shapes do not fit together, :obj:`ptr` does not begin with 0,
            decreases or does not end with :math:`T`, or :obj:`backend` is unknown or
            can't run on the device.
        TypeError: If :obj:`ptr` is not integer, or another tensor not floating point.
    """
    _check_scan(u, delta, A, B, C, D, z, delta_bias, ptr)
    tensors = promoted(u, delta, A, B, C)
    backend = _choose_scan(backend, tensors[0], ptr)
    with torch.autocast(u.device.type, enabled=False):
        x, delta, A, B, C = tensors
        if delta_bias is not None:
            delta = delta + delta_bias.to(delta.dtype)
        if delta_softplus:
            delta = F.softplus(delta)
        past = x.new_zeros(x.size(1)) if D is None else D.to(x.dtype)
        ptr = _as_ptr(ptr, u)
        if backend == "reference":
            _check_ptr(ptr, u.size(0))
            out = reference_scan(x, delta, A, B, C, past, ptr)
        elif backend == "mamba_ssm":
            _check_ptr(ptr, u.size(0))
            out = mamba_ssm_.scan(x, delta, A, B, C, past, ptr)
        else:
            out, _ = _scan_op(x, delta, A, B, C, past, ptr, backend)
        if z is not None:
            out = out * F.silu(z.to(x.dtype))
    return out.to(u.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Convolves each channel of packed sequences with a filter of its own that sees
    no later row, as Mamba does before its scan:

    .. math::
        \mathbf{y}_t = \sigma \left( \mathbf{b} + \sum_{k=1}^{K} \mathbf{w}_{k} \odot
        \mathbf{x}_{t - K + k} \right),

    where rows before the first one of a sequence are zero. Differentiable once,
    in reverse mode, in all arguments but :obj:`ptr`.

    Args:
        x (torch.Tensor): The input, :math:`[T, F]`.
        weight (torch.Tensor): The filters, the present last, :math:`[F, K]`.
        bias (torch.Tensor, optional): Added to the output, :math:`[F]`.
            (default: :obj:`None`)
        ptr (torch.Tensor, optional): Where each sequence begins, and last :math:`T`,
            integer :math:`[S + 1]`; see :func:`selective_scan`.
            (default: :obj:`None`)
        activation (str, optional): :obj:`"silu"`, or none. (default: :obj:`None`)
        backend (str, optional): ``"reference"``, ``"torch"``, ``"numba"`` (CPU), or
            ``"auto"``: numba on the CPU, torch elsewhere. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[T, F]`, in the dtype of :obj:`x`.

    Raises:
        ValueError: If shapes do not fit together, :obj:`ptr` is not as above, or
            :obj:`activation` or :obj:`backend` is unknown.
        TypeError: If :obj:`ptr` is not integer, or another tensor not floating point.
    """
    _check_conv(x, weight, bias, ptr)
    backend = _choose(backend, x.device)
    if activation not in (None, "silu"):
        raise ValueError(f"'activation' must be None or 'silu', got {activation!r}")
    tensors = [x, weight] if bias is None else [x, weight, bias]
    with torch.autocast(x.device.type, enabled=False):
        u, weight, *biases = promoted(*tensors)
        bias = biases[0] if biases else None
        ptr = _as_ptr(ptr, x)
        if backend == "reference":
            _check_ptr(ptr, x.size(0))
            out = reference_conv(u, weight, bias, ptr)
        else:
            out = _conv_op(u, weight, bias, ptr, backend)
        if activation == "silu":
            out = F.silu(out)
    return out.to(x.dtype)


# ---------------------------------------------------------------------------- checks


def _check_shapes(shapes: dict[str, tuple[Tensor | None, str, list[int]]]) -> None:
    for name, (x, layout, expected) in shapes.items():
        if x is not None:
            check_floats(**{name: x})
            check_shape(name, x, layout, expected)


def _check_layout(ptr: Tensor | None) -> None:
    """What can be checked of `ptr` without looking into it, so also while tracing."""
    if ptr is None:
        return
    if ptr.is_floating_point() or ptr.is_complex() or ptr.dtype == torch.bool:
        raise TypeError(f"'ptr' must be integer, got {ptr.dtype}")
    if ptr.dim() != 1 or ptr.size(0) < 1:
        raise ValueError(f"'ptr' must be [sequences + 1], got {list(ptr.shape)}")


def _check_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    ptr: Tensor | None,
) -> None:
    for name, x, layout in (
        ("u", u, "[rows, channels]"), ("A", A, "[channels, states]"),
    ):  # fmt: skip
        if x.dim() != 2:
            raise ValueError(f"'{name}' must be {layout}, got {list(x.shape)}")
    (rows, channels), states = u.shape, A.size(1)
    _check_shapes({
        "u": (u, "[rows, channels]", [rows, channels]),
        "delta": (delta, "[rows, channels] of 'u'", [rows, channels]),
        "A": (A, "[channels, states]", [channels, states]),
        "B": (B, "[rows, states]", [rows, states]),
        "C": (C, "[rows, states]", [rows, states]),
        "D": (D, "[channels]", [channels]),
        "z": (z, "[rows, channels] of 'u'", [rows, channels]),
        "delta_bias": (delta_bias, "[channels]", [channels]),
    })  # fmt: skip
    _check_layout(ptr)


def _check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ptr: Tensor | None
) -> None:
    if x.dim() != 2:
        raise ValueError(f"'x' must be [rows, channels], got {list(x.shape)}")
    channels = x.size(1)
    if weight.dim() != 2 or weight.size(1) < 1:
        raise ValueError(
            f"'weight' must be [channels, size] with a size of at least 1, got "
            f"{list(weight.shape)}"
        )
    _check_shapes({
        "x": (x, "[rows, channels]", list(x.shape)),
        "weight": (weight, "[channels, size]", [channels, weight.size(1)]),
        "bias": (bias, "[channels]", [channels]),
    })  # fmt: skip
    _check_layout(ptr)


def _as_ptr(ptr: Tensor | None, x: Tensor) -> Tensor:
    if ptr is None:
        return torch.tensor([0, x.size(0)], device=x.device)
    return ptr.to(x.device, torch.long)


def _check_ptr(ptr: Tensor, num_rows: int) -> None:
    """Whether the sequences follow each other and are of all rows."""
    first, last = int(ptr[0]), int(ptr[-1])
    if first != 0 or last != num_rows:
        raise ValueError(
            f"'ptr' must begin with 0 and end with the number of rows, {num_rows}, got "
            f"{first} and {last}"
        )
    shorter = (ptr.diff() < 0).nonzero()
    if shorter.numel():
        s = int(shorter[0])
        raise ValueError(
            f"'ptr' must not decrease, but sequence {s} begins at {int(ptr[s])} and "
            f"the next one at {int(ptr[s + 1])}"
        )


# ------------------------------------------------------------------------- the choice


def _choose(
    backend: str, device: torch.device, known: tuple[str, ...] = _BACKENDS
) -> str:
    if backend not in known:
        raise ValueError(f"'backend' must be one of {known}, got {backend!r}")
    if backend == "numba" and device.type != "cpu":
        raise ValueError(
            f"backend='numba' runs on the CPU, but the input is on {device}; use "
            "'torch' or 'auto'"
        )
    if backend == "auto":
        return "numba" if device.type == "cpu" else "torch"
    return backend


def _choose_scan(backend: str, x: Tensor, ptr: Tensor | None) -> str:
    chosen = _choose(backend, x.device, _SCAN_BACKENDS)
    if backend == "auto" and x.is_cuda and x.dtype == torch.float32:
        # Not while tracing: a compiler could not see into it.
        if (
            not torch.compiler.is_compiling()
            and mamba_ssm_.is_usable(x.device)
            and (ptr is None or mamba_ssm_.is_worthwhile(ptr))
        ):
            return "mamba_ssm"
    elif backend == "mamba_ssm":
        reason = mamba_ssm_.why_not(x.device)
        if reason is None and x.dtype != torch.float32:
            reason = f"it computes in float32, not {x.dtype}"
        if reason is not None:
            raise ValueError(
                f"backend='mamba_ssm' needs the kernel of the package 'mamba-ssm', but "
                f"on {x.device} {reason}; use 'auto'"
            )
    return chosen


def _explain(
    operator: str, x: Tensor, ptr: Tensor | None, backend: str, chosen: str
) -> Choice:
    _check_ptr(_as_ptr(ptr, x), x.size(0))
    reason = f"tensors on {x.device.type}" if backend == "auto" else "asked for"
    return Choice(operator, "scan", "state", chosen, reason)


def explain_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    ptr: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Choice:
    """What `explain` says of `selective_scan`."""
    _check_scan(u, delta, A, B, C, D, z, delta_bias, ptr)
    chosen = _choose_scan(backend, promoted(u, delta, A, B, C)[0], ptr)
    return _explain("selective_scan", u, ptr, backend, chosen)


def explain_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Choice:
    """What `explain` says of `causal_conv1d`."""
    _check_conv(x, weight, bias, ptr)
    return _explain("causal_conv1d", x, ptr, backend, _choose(backend, x.device))


# ------------------------------------------------------------ the registered operators


@torch.library.custom_op("pyg_chimera::selective_scan", mutates_args=())
def _scan_op(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ptr: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _check_ptr(ptr, u.size(0))
    with torch.no_grad(), torch.autocast(u.device.type, enabled=False):
        if backend == "numba":
            return numba_.scan_forward(u, delta, A, B, C, D, ptr)
        return torch_.scan_forward(u, delta, A, B, C, D, ptr).contiguous(), u.new_empty(
            0
        )


@_scan_op.register_fake
def _(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ptr: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    states = u.new_empty(0)
    if backend == "numba":
        states = u.new_empty(numba_.kept_shape(u.size(0), A))
    return u.new_empty(u.shape), states


@torch.library.custom_op("pyg_chimera::selective_scan_backward", mutates_args=())
def _scan_backward_op(
    grad: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ptr: Tensor,
    states: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(u.device.type, enabled=False):
        if backend == "numba":
            grads = numba_.scan_backward(grad, u, delta, A, B, C, D, ptr, states)
        else:
            grads = torch_.scan_backward(grad, u, delta, A, B, C, D, ptr)
        du, ddelta, dA, dB, dC, dD = (x.contiguous() for x in grads)
        return du, ddelta, dA, dB, dC, dD


@_scan_backward_op.register_fake
def _(
    grad: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    du, ddelta, dA, dB, dC, dD = (x.new_empty(x.shape) for x in inputs[:6])
    return du, ddelta, dA, dB, dC, dD


def _scan_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _scan_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    grads = _scan_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.backend)
    return *grads, None, None


_scan_op.register_autograd(_scan_backward, setup_context=_scan_context)


@torch.library.custom_op("pyg_chimera::causal_conv1d", mutates_args=())
def _conv_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, ptr: Tensor, backend: str
) -> Tensor:
    _check_ptr(ptr, x.size(0))
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if backend == "numba":
            return numba_.conv_forward(x, weight, bias, ptr)
        return torch_.conv_forward(x, weight, bias, ptr).contiguous()


@_conv_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, ptr: Tensor, backend: str
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("pyg_chimera::causal_conv1d_backward", mutates_args=())
def _conv_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if backend == "numba":
            return numba_.conv_backward(grad, x, weight, ptr)
        dx, dweight = torch_.conv_backward(grad, x, weight, ptr)
        return dx.contiguous(), dweight.contiguous()


@_conv_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _conv_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ptr, ctx.backend = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, ptr)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple:
    grads = _conv_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.backend)
    return *grads, grad.sum(0) if ctx.has_bias else None, None, None


_conv_op.register_autograd(_conv_backward, setup_context=_conv_context)
