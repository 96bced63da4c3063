"""Operators beside the plainer ways to compute the same.

Forward and backward in float32, gradients of all inputs::

    python benchmarks/decisions.py                  # two minutes: all rows
    python benchmarks/decisions.py --only "64 grids of 8 x 8"
    python benchmarks/decisions.py --smoke

Prints the table of the documentation. The last way of a row is computed in float64,
too, and outputs and gradients of all ways are compared with it: nothing is timed that
differs.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from options import add_rows, measure_rows
from steps import Step, compare
from timing import interleave, ratio, show, shown, summary
from torch import Tensor
from torch_geometric.utils import (
    scatter,
    softmax,
    to_dense_adj,
    to_dense_batch,
    unbatch,
    unbatch_edge_index,
)
from workloads import Workload, peptides

from pyg_chimera.ops import (
    channel_scan,
    grid_scan,
    k_hop_index,
    line_graph,
    neighborhood_attention,
    resolvent_mix,
    selective_scan,
    stm_scan,
)
from pyg_chimera.ops.recurrence.plan.states import GridStates
from pyg_chimera.ops.structure import topological_rank

HEADS, STATES = 4, 16
WIDTH = HEADS * STATES


class Row(NamedTuple):
    """Ways to compute the same: ours first."""

    name: str
    ways: dict[str, Callable[..., Tensor]]  #: they take the tensors by name
    tensors: dict[str, Tensor]  #: all get gradients


# Plainer ways --------------------------------------------------------------------


def inverses(edge_index: Tensor, batch: Tensor, **tensors: Tensor) -> Tensor:
    """`resolvent_mix` by dense inverses in float64, graph by graph and head by head."""
    weight = unbatch(tensors["edge_weight"].double(), batch[edge_index[0]])
    nodes = (unbatch(tensors[x].double(), batch) for x in ("query", "key", "value"))
    outs = []
    for index, w, *qkv in zip(
        unbatch_edge_index(edge_index, batch), weight, *nodes, strict=True
    ):
        n = len(qkv[0])
        A = to_dense_adj(index, edge_attr=w, max_num_nodes=n)[0].permute(2, 1, 0)
        L = torch.stack([torch.linalg.inv(torch.eye(n).double() - a) for a in A])
        q, k, v = (x.transpose(0, 1) for x in qkv)
        outs.append(((L * (q @ k.mT)) @ v).transpose(0, 1))
    return torch.cat(outs).to(tensors["value"].dtype)


def edge_by_edge(edge_index: Tensor, lines: Tensor, **tensors: Tensor) -> Tensor:
    """`stm_scan` as a loop over edges with a list of states, as people write it.

    Nodes and gates are unbound once: indexing them in the loop would make the backward
    pass quadratic.
    """
    query, key, value = (tensors[x] for x in ("query", "key", "value"))
    source, turn, mark = (
        tensors[x][..., None].unbind() for x in ("source", "transition", "mark")
    )
    before: list[list[tuple[int, int]]] = [[] for _ in source]
    for line, (tail, head) in enumerate(lines.t().tolist()):
        before[head].append((tail, line))
    writer, reader = edge_index.tolist()
    out = ((query * key).sum(-1) * tensors["direct"]).unsqueeze(-1) * value
    q, k, v = query.unbind(), key.unbind(), value.unsqueeze(-2).unbind()
    states: dict[int, Tensor] = {}
    reads: dict[int, Tensor] = {}
    for e in topological_rank(lines, len(source)).argsort().tolist():
        state = (source[e] * k[writer[e]]).unsqueeze(-1) * v[writer[e]]
        for tail, line in before[e]:
            state = state + turn[line].unsqueeze(-1) * states[tail]
        states[e] = state
        reads[e] = ((mark[e] * q[reader[e]]).unsqueeze(-2) @ state).squeeze(-2)
    read = torch.stack([reads[e] for e in range(len(reads))])
    return out.index_add(0, edge_index[1], read)


def on_edges_of_grids(count: int, side: int) -> Callable[..., Tensor]:
    """`grid_scan` as `stm_scan` over the edges of all orientations."""
    sides = (side, side) * count
    graph = GridStates(sides, tuple(range(4)), on_nodes=False).graph
    assert graph.gates is not None
    lines = np.empty((2, len(graph.parents.col)), np.int64)
    lines[:, graph.parents.entry] = (
        graph.state[graph.parents.col],
        graph.state[graph.parents.row],
    )
    edges = torch.from_numpy(np.stack([graph.writer, graph.reader]))
    source, mark, turn = map(torch.from_numpy, graph.gates)
    batch = torch.arange(count).repeat_interleave(side * side)

    def run(query, key, value, direct, **gates: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return stm_scan(
            query, key, value, gates["source"].flatten(0, 2)[source],
            gates["transition"].flatten(0, 3)[turn], gates["mark"].flatten(0, 2)[mark],
            direct, edges, torch.from_numpy(lines), batch,
        )  # fmt: skip

    return run


def step_by_step(batch: Tensor, u, delta, A, B, C) -> Tensor:  # type: ignore[no-untyped-def]
    """`selective_scan` as a loop over the steps of padded sequences."""
    padded = [to_dense_batch(x, batch) for x in (u * delta, delta, B, C)]
    real = padded[0][1]
    h, reads = u.new_zeros(len(real), *A.shape), []
    for write, d, b, c in zip(*(x.unbind(1) for x, _ in padded), strict=True):
        h = torch.exp(d.unsqueeze(-1) * A) * h + write.unsqueeze(-1) * b.unsqueeze(1)
        reads.append((h @ c.unsqueeze(-1)).squeeze(-1))
    return torch.stack(reads, dim=1)[real]


def channel_by_channel(path: Tensor, u, delta, A, B, C) -> Tensor:  # type: ignore[no-untyped-def]
    """`selective_scan` by `channel_scan`, which gets decays and inputs of all states,
    and returns the states.
    """
    decay = torch.exp(delta.unsqueeze(-1) * A)
    write = (delta * u).unsqueeze(-1) * B.unsqueeze(1)
    h = channel_scan(write.flatten(1), path, decay=decay.flatten(1))
    return (h.view_as(decay) @ C.unsqueeze(-1)).squeeze(-1)


def softmax_by_edges(pairs: Tensor, query, key, value) -> Tensor:  # type: ignore[no-untyped-def]
    """`neighborhood_attention` with a row for each pair, as PyG's `TransformerConv`."""
    source, target = pairs
    logits = (query[target] * key[source]).sum(-1) / query.size(-1) ** 0.5
    weight = softmax(logits, target, num_nodes=query.size(0))
    return scatter(value[source] * weight.unsqueeze(-1), target, 0, query.size(0))


# Rows ----------------------------------------------------------------------------


def qkv(nodes: int, heads: int = HEADS, states: int = STATES) -> dict[str, Tensor]:
    """Queries of length one or so, keys, and values of as many channels in all."""
    query, key = torch.randn(2, nodes, heads, states)
    value = torch.randn(nodes, heads, WIDTH // heads)
    return {"query": query / states**0.5, "key": key, "value": value}


def gates(states: tuple[int, ...], turns: tuple[int, ...], nodes: int) -> dict:
    """Gates of `stm_scan` and `grid_scan` in [0, 1]."""
    turn = torch.rand(*turns, HEADS)
    if len(turns) > 1:  # of grids; states grow if both turns are near one
        turn[..., 1, :] = 1 - turn[..., 0, :]
    return {
        "source": torch.rand(*states, HEADS),
        "transition": turn,
        "mark": torch.rand(*states, HEADS),
        "direct": torch.rand(nodes, HEADS),
    }


def resolvents(graph: Workload, name: str, own: str, *others: str) -> Row:
    """`resolvent_mix` with two heads of 96 states: in a form, others, and by inverses,
    if there is no other.
    """
    edge_index, batch = graph.edge_index, graph.batch
    degree = edge_index[1].bincount(minlength=len(batch))[edge_index[1], None]
    fixed = {"edge_index": edge_index, "batch": batch}
    ways = {
        f'resolvent_mix(form="{form}")': partial(resolvent_mix, form=form, **fixed)
        for form in (own, *others)
    }
    if not others:
        ways = {"resolvent_mix": ways.popitem()[1]}
        ways["float64 inverses, graph by graph"] = partial(inverses, **fixed)
    weight = 0.9 * torch.rand(edge_index.size(1), 2) / degree
    return Row(name, ways, qkv(len(batch), 2, 96) | {"edge_weight": weight})


def on_edges(graph: Workload, name: str) -> Row:
    """`stm_scan` along edges to later nodes."""
    edges = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    lines = line_graph(edges, graph.num_nodes).edge_index
    scan = partial(stm_scan, edge_index=edges, line_edge_index=lines, batch=graph.batch)
    loop = partial(edge_by_edge, edges, lines)
    sizes = (edges.size(1),), (lines.size(1),), graph.num_nodes
    tensors = qkv(graph.num_nodes) | gates(*sizes)
    return Row(name, {"stm_scan": scan, "a loop over edges": loop}, tensors)


def on_grids(count: int, side: int, *forms: str) -> Row:
    """`grid_scan`: in some forms, or beside `stm_scan`."""
    scan = partial(grid_scan, height=side, width=side)
    ways: dict[str, Callable[..., Tensor]] = {
        f'grid_scan(form="{form}")': partial(scan, form=form) for form in forms
    }
    if not forms:
        ways = {
            "grid_scan": scan,
            "`stm_scan` of the same states": on_edges_of_grids(count, side),
        }
    nodes = count * side * side
    tensors = qkv(nodes) | gates((nodes, 4, 2), (nodes, 4, 2, 2), nodes)
    name = f"{count} grid{'s' * (count > 1)} of {side} x {side}"
    return Row(name, ways, tensors)


def on_sequences(batch: Tensor, name: str, path: bool) -> Row:
    """`selective_scan` with step sizes and rates of a new layer."""
    ptr = F.pad(batch.bincount().cumsum(0), (1, 0))
    ways: dict[str, Callable[..., Tensor]] = {
        "selective_scan": partial(selective_scan, ptr=ptr)
    }
    if path:
        node = torch.arange(len(batch))
        index = torch.stack([node[:-1], node[1:]])
        ways["`channel_scan` of all states"] = partial(channel_by_channel, index)
    else:
        ways["its PyTorch backend"] = partial(selective_scan, ptr=ptr, backend="torch")
        ways["a loop over steps"] = partial(step_by_step, batch)
    B, C = torch.randn(2, len(batch), STATES)
    tensors = {
        "u": torch.randn(len(batch), 96),
        "delta": F.softplus(torch.randn(len(batch), 96) - 4.5),
        "A": -torch.arange(1.0, STATES + 1).repeat(96, 1),
        "B": B,
        "C": C,
    }
    return Row(name, ways, tensors)


def on_pairs(pairs: Tensor, nodes: int, name: str) -> Row:
    """`neighborhood_attention` of pairs of nodes."""
    ways = {
        "neighborhood_attention": partial(neighborhood_attention, edge_index=pairs),
        "rows for pairs, as in PyG": partial(softmax_by_edges, pairs),
    }
    return Row(name, ways, qkv(nodes))


def rows(args: Namespace) -> Iterator[Row]:
    """All rows."""
    smoke = args.smoke
    count, length = (2, 40) if smoke else (64, 4096)
    sides = (3, 5, 2, 4) if smoke else (16, 64, 8, 12)
    graph = next(iter(peptides(args.root, [count], smoke)))
    name = f"{count} peptides"
    yield resolvents(graph, f"{name}, 2 heads of 96", "auto")
    small = torch.arange(count).repeat_interleave(25)
    ring = torch.arange(25).roll(1) + 25 * torch.arange(count)[:, None]
    half = torch.stack([torch.arange(25 * count), ring.flatten()])
    rings = Workload("rings", torch.cat([half, half.flip(0)], 1), small)
    yield resolvents(rings, f"{count} rings of 25, 2 heads of 96", "mask", "state")
    yield on_edges(graph, name)
    yield on_grids(1, sides[0])
    yield on_grids(1, sides[1])
    yield on_grids(count, sides[2], "mask", "state")
    yield on_grids(count // 2, sides[3], "mask", "state")
    yield on_sequences(graph.batch, f"nodes of {name}", path=False)
    one = torch.zeros(length, dtype=torch.long)
    yield on_sequences(one, f"{length:,} nodes of a path", path=True)
    pairs = k_hop_index(graph.edge_index, graph.num_nodes, 4).edge_index
    yield on_pairs(pairs, graph.num_nodes, f"pairs 4 steps apart in {name}")


# Measurements --------------------------------------------------------------------


def step(row: Row, way: str, dtype: torch.dtype) -> Step:
    """A forward and a backward pass."""
    leaves = {x: y.to(dtype).clone().requires_grad_() for x, y in row.tensors.items()}
    like = row.tensors["value" if "value" in row.tensors else "u"]
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
    return Step(lambda: row.ways[way](**leaves), leaves, grad.to(dtype))


def measure(row: Row, args: Namespace) -> dict[str, Any]:
    """Errors, times, and how much longer other ways take than ours."""
    show(row.name)
    ours, *_, last = row.ways
    exact = step(row, last, torch.float64).results()
    steps = {way: step(row, way, torch.float32) for way in row.ways}
    against = f"float64 {last}"
    errors = {
        way: compare(way, row.name, x.results(), exact, against)["worst"]
        for way, x in steps.items()
    }
    rounds = interleave(steps, args.repeats, args.limit)
    return {
        "name": row.name,
        "errors": errors,
        "times": {way: summary(x) for way, x in rounds.items()},
        "ratios": {way: ratio(x, rounds[ours]) for way, x in rounds.items()},
    }


def report(results: list[dict[str, Any]]) -> str:
    """The table of the documentation, in Markdown."""
    lines = ["| on | ours | instead | ratio |", "| --- | --- | --- | --- |"]
    for row in results:
        (ours, time), *others = (
            (way, shown(x["total"]["median"])) for way, x in row["times"].items()
        )
        for way, instead in others:
            ratio = f"{1 / row['ratios'][way]:.2g}"
            other = f"`{way}`" if "(" in way else way
            cells = f"`{ours}` {time} | {other} {instead} | {ratio}"
            lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add_rows(parser)
    args = parser.parse_args()
    if args.smoke:
        args.repeats = 1
    torch.manual_seed(0)
    named = ((row.name, row) for row in rows(args))
    measure_rows("decisions", named, lambda _, row: measure(row, args), report, args)


if __name__ == "__main__":
    main()
