"""How much memory there is left."""

import math
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from pyg_chimera import nn, transforms
from pyg_chimera.ops import k_hop_index, line_graph, multitree
from pyg_chimera.ops.common import cache, memory

CPU = torch.device("cpu")


@pytest.fixture
def files(monkeypatch):
    """Files of the system, and no others."""
    found = {}

    def read(path: Path) -> str:
        if str(path) not in found:
            raise FileNotFoundError(path)
        return found[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    return found


def test_memory_of_a_machine(files):
    assert memory.available_bytes(CPU) == math.inf
    assert memory.available_bytes(torch.device("meta")) == math.inf
    files["/proc/meminfo"] = "MemTotal:  900 kB\nMemAvailable:  500 kB\nHuge:  0\n"
    assert memory.available_bytes(CPU) == 500 * 1024


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used", "cached"),
    [
        ("0::/", "", "memory.max", "memory.current", "inactive_file"),
        ("0::/job/step", "/job", "memory.max", "memory.current", "inactive_file"),
        (
            *("4:memory:/job", "/memory/job", "memory.limit_in_bytes"),
            *("memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_limits_of_containers_and_jobs(own, folder, limit, used, cached, files):
    files["/proc/meminfo"] = "MemAvailable:  500 kB\n"
    files["/proc/self/cgroup"] = f"1:cpu:/x\n{own}\n"
    group = f"/sys/fs/cgroup{folder}"
    files |= {f"{group}/{used}": "3000", f"{group}/memory.stat": f"a 1\n{cached} 50\n"}
    files[f"{group}/{limit}"] = "max"
    assert memory.available_bytes(CPU) == 500 * 1024
    files[f"{group}/{limit}"] = "10000"
    assert memory.available_bytes(CPU) == 10000 - 3000 + 50
    files[f"{group}/{used}"] = "20000"
    assert memory.available_bytes(CPU) == 0


def test_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert memory.available_bytes(torch.device("cuda:0")) == 1400


def test_this_machine():
    left = memory.available_bytes(CPU)
    assert left > 1 << 20


# ------------------------------------------------------------------ what does not fit

NODES = 300
LEAVES = torch.arange(1, NODES)
#: A star with edges both ways, and one that half of the edges enter.
STAR = torch.stack([torch.cat([LEAVES, 0 * LEAVES]), torch.cat([0 * LEAVES, LEAVES])])
HUB = torch.where(LEAVES < 150, STAR[:, : NODES - 1], STAR[:, NODES - 1 :])
HUB_LINES = line_graph(HUB, NODES).edge_index
ONE_APART = (torch.arange(NODES) == 7).long()
LINES, TURNS = 149 * 150, 299 * 299


def attention(layer):
    """On pairs that are there already."""
    pairs = k_hop_index(STAR, NODES, 2)
    return lambda x: layer(x, STAR, k_hop_index=pairs[0], k_hop_distance=pairs[1])


HUBS = {
    "k_hop_index": (lambda x: k_hop_index(STAR, NODES, 2), "about 90,000 pairs of 300"),
    "AddKHopIndex": (
        lambda x: transforms.AddKHopIndex(2)(Data(x, STAR)), "about 90,000 pairs of"),
    "KHopAttentionConv": (
        lambda x: nn.KHopAttentionConv(4, k=2)(x, STAR), "about 90,000 pairs of 300"),
    "neighborhood_attention": (
        attention(nn.KHopAttentionConv(4, k=2, heads=2)),
        "2 heads over 90,000 pairs of nodes would take"),
    "line_graph": (lambda x: line_graph(HUB, NODES), f"{LINES:,} pairs of consecutive"),
    "DirectedLineGraph": (
        lambda x: transforms.DirectedLineGraph()(Data(x, HUB)), f"{LINES:,} pairs of"),
    "MultitreePruning": (
        lambda x: transforms.MultitreePruning()(Data(x, HUB)), f"{LINES:,} pairs of"),
    "PLSTMConv": (lambda x: nn.PLSTMConv(4)(x, HUB), f"{LINES:,} pairs of consecutive"),
    "PLSTMConv-turns": (
        lambda x: nn.PLSTMConv(4, order="bfs")(x, STAR),
        f"{TURNS:,} pairs of consecutive edges of 598"),
    "PLSTMConv-gates": (
        lambda x: nn.PLSTMConv(4, heads=4)(x, HUB, line_edge_index=HUB_LINES),
        f"Gates of 4 heads for {LINES:,} pairs of edges"),
    "multitree": (
        lambda x: multitree(STAR[:, : NODES - 1], NODES),
        "300 states reach one another would take"),
    "padding": (
        lambda x: nn.GPSLayer(4, mixer=nn.SelfAttention(4))(x, STAR, ONE_APART),
        "2 graphs padded to 299 nodes"),
    "causal": (
        lambda x: nn.SelfAttention(4, causal=True)(x[None], x[None, :, 0] < 9),
        "A causal mask of 300 nodes"),
    "resolvent_mix": (
        lambda x: nn.ChimeraConv(4, solver="dense")(x, STAR),
        "resolvent_mix with solver='dense', form='mask'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HUBS)
def test_what_does_not_fit_is_counted_before(name, monkeypatch):
    """And computed if it fits. (Calls of a few bytes do not ask how many are left.)"""
    call, said = HUBS[name]
    x = torch.randn(NODES, 4)
    call(x)
    cache._CACHE.values.clear()
    monkeypatch.setattr(memory, "_FEW_BYTES", 0)
    left = {"multitree": 1000, "causal": 50_000, "padding": 9000}.get(name, 100_000)
    monkeypatch.setattr(memory, "available_bytes", lambda device: left)
    with pytest.raises(ValueError, match=f"{said}.* GiB that are left; [ub]"):
        call(x)


def test_counting_stops_early(monkeypatch):
    """A path of as many nodes is no hub."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    node = torch.arange(30_000)
    pairs = k_hop_index(torch.stack([node[:-1], node[1:]]), 30_000, 3)
    assert pairs.distance.numel() == 4 * 30_000 - 6
    hub = torch.stack([node[1:], 0 * node[1:]])
    star = torch.cat([hub, hub.flip(0)], 1)
    with pytest.raises(ValueError, match="about 900,000,000 pairs"):
        k_hop_index(star, 30_000, 2)
