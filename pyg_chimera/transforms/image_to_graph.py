import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.common.checks import check_integer
from pyg_chimera.transforms._to_grid import ToGrid

__all__ = ["ImageToGraph"]


@functional_transform("chimera_image_to_graph")
class ImageToGraph(ToGrid):
    r"""Converts an image to a grid graph with a node for each patch (functional name:
    :obj:`chimera_image_to_graph`).

    An image of :math:`C` channels becomes :math:`h \times w` patches of
    :math:`p_h \times p_w` pixels. The result holds

    * :obj:`x`, :math:`[h \cdot w, C \cdot p_h \cdot p_w]`: the pixels of the patches,
      patches row by row; within a patch by channel, then row, then column. Floating
      point images keep their type, others become :obj:`torch.float` (and 8-bit ones are
      scaled from :math:`[0, 255]` to :math:`[0, 1]`),
    * :obj:`edge_index`, int64 :math:`[2, |\mathcal{E}|]`: edges between horizontally
      and vertically adjacent patches, in both directions, sorted by source, then
      target,
    * :obj:`pos`, float :math:`[h \cdot w, 2]`: the column and the row of the patch,
    * :obj:`height` :math:`= h` and :obj:`width` :math:`= w`, batched to one entry per
      graph, as :class:`~pyg_chimera.nn.PLSTMGridConv` needs them.

    Args:
        patch_size (int or tuple[int, int], optional): The number of pixels on each side
            of a patch, or its height and its width. (default: :obj:`1`)
        attr_name (str, optional): The attribute of the data that holds the image. It is
            removed; others, such as :obj:`y`, are kept, except :obj:`edge_attr` and
            :obj:`num_nodes` of an earlier graph. (default: :obj:`"image"`)

    Shapes:
        - **input:** a :class:`torch_geometric.data.Data` with an image, or the image
          alone (as in a data set of images): a tensor :math:`(C, H, W)` or
          :math:`(H, W)`, an array :math:`(H, W, C)` or :math:`(H, W)`, or a PIL image;
          one with a palette is read as RGB.
        - **output:** a :class:`torch_geometric.data.Data`

    Raises:
        TypeError: If the input is none of these.
        ValueError: If :obj:`patch_size` is not positive or does not divide the sides of
            an image, the data has no image, or the image has the wrong shape or no
            pixels.
    """

    content = "an image"
    coordinates = 2

    def __init__(
        self, patch_size: int | tuple[int, int] = 1, attr_name: str = "image"
    ) -> None:
        sides: Any = patch_size
        if not isinstance(patch_size, (tuple, list)):
            sides = (patch_size, patch_size)
        if len(sides) != 2:
            raise ValueError(
                "'patch_size' must be a positive integer or a pair of them, got "
                f"{patch_size!r}"
            )
        rows, columns = (check_integer("patch_size", side, 1) for side in sides)
        self.patch_size = rows, columns
        self.attr_name = attr_name

    def nodes(self, content: Any) -> tuple[Tensor, int, int]:
        """The pixels of each patch, and the numbers of rows and columns of patches."""
        image = _to_tensor(content)
        channels, rows, columns = image.shape
        p, q = self.patch_size
        height, width = rows // p, columns // q
        if height * p != rows or width * q != columns:
            raise ValueError(
                f"'patch_size' must divide the sides of an image, got {p} x {q} for "
                f"{rows} x {columns} pixels; 'torch.nn.functional.pad' adds zeros"
            )
        patches = image.reshape(channels, height, p, width, q).permute(1, 3, 0, 2, 4)
        x = patches.reshape(height * width, channels * p * q)
        if x.data_ptr() == image.data_ptr():  # maybe that of a whole data set
            x = x.clone()
        return x, height, width


def _to_tensor(image: Any) -> Tensor:
    """The image as floating-point numbers of shape [channels, rows, columns]."""
    # Whoever has a PIL image has imported PIL.
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(image, pil.Image):
        image = np.array(image.convert("RGB") if image.mode in ("P", "PA") else image)
    wanted = (
        "The image must be a tensor of shape [C, H, W] or [H, W], an array of shape "
        "[H, W, C] or [H, W], or a PIL image"
    )
    if isinstance(image, np.ndarray):
        shape = image.shape
        if image.ndim == 3:
            image = image.transpose(2, 0, 1)
        image = torch.from_numpy(np.ascontiguousarray(image))
    elif isinstance(image, Tensor):
        shape = tuple(image.shape)
    else:
        raise TypeError(f"{wanted}, got '{type(image).__name__}'")
    if len(shape) not in (2, 3) or image.numel() == 0 or image.is_complex():
        raise ValueError(
            f"{wanted}, and have pixels, got shape {list(shape)} and dtype "
            f"{image.dtype}"
        )
    if image.dim() == 2:
        image = image.unsqueeze(0)
    if image.is_floating_point():
        return image
    out = image.to(torch.float)
    return out / 255 if image.dtype == torch.uint8 else out
