"""Trains Chimera, or a baseline, on the Long Range Graph Benchmark.

Without arguments it trains a small model on generated peptides, with no download::

    python examples/lrgb.py

The five data sets are downloaded by PyG below ``--root`` when they are not there;
Peptides-func is also read from its raw file of SMILES strings, when ``--root`` holds
``raw/peptide_multi_class_dataset.csv.gz`` and ``splits.json``::

    python examples/lrgb.py --dataset peptides-struct --preset paper
    python examples/lrgb.py --root peptides-functional --preset released
    python examples/lrgb.py --baseline gps              # the same budget
    torchrun --nproc_per_node=2 examples/lrgb.py        # several processes

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import loading
import tasks
from command import complete, fit, make_parser, make_trainer
from engine import count_parameters, start
from presets import BASELINES, PRESETS, build_model, get_recipe, match_width
from support import Options, exit_code
from torch_geometric.data import Data

from pyg_chimera.transforms import AddEliminationOrder

#: What ``build_model`` must know about each data set.
DATASETS = {
    name: tasks.DATASETS[name]
    for name in (
        "generated",
        "peptides-func",
        "peptides-struct",
        "pascalvoc-sp",
        "coco-sp",
        "pcqm-contact",
    )
}


class EliminationRank(AddEliminationOrder):
    """The elimination order without the fill-in, which is large on large graphs."""

    def forward(self, data: Data) -> Data:
        """Adds the rank to a copy of the data."""
        data = super().forward(data)
        del data[self.index_name]
        return data


def get_datasets(args: Namespace) -> dict[str, Any]:
    """The three splits, with elimination ranks."""
    return loading.get_datasets(args, [EliminationRank()], ["elimination_rank"])


def parse(argv: list[str] | None = None) -> Namespace:
    """Reads the command line and fills in what depends on it."""
    parser = make_parser(__doc__, DATASETS, PRESETS)
    parser.add_argument("--baseline", choices=BASELINES, help="instead of Chimera")
    args = parser.parse_args(argv)
    complete(parser, args, published="released")
    if args.out is None:
        name = args.baseline or "chimera"
        run = f"{args.dataset}-{name}-{args.preset}-seed{args.seed}"
        args.out = Path("runs", "lrgb", run)
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains as told on the command line and returns the summary."""
    data = DATASETS[args.dataset]
    name = args.baseline or "chimera"
    recipe = get_recipe(args.preset, args.dataset)
    options = Options.choose(args, recipe)
    fabric = start(options)
    with fabric.rank_zero_first():
        datasets = get_datasets(args)
    budget = ""
    if args.baseline:
        target = count_parameters(build_model(recipe, **data))
        recipe = match_width(recipe, name, **data)
        budget = f" (Chimera: {target:,})"
    fabric.seed_everything(args.seed, verbose=False)
    model = build_model(recipe, name, **data)
    info = {"dataset": args.dataset, "model": name, "preset": args.preset}
    info |= {key: value for key, value in asdict(recipe).items() if key != "epochs"}
    return fit(make_trainer(fabric, model, datasets, options, info, budget))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    return exit_code(run(parse(argv))["stopped_by"])


if __name__ == "__main__":
    sys.exit(main())
