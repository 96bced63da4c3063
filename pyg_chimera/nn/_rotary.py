"""Rotary positions: queries and keys are rotated by angles, so that their products
depend on the distance between positions.
"""

import torch
from torch import Tensor

__all__ = ["rotary_angles", "rotate", "scaled_base"]

#: The default base of the angles: wavelengths go up to about 2 pi times this.
BASE = 10_000.0


def rotary_angles(
    places: Tensor,
    channels: int,
    base: float | Tensor = BASE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The angles of `"RoFormer" <https://arxiv.org/abs/2104.09864>`_.

    Args:
        places: [..., D] coordinates, each of which gets the same number of pairs.
        channels: The number of channels, a multiple of 2 D.
        base: One number, or one for each position, [...].
        dtype: The dtype of the angles, float32 by default.

    Returns:
        Tensor: [..., channels / 2].
    """
    size = channels // places.size(-1) // 2
    step = torch.arange(size, device=places.device, dtype=dtype or torch.float32)
    if isinstance(base, Tensor):
        base = base[..., None, None]
    return (places.unsqueeze(-1) * base ** (-step / size)).flatten(-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of channels, one from each half, by angles [..., channels / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def scaled_base(stretch: Tensor, channels: int) -> Tensor:
    """The base that stretches the longest wavelength and leaves the shortest one.

    This is "NTK-aware" interpolation, `"YaRN: Efficient Context Window Extension of
    Large Language Models" <https://arxiv.org/abs/2309.00071>`_ (Definition 1), for
    positions further apart than in training. `channels` are those of one coordinate.
    """
    return BASE * stretch ** (channels / max(channels - 2, 1))
