"""Orders of the nodes: by which an undirected graph becomes a DAG, or sequences."""

from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.checks import check_batch, check_edge_index
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.elimination import adjacency, to_numpy
from pyg_chimera.ops.structure.topological import compress

__all__ = ["NodeSequences", "breadth_first", "node_order", "node_sequences"]

_METHODS = ("order", "degree", "bfs")

# Random numbers are the lower half of a sort key, what is sorted by the upper one.
_BITS = 32
_MASK = 2**_BITS - 1
_FREE_BITS = 63 - _BITS


class NodeSequences(NamedTuple):
    r"""The nodes of one or several graphs in sequences, packed one after the other."""

    #: The node at each place, int64 :math:`[m |\mathcal{V}|]`, where :math:`m` is the
    #: number of permutations. Each of its :math:`m` parts of length
    #: :math:`|\mathcal{V}|` is a permutation of the nodes.
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    #: Where each of the :math:`S = m B K` sequences begins, and at last the end, int64
    #: :math:`[S + 1]`, for :math:`B` graphs of :math:`K` bins. Permutations come first,
    #: then graphs, then bins. Sequences may be empty.
    ptr: Tensor


def node_order(edge_index: Tensor, num_nodes: int, method: str) -> Tensor:
    r"""The place of each node in an order of all nodes.

    If only those edges of an undirected graph are kept that lead from an earlier to a
    later node, a DAG remains. Edge directions, self-loops and duplicates make no
    difference here. Takes :math:`O(|\mathcal{V}| + |\mathcal{E}|)` time, on the CPU.

    In a batch of graphs, the places of all of them are numbered together; the nodes of
    one graph are in the same order as if the graph were alone.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        method (str): How to order them.

            * :obj:`"order"`: as they are numbered.
            * :obj:`"degree"`: by the number of different neighbours, fewest first,
              nodes that have equally many by number.
            * :obj:`"bfs"`: a breadth-first search from the first node of each
              component, one component after the other, neighbours by number.

    Returns:
        torch.Tensor: The place of each node, int64 :math:`[|\mathcal{V}|]`, a
        permutation of :math:`0, \ldots, |\mathcal{V}| - 1`, on the device of
        :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`method` is not one of these, or :obj:`edge_index` has a
            wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    if method not in _METHODS:
        raise ValueError(f"'method' must be one of {list(_METHODS)} (got {method!r})")
    check_edge_index(edge_index, num_nodes)
    device = edge_index.device
    if method == "order":
        return torch.arange(num_nodes, device=device)
    row, col = to_numpy(edge_index)
    ptr, neighbour = adjacency(row, col, num_nodes)
    if method == "degree":
        node = compress(np.diff(ptr), np.arange(num_nodes), num_nodes)[1]
        place = np.empty(num_nodes, np.int64)
        place[node] = np.arange(num_nodes)
    else:
        place = breadth_first(ptr, neighbour)
    return torch.from_numpy(place).to(device)


def node_sequences(
    score: Tensor | None,
    batch: Tensor | None = None,
    num_nodes: int | None = None,
    *,
    num_permutations: int = 1,
    num_bins: int = 1,
    clusters: bool = False,
    shuffle: bool = True,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
) -> NodeSequences:
    r"""Sorts the nodes of each graph into sequences, as in `"Graph-Mamba: Towards
    Long-Range Graph Sequence Modeling with Selective State Spaces"
    <https://arxiv.org/abs/2402.00789>`_.

    Nodes are sorted by their score, ascending, so that important ones come last and
    see most. Nodes of the same score come in random order.

    Random numbers are drawn from :obj:`generator`, or else from PyTorch's global one,
    unless there is a :obj:`seed`: then the order is a function of :obj:`seed`, of the
    number of the permutation and of the graph alone, the same in every process, on
    every device, and in every batch.

    Takes :math:`O(m |\mathcal{V}| \log |\mathcal{V}|)` time on the device of
    :obj:`score`. Can be compiled as one graph if there is a :obj:`batch_size` for each
    :obj:`batch`, and no :obj:`generator`.

    Args:
        score (torch.Tensor, optional): What to sort by, :math:`[|\mathcal{V}|]`, of any
            real dtype. If set to :obj:`None`, all nodes are equal.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. (default: :obj:`None`)
        num_nodes (int, optional): The number of nodes :math:`|\mathcal{V}|`, needed
            only if there is neither :obj:`score` nor :obj:`batch`.
            (default: :obj:`None`)
        num_permutations (int, optional): How many orders to find, :math:`m`.
            (default: :obj:`1`)
        num_bins (int, optional): Into how many sequences to divide the nodes of each
            graph at random, :math:`K`, each of them sorted. Their sizes differ by at
            most one. (default: :obj:`1`)
        clusters (bool, optional): If set to :obj:`True`, :obj:`score` holds the number
            of each node's cluster. The clusters of a graph then come in random order,
            and so do the nodes of a cluster. (default: :obj:`False`)
        shuffle (bool, optional): If set to :obj:`False`, nothing is random: nodes of
            the same score keep their order, bins are successive nodes, and clusters
            come by number. (default: :obj:`True`)
        generator (torch.Generator, optional): Where random numbers come from.
            (default: :obj:`None`)
        seed (int, optional): Makes the order reproducible. (default: :obj:`None`)
        batch_size (int, optional): The number of graphs :math:`B`, else taken from
            :obj:`batch`. (default: :obj:`None`)

    Returns:
        NodeSequences: The node at each place, int64 :math:`[m |\mathcal{V}|]`, and
        where each sequence begins, int64 :math:`[m B K + 1]`, on the device of
        :obj:`score`.

    Raises:
        ValueError: If :obj:`score` holds NaN, a shape is wrong, a number is too small,
            an entry of :obj:`batch` is out of range, or there are both a generator (of
            another device) and a seed.
        TypeError: If :obj:`batch` or clusters are not integer, :obj:`score` is
            complex, or a number is not an integer.
    """
    device, num_nodes = _check_sequences(
        score,
        batch,
        num_nodes,
        num_permutations=num_permutations,
        num_bins=num_bins,
        clusters=clusters,
        generator=generator,
        seed=seed,
        batch_size=batch_size,
    )
    m = num_permutations
    if batch is None:
        num_graphs = 1 if batch_size is None else batch_size
        graph = torch.zeros(num_nodes, dtype=torch.long, device=device)
    else:
        graph = batch.long()
        num_graphs = batch_size if batch_size is not None else 0
        if batch_size is None and num_nodes > 0:
            num_graphs = int(graph.max()) + 1
    size = graph.new_zeros(num_graphs).scatter_add_(0, graph, torch.ones_like(graph))
    first = size.cumsum(0) - size

    def draw(place: Tensor, stream: int) -> Tensor:
        """A random number for each permutation and place."""
        if seed is not None:
            return _hash(place, m, seed, stream)
        shape = (m, num_nodes)
        if generator is None:  # else compilation for all sizes fails, even with None
            return torch.randint(2**_BITS, shape, device=device)
        return torch.randint(2**_BITS, shape, generator=generator, device=device)

    noise = draw(_place(graph, first), 0) if shuffle else None
    group = _group(score, graph, num_graphs)
    if clusters and shuffle:
        group = _shuffled(_dense_rank(group), graph, num_graphs, draw)

    if num_bins == 1:
        index = _argsort(_packed(group, noise))
        begin = first
    else:
        # Nodes in random order are dealt out, and each bin is sorted by itself.
        index = _argsort(_packed(graph, noise))
        graph = graph[index]
        place = _arange(graph) - first[graph]
        part = graph * num_bins + place * num_bins // size[graph]
        group = group[index] if group.dim() == 1 else group.gather(1, index)
        index = index.gather(-1, _argsort(_packed(part, group)))
        part = torch.arange(num_bins, device=device)
        begin = (part * size.view(-1, 1) + num_bins - 1) // num_bins
        begin = (first.view(-1, 1) + begin).view(-1)

    begin = torch.arange(m, device=device).view(-1, 1) * num_nodes + begin
    ptr = torch.cat([begin.view(-1), begin.new_full((1,), m * num_nodes)])
    return NodeSequences(index.expand(m, num_nodes).reshape(-1), ptr)


def _check_sequences(
    score: Tensor | None,
    batch: Tensor | None,
    num_nodes: int | None,
    *,
    clusters: bool,
    generator: torch.Generator | None,
    seed: int | None,
    **numbers: int | None,
) -> tuple[torch.device, int]:
    """The device and the number of nodes, if everything is as it must be."""
    numbers = {"seed": seed, "num_nodes": num_nodes, **numbers}
    for name, number in numbers.items():
        if number is not None and not isinstance(number, (Integral, torch.SymInt)):
            raise TypeError(
                f"'{name}' must be an integer (got '{type(number).__name__}')"
            )
        may_be_0 = name == "num_nodes" or (name == "batch_size" and batch is not None)
        least = 0 if may_be_0 else 1
        if name != "seed" and number is not None and number < least:
            raise ValueError(f"'{name}' must be at least {least} (got {number})")

    if score is not None:
        if not isinstance(score, Tensor):
            raise TypeError(
                "'score' must be a tensor of shape [num_nodes] (got "
                f"'{type(score).__name__}')"
            )
        wanted = batch.numel() if num_nodes is None and batch is not None else num_nodes
        if score.dim() != 1 or wanted not in (None, score.size(0)):
            raise ValueError(
                "'score' must have one entry per node, shape "
                f"[{'num_nodes' if wanted is None else wanted}] (got shape "
                f"{list(score.shape)})"
            )
        if score.is_complex():
            raise TypeError(f"'score' must be real (got dtype {score.dtype})")
        device, num_nodes = score.device, score.size(0)
    elif batch is not None:
        device = batch.device
        num_nodes = batch.numel() if num_nodes is None else num_nodes
    elif num_nodes is not None:
        device = torch.device("cpu") if generator is None else generator.device
    else:
        raise ValueError("'num_nodes' must be given if 'score' and 'batch' are None")

    if clusters and (
        score is None or score.is_floating_point() or score.dtype == torch.bool
    ):
        got = "None" if score is None else f"dtype {score.dtype}"
        raise TypeError(
            "'score' must hold the integer numbers of clusters if 'clusters' is True "
            f"(got {got})"
        )
    if generator is not None and seed is not None:
        raise ValueError(
            "'generator' and 'seed' must not be given both; a seed makes the order "
            "reproducible, a generator is drawn from anew"
        )
    if generator is not None and generator.device.type != device.type:
        raise ValueError(
            f"'generator' must be of the device of 'score', {device} (got "
            f"{generator.device})"
        )
    if torch.compiler.is_compiling():  # values are not known
        return device, num_nodes
    if score is not None and bool(score.isnan().any()):
        raise ValueError(
            "'score' must not hold NaN (got "
            f"{int(score.isnan().sum())} of {num_nodes} entries)"
        )
    if batch is not None:
        check_batch(batch, num_nodes)
        size = numbers["batch_size"]
        if size is not None and num_nodes > 0 and int(batch.max()) >= size:
            raise ValueError(
                f"'batch' must hold numbers of graphs in [0, batch_size) = [0, {size}) "
                f"(got {int(batch.max())})"
            )
    return device, num_nodes


def _group(score: Tensor | None, graph: Tensor, num_graphs: int) -> Tensor:
    """Integers that sort as graph and score do, small enough to be packed."""
    if score is None:
        return graph
    score = score.detach()
    if not score.is_floating_point():
        score = score.long()
    num_ranks = score.numel()
    if score.dtype == torch.long and num_ranks > 0 and _may_look_at(score):
        low, high = (int(bound) for bound in score.aminmax())
        if num_graphs * (high - low + 1) <= 2**_FREE_BITS:
            return graph * (high - low + 1) + (score - low)
    group = graph * num_ranks + _dense_rank(score)
    return group if num_graphs * num_ranks <= 2**_FREE_BITS else _dense_rank(group)


def _shuffled(
    cluster: Tensor,
    graph: Tensor,
    num_graphs: int,
    draw: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Clusters, numbered from 0 on in ascending order of graphs, in another order."""
    graph_of = torch.full_like(graph, num_graphs).scatter_(0, cluster, graph)
    first = graph.new_full((num_graphs + 1,), graph.numel())
    first = first.scatter_reduce_(0, graph, cluster, "amin")
    order = _argsort(_packed(graph_of, draw(_arange(graph) - first[graph_of], 1)))
    shuffled = torch.empty_like(order)
    shuffled.scatter_(1, order, _arange(order).expand_as(order))
    return shuffled[:, cluster]


def _dense_rank(value: Tensor) -> Tensor:
    """How many different values are smaller."""
    value, order = torch.sort(value)
    rank = (value[1:] != value[:-1]).cumsum(0)
    return torch.zeros_like(order).scatter_(0, order[1:], rank)


def _place(graph: Tensor, first: Tensor) -> Tensor:
    """Each node's place among the nodes of its graph."""
    place = _arange(graph)
    if _may_look_at(graph) and bool((graph[1:] >= graph[:-1]).all()):
        return place - first[graph]
    order = _argsort(graph)
    return torch.empty_like(order).scatter_(0, order, place - first[graph[order]])


def _may_look_at(x: Tensor) -> bool:
    """Whether a choice may depend on values, which a GPU would have to wait for."""
    return x.is_cpu and not torch.compiler.is_compiling()


def _arange(like: Tensor) -> Tensor:
    return torch.arange(like.size(-1), device=like.device)


def _packed(high: Tensor, low: Tensor | None) -> Tensor:
    """Both in one key, as one sort is faster than two."""
    return high if low is None else (high << _BITS) + low


def _argsort(key: Tensor) -> Tensor:
    return torch.sort(key, dim=-1, stable=True).indices


def _hash(place: Tensor, num_permutations: int, seed: int, stream: int) -> Tensor:
    """A number for each permutation and place, no two alike in a permutation."""
    key = torch.arange(num_permutations, device=place.device).view(-1, 1)
    for word in (seed >> _BITS, seed, stream):
        key = _mix(key ^ (word & _MASK))
    return _mix(_mix(place) ^ key)


def _mix(x: Tensor) -> Tensor:
    """A bijection of the numbers of 32 bits, by products of less than 63."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


@njit(cache=True, nogil=True)
def breadth_first(ptr, neighbour):  # type: ignore[no-untyped-def]
    """The place of each node in searches from the first node of each component.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        neighbour (np.ndarray): The neighbours, which have their neighbours in turn.
    """
    n = ptr.shape[0] - 1
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    begin = 0
    for root in range(n):
        if seen[root] < 0:
            begin += search(ptr, neighbour, root, order[begin:], level, seen, 0)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    return place
