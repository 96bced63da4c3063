"""Mamba's recurrence over packed sequences."""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.common.checks import check_dim, check_floats, check_shape
from pyg_chimera.ops.common.examples import Draw, Example, sequences
from pyg_chimera.ops.common.operator import Operator, without_autocast
from pyg_chimera.ops.common.sequences import as_ptr, check_ptr
from pyg_chimera.ops.recurrence.cpu import selective as numba_backend
from pyg_chimera.ops.recurrence.dense import selective as reference
from pyg_chimera.ops.recurrence.gpu import selective as triton_backend
from pyg_chimera.ops.recurrence.plain import selective as torch_backend


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    ptr: Tensor
    backend: str


class _SelectiveScan(Operator[Inputs, None]):
    name = "selective_scan"
    inputs = Inputs
    output_like = "u"
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "triton": triton_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def check(self, inputs: Inputs, structure: None) -> None:
        check_ptr(inputs.ptr, inputs.u.size(0))


_selective_scan = _SelectiveScan()


def _examples(draw: Draw) -> Iterator[Example]:
    sizes = {"u": (75, 17), "delta": (75, 17), "A": (17, 3), "D": (17,)}
    for inputs in sequences(draw, **sizes, B=(75, 3), C=(75, 3)):
        yield {**inputs, "A": -inputs["A"].abs(), "delta_softplus": True}


@_selective_scan.public(_examples)
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
    of any length follow each other without padding and do not interact. Time and
    memory are linear in :math:`T`. Differentiable once, in reverse mode, in all
    arguments but :obj:`ptr`. float16 and bfloat16 are computed in float32.

    Args:
        u (torch.Tensor): The input, :math:`[T, F]`.
        delta (torch.Tensor): The step sizes, :math:`[T, F]`.
        A (torch.Tensor): The decay rates, usually negative, :math:`[F, N]`.
        B (torch.Tensor): The input projections :math:`\mathbf{b}`, :math:`[T, N]`.
        C (torch.Tensor): The output projections :math:`\mathbf{c}`, :math:`[T, N]`.
        D (torch.Tensor, optional): The skip connection, :math:`[F]`.
            (default: :obj:`None`)
        z (torch.Tensor, optional): The gate of the output, :math:`[T, F]`.
            (default: :obj:`None`)
        delta_bias (torch.Tensor, optional): Added to :obj:`delta`, :math:`[F]`.
            (default: :obj:`None`)
        delta_softplus (bool, optional): Whether the step sizes are the softplus of
            :obj:`delta`, after its bias. (default: :obj:`False`)
        ptr (torch.Tensor, optional): Where each sequence begins, followed by :math:`T`,
            integer :math:`[S + 1]`, like :obj:`ptr` of a PyG batch. Sequences may be
            empty. Without it, all rows are one sequence. (default: :obj:`None`)
        backend (str, optional): ``"reference"`` (a loop, in float64), ``"torch"`` (any
            device; the number of passes over all states is the number of binary digits
            of the longest sequence's length), ``"numba"`` (CPU), ``"triton"``
            (GPU), or ``"auto"``: numba on the CPU; elsewhere triton where possible,
            otherwise torch. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[T, F]`, in the dtype of :obj:`u`.

    Raises:
        ValueError: If shapes do not match, :obj:`ptr` does not begin with 0, decreases
            or does not end with :math:`T`, or :obj:`backend` is unknown or can't run on
            the device.
        TypeError: If :obj:`ptr` is not integer, or another tensor is not floating
            point.
    """
    check_dim("u", u, "[rows, channels]", 2)
    check_dim("A", A, "[channels, states]", 2)
    given = {"D": D, "z": z, "delta_bias": delta_bias}
    given = {name: x for name, x in given.items() if x is not None}
    check_floats(u=u, delta=delta, A=A, B=B, C=C, **given)
    (rows, channels), states = u.shape, A.size(1)
    check_shape("delta", delta, "[rows, channels] of 'u'", [rows, channels])
    check_shape("A", A, "[channels, states]", [channels, states])
    check_shape("B", B, "[rows, states]", [rows, states])
    check_shape("C", C, "[rows, states]", [rows, states])
    if D is not None:
        check_shape("D", D, "[channels]", [channels])
    if z is not None:
        check_shape("z", z, "[rows, channels] of 'u'", [rows, channels])
    if delta_bias is not None:
        check_shape("delta_bias", delta_bias, "[channels]", [channels])
    ptr = as_ptr(ptr, u)
    with without_autocast(u):
        x, delta, A, B, C = check_floats(u=u, delta=delta, A=A, B=B, C=C)
        if delta_bias is not None:
            delta = delta + delta_bias.to(delta.dtype)
        if delta_softplus:
            delta = F.softplus(delta)
        D = x.new_zeros(channels) if D is None else D.to(x.dtype)
        out = _selective_scan(Inputs(x, delta, A, B, C, D, ptr, backend))
        if z is not None:
            out = out * F.silu(z.to(x.dtype))
    return out.to(u.dtype)
