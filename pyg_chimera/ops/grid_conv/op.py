"""A small depthwise convolution of grids."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_dim,
    check_flag,
    check_floats,
    check_shape,
)
from pyg_chimera.ops.common.examples import Draw, Example
from pyg_chimera.ops.common.operator import Operator, without_autocast
from pyg_chimera.ops.grid_conv import numba_backend, reference, torch_backend
from pyg_chimera.ops.structure.grid import flat_sizes


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    x: Tensor
    weight: Tensor
    causal: int
    sizes: list[int]
    backend: str


class _GridConv(Operator[Inputs, None]):
    name = "grid_conv"
    inputs = Inputs
    output_like = "x"
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "torch": torch_backend,
        "reference": reference,
    }


_grid_conv = _GridConv()


def _examples(draw: Draw) -> Iterator[Example]:
    for causal in (False, True):
        given = {"height": 5, "width": 7, "causal": causal}
        yield {"x": draw(35, 17), "weight": draw(17, 3, 2), **given}


@_grid_conv.public(_examples)
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
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"torch"` (any device),
            :obj:`"reference"` (slow, for tests) or :obj:`"auto"`. (default:
            :obj:`"auto"`)

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
    check_shape("weight", weight, "[channels, rows, columns]", wanted)
    sizes = flat_sizes(height, width, x)
    y, weight = check_floats(x=x, weight=weight)
    with without_autocast(x):
        out = _grid_conv(Inputs(y, weight, int(causal), sizes, backend))
    return out.to(x.dtype)
