"""The graph of states that a scan runs on, for edges of a DAG and for grids."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GridStates", "States", "edge_states", "expanded_states", "grid_states"]


class States(NamedTuple):
    """States, each written by one node and read by one node, and how they move."""

    writer: Tensor  #: [S], the node that writes each state
    reader: Tensor  #: [S], the node that reads it
    edge_index: Tensor  #: [2, L], from state to state, acyclic


class GridStates(NamedTuple):
    """The states of a batch of grids, and the gates that belong to them."""

    states: States
    source: Tensor  #: [S], of each state in a flattened [V, O, 2]
    mark: Tensor  #: [S], the same
    transition: Tensor  #: [L], of each edge in a flattened [V, O, 2, 2]


def edge_states(edge_index: Tensor, line_edge_index: Tensor) -> States:
    """A state for each edge of a DAG: written by its source, read by its target."""
    return States(edge_index[0], edge_index[1], line_edge_index)


def expanded_states(states: States, size: int) -> States:
    """Each state in `size` components, all of which an edge joins to all."""
    if size == 1:
        return states
    component = torch.arange(size, device=states.writer.device)
    tail, head = states.edge_index * size
    tail, head = torch.broadcast_tensors(
        tail.view(-1, 1, 1) + component, head.view(-1, 1, 1) + component.view(-1, 1)
    )
    return States(
        states.writer.repeat_interleave(size),
        states.reader.repeat_interleave(size),
        torch.stack([tail.flatten(), head.flatten()]),
    )


#: Where orientation 0, 1, 2, 3 leads along the row (width) and the column (height).
_STEPS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


@lru_cache(maxsize=64)
def _one_grid(height: int, width: int, num_orientations: int) -> GridStates:
    node = torch.arange(height * width).view(height, width)
    writers, readers, sources, marks, tails, heads, turns = ([] for _ in range(7))
    first = 0
    for o, (right, down) in enumerate(_STEPS[:num_orientations]):
        leaving, arriving = [], []  # the state in each direction, by node, or -1
        for d, (step, axis) in enumerate(((right, 1), (down, 0))):
            size = node.size(axis)
            start, stop = (0, 1) if step > 0 else (1, 0)
            length = max(size - 1, 0)
            writer = node.narrow(axis, start if size > 1 else 0, length)
            reader = node.narrow(axis, stop if size > 1 else 0, length)
            state = first + torch.arange(writer.numel()).view_as(writer)
            first += writer.numel()
            out, arrived = torch.full_like(node, -1), torch.full_like(node, -1)
            out.view(-1)[writer.flatten()] = state.flatten()
            arrived.view(-1)[reader.flatten()] = state.flatten()
            leaving.append(out.view(-1))
            arriving.append(arrived.view(-1))
            writers.append(writer.flatten())
            readers.append(reader.flatten())
            gate = 2 * num_orientations
            sources.append(writer.flatten() * gate + 2 * o + d)
            marks.append(reader.flatten() * gate + 2 * o + d)
        for to in range(2):
            for origin in range(2):
                both = (leaving[to] >= 0) & (arriving[origin] >= 0)
                tails.append(arriving[origin][both])
                heads.append(leaving[to][both])
                at = node.view(-1)[both] * num_orientations + o
                turns.append(4 * at + 2 * to + origin)
    states = States(
        torch.cat(writers), torch.cat(readers),
        torch.stack([torch.cat(tails), torch.cat(heads)]),
    )  # fmt: skip
    return GridStates(states, torch.cat(sources), torch.cat(marks), torch.cat(turns))


def grid_states(
    sizes: tuple[tuple[int, int], ...], num_orientations: int
) -> GridStates:
    """The states of grids, (height, width) each."""
    parts = [_one_grid(*size, num_orientations) for size in sizes]
    nodes = torch.tensor([0, *(height * width for height, width in sizes)]).cumsum(0)
    states = torch.tensor([0, *(len(x.source) for x in parts)]).cumsum(0)
    pairs = [(x, int(n), int(s)) for x, n, s in zip(parts, nodes, states, strict=False)]
    gates = 2 * num_orientations
    if not pairs:
        empty = torch.empty(0, dtype=torch.int64)
        nothing = States(empty, empty, empty.view(1, 0).repeat(2, 1))
        return GridStates(nothing, empty, empty, empty)
    return GridStates(
        States(
            torch.cat([x.states.writer + n for x, n, _ in pairs]),
            torch.cat([x.states.reader + n for x, n, _ in pairs]),
            torch.cat([x.states.edge_index + s for x, _, s in pairs], dim=1),
        ),
        torch.cat([x.source + n * gates for x, n, _ in pairs]),
        torch.cat([x.mark + n * gates for x, n, _ in pairs]),
        torch.cat([x.transition + 2 * n * gates for x, n, _ in pairs]),
    )
