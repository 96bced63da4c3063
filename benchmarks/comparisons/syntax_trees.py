"""Compares mixers on syntax trees: graphs that are DAGs from the start.

Without arguments it takes the functions of Python's standard library, as the running
interpreter has them, and learns to name them, with no download::

    python benchmarks/comparisons/syntax_trees.py --models chimera plstm attention gcn
    python benchmarks/comparisons/syntax_trees.py --dataset returns --runs 3
    python benchmarks/comparisons/syntax_trees.py --dataset ogbg-code2  # downloads

A node is a piece of syntax: its kind and its role in its parent (``test``, ``body``,
``orelse``). Identifiers and constants are hidden. The data sets:

* ``names``: the sub-tokens of a function's name (``read``, ``line``). There are 200,
  those most frequent in training functions; functions with others are left out. Loss
  and metric are those of ogbg-code2: cross-entropy at five places, and the mean over
  functions of the F1 score of the set of sub-tokens.
* ``returns``: is there a ``return`` below an ``if``, a ``for`` or a ``while``?
* ``ogbg-code2``: names of functions from GitHub, by OGB's own loader, with its splits,
  evaluator and 5,000 sub-tokens. Nodes have kinds, attributes and depths.

Files of the standard library, not functions, are split, and of functions with the same
tree only the first one is kept, so that no tree is in two splits.

The tree's edges lead from parents to children. Models take them in both directions, as
two DAGs where the mixer wants DAGs: with ``--directions down``, a node only depends on
the nodes above it. Each run of each model is in a folder of its own; ``results.json``
has a row for each model. A run can be stopped (Ctrl-C, ``--time-limit``) and continued
with ``--resume``.
"""

import ast
import re
import sys
import sysconfig
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pandas as pd
import torch
import torch.nn.functional as F
from common import (
    Task,
    fit,
    fit_all,
    loading_ogb,
    main,
    make_parser,
    match_size,
    open_run,
    parse,
    positive_int,
    summarize,
)
from torch import Tensor
from torch.nn import Module, MultiheadAttention
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import BaseTransform, Compose
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy
from tqdm import tqdm

from pyg_chimera.nn import ChimeraDAGConv, GPSLayer, GraphModel, PLSTMConv
from pyg_chimera.ops.structure import topological_rank

PARTS = ("train", "val", "test")
MODELS = ("chimera", "plstm", "attention", "gcn")
DATASETS = ("names", "returns", "ogbg-code2")
DIRECTIONS = {"both": (0, 1), "down": (0,), "up": (1,)}
#: The number of sub-tokens to distinguish.
VOCABULARY = {"names": 200, "ogbg-code2": 5000}
LENGTH = 5  #: sub-tokens of a name, as in OGB's examples
MAX_DEPTH = 20  #: deeper nodes of ogbg-code2 are treated alike, as in OGB's examples
_BASE = dict(optimizer="AdamW", weight_decay=1e-2, num_layers=3)
PRESETS: dict[str, dict[str, Any]] = {
    "demo": _BASE | dict(
        epochs=3, batch_size=64, lr=3e-3, warmup_epochs=0.5, channels=32, heads=4,
        state_channels=16, parameters_of_layers=48_000, largest=100,
    ),
    # About as wide as OGB's examples, and trained for as many epochs; for a GPU.
    "full": _BASE | dict(
        epochs=25, batch_size=128, lr=1e-3, warmup_epochs=1, channels=256, heads=8,
        state_channels=32, parameters_of_layers=3_000_000, largest=1000,
    ),
    "smoke": _BASE | dict(
        epochs=2, batch_size=16, lr=3e-3, warmup_epochs=0.5, channels=16, heads=2,
        state_channels=8, parameters_of_layers=12_000, num_layers=2, largest=100,
    ),
}  # fmt: skip
#: With fewer functions, and more to learn.
OVERRIDES = {("demo", "names"): {"epochs": 20}}

# Trees ---------------------------------------------------------------------------

_CLASSES = [x for x in vars(ast).values() if isinstance(x, type)]
KINDS = sorted({x.__name__ for x in _CLASSES if issubclass(x, ast.AST)})
ROLES = sorted({f for name in KINDS for f in getattr(ast, name)._fields})
_KIND, _ROLE = ({name: i for i, name in enumerate(x)} for x in (KINDS, ROLES))
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While)


class Function(NamedTuple):
    """A function's name and tree: kinds, roles and parents of nodes, depth first."""

    name: str
    kinds: list[int]
    roles: list[int]
    parents: list[int]
    returns: bool  #: whether a branch contains a return


def read_tree(function: ast.AST) -> Function:
    """The tree of a function definition, which is its root."""
    kinds, roles, parents, returns = [], [], [], False
    todo = [(function, "body", -1, False)]
    while todo:
        node, role, parent, branch = todo.pop()
        here = len(kinds)
        kinds.append(_KIND[type(node).__name__])
        roles.append(_ROLE[role])
        parents.append(parent)
        returns |= branch and isinstance(node, ast.Return)
        branch |= isinstance(node, BRANCHES)
        below = [
            (child, name, here, branch)
            for name, value in ast.iter_fields(node)
            for child in (value if isinstance(value, list) else [value])
            # Whether a name is loaded or stored follows from its position.
            if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context)
        ]
        todo += reversed(below)
    return Function(function.name, kinds, roles, parents, returns)


def read_functions(
    files: Iterable[Path], largest: int
) -> Iterator[tuple[Path, Function]]:
    """The functions in files, including nested ones and methods, each tree once, except
    those with more than `largest` nodes.
    """
    seen = set()
    for path in files:
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # invalid files, to test tools with
            continue
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                function = read_tree(node)
                tree = tuple(map(tuple, function[1:4]))
                if tree not in seen and len(function.kinds) <= largest:
                    seen.add(tree)
                    yield path, function


def sub_tokens(name: str) -> list[str]:
    """The words of an identifier, in lower case."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [word.lower() for word in words]


def standard_library(
    largest: int, least: int | None = None
) -> dict[str, list[tuple[Function, Data]]]:
    """Functions of Python's own modules, and the data that models read, by part; all,
    or only until each part has at least `least`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests are not always installed.
    unwanted = {"site-packages", "test", "tests", "idle_test", "lib2to3"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if unwanted.isdisjoint(path.relative_to(root).parts)
    ]
    parts: dict[str, list[tuple[Function, Data]]] = {part: [] for part in PARTS}
    for path, found in read_functions(tqdm(files, "Reading"), largest):
        number = crc32(path.relative_to(root).as_posix().encode()) % 10
        part = PARTS[max(0, number - 7)]
        parents = torch.tensor(found.parents)
        data = Data(x=torch.tensor([found.kinds, found.roles]).t().contiguous())
        data.edge_index = torch.stack([parents, torch.arange(len(parents))])[:, 1:]
        parts[part].append((found, data))
        if least is not None and min(map(len, parts.values())) >= least:
            break
    return parts


class Vocabulary:
    """The most frequent sub-tokens, and indices for all others and for the end."""

    def __init__(self, names: Iterable[Sequence[str]], size: int) -> None:
        counts = Counter(word for name in names for word in name)
        self.words = [word for word, _ in counts.most_common(size)]
        self.index = {word: i for i, word in enumerate(self.words)}
        self.unknown, self.end = len(self.words), len(self.words) + 1

    def __len__(self) -> int:
        return self.end + 1

    def encode(self, name: Sequence[str]) -> Tensor:
        """Indices of the first sub-tokens, [1, LENGTH]."""
        found = [self.index.get(word, self.unknown) for word in name[:LENGTH]]
        return torch.tensor([found + [self.end] * (LENGTH - len(found))])

    def decode(self, indices: Sequence[int]) -> list[str]:
        """The sub-tokens before the end."""
        if self.end in indices:
            indices = indices[: indices.index(self.end)]
        return [self.words[i] if i < self.unknown else "" for i in indices]


class Directions(BaseTransform):
    """Directs a tree's edges down, up, or both, as one or two DAGs."""

    def __init__(self, directions: str) -> None:
        self.kept = DIRECTIONS[directions]

    def forward(self, data: Data) -> Data:
        tree = data.edge_index
        dags = [(tree, tree.flip(0))[i] for i in self.kept]
        ranks = [topological_rank(dag, data.num_nodes) for dag in dags]
        single = len(dags) == 1
        data.dag_edge_index = dags[0] if single else dags
        data.dag_rank = ranks[0] if single else ranks
        data.edge_index = torch.cat(dags, dim=1)
        return data


class NodesOfCode2(BaseTransform):
    """Joins the features that OGB's examples read of a node, and encodes the name."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def forward(self, data: Data) -> Data:
        x = torch.cat([data.x, data.node_depth.clamp(max=MAX_DEPTH)], dim=1)
        name = data.y
        out = Data(x=x, edge_index=data.edge_index, y=self.vocabulary.encode(name))
        out.name = name
        return out


class Source(NamedTuple):
    """Data sets by part, the numbers of categories of a node, and a function that makes
    the task, anew for each run.
    """

    parts: dict[str, Any]
    in_channels: list[int]
    out_channels: int
    task: Callable[[], Task]


def load(args: Namespace) -> Source:
    """The data set that is requested."""
    if args.dataset == "ogbg-code2":
        return load_code2(args)
    found = standard_library(args.largest, 60 if args.preset == "smoke" else None)
    sizes = [len(KINDS), len(ROLES)]
    transform = Directions(args.directions)
    if args.dataset == "returns":
        for function, data in (row for rows in found.values() for row in rows):
            data.y = torch.tensor([float(function.returns)])
        parts = {k: [transform(d) for _, d in rows] for k, rows in found.items()}
        return Source(parts, sizes, 1, returns_task)
    named = {
        part: [(sub_tokens(function.name), data) for function, data in rows]
        for part, rows in found.items()
    }
    words = Vocabulary((name for name, _ in named["train"]), VOCABULARY["names"])
    parts = {part: [] for part in PARTS}
    for part, rows in named.items():
        for name, data in rows:
            if name and all(word in words.index for word in name):
                data.y, data.name = words.encode(name), name
                parts[part].append(transform(data))
    task = partial(names_task, words)
    return Source(parts, sizes, LENGTH * len(words), task)


def load_code2(args: Namespace) -> Source:
    """OGB's data set, with the vocabulary of its training functions."""
    from ogb.graphproppred import PygGraphPropPredDataset  # from the extra "examples"

    with loading_ogb():
        dataset = PygGraphPropPredDataset(args.dataset, str(args.root))
    split = dataset.get_idx_split()
    names = dataset._data.y
    words = Vocabulary((names[i] for i in split["train"]), VOCABULARY[args.dataset])
    steps = [NodesOfCode2(words), Directions(args.directions)]
    dataset.transform = Compose(steps)
    parts = {
        part: dataset[split[key]]
        for part, key in zip(PARTS, ("train", "valid", "test"), strict=True)
    }
    folder = Path(dataset.root, "mapping")
    sizes = [
        len(pd.read_csv(folder / f"{name}.csv.gz"))
        for name in ("typeidx2type", "attridx2attr")
    ]
    task = partial(names_task, words)
    return Source(parts, [*sizes, MAX_DEPTH + 1], LENGTH * len(words), task)


# Tasks and models ------------------------------------------------------------------


def returns_task() -> Task:
    return Task(
        lambda out, batch: F.binary_cross_entropy_with_logits(out[:, 0], batch.y),
        {"accuracy": BinaryAccuracy()},
        lambda out, batch: {"accuracy": (out[:, 0].sigmoid(), batch.y.long())},
    )


def names_task(words: Vocabulary) -> Task:
    """Sub-tokens by position for training, sets of them for tests, as in OGB."""
    from ogb.graphproppred import Evaluator  # from the extra "examples"

    evaluator = Evaluator("ogbg-code2")

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(out.view(-1, len(words)), batch.y.view(-1))

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Any, ...]]:
        places = out.view(-1, LENGTH, len(words)).argmax(-1).tolist()
        found = [words.decode(row) for row in places]
        score = evaluator.eval({"seq_ref": list(batch.name), "seq_pred": found})
        return {"f1": (score["F1"], len(found))}

    return Task(loss, {"f1": MeanMetric()}, rows)


def build_model(
    args: Namespace, name: str, in_channels: list[int], out_channels: int
) -> GraphModel:
    """A GCN in each layer, followed by a mixer, unless it is ``gcn`` alone.

    The width of the feed-forward networks evens out the numbers of parameters.
    """
    channels, heads = args.channels, args.heads
    dags = len(DIRECTIONS[args.directions])

    def mixer() -> Module | None:
        if name == "chimera":
            return ChimeraDAGConv(
                channels, channels, heads, args.state_channels, num_dags=dags
            )
        if name == "plstm":
            return PLSTMConv(channels, heads=heads, num_dags=dags)
        if name == "attention":
            return MultiheadAttention(channels, heads, batch_first=True)
        return None

    def layer(mlp_channels: int) -> GPSLayer:
        return GPSLayer(
            channels,
            GCNConv(channels, channels),
            mixer(),
            arrangement="sequential",
            norm="layer_norm",
            norm_first=True,
            mlp_channels=mlp_channels,
        )

    target = args.parameters_of_layers // args.num_layers
    hidden = match_size(layer, target, range(1, 8 * channels))
    structure = {"mixer_edge_index": "dag_edge_index"}
    if name == "chimera":
        structure["mixer_rank"] = "dag_rank"
    return GraphModel(
        in_channels,
        channels,
        out_channels,
        lambda _: layer(hidden),
        args.num_layers,
        pool=args.pool,
        norm="layer_norm",
        structure=structure if name in ("chimera", "plstm") else None,
    )


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["demo", "full"], root="data")
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="names", help="default: names")
    add("--models", choices=MODELS, nargs="+", default=["chimera"], metavar="MODEL",
        help=f"of {', '.join(MODELS)}; default: chimera")  # fmt: skip
    add("--directions", choices=DIRECTIONS, default="both",
        help="of the tree's edges; default: both")  # fmt: skip
    add("--pool", choices=("mean", "max"), default="mean",
        help="how nodes are pooled; default: mean")  # fmt: skip
    add("--runs", type=positive_int, default=1, metavar="N",
        help="of each model, with seeds from --seed on; default: 1")  # fmt: skip

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or ("full" if args.dataset == "ogbg-code2" else "demo")
        own = OVERRIDES.get((preset, args.dataset), {})
        return {"preset": preset, **PRESETS[preset], **own}

    args = parse(parser, argv, recipe)
    args.models = list(dict.fromkeys(args.models))
    what = [args.dataset, *args.models, args.directions, args.pool, args.preset]
    name = "-".join([*what, f"seed{args.seed}"])
    args.out = args.out or Path("runs", "syntax-trees", name)
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)  # before the functions are read
    source = load(args)
    parts = source.parts
    if args.preset == "smoke":
        parts = {part: graphs[:48] for part, graphs in parts.items()}

    def train(own: Namespace) -> dict[str, Any]:
        seed_everything(own.seed)
        model = build_model(own, own.model, source.in_channels, source.out_channels)
        title = f"{own.dataset}, {own.model}, seed {own.seed}, preset {own.preset}"
        return fit(own, model, source.task(), lambda: parts, title)

    runs = {
        f"{name}/seed-{seed}": {"model": name, "seed": seed}
        for name, seed in product(args.models, range(args.seed, args.seed + args.runs))
    }
    metric = next(iter(source.task().metrics))
    return fit_all(
        args, runs.items(), train, lambda found: summarize(found, metric, "seeds")
    )


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
