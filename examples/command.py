"""The command line of the examples that train on ``loading.get_datasets``."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine import Trainer, count_parameters
from lightning_fabric import Fabric
from loading import SPLITS
from support import Options, add_arguments
from tasks import get_task
from torch.nn import Module

from pyg_chimera.datasets import PeptidesFunctional


def make_parser(
    description: str | None, datasets: Iterable[str], presets: Iterable[str]
) -> ArgumentParser:
    """A parser with the arguments that these examples share.

    Args:
        description: What ``--help`` shows.
        datasets: Those that the example knows.
        presets: Its presets, of which ``smoke`` is reached by ``--smoke``.
    """
    parser = ArgumentParser(
        description=description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=sorted(datasets),
        help="default: peptides-func if --root holds its raw file, else generated",
    )
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument(
        "--processed-root", type=Path, help="for a --root that is read-only"
    )
    parser.add_argument(
        "--preset",
        choices=[name for name in presets if name != "smoke"],
        help="default: demo for generated peptides, else a published one",
    )
    parser.add_argument("--smoke", action="store_true", help="run in a few seconds")
    add_arguments(parser)
    return parser


def complete(parser: ArgumentParser, args: Namespace, published: str) -> None:
    """Fills in the data set, the preset and what depends on them.

    Args:
        parser: Says what is wrong.
        args: What it read.
        published: The preset for data sets that are not generated.
    """
    if args.dataset is None:
        raw = PeptidesFunctional.holds_raw_files(args.root)
        args.dataset = "peptides-func" if raw else "generated"
    if args.smoke:
        if args.preset is not None:
            parser.error("--smoke has a preset of its own")
        args.preset = "smoke"
        args.overwrite = not args.resume
    elif args.preset is None:
        args.preset = "demo" if args.dataset == "generated" else published
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")


def make_trainer(
    fabric: Fabric,
    model: Module,
    datasets: dict[str, Any],
    options: Options,
    info: Mapping[str, Any],
    note: str = "",
) -> Trainer:
    """A trainer that has said what it is about to do.

    Args:
        fabric: From ``engine.start``.
        model: The model.
        datasets: From ``loading.get_datasets``.
        options: How to train.
        info: What identifies the run: data set, model, preset, and the recipe.
        note: What to say behind the number of parameters.
    """
    task = get_task(info["dataset"])
    trainer = Trainer(fabric, model, datasets, task, options, dict(info))
    sizes = " / ".join(f"{len(datasets[split]):,}" for split in SPLITS)
    trainer.log(
        f"{info['dataset']}: {sizes} graphs; {info['model']}, preset "
        f"{info['preset']}: {info['num_layers']} layers, width {info['channels']}, "
        f"{count_parameters(model):,} parameters{note}",
        f"{fabric.world_size} process(es) on {fabric.device.type}; results in "
        f"{options.out}",
    )
    return trainer


def fit(trainer: Trainer) -> dict[str, Any]:
    """Trains, says what came of it, and returns the summary."""
    summary = trainer.fit()
    best, metric = summary["best"], summary["metric"]
    if best is not None:
        tested = "  ".join(
            f"{key} {value:.4f}" for key, value in best["test"].items() if key != "loss"
        )
        trainer.log(
            f"Best validation {metric} {best['val'][metric]:.4f} in epoch "
            f"{best['epoch']}; test there: {tested}"
        )
    return summary
