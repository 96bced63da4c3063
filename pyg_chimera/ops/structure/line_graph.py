"""The directed line graph of a DAG, whose nodes are the edges of the DAG."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.common.memory import CPU, check_memory, left_if_short, too_large
from pyg_chimera.ops.structure.csr import compress, runs, to_numpy
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.node_order import node_order
from pyg_chimera.ops.structure.registered import structural_op, unsized
from pyg_chimera.ops.structure.topological import topological_rank


class LineGraph(NamedTuple):
    r"""What :func:`line_graph` returns."""

    #: The line edges :math:`[2, |\mathcal{L}|]`, int64: row 0 is the edge of the DAG
    #: that is left, row 1 the edge that is entered.
    edge_index: Tensor
    #: The node :math:`[|\mathcal{L}|]`, int64, that both edges share: the target of
    #: the one that is left, the source of the one that is entered.
    node: Tensor


def line_graph(edge_index: Tensor, num_nodes: int) -> LineGraph:
    r"""The directed line graph of a directed acyclic graph.

    Its nodes, the *states* of `"pLSTM: parallelizable Linear Source Transition Mark
    networks" <https://arxiv.org/abs/2506.11997>`_, are the edges of the graph, and its
    edges are the pairs of consecutive edges:

    .. math::
        \mathcal{L} = \{ (e^{\prime}, e) \in \mathcal{E} \times \mathcal{E} :
        \textrm{target}(e^{\prime}) = \textrm{source}(e) \}

    Parallel edges are distinct states. Takes :math:`O(|\mathcal{V}| + |\mathcal{E}| +
    |\mathcal{L}|)` time, on the CPU.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`, in any order.
        num_nodes (int): The number of nodes.

    Returns:
        LineGraph: The line edges :obj:`edge_index`, int64 :math:`[2, |\mathcal{L}|]`,
        from :math:`e^{\prime}` to :math:`e`, and for each the :obj:`node` between the
        two, int64 :math:`[|\mathcal{L}|]`, on the device of :obj:`edge_index`. They
        are sorted by :math:`e^{\prime}`, then by :math:`e`.

    Raises:
        CycleError: If there is a cycle (self-loops included), which the error names.
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range, or line
            edges do not fit into memory, as at a node that many edges enter and leave.
        TypeError: If :obj:`edge_index` is not integer.
    """
    return LineGraph(*_line_graph(edge_index, num_nodes))


@structural_op(unsized((2, "edges"), ("edges",), (2, "lines")), sized=False)
def ordered_dags(
    edge_index: Tensor, num_nodes: int, order: str, turns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The two DAGs into which a node order divides any graph.

    One has the edges from earlier to later nodes, the other those from later to
    earlier ones. Self-loops are dropped. Along one DAG, two nodes are joined only if
    one is an ancestor of the other, which on a tree most are not. With turns, line
    edges also lead from an edge to an earlier node to one that leaves it for another
    later node. As none leads back, the line graph stays acyclic. After a breadth-first
    search, all nodes of a component are joined by way of the first one, if edges go
    both ways; on a tree, by their only path. Interconnection networks use such routes
    because they are free of deadlocks, as up*/down* routing (`"Autonet: A High-Speed,
    Self-Configuring Local Area Network Using Point-to-Point Links"
    <https://doi.org/10.1109/49.105178>`_).

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        order (str): The order, as in :func:`~pyg_chimera.ops.node_order`.
        turns (bool): Whether there are line edges between the DAGs.

    Returns:
        tuple: The edges of both DAGs as one graph, in their order in
        :obj:`edge_index`, int64 :math:`[2, |\mathcal{E}'|]`, where node :math:`v`
        becomes :math:`2v` in the DAG of the edges to later nodes, and :math:`2v + 1` in
        that of the others; the index of each in the graph's edges, int64
        :math:`[|\mathcal{E}'|]`; and the line edges of both DAGs, and the turns, int64
        :math:`[2, |\mathcal{L}|]`, all on the device of :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`order` is unknown, or :obj:`edge_index` has the wrong shape
            or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    place = node_order(edge_index, num_nodes, order)
    before, after = place[edge_index.long()]
    ids = (before != after).nonzero().view(-1)
    edges = 2 * edge_index.long() + (before > after)
    edges = edges.index_select(1, ids)
    source, target = to_numpy(edges)
    lines, _ = _consecutive(source, target, 2 * num_nodes)
    if turns:
        # From v in the second DAG on to v in the first; 2 V is where nothing begins.
        end = np.where(target % 2 == 1, target - 1, 2 * num_nodes)
        left, entered = _consecutive(source, end, 2 * num_nodes + 1)[0]
        onwards = source[left] - 1 != target[entered]
        turned = np.stack([left[onwards], entered[onwards]])
        lines = np.concatenate([lines, turned], axis=1)
    return edges, ids, torch.from_numpy(lines).to(edges.device)


@structural_op(lambda lines, _: lines.new_empty(lines.size(1), dtype=torch.bool))
def multitree(line_edge_index: Tensor, num_states: int) -> Tensor:
    r"""Chooses edges of a line graph so that at most one path joins any two states, as
    required by the distribution mode of `"pLSTM: parallelizable Linear Source
    Transition Mark networks" <https://arxiv.org/abs/2506.11997>`_.

    The choice is maximal (adding any removed edge would create a second path) and
    depends on the graph alone: states are visited by topological rank, then by number.
    Each keeps its incoming edges in the order of their source states, except those
    reached by a state that also reaches an edge kept before. Components are
    independent, so the result for a graph is the same in a batch as on its own.

    Sets of states are stored as bits, one for each of the :math:`S` states of a
    component. This takes :math:`O(|\mathcal{L}| S / 64)` time, on the CPU, and
    :math:`S / 8` bytes for each state that has further edges to come at a time: little
    on a path, a grid or a molecule, and at most :math:`S^2 / 8` bytes.

    Args:
        line_edge_index (torch.Tensor): The line edges, :math:`[2, |\mathcal{L}|]`,
            integer, from state to state, as returned by :func:`line_graph`. Of
            duplicates, at most the first is kept.
        num_states (int): The number of states, which are the edges of the DAG.

    Returns:
        torch.Tensor: Which line edges are kept, bool :math:`[|\mathcal{L}|]`, on the
        device of :obj:`line_edge_index`.

    Raises:
        CycleError: If there is a cycle (self-loops included), which the error names.
        ValueError: If :obj:`line_edge_index` has the wrong shape or is out of range.
        TypeError: If :obj:`line_edge_index` is not integer.
    """
    check_line_edges(line_edge_index, num_states)
    try:
        rank = to_numpy(topological_rank(line_edge_index, num_states))
    except CycleError as error:
        raise _cycle_of_states(error.cycle) from None
    component = to_numpy(connected_components(line_edge_index, num_states))
    source, target = to_numpy(line_edge_index)
    left = left_if_short(num_states**2 / 8, CPU)
    room = num_states**2 if left is None else int(left / 8)
    kept, words = _kept(source, target, rank, component, room)
    if left is not None and words > room:
        raise too_large(
            f"Which of {num_states:,} states reach one another",
            8 * words,
            left,
            "use mode='P' of 'PLSTMConv', which needs no multitree, or smaller graphs",
        )
    return torch.from_numpy(kept).to(line_edge_index.device)


def check_line_edges(line_edge_index: Tensor, num_states: int) -> None:
    """Checks line edges as `check_edge_index` does; states are edges of the graph."""
    check_edge_index(line_edge_index, num_states, "line_edge_index", "state")


def _cycle_of_states(cycle: list[int]) -> CycleError:
    shown = [*cycle, cycle[0]] if len(cycle) <= 12 else [*cycle[:12], "..."]
    error = CycleError(
        "'line_edge_index' must be acyclic, but has the cycle "
        + " -> ".join(map(str, shown))
        + " of states; the line graph of a DAG, as by 'line_graph', has none"
    )
    error.cycle = cycle
    return error


@structural_op(unsized((2, "lines"), ("lines",)), sized=False)
def _line_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    topological_rank(edge_index, num_nodes)  # Checks the edges too.
    source, target = to_numpy(edge_index)
    lines, node = map(torch.from_numpy, _consecutive(source, target, num_nodes))
    return lines.to(edge_index.device), node.to(edge_index.device)


def _consecutive(
    source: np.ndarray, target: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The line edges and their nodes, if there is room for them."""
    count = np.bincount(source, minlength=n)[target]
    total = int(count.sum())
    check_memory(
        f"{total:,} pairs of consecutive edges of {len(source):,}, most of them at "
        "nodes that many edges enter and leave,",
        48 * total,  # which are remembered and returned
        "use samples of the graph, a layer whose states are on nodes, such as "
        "'ChimeraDAGConv', or turns=False of 'PLSTMConv'",
    )
    edge = np.arange(len(source))
    ptr, leaving = compress(source, edge, n)
    lines = np.stack([edge.repeat(count), leaving[runs(ptr[target], count)]])
    return lines, target.repeat(count)


@compiled()
def _kept(source, target, rank, component, room):
    """Greedy selection, and the words of 64 bits that it takes, unless these are more
    than there is room for; a row of bits holds the states that reach a state.

    Rows are released once their last successor has used them.
    """
    n = rank.shape[0]
    num_lines = source.shape[0]
    kept = np.zeros(num_lines, np.bool_)
    if num_lines == 0:
        return kept, 0

    # Places: states by component, then rank, then number.
    num_components = component.max() + 1
    by_rank = compress(rank, np.arange(n), rank.max() + 1)[1]
    first, state = compress(component[by_rank], by_rank, num_components)
    place = np.empty(n, np.int64)
    for x in range(n):
        place[state[x]] = x
    by_source = compress(source, np.arange(num_lines), n)[1]
    in_ptr, incoming = compress(target[by_source], by_source, n)

    last = place.copy()  # where a state's row is last used
    for x in range(num_lines):
        last[source[x]] = max(last[source[x]], place[target[x]])
    done = np.zeros(n, np.int64)  # how many rows are last used at each place
    for i in range(n):
        done[last[i]] += 1
    num_bits, num_rows = 0, 0  # words of 64 bits, and rows, alive at a time
    for c in range(num_components):
        alive, most = 0, 0
        for x in range(first[c], first[c + 1]):
            alive += 1
            most = max(most, alive)
            alive -= done[x]
        words = (first[c + 1] - first[c] + 63) >> 6
        num_bits = max(num_bits, most * words)
        num_rows = max(num_rows, most)
    if num_bits > room:
        return kept, num_bits
    bits = np.empty(num_bits, np.int64)
    stack = np.empty(num_rows, np.int64)  # free rows
    row = np.full(n, -1, np.int64)  # where a state's row begins

    for c in range(num_components):
        begin, end = first[c], first[c + 1]
        words = (end - begin + 63) >> 6
        num_free = 0
        used = 0
        for x in range(begin, end):
            i = state[x]
            # Bits of later places are neither written nor read.
            width = ((x - begin) >> 6) + 1
            mine = -1
            for y in range(in_ptr[i], in_ptr[i + 1]):
                j = source[incoming[y]]
                theirs = row[j]
                if theirs < 0:  # a duplicate of an edge whose row has been taken over
                    continue
                theirs_width = ((place[j] - begin) >> 6) + 1
                if mine >= 0:
                    meet = False
                    for z in range(theirs_width - 1, -1, -1):  # likely near the end
                        if bits[mine + z] & bits[theirs + z] != 0:
                            meet = True
                            break
                    if meet:
                        continue
                    for z in range(theirs_width):
                        bits[mine + z] |= bits[theirs + z]
                    kept[incoming[y]] = True
                    continue
                kept[incoming[y]] = True
                if last[j] == x:
                    mine = theirs
                    row[j] = -1
                else:
                    if num_free > 0:
                        num_free -= 1
                        mine = stack[num_free]
                    else:
                        mine = used * words
                        used += 1
                    bits[mine : mine + theirs_width] = bits[
                        theirs : theirs + theirs_width
                    ]
                bits[mine + theirs_width : mine + width] = 0
            if mine < 0:
                if num_free > 0:
                    num_free -= 1
                    mine = stack[num_free]
                else:
                    mine = used * words
                    used += 1
                bits[mine : mine + width] = 0
            bits[mine + width - 1] |= np.int64(1) << ((x - begin) & 63)
            row[i] = mine
            for y in range(in_ptr[i], in_ptr[i + 1]):
                j = source[incoming[y]]
                if last[j] == x and row[j] >= 0:
                    stack[num_free] = row[j]
                    num_free += 1
                    row[j] = -1
            if last[i] == x:
                stack[num_free] = mine
                num_free += 1
                row[i] = -1
    return kept, num_bits
