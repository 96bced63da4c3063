"""Training on graphs that are new in every step keeps nothing of them."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_chimera.nn import (
    ChimeraConv,
    GraphMambaConv,
    GraphModel,
    KHopAttentionConv,
    PLSTMConv,
)
from pyg_chimera.ops.common import cache

STEPS, CHANNELS = 100, 8


def batch(seed: int) -> Batch:
    """Two connected graphs, in which edges lead to later nodes and back."""
    draw, graphs = torch.Generator().manual_seed(seed), []
    for n in (7, 9):
        child = torch.arange(1, n)
        parent = (torch.rand(n - 1, generator=draw) * child).long()
        more = torch.randint(n, (2, 3), generator=draw).sort(0).values
        edges = torch.cat([torch.stack([parent, child]), more[:, more[0] < more[1]]], 1)
        x = torch.randn(n, CHANNELS, generator=draw)
        graphs.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1)))
    return Batch.from_data_list(graphs)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_kept_of_batches(monkeypatch):
    """Caches fill up to their bound, and from then on memory does not grow."""
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=64))
    layers = [
        ChimeraConv(CHANNELS, state_channels=4),
        PLSTMConv(CHANNELS, order="bfs"),
        GraphMambaConv(CHANNELS, state_channels=4, order="pagerank"),
        KHopAttentionConv(CHANNELS, k=2),
    ]
    model = GraphModel(CHANNELS, CHANNELS, 2, layers)
    optimizer = torch.optim.Adam(model.parameters())
    objects, resident = [], []
    for step in range(2 * STEPS + 1):
        data = batch(step)
        optimizer.zero_grad()
        model(**model.inputs(data)).square().sum().backward()
        optimizer.step()
        if step % STEPS == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
            pages = Path("/proc/self/statm").read_text().split()[1]
            resident.append(int(pages) * 4096)
            found = cache._CACHE
            assert len(found.values) == len(found.keys) <= found.size
            assert found.held == sum(size for _, size in found.values.values())
            assert len(cache._DIGESTS.found) < 100
    # The first hundred fill the cache.
    assert len(cache._CACHE.values) == cache._CACHE.size
    assert objects[2] - objects[1] < 200
    assert resident[2] - resident[1] < 4 * 2**20
