"""Peptides as molecular graphs: generated ones, and the real Peptides-func."""

import csv
import gzip
import json
import os.path as osp
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_chimera.datasets._common import SPLITS, SplitDataset, no_bars
from pyg_chimera.ops.common.checks import check_option
from pyg_chimera.ops.common.optional import required

__all__ = [
    "ATOM_FEATURE_SIZES",
    "BOND_FEATURE_SIZES",
    "GeneratedPeptides",
    "PeptidesFunctional",
    "long_range_labels",
]

#: Number of categories of each of the nine atom features of OGB's molecules.
ATOM_FEATURE_SIZES = (119, 5, 12, 12, 10, 6, 6, 2, 2)
#: Number of categories of each of the three bond features of OGB's molecules.
BOND_FEATURE_SIZES = (5, 6, 2)


_required = partial(required, who="Turning peptides into graphs", extra="examples")


def _sequence_to_smiles(sequence: str) -> str:
    chem = _required("rdkit.Chem")
    # All residues are left-handed, so chirality carries no information. Its marks,
    # however, depend on which branch of the string is longer, and would reveal the
    # position of each atom in the chain.
    return chem.MolToSmiles(chem.MolFromSequence(sequence), isomericSmiles=False)


def _to_graphs(
    smiles: Sequence[str], labels: np.ndarray, disable: bool | None
) -> Iterator[Data]:
    """One graph per SMILES string, in order."""
    _required("rdkit")  # without it, OGB exports no smiles2graph
    smiles2graph = _required("ogb.utils").smiles2graph
    for row, text in enumerate(tqdm(smiles, "SMILES to graphs", disable=disable)):
        try:
            graph = smiles2graph(text)
        except AttributeError:  # RDKit returned no molecule
            raise ValueError(
                f"RDKit cannot read the SMILES string of molecule {row}: {text!r}"
            ) from None
        yield Data(
            x=torch.from_numpy(graph["node_feat"]),
            edge_index=torch.from_numpy(graph["edge_index"]),
            edge_attr=torch.from_numpy(graph["edge_feat"]),
            y=torch.from_numpy(labels[row]).to(torch.float).view(1, -1),
        )


class PeptidesFunctional(SplitDataset):
    r"""The Peptides-func data set of the `"Long Range Graph Benchmark"
    <https://arxiv.org/abs/2206.08164>`_ paper, built from its raw file of SMILES
    strings.

    The 15,535 peptides are turned into graphs by OGB's :obj:`smiles2graph`, with nine
    categorical features per node and three per edge (see :obj:`ATOM_FEATURE_SIZES` and
    :obj:`BOND_FEATURE_SIZES`) and ten binary labels per graph.
    :class:`~torch_geometric.datasets.LRGBDataset` downloads the same graphs ready-made.
    Building them takes about 45 seconds, once. Needs the extra :obj:`examples`.

    The data are licensed under CC BY-NC 4.0 by the authors of the benchmark, not by
    this library, and are read from where you have put them:

    .. code-block:: text

        root/raw/peptide_multi_class_dataset.csv.gz
        root/splits.json

    :obj:`splits.json` maps :obj:`"train"`, :obj:`"val"` and :obj:`"test"` to lists
    of row numbers.

    Args:
        root (str): Folder with the raw files. It may be read-only if
            :obj:`processed_root` is given.
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`.
            (default: :obj:`"train"`)
        processed_root (str, optional): Folder in which processed files are kept, under
            :obj:`processed/`. (default: :obj:`None`, which is :obj:`root`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        FileNotFoundError: If a raw file is missing.
        ValueError: If a raw file has unexpected contents.
    """

    num_tasks = 10

    def __init__(
        self,
        root: str,
        split: str = "train",
        processed_root: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.processed_root = osp.expanduser(processed_root or root)
        super().__init__(root, split, **kwargs)

    @property
    def raw_file_names(self) -> list[str]:
        """The file of SMILES strings and labels, under :obj:`root/raw`."""
        return ["peptide_multi_class_dataset.csv.gz"]

    @property
    def processed_dir(self) -> str:
        """The folder of the processed splits."""
        return osp.join(self.processed_root, "processed")

    @classmethod
    def holds_raw_files(cls, root: str) -> bool:
        """Whether :obj:`root` has the layout of the raw files."""
        name = "peptide_multi_class_dataset.csv.gz"
        return osp.isfile(osp.join(osp.expanduser(root), "raw", name))

    def process(self) -> None:
        """Turns the raw file into the processed splits."""
        path = self.raw_paths[0]
        if not osp.isfile(path):
            raise FileNotFoundError(
                f"{path} is missing: put the raw file of Peptides-func there, or "
                f"let torch_geometric.datasets.LRGBDataset download its own"
            )
        with gzip.open(path, "rt", newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"smiles", "labels"} <= set(rows[0]):
            found = sorted(rows[0]) if rows else "no rows"
            raise ValueError(
                f"{path} must have the columns 'smiles' and 'labels', got {found}"
            )
        with open(osp.join(self.root, "splits.json")) as file:
            splits = json.load(file)
        parts = [np.asarray(splits.get(s, []), int) for s in SPLITS]
        used = np.concatenate(parts)
        if not all(map(len, parts)) or used.min() < 0 or used.max() >= len(rows):
            raise ValueError(
                f"'splits.json' must list rows 0 to {len(rows) - 1} under {SPLITS}"
            )
        if np.unique(used).size < used.size:
            raise ValueError("'splits.json' lists a row more than once")
        labels = np.array([json.loads(row["labels"]) for row in rows])
        if labels.ndim != 2 or labels.shape[1] != self.num_tasks:
            raise ValueError(
                f"The column 'labels' of {path} must hold lists of "
                f"{self.num_tasks} numbers, got shape {labels.shape}"
            )
        smiles = [rows[i]["smiles"] for i in used]
        graphs = list(_to_graphs(smiles, labels[used], no_bars(self)))
        ends = np.cumsum([0, *map(len, parts)])
        self.save_splits(graphs, ends.tolist())


_ACIDIC, _BASIC, _AROMATIC, _SULFUR = "DE", "KRH", "FWY", "CM"
_OTHERS = "AGILNPQSTV"


def long_range_labels(sequence: str) -> list[int]:
    r"""The six labels of a generated peptide.

    Each depends on where residues are in the *whole* chain, or on how far apart they
    are. The sampler fixes the number of residues of each kind that matters, so that
    neither the composition nor the neighbourhood of each residue determines a label:
    for each label there are peptides with the same bag of local neighbourhoods and
    different answers. A model that passes messages over a few bonds (a residue is three
    bonds of backbone) and then pools the nodes can therefore do little better than
    guess.

    With residues numbered :math:`0, \ldots, n-1` from the N-terminus, charged ones
    being acidic (D, E: :math:`-1`) or basic (K, R, H: :math:`+1`), aromatic ones being
    F, W and Y, and ones with sulfur C and M, the labels are 1 if

    * **aromatic_lead**: aromatic residues lie, on average, in the first half;
    * **sulfur_lead**: residues with sulfur lie, on average, in the first half;
    * **sulfur_first**: of all these, the one nearest to the N-terminus contains sulfur;
    * **aromatic_span**: the outermost aromatic residues are at least :math:`n/2`
      residues apart;
    * **aromatic_wider**: they are farther apart than the outermost residues with
      sulfur;
    * **dipole**: the charge lies towards the C-terminus,
      :math:`\sum_i \textrm{charge}_i \, (i - (n-1)/2) > 0`.

    Args:
        sequence (str): One-letter codes of the residues, N-terminus first.

    Example:
        >>> long_range_labels("GFGDGGGGMGKG")
        [1, 0, 0, 0, 0, 1]
    """
    n = len(sequence)
    acidic, basic, aromatic, sulfur = (
        [i for i, residue in enumerate(sequence) if residue in kind]
        for kind in (_ACIDIC, _BASIC, _AROMATIC, _SULFUR)
    )
    spans = [
        max(where, default=0) - min(where, default=0) for where in (aromatic, sulfur)
    ]
    dipole = sum(2 * i - n + 1 for i in basic) - sum(2 * i - n + 1 for i in acidic)
    return [
        int(2 * sum(aromatic) < len(aromatic) * (n - 1)),
        int(2 * sum(sulfur) < len(sulfur) * (n - 1)),
        int(min(sulfur, default=n) < min(aromatic, default=n)),
        int(2 * spans[0] >= n),
        int(spans[0] > spans[1]),
        int(dipole > 0),
    ]


class _Preset(NamedTuple):
    num_graphs: int
    shortest: int
    longest: int
    mean: float


class GeneratedPeptides(SplitDataset):
    r"""Random peptides with long-range labels, generated without a download.

    Amino-acid sequences are drawn at random, turned into molecules by RDKit and into
    graphs by OGB's :obj:`smiles2graph`, so that features and sizes are those of
    :class:`PeptidesFunctional` (without chirality). The six binary labels are those of
    :func:`long_range_labels`. The same arguments give the same data set. No sequence
    occurs twice, and 70%, 15% and 15% of the peptides are for training, validation and
    test. Needs the extra :obj:`examples`.

    The preset :obj:`"full"` has 10,000 peptides of 7 to 50 residues and about 150
    atoms, generated in a minute; :obj:`"small"` has 1,200 of up to 14 residues and
    about 88 atoms, generated in four seconds.

    Args:
        root (str): Folder in which processed files are kept, in a subfolder per preset,
            size and seed.
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`.
            (default: :obj:`"train"`)
        preset (str, optional): :obj:`"full"` or :obj:`"small"`.
            (default: :obj:`"full"`)
        num_graphs (int, optional): The number of peptides in all three splits together,
            at least 3. (default: :obj:`None`, that of the preset)
        seed (int, optional): Seed of the sequences. (default: :obj:`0`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.
    """

    label_names = (
        "aromatic_lead",
        "sulfur_lead",
        "sulfur_first",
        "aromatic_span",
        "aromatic_wider",
        "dipole",
    )
    num_tasks = len(label_names)
    _presets = {  # noqa: RUF012 (read only)
        "full": _Preset(10_000, shortest=7, longest=50, mean=17.7),
        "small": _Preset(1_200, shortest=7, longest=14, mean=10.0),
    }

    def __init__(
        self,
        root: str,
        split: str = "train",
        preset: str = "full",
        num_graphs: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        check_option("preset", preset, tuple(self._presets))
        self.preset = preset
        if num_graphs is None:
            num_graphs = self._presets[preset].num_graphs
        self.num_graphs = num_graphs
        if self.num_graphs < len(SPLITS):
            raise ValueError(
                f"'num_graphs' must be at least {len(SPLITS)}, one a split, "
                f"got {num_graphs}"
            )
        self.seed = seed
        super().__init__(root, split, **kwargs)

    @property
    def raw_file_names(self) -> list[str]:
        """None: the peptides are generated."""
        return []

    @property
    def processed_dir(self) -> str:
        """The folder of the processed splits of this preset, size and seed."""
        name = f"generated-peptides-{self.preset}-{self.num_graphs}-seed{self.seed}"
        return osp.join(self.root, name, "processed")

    def sequences(self) -> list[str]:
        """The sequences of all three splits: training, validation, test."""
        preset = self._presets[self.preset]
        rng = np.random.default_rng(self.seed)
        found: dict[str, None] = {}  # an ordered set
        while len(found) < self.num_graphs:
            # Long tail to the right, as in the real data.
            spread = rng.gamma(4.0, (preset.mean - preset.shortest) / 4.0)
            n = min(preset.shortest + round(spread), preset.longest)
            few = max(1, round(0.15 * n))
            kinds = {_ACIDIC: few, _BASIC: few}
            kinds |= dict.fromkeys((_AROMATIC, _SULFUR), max(2, few))
            kinds[_OTHERS] = n - sum(kinds.values())
            residues = [r for k, m in kinds.items() for r in rng.choice(list(k), m)]
            found["".join(rng.permutation(residues))] = None
        return list(found)

    def process(self) -> None:
        """Generates the peptides and their processed splits."""
        sequences = self.sequences()
        smiles = [_sequence_to_smiles(sequence) for sequence in sequences]
        labels = np.array([long_range_labels(s) for s in sequences])
        graphs = list(_to_graphs(smiles, labels, no_bars(self)))
        held_out = max(1, round(0.15 * len(graphs)))
        train = len(graphs) - 2 * held_out
        self.save_splits(graphs, [0, train, train + held_out, len(graphs)])
