r"""Compares mixing layers by what they recall: which value went with this key?

Nodes write pairs of a key and a value, or ask for the value of a key, or hold a value
that is of no use. Without arguments it trains Chimera, the gated delta rule and
attention on paths::

    python benchmarks/comparisons/recall.py
    python benchmarks/comparisons/recall.py --structure tree --models chimera delta
    python benchmarks/comparisons/recall.py --task needle       # one pair only
    python benchmarks/comparisons/recall.py --task chain  # the value is a key, too

Along paths and trees (from the root) a key may come again with another value, and the
last pair before a node counts. In DAGs and undirected graphs each key comes once. All
models have the same number of parameters, states of the same size (RG-LRU smaller
ones), and train for the same time, on graphs of one size; they are tested on this size
and on larger ones, and by how many steps a question is away from its answer. ``hybrid``
is the delta rule and attention to what is eight steps away, in turn. A run can be
stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``. The hybrid layers
and the plain ones beside them, in ``docs/hybrids.md``, are::

    python benchmarks/comparisons/recall.py --task needle --seeds 3 --minutes 5 \
        --models delta surprise differential hierarchical depths attention \
        differential-attention window differential-window latent-window
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    RANK,
    RESULTS,
    Task,
    epochs_within,
    fit,
    fit_all,
    load_best,
    main,
    make_parser,
    match_size,
    number,
    open_run,
    parse,
    planned_epochs,
    positive_float,
    positive_int,
)
from json_files import write_json  # beside this folder
from matplotlib.figure import Figure
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor
from torch.nn import Module
from torch.utils.data import Dataset
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    DifferentialAttentionConv,
    DifferentialGatedDeltaConv,
    DifferentialSelfAttention,
    GatedDeltaConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    HierarchicalMemoryConv,
    KHopAttentionConv,
    LatentAttentionConv,
    MixtureOfDepths,
    PLSTMConv,
    RGLRUConv,
    SelfAttention,
    SurpriseGatedDeltaConv,
)

STRUCTURES = ("path", "tree", "dag", "graph")
TASKS = ("recall", "needle", "chain")
#: The hybrid layers: memories of the delta rule, and attention along edges.
MEMORIES = {
    "surprise": (SurpriseGatedDeltaConv, 1),
    "differential": (DifferentialGatedDeltaConv, 2),
    "hierarchical": (HierarchicalMemoryConv, 3),
}
WINDOWS = {
    "window": KHopAttentionConv,
    "differential-window": DifferentialAttentionConv,
    "latent-window": LatentAttentionConv,
}
MODELS = (
    *("chimera", "delta", "plstm", "graph-mamba", "rg-lru", "hybrid", "attention"),
    *(*MEMORIES, "depths", "differential-attention", *WINDOWS),
)
NOT_ASKED = -100
#: Lower bounds of the bins of distances in the table and the picture.
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        batch_size=32, lr=2e-3, warmup_epochs=1, channels=64, heads=4, num_layers=2,
        parameters=80_000, size=64, sizes=(128, 256), num_keys=16, num_train=2048,
        num_test=128, minutes=3.0,
    ),
    "smoke": dict(
        batch_size=4, lr=2e-3, warmup_epochs=0.5, channels=16, heads=2, num_layers=1,
        parameters=6_000, size=12, sizes=(16,), num_keys=4, num_train=8, num_test=4,
        epochs=1, minutes=None,
    ),
}  # fmt: skip


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="")
    add = parser.add_argument
    add("--structure", choices=STRUCTURES, default="path", help="default: path")
    add("--task", choices=TASKS, default="recall", help="default: recall")
    add("--models", nargs="+", choices=MODELS, metavar="MODEL",
        default=["chimera", "delta", "attention"],
        help=f"of {', '.join(MODELS)}; default: chimera delta attention")  # fmt: skip
    add("--seeds", type=positive_int, default=1, help="of each model; default: 1")
    add("--minutes", type=positive_float,
        help="of training of each, unless --epochs; default: 3")  # fmt: skip
    add("--size", type=positive_int, help="nodes of a graph; default: 64")
    add("--num-keys", type=number(int, 2, "2 or more"), help="default: 16")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "default"
        return {
            "preset": preset, "optimizer": "AdamW", "weight_decay": 0.01,
            **PRESETS[preset],
        }  # fmt: skip

    args = parse(parser, argv, recipe)
    args.models = list(dict.fromkeys(args.models))
    if args.structure == "graph" and "rg-lru" in args.models:
        parser.error("--models rg-lru takes DAGs: --structure path, tree or dag")
    args.sizes = [args.size, *(x for x in args.sizes if x > args.size)]
    name = "-".join([args.task, args.structure, *args.models, args.preset])
    args.out = args.out or Path("runs", "recall", f"{name}-seed{args.seed}")
    return args


# Data ----------------------------------------------------------------------------


class Roles(NamedTuple):
    """The roles of nodes, as integers [V]; -1 where a node has none."""

    key: np.ndarray  #: the key that is written or asked for
    value: np.ndarray  #: the value that is written, or is of no use
    answer: np.ndarray  #: the value that is asked for
    writer: np.ndarray  #: the node that wrote the answer


def draw_edges(structure: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """The edges of a DAG whose nodes are in topological order, [2, E]."""
    node = np.arange(1, size)
    parent = node - 1
    if structure != "path":  # long branches
        elsewhere = rng.random(size - 1) < 0.1
        parent = np.where(elsewhere, rng.integers(0, node), parent)
    edges = np.stack([parent, node])
    if structure in ("dag", "graph"):  # shortcuts of up to eight steps
        more = np.stack([np.maximum(node - rng.integers(2, 9, size - 1), 0), node])
        edges = np.concatenate([edges, more[:, rng.random(size - 1) < 0.3]], axis=1)
        edges = np.unique(edges, axis=1)
    return edges


def draw_roles(
    task: str,
    structure: str,
    edges: np.ndarray,
    size: int,
    num_keys: int,
    rng: np.random.Generator,
) -> Roles:
    """Pairs and questions: nodes ask for what earlier nodes have written."""
    role = rng.random(size)
    writes, asks = role < 0.35, role > 0.7
    if task == "needle":
        writes = np.arange(size) == rng.integers((size + 1) // 2)
    keys = rng.integers(num_keys, size=size)
    if task == "chain" or structure in ("dag", "graph"):  # each key once
        pairs = rng.permutation(np.flatnonzero(writes))[:num_keys]
        writes = np.isin(np.arange(size), pairs)
        keys[pairs] = rng.permutation(num_keys)[: len(pairs)]
    value = rng.integers(num_keys, size=size)
    found = Roles(*np.full((4, size), -1))
    # The last writer of each key before a node: [V, keys].
    last = np.full((size, num_keys), -1)
    if structure == "graph":
        last[:, keys[writes]] = np.flatnonzero(writes)
    parents: list[list[int]] = [[] for _ in range(size)]
    for j, i in edges.T.tolist():
        parents[i].append(j)
    for i in range(size):
        if structure != "graph" and parents[i]:
            last[i] = last[parents[i]].max(0)
        known = np.flatnonzero(last[i] >= 0)
        if task == "chain":
            known = known[last[i, value[last[i, known]]] >= 0]
        if writes[i]:
            found.key[i], found.value[i] = keys[i], value[i]
            last[i, keys[i]] = i
        elif asks[i] and len(known):
            found.key[i] = rng.choice(known)
            writer = last[i, found.key[i]]
            if task == "chain":
                writer = last[i, value[writer]]
            found.writer[i], found.answer[i] = writer, value[writer]
        else:
            found.value[i] = value[i]
    return found


class Recall(Dataset):
    """Graphs for training, new ones in each epoch; or with a seed, a fixed set, which
    include how many steps each question is away from its answer.

    Nodes have a key and a value, or `num_keys` in place of a missing one.
    """

    def __init__(
        self, args: Namespace, size: int, count: int, seed: int | None = None
    ) -> None:
        self.args, self.size, self.count, self.seed = args, size, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Data:
        if not 0 <= i < self.count:
            raise IndexError(i)
        state = [int(torch.randint(2**31, ()))]
        if self.seed is not None:
            state = [self.seed, self.size, i]
        rng, args = np.random.default_rng(state), self.args
        edges = draw_edges(args.structure, self.size, rng)
        roles = draw_roles(
            args.task, args.structure, edges, self.size, args.num_keys, rng
        )
        features = np.stack([roles.key, roles.value], axis=1)
        data = Data(
            x=torch.from_numpy(np.where(features < 0, args.num_keys, features)),
            y=torch.from_numpy(np.where(roles.writer < 0, NOT_ASKED, roles.answer)),
        )
        if args.structure == "graph":
            edges = np.concatenate([edges, edges[::-1]], axis=1)
        if self.seed is not None:
            data.distance = torch.from_numpy(self._distances(edges, roles.writer))
        data.edge_index = torch.from_numpy(edges)
        return data

    def _distances(self, edges: np.ndarray, writer: np.ndarray) -> np.ndarray:
        """Steps from the writer of each answer to the node that asks; -1 elsewhere."""
        shape = (self.size, self.size)
        adjacency = csr_array((np.ones(edges.shape[1]), tuple(edges)), shape)
        sources, place = np.unique(writer, return_inverse=True)
        steps = shortest_path(adjacency, unweighted=True, indices=sources)
        steps = steps[place, np.arange(self.size)]
        return np.where(writer < 0, -1, steps).astype(np.int64)


def get_datasets(args: Namespace) -> dict[str, Recall]:
    """For training, for choosing the best epoch, and for tests at each size."""
    tests = {f"test_{n}": Recall(args, n, args.num_test, 2) for n in args.sizes}
    val = Recall(args, args.size, args.num_test, 1)
    return {"train": Recall(args, args.size, args.num_train), "val": val, **tests}


# Models --------------------------------------------------------------------------


def build_mixer(args: Namespace, name: str, index: int) -> Module:
    """A layer whose states have the same size as the others', except that RG-LRU has
    one number per channel.
    """
    if name == "hybrid" and index % 2 == 1:
        return KHopAttentionConv(args.channels, heads=args.heads, k=8)
    size, heads = args.channels, args.heads
    is_graph, is_path = args.structure == "graph", args.structure == "path"
    states = {"heads": heads, "state_channels": size // heads}
    if name == "chimera":
        return (ChimeraConv if is_graph else ChimeraDAGConv)(size, **states)
    if name == "rg-lru":
        return RGLRUConv(size, heads=heads)
    if name in MEMORIES:
        make, memories = MEMORIES[name]
        own = {"heads": heads, "state_channels": size // heads // memories}
        if name == "differential":
            own |= {"acyclic": not is_graph, "depth": index + 1}
        return make(size, **own, conv_kernel=1)
    if name in WINDOWS:
        depth = {"depth": index + 1} if name.startswith("differential") else {}
        return WINDOWS[name](size, heads=heads, k=64, rotary=not is_graph, **depth)
    if name in ("delta", "hybrid", "depths"):
        return GatedDeltaConv(size, **states, acyclic=not is_graph, conv_kernel=1)
    if name == "plstm":
        return PLSTMConv(size, heads=heads, order="bfs" if is_graph else None)
    if name == "graph-mamba":
        order = {} if is_graph else {"order": "order", "num_eval_permutations": 1}
        return GraphMambaConv(size, state_channels=size // heads, **order)
    options = {"rotary": "sequence" if is_path else None, "causal": not is_graph}
    if name == "differential-attention":
        return DifferentialSelfAttention(size, heads, depth=index + 1, **options)
    return SelfAttention(size, heads, **options)


def build_model(args: Namespace, name: str) -> GraphModel:
    """A model of the requested size, by the width of its feed-forward networks."""

    def layer(index: int, mlp_channels: int) -> Module:
        block = GPSLayer(
            args.channels,
            mixer=build_mixer(args, name, index),
            norm="layer_norm",
            norm_first=True,
            mlp_channels=mlp_channels,
        )
        if name != "depths" or index < args.num_layers - 1:
            return block
        acyclic = args.structure != "graph"
        return MixtureOfDepths(block, args.channels, 0.5, acyclic=acyclic)

    def build(mlp_channels: int) -> GraphModel:
        return GraphModel(
            [args.num_keys + 1] * 2,
            args.channels,
            args.num_keys,
            lambda index: layer(index, mlp_channels),
            args.num_layers,
            head="node",
            head_layers=1,
            norm="layer_norm",
        )

    return build(match_size(build, args.parameters, range(1, 16 * args.channels)))


def get_task(args: Namespace) -> Task:
    """Cross-entropy of the answers, and the share of correct ones."""

    def loss(out: Tensor, batch: Batch) -> Tensor:
        # A small batch may have no questions: divide the empty sum by one.
        total = F.cross_entropy(out, batch.y, ignore_index=NOT_ASKED, reduction="sum")
        return total / (batch.y != NOT_ASKED).sum().clamp(min=1)

    accuracy = MulticlassAccuracy(
        args.num_keys, average="micro", ignore_index=NOT_ASKED
    )
    return Task(
        loss, {"accuracy": accuracy}, lambda out, batch: {"accuracy": (out, batch.y)}
    )


# Runs ----------------------------------------------------------------------------


def by_distance(
    args: Namespace, model: GraphModel, data: Mapping[str, Recall]
) -> dict[str, list[list[float]]]:
    """For each size of graphs, rows with the lower bound of a bin of distances, the
    accuracy in it, and the number of questions. Uses the best weights.
    """
    load_best(args, model)
    model = model.to(args.device).eval()
    table: dict[str, list[list[float]]] = {}
    for size in args.sizes:
        right, steps = [], []
        for batch in DataLoader(data[f"test_{size}"], args.batch_size):
            batch = batch.to(args.device)
            with torch.no_grad():
                out = model(**model.inputs(batch))
            asked = batch.y != NOT_ASKED
            right.append((out.argmax(1) == batch.y)[asked])
            steps.append(batch.distance[asked])
        hits, place = (
            torch.cat(right).double().cpu(),
            torch.bucketize(
                torch.cat(steps).cpu(), torch.tensor(DISTANCES), right=True
            ),
        )
        table[str(size)] = [
            [float(DISTANCES[i - 1]), float(here.mean()), float(len(here))]
            for i in range(1, len(DISTANCES) + 1)
            if len(here := hits[place == i])
        ]
    return table


def tabulate(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A row for each model: means and standard deviations over seeds (``ddof=0``)."""
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(key.partition("/")[0] for key in runs):
        found = [run for key, run in runs.items() if key.startswith(f"{name}/")]
        rows[name] = {"parameters": found[0]["parameters"], "seeds": len(found)}
        rows[name]["epochs"] = found[0]["epochs_done"]
        for key in found[0]["best"]:
            if key.startswith("test_") and key.endswith("_accuracy"):
                values = [run["best"][key] for run in found]
                size = key.removeprefix("test_").removesuffix("_accuracy")
                rows[name][size] = float(np.mean(values))
                rows[name][f"{size}_std"] = float(np.std(values))
    return rows


def draw(
    path: Path, tables: Mapping[str, list[Mapping[str, list[list[float]]]]]
) -> None:
    """Draws accuracy by the size of graphs and by distance, one panel per model."""
    figure = Figure(figsize=(1 + 2.6 * len(tables), 3), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    for ax, (name, seeds) in zip(axes, tables.items(), strict=True):
        sizes = list(seeds[0])
        image = np.full((len(DISTANCES), len(sizes)), np.nan)
        for column, size in enumerate(sizes):
            for i, distance in enumerate(DISTANCES):
                rows = [r for table in seeds for r in table[size] if r[0] == distance]
                if rows:
                    total = sum(count for *_, count in rows)
                    image[i, column] = sum(a * n for _, a, n in rows) / total
        rows_with = np.flatnonzero(~np.isnan(image).all(1))
        drawn = ax.imshow(image, vmin=0, vmax=1, aspect="auto", origin="lower")
        ax.set_ylim(-0.5, rows_with.max(initial=0) + 0.5)
        ax.set_xticks(range(len(sizes)), sizes)
        ax.set_yticks(range(rows_with.max(initial=0) + 1),
                      DISTANCES[: rows_with.max(initial=0) + 1])  # fmt: skip
        ax.set_title(name)
        ax.set_xlabel("nodes")
    axes[0].set_ylabel("steps to the answer")
    figure.colorbar(drawn, ax=axes[-1], label="accuracy")
    figure.savefig(path, dpi=120)


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)
    tables: dict[str, list[dict[str, list[list[float]]]]] = {}

    def train(own: Namespace) -> dict[str, Any]:
        data, task = get_datasets(own), get_task(own)
        seed_everything(own.seed)
        model = build_model(own, own.model)
        plan: Callable[[], int] = partial(
            epochs_within, own.minutes, model, task, own, data
        )
        own.epochs = planned_epochs(own, plan)
        title = f"{own.model}, seed {own.seed}, {own.epochs} epochs"
        found = fit(own, model, task, lambda: data, title)
        if "best" in found:
            tables.setdefault(own.model, []).append(by_distance(own, model, data))
        return found

    runs = {
        f"{name}/seed-{args.seed + seed}": {"model": name, "seed": args.seed + seed}
        for seed in range(args.seeds)
        for name in args.models
    }
    results = fit_all(args, runs.items(), train, tabulate)
    if tables and RANK == 0:
        results["by_distance"] = tables
        write_json(args.out / RESULTS, results)
        draw(args.out / "distances.png", tables)
    return results


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
