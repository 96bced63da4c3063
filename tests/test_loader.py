"""Clusters of a graph, and batches of them."""

import sys

import pytest
import torch
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.utils import grid, is_undirected

from pyg_chimera import loader
from pyg_chimera.loader import ClusterData, ClusterLoader
from pyg_chimera.nn import ChimeraConv
from pyg_chimera.transforms import AddDiameter, AddEliminationOrder


@pytest.fixture(autouse=True)
def metis():
    pytest.importorskip("pymetis", reason="needs pymetis: pip install pymetis")


def field(side: int = 12) -> Data:
    """A grid with self-loops, whose attributes say which node or edge they are of."""
    edge_index, pos = grid(side, side)
    node, edge = torch.arange(side**2), torch.arange(edge_index.size(1))
    return Data(
        x=torch.randn(side**2, 3), pos=pos, y=node, train_mask=node % 2 == 0,
        edge_index=edge_index, edge_attr=edge.view(-1, 1), weight=edge, name="field",
    )  # fmt: skip


def check(part: Data, data: Data) -> None:
    """A part is the subgraph of its nodes, whose attributes are theirs."""
    expected = data.subgraph(part.n_id)
    assert part.num_nodes == part.n_id.numel()
    assert part.n_id.tolist() == sorted(set(part.n_id.tolist()))
    for key in data.keys():  # noqa: SIM118
        if isinstance(expected[key], torch.Tensor):
            assert torch.equal(part[key], expected[key]), key
    assert part.name == "field"


@pytest.mark.parametrize("recursive", [False, True])
def test_clusters_partition_the_graph(recursive, capfd):
    data = field()
    before = data.clone()
    clusters = ClusterData(data, 5, recursive)
    assert len(clusters) == clusters.num_parts == 5
    assert repr(clusters) == "ClusterData(5)"
    parts = list(clusters)
    assert len(parts) == 5
    for part in parts:
        check(part, data)
        assert 20 <= part.num_nodes <= 40  # 144 / 5
        assert is_undirected(part.edge_index)
    nodes = torch.cat([part.n_id for part in parts])
    assert nodes.sort().values.tolist() == list(range(144))
    lost = data.num_edges - sum(part.num_edges for part in parts)
    assert 0 < lost < data.num_edges / 4  # along the borders; two thirds at random
    assert clusters.partition.node_perm.tolist() == nodes.tolist()
    sizes = clusters.partition.partptr.diff().tolist()
    assert sizes == [part.num_nodes for part in parts]
    # The data are the user's.
    assert data.keys() == before.keys()
    assert all(data[key] is not None for key in data.keys())  # noqa: SIM118
    assert "METIS" in capfd.readouterr().err


def test_several_clusters_keep_the_edges_between_them():
    data = field()
    clusters = ClusterData(data, 6, log=False)
    merged = clusters[[4, 1, 3]]
    check(merged, data)
    alone = [clusters[i] for i in (1, 3, 4)]
    assert merged.num_nodes == sum(part.num_nodes for part in alone)
    assert merged.num_edges > sum(part.num_edges for part in alone)
    check(clusters[range(6)], data)
    assert clusters[range(6)].num_edges == data.num_edges


def test_clusters_are_indexed_as_sequences_are():
    clusters = ClusterData(field(), 6, log=False)
    assert torch.equal(clusters[-1].n_id, clusters[5].n_id)
    assert torch.equal(clusters[::-2].n_id, clusters[[1, 3, 5]].n_id)
    twice = clusters[[2, 4, -4]]  # as by a sampler that draws with replacement
    assert torch.equal(twice.n_id, clusters[[2, 4]].n_id)
    assert torch.equal(twice.edge_index, clusters[[2, 4]].edge_index)


def test_numbers_of_nodes_that_are_given_stay():
    data = field()
    data.n_id = 1000 + torch.arange(144)
    parts = list(ClusterData(data, 4, log=False))
    assert torch.cat([part.n_id for part in parts]).min() == 1000


@pytest.mark.parametrize("workers", [0, 2])
def test_loader(workers):
    data = field()
    clusters = ClusterData(data, 7, log=False)
    batches = ClusterLoader(clusters, batch_size=2, shuffle=True, num_workers=workers)
    assert len(batches) == 4
    seen = []
    for batch in batches:
        check(batch, data)
        seen += batch.n_id.tolist()
    assert sorted(seen) == list(range(144))


def test_processes_share_clusters(tmp_path):
    """Each finds the same ones, and takes its own share."""
    shares = []
    for rank in range(2):
        clusters = ClusterData(field(), 8, log=False)
        sampler = DistributedSampler(clusters, num_replicas=2, rank=rank)
        batches = ClusterLoader(clusters, batch_size=2, sampler=sampler)
        shares += [batch.n_id for batch in batches]
    assert len(shares) == 4
    assert torch.cat(shares).sort().values.tolist() == list(range(144))


def test_a_copy_as_lightning_makes_it():
    clusters = ClusterData(field(), 4, log=False)
    first = ClusterLoader(clusters, batch_size=2)
    arguments = {"dataset": first.dataset, "collate_fn": first.collate_fn}
    second = ClusterLoader(first.cluster_data, first.transform, **arguments)
    assert [batch.num_nodes for batch in second] == [p.num_nodes for p in clusters]


def test_directed_graphs():
    """METIS would read an asymmetric matrix without a word."""
    data = field()
    forward = data.edge_index[0] < data.edge_index[1]
    dag = data.edge_subgraph(forward)
    both, one = ClusterData(data, 5, log=False), ClusterData(dag, 5, log=False)
    for a, b in zip(both, one, strict=True):
        assert torch.equal(a.n_id, b.n_id)
        check(b, dag)


def test_attributes_where_a_part_has_as_many_edges_as_nodes():
    """Whether an attribute is of nodes or edges is asked of the whole graph only."""
    ring = torch.arange(6)
    ends = torch.stack([ring, (ring + 1) % 6])
    data = Data(edge_index=torch.cat([ends, ends.flip(0)], 1), num_nodes=6)
    data.weight, data.count = torch.arange(12), torch.arange(6)
    for part in ClusterData(data, 3, log=False):  # two nodes, two edges
        source, target = part.n_id[part.edge_index]
        assert part.num_nodes == part.num_edges == 2
        assert torch.equal(part.count, part.n_id)
        found = data.edge_index[:, part.weight]
        assert torch.equal(found, torch.stack([source, target]))


def test_graphs_without_edges_and_batches_without_edges():
    data = Data(x=torch.randn(6, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    clusters = ClusterData(data, 3, log=False)
    (batch,) = ClusterLoader(clusters, batch_size=len(clusters))
    assert batch.num_nodes == 6
    assert batch.edge_index.shape == (2, 0)


def test_no_cluster_is_empty():
    """METIS makes three parts of two nodes and an isolated one, in which it fails."""
    clusters = ClusterData(
        Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=3), 3, log=False
    )
    assert 1 <= len(clusters) <= 3
    assert all(part.num_nodes for part in clusters)
    assert sum(part.num_nodes for part in clusters) == 3


def test_layers_take_the_stored_order_and_transforms_apply_to_batches():
    data = AddEliminationOrder()(field())
    clusters = ClusterData(data, 4, log=False)
    conv = ChimeraConv(3, 4)
    for batch in ClusterLoader(clusters, AddDiameter(), batch_size=2):
        out = conv(batch.x, batch.edge_index, rank=batch.elimination_rank)
        fresh = conv(batch.x, batch.edge_index)
        assert torch.allclose(out, fresh, atol=1e-5)
        assert int(batch.diameter) >= 10


def test_clusters_batch_as_graphs_of_their_own():
    clusters = ClusterData(field(), 4, log=False)
    (batch,) = DataLoader(list(clusters), batch_size=4)
    assert batch.num_graphs == 4
    assert batch.num_edges == sum(part.num_edges for part in clusters)


def test_files(tmp_path, monkeypatch, capfd):
    first = ClusterData(field(), 4, save_dir=str(tmp_path / "new"))
    (path,) = (tmp_path / "new").iterdir()
    assert capfd.readouterr().err.count("METIS") == 1
    # Read, and not computed again.
    monkeypatch.setitem(sys.modules, "pymetis", None)
    again = ClusterData(field(), 4, save_dir=str(tmp_path / "new"))
    assert [p.n_id.tolist() for p in again] == [p.n_id.tolist() for p in first]
    monkeypatch.undo()
    # Another graph, and another number, have files of their own.
    ClusterData(field(13), 4, save_dir=str(tmp_path / "new"), log=False)
    other = ClusterData(field(), 5, save_dir=str(tmp_path / "new"), log=False)
    assert len(other) == 5
    assert len(list((tmp_path / "new").iterdir())) == 3
    assert path.exists()


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def interrupted(file, x):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loader.np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ClusterData(field(), 4, save_dir=str(tmp_path), log=False)
    assert not list(tmp_path.glob("*.npy"))
    assert len(ClusterData(field(), 4, save_dir=str(tmp_path), log=False)) == 4


def test_errors(monkeypatch):
    data = field()
    with pytest.raises(ValueError, match="at most the number of nodes, 144, got 145"):
        ClusterData(data, 145)
    with pytest.raises(ValueError, match="'num_parts' must be an integer >= 1"):
        ClusterData(data, 0)
    with pytest.raises(ValueError, match="must have an 'edge_index', got none"):
        ClusterData(Data(x=data.x), 2)
    for wrong in (-1, 5):
        edges = torch.tensor([[0, wrong], [1, 0]])
        with pytest.raises(ValueError, match="edge_index"):
            ClusterData(Data(torch.randn(3, 1), edges), 2, log=False)
    with pytest.raises(TypeError, match="edge_index"):
        ClusterData(Data(torch.randn(3, 1), torch.eye(2)), 2, log=False)
    with pytest.raises(TypeError, match=r"got HeteroData; of .*to_homogeneous\(\)"):
        ClusterData(HeteroData(), 2)
    clusters = ClusterData(data, 4, log=False)
    for index in (4, -5, [0, 4]):
        with pytest.raises(IndexError, match="clusters are from 0 to 3"):
            clusters[index]
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match=r"pip install 'pyg-chimera\[metis\]'"):
        ClusterData(data, 4)
