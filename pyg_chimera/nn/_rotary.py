"""Rotary positions: queries and keys are rotated by angles, so that their products
depend on the distance between positions.
"""

import torch
from torch import Tensor


def rotary_angles(places: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The angles of `"RoFormer" <https://arxiv.org/abs/2104.09864>`_: wavelengths from
    6 to about 60,000.

    Args:
        places: [..., D] coordinates, each of which gets the same number of pairs.
        channels: The number of channels, a multiple of 2 D.
        dtype: The dtype of the angles.

    Returns:
        Tensor: [..., channels / 2].
    """
    size = channels // places.size(-1) // 2
    step = torch.arange(size, device=places.device, dtype=dtype)
    return (places.unsqueeze(-1) * 10_000.0 ** (-step / size)).flatten(-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of channels, one from each half, by angles [..., channels / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
