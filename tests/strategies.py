"""Random graphs for hypothesis: ``from strategies import graphs, dags, batches``.

All of them shrink to few nodes and edges, and reach the unpleasant cases often:
no nodes, one node, no edges, isolated nodes, several components, self-loops and
duplicate edges.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import networkx as nx
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["Batch", "Graph", "batches", "dags", "graphs", "paths", "to_networkx"]

# The first call of a kernel compiles it, which no deadline survives.
settings.register_profile(
    "pyg_chimera", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pyg_chimera")


class Graph(NamedTuple):
    edge_index: Tensor  # [2, E], int64
    num_nodes: int


class Batch(NamedTuple):
    edge_index: Tensor  # [2, E], int64, edges of all graphs in any order
    batch: Tensor  # [V], int64
    num_graphs: int  # graphs without a node count, also at the end
    num_nodes: int
    node_map: list[Tensor]  # its i-th entry: where the i-th graph's nodes are
    graphs: list[Graph]  # the graphs one by one


def to_networkx(graph: Graph, directed: bool = False) -> nx.Graph:
    """The same graph; if it is not `directed`, without self-loops."""
    out = nx.DiGraph() if directed else nx.Graph()
    out.add_nodes_from(range(graph.num_nodes))
    edges = graph.edge_index.t().tolist()
    out.add_edges_from((u, v) for u, v in edges if directed or u != v)
    return out


def _edge_index(edges: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()


def _sorted_pair(edge: tuple[int, int]) -> tuple[int, int]:
    return min(edge), max(edge)


@st.composite
def graphs(
    draw: Any,
    *,
    min_nodes: int = 0,
    max_nodes: int = 10,
    max_edges: int = 24,
    undirected: bool = False,
    self_loops: bool = True,
    duplicates: bool = True,
) -> Graph:
    """Any directed graph; each edge in both directions with ``undirected``."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    if num_nodes == 0:
        return Graph(_edge_index([]), 0)

    nodes = st.integers(0, num_nodes - 1)
    if undirected:
        max_edges //= 2
    unique_by = None if duplicates else _sorted_pair if undirected else tuple
    edges = draw(
        st.lists(st.tuples(nodes, nodes), max_size=max_edges, unique_by=unique_by)
    )
    if not self_loops:
        edges = [(u, v) for u, v in edges if u != v]
    if undirected:
        edges = edges + [(v, u) for u, v in edges if u != v]
        edges = draw(st.permutations(edges))
    return Graph(_edge_index(edges), num_nodes)


@st.composite
def dags(
    draw: Any,
    *,
    min_nodes: int = 0,
    max_nodes: int = 10,
    max_edges: int = 24,
    duplicates: bool = True,
) -> Graph:
    """A DAG whose topological order is any permutation of its nodes."""
    edge_index, num_nodes = draw(
        graphs(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            max_edges=max_edges,
            self_loops=False,
            duplicates=True,
        )
    )
    upward = edge_index.sort(dim=0).values
    if not duplicates:
        upward = upward.unique(dim=1)
    names = torch.tensor(draw(st.permutations(range(num_nodes))), dtype=torch.long)
    return Graph(names[upward], num_nodes)


#: Edges between a node and the next one of a path.
_DIRECTED = [(), ((0, 1),)]
_UNDIRECTED = [*_DIRECTED, ((0, 1), (1, 0)), ((1, 0),), ((0, 1), (1, 0), (0, 1))]


@st.composite
def paths(draw: Any, *, max_nodes: int = 10, undirected: bool = False) -> Graph:
    """Paths through all nodes; if undirected also with loops, and with edges that lead
    one way only, or are there twice.
    """
    num_nodes = draw(st.integers(0, max_nodes))
    names = draw(st.permutations(range(num_nodes)))
    steps, edges = st.sampled_from(_UNDIRECTED if undirected else _DIRECTED), []
    for pair in pairwise(names):
        edges += [(pair[i], pair[j]) for i, j in draw(steps)]
    if undirected and num_nodes > 0:
        edges += [(i, i) for i in draw(st.lists(st.sampled_from(names), max_size=3))]
    return Graph(_edge_index(edges), num_nodes)


@st.composite
def batches(
    draw: Any,
    elements: st.SearchStrategy[Graph] | None = None,
    *,
    min_graphs: int = 0,
    max_graphs: int = 4,
    ordered: bool | None = None,
) -> Batch:
    """Graphs side by side.

    The nodes of one graph lie together and in order if ``ordered``, anywhere if
    not; by default either may happen. ``elements`` are any graphs by default.
    """
    if elements is None:
        elements = graphs(max_nodes=6, max_edges=12)
    items = draw(st.lists(elements, min_size=min_graphs, max_size=max_graphs))
    num_nodes = sum(item.num_nodes for item in items)

    places = torch.arange(num_nodes)
    if not (draw(st.booleans()) if ordered is None else ordered):
        places = torch.tensor(draw(st.permutations(range(num_nodes))), dtype=torch.long)
    node_map = list(places.split([item.num_nodes for item in items]))
    batch = torch.empty(num_nodes, dtype=torch.long)
    for i, place in enumerate(node_map):
        batch[place] = i

    parts = [
        place[item.edge_index] for item, place in zip(items, node_map, strict=True)
    ]
    edge_index = torch.cat([_edge_index([]), *parts], dim=1)
    order = draw(st.permutations(range(edge_index.size(1))))
    edge_index = edge_index[:, torch.tensor(order, dtype=torch.long)]
    return Batch(edge_index, batch, len(items), num_nodes, node_map, items)
