"""Trains pLSTM, or a ViT of its size, to tell whether an arrow points at a circle.

Images are generated, cut into patches, and become grid graphs. Both models are tested
at the size of the training images and at twice that, which needs longer range than
they were trained for::

    python benchmarks/comparisons/arrow_pointing.py
    python benchmarks/comparisons/arrow_pointing.py --model vit
    python benchmarks/comparisons/arrow_pointing.py --mode P    # one mode only
    python benchmarks/comparisons/arrow_pointing.py --preset paper    # hours on a GPU
    python benchmarks/comparisons/arrow_pointing.py --samples samples.png

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import sys
from argparse import Namespace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Task, count_parameters, fit, main, make_parser, match_size, parse
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import LayerNorm, Module, MultiheadAttention, Parameter
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import Aggregation
from torch_geometric.transforms import BaseTransform, Compose
from torchmetrics.classification import BinaryAccuracy

from pyg_chimera.datasets import ArrowPointing
from pyg_chimera.nn import GPSLayer, GraphModel, PLSTMGridConv
from pyg_chimera.transforms import ImageToGraph

#: Appendix D.1 and D.2 of the paper.
PAPER: dict[str, Any] = dict(
    epochs=50, batch_size=128, lr=1e-4, warmup_epochs=1,
    optimizer="AdamW", weight_decay=0.0,
    image_size=192, larger_size=384, patch_size=16,
    radius=(15.0, 30.0), arrow_length=(15.0, 30.0),
    num_train=100_000, num_val=5_120, num_test=10_240,
    num_layers=12, channels=192, heads=3, mlp_channels=768,
    pool="corners", gate_biases=(-4.0, -4.0, -6.0),
)  # fmt: skip
#: For two cores: a quarter of the resolution, two layers with their own initial values,
#: and a pool over all patches.
DEMO = PAPER | dict(
    epochs=10, batch_size=64, lr=1e-3,
    image_size=48, larger_size=96, patch_size=8,
    radius=(6.0, 8.0), arrow_length=(12.0, 16.0),
    num_train=50_000, num_val=2_000, num_test=2_000,
    num_layers=2, channels=64, heads=4, mlp_channels=128,
    pool="max", gate_biases=(0.0, 0.0, -3.0),
)  # fmt: skip
SMOKE = PAPER | dict(
    epochs=2, batch_size=16, warmup_epochs=0.5,
    image_size=24, larger_size=48, patch_size=6,
    radius=(3.0, 4.0), arrow_length=(5.0, 8.0),
    num_train=32, num_val=16, num_test=16,
    num_layers=2, channels=16, heads=2, mlp_channels=32,
)  # fmt: skip
PRESETS = {"paper": PAPER, "demo": DEMO, "smoke": SMOKE}


def get_recipe(preset: str, model: str) -> dict[str, Any]:
    """The settings of a preset for a model."""
    # The best of the paper's three learning rates differs for the ViT.
    own = {"lr": 3e-4} if (preset, model) == ("paper", "vit") else {}
    return {"preset": preset, **PRESETS[preset], **own}


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["paper", "demo"], root="")
    add = parser.add_argument
    add("--model", choices=["plstm", "vit"], default="plstm")
    add("--mode", choices=["PD", "P", "D"], default="PD",
        help="of pLSTM's layers in turn; default: PD")  # fmt: skip
    add("--samples", type=Path, metavar="FILE", help="draw samples instead (PNG)")
    args = parse(
        parser, argv, lambda args: get_recipe(args.preset or "demo", args.model)
    )
    if args.mode != "PD" and args.model != "plstm":
        parser.error("--mode is pLSTM's")
    name = args.model if args.mode == "PD" else f"{args.model}-{args.mode}"
    name = f"{name}-{args.preset}-seed{args.seed}"
    args.out = args.out or Path("runs", "arrow-pointing", name)
    return args


# Data ----------------------------------------------------------------------------


class Standardize(BaseTransform):
    """Scales pixels, most of which are black, to about mean 0 and variance 1."""

    def forward(self, data: Data) -> Data:
        data.x = (data.x - 0.05) / 0.15
        return data


def get_datasets(args: Namespace) -> dict[str, ArrowPointing]:
    """Three splits, and test images of the larger size."""
    transform = Compose([ImageToGraph(args.patch_size), Standardize()])
    sizes = dict.fromkeys(("train", "val", "test"), args.image_size)
    return {
        name: ArrowPointing(
            "test" if name == "larger" else name,
            args.num_test if name == "larger" else getattr(args, f"num_{name}"),
            size,
            args.radius,
            args.arrow_length,
            transform=transform,
        )
        for name, size in {**sizes, "larger": args.larger_size}.items()
    }


def draw_samples(args: Namespace) -> None:
    """Draws samples of both sizes at one scale."""
    few = Namespace(**{**vars(args), "num_train": 8, "num_val": 1, "num_test": 2})
    datasets = get_datasets(few)
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplot_mosaic("0123AABB;4567AABB")
    for dataset in datasets.values():
        dataset.transform = None
    samples = [*datasets["train"], *datasets["larger"]]
    for place, data in zip("01234567AB", samples, strict=True):
        axes[place].imshow(data.image[0], "Greys", vmin=0, vmax=255)
        axes[place].set(xticks=[], yticks=[])
        axes[place].set_xlabel("points at it" if data.y else "does not", size=8)
    figure.savefig(args.samples, dpi=100)


# Models --------------------------------------------------------------------------


class PositionEmbedding(Module):
    """Adds a learned vector to each patch, interpolated (bicubic) to larger images."""

    def __init__(self, channels: int, patches: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(1, channels, patches, patches))
        torch.nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(
        self, x: Tensor, edge_index: Tensor, height: Tensor, width: Tensor
    ) -> Tensor:
        size = int(height[0]), int(width[0])  # the same for all images of a batch
        weight = F.interpolate(self.weight, size, mode="bicubic").flatten(2)
        return (x.view(len(height), -1, x.size(1)) + weight.mT).view_as(x)


class CornerPool(Aggregation):
    """The mean of the patches in the corners of square images of one size."""

    def forward(self, x: Tensor, index: Tensor, *_: Any, dim_size: int, **__: Any):
        side = isqrt(len(x) // dim_size)
        grid = x.view(dim_size, side, side, -1)
        return grid[:, :: max(1, side - 1), :: max(1, side - 1)].mean((1, 2))


def build_model(args: Namespace) -> GraphModel:
    """pLSTM, or a ViT of the same size, by the width of its feed-forward networks.

    Both are patches, pre-norm layers of a mixer and a feed-forward network, and a
    linear head. pLSTM needs no positions, and pools the corner patches, as in the
    paper, or all of them; the ViT learns positions, and takes the mean.
    """
    channels, heads = args.channels, args.heads

    def build(model: str, mlp_channels: int) -> GraphModel:
        def mixer(index: int) -> Module:
            if model == "vit":
                return MultiheadAttention(channels, heads, batch_first=True)
            return PLSTMGridConv(
                channels,
                heads=heads,
                mode=args.mode[index % len(args.mode)],
                gate_biases=args.gate_biases,
            )

        layers: list[Module] = [
            GPSLayer(
                channels,
                mixer=mixer(index),
                norm="layer_norm",
                norm_first=True,
                act="gelu",
                mlp_channels=mlp_channels,
            )
            for index in range(args.num_layers)
        ]
        if model == "vit":
            patches = args.image_size // args.patch_size
            layers.insert(0, PositionEmbedding(channels, patches))
        pool = "mean" if model == "vit" else args.pool
        return GraphModel(
            args.patch_size**2,
            channels,
            1,
            layers=layers,
            head_layers=1,
            norm=LayerNorm(channels),
            pool=CornerPool() if pool == "corners" else pool,
            structure={"height": "height", "width": "width"},
        )

    model = build("plstm", args.mlp_channels)
    if args.model == "plstm":
        return model
    widths, size = range(1, 8 * args.mlp_channels), count_parameters(model)
    return build("vit", match_size(lambda width: build("vit", width), size, widths))


def get_task() -> Task:
    """Binary classification: is the arrow pointing at the circle?"""
    return Task(
        lambda out, b: F.binary_cross_entropy_with_logits(out[:, 0], b.y.to(out.dtype)),
        {"accuracy": BinaryAccuracy()},
        lambda out, b: {"accuracy": (out[:, 0].sigmoid(), b.y)},
    )


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    if args.samples is not None:
        draw_samples(args)
        return {"stopped_by": None}
    seed_everything(args.seed)
    title = f"{args.model}, preset {args.preset}"
    return fit(args, build_model(args), get_task(), lambda: get_datasets(args), title)


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
