"""Trains Chimera, or another model, on the Long Range Graph Benchmark.

Without arguments it trains a small model on generated peptides, with no download::

    python examples/lrgb.py

The five data sets are downloaded by PyG below ``--root`` when they are not there;
Peptides-func is also read from its raw file of SMILES strings, when ``--root`` holds
``raw/peptide_multi_class_dataset.csv.gz`` and ``splits.json``::

    python examples/lrgb.py --dataset peptides-struct --preset paper
    python examples/lrgb.py --root peptides-functional --preset released
    python examples/lrgb.py --root peptides-functional --preset stem
    python examples/lrgb.py --model gps                 # of the same size
    python examples/lrgb.py --model gps --minutes 30    # as long as others
    torchrun --nproc_per_node=2 examples/lrgb.py        # several processes

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import sys
from argparse import Namespace
from functools import cache, partial
from pathlib import Path
from typing import Any

# What trains, resumes and compares models is shared with the benchmarks.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "comparisons"))
from common import (
    count_parameters,
    epochs_within,
    fit,
    main,
    make_parser,
    match_size,
    open_run,
    parse,
    planned_epochs,
    positive_float,
)
from graph_data import LRGB, choose_dataset, get_datasets, get_task
from torch.nn import Dropout, Linear, Module, MultiheadAttention
from torch_geometric import seed_everything
from torch_geometric.nn import BatchNorm, GCNConv, GINEConv, Sequential
from torch_geometric.nn.resolver import activation_resolver
from torch_geometric.transforms import AddRandomWalkPE, BaseTransform

from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    PLSTMConv,
    RandomWalkEncoder,
)
from pyg_chimera.transforms import AddEliminationOrder

#: The authors' released code.
RELEASED: dict[str, Any] = dict(
    epochs=250, batch_size=64, lr=1e-3, warmup_epochs=5,
    optimizer="AdamW", weight_decay=1e-2, dropout=0.1, act="gelu",
    num_layers=8, channels=64, heads=2, state_channels=64,
    conv="gatedgcn", arrangement="sequential", norm_first=True,
    norm="layer_norm", head_layers=4, head_norm=None,
    normalization="released", initial="paper", local_layers=None, walk_length=None,
    stem_layers=0, head_dropout=0.0,
)  # fmt: skip
#: Table 11 of the paper.
PAPER = RELEASED | dict(
    epochs=200, optimizer="Adam", weight_decay=0.0, state_channels=96,
    conv="gcn", arrangement="parallel", norm_first=False,
    head_layers=2, normalization="paper",
)  # fmt: skip
#: For an hour on one core: three layers, smaller batches, fewer epochs, batch norm, and
#: the layer's own initial values.
SHORT = RELEASED | dict(
    epochs=20, batch_size=32, warmup_epochs=1,
    num_layers=3, channels=96, heads=4, state_channels=32,
    norm="graph_batch_norm", head_norm="batch_norm",
    normalization="paper", initial="default", local_layers=8,
)  # fmt: skip
#: For hours on one or two cores: GCN instead of GatedGCN, and 128 channels in its
#: place, an encoding of random walks, and more dropout.
LONG = SHORT | dict(
    epochs=40, lr=2e-3, channels=128, conv="gcn", walk_length=20, dropout=0.2
)
#: Three local layers without residuals and feed-forward networks, as in GCN+ (Luo et
#: al., 2025, "Can Classic GNNs Be Strong Baselines for Graph-level Tasks?"), then one
#: layer of the mixer.
STEM = LONG | dict(
    epochs=112, lr=1e-3, warmup_epochs=5, weight_decay=0.0,
    stem_layers=3, num_layers=1, channels=192, conv="gine", head_norm=None,
    walk_length=32, local_layers=6, head_dropout=0.2,
)  # fmt: skip
#: Learns within two minutes on two cores.
DEMO = RELEASED | dict(
    epochs=8, batch_size=16, lr=3e-3, warmup_epochs=1, dropout=0.0,
    num_layers=3, channels=32, heads=4, state_channels=16,
    norm="graph_batch_norm", head_layers=2, head_norm="batch_norm",
    normalization="paper", initial="default",
)  # fmt: skip
SMOKE = RELEASED | dict(
    epochs=2, batch_size=8, warmup_epochs=0.5,
    num_layers=2, channels=16, state_channels=8,
)  # fmt: skip
PRESETS = {
    "released": RELEASED,
    "paper": PAPER,
    "short": SHORT,
    "long": LONG,
    "stem": STEM,
    "demo": DEMO,
    "smoke": SMOKE,
}
#: Arguments of ChimeraConv that make it the published layer.
INITIAL = {"reach": None, "qk_norm": False, "input_gate": "free"}
_SUPERPIXELS = {"heads": 4, "batch_size": 32}
_TABLE_11 = {**_SUPERPIXELS, "lr": 3.5e-3, "dropout": 0.05, "state_channels": 64}
#: Deviations of the recipes for single data sets.
OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("released", "peptides-struct"): {"heads": 4},
    ("released", "pascalvoc-sp"): _SUPERPIXELS,
    ("released", "coco-sp"): _SUPERPIXELS,
    ("released", "pcqm-contact"): {"heads": 4, "batch_size": 256},
    ("paper", "peptides-struct"): {"heads": 4, "lr": 1.5e-3, "state_channels": 80},
    ("paper", "pascalvoc-sp"): _TABLE_11,
    ("paper", "coco-sp"): _TABLE_11,
    # Not in table 11; the batch size is GraphGPS's.
    ("paper", "pcqm-contact"): {"heads": 4, "state_channels": 64, "batch_size": 256},
}
MODELS = ("chimera", "plstm", "graph-mamba", "gps", "gatedgcn", "gcn", "none")


def get_recipe(preset: str, dataset: str) -> dict[str, Any]:
    """The settings of a preset for a data set."""
    return PRESETS[preset] | OVERRIDES.get((preset, dataset), {})


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    presets = [name for name in PRESETS if name != "smoke"]
    parser = make_parser(__doc__, presets, root="data", processed=True)
    parser.add_argument(
        "--dataset",
        choices=sorted(LRGB),
        help="default: peptides-func if --root holds its raw file, else generated",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="chimera", help="default: chimera"
    )
    parser.add_argument(
        "--minutes",
        type=positive_float,
        help="of training, by the processor's time, in place of --epochs",
    )

    def recipe(args: Namespace) -> dict[str, Any]:
        dataset = choose_dataset(parser, args)
        preset = args.preset or ("demo" if dataset == "generated" else "released")
        own = {"dataset": dataset, "preset": preset}
        own |= get_recipe(preset, dataset)
        return own if args.minutes is None else own | {"epochs": None}

    args = parse(parser, argv, recipe)
    if args.minutes is not None and args.epochs is not None:
        parser.error("--minutes plans the epochs: pass one of --minutes and --epochs")
    name = f"{args.dataset}-{args.model}-{args.preset}-seed{args.seed}"
    if args.minutes is not None:
        name += f"-{args.minutes:g}min"
    args.out = args.out or Path("runs", "lrgb", name)
    return args


def get_transforms(args: Namespace) -> dict[str, BaseTransform]:
    """The transforms that are applied once to each graph."""
    transforms: dict[str, BaseTransform] = {"elimination": AddEliminationOrder()}
    if args.walk_length is not None:
        transforms[f"walks{args.walk_length}"] = AddRandomWalkPE(args.walk_length)
    return transforms


def build_model(args: Namespace) -> GraphModel:
    """A model with Chimera layers, or with something else in their place.

    ``gps`` has attention there, and ``none`` nothing. Nor have ``gcn`` and
    ``gatedgcn``: they are stacks of ``local_layers`` of that convolution, which reach
    no farther than they are deep. Edge features are read by Chimera, pLSTM, GatedGCN
    and GINE. All have the same encoding of random walks, or none. With a stem,
    ``stem_layers`` of the convolution come before all mixers, instead of one before
    each; ``none`` is the stem alone.
    """
    channels, is_local = args.channels, args.model in ("gcn", "gatedgcn")
    conv_name = args.model if is_local else args.conv
    facts = dict(LRGB[args.dataset])
    facts["out_channels"] = facts["out_channels"] or channels
    if conv_name == "gcn" and args.model not in ("chimera", "plstm"):
        facts["edge_dim"] = None  # nothing reads them

    def mixer() -> Module | None:
        if is_local or args.model == "none":
            return None
        if args.model == "gps":
            # Dropout here would draw a number for each pair of nodes, which takes most
            # of the time on a CPU.
            return MultiheadAttention(channels, args.heads, batch_first=True)
        if args.model == "plstm":
            return PLSTMConv(
                channels, channels, args.heads, edge_dim=channels, order="bfs"
            )
        if args.model == "graph-mamba":
            return GraphMambaConv(channels)
        return ChimeraConv(
            channels,
            channels,
            heads=args.heads,
            state_channels=args.state_channels,
            edge_dim=channels,
            normalization=args.normalization,
            gated=False,  # the published recipes for graphs leave the gate out
            **(INITIAL if args.initial == "paper" else {}),
        )

    def stem() -> Sequential:
        conv = GINEConv(Linear(channels, channels))
        return Sequential(
            "x, edge_index, edge_attr",
            [
                (conv, "x, edge_index, edge_attr -> x"),
                BatchNorm(channels, allow_single_element=True),
                activation_resolver(args.act),
                Dropout(args.dropout),
            ],
        )

    def layer() -> GPSLayer:
        conv = None
        if conv_name == "gcn":
            conv = GCNConv(channels, channels)
        elif conv_name == "gatedgcn":
            conv = GatedGCNConv(channels, channels, edge_dim=channels, act=args.act)
        return GPSLayer(
            channels,
            conv,
            mixer(),
            dropout=args.dropout,
            arrangement=args.arrangement,
            norm_first=args.norm_first,
            act=args.act,
            norm=args.norm,
            mlp_channels=0 if conv is None else None,
        )

    if is_local:
        stems, depth = 0, args.local_layers or args.num_layers
    elif args.model == "none" and args.stem_layers:
        stems, depth = args.stem_layers, 0
    else:
        stems, depth = args.stem_layers, args.num_layers

    encodings = {}
    if args.walk_length is not None:
        walks = RandomWalkEncoder(args.walk_length, channels // 8)
        encodings["random_walk_pe"] = walks
    return GraphModel(
        channels=channels,
        layers=[stem() for _ in range(stems)] + [layer() for _ in range(depth)],
        encodings=encodings,
        head_layers=args.head_layers,
        head_norm=args.head_norm,
        dropout=args.head_dropout,
        norm=args.norm if args.norm_first else None,
        act=args.act,
        structure={"rank": "elimination_rank"} if args.model == "chimera" else None,
        **facts,
    )


def match_chimera(args: Namespace) -> Namespace:
    """The arguments, with the width at which a model is of the same size as Chimera."""

    def build(channels: int, model: str = args.model) -> GraphModel:
        return build_model(
            Namespace(**{**vars(args), "channels": channels, "model": model})
        )

    target = count_parameters(build(args.channels, "chimera"))
    widths = range(args.heads, 4 * args.channels + 1, args.heads)
    channels = match_size(build, target, widths)
    return Namespace(**{**vars(args), "channels": channels})


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    if args.model != "chimera":
        args = match_chimera(args)
    seed_everything(args.seed)
    model, task = build_model(args), get_task(args.dataset)
    load = cache(partial(get_datasets, args, get_transforms(args)))
    if args.minutes is not None:
        if not args.resume:
            open_run(args)  # before steps are timed
        plan = partial(epochs_within, args.minutes, model, task)
        args.epochs = planned_epochs(args, lambda: plan(args, load()))
    title = f"{args.dataset}, {args.model}, preset {args.preset}"
    return fit(args, model, task, load, title)


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
