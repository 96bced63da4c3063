r"""Compares mixing layers, and what they know of an image's shape, on small images.

Without arguments it trains Chimera on the four DAGs of a grid, on both directions and
on one direction of the flattened image, and a ViT, on scikit-learn's digits::

    python benchmarks/comparisons/image_grid.py

MNIST is read from ``--root``, as ``mnist.npz`` (arrays ``x_train``, ``y_train``,
``x_test``, ``y_test``)::

    python benchmarks/comparisons/image_grid.py --dataset mnist --root images \
        --arms grid both forward
    python benchmarks/comparisons/image_grid.py --arms all none row diagonal  # table 6
    python benchmarks/comparisons/image_grid.py \
        --arms grid shuffled vit vit-learned vit-rotary

Each arm has the same number of parameters. Its learning rate is the best of ``--rates``
on validation images of the first seed. ``results.json`` has a row for each arm, and its
differences to the first arm, seed by seed, with 95 % intervals; ``arms.png`` draws
them. A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    RANK,
    Task,
    fit,
    fit_all,
    main,
    make_parser,
    match_size,
    number,
    open_run,
    parse,
    positive_float,
    positive_int,
    summarize,
)
from matplotlib.figure import Figure
from scipy import stats
from sklearn.datasets import load_digits
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

from pyg_chimera.nn import ImageClassifier
from pyg_chimera.transforms import ImageToGraph

CLASSES = 10
#: By name: the mixer, its arguments, and the layout of patches.
ARMS: dict[str, dict[str, Any]] = {
    "grid": {"mixer": "chimera", "share": "none"},
    "all": {"mixer": "chimera", "share": "all"},
    "row": {"mixer": "chimera", "share": "row"},
    "diagonal": {"mixer": "chimera", "share": "diagonal"},
    "both": {"mixer": "chimera", "num_dags": 2, "window": (1, 7), "patches": "flat"},
    "forward": {"mixer": "chimera", "num_dags": 1, "window": (1, 4), "patches": "flat"},
    "shuffled": {"mixer": "chimera", "share": "none", "patches": "shuffled"},
    "plstm": {"mixer": "plstm"},
    "graph-mamba": {"mixer": "graph_mamba"},
    "vit": {"mixer": "attention"},
    "vit-learned": {"mixer": "attention", "position": "learned"},
    "vit-rotary": {"mixer": "attention", "position": "rotary"},
}
ARMS["none"] = ARMS["grid"]
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        epochs=10, batch_size=64, warmup_epochs=1, channels=64, heads=4, num_layers=4,
        parameters=150_000, num_train=12_000, num_test=None,
    ),
    "smoke": dict(
        epochs=1, batch_size=16, warmup_epochs=0.5, channels=16, heads=2, num_layers=1,
        parameters=6_000, num_train=32, num_test=32,
    ),
}  # fmt: skip


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="data")
    add = parser.add_argument
    add("--dataset", choices=["digits", "mnist"], default="digits",
        help="default: digits")  # fmt: skip
    add("--arms", nargs="+", choices=list(ARMS), metavar="ARM",
        default=["grid", "both", "forward", "vit"],
        help=f"of {', '.join(ARMS)}; default: grid both forward vit")  # fmt: skip
    add("--rates", nargs="+", metavar="RATE", default=[1e-3, 3e-3],
        type=positive_float,
        help="learning rates to choose from; default: 0.001 0.003")  # fmt: skip
    add("--seeds", type=positive_int, default=3, help="default: 3")
    add("--patch-size", type=positive_int,
        help="default: 1 of digits, 4 of MNIST")  # fmt: skip
    add("--num-train", type=number(int, 6, "6 or more"),
        help="default: up to 12,000")  # fmt: skip
    add("--num-test", type=positive_int, help="default: all there are")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "default"
        own = {"preset": preset, "optimizer": "AdamW", "weight_decay": 0.01}
        own["patch_size"] = 1 if args.dataset == "digits" else 4
        return own | PRESETS[preset]

    args = parse(parser, argv, recipe)
    args.arms, args.rates = (
        list(dict.fromkeys(named)) for named in (args.arms, args.rates)
    )
    if args.lr is not None:
        args.rates = [args.lr]
    name = "-".join([args.dataset, *args.arms, args.preset, f"seed{args.seed}"])
    args.out = args.out or Path("runs", "image-grid", name)
    return args


# Data ----------------------------------------------------------------------------


def load_images(args: Namespace) -> dict[str, tuple[Any, np.ndarray]]:
    """Images and labels for training and for tests, in random order."""
    if args.dataset == "digits":
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8).astype(np.float32) / 16
        order = np.random.default_rng(0).permutation(len(labels))
        parts = {"train": order[:1437], "test": order[1437:]}
        return {part: (images[rows], labels[rows]) for part, rows in parts.items()}
    path = args.root / "mnist.npz"
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: pass --root")
    raw, found = np.load(path), {}
    for part in ("train", "test"):
        images, labels = raw[f"x_{part}"], raw[f"y_{part}"]
        order = np.random.default_rng(0).permutation(len(labels))
        found[part] = images[order], labels[order]
    return found


def split_rows(args: Namespace, count: int) -> dict[str, tuple[str, slice]]:
    """Where the images of all parts are: a sixth of those for training, but no more
    than 10,000, is for validation.
    """
    if args.num_train is not None:
        count = min(args.num_train + args.num_train // 5, count)
    train = count - min(count // 6, 10_000)
    return {
        "train": ("train", slice(0, train)),
        "val": ("train", slice(train, count)),
        "test": ("test", slice(0, args.num_test)),
    }


def get_graphs(args: Namespace) -> dict[str, Any]:
    """Graphs of all parts."""
    images = load_images(args)
    to_graph, graphs = ImageToGraph(args.patch_size), {}
    for part, (source, rows) in split_rows(args, len(images["train"][1])).items():
        pixels, labels = (x[rows] for x in images[source])
        graphs[part] = []
        for image, label in zip(
            tqdm(pixels, desc=part, unit=" images"), labels, strict=True
        ):
            try:
                graph = to_graph(image)
            except ValueError as error:
                raise OSError(f"--patch-size: {error}") from None
            graph.y = torch.tensor([int(label)])
            graphs[part].append(graph)
    values = torch.cat([graph.x for graph in graphs["train"]])
    mean, std = values.mean(), values.std()
    for graph in chain.from_iterable(graphs.values()):
        graph.x = (graph.x - mean) / std
    return graphs


def lay(graph: Data, patches: str) -> Data:
    """A graph with patches in a single row, or shuffled."""
    graph = graph.clone()
    if patches == "flat":
        graph.height, graph.width = 1, graph.num_nodes
    if patches == "shuffled":  # in the same way in all images
        generator = torch.Generator().manual_seed(0)
        graph.x = graph.x[torch.randperm(graph.num_nodes, generator=generator)]
    return graph


# Runs ----------------------------------------------------------------------------


def build_model(args: Namespace, arm: str, graph: Data) -> ImageClassifier:
    """A model of the requested size, by the width of its feed-forward networks."""
    options = {k: v for k, v in ARMS[arm].items() if k not in ("mixer", "patches")}
    position = options.pop("position", None)
    if ARMS[arm]["mixer"] == "chimera":  # the same as pLSTM's
        options["state_channels"] = args.channels // args.heads

    def build(mlp_channels: int) -> ImageClassifier:
        return ImageClassifier(
            graph.num_node_features,
            args.channels,
            CLASSES,
            args.num_layers,
            ARMS[arm]["mixer"],
            args.heads,
            position=position,
            size=(graph.width, graph.height) if position == "learned" else None,
            mlp_channels=mlp_channels,
            mixer_kwargs=options,
        )

    return build(match_size(build, args.parameters, range(1, 16 * args.channels)))


def get_task() -> Task:
    """Cross-entropy and accuracy."""
    return Task(
        lambda out, batch: F.cross_entropy(out, batch.y),
        {"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        lambda out, batch: {"accuracy": (out, batch.y)},
    )


def tabulate(
    runs: dict[str, dict[str, Any]], rates: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """A row for each arm whose rate is chosen, with its mean difference from the first
    arm over common seeds, and half the width of its 95% interval (t distribution).
    """
    own = {
        name: run
        for name, run in runs.items()
        if f"rate-{rates.get(name.partition('/')[0], 0):g}" in name.split("/")
    }
    rows = summarize(own, "accuracy", "seeds")
    tests: dict[str, dict[str, float]] = {arm: {} for arm in rows}
    for name, run in own.items():
        arm, _, seed = name.split("/")
        tests[arm][seed] = run["best"]["test_accuracy"]
    first = next(iter(tests.values()), {})
    for arm, row in rows.items():
        row["rate"] = rates[arm]
        paired = np.array([x - first[seed] for seed, x in tests[arm].items()
                           if seed in first])  # fmt: skip
        row["difference"] = float(paired.mean())
        if len(paired) > 1:
            wide = stats.t.ppf(0.975, len(paired) - 1) * stats.sem(paired)
            row["interval"] = float(wide)
    return rows


def draw(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Draws the accuracies of the arms, with standard deviations over seeds."""
    figure = Figure(figsize=(1.5 + 0.9 * len(rows), 3.2), layout="constrained")
    axes = figure.subplots()
    values = [row["test_accuracy"] for row in rows.values()]
    spread = [row["test_std"] for row in rows.values()]
    axes.errorbar(range(len(rows)), values, spread, fmt="o", capsize=4)
    axes.set_xticks(range(len(rows)), list(rows), rotation=30)
    axes.set_ylabel("test accuracy")
    figure.savefig(path, dpi=120)


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)  # before images are read
    graphs, rates = get_graphs(args), {}
    best_of: dict[tuple[str, float], float] = {}

    def train(own: Namespace) -> dict[str, Any]:
        patches = ARMS[own.arm].get("patches", "grid")
        data = {part: [lay(x, patches) for x in graphs[part]] for part in graphs}
        seed_everything(own.seed)
        model = build_model(own, own.arm, data["train"][0])
        title = f"{own.dataset}, {own.arm}, rate {own.lr:g}, seed {own.seed}"
        found = fit(own, model, get_task(), lambda: data, title)
        if "best" in found and own.seed == args.seed:
            best_of[own.arm, own.lr] = found["best"]["val_accuracy"]
        return found

    def runs() -> Iterator[tuple[str, dict[str, Any]]]:
        """The first seed with all rates, then the others with the best one."""

        def run(arm: str, rate: float, seed: int) -> tuple[str, dict[str, Any]]:
            own = {"arm": arm, "lr": rate, "seed": seed}
            return f"{arm}/rate-{rate:g}/seed-{seed}", own

        for arm in args.arms:
            for rate in args.rates:
                yield run(arm, rate, args.seed)
            rates[arm] = max(args.rates, key=lambda rate, arm=arm: best_of[arm, rate])
        for seed, arm in product(range(1, args.seeds), args.arms):
            yield run(arm, rates[arm], args.seed + seed)

    results = fit_all(args, runs(), train, lambda found: tabulate(found, rates))
    if results["rows"] and RANK == 0:
        draw(args.out / "arms.png", results["rows"])
    return results


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
