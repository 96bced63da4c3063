import pickle

import long_range_data
import numpy as np
import pytest
import torch

pytest.importorskip("skimage")
Image = pytest.importorskip("PIL.Image")


def pictures(n, height=32, width=32):
    """Smooth random images."""
    rng = np.random.default_rng(n)
    rows, columns = np.indices((height, width)) / height
    waves = rng.uniform(2, 12, size=(n, 3, 3, 1, 1))
    image = np.sin(waves[:, 0] * rows + waves[:, 1] * columns + waves[:, 2])
    return np.moveaxis((127 * (image + 1)).astype(np.uint8), 1, -1)


def write(folder, images, labels, name="data_batch_{}"):
    """The official files, five if the name has a place for a number."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    files = [name.format(i) for i in range(1, 6)] if "{" in name else [name]
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    for file, part, y in zip(
        files, np.split(rows, len(files)), np.split(labels, len(files)), strict=True
    ):
        batch = {b"data": part, b"labels": y.tolist()}
        (folder / file).write_bytes(pickle.dumps(batch))


def test_against_slow_graphs(tmp_path):
    """Superpixels are those of SLIC; all else is computed anew."""
    images = pictures(3)
    write(tmp_path, images, np.array([1, 0, 1]), "test_batch")
    graphs = long_range_data.superpixel_graphs(tmp_path, "test", 3)
    assert [int(data.y) for data in graphs] == [1, 0, 1]
    for image, data in zip(images, graphs, strict=True):
        image = (image / 255).astype(np.float32)
        segments = long_range_data.superpixels.segments_of(image)
        assert segments.max() + 1 == data.num_nodes <= 150
        expected = {}  # by position
        for i in range(data.num_nodes):
            where = np.argwhere(segments == i)
            centre = tuple(np.round(where.mean(axis=0), 3))
            expected[centre] = image[segments == i].mean(axis=0)
        found = [tuple(np.round(32 * p, 3)) for p in data.pos.double().numpy()]
        assert {*found} == {*expected}
        assert np.allclose(data.x, [expected[p] for p in found], atol=1e-5)

        pos = data.pos.double()
        distance = torch.cdist(pos, pos)
        scale = distance.sort(dim=1).values[:, 1:9].mean(dim=1)
        assert data.num_edges == 8 * data.num_nodes
        for u in range(data.num_nodes):
            weight = torch.exp(-((distance[u] / scale[u]) ** 2)) / 2
            weight += torch.exp(-((distance[u] / scale) ** 2)) / 2
            weight[u] = -1
            edges = data.edge_index[0] == u
            weights = data.edge_attr[edges, 0].double()
            assert torch.allclose(weights, weight.topk(8).values, atol=1e-5)
            assert torch.allclose(weights, weight[data.edge_index[1, edges]], atol=1e-5)
        assert data.x.dtype == data.pos.dtype == data.edge_attr.dtype == torch.float32


def test_as_many_nodes_as_in_the_benchmark(shared_data):
    folder = shared_data / "images"
    graphs = long_range_data.superpixel_graphs(folder, "val", 60)
    assert sum(data.num_nodes for data in graphs) / 60 == pytest.approx(117.63, 0.02)
    assert all(data.x.min() >= 0 and data.x.max() <= 1 for data in graphs)
    assert len({int(data.y) for data in graphs}) == 10
