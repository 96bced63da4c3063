"""Trains pLSTM, or a ViT of its size, to tell whether an arrow points at a circle.

Images are generated, cut into patches, and become grid graphs. Both models are tested
at the size of the training images and at twice that, which needs longer range than
they were trained for::

    python examples/arrow_pointing.py
    python examples/arrow_pointing.py --model vit
    python examples/arrow_pointing.py --mode P          # directed propagation only
    python examples/arrow_pointing.py --preset paper    # hours on a GPU
    python examples/arrow_pointing.py --samples samples.png

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from engine import Task, Trainer, count_parameters, start
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from support import Options, add_arguments, atomic_write
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import BaseTransform, Compose
from vision import MODELS, MODES, Vision, build_model

from pyg_chimera.datasets import ArrowPointing
from pyg_chimera.transforms import ImageToGraph

SPLITS = ("train", "val", "test")
#: The name under which the larger test images are evaluated.
LARGER = "larger"


@dataclass(frozen=True)
class Recipe:
    """Images, a model of them, and how it is trained."""

    epochs: int
    batch_size: int
    lr: float
    warmup_epochs: float
    optimizer: str
    weight_decay: float
    image_size: int
    larger_size: int
    patch_size: int
    radius: tuple[float, float]
    arrow_length: tuple[float, float]
    num_train: int
    num_val: int
    num_test: int
    num_layers: int
    channels: int
    heads: int
    mlp_channels: int
    miss_angle: float = 0.0
    pool: str = "corners"
    gate_biases: tuple[float, float, float] | None = None
    gate_std: float = 0.0


_PAPER = Recipe(
    epochs=50,
    batch_size=128,
    lr=1e-4,
    warmup_epochs=1,
    optimizer="adamw",
    weight_decay=0.0,
    image_size=192,
    larger_size=384,
    patch_size=16,
    radius=(15.0, 30.0),
    arrow_length=(15.0, 30.0),
    num_train=100_000,
    num_val=5_120,
    num_test=10_240,
    num_layers=12,
    channels=192,
    heads=3,
    mlp_channels=768,
)
#: ``paper`` is the paper's (appendix D.1 and D.2). ``demo`` is for two cores: a quarter
#: of the resolution, two layers, no near misses, and gates that are open and apart from
#: each other from the start, which spares the long plateau that the paper's begin with.
#: ``smoke`` only runs.
PRESETS = {
    "paper": _PAPER,
    "demo": replace(
        _PAPER,
        epochs=10,
        batch_size=64,
        lr=1e-3,
        image_size=48,
        larger_size=96,
        patch_size=8,
        radius=(6.0, 8.0),
        arrow_length=(12.0, 16.0),
        num_train=50_000,
        num_val=2_000,
        num_test=2_000,
        num_layers=2,
        channels=64,
        heads=4,
        mlp_channels=128,
        miss_angle=60.0,
        pool="max",
        gate_biases=(-3.0, -3.0, -2.0),
        gate_std=2.0,
    ),
    "smoke": replace(
        _PAPER,
        epochs=2,
        batch_size=16,
        warmup_epochs=0.5,
        image_size=24,
        larger_size=48,
        patch_size=6,
        radius=(3.0, 4.0),
        arrow_length=(5.0, 8.0),
        num_train=32,
        num_val=16,
        num_test=16,
        num_layers=2,
        channels=16,
        heads=2,
        mlp_channels=32,
    ),
}
#: The best of the paper's three learning rates is another one for the ViT.
_OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {("paper", "vit"): {"lr": 3e-4}}


def get_recipe(preset: str, model: str = "plstm") -> Recipe:
    """The recipe of a preset for a model."""
    return replace(PRESETS[preset], **_OVERRIDES.get((preset, model), {}))


def get_model(recipe: Recipe, name: str, mode: str = "PD") -> Any:
    """The model that a recipe describes."""
    vision = Vision(
        patches=recipe.image_size // recipe.patch_size,
        patch_channels=recipe.patch_size**2,
        num_layers=recipe.num_layers,
        channels=recipe.channels,
        heads=recipe.heads,
        mlp_channels=recipe.mlp_channels,
        mode=mode,
        pool=recipe.pool,
        gate_biases=recipe.gate_biases,
        gate_std=recipe.gate_std,
    )
    return build_model(vision, name)


class Standardize(BaseTransform):
    """Brings pixels, most of which are black, to about mean 0 and variance 1."""

    def forward(self, data: Data) -> Data:
        """Standardizes the patches of a copy of the data."""
        data.x = (data.x - 0.05) / 0.15
        return data


def get_dataset(recipe: Recipe, split: str) -> ArrowPointing:
    """Images of a split; ``"larger"`` are test images of the larger size."""
    larger = split == LARGER
    name = "test" if larger else split
    return ArrowPointing(
        name,
        getattr(recipe, f"num_{name}"),
        recipe.larger_size if larger else recipe.image_size,
        recipe.radius,
        recipe.arrow_length,
        recipe.miss_angle,
        transform=Compose([ImageToGraph(recipe.patch_size), Standardize()]),
    )


def _loss(out: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.view(-1), batch.y.to(out.dtype))


def _accuracy(rows: dict[str, Tensor]) -> dict[str, float]:
    return {"accuracy": float(rows["right"].float().mean())}


TASK = Task(
    _loss,
    lambda out, batch: {"right": (out.view(-1) > 0) == (batch.y == 1)},
    _accuracy,
    metric="accuracy",
)


class ArrowTrainer(Trainer):
    """Whenever it tests, it tests on larger images as well."""

    def evaluate(self, split: str) -> dict[str, float]:
        """Loss and metrics of a split."""
        values = super().evaluate(split)
        if split == "test":
            larger = super().evaluate(LARGER)
            values |= {f"{name}_{LARGER}": value for name, value in larger.items()}
        return values


def draw_samples(recipe: Recipe, path: Path) -> None:
    """Draws samples of both sizes at one scale: two rows of small, one of large."""
    recipe = replace(recipe, num_train=8, num_test=2)
    small, large = recipe.image_size, recipe.larger_size
    gap, line = small / 8, small / 5  # a line of text
    pitch = small + gap
    places = {
        "train": [(i % 4 * pitch, i // 4 * (small + line)) for i in range(8)],
        LARGER: [(4 * pitch + gap + i * (large + gap), 0) for i in range(2)],
    }
    width, height = 4 * pitch + 2 * large + 2 * gap, large + 2.1 * line
    figure = Figure(figsize=(10, 10 * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    for split, corners in places.items():
        dataset = get_dataset(recipe, split)
        dataset.transform = None
        size = dataset.image_size
        for (x, y), data in zip(corners, dataset, strict=True):
            ink = data.image[0].numpy()
            extent = (x, x + size, y + size, y)
            axes.imshow(ink, "Greys", vmin=0, vmax=255, extent=extent)
            axes.add_patch(Rectangle((x, y), size, size, fill=False, linewidth=0.6))
            text = "points at it" if data.y else "does not"
            at = (x + size / 2, y + size + line / 2)
            axes.text(*at, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-1, width + 1), ylim=(height, -1))
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda part: figure.savefig(part, format="png", dpi=100))


# Command line --------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> Namespace:
    """Reads the command line and fills in what depends on it."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset",
        choices=[name for name in PRESETS if name != "smoke"],
        help="default: demo",
    )
    parser.add_argument("--model", choices=MODELS, default="plstm")
    parser.add_argument(
        "--mode", choices=MODES, help="of pLSTM's layers in turn; default: PD"
    )
    parser.add_argument("--smoke", action="store_true", help="run in a few seconds")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="draw samples instead (PNG)"
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.smoke:
        if args.preset is not None:
            parser.error("--smoke has a preset of its own")
        args.preset = "smoke"
        args.overwrite = not args.resume
    args.preset = args.preset or "demo"
    if args.mode is not None and args.model != "plstm":
        parser.error("--mode is pLSTM's")
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.out is None:
        name = "-".join(filter(None, (args.model, args.mode)))
        args.out = Path("runs", "arrow-pointing", f"{name}-{args.preset}")
        args.out = args.out.with_name(f"{args.out.name}-seed{args.seed}")
    args.mode = args.mode or "PD"
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains as told on the command line and returns the summary."""
    recipe = get_recipe(args.preset, args.model)
    options = Options.choose(args, recipe)
    fabric = start(options)
    datasets = {name: get_dataset(recipe, name) for name in (*SPLITS, LARGER)}
    fabric.seed_everything(args.seed, verbose=False)
    model = get_model(recipe, args.model, args.mode)
    info = {"model": args.model, "preset": args.preset}
    if args.model == "plstm":
        info["mode"] = args.mode
    info |= {key: value for key, value in asdict(recipe).items() if key != "epochs"}
    trainer = ArrowTrainer(fabric, model, datasets, TASK, options, info)
    sizes = " / ".join(f"{len(datasets[split]):,}" for split in SPLITS)
    trainer.log(
        f"{sizes} images of {recipe.image_size} x {recipe.image_size} pixels; "
        f"{args.model}, preset {args.preset}: {recipe.num_layers} layers, width "
        f"{recipe.channels}, {count_parameters(model):,} parameters",
        f"{fabric.world_size} process(es) on {fabric.device.type}; results in "
        f"{options.out}",
    )
    summary = trainer.fit()
    best = summary["best"]
    if best is not None:
        test, size, larger = best["test"], recipe.image_size, recipe.larger_size
        trainer.log(
            f"Best validation accuracy {best['val']['accuracy']:.4f} in epoch "
            f"{best['epoch']}; test there: {test['accuracy']:.4f} at {size} x {size}, "
            f"{test[f'accuracy_{LARGER}']:.4f} at {larger} x {larger} pixels"
        )
    return summary


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    args = parse(argv)
    if args.samples is not None:
        draw_samples(get_recipe(args.preset), args.samples)
        return 0
    summary = run(args)
    # As shells have it: 130 after Ctrl-C. A time limit is a regular end.
    return {"SIGINT": 130, "SIGTERM": 143}.get(summary["stopped_by"], 0)


if __name__ == "__main__":
    sys.exit(main())
