import gzip
import io
import pickle
import sys

import numpy as np
import pytest
import torch
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets import Superpixels
from pyg_chimera.datasets.superpixels import _RECIPES, _segment

pytest.importorskip("skimage")
Image = pytest.importorskip("PIL.Image")


def pictures(n, *shape):
    """Smooth random images."""
    rng = np.random.default_rng(n)
    rows, columns = np.indices(shape[:2]) / shape[0]
    waves = rng.uniform(2, 12, size=(n, 3, *shape[2:], 1, 1))
    image = np.sin(waves[:, 0] * rows + waves[:, 1] * columns + waves[:, 2])
    image = (127 * (image + 1)).astype(np.uint8)
    return image if len(shape) == 2 else np.moveaxis(image, 1, -1)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A root with 24 images for training and validation, and 4 for test."""
    root = tmp_path_factory.mktemp("digits")
    (root / "raw").mkdir()
    arrays = {
        "x_train": pictures(24, 28, 28),
        "y_train": np.arange(24, dtype=np.uint8)[::-1] % 10,
        "x_test": pictures(4, 28, 28),
        "y_test": np.array([1, 0, 1, 0], np.uint8),
    }
    np.savez(root / "raw" / "mnist.npz", **arrays)
    return root, arrays


def test_against_slow_graphs(digits):
    """Superpixels are those of SLIC; all else is computed anew."""
    root, arrays = digits
    dataset = Superpixels(str(root), "MNIST", "test")
    assert dataset.y.tolist() == [1, 0, 1, 0]
    for image, data in zip(arrays["x_test"], dataset, strict=True):
        image = (image / 255).astype(np.float32)
        segments = _segment(image, _RECIPES["MNIST"])
        assert segments.max() + 1 == data.num_nodes <= 75
        expected = {}  # by position
        for i in range(data.num_nodes):
            where = np.argwhere(segments == i)
            centre = tuple(np.round(where.mean(axis=0) / 28, 5))
            expected[centre] = image[segments == i].mean()
        found = [tuple(np.round(p, 5)) for p in data.pos.double().numpy()]
        assert {*found} == {*expected}
        assert np.allclose(data.x[:, 0], [expected[p] for p in found], atol=1e-5)

        pos = data.pos.double()
        distance = torch.cdist(pos, pos)
        scale = distance.sort(dim=1).values[:, 1:9].mean(dim=1)
        for u in range(data.num_nodes):
            weight = torch.exp(-((distance[u] / scale[u]) ** 2)) / 2
            weight += torch.exp(-((distance[u] / scale) ** 2)) / 2
            weight[u] = -1
            edges = data.edge_index[0] == u
            weights = data.edge_attr[edges, 0].double()
            assert torch.allclose(weights, weight.topk(8).values, atol=1e-5)
            assert torch.allclose(weights, weight[data.edge_index[1, edges]], atol=1e-5)
        assert data.x.dtype == data.pos.dtype == data.edge_attr.dtype == torch.float32


def test_splits_are_those_of_the_benchmark(digits):
    root, arrays = digits
    labels = arrays["y_train"].tolist()
    assert Superpixels(str(root), "MNIST", "val").y.tolist() == labels[:2]
    few = Superpixels(str(root), "MNIST", "train", num_graphs=3)
    assert few.y.tolist() == labels[2:5]
    whole = Superpixels(str(root), "MNIST", "train")
    assert whole.y.tolist() == labels[2:]
    for one, other in zip(few, whole, strict=False):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.edge_index, other.edge_index)
    # Only what was asked for was made.
    made = {p.relative_to(root / "processed").as_posix() for p in root.rglob("*.pt")}
    assert {"MNIST-all/train.pt", "MNIST-all/val.pt", "MNIST-3/train.pt"} <= made
    assert not made & {"MNIST-3/val.pt", "MNIST-3/test.pt"}


def test_batches(digits):
    root, _ = digits
    dataset = Superpixels(str(root), "MNIST", "test")
    (batch,) = DataLoader(dataset, batch_size=4)
    assert batch.y.shape == (4,)
    assert batch.edge_attr.shape == (batch.num_edges, 1)
    assert batch.num_edges == 8 * batch.num_nodes


def test_official_files_of_mnist(digits, tmp_path):
    root, arrays = digits
    (tmp_path / "raw").mkdir()
    for name, array, header in (
        ("t10k-images-idx3-ubyte.gz", arrays["x_test"], 16),
        ("t10k-labels-idx1-ubyte.gz", arrays["y_test"], 8),
    ):
        with gzip.open(tmp_path / "raw" / name, "wb") as file:
            file.write(b"h" * header + array.tobytes())
    one, other = (Superpixels(str(r), "MNIST", "test") for r in (root, tmp_path))
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)


def test_official_files_of_cifar(tmp_path):
    images = pictures(20, 32, 32, 3)
    folder = tmp_path / "raw" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i in range(5):
        part = images[4 * i : 4 * i + 4].transpose(0, 3, 1, 2).reshape(4, -1)
        batch = {b"data": part, b"labels": [9, i, i, i]}
        (folder / f"data_batch_{i + 1}").write_bytes(pickle.dumps(batch))
    dataset = Superpixels(str(tmp_path), "CIFAR10", "val")
    assert dataset.y.tolist() == [9, 0]
    for image, data in zip(images, dataset, strict=False):
        # Weighted by sizes, the superpixels' colours are those of the image.
        segments = _segment((image / 255).astype(np.float32), _RECIPES["CIFAR10"])
        means = [image[segments == i].mean(axis=0) / 255 for i in np.unique(segments)]
        one, other = (np.sort(np.round(c, 4)[:, 0]) for c in (means, data.x.numpy()))
        assert np.allclose(one, other, atol=2e-4)


def test_jpeg_files_are_shuffled(tmp_path):
    files = []
    for image in pictures(40, 32, 32, 3):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=95)
        files.append(np.frombuffer(stream.getvalue(), np.uint8))
    (tmp_path / "raw").mkdir()
    np.savez(
        tmp_path / "raw" / "cifar10_jpeg.npz",
        train_bytes=np.concatenate(files),
        train_offsets=np.cumsum([0, *map(len, files)]),
        train_labels=np.arange(40, dtype=np.uint8) // 4,
    )
    val = Superpixels(str(tmp_path), split="val")
    train = Superpixels(str(tmp_path), split="train", num_workers=0, num_graphs=8)
    assert len(val) == 4
    assert len({*val.y.tolist()}) > 1
    assert train.y.tolist() != sorted(train.y.tolist())
    assert train[0].x.shape[1] == 3


def test_small_graphs_are_complete(tmp_path):
    (tmp_path / "raw").mkdir()
    images = np.zeros((3, 4, 4), np.uint8)  # constant, too
    images[1, :2] = 255
    np.savez(tmp_path / "raw" / "mnist.npz", x_test=images[:, :2], y_test=[2, 1, 0])
    for data in Superpixels(str(tmp_path), "MNIST", "test"):
        n = data.num_nodes
        assert 1 <= n <= 8
        assert data.num_edges == n * (n - 1)
        assert not data.has_self_loops()
        assert data.x.isfinite().all()
        assert data.edge_attr.isfinite().all()


@pytest.mark.slow
def test_worker_processes_make_no_difference(digits, tmp_path):
    root, _ = digits
    (tmp_path / "raw").symlink_to(root / "raw")
    one = Superpixels(str(root), "MNIST", "test")
    other = Superpixels(str(tmp_path), "MNIST", "test", num_workers=2)
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.edge_attr, other.edge_attr)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "SVHN"}, "'name' must be one of"),
        ({"name": "MNIST", "split": "valid"}, "'split' must be one of"),
        ({"name": "MNIST", "num_graphs": 0}, "'num_graphs' must be at least 1"),
        ({"name": "MNIST", "num_graphs": 23}, "'num_graphs' must be at most 22"),
    ],
)
def test_rejects(digits, kwargs, message):
    root, _ = digits
    with pytest.raises(ValueError, match=message):
        Superpixels(str(root), **kwargs)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    for name in _RECIPES:
        with pytest.raises(FileNotFoundError, match=r"\.npz or "):
            Superpixels(str(tmp_path), name)
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ImportError, match=r"pyg-chimera\[examples\]"):
        Superpixels(str(tmp_path))


@pytest.mark.parametrize(("name", "nodes"), [("MNIST", 70.57), ("CIFAR10", 117.63)])
def test_as_many_nodes_as_in_the_benchmark(shared_data, tmp_path, name, nodes):
    (tmp_path / "raw").symlink_to(shared_data / "images")
    dataset = Superpixels(str(tmp_path), name, "val", num_graphs=60)
    assert dataset.x.shape[0] / 60 == pytest.approx(nodes, rel=0.02)
    assert dataset.x.min() >= 0
    assert dataset.x.max() <= 1
    assert len({*dataset.y.tolist()}) == 10
