r"""Compares models on RNA whose fold is known: a path of bases, and pairs among them.

Tasks are families of non-coding RNA (nRC, 13 of them), and how fast each base is
degraded (OpenVaccine, three conditions)::

    python benchmarks/comparisons/rna.py --root data/rna              # hours
    python benchmarks/comparisons/rna.py --root data/rna --task degradation
    python benchmarks/comparisons/rna.py --root data/rna --resume --arms chimera gru

``--root`` has the files of a task:

* ``nrc_train.tsv.gz``, ``nrc_val.tsv.gz`` and ``nrc_test_13_classes.tsv.gz``: family,
  sequence and structure (dot-bracket), one molecule a line, as in
  github.com/emalgorithm/ncRNA-family-prediction. Of the 2,600 molecules to test on, 347
  have the sequence of one to train on or to select by; ``unseen`` are the others.
* ``openvaccine_train.jsonl.gz`` and ``openvaccine_test.jsonl.gz``: an object a line,
  with ``sequence``, ``structure``, ``loop_type``, a list for each condition, and
  ``sn_filter`` and ``fold``, or ``test_filter``. Trains on what passed the filter,
  except for fold 0, which selects. ``short`` are the molecules to test on of 107 bases,
  ``long`` those of 130, and ``filtered`` those of them whose ``test_filter`` is 1.

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network, or six,
  of which every third has ChimeraConv
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT; depth
* ``mlp``: a network of each node alone; depth
* ``gru``: along the backbone in both directions, where bases know their partners; depth
* ``transformer``: attention with rotary positions, and the same of partners; depth

Beside them, for degradation, are the mean of all bases, and that of the same base in
the same type of loop, without learning. ``mcrmse`` is the mean over conditions of root
mean squared errors over all bases.
"""

import gzip
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from common import Task, main, make_parser, number
from protocol import PREPARE, SHARED_ARMS, DrawnGraphs, Study, build_layer, reads
from torch import Tensor
from torch.nn import GRU, Dropout, LayerNorm, Linear, Module
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch_geometric.data import Batch, Data
from torch_geometric.utils import scatter, to_dense_batch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from tqdm import tqdm

from pyg_chimera.nn import GPSLayer, GraphModel, SelfAttention

ARMS = SHARED_ARMS | {"gru": ("depth", (1, 2)), "transformer": ("depth", (3, 6))}
BASES = "ACGU"
#: The bases that each letter may be, by IUPAC.
LETTERS = {
    **{"A": "A", "C": "C", "G": "G", "U": "U", "T": "U", "R": "AG", "Y": "CU"},
    **{"S": "CG", "W": "AU", "K": "GU", "M": "AC", "B": "CGU", "D": "AGU"},
    **{"H": "ACU", "V": "ACG", "N": "ACGU"},
}
#: Stem, multiloop, internal loop, bulge, hairpin, dangling end, external loop.
LOOPS = "SMIBHEX"
FAMILIES = (
    *("5S_rRNA", "5_8S_rRNA", "CD-box", "HACA-box", "IRES", "Intron_gpI"),
    *("Intron_gpII", "leader", "miRNA", "riboswitch", "ribozyme", "scaRNA", "tRNA"),
)
CONDITIONS = ("reactivity", "deg_Mg_pH10", "deg_Mg_50C")


class Shape(NamedTuple):
    """The sizes of inputs and outputs, what has a row of these, and what is tested."""

    in_channels: int
    out_channels: int
    head: str
    tests: tuple[str, ...]


TASKS = {
    "families": Shape(len(BASES) + 1, len(FAMILIES), "graph", ("test", "unseen")),
    "degradation": Shape(
        len(BASES) + len(LOOPS) + 1,
        len(CONDITIONS),
        "node",
        ("short", "long", "filtered"),
    ),
}
#: An epoch is `length` molecules, drawn from those to train on. With `drawn`, all
#: molecules are made by this script, so many in each set.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(drawn=None, length=1000, batch_size=16, norm="graph_batch_norm"),
    "smoke": dict(drawn=8, length=8, batch_size=4, norm="graph_batch_norm"),
}  # fmt: skip


# Molecules -----------------------------------------------------------------------


class Molecule(NamedTuple):
    """A sequence, its structure in dot-bracket notation, and what is predicted."""

    sequence: str
    structure: str
    target: Any  #: a family, or three values of each of the first bases
    loops: str | None = None  #: a letter of `LOOPS` for each base


def read_families(root: Path) -> dict[str, list[Molecule]]:
    """The published splits of nRC."""
    files = {"train": "train", "val": "val", "test": "test_13_classes"}
    found = {}
    for name, file in files.items():
        with gzip.open(root / f"nrc_{file}.tsv.gz", "rt") as lines:
            rows = [line.split() for line in lines]
        found[name] = [Molecule(y, z, FAMILIES.index(x)) for x, y, z in rows]
    seen = {x.sequence for name in ("train", "val") for x in found[name]}
    found["unseen"] = [x for x in found["test"] if x.sequence not in seen]
    return found


def read_degradation(root: Path) -> dict[str, list[Molecule]]:
    """The constructs of OpenVaccine. Only those to test on did not all pass the filter
    of signal to noise.
    """

    def rows(name: str) -> Iterator[tuple[dict[str, Any], Molecule]]:
        with gzip.open(root / f"openvaccine_{name}.jsonl.gz", "rt") as lines:
            for row in map(json.loads, lines):
                values = zip(*(row[x] for x in CONDITIONS), strict=True)
                scored = [x for x in values if None not in x]  # the first bases
                yield (
                    row,
                    Molecule(
                        row["sequence"], row["structure"], scored, row["loop_type"]
                    ),
                )

    found: dict[str, list[Molecule]] = {
        name: [] for name in ("train", "val", *TASKS["degradation"].tests)
    }
    for row, molecule in rows("train"):
        if row["sn_filter"]:
            found["train" if row["fold"] else "val"].append(molecule)
    for row, molecule in rows("test"):
        found["long" if len(molecule.sequence) > 107 else "short"].append(molecule)
        if row["test_filter"]:
            found["filtered"].append(molecule)
    return found


def draw_molecule(task: str, rng: np.random.Generator) -> Molecule:
    """One to four hairpins. The family is their number; what is not paired is degraded,
    A most of all.
    """

    def draw(low: int, high: int) -> str:
        return "".join(rng.choice(list(BASES), rng.integers(low, high)))

    number, parts = int(rng.integers(1, 5)), []
    for _ in range(number):
        stem, loop, end = draw(2, 7), draw(3, 7), draw(1, 5)
        back = stem[::-1].translate(str.maketrans("ACGU", "UGCA"))
        parts += [(stem, "(", "S"), (loop, ".", "H"), (back, ")", "S"), (end, ".", "X")]
    sequence = "".join(bases for bases, *_ in parts)
    structure, loops = ("".join(len(x[0]) * x[i] for x in parts) for i in (1, 2))
    if task == "families":
        return Molecule(sequence, structure, number - 1)
    rate = np.array([1.0 + (x == "A") for x in sequence]) * [
        x == "." for x in structure
    ]
    values = rate[:-3, None] * (1.0, 0.8, 0.6)
    return Molecule(
        sequence, structure, values + rng.normal(0, 0.1, values.shape), loops
    )


# Graphs --------------------------------------------------------------------------


def find_partners(structure: str) -> list[int]:
    """The position that each base is paired with, or its own. Brackets other than
    ``(`` and ``)``, those of pseudoknots, are ignored.
    """
    partners, opened = list(range(len(structure))), []
    for here, mark in enumerate(structure):
        if mark == "(":
            opened.append(here)
        elif mark == ")":
            if not opened:
                raise ValueError(f"'structure' closes no pair at {here}: {structure}")
            partners[here] = opened.pop()
            partners[partners[here]] = here
    if opened:
        raise ValueError(f"'structure' leaves a pair open at {opened[-1]}: {structure}")
    return partners


def encode_bases(sequence: str) -> Tensor:
    """One-hot, [V, 4]; a letter that stands for several bases has a share of each."""
    rows = []
    for letter in sequence.upper():
        if letter not in LETTERS:
            raise ValueError(f"'sequence' must have letters of IUPAC, got {letter!r}")
        may_be = LETTERS[letter]
        rows.append([(base in may_be) / len(may_be) for base in BASES])
    return torch.tensor(rows)


def get_graph(molecule: Molecule) -> Data:
    """A molecule as a graph, both ways along the backbone and for each pair.

    * :obj:`x`: the base; the type of loop, where it is known; whether paired;
    * :obj:`edge_attr`: backbone from 5' to 3', backbone from 3' to 5', or pair;
    * :obj:`partner_index`: the node that a node is paired with, or itself;
    * :obj:`y`: the family, or values of nodes, those in :obj:`scored`.
    """
    sequence, structure, target, loops = molecule
    if len(sequence) != len(structure):
        raise ValueError(
            f"'sequence' and 'structure' must be equally long, got {len(sequence)} and "
            f"{len(structure)}"
        )
    here, partner = torch.arange(len(sequence)), torch.tensor(find_partners(structure))
    paired = partner != here
    columns = [encode_bases(sequence), paired[:, None]]
    if loops is not None:
        kinds = torch.tensor([LOOPS.index(loop) for loop in loops])
        columns.insert(1, F.one_hot(kinds, len(LOOPS)))
    ways = [
        torch.stack([here[:-1], here[1:]]),
        torch.stack([here[1:], here[:-1]]),
        torch.stack([here[paired], partner[paired]]),
    ]
    sizes = torch.tensor([way.size(1) for way in ways])
    data = Data(
        x=torch.cat(columns, dim=1).float(),
        edge_index=torch.cat(ways, dim=1),
        edge_attr=F.one_hot(torch.arange(3).repeat_interleave(sizes), 3).float(),
        partner_index=partner,
    )
    if isinstance(target, int):
        data.y = torch.tensor([target])
    else:
        data.y = torch.as_tensor(np.asarray(target)).float()
        data.scored = here < len(data.y)
    return data


def get_datasets(args: Namespace) -> dict[str, Any]:
    """Molecules to train on, to select by and to test on."""
    if args.drawn:
        rng, names = np.random.default_rng(0), TASKS[args.task].tests
        found = {
            name: [draw_molecule(args.task, rng) for _ in range(args.drawn)]
            for name in ("train", "val", *names)
        }
    else:
        read = read_families if args.task == "families" else read_degradation
        found = read(args.root)
    data: dict[str, Any] = {
        name: [PREPARE(get_graph(x)) for x in tqdm(molecules, name, disable=None)]
        for name, molecules in found.items()
    }
    return data | {"train": DrawnGraphs(data["train"], args.length)}


# Metrics -------------------------------------------------------------------------


class MCRMSE(MeanSquaredError):
    """The mean over columns of root mean squared errors over rows."""

    def __init__(self) -> None:
        super().__init__(squared=False, num_outputs=len(CONDITIONS))

    def compute(self) -> Tensor:
        return super().compute().mean()


def mcrmse(out: Tensor, y: Tensor) -> Tensor:
    """That of one batch, with a gradient."""
    return (out - y).square().mean(dim=0).sqrt().mean()


def get_task(task: str) -> Task:
    """The accuracy and the mean F1 of families, or errors of degradation."""
    if task == "degradation":
        return Task(
            lambda out, batch: mcrmse(out[batch.scored], batch.y),
            {"mcrmse": MCRMSE()},
            lambda out, batch: {"mcrmse": (out[batch.scored], batch.y)},
            mode="min",
        )
    number = len(FAMILIES)
    return Task(
        lambda out, batch: F.cross_entropy(out, batch.y),
        {
            "accuracy": MulticlassAccuracy(number, average="micro"),
            "f1": MulticlassF1Score(number, average="macro"),
        },
        lambda out, batch: dict.fromkeys(("accuracy", "f1"), (out, batch.y)),
    )


# Without learning ----------------------------------------------------------------


def base_and_loop(x: Tensor) -> Tensor:
    """A number for each base in each type of loop, [V]."""
    base, loop = x[:, : len(BASES)], x[:, len(BASES) : -1]
    return base.argmax(dim=1) * len(LOOPS) + loop.argmax(dim=1)


#: Which bases are alike, whose mean in training is what each of them gets.
UNTRAINED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: torch.zeros(len(x), dtype=torch.long),
    "base-and-loop": base_and_loop,
}


def untrained(task: str, data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of what does not learn."""
    rows: dict[str, dict[str, Any]] = {}
    if task == "families":
        return rows
    seen = Batch.from_data_list(data["train"].graphs)
    size = len(BASES) * len(LOOPS)
    for arm, group in UNTRAINED.items():
        means = scatter(seen.y, group(seen.x[seen.scored]), 0, size, reduce="mean")
        rows[arm] = {}
        for name in (name for name in data if name != "train"):
            batch = Batch.from_data_list(data[name])
            out = means[group(batch.x[batch.scored])]
            rows[arm][f"{name}_mcrmse"] = float(mcrmse(out, batch.y))
    return rows


# Models --------------------------------------------------------------------------


class FoldGRU(Module):
    """A residual GRU along the backbone, both ways, of each base and its partner."""

    def __init__(self, channels: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = LayerNorm(channels)
        self.gru = GRU(2 * channels, hidden, batch_first=True, bidirectional=True)
        self.lin = Linear(2 * hidden, channels)
        self.drop = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        partner: Tensor,
        batch: Tensor | None = None,
    ) -> Tensor:
        h = self.norm(x)
        h, mask = to_dense_batch(torch.cat([h, h[partner]], dim=1), batch)
        lengths = mask.sum(dim=1).cpu()
        packed = pack_padded_sequence(h, lengths, True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return x + self.drop(self.lin(h[mask]))


class PartnerConv(Module):
    """A projection of the base that a base is paired with, or of itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lin = Linear(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, partner: Tensor) -> Tensor:
        return self.lin(x[partner])


def build_model(
    task: str,
    dropout: float,
    norm: str,
    arm: str,
    option: Any,
    channels: int,
    hidden: int,
) -> GraphModel:
    """A model of a width, with feed-forward networks, or a GRU, of another."""
    shape = TASKS[task]
    depth = option if ARMS[arm][0] == "depth" else 3

    def layer(place: int) -> Module:
        if arm == "gru":
            return FoldGRU(channels, hidden, dropout)
        if arm == "transformer":
            conv = PartnerConv(channels)
            mixer = SelfAttention(channels, 4, rotary="sequence")
            return GPSLayer(
                channels, conv, mixer, dropout=dropout, norm=norm, norm_first=True,
                mlp_channels=hidden,
            )  # fmt: skip
        return build_layer(norm, arm, option, place, channels, hidden, dropout)

    along = ("gru", "transformer")
    given = reads(arm, option, channels)
    if arm in along:
        given["structure"] = {"partner": "partner_index"}
    return GraphModel(
        shape.in_channels,
        channels,
        shape.out_channels,
        layer,
        depth,
        edge_dim=None if arm in ("mlp", *along) else 3,
        head=shape.head,
        norm=norm,
        **given,
    )


# Runs ----------------------------------------------------------------------------


def get_study(task: str, dropout: float = 0.0) -> Study:
    """The comparison on a task."""
    build, metrics = partial(build_model, task, dropout), partial(get_task, task)
    return Study(ARMS, build, metrics, get_datasets, partial(untrained, task))


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="data/rna")
    add = parser.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="families", help="default: families")
    share = number(float, 0, "a number from 0 to below 1", below=1)
    add("--dropout", type=share, default=0.0, help="of all arms; default: 0")
    args = get_study("families").parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "rna", args.task, args.preset)
    return args


if __name__ == "__main__":
    args = get_args()
    sys.exit(main(get_study(args.task, args.dropout).run, args))
