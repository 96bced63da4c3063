"""The convolution with PyTorch's own, on any device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from pyg_chimera.ops.common.dispatch import Call

DEVICES = None


class _Canvas(NamedTuple):
    """Images that hold all grids, [images, height, width], and the filter's padding.

    Grids of equal size are one image each; others lie side by side on a single image,
    with gaps as wide as the filter.
    """

    shape: tuple[int, int, int]
    padding: tuple[int, int]
    place: Tensor | None  #: of each node on the single image

    def lay(self, x: Tensor) -> Tensor:
        """[V, F] to [images, F, height, width]."""
        if self.place is not None:
            images, height, width = self.shape
            blank = x.new_zeros(images * height * width, x.size(1))
            x = blank.index_copy_(0, self.place, x)
        return x.reshape(*self.shape, -1).permute(0, 3, 1, 2)

    def take(self, image: Tensor) -> Tensor:
        """[images, F, height, width] to [V, F]."""
        x = image.permute(0, 2, 3, 1).flatten(0, 2)
        return x if self.place is None else x.index_select(0, self.place)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [V, F]."""
    x, weight = call.inputs[:2]
    if x.numel() == 0:
        return x.clone(), ()
    canvas = _canvas(call)
    seen = F.conv2d(
        canvas.lay(x), weight.unsqueeze(1), None, 1, canvas.padding, 1, x.size(1)
    )
    # Outputs beyond the end come from padding both sides for causal or even filters.
    return canvas.take(seen[:, :, : canvas.shape[1], : canvas.shape[2]]), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x and weight."""
    x, weight = call.inputs[:2]
    if x.numel() == 0:
        return x.clone(), torch.zeros_like(weight)
    canvas = _canvas(call)
    image, grad = canvas.lay(x), canvas.lay(grad)
    more = [
        2 * p - n + 1 for p, n in zip(canvas.padding, weight.shape[1:], strict=True)
    ]
    grad = F.pad(grad, (0, more[1], 0, more[0])) if any(more) else grad
    rest = (1, canvas.padding, 1, x.size(1))
    dx = conv2d_input(image.shape, weight.unsqueeze(1), grad, *rest)
    dweight = conv2d_weight(image, (x.size(1), 1, *weight.shape[1:]), grad, *rest)
    return canvas.take(dx), dweight.squeeze(1)


def _canvas(call: Call) -> _Canvas:
    x, weight, causal, sizes = call.inputs[:4]
    rows, columns = weight.shape[1:]
    padding = (rows - 1, columns - 1) if causal else (rows // 2, columns // 2)
    if len(set(zip(sizes[::2], sizes[1::2], strict=True))) == 1:
        return _Canvas((len(sizes) // 2, sizes[0], sizes[1]), padding, None)
    height, width = torch.tensor(sizes, device=x.device).view(-1, 2).unbind(1)
    left = (width + columns - 1).cumsum(0) - width - columns + 1
    total = sum(sizes[1::2]) + (len(sizes) // 2) * (columns - 1)
    count = height * width
    grid = torch.repeat_interleave(count, output_size=x.size(0))
    local = torch.arange(x.size(0), device=x.device) - (count.cumsum(0) - count)[grid]
    place = local // width[grid] * total + left[grid] + local % width[grid]
    return _Canvas((1, max(sizes[::2]), total), padding, place)
