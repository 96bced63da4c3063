"""Models of images that are grids of patches: pLSTM and, of its size, a ViT."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from engine import count_parameters
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module

from pyg_chimera.nn import GPSLayer, GraphModel, PLSTMConv

MODELS = ("plstm", "vit")
#: The modes of pLSTM's layers, which take turns.
MODES = ("PD", "P", "D")


@dataclass(frozen=True)
class Vision:
    """The size of a model."""

    patches: int  # on each side of a training image
    patch_channels: int  # pixels and colours of a patch
    num_layers: int
    channels: int
    heads: int
    mlp_channels: int
    mode: str = "PD"
    pool: str = "corners"  #: where pLSTM answers from: "corners", "mean" or "max"
    gate_biases: tuple[float, float, float] | None = None  #: of pLSTM, at first
    gate_std: float = 0.0


def _grid(x: Tensor, height: Tensor | int, width: Tensor | int) -> tuple[int, int, int]:
    """How many images there are, and how many patches down and across."""
    height, width = (torch.as_tensor(side).view(-1) for side in (height, width))
    h, w = int(height[0]), int(width[0])
    if len(height) * h * w != len(x) or (height != h).any() or (width != w).any():
        raise ValueError(
            "All images of a batch must have the same size (got heights "
            f"{height.unique().tolist()} and widths {width.unique().tolist()} of "
            f"{len(x)} patches)"
        )
    return len(height), h, w


class PositionEmbedding(Module):
    """Adds a learnt vector to each patch; for larger images, bicubic between them."""

    def __init__(self, channels: int, patches: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, channels, patches, patches))
        torch.nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(
        self, x: Tensor, edge_index: Tensor, height: Tensor | int, width: Tensor | int
    ) -> Tensor:
        """The patches with the vectors of their positions."""
        images, h, w = _grid(x, height, width)
        weight = self.weight
        if weight.shape[2:] != (h, w):
            weight = F.interpolate(weight, (h, w), mode="bicubic")
        weight = weight.flatten(2).transpose(1, 2)
        return (x.view(images, h * w, -1) + weight).view_as(x)


class SelfAttention(Module):
    """Softmax attention among the patches of each image."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_in = Linear(channels, 3 * channels)
        self.lin_out = Linear(channels, channels)

    def forward(self, x: Tensor, height: Tensor | int, width: Tensor | int) -> Tensor:
        """What each patch attends to."""
        images, h, w = _grid(x, height, width)
        qkv = self.lin_in(x).view(images, h * w, 3, self.heads, -1)
        out = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return self.lin_out(out.transpose(1, 2).reshape_as(x))


class CornerPatches(Module):
    """Normalizes the patches and keeps the corners, weighted so that the mean over all
    patches becomes the mean over the corners.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm(channels)

    def forward(
        self, x: Tensor, edge_index: Tensor, height: Tensor | int, width: Tensor | int
    ) -> Tensor:
        """The weighted corners, and 0 elsewhere."""
        images, h, w = _grid(x, height, width)
        weight = x.new_zeros(h * w)
        corners = torch.tensor([0, w - 1, (h - 1) * w, h * w - 1], device=x.device)
        weight.index_add_(0, corners, weight.new_full((4,), h * w / 4))
        return self.norm(x) * weight.repeat(images).view(-1, 1)


def build_model(vision: Vision, name: str = "plstm") -> GraphModel:
    """pLSTM, or a ViT whose feed-forward networks are such that it has pLSTM's size.

    Both are patches, pre-norm layers of a mixer and a feed-forward network, and a
    linear head. pLSTM needs no positions and reads its answer from the corner patches,
    as in the paper, or from all; the ViT learns positions and reads the mean.
    """
    if name == "vit":
        vision = _match_size(vision)
    return _build(vision, name)


def _build(vision: Vision, name: str) -> GraphModel:
    channels = vision.channels

    def mixer(index: int) -> Module:
        if name == "vit":
            return SelfAttention(channels, vision.heads)
        mode = vision.mode[index % len(vision.mode)]
        return PLSTMConv(
            channels,
            channels,
            heads=vision.heads,
            mode=mode,
            orient="grid",
            gate_biases=vision.gate_biases,
            gate_std=vision.gate_std,
        )

    layers: list[Module] = [
        GPSLayer(
            channels,
            mixer=mixer(index),
            norm="layer_norm",
            norm_kwargs={"mode": "node"},
            norm_first=True,
            act="gelu",
            mlp_channels=vision.mlp_channels,
        )
        for index in range(vision.num_layers)
    ]
    if name == "vit":
        layers.insert(0, PositionEmbedding(channels, vision.patches))
    corners = name == "plstm" and vision.pool == "corners"
    if corners:
        layers.append(CornerPatches(channels))
    return GraphModel(
        vision.patch_channels,
        channels,
        1,
        layers=layers,
        head_layers=1,
        norm=None if corners else LayerNorm(channels),
        pool="mean" if corners or name == "vit" else vision.pool,
        structure={"height": "height", "width": "width"},
    )


def _match_size(vision: Vision) -> Vision:
    """With the hidden size at which a ViT has about as many parameters as pLSTM."""
    target = count_parameters(_build(vision, "plstm"))
    size, more = (
        count_parameters(_build(replace(vision, mlp_channels=m), "vit")) for m in (1, 2)
    )
    hidden = max(1, 1 + round((target - size) / (more - size)))
    return replace(vision, mlp_channels=hidden)
