"""Images as graphs of superpixels."""

import gzip
import io
import os.path as osp
import pickle
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_chimera.datasets._common import find_raw, map_in_processes, require
from pyg_chimera.datasets._splits import SplitDataset

__all__ = ["Superpixels"]

_TASK = "Turning images into superpixels"
_NUM_NEIGHBORS = 8


class _Recipe(NamedTuple):
    most: int  # superpixels per image
    extra: int  # SLIC is first asked for so many more
    compactness: float
    train_per_val: int  # size of the official training file per validation image


_RECIPES = {
    "MNIST": _Recipe(75, extra=20, compactness=0.25, train_per_val=12),
    "CIFAR10": _Recipe(150, extra=50, compactness=10.0, train_per_val=10),
}


class Superpixels(SplitDataset):
    r"""MNIST and CIFAR-10 as graphs of superpixels, as in the `"Benchmarking Graph
    Neural Networks" <https://arxiv.org/abs/2003.00982>`_ paper.

    :class:`~torch_geometric.datasets.GNNBenchmarkDataset` downloads the graphs of the
    benchmark. Here, they are made from images that you have, with scikit-image. An
    image is divided into at most 75 (MNIST) or 150 (CIFAR-10) superpixels by SLIC,
    which become nodes in random order. With :math:`d_{uv}` the distance between the
    centres of two of them and :math:`\sigma_u` the mean of the 8 smallest distances of
    a node, it is joined to the 8 nodes of the largest weights

    .. math::
        w_{uv} = \tfrac{1}{2} \left( e^{-d_{uv}^2 / \sigma_u^2} +
        e^{-d_{uv}^2 / \sigma_v^2} \right).

    .. list-table::
        :header-rows: 1

        * - name
          - training, validation, test
          - nodes (mean)
          - in the benchmark
          - time per 1,000 graphs
        * - :obj:`"MNIST"`
          - 55,000, 5,000, 10,000
          - 70.6
          - 70.6
          - 3 seconds
        * - :obj:`"CIFAR10"`
          - 45,000, 5,000, 10,000
          - 118.9
          - 117.6
          - 8 seconds

    The graphs of all of CIFAR-10 take 1.3 GB of memory and disk space. Needs the extra
    :obj:`examples`.

    Images are read from the first of these files that exists:

    .. code-block:: text

        root/raw/mnist.npz                          x_train, y_train, x_test, y_test
        root/raw/train-images-idx3-ubyte.gz ...     the four official files
        root/raw/cifar10_jpeg.npz                   see below
        root/raw/cifar-10-batches-py/data_batch_1 ...  the six official files for Python

    :obj:`cifar10_jpeg.npz` has JPEG files one after the other in :obj:`train_bytes` and
    :obj:`test_bytes`, :obj:`train_offsets` and :obj:`test_offsets` with where each of
    them begins and the last ends, and :obj:`train_labels` and :obj:`test_labels`. JPEG
    is lossy: these pixels are *not* those of the official CIFAR-10, and results are not
    comparable to published ones. The official files for Python are pickles; use no
    others.

    As in the benchmark, the first 5,000 training images are for validation. Images that
    are sorted by class are shuffled first, always in the same way.

    A graph has the attributes

    * :obj:`x`: float32 :math:`(V, 1)` (MNIST) or :math:`(V, 3)`, mean grey level or
      colour, from 0 to 1,
    * :obj:`pos`: float32 :math:`(V, 2)`, row and column of the centre, in widths of the
      image,
    * :obj:`edge_index`: int64 :math:`(2, 8V)`, from each node to its neighbours,
    * :obj:`edge_attr`: float32 :math:`(8V, 1)`, the weight,
    * :obj:`y`: int64 :math:`(1)`, the class.

    Unlike here, nodes of the benchmark are joined to 8 arbitrary ones of the 9 largest
    weights, and the node order is another one.

    Args:
        root (str): Folder with the raw files. Processed files are kept in it, too.
        name (str, optional): :obj:`"MNIST"` or :obj:`"CIFAR10"`.
            (default: :obj:`"CIFAR10"`)
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`. Only the
            graphs of this split are made. (default: :obj:`"train"`)
        num_graphs (int, optional): The number of graphs, which are the first ones of
            the split. (default: :obj:`None`, all of them)
        num_workers (int, optional): The number of processes that make graphs; 0 uses
            the current one. (default: :obj:`0`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        FileNotFoundError: If a raw file is missing.
        ImportError: If scikit-image is not installed.
        ValueError: If :obj:`name` or :obj:`split` is unknown, or :obj:`num_graphs` is
            not between 1 and the size of the split.
    """

    def __init__(
        self,
        root: str,
        name: str = "CIFAR10",
        split: str = "train",
        num_graphs: int | None = None,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        if name not in _RECIPES:
            raise ValueError(f"'name' must be one of {tuple(_RECIPES)} (got {name!r})")
        if num_graphs is not None and num_graphs < 1:
            raise ValueError(f"'num_graphs' must be at least 1 (got {num_graphs})")
        self.name = name
        self.num_graphs = num_graphs
        self.num_workers = num_workers
        super().__init__(root, split, **kwargs)

    @property
    def processed_dir(self) -> str:
        """Where processed splits of so many graphs are kept."""
        size = "all" if self.num_graphs is None else self.num_graphs
        return osp.join(self.root, "processed", f"{self.name}-{size}")

    @property
    def processed_file_names(self) -> list[str]:
        """The file of this split."""
        return [f"{self.split}.pt"]

    def process(self) -> None:
        """Makes the graphs of the split."""
        require("skimage", _TASK)
        recipe = _RECIPES[self.name]
        read = {"MNIST": _read_mnist, "CIFAR10": _read_cifar10}[self.name]
        images, labels = read(self.raw_dir, train=self.split != "test")
        rows = np.arange(len(labels))
        if (labels[1:] >= labels[:-1]).all():  # sorted by class
            rows = np.random.default_rng(0).permutation(len(labels))
        if self.split != "test":
            held_out = len(labels) // recipe.train_per_val
            rows = rows[:held_out] if self.split == "val" else rows[held_out:]
        if len(rows) < (self.num_graphs or 1):
            raise ValueError(
                f"'num_graphs' must be at most {len(rows)}, the number of images of "
                f"the split '{self.split}' (got {self.num_graphs})"
            )
        rows = rows[: self.num_graphs]
        graphs = map_in_processes(
            partial(_to_arrays, recipe),
            [(row, images[row]) for row in rows.tolist()],
            self.num_workers,
            "Images to graphs",
            self.log,
        )
        names = ("x", "pos", "edge_index", "edge_attr")
        self.save_split(
            [
                Data(
                    y=torch.tensor([int(labels[row])]),
                    **dict(zip(names, map(torch.from_numpy, arrays), strict=True)),
                )
                for row, arrays in zip(rows, graphs, strict=True)
            ],
            self.split,
        )


def _read_mnist(folder: str, train: bool) -> tuple[Any, np.ndarray]:
    """Images as [28, 28], and labels."""
    part = "train" if train else "t10k"
    official = [f"{part}-{n}-ubyte.gz" for n in ("images-idx3", "labels-idx1")]
    path = find_raw(folder, ["mnist.npz", official[0]], "the images of MNIST")
    if path.endswith(".npz"):
        part = "train" if train else "test"
        with np.load(path) as file:
            return file[f"x_{part}"], file[f"y_{part}"]
    arrays = []
    for name, header in zip(official, (16, 8), strict=True):
        with gzip.open(osp.join(folder, name)) as stream:
            arrays.append(np.frombuffer(stream.read(), np.uint8, offset=header))
    return arrays[0].reshape(-1, 28, 28), arrays[1]


def _read_cifar10(folder: str, train: bool) -> tuple[Any, np.ndarray]:
    """Images as [32, 32, 3] or as the bytes of JPEG files, and labels."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    paths = [osp.join("cifar-10-batches-py", name) for name in names]
    path = find_raw(folder, ["cifar10_jpeg.npz", paths[0]], "the images of CIFAR-10")
    if path.endswith(".npz"):
        part = "train" if train else "test"
        with np.load(path) as file:
            ends = file[f"{part}_offsets"][1:-1]
            return np.split(file[f"{part}_bytes"], ends), file[f"{part}_labels"]
    batches = []
    for path in paths:
        with open(osp.join(folder, path), "rb") as stream:
            batches.append(pickle.load(stream, encoding="bytes"))
    images = np.concatenate([batch[b"data"] for batch in batches])
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


@lru_cache
def _attempts(height: int, width: int, most: int) -> list[dict[str, Any]]:
    """Arguments with which SLIC is called until there are few enough superpixels.

    The benchmark asked for one superpixel less each time. In its version of
    scikit-image, the number asked for determined a grid of first centres and how small
    and large superpixels may be, which now the number of those centres determines; they
    are the same for most numbers.
    """
    grid = require("skimage.util", _TASK).regular_grid
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for n in range(most, 0, -1):
        pixels = height * width
        centres = np.empty((height, width))[grid((height, width), n)].size
        smallest, largest = int(0.5 * pixels / n), int(3 * pixels / n)
        # Half a pixel, since these products are rounded down.
        arguments = {
            "n_segments": n,
            "min_size_factor": (smallest + 0.5) * centres / pixels,
            "max_size_factor": (largest + 0.5) * centres / pixels,
        }
        found.setdefault((centres, smallest, largest), arguments)
    return list(found.values())


def _segment(image: np.ndarray, recipe: _Recipe) -> np.ndarray:
    """The superpixel, counted from 0, of each pixel."""
    slic = require("skimage.segmentation", _TASK).slic
    axis = None
    if image.ndim == 3:
        axis = -1
        image = require("skimage.color", _TASK).rgb2lab(image)
    # Compactness is relative to the contrast now, and was not in the benchmark.
    contrast = float(np.ptp(image)) or 1.0
    for arguments in _attempts(*image.shape[:2], recipe.most + recipe.extra):
        segments = slic(
            image,
            compactness=recipe.compactness / contrast,
            convert2lab=False,
            start_label=0,
            channel_axis=axis,
            **arguments,
        )
        if segments.max() < recipe.most:
            break
    return segments


def _to_arrays(recipe: _Recipe, item: tuple[int, np.ndarray]) -> tuple:
    """Features, positions, edges and their weights of one image."""
    row, image = item
    if image.ndim == 1:
        file = io.BytesIO(image.tobytes())
        image = np.asarray(require("PIL.Image", _TASK).open(file).convert("RGB"))
    image = (image / 255).astype(np.float32)
    segments = _segment(image, recipe)
    _, segment, size = np.unique(segments, return_inverse=True, return_counts=True)
    # Nodes in random order, which tells nothing about the image.
    segment = np.random.default_rng(row).permutation(size.size)[segment.ravel()]

    height, width = image.shape[:2]
    where = np.indices((height, width)).reshape(2, -1) / width
    columns = [*image.reshape(height * width, -1).T, *where]
    sums = [np.bincount(segment, weights) for weights in columns]
    means = np.stack(sums, axis=1) / np.bincount(segment)[:, None]
    x, pos = means[:, :-2], means[:, -2:]

    # Images of 8 or fewer superpixels become complete graphs.
    k = min(_NUM_NEIGHBORS, size.size - 1)
    distance = np.linalg.norm(pos[:, None] - pos, axis=-1)
    scale = np.sort(distance, axis=1)[:, 1 : k + 1].sum(1, keepdims=True) / max(k, 1)
    weight = np.exp(-np.square(distance / (scale + 1e-8)))
    weight = (weight + weight.T) / 2
    np.fill_diagonal(weight, -1)
    neighbors = np.argsort(-weight, axis=1, kind="stable")[:, :k]
    edge_index = np.stack([np.arange(size.size).repeat(k), neighbors.ravel()])
    edge_attr = weight[edge_index[0], edge_index[1]][:, None]
    return (
        x.astype(np.float32),
        pos.astype(np.float32),
        edge_index,
        edge_attr.astype(np.float32),
    )
