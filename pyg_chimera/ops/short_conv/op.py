"""Small depthwise convolutions of packed sequences and of grids."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_dim,
    check_flag,
    check_floats,
    check_option,
    check_shape,
)
from pyg_chimera.ops.common.operator import Operator, without_autocast
from pyg_chimera.ops.common.sequences import as_ptr
from pyg_chimera.ops.short_conv import (
    numba_backend,
    reference,
    torch_backend,
    triton_backend,
)
from pyg_chimera.ops.short_conv.taps import Taps, grid_taps, sequence_taps
from pyg_chimera.ops.structure.cache import Recipe
from pyg_chimera.ops.structure.grid import flat_sizes

__all__ = ["causal_conv1d", "grid_conv"]

_BACKENDS = {
    "numba": numba_backend,
    "triton": triton_backend,
    "torch": torch_backend,
    "reference": reference,
}


class SequenceInputs(NamedTuple):
    """The inputs of the operator over sequences."""

    x: Tensor
    weight: Tensor  #: [channels, taps]
    bias: Tensor | None
    ptr: Tensor
    backend: str

    @property
    def window(self) -> tuple[int, int, int]:
        """The rows and columns of the filter, and whether it is causal."""
        return 1, self.weight.size(1), 1

    @property
    def sizes(self) -> list[int]:
        """The height and width of each sequence."""
        return [n for length in self.ptr.diff().tolist() for n in (1, length)]


class GridInputs(NamedTuple):
    """The inputs of the operator over grids."""

    x: Tensor
    weight: Tensor  #: [channels, taps]
    bias: Tensor | None
    window: list[int]  #: rows and columns of the filter, and whether it is causal
    sizes: list[int]
    backend: str


class _CausalConv1d(Operator[SequenceInputs, Taps]):
    name = "causal_conv1d"
    inputs = SequenceInputs
    output_like = "x"
    backends = _BACKENDS

    def recipe(self, inputs: SequenceInputs) -> Recipe:
        sizes = (inputs.x.size(0), inputs.weight.size(1))
        return Recipe(sequence_taps, (inputs.ptr,), sizes)


class _GridConv(Operator[GridInputs, Taps]):
    name = "grid_conv"
    inputs = GridInputs
    output_like = "x"
    backends = _BACKENDS

    def recipe(self, inputs: GridInputs) -> Recipe:
        sizes = (inputs.x.device, inputs.sizes, inputs.window)
        return Recipe(grid_taps, (), sizes)


_causal_conv1d = _CausalConv1d()
_grid_conv = _GridConv()


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
            ``"triton"`` (GPU, float32), or ``"auto"``: numba on the CPU; elsewhere
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
    inputs = SequenceInputs(
        u, weight, biases[0] if biases else None, as_ptr(ptr, x), backend
    )
    with without_autocast(x):
        out = _causal_conv1d(inputs)
        if activation == "silu":
            out = F.silu(out)
    return out.to(x.dtype)


def grid_conv(
    x: Tensor,
    weight: Tensor,
    height: int | Tensor,
    width: int | Tensor,
    *,
    causal: bool = False,
    backend: str = "auto",
) -> Tensor:
    r"""Convolution of grids of any size with a filter for each channel, like the one in
    front of the recurrence in Mamba, on sequences, and in pLSTM, on images:

    .. math::
        \mathbf{y}_{rc} = \sum_{a=1}^{K_1} \sum_{b=1}^{K_2} \mathbf{w}_{ab} \odot
        \mathbf{x}_{r + a - a_0, c + b - b_0},

    where :math:`\mathbf{x}` is zero outside of a grid, and :math:`\mathbf{w}_{a_0 b_0}`
    applies to the node itself: the middle of the filter
    (:math:`a_0 = \lfloor K_1 / 2 \rfloor + 1`), or its last row and column if it is
    causal. A sequence is a grid of height 1. Differentiable once, in reverse mode, in
    :obj:`x` and :obj:`weight`.

    Args:
        x (torch.Tensor): The input, :math:`[|\mathcal{V}|, F]`. The nodes of a grid are
            in row-major order, grid after grid.
        weight (torch.Tensor): The filters, :math:`[F, K_1, K_2]`.
        height (int or torch.Tensor): The number of rows of each grid, integer
            :math:`[\textrm{grids}]`, or one number for all.
        width (int or torch.Tensor): The number of columns of each grid.
        causal (bool, optional): If :obj:`True`, nodes read only those above and to the
            left. (default: :obj:`False`)
        backend (str, optional): As for :func:`causal_conv1d`. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, F]`, in the dtype of :obj:`x`.

    Raises:
        ValueError: If shapes do not match, sizes of grids do not match the number of
            nodes, or :obj:`backend` is unknown.
        TypeError: If a tensor has the wrong dtype.
    """
    check_flag("causal", causal)
    check_dim("x", x, "[nodes, channels]", 2)
    check_dim("weight", weight, "[channels, rows, columns]", 3)
    if min(weight.shape[1:]) < 1:
        raise ValueError(
            "'weight' must be [channels, rows, columns] of at least one row and "
            f"column, got {list(weight.shape)}"
        )
    wanted = [x.size(1), *weight.shape[1:]]
    window = [*weight.shape[1:], int(causal)]
    check_shape("weight", weight, "[channels, rows, columns]", wanted)
    sizes = flat_sizes(height, width, x)
    y, weight = check_floats(x=x, weight=weight)
    with without_autocast(x):
        out = _grid_conv(GridInputs(y, weight.flatten(1), None, window, sizes, backend))
    return out.to(x.dtype)
