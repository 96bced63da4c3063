r"""Fine-tunes a masked language model on sentences, in the layout of GLUE's downloads.

Without arguments, it trains Chimera from scratch on generated sentences. ``--root`` is
the folder of a task, with ``train.tsv`` and ``dev.tsv``, and ``--pretrained`` that of
one model in a run of ``masked_lm.py``, which also sets the model's size::

    python benchmarks/comparisons/sentences.py --task sst2 --root glue/SST-2
    python benchmarks/comparisons/masked_lm.py --root text --text wiki.txt \
        --models chimera
    python benchmarks/comparisons/sentences.py --task mrpc --root glue/MRPC \
        --pretrained runs/masked-lm/wiki-masked-chimera-default-seed0/chimera

``--task sst2-trees`` is SST-2 from the roots of the Stanford Sentiment Treebank's
``train.txt``, ``dev.txt`` and ``test.txt`` in ``--root``, which may be ``.gz`` files.
Models read bytes; a line feed separates two sentences. The best epoch is the one with
the best first metric on dev. A run can be stopped and continued with ``--resume``.
"""

import contextlib
import csv
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import common
import masked_lm
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data

from pyg_chimera.nn import GraphModel
from pyg_chimera.transforms import SequenceToGraph


class Format(NamedTuple):
    """The columns of a task, its classes (none: targets are numbers), its metrics."""

    sentences: tuple[str, ...] = ("sentence",)
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)


PAIR, BOTH = ("sentence1", "sentence2"), ("accuracy", "f1")
ENTAILED = ("entailment", "not_entailment")
TASKS = {
    "generated": Format(),
    "sst2-trees": Format(),
    "sst2": Format(),
    "cola": Format(metrics=("matthews",)),
    "mrpc": Format(("#1 String", "#2 String"), "Quality", metrics=BOTH),
    "qqp": Format(("question1", "question2"), "is_duplicate", metrics=BOTH),
    "stsb": Format(PAIR, "score", (), ("pearson", "spearman")),
    "mnli": Format(PAIR, "gold_label", ("entailment", "neutral", "contradiction")),
    "qnli": Format(("question", "sentence"), classes=ENTAILED),
    "rte": Format(PAIR, classes=ENTAILED),
    "wnli": Format(PAIR),
}
METRICS = {
    "accuracy": lambda: torchmetrics.Accuracy("multiclass", num_classes=3),  # or two
    "f1": lambda: torchmetrics.F1Score("binary"),
    "matthews": lambda: torchmetrics.MatthewsCorrCoef("binary"),
    "pearson": torchmetrics.PearsonCorrCoef,
    "spearman": torchmetrics.SpearmanCorrCoef,
}
#: Files without a header, and their columns.
COLUMNS = {"cola": ["source", "label", "mark", "sentence"], "sst2-trees": ["tree"]}
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(epochs=10, batch_size=32, lr=1e-3, max_bytes=512, num_rows=None),
    "demo": dict(epochs=2, batch_size=32, lr=2e-3, max_bytes=256, num_rows=7000),
    "smoke": dict(epochs=1, batch_size=8, lr=1e-3, max_bytes=64, num_rows=32),
}


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = common.make_parser(__doc__, ["default", "demo"], root="data")
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="generated", help="default: generated")
    add("--model", choices=masked_lm.MODELS, metavar="MODEL", help="from scratch: "
        f"of {', '.join(masked_lm.MODELS)}; default: chimera")  # fmt: skip
    add("--pretrained", type=lambda text: str(common.folder(text)), metavar="FOLDER",
        help="of a model trained by masked_lm.py")  # fmt: skip

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "default"
        size = masked_lm.PRESETS["smoke" if preset == "smoke" else "default"]
        size = {"model": "chimera", **size}
        if args.pretrained is not None:
            path = Path(args.pretrained)
            done = (path / common.BEST).exists()
            size = common.read_run(path)["config"] if done else {}
            if size.get("causal", True) or args.model:
                parser.error("--pretrained must be the folder of one masked model, "
                             "and excludes --model")  # fmt: skip
        names = ("model", "channels", "heads", "num_layers", "parameters", "length")
        own = {"optimizer": "AdamW", "weight_decay": 0.01, "warmup_epochs": 0.5,
               "preset": preset, "dropout": 0.1, "causal": False}  # fmt: skip
        return own | PRESETS[preset] | {name: size[name] for name in names}

    args = common.parse(parser, argv, recipe)
    start = "scratch" if args.pretrained is None else "pretrained"
    name = "-".join([args.task, args.model, start, args.preset, f"seed{args.seed}"])
    args.out = args.out or Path("runs", "sentences", name)
    return args


def read(args: Namespace, name: str) -> pd.DataFrame:
    """The sentences and the labels of a file, as text."""
    trees, form = args.task == "sst2-trees", TASKS[args.task]
    if args.task == "generated":  # the adjective tells the label, unless it is negated
        words = ["dull", "bad", "silly", "flat"], ["fine", "good", "witty", "clever"]
        draws = np.random.default_rng(len(name)).integers([2, 2, 4], size=(2000, 3))
        rows = [(f"it is {'not ' * n}{words[y][i]}", str(y ^ n)) for y, n, i in draws]
        return pd.DataFrame(rows, columns=["sentence", "label"])
    path = args.root / f"{name}.{'txt' if trees else 'tsv'}"
    zipped = path.with_name(f"{path.name}.gz")
    try:
        table = pd.read_csv(
            zipped if zipped.exists() else path, sep="\t", quoting=csv.QUOTE_NONE,
            encoding="utf-8-sig", names=COLUMNS.get(args.task), dtype=str,
            usecols=["tree"] if trees else [*form.sentences, form.label],
            keep_default_na=False, on_bad_lines="warn",
        )  # fmt: skip
    except ValueError as error:
        raise OSError(f"{path} has another layout: {error}") from None
    if trees:  # every word, also those that are new in dev
        tree = table["tree"].str
        table["sentence"] = tree.findall(r"(?a) ([^()\s]+)\)").str.join(" ").str.lower()
        table["label"] = tree[1].map({"0": "0", "1": "0", "3": "1", "4": "1"})
    return table


class Sentences(Dataset):
    """Graphs of a table's rows that have sentences and a label."""

    def __init__(self, args: Namespace, table: pd.DataFrame) -> None:
        form, length = TASKS[args.task], args.max_bytes
        parts, y = table[list(form.sentences)], table[form.label]
        number = {name: i for i, name in enumerate(form.classes)}
        y = y.map(number) if number else pd.to_numeric(y, errors="coerce")
        rows = np.flatnonzero(y.notna() & (parts.fillna("") != "").all(axis=1))
        if len(rows) < len(table):
            print(f"{len(rows):,} of {len(table):,} rows have sentences and a label")
        if len(rows) == 0:
            raise OSError("there are no sentences with labels: pass --task")
        rows = np.random.default_rng(0).permutation(rows)[: args.num_rows]
        y, self.parts = torch.tensor(y.to_numpy()[rows]), parts.to_numpy()[rows]
        self.y = y.long() if number else y.float()
        if masked_lm.ENCODERS.get(args.model, {}).get("position") == "learned":
            length = min(length, args.length)  # its table has no others
        self.limit = (length + 1) // len(form.sentences) - 1  # of each sentence
        self.to_graph = SequenceToGraph()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Data:
        parts = [part.encode()[: self.limit] for part in self.parts[i]]
        data = self.to_graph(b"\n".join(parts))
        data.y = self.y[i : i + 1]
        return data


def get_datasets(args: Namespace) -> dict[str, Sentences]:
    """Sentences for training and dev, and a test where there are labels."""
    dev, test = "dev", "test"
    if args.task == "mnli":
        dev, test = "dev_matched", "dev_mismatched"
    data = {"train": Sentences(args, read(args, "train"))}
    data["val"] = Sentences(args, read(args, dev))
    with contextlib.suppress(OSError):  # without labels
        data["test"] = Sentences(args, read(args, test))
    return data


def get_task(name: str) -> common.Task:
    """Cross-entropy of classes or the squared error, and the official metrics."""
    classify, names = bool(TASKS[name].classes), TASKS[name].metrics

    def loss(out: Tensor, batch: Batch) -> Tensor:
        if classify:
            return F.cross_entropy(out, batch.y)
        return F.mse_loss(out[:, 0], batch.y)

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        answer = out.argmax(dim=1) if classify else out[:, 0]
        return dict.fromkeys(names, (answer, batch.y))

    return common.Task(loss, {name: METRICS[name]() for name in names}, rows)


def build_model(args: Namespace) -> GraphModel:
    """A model of sentences, with the pretrained encoder if there is one."""
    outputs = max(1, len(TASKS[args.task].classes))
    model = masked_lm.build_model(args, args.model, outputs)
    if args.pretrained is not None:
        path, state = Path(args.pretrained, common.BEST), model.state_dict()
        for name, value in torch.load(path, weights_only=True)["state_dict"].items():
            if not name.startswith("model.mlp."):  # its head predicts bytes
                state[name.removeprefix("model.")] = value
        model.load_state_dict(state)
    return model


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    common.open_run(args)  # before the data are read
    data = get_datasets(args)
    seed_everything(args.seed)
    title = f"{args.task}, {args.model} from {args.pretrained or 'scratch'}"
    return common.fit(args, build_model(args), get_task(args.task), lambda: data, title)


if __name__ == "__main__":
    sys.exit(common.main(run, get_args()))
