"""Generated images of an arrow and a circle: does the arrow point at the circle?"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset

from pyg_chimera.datasets._common import SPLITS
from pyg_chimera.ops.common.checks import check_option

__all__ = ["ArrowPointing"]

#: Scenes per block. Each block has its own random stream, so that a scene does not
#: depend on the number of samples.
_BLOCK = 1024
#: A ray hits within (1 - margin) radii of a circle's centre, or misses by 1 + margin.
_MARGIN = 0.2
#: Grey levels.
_ARROW, _CIRCLE = 255, 128


class _Scenes(NamedTuple):
    """The arrow and the circle of each of n images, in pixels from the upper left."""

    arrow: np.ndarray  # [n, 4]: x and y of the middle, angle of direction, length
    circle: np.ndarray  # [n, 3]: x and y of the centre, radius
    label: np.ndarray  # [n]


class ArrowPointing(InMemoryDataset):
    r"""The arrow pointing task of the `"pLSTM: parallelizable Linear Source Transition
    Mark networks" <https://arxiv.org/abs/2506.11997>`_ paper, with generated images.

    Each image shows a white arrow and a grey circle on black, at random positions
    without overlap. The label is 1 if the arrow points at the circle, that is, if the
    ray from the arrow along its direction hits it, and 0 otherwise. No ray grazes a
    circle: those that hit pass its centre within 0.8 radii, the others no closer than
    1.2 radii.

    For each image, two circles are drawn, with an arrow that points at the first but
    would not point at the second (nor the other way round); the first is shown for
    label 1, the second for label 0. The arrow alone therefore has the same distribution
    for both labels, and so have its position and the circle, with the distance between
    them. (Direction and circle, without the position of the arrow, determine about four
    labels in five.) Of each pair of consecutive samples, one has label 1.

    Objects have the same size in pixels whatever the size of the image, so that in a
    larger one only distances are new. The defaults are those of the paper's
    experiments, where models trained on :obj:`image_size=192` are tested at 384, too.

    A sample is a function of its position, and of :obj:`split`, :obj:`seed`,
    :obj:`image_size`, :obj:`radius` and :obj:`arrow_length`, but not of
    :obj:`num_samples`. Nothing is written to disk: about 10,000 images of
    :math:`48 \times 48` pixels are drawn per second, or about 3,000 of
    :math:`192 \times 192`. They are kept as 8-bit integers.

    A sample has the attributes

    * :obj:`image`: uint8 :math:`(1, H, W)`, as
      :class:`~pyg_chimera.transforms.ImageToGraph` takes it,
    * :obj:`y`: int64 :math:`(1)`,
    * :obj:`arrow`: float :math:`(1, 4)`, :math:`x` and :math:`y` of its middle, the
      angle of its direction (0 to the right, :math:`\pi / 2` down) and its length,
    * :obj:`circle`: float :math:`(1, 3)`, :math:`x` and :math:`y` of its centre and its
      radius,

    lengths in pixels, positions from the upper left corner of the image.

    Args:
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`.
            (default: :obj:`"train"`)
        num_samples (int, optional): The number of images, at least 1.
            (default: :obj:`10_000`)
        image_size (int, optional): Height and width of the images.
            (default: :obj:`192`)
        radius (tuple[float, float], optional): The smallest and the largest radius of
            circles. (default: :obj:`(15.0, 30.0)`)
        arrow_length (tuple[float, float], optional): The smallest and the largest
            length of arrows. (default: :obj:`(15.0, 30.0)`)
        seed (int, optional): Seed of the scenes. (default: :obj:`0`)
        transform (callable, optional): As in
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        ValueError: If :obj:`split` is unknown, a number or size is out of range, or
            :obj:`image_size` is too small for the objects.
    """

    def __init__(
        self,
        split: str = "train",
        num_samples: int = 10_000,
        image_size: int = 192,
        radius: tuple[float, float] = (15.0, 30.0),
        arrow_length: tuple[float, float] = (15.0, 30.0),
        seed: int = 0,
        transform: Callable | None = None,
    ) -> None:
        check_option("split", split, SPLITS)
        if num_samples < 1:
            raise ValueError(f"'num_samples' must be at least 1, got {num_samples}")
        if seed < 0:
            raise ValueError(f"'seed' must not be negative, got {seed}")
        for name, sizes in (("radius", radius), ("arrow_length", arrow_length)):
            if len(sizes) != 2 or not 2 <= sizes[0] <= sizes[1]:
                raise ValueError(
                    f"'{name}' must be a smallest and a largest size, of 2 pixels or "
                    f"more, got {sizes!r}"
                )
        smallest = 3 * max(2 * radius[1], arrow_length[1])
        if image_size < smallest:
            raise ValueError(
                f"'image_size' must be at least {smallest:g}, three times the largest "
                f"object, of radius={radius!r} or arrow_length={arrow_length!r}, got "
                f"{image_size}"
            )
        self.split = split
        self.num_samples = num_samples
        self.image_size = image_size
        self.radius = radius
        self.arrow_length = arrow_length
        self.seed = seed
        super().__init__(None, transform)
        self._generate()

    def _generate(self) -> None:
        n, size = self.num_samples, self.image_size
        image = np.zeros((n, size, size), np.uint8)
        parts = []
        for start in range(0, n, _BLOCK):
            scenes = self._scenes(start // _BLOCK)
            scenes = _Scenes(*(array[: n - start] for array in scenes))
            _draw(image[start : start + _BLOCK], scenes)
            parts.append(scenes)
        arrow, circle, label = map(np.concatenate, zip(*parts, strict=True))
        # The same as `collate` of single samples, but without copying them all.
        data = Data(
            image=torch.from_numpy(image),
            y=torch.from_numpy(label),
            arrow=torch.from_numpy(arrow.astype(np.float32)),
            circle=torch.from_numpy(circle.astype(np.float32)),
        )
        self.data = data
        self.slices = dict.fromkeys(
            ("image", "y", "arrow", "circle"), torch.arange(n + 1)
        )

    def _scenes(self, block: int) -> _Scenes:
        """The scenes of one block."""
        entropy = [self.seed, SPLITS.index(self.split), self.image_size, block]
        rng = np.random.default_rng(entropy)
        arrow, circle = np.empty((_BLOCK, 4)), np.empty((_BLOCK, 3))
        label = rng.integers(2, size=_BLOCK // 2).repeat(2)
        label[1::2] = 1 - label[::2]
        missing = np.arange(_BLOCK)
        while missing.size:
            n = missing.size
            length = rng.uniform(*self.arrow_length, n)
            middle = self._positions(rng, (n,), self.arrow_length[1] / 2)
            # The two circles are drawn alike and must remain exchangeable: each
            # condition below applies to both.
            r = rng.uniform(*self.radius, (2, n))
            centre = self._positions(rng, (2, n), self.radius[1])
            to = centre - middle
            distance = np.linalg.norm(to, axis=-1)
            reach = 1 - _MARGIN
            off = rng.uniform(-reach, reach, (2, n)) * r  # how far from the centre
            good = (distance > r + length / 2 + 2).all(0)
            angle = np.arctan2(to[..., 1], to[..., 0])
            angle += np.arcsin(np.where(good, off / distance, 0))
            # The ray to each circle, and the position of the other circle.
            ray = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
            other = to[::-1]
            ahead = (ray * other).sum(-1) > 0
            aside = np.abs(ray[..., 0] * other[..., 1] - ray[..., 1] * other[..., 0])
            good &= ~(ahead & (aside < (1 + _MARGIN) * r[::-1])).any(0)
            where, kept = missing[good], np.flatnonzero(good)
            shown = 1 - label[where]
            arrow[where, :2], arrow[where, 2] = middle[kept], angle[0, kept]
            arrow[where, 3] = length[kept]
            circle[where, :2], circle[where, 2] = centre[shown, kept], r[shown, kept]
            missing = missing[~good]
        return _Scenes(arrow, circle, label)

    def _positions(
        self, rng: np.random.Generator, shape: tuple[int, ...], reach: float
    ) -> np.ndarray:
        """Random positions of objects of the given extent, a pixel from the border."""
        border = reach + 1
        return rng.uniform(border, self.image_size - border, (*shape, 2))

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({len(self)}, split={self.split!r}, "
            f"image_size={self.image_size})"
        )


def _draw(image: np.ndarray, scenes: _Scenes) -> None:
    """Draws scenes on black images."""
    x, y, angle, length = scenes.arrow.astype(np.float32).T[..., None, None]
    cos, sin = np.cos(angle), np.sin(angle)

    def arrow(dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
        along, across = cos * dx + sin * dy, np.abs(cos * dy - sin * dx)
        return _arrow_distance(along, across, length)

    _paint(image, x, y, float(scenes.arrow[:, 3].max()) / 2, arrow, _ARROW)

    x, y, radius = scenes.circle.astype(np.float32).T[..., None, None]

    def circle(dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return np.sqrt(dx * dx + dy * dy) - radius

    _paint(image, x, y, float(scenes.circle[:, 2].max()), circle, _CIRCLE)


def _arrow_distance(along: Any, across: Any, length: Any) -> Any:
    """The distance of a point outside of an arrow (negative inside).

    Args:
        along: The point's coordinate in the arrow's direction, from its middle.
        across: The absolute value of its coordinate across it.
        length: The length of the arrow.
    """
    # The head is wide enough to outweigh the tail, so that the direction shows even if
    # the whole arrow is a few pixels long.
    head, half_width = 0.4 * length, 0.35 * length
    half_stroke = np.maximum(length / 20, 0.5)
    # A triangle with its tip at length / 2, and a rectangle from there back.
    slope = np.hypot(head, half_width)
    side = (half_width * (along - length / 2) + head * across) / slope
    triangle = np.maximum(side, length / 2 - head - along)
    middle, half = -head / 2, (length - head) / 2
    shaft = np.maximum(across - half_stroke, np.abs(along - middle) - half)
    return np.minimum(triangle, shaft)


def _paint(
    image: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    reach: float,
    distance: Callable[[np.ndarray, np.ndarray], np.ndarray],
    level: int,
) -> None:
    """Paints one object per image, only within a box around it."""
    n, size, _ = image.shape
    side = min(size, 2 * int(np.ceil(reach)) + 3)
    corner = np.concatenate([y, x], axis=1).reshape(n, 2)
    corner = np.clip(np.floor(corner).astype(np.int64) - side // 2, 0, size - side)
    rows = corner[:, :1] + np.arange(side)
    columns = corner[:, 1:] + np.arange(side)
    dy = rows[:, :, None] + np.float32(0.5) - y
    dx = columns[:, None, :] + np.float32(0.5) - x
    # Antialiasing: the coverage of a pixel by a straight edge at this distance.
    cover = np.clip(0.5 - distance(dx, dy), 0, 1)
    at = np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]
    image[at] = np.maximum(image[at], np.rint(level * cover).astype(np.uint8))
