"""The nodes of each graph as sequences, sorted by a score."""

from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import remembered
from pyg_chimera.ops.common.checks import check_batch, extremes, no_integer
from pyg_chimera.ops.common.portability import is_portable
from pyg_chimera.ops.common.torch_private import is_transforming

# Sort keys have the value in the upper and a random number in the lower half.
_BITS = 32
_MASK = 2**_BITS - 1
_FREE_BITS = 63 - _BITS


class NodeSequences(NamedTuple):
    r"""The nodes of one or several graphs as packed sequences, one after the other."""

    #: The node at each place, int64 :math:`[m |\mathcal{V}|]`, where :math:`m` is the
    #: number of permutations. Each of its :math:`m` parts of length
    #: :math:`|\mathcal{V}|` is a permutation of the nodes.
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    #: Where each of the :math:`S = m B K` sequences begins, and at last the end, int64
    #: :math:`[S + 1]`, for :math:`B` graphs of :math:`K` bins. Permutations come first,
    #: then graphs in the order of their labels, then bins. Sequences may be empty.
    ptr: Tensor


class _Options(NamedTuple):
    """The arguments of `node_sequences` but for tensors."""

    num_permutations: int
    num_bins: int
    clusters: bool
    shuffle: bool
    generator: torch.Generator | None
    seed: int | None


def node_sequences(
    score: Tensor,
    batch: Tensor | None = None,
    *,
    num_permutations: int = 1,
    num_bins: int = 1,
    clusters: bool = False,
    shuffle: bool = True,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> NodeSequences:
    r"""Sorts the nodes of each graph into sequences, as in `"Graph-Mamba: Towards
    Long-Range Graph Sequence Modeling with Selective State Spaces"
    <https://arxiv.org/abs/2402.00789>`_.

    Nodes are sorted by ascending score, so that important nodes come last and are
    influenced by most others. Nodes of the same score come in random order.

    Random numbers are drawn from :obj:`generator`, or else from PyTorch's global one,
    unless :obj:`seed` is given. Then the order depends only on :obj:`seed`, the index
    of the permutation and the graph, and is the same in every process, on every device,
    and in every batch.

    Takes :math:`O(m |\mathcal{V}| \log |\mathcal{V}|)` time on the device of
    :obj:`score`, whatever the labels of the graphs are. On the CPU, sequences with a
    :obj:`seed` are cached by the contents of :obj:`score` and :obj:`batch`. Without a
    :obj:`generator`, the function can be compiled as one graph.

    Args:
        score (torch.Tensor): The scores to sort by, :math:`[|\mathcal{V}|]`, of any
            real dtype.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. Graphs without nodes have no
            sequences; in a compiled graph, where their number is not known, empty
            sequences follow up to :math:`B = |\mathcal{V}|`. (default: :obj:`None`)
        num_permutations (int, optional): The number of orders :math:`m`.
            (default: :obj:`1`)
        num_bins (int, optional): The number :math:`K` of sequences into which the nodes
            of each graph are divided at random, each of them sorted. Their sizes differ
            by at most one. (default: :obj:`1`)
        clusters (bool, optional): If set to :obj:`True`, :obj:`score` holds the number
            of each node's cluster. The clusters of a graph then come in random order,
            and so do the nodes of a cluster. (default: :obj:`False`)
        shuffle (bool, optional): If set to :obj:`False`, nothing is random: nodes of
            the same score keep their order, bins are consecutive nodes, and clusters
            are in order of their numbers. (default: :obj:`True`)
        generator (torch.Generator, optional): The random number generator.
            (default: :obj:`None`)
        seed (int, optional): Makes the order reproducible. (default: :obj:`None`)

    Returns:
        NodeSequences: The node at each position, int64 :math:`[m |\mathcal{V}|]`, and
        where each sequence begins, int64 :math:`[m B K + 1]`, on the device of
        :obj:`score`.

    Raises:
        ValueError: If :obj:`score` contains NaN, a shape is wrong, a number is too
            small or too large, an entry of :obj:`batch` is out of range, devices
            differ, or both a generator and a seed are given.
        TypeError: If :obj:`score` or :obj:`batch` is not a tensor, :obj:`batch` or
            clusters are not integer, :obj:`score` is complex, or a number is not an
            integer.
    """
    options = _Options(num_permutations, num_bins, clusters, shuffle, generator, seed)
    _check_sequences(score, batch, options)
    traced = torch.compiler.is_compiling()  # then, or in transforms, no contents
    traced = traced or is_transforming()
    if seed is None or not score.is_cpu or traced:
        return _sequences(score, batch, options)
    index, ptr = remembered(_sequences, (score, batch), options)
    return NodeSequences(index.clone(), ptr.clone())


def _sequences(score: Tensor, batch: Tensor | None, options: _Options) -> NodeSequences:
    m, num_bins, *_, generator, seed = options
    device, num_nodes = score.device, score.size(0)
    graph, num_graphs = torch.zeros_like(score, dtype=torch.long), 1
    if batch is not None:
        graph, num_graphs = _numbered(batch.long())
    size = graph.new_zeros(num_graphs).scatter_add_(0, graph, torch.ones_like(graph))
    first = size.cumsum(0) - size

    def draw(place: Tensor, stream: int) -> Tensor:
        """A random number for each permutation and node."""
        if seed is not None:
            return _hash(place, m, seed, stream)
        shape = (m, num_nodes)
        if generator is None:  # even `generator=None` breaks compilation for all sizes
            return torch.randint(2**_BITS, shape, device=device)
        return torch.randint(2**_BITS, shape, generator=generator, device=device)

    noise = draw(_place(graph, first), 0) if options.shuffle else None
    group = _group(score, graph, num_graphs)
    if options.clusters and options.shuffle:
        group = _shuffled(dense_rank(group), graph, num_graphs, draw)

    if num_bins == 1:
        index = _argsort(_packed(group, noise))
        begin = first
    else:
        # Shuffle the nodes of a graph, split them into bins, and sort each bin.
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


def _check_sequences(score: Tensor, batch: Tensor | None, options: _Options) -> None:
    for name, x in {"score": score, "batch": batch}.items():
        if not isinstance(x, Tensor) and (name == "score" or x is not None):
            raise TypeError(
                f"'{name}' must be a tensor of shape [num_nodes], got "
                f"'{type(x).__name__}'"
            )
    m, num_bins, *_ = options
    numbers = {"num_permutations": m, "num_bins": num_bins}
    for name, number in {**numbers, "seed": options.seed}.items():
        if number is None:
            continue
        if not isinstance(number, (Integral, torch.SymInt)):
            raise no_integer(name, number)
        if name != "seed" and number < 1:
            raise ValueError(f"'{name}' must be at least 1, got {number}")

    wanted = "num_nodes" if batch is None else batch.numel()
    if score.dim() != 1 or (batch is not None and wanted != score.size(0)):
        raise ValueError(
            f"'score' must have one entry per node, shape [{wanted}], got shape "
            f"{list(score.shape)}"
        )
    if score.is_complex():
        raise TypeError(f"'score' must be real, got dtype {score.dtype}")
    if options.clusters and (score.is_floating_point() or score.dtype == torch.bool):
        raise TypeError(
            "'score' must hold the integer numbers of clusters if 'clusters' is True, "
            f"got dtype {score.dtype}"
        )
    if options.generator is not None and options.seed is not None:
        raise ValueError(
            "'generator' and 'seed' must not be given both; a seed makes the order "
            "reproducible, a generator is drawn from anew"
        )
    for name, given in {"generator": options.generator, "batch": batch}.items():
        if given is not None and given.device.type != score.device.type:
            raise ValueError(
                f"'{name}' must be of the device of 'score', {score.device}, got "
                f"{given.device}"
            )
    if torch.compiler.is_compiling():  # values and sizes are unknown
        return
    num_nodes = score.size(0)
    if m * max(num_nodes, num_bins) >= 2**31:
        raise ValueError(
            "'num_permutations' times 'num_bins', or times the number of nodes, must "
            f"be less than 2**31, got {num_nodes} nodes and {numbers}"
        )
    if bool(score.isnan().any()):
        raise ValueError(
            "'score' must not hold NaN, got "
            f"{int(score.isnan().sum())} of {num_nodes} entries"
        )
    if batch is not None:
        check_batch(batch, num_nodes)


def _numbered(graph: Tensor) -> tuple[Tensor, int]:
    """The number of each node's graph among those with nodes, and their number."""
    if torch.compiler.is_compiling():
        return dense_rank(graph), graph.size(0)
    num_graphs = int(graph.max()) + 1 if graph.numel() > 0 else 0
    if num_graphs <= graph.numel():
        seen = torch.zeros(num_graphs, dtype=torch.bool, device=graph.device)
        if bool(seen.index_fill_(0, graph, True).all()):
            return graph, num_graphs
    graph = dense_rank(graph)
    return graph, int(graph.max()) + 1


def _group(score: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
    """Integers that sort like (graph, score), small enough for a packed key."""
    score = score.detach()
    if score.is_floating_point() and score.element_size() == 1:
        score = score.float()  # 8-bit floats can't be sorted
    if not score.is_floating_point():
        score = score.long()
    num_ranks = score.numel()
    if score.dtype == torch.long and num_ranks > 0 and _may_look_at(score):
        low, high = extremes(score)
        if num_graphs * (high - low + 1) <= 2**_FREE_BITS:
            return graph * (high - low + 1) + (score - low)
    group = graph * num_ranks + dense_rank(score)
    # When compiling, sizes may be unknown.
    if torch.compiler.is_compiling() or num_graphs * num_ranks > 2**_FREE_BITS:
        return dense_rank(group)
    return group


def _shuffled(
    cluster: Tensor,
    graph: Tensor,
    num_graphs: int,
    draw: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Clusters, numbered from 0 on by graph, permuted within each graph."""
    graph_of = torch.full_like(graph, num_graphs).scatter_(0, cluster, graph)
    first = graph.new_full((num_graphs + 1,), graph.numel())
    first = first.scatter_reduce_(0, graph, cluster, "amin")
    order = _argsort(_packed(graph_of, draw(_arange(graph) - first[graph_of], 1)))
    shuffled = torch.empty_like(order)
    shuffled.scatter_(1, order, _arange(order).expand_as(order))
    return shuffled[:, cluster]


def dense_rank(value: Tensor) -> Tensor:
    """How many distinct values in its row are smaller."""
    value, order = torch.sort(value)
    # From 1 on, or all 0 if all are equal.
    rank = (value != value.roll(1, -1)).cumsum(-1)
    return torch.empty_like(order).scatter_(-1, order, rank - rank[..., :1])


def _place(graph: Tensor, first: Tensor) -> Tensor:
    """Each node's index among the nodes of its graph."""
    place = _arange(graph)
    if _may_look_at(graph) and bool((graph[1:] >= graph[:-1]).all()):
        return place - first[graph]
    order = _argsort(graph)
    return torch.empty_like(order).scatter_(0, order, place - first[graph[order]])


def _may_look_at(x: Tensor) -> bool:
    """Whether code may branch on values: not on a GPU, which would have to sync."""
    return x.is_cpu and not torch.compiler.is_compiling()


def _arange(like: Tensor) -> Tensor:
    return torch.arange(like.size(-1), device=like.device)


def _packed(high: Tensor, low: Tensor | None) -> Tensor:
    """A key for both, as one sort is faster than two."""
    return high if low is None else (high << _BITS) + low


def _argsort(key: Tensor) -> Tensor:
    if is_portable():  # without ties, as exporters do not know stable sorts
        key = dense_rank(key) * key.size(-1) + _arange(key)
        return torch.sort(key, dim=-1).indices
    return torch.sort(key, dim=-1, stable=True).indices


def _hash(place: Tensor, num_permutations: int, seed: int, stream: int) -> Tensor:
    """Pseudo-random numbers, distinct within each permutation."""
    key = torch.arange(num_permutations, device=place.device).view(-1, 1)
    for word in (seed // 2**_BITS, seed, stream):
        key = _mix(key ^ (word % 2**_BITS))
    return _mix(_mix(place) ^ key)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers; its products fit in 63 bits."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
