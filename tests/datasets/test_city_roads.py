import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from pyg_chimera.datasets import CityRoads

#: Parallel edges from 0 to 1, a loop at 2, a one-way road from 2 to 0; no edge ends
#: at 3.
EDGES = [(0, 1), (0, 1), (1, 0), (1, 2), (2, 1), (2, 2), (2, 0), (3, 2)]
V, E = 4, len(EDGES)


def write_raw(root, city="village"):
    rng = np.random.default_rng(0)
    arrays = {
        "node_features": rng.normal(size=(V, 12)),
        "edge_index": np.array(EDGES, np.int32).T,
        "edge_features": rng.normal(size=(E, 25)),
        "label": np.arange(V, dtype=np.uint8),
        "eccentricity": rng.uniform(size=V),
    }
    arrays = {
        key: array.astype(np.float32) if key.endswith("features") else array
        for key, array in arrays.items()
    }
    arrays["edge_features"][:, 3] = 0.1  # constant
    (root / "raw").mkdir(parents=True)
    np.savez(root / "raw" / f"{city}.npz", **arrays)
    return arrays


def standardised(array):
    array = array.astype(np.float64)
    scale = array.std(axis=0)
    return (array - array.mean(axis=0)) / np.where(scale < 1e-12, 1, scale)


def check(data, edges, features, nodes):
    """Against a list of edges and their features."""
    assert list(zip(*data.edge_index.tolist(), strict=True)) == edges
    incident = [
        np.mean([f for f, (_, v) in zip(features, edges, strict=True) if v == i], 0)
        if any(v == i for _, v in edges)
        else np.zeros(25)
        for i in range(len(nodes))
    ]
    x = standardised(np.concatenate([nodes, incident], axis=1))
    assert np.allclose(data.x, x, atol=1e-5)
    assert np.allclose(data.edge_attr, standardised(np.array(features)), atol=1e-5)
    assert np.allclose(data.length, np.array(features)[:, 0])
    for value in (data.x, data.edge_attr, data.length, data.pos, data.eccentricity):
        assert value.dtype == torch.float32
    assert data.y.dtype == data.edge_index.dtype == torch.int64


def test_against_slow_means(tmp_path):
    raw = write_raw(tmp_path)
    dataset = CityRoads(str(tmp_path), "village")
    assert len(dataset) == 1
    data = dataset[0]
    check(data, EDGES, list(raw["edge_features"]), raw["node_features"])
    assert (data.edge_attr[:, 3] == 0).all()
    assert np.array_equal(data.pos, raw["node_features"][:, :2])
    assert np.array_equal(data.eccentricity, raw["eccentricity"].astype(np.float32))
    assert data.y.tolist() == [0, 1, 2, 3]


def masks(data):
    return [getattr(data, f"{s}_mask").nonzero().flatten().tolist() for s in SPLITS]


SPLITS = ("train", "val", "test")


def test_masks_and_cache(tmp_path):
    write_raw(tmp_path)
    root = str(tmp_path)
    order = np.random.RandomState(3).permutation(V).tolist()
    expected = [sorted(order[:2]), order[2:3], order[3:]]
    data = CityRoads(root, "village", shares=(0.5, 0.25), seed=3)[0]
    assert masks(data) == expected
    path = CityRoads(root, "village", shares=(0.25, 0.5), seed=3).processed_paths[0]
    assert masks(CityRoads(root, "village", shares=(0.25, 0.5), seed=3)[0]) == [
        order[:1],
        sorted(order[1:3]),
        order[3:],
    ]
    (tmp_path / "raw" / "village.npz").write_bytes(b"")  # not read again
    again = CityRoads(root, "village", shares=(0.5, 0.25), seed=3)
    assert masks(again[0]) == expected
    assert again.processed_paths[0] != path
    torch.load(path, weights_only=True)


def test_transforms(tmp_path):
    write_raw(tmp_path)

    def mark(data):
        data.mark = data.num_nodes
        return data

    data = CityRoads(str(tmp_path), "village", pre_transform=mark)[0]
    assert data.mark == V


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shares": (0.5, 0.5)}, "'shares' must be two positive numbers"),
        ({"shares": (0.0, 0.5)}, "'shares' must be two positive numbers"),
        ({"shares": (0.5,)}, "'shares' must be two positive numbers"),
        ({"seed": -1}, "'seed' must not be negative"),
    ],
)
def test_rejects(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        CityRoads(str(tmp_path), **kwargs)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"paris.*CityNetwork"):
        CityRoads(str(tmp_path), "paris")


@pytest.mark.parametrize(
    ("city", "nodes", "edges"),
    [("huangpu", 5_268, 12_902), ("pasadena", 12_409, 31_373)],
)
def test_real_cities(shared_data, tmp_path, city, nodes, edges):
    (tmp_path / "raw").symlink_to(shared_data / "city-networks")
    data = CityRoads(str(tmp_path), city)[0]
    assert (data.num_nodes, data.num_edges) == (nodes, edges)
    assert data.x.shape == (nodes, 37)
    assert data.edge_attr.shape == (edges, 25)
    for columns in (data.x.double(), data.edge_attr.double()):
        assert columns.mean(0).abs().max() < 1e-3
        assert (columns.std(0, correction=0) - 1).abs().max() < 1e-3
    tenth = int(nodes * 0.1)
    sizes = [int(data[f"{split}_mask"].sum()) for split in SPLITS]
    assert sizes == [tenth, tenth, nodes - 2 * tenth]
    # Classes are tenths of the eccentricities.
    order = data.eccentricity.argsort()
    assert (data.y[order].diff() >= 0).all()
    assert data.y.bincount().max() - data.y.bincount().min() <= 2

    # Eccentricities as the docstring defines them: sources within 16 edges, distances
    # along roads between these.
    directed, roads = nx.DiGraph(), nx.Graph()
    for u, v, length in zip(
        *data.edge_index.tolist(), data.length.tolist(), strict=True
    ):
        directed.add_edge(u, v)
        roads.add_edge(u, v, length=length)
    for node in range(0, nodes, nodes // 20):
        near = nx.single_source_shortest_path_length(directed.reverse(False), node, 16)
        distances = nx.single_source_dijkstra_path_length(
            roads.subgraph(near), node, weight="length"
        )
        assert max(distances.values()) == pytest.approx(float(data.eccentricity[node]))


def test_download(tmp_path, monkeypatch):
    """The files that are published give the same graph as the raw file."""
    raw = write_raw(tmp_path / "there", "huangpu")
    published = {
        "node_features": "node_features",
        "edge_index": "edge_indices",
        "edge_features": "edge_features",
        "label": "10-chunk_node_labels",
        "eccentricity": "16-hop_eccentricities",
    }
    asked = []

    def download_url(url, folder):
        asked.append(url)
        path = Path(folder, Path(url).name)
        key = next(k for k, name in published.items() if name == path.stem)
        array = raw[key]
        wide = {np.dtype(np.int32), np.dtype(np.uint8)}
        torch.save(
            torch.from_numpy(array.astype(np.int64) if array.dtype in wide else array),
            path,
        )
        return str(path)

    module = sys.modules[CityRoads.__module__]
    monkeypatch.setattr(module, "download_url", download_url)
    here = CityRoads(str(tmp_path / "here"), "huangpu")[0]
    there = CityRoads(str(tmp_path / "there"), "huangpu")[0]
    assert len(asked) == 5
    assert all("/data/huangpu/" in url for url in asked)
    for key, value in there:
        assert torch.equal(here[key], value), key
    CityRoads(str(tmp_path / "here"), "huangpu", seed=1)
    assert len(asked) == 5  # the raw file is kept
