"""A short causal depthwise convolution of packed sequences."""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.causal_conv1d import (
    numba_backend,
    reference,
    torch_backend,
    triton_backend,
)
from pyg_chimera.ops.common.checks import (
    check_dim,
    check_floats,
    check_option,
    check_shape,
)
from pyg_chimera.ops.common.examples import Draw, Example, sequences
from pyg_chimera.ops.common.operator import Operator, without_autocast
from pyg_chimera.ops.common.sequences import as_ptr, check_ptr


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    ptr: Tensor
    backend: str


class _CausalConv1d(Operator[Inputs, None]):
    name = "causal_conv1d"
    inputs = Inputs
    output_like = "x"
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "triton": triton_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def check(self, inputs: Inputs, structure: None) -> None:
        check_ptr(inputs.ptr, inputs.x.size(0))


_causal_conv1d = _CausalConv1d()


def _examples(draw: Draw) -> Iterator[Example]:
    return sequences(draw, x=(75, 17), weight=(17, 4), bias=(17,))


@_causal_conv1d.public(_examples)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ptr: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Causal convolution of packed sequences with a filter for each channel, as Mamba
    computes it before its scan:

    .. math::
        \mathbf{y}_t = \sigma \left( \mathbf{b} + \sum_{k=1}^{K} \mathbf{w}_{k} \odot
        \mathbf{x}_{t - K + k} \right),

    where rows before the first one of a sequence are zero. Differentiable once,
    in reverse mode, in all arguments but :obj:`ptr`.

    Args:
        x (torch.Tensor): The input, :math:`[T, F]`.
        weight (torch.Tensor): The filters, current row last, :math:`[F, K]`.
        bias (torch.Tensor, optional): Added to the output, :math:`[F]`.
            (default: :obj:`None`)
        ptr (torch.Tensor, optional): Where each sequence begins, followed by :math:`T`,
            integer :math:`[S + 1]`; see :func:`selective_scan`. (default: :obj:`None`)
        activation (str, optional): :obj:`"silu"` or :obj:`None`.
            (default: :obj:`None`)
        backend (str, optional): ``"reference"``, ``"torch"``, ``"numba"`` (CPU),
            ``"triton"`` (GPU), or ``"auto"``: numba on the CPU; elsewhere
            triton where possible, otherwise torch. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[T, F]`, in the dtype of :obj:`x`.

    Raises:
        ValueError: If shapes do not match, :obj:`ptr` is not as above, or
            :obj:`activation` or :obj:`backend` is unknown.
        TypeError: If :obj:`ptr` is not integer, or another tensor is not floating
            point.
    """
    check_dim("x", x, "[rows, channels]", 2)
    check_dim("weight", weight, "[channels, size]", 2)
    if weight.size(1) < 1:
        raise ValueError(
            f"'weight' must be [channels, size] with a size of at least 1, got "
            f"{list(weight.shape)}"
        )
    check_shape("weight", weight, "[channels, size]", [x.size(1), weight.size(1)])
    given = {"x": x, "weight": weight}
    if bias is not None:
        given["bias"] = bias
        check_dim("bias", bias, "[channels]", 1)
        check_shape("bias", bias, "[channels]", [x.size(1)])
    check_option("activation", activation, (None, "silu"))
    u, weight, *biases = check_floats(**given)
    inputs = Inputs(u, weight, biases[0] if biases else None, as_ptr(ptr, x), backend)
    with without_autocast(x):
        out = _causal_conv1d(inputs)
        if activation == "silu":
            out = F.silu(out)
    return out.to(x.dtype)
