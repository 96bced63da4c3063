"""Images as graphs of superpixels."""

import io
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage.color import rgb2lab
from skimage.segmentation import slic
from skimage.util import regular_grid
from torch_geometric.data import Data

#: Superpixels per image, how many more SLIC is first asked for, and its compactness.
_MOST, _EXTRA, _COMPACTNESS = 150, 50, 10.0
#: The size of the training file per image of validation.
_TRAIN_PER_VAL = 10
_NUM_NEIGHBORS = 8


def superpixel_graphs(folder: Path, split: str, num_graphs: int) -> list[Data]:
    r"""CIFAR-10 as graphs of superpixels, as in "Benchmarking Graph Neural Networks"
    (https://arxiv.org/abs/2003.00982), made from images.

    An image is divided into at most 150 superpixels by SLIC, which become nodes in
    random order. With :math:`d_{uv}` the distance between the centres of two of them
    and :math:`\sigma_u` the mean of the 8 smallest distances of a node, it is joined to
    the 8 nodes of the largest weights

    .. math::
        w_{uv} = \tfrac{1}{2} \left( e^{-d_{uv}^2 / \sigma_u^2} +
        e^{-d_{uv}^2 / \sigma_v^2} \right).

    Nodes of the benchmark are joined to 8 arbitrary ones of the 9 largest weights, and
    graphs have 117.6 nodes on average instead of 118.9.

    Args:
        folder: `cifar10_jpeg.npz`, or the official files for Python, in
            `cifar-10-batches-py`. The former has JPEG files one after the other in
            `train_bytes` and `test_bytes`, where each of them begins and the last ends
            in `train_offsets` and `test_offsets`, and `train_labels` and `test_labels`.
            JPEG is lossy: results are not comparable to those of the official pixels.
            The official files are pickles; use no others.
        split: `"train"`, `"val"` or `"test"`. As in the benchmark, the first tenth of
            the training images is for validation. Images that are sorted by class are
            shuffled first, always in the same way.
        num_graphs: The number of graphs, the first ones of the split.

    Returns:
        Graphs with `x` [V, 3], mean colours from 0 to 1; `pos` [V, 2], row and column
        of the centre, in widths of the image; `edge_index` [2, 8 V], from each node to
        its neighbours; `edge_attr` [8 V, 1], the weight; and the class `y` [1].
    """
    images, labels = _read(folder, train=split != "test")
    rows = np.arange(len(labels))
    if (labels[1:] >= labels[:-1]).all():  # sorted by class
        rows = np.random.default_rng(0).permutation(len(labels))
    if split != "test":
        held_out = len(labels) // _TRAIN_PER_VAL
        rows = rows[:held_out] if split == "val" else rows[held_out:]
    return [
        Data(y=torch.tensor([int(labels[row])]), **graph_of(row, images[row]))
        for row in rows[:num_graphs].tolist()
    ]


def _read(folder: Path, train: bool) -> tuple[Any, np.ndarray]:
    """Images as [32, 32, 3] or as the bytes of JPEG files, and labels."""
    if (folder / "cifar10_jpeg.npz").exists():
        part = "train" if train else "test"
        with np.load(folder / "cifar10_jpeg.npz") as file:
            ends = file[f"{part}_offsets"][1:-1]
            return np.split(file[f"{part}_bytes"], ends), file[f"{part}_labels"]
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    batches = []
    for name in names:
        with (folder / "cifar-10-batches-py" / name).open("rb") as stream:
            batches.append(pickle.load(stream, encoding="bytes"))
    images = np.concatenate([batch[b"data"] for batch in batches])
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


@lru_cache
def _attempts(height: int, width: int) -> list[dict[str, Any]]:
    """Arguments with which SLIC is called until there are few enough superpixels.

    The benchmark asked for one superpixel less each time. In its version of
    scikit-image, the number asked for determined a grid of first centres and how small
    and large superpixels may be, which now the number of those centres determines; they
    are the same for most numbers.
    """
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for n in range(_MOST + _EXTRA, 0, -1):
        pixels = height * width
        centres = np.empty((height, width))[regular_grid((height, width), n)].size
        smallest, largest = int(0.5 * pixels / n), int(3 * pixels / n)
        # Half a pixel, since these products are rounded down.
        arguments = {
            "n_segments": n,
            "min_size_factor": (smallest + 0.5) * centres / pixels,
            "max_size_factor": (largest + 0.5) * centres / pixels,
        }
        found.setdefault((centres, smallest, largest), arguments)
    return list(found.values())


def segments_of(image: np.ndarray) -> np.ndarray:
    """The superpixel, counted from 0, of each pixel."""
    image = rgb2lab(image)
    # Compactness is relative to the contrast now, and was not in the benchmark.
    contrast = float(np.ptp(image)) or 1.0
    for arguments in _attempts(*image.shape[:2]):
        segments = slic(
            image,
            compactness=_COMPACTNESS / contrast,
            convert2lab=False,
            start_label=0,
            channel_axis=-1,
            **arguments,
        )
        if segments.max() < _MOST:
            break
    return segments


def graph_of(row: int, image: np.ndarray) -> dict[str, torch.Tensor]:
    """The graph of one image."""
    if image.ndim == 1:
        image = np.asarray(Image.open(io.BytesIO(image.tobytes())).convert("RGB"))
    image = (image / 255).astype(np.float32)
    segments = segments_of(image)
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
    return {
        "x": torch.from_numpy(x).float(),
        "pos": torch.from_numpy(pos).float(),
        "edge_index": torch.from_numpy(edge_index),
        "edge_attr": torch.from_numpy(edge_attr).float(),
    }
