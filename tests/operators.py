"""The operators as their suite sees them: inputs, options, and an oracle for each.

An oracle is written from the formula alone, in float64, and shares nothing with the
library, its reference backends included.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from asserts import assert_near, tolerance
from hypothesis import strategies as st
from strategies import Batch, batches, dags, paths
from torch import Tensor

from pyg_chimera import ops
from pyg_chimera.ops.common import triton_runtime

# -------------------------------------------------------------------------- structures


class Structure(NamedTuple):
    """A batch: edges (and line edges), or the sizes of its grids or sequences."""

    graph: Tensor  #: of each node
    edge_index: Tensor | None = None
    line_edge_index: Tensor | None = None
    sizes: tuple = ()  #: (height, width) of each grid, or the length of each sequence

    def graph_of(self, axis: str) -> Tensor:
        """The graph of each node, edge or line edge."""
        if axis == "node":
            return self.graph
        first = self.edge_index[0]
        return self.graph[first if axis == "edge" else first[self.line_edge_index[0]]]

    @property
    def axes(self) -> tuple[str, ...]:
        return ("node", "edge", "line")[: 3 - self[1:3].count(None)]


def line_edges(edge_index: Tensor) -> Tensor:
    """All pairs of an edge and one that begins where it ends."""
    return (edge_index[1, :, None] == edge_index[0]).nonzero().t().contiguous()


def structure(
    edges: Sequence[tuple[int, int]] | Tensor,
    num_nodes: int,
    graph: Sequence[int] | Tensor | None = None,
) -> Structure:
    """A batch of graphs, all nodes in one of them by default."""
    if not isinstance(edges, Tensor):
        edges = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    graph = torch.as_tensor([0] * num_nodes if graph is None else graph).long()
    return Structure(graph, edges)


def _with_lines(graphs: Structure) -> Structure:
    return graphs._replace(line_edge_index=line_edges(graphs.edge_index))


def _sized(sizes: Sequence) -> Structure:
    """A batch of grids or sequences."""
    counts = [x[0] * x[1] if isinstance(x, tuple) else x for x in sizes]
    graph = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts).long())
    return Structure(graph, sizes=tuple(sizes))


def _blocks_of(sizes: Sequence[int], acyclic: bool) -> Structure:
    """Sparse graphs with mixed up numbers."""
    generator = torch.Generator().manual_seed(1)
    edges, batch = [], []
    for graph, size in enumerate(sizes):
        first = len(batch)
        batch += [graph] * size
        for i in range(1, size):
            parents = torch.randint(i, (1 + i % 2,), generator=generator).tolist()
            edges += [(first + j, first + i) for j in parents]
            if not acyclic:
                edges += [(first + i, first + j) for j in parents]
    name = torch.randperm(len(batch), generator=generator)
    mixed = name[torch.tensor(edges).t()]
    return structure(mixed, len(batch), torch.tensor(batch)[name.argsort()])


def grids_of(*sizes: tuple[int, int]) -> Structure:
    """Undirected grids, whose supernodes have supernodes above and below."""
    node, pairs, graph = 0, [], []
    for g, (height, width) in enumerate(sizes):
        at = node + torch.arange(height * width).view(height, width)
        pairs += [torch.stack([at[:, :-1].flatten(), at[:, 1:].flatten()])]
        pairs += [torch.stack([at[:-1].flatten(), at[1:].flatten()])]
        node, graph = node + at.numel(), [*graph, *[g] * at.numel()]
    edges = torch.cat(pairs, 1)
    return structure(torch.cat([edges, edges.flip(0)], 1), node, graph)


#: Of larger graphs than kernels take at a time.
_LARGE = (40, 36, 33, 34, 5)
#: Any graph is fine for `resolvent_mix` ...
GRAPHS = {
    "zero_nodes": structure([], 0),
    "one_node": structure([], 1),
    "one_loop": structure([(0, 0)], 1),
    "no_edges": structure([], 4, [0, 1, 1, 0]),
    # Two components, an isolated node, self-loops and duplicate edges.
    "mixed": structure(
        [(0, 1), (1, 0), (1, 2), (2, 2), (2, 2), (2, 0), (0, 1), (5, 4), (4, 5)], 7
    ),
    "unsorted_batch": structure(  # graph 2 has no nodes
        [(0, 2), (2, 6), (6, 0), (6, 2), (1, 5), (5, 3), (5, 5), (3, 1), (1, 5)],
        7,
        [1, 0, 1, 0, 3, 0, 1],
    ),
    "several_blocks": _blocks_of(_LARGE, acyclic=False),
}
#: ... these for `dag_scan` and `stm_scan`.
DAGS = {
    **{name: GRAPHS[name] for name in ("zero_nodes", "one_node", "no_edges")},
    # Duplicate edges against the order of nodes, an isolated node.
    "diamonds": structure(
        [(5, 3), (5, 3), (3, 0), (5, 1), (1, 0), (5, 0), (2, 6), (0, 6)], 7
    ),
    "unsorted_batch": structure(
        [(0, 2), (2, 6), (0, 6), (5, 1), (3, 1), (5, 3), (5, 3)],
        7,
        [1, 0, 1, 0, 3, 0, 1],
    ),
    "several_blocks": _blocks_of(_LARGE, acyclic=True),
}
GRIDS = {
    "none": _sized([]),
    "one_node": _sized([(1, 1)]),
    "alike": _sized([(2, 3), (2, 3)]),
    "several": _sized([(1, 5), (4, 1), (1, 1), (2, 3)]),
    "several_blocks": _sized([(9, 7), (6, 8)]),
}
#: Odd lengths, spans and blocks of the kernels.
SEQUENCES = {
    "none": _sized([]),
    "empty": _sized([0]),
    "one_row": _sized([1]),
    "several": _sized([5, 0, 1, 7, 0]),
    "spans": _sized([31, 32, 33, 63, 2]),
    "several_blocks": _sized([150, 3, 129, 1]),
}


def _paths_of(*lengths: int, undirected: bool = False) -> Structure:
    """Paths with mixed up numbers of nodes and edges, each a graph."""
    generator = torch.Generator().manual_seed(2)
    graph = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    first = (graph[1:] == graph[:-1]).nonzero().view(-1)
    edges = torch.stack([first, first + 1])
    if undirected:
        loops = torch.arange(0, len(graph), 3).expand(2, -1)
        edges = torch.cat([edges, edges[:, 2:].flip(0), edges[:, :1], loops], 1)
    name = torch.randperm(len(graph), generator=generator)
    order = torch.randperm(edges.size(1), generator=generator)
    return structure(name[edges[:, order]], len(graph), graph[name.argsort()])


#: Shorter and longer than a chunk, also where chunks have 16 nodes.
PATHS, UNDIRECTED_PATHS = (
    {
        **{name: GRAPHS[name] for name in ("zero_nodes", "one_node", "no_edges")},
        "two_in_a_graph": structure(edges, 7, [0, 0, 0, 0, 0, 1, 0]),
        "unsorted_batch": structure(more, 7, [1, 0, 1, 0, 3, 0, 1]),
        "two_chunks": _paths_of(37, 2, undirected=undirected),
        "several_blocks": _paths_of(130, 64, 65, 5, 1, undirected=undirected),
    }
    for undirected, edges, more in (
        (False, [(4, 2), (2, 0), (6, 3), (3, 1)], [(6, 0), (0, 2), (5, 1), (3, 5)]),
        (True, [(4, 2), (2, 4), (2, 0), (3, 6)],
         [(2, 0), (0, 2), (2, 6), (6, 6), (6, 2), (5, 1), (1, 5), (5, 1), (3, 5)]),
    )
)  # fmt: skip


def _from_batch(batch: Batch) -> Structure:
    return structure(batch.edge_index, batch.num_nodes, batch.batch)


# ------------------------------------------------------------- oracles, from formulas

Floats = dict[str, Tensor]


def _adjacency(pairs: Tensor, weight: Tensor, size: int) -> Tensor:
    """A[i, j] of one head: the sum of the weights of j -> i."""
    source, target = (torch.eye(size, dtype=weight.dtype)[x] for x in pairs)
    return target.t() @ (weight[:, None] * source)


def _resolvent(*graph: Any) -> Tensor:
    """(I - A)^-1."""
    A = _adjacency(*graph)
    identity = torch.eye(len(A), dtype=A.dtype)
    return torch.linalg.solve(identity - A, identity)


def _masked(x: Floats, masks: list[Tensor]) -> Tensor:
    """(L * Q K^T) V, one head after the other."""
    heads, groups = x["value"].size(1), x["query"].size(1)
    outs = []
    for h, L in enumerate(masks):
        g = h * groups // heads
        scores = x["query"][:, g] @ x["key"][:, g].t()
        outs.append((L * scores) @ x["value"][:, h])
    return torch.stack(outs, dim=1)


def _mix_oracle(x: Floats, s: Structure) -> Tensor:
    weights = x["edge_weight"].unbind(1)
    return _masked(x, [_resolvent(s.edge_index, w, len(s.graph)) for w in weights])


NUM_TERMS = 4


def neumann_oracle(x: Floats, s: Structure, num_terms: int = NUM_TERMS) -> Tensor:
    masks = []
    for weight in x["edge_weight"].unbind(1):
        A = _adjacency(s.edge_index, weight, len(s.graph))
        masks.append(sum(torch.linalg.matrix_power(A, t) for t in range(num_terms + 1)))
    return _masked(x, masks)


def _delta_oracle(x: Floats, s: Structure) -> Tensor:
    """All states at once, of S = (I - b k k^T) (A S) + b k v^T."""
    heads, groups = x["value"].size(1), x["query"].size(1)
    outs = []
    for h in range(heads):
        g = h * groups // heads
        q, k, v, b = x["query"][:, g], x["key"][:, g], x["value"][:, h], x["beta"][:, h]
        A = _adjacency(s.edge_index, x["edge_weight"][:, h], len(s.graph))
        N, writes = k.size(1), b[:, None] * k
        erase = torch.eye(N, dtype=k.dtype) - torch.einsum("va,vb->vab", writes, k)
        moves = torch.einsum("vab,vw->vawb", erase, A).reshape(2 * (len(q) * N,))
        identity = torch.eye(len(q) * N, dtype=k.dtype)
        written = torch.einsum("va,vp->vap", writes, v).flatten(0, 1)
        states = torch.linalg.solve(identity - moves, written)
        outs.append(torch.einsum("vap,va->vp", states.unflatten(0, q.shape), q))
    return torch.stack(outs, dim=1)


def _channel_oracle(x: Floats, s: Structure) -> Tensor:
    """One matrix for each channel."""
    value, (_, target) = x["value"], s.edge_index
    weight = x.get("edge_weight", torch.ones(len(target), value.size(1)).double())
    if "decay" in x:
        weight = weight * x["decay"][target]
    outs = [
        _resolvent(s.edge_index, weight[:, c], len(value)) @ value[:, c]
        for c in range(value.size(1))
    ]
    return torch.stack(outs, dim=1) if outs else value.clone()


def _attention_oracle(x: Floats, s: Structure) -> Tensor:
    """Dense: duplicates of an edge add up to its weight, absent ones weigh nothing."""
    heads, groups = x["query"].size(1), x["key"].size(1)
    outs = []
    for h in range(heads):
        g = h * groups // heads
        scores = x["query"][:, h] @ x["key"][:, g].t() / max(x["key"].size(2), 1) ** 0.5
        A = _adjacency(s.edge_index, x["edge_bias"][:, h].exp(), len(s.graph))
        weight = A * scores.exp()
        total = weight.sum(1, keepdim=True)
        outs.append(weight @ x["value"][:, g] / total.where(total > 0, 1))
    return torch.stack(outs, dim=1)


def _stm_oracle(x: Floats, s: Structure) -> Tensor:
    """One state for each edge and component; nodes are joined through the states."""
    source, mark, transition = x["source"], x["mark"], x["transition"]
    if source.dim() == 2:
        source, mark = source.unsqueeze(-1), mark.unsqueeze(-1)
        transition = transition[..., None, None]
    (edges, heads, size), nodes = source.shape, torch.eye(len(s.graph)).double()
    component = torch.arange(size)
    tail, head = (size * y[:, None, None] for y in s.line_edge_index)
    moves = torch.broadcast_tensors(tail + component, head + component[:, None])
    pairs = torch.stack([y.flatten() for y in moves])
    writer, reader = (nodes[y].repeat_interleave(size, 0) for y in s.edge_index)
    masks = []
    for h in range(heads):
        L = _resolvent(pairs, transition[:, h].flatten(), edges * size)
        S, M = source[:, h].flatten(), mark[:, h].flatten()
        mask = reader.t() @ (M[:, None] * L * S) @ writer
        masks.append(mask + x["direct"][:, h].diag())
    return _masked(x, masks)


#: How far each orientation of a grid goes along (columns, rows).
_STEPS = [(1, 1), (-1, -1), (1, -1), (-1, 1)]


def _grid_oracle(x: Floats, s: Structure) -> Tensor:
    """One call of the oracle for edges for each orientation."""
    out = torch.zeros_like(x["value"])
    for o in range(x["source"].size(1)):
        edges, first = [], 0
        for height, width in s.sizes:
            for r, c, d in product(range(height), range(width), range(2)):
                i, j = (r + _STEPS[o][1], c) if d else (r, c + _STEPS[o][0])
                if 0 <= i < height and 0 <= j < width:
                    edges.append((first + r * width + c, first + i * width + j, d))
            first += height * width
        u, w, d = torch.tensor(edges, dtype=torch.long).view(-1, 3).t()
        states = Structure(
            s.graph, torch.stack([u, w]), line_edges(torch.stack([u, w]))
        )
        a, b = states.line_edge_index
        gates = {
            "source": x["source"][u, o, d],
            "mark": x["mark"][w, o, d],
            "transition": x["transition"][u[b], o, d[b], d[a]],
            "direct": x["direct"] * (o == 0),
        }
        out = out + _stm_oracle({**x, **gates}, states)
    return out


def _grid_dag_oracle(x: Floats, s: Structure) -> Tensor:
    """All orientations of a head are one matrix."""
    masks: list[Any] = [0] * x["value"].size(1)
    for o in range(x["source"].size(1)):
        edges, first = [], 0
        for height, width in s.sizes:
            for r, c, d in product(range(height), range(width), range(2)):
                i, j = (r - _STEPS[o][1], c) if d else (r, c - _STEPS[o][0])
                if 0 <= i < height and 0 <= j < width:
                    edges.append((first + i * width + j, first + r * width + c, d))
            first += height * width
        u, w, d = torch.tensor(edges, dtype=torch.long).view(-1, 3).t()
        for h in range(len(masks)):
            weight = x["transition"][w, o, d, h]
            L = _resolvent(torch.stack([u, w]), weight, len(s.graph))
            masks[h] = masks[h] + L * x["source"][:, o, h]
    return _masked(x, masks)


def _selective_oracle(x: Floats, s: Structure) -> Tensor:
    """One matrix for each sequence, channel and state."""
    delta = F.softplus(x["delta"] + x["delta_bias"])
    outs = [x["u"][:0]]
    per_row = (x["u"], delta, x["B"], x["C"])
    for u, d, b, c in zip(*(y.split(s.sizes) for y in per_row), strict=True):
        total = d.cumsum(0)
        # exp(A (delta_{s+1} + ... + delta_t)) for s <= t
        rates = (total.unsqueeze(1) - total).unsqueeze(-1) * x["A"]
        later = torch.ones(len(u), len(u), dtype=torch.bool).triu(1)
        decay = rates.masked_fill(later[..., None, None], -torch.inf).exp()
        outs.append(torch.einsum("tsdn,tn,sn,sd->td", decay, c, b, d * u))
    return (torch.cat(outs) + x["u"] * x["D"]) * F.silu(x["z"])


def _conv_oracle(x: Floats, s: Structure) -> Tensor:
    """PyTorch's own convolution, one sequence after the other."""
    weight, outs = x["weight"], [x["x"][:0]]
    for part in x["x"].split(s.sizes):
        if part.numel():
            padded = F.pad(part.t(), (weight.size(1) - 1, 0))
            y = F.conv1d(padded, weight[:, None], x["bias"], groups=len(weight))
            part = y.t()
        outs.append(part)
    return torch.cat(outs)


def _window_oracle(causal: bool, x: Floats, s: Structure) -> Tensor:
    """PyTorch's own convolution, one padded grid after the other."""
    weight, outs = x["weight"], [x["x"][:0]]
    above, left = (n - 1 if causal else n // 2 for n in weight.shape[1:])
    below, right = (
        n - 1 - m for n, m in zip(weight.shape[1:], (above, left), strict=True)
    )
    parts = x["x"].split([h * w for h, w in s.sizes])
    for part, (h, w) in zip(parts, s.sizes, strict=True):
        image = part.t().unflatten(1, (h, w))
        if part.numel():
            image = F.conv2d(
                F.pad(image, (left, right, above, below)), weight[:, None],
                groups=len(weight),
            )  # fmt: skip
        outs.append(image.flatten(1).t())
    return torch.cat(outs)


# --------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Operator:
    """An operator, its inputs and its options.

    Args:
        name: The public name.
        shapes: The floating-point arguments with the letters of their shapes: V nodes,
            E edges, L line edges, and those of the sizes; h and g are twice H and G.
        letters: What the numbers of a size are.
        sizes: Some to draw inputs with, the usual one first.
        structures: Batches by name; among them one of large graphs.
        any_structure: Draws batches.
        scale: What becomes of some of the random numbers.
        oracle: The expected output.
        arguments: The integer arguments of a batch.
        variants: The options to test, one set for each implementation.
    """

    name: str
    shapes: str
    letters: str
    sizes: list[tuple]
    structures: dict[str, Structure]
    any_structure: st.SearchStrategy
    scale: dict[str, Callable[[Tensor, Structure], Tensor]]
    oracle: Callable[[Floats, Structure], Tensor]
    arguments: Callable[[Structure], dict[str, Tensor]]
    variants: dict[str, dict[str, Any]]

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(ops, self.name)

    @property
    def layout(self) -> dict[str, str]:
        """The letters of each argument."""
        return dict(pair.split(":") for pair in self.shapes.split())

    @property
    def axes(self) -> dict[str, str]:
        """What the rows of each argument belong to."""
        rows = {"V": "node", "E": "edge", "L": "line"}
        return {name: rows.get(x[0], "shared") for name, x in self.layout.items()}

    @property
    def like(self) -> str:
        """The argument whose shape and dtype the output has."""
        return next(x for x in ("value", "u", "x") if x in self.axes)


def _to_rows(weight: Tensor, s: Structure) -> Tensor:
    """Rows of |A| sum to 0.9."""
    total = weight.new_zeros(len(s.graph), *weight.shape[1:])
    total.index_add_(0, s.edge_index[1], weight.abs())
    return 0.9 * weight / total[s.edge_index[1]]


def _unit(key: Tensor, s: Structure) -> Tensor:
    """Vectors of length one."""
    return F.normalize(key, dim=-1)


def _strength(beta: Tensor, s: Structure) -> Tensor:
    """Between 0 and 2."""
    return 2 * beta.sigmoid()


def _edges(s: Structure) -> dict[str, Tensor]:
    lines = {} if s.line_edge_index is None else {"line_edge_index": s.line_edge_index}
    return {"edge_index": s.edge_index, **lines, "batch": s.graph}


def _grids(s: Structure) -> dict[str, Tensor]:
    sizes = torch.tensor(s.sizes, dtype=torch.long).view(-1, 2)
    return {"height": sizes[:, 0].clone(), "width": sizes[:, 1].clone()}


def _sequences(s: Structure) -> dict[str, Tensor]:
    return {"ptr": torch.tensor([0, *s.sizes]).cumsum(0)}


_MIX = "query:VGN key:VGN value:VHP edge_weight:EH"
_SIZES = [(4, 2, 5, 3), (1, 1, 1, 1), (2, 1, 17, 33), (2, 1, 0, 3), (2, 1, 3, 0)]
_DELTA_SIZES = [x for x in _SIZES if x[2] > 0]  # keys are of length one
_FORMS = {
    f"{form}-{backend}": {"form": form, "backend": backend}
    for form, backend in product(("state", "mask"), ("numba", "torch"))
}
_MASKS, _STATES = (
    {name: x for name, x in _FORMS.items() if x["form"] == form}
    for form in ("mask", "state")
)
_REST = {"reference": {"backend": "reference"}, "auto": {}}
_CHUNKS = {"chunk-numba": {"form": "chunk", "backend": "numba"}, "auto": {}}
_PLAIN = {"torch": {"backend": "torch"}, **_REST}
_BACKENDS = {"numba": {"backend": "numba"}, **_PLAIN}
_DELTA = "query:VGN key:VGN value:VHP beta:VH edge_weight:EH"
_DELTA_SCALE = {"key": _unit, "beta": _strength}
_NEUMANN = {"solver": "neumann", "num_terms": NUM_TERMS}
_ANY_DAG = dags(max_nodes=6, max_edges=12)
_ANY_DAGS = batches(_ANY_DAG).map(_from_batch)
_ANY_SIDES = st.tuples(st.integers(1, 4), st.integers(1, 4))

OPERATORS = {
    "resolvent_mix": Operator(
        "resolvent_mix", _MIX, "HGNP", _SIZES,
        GRAPHS, batches().map(_from_batch),
        {"edge_weight": _to_rows}, _mix_oracle, _edges,
        {
            "sparse-state": {"solver": "sparse", "form": "state"},
            "sparse-mask": {"solver": "sparse", "form": "mask"},
            "iterative": {"solver": "iterative"},
            "dense": {"solver": "dense", "backend": "torch"},
            **_REST,
        },
    ),
    "undirected_paths": Operator(
        "resolvent_mix", _MIX, "HGNP", _SIZES,
        UNDIRECTED_PATHS, batches(paths(undirected=True)).map(_from_batch),
        {"edge_weight": _to_rows}, _mix_oracle, _edges, _CHUNKS,
    ),
    "neumann": Operator(
        "resolvent_mix", _MIX, "HGNP", _SIZES,
        GRAPHS, batches().map(_from_batch),
        {"edge_weight": _to_rows}, neumann_oracle, _edges,
        {
            "state-numba": {**_NEUMANN, "form": "state", "backend": "numba"},
            "mask-torch": {**_NEUMANN, "form": "mask", "backend": "torch"},
            "reference": {**_NEUMANN, "backend": "reference"},
        },
    ),
    "dag_scan": Operator(
        "dag_scan", _MIX, "HGNP", _SIZES,
        DAGS, _ANY_DAGS,
        {}, _mix_oracle, _edges, {**_STATES, **_REST},
    ),
    "paths": Operator(
        "dag_scan", _MIX, "HGNP", _SIZES,
        PATHS, batches(paths()).map(_from_batch), {}, _mix_oracle, _edges, _CHUNKS,
    ),
    "delta_scan": Operator(
        "delta_scan", _DELTA, "HGNP", _DELTA_SIZES,
        GRAPHS, batches().map(_from_batch),
        {**_DELTA_SCALE, "edge_weight": _to_rows}, _delta_oracle, _edges,
        {**_MASKS, **_REST},
    ),
    "delta_dags": Operator(
        "delta_scan", _DELTA, "HGNP", _DELTA_SIZES,
        DAGS, _ANY_DAGS,
        _DELTA_SCALE, _delta_oracle, _edges, {**_FORMS, **_REST},
    ),
    "delta_paths": Operator(
        "delta_scan", _DELTA, "HGNP", _DELTA_SIZES,
        PATHS, batches(paths()).map(_from_batch), _DELTA_SCALE, _delta_oracle, _edges,
        {"auto": {}},
    ),
    **{
        name: Operator(
            "channel_scan", shapes, "C", [(3,), (1,), (37,), (0,)],
            graphs, batches(some).map(_from_batch), {}, _channel_oracle, _edges,
            _BACKENDS,
        )
        for name, shapes, graphs, some in (
            ("channel_scan", "value:VC edge_weight:EC decay:VC", DAGS, _ANY_DAG),
            ("channels_of_nodes", "value:VC decay:VC", DAGS, _ANY_DAG),
            ("channels_of_edges", "value:VC edge_weight:EC", DAGS, _ANY_DAG),
            ("channels_of_paths", "value:VC edge_weight:EC decay:VC", PATHS, paths()),
        )
    },
    "neighborhood_attention": Operator(
        "neighborhood_attention", "query:VHN key:VGN value:VGP edge_bias:EH", "HGNP",
        _SIZES, GRAPHS, batches().map(_from_batch), {}, _attention_oracle, _edges,
        _PLAIN,
    ),
    "stm_scan": Operator(
        "stm_scan",
        "query:VGN key:VGN value:VHP source:EHJ transition:LHJJ mark:EHJ direct:VH",
        "HGNPJ", [*_SIZES, (2, 1, 3, 4, 1), (2, 1, 3, 4, 3)],
        {name: _with_lines(x) for name, x in DAGS.items()},
        batches(dags(max_nodes=5, max_edges=8), max_graphs=3).map(_from_batch)
        .map(_with_lines),
        {"transition": lambda x, s: 0.7 * x}, _stm_oracle, _edges, {**_STATES, **_REST},
    ),
    "paths_of_edges": Operator(
        "stm_scan",
        "query:VGN key:VGN value:VHP source:EH transition:LH mark:EH direct:VH",
        "HGNP", _SIZES,
        {name: _with_lines(x) for name, x in PATHS.items()},
        batches(paths(), max_graphs=3).map(_from_batch).map(_with_lines),
        {"transition": lambda x, s: 0.7 * x}, _stm_oracle, _edges, _CHUNKS,
    ),
    "grid_scan": Operator(
        "grid_scan",
        "query:VGN key:VGN value:VHP source:VO2H transition:VO22H mark:VO2H direct:VH",
        "HGNPO", [(*x, o) for x, o in zip(_SIZES, (4, 1, 2, 4, 4), strict=True)],
        GRIDS, st.lists(_ANY_SIDES, max_size=3).map(_sized),
        {"transition": lambda x, s: 0.6 * x}, _grid_oracle, _grids,
        {**_STATES, "mask-numba": _FORMS["mask-numba"], **_REST},
    ),
    "grid_dag_scan": Operator(
        "grid_dag_scan", "query:VGN key:VGN value:VHP source:VOH transition:VO2H",
        "HGNPO", [(*x, o) for x, o in zip(_SIZES, (4, 1, 2, 3, 4), strict=True)],
        GRIDS, st.lists(_ANY_SIDES, max_size=3).map(_sized),
        {"transition": lambda x, s: 0.6 * x}, _grid_dag_oracle, _grids,
        {**_STATES, **_REST},
    ),
    "selective_scan": Operator(
        "selective_scan", "u:VF delta:VF A:FN B:VN C:VN D:F z:VF delta_bias:F", "FN",
        [(3, 4), (1, 1), (71, 2), (3, 0), (0, 2)],
        SEQUENCES, st.lists(st.integers(0, 40), max_size=5).map(_sized),
        {"A": lambda x, s: -x.exp()}, _selective_oracle, _sequences,
        {x: {"delta_softplus": True, **y} for x, y in _BACKENDS.items()},
    ),
    **{
        name: Operator(
            "grid_conv", "x:VF weight:FKL", "FKL", sizes,
            GRIDS, st.lists(_ANY_SIDES, max_size=3).map(_sized),
            {}, partial(_window_oracle, causal), _grids,
            {x: {"causal": causal, **y} for x, y in _BACKENDS.items()},
        )
        for name, causal, sizes in (
            ("grid_conv", False, [(3, 3, 5), (1, 1, 1), (71, 2, 3), (0, 3, 3)]),
            ("causal_grid_conv", True, [(3, 2, 4), (1, 1, 1), (71, 4, 3), (0, 3, 3)]),
        )
    },
    "causal_conv1d": Operator(
        "causal_conv1d", "x:VF weight:FK bias:F", "FK",
        [(3, 4), (1, 1), (71, 6), (0, 2)],
        SEQUENCES, st.lists(st.integers(0, 40), max_size=5).map(_sized),
        {}, _conv_oracle, _sequences, _BACKENDS,
    ),
}  # fmt: skip


# Triton's interpreter takes seconds for what is of no size elsewhere: few programs.
if triton_runtime.INTERPRETED and triton_runtime.WITH_TRITON:
    _TRITON = {
        f"{form}-triton": {"form": form, "backend": "triton"}
        for form in ("mask", "state", "chunk")
    }
    _FEW = [(2, 1, 5, 3), (1, 1, 17, 33), (2, 1, 0, 3), (2, 1, 3, 0)]
    _TRITON_SEQUENCES = {  # shorter and longer than a span, which begins within them
        **SEQUENCES,
        "spans": _sized([63, 64, 65]),
        "several_blocks": _sized([150, 3, 129, 1]),
    }
    _small = {"several_blocks": _blocks_of((39, 5), acyclic=True)}
    OPERATORS |= {
        "triton_graphs": replace(
            OPERATORS["resolvent_mix"], sizes=_FEW,
            structures={
                **GRAPHS, "several_blocks": _blocks_of((39, 5), acyclic=False)
            },
            variants={"triton": {"solver": "dense", **_TRITON["mask-triton"]}},
        ),
        "triton_sparse_blocks": replace(  # their inverses by rows of sparse factors
            OPERATORS["resolvent_mix"], sizes=_FEW,
            structures={
                **GRAPHS, "several_blocks": _paths_of(70, 33, 5, undirected=True)
            },
            variants={"triton": _TRITON["mask-triton"]},
        ),
        "triton_sparse": replace(
            OPERATORS["resolvent_mix"], sizes=_FEW,
            structures={**GRAPHS, "several_blocks": grids_of((10, 10), (2, 3))},
            variants={"triton": {"solver": "sparse", **_TRITON["state-triton"]}},
        ),
        "triton_dags": replace(
            OPERATORS["dag_scan"], sizes=_FEW, structures={**DAGS, **_small},
            variants={"state-triton": _TRITON["state-triton"]},
        ),
        "triton_edges": replace(
            OPERATORS["stm_scan"], sizes=[*_FEW, (2, 1, 3, 4, 2)],
            structures={name: _with_lines(x) for name, x in {**DAGS, **_small}.items()},
            variants={"state-triton": _TRITON["state-triton"]},
        ),
        "triton_paths": replace(
            OPERATORS["paths"], sizes=_FEW,
            structures={**PATHS, "several_blocks": _paths_of(70, 33, 5)},
            variants={"chunk-triton": _TRITON["chunk-triton"]},
        ),
        "triton_undirected_paths": replace(
            OPERATORS["undirected_paths"], sizes=_FEW[:1],
            structures={
                **UNDIRECTED_PATHS, "several_blocks": _paths_of(40, 5, undirected=True)
            },
            variants={"chunk-triton": _TRITON["chunk-triton"]},
        ),
        "triton_paths_of_edges": replace(
            OPERATORS["paths_of_edges"], sizes=_FEW[:2],
            structures={
                "one_node": _with_lines(PATHS["one_node"]),
                "unsorted_batch": _with_lines(PATHS["unsorted_batch"]),
                "several_blocks": _with_lines(_paths_of(40, 5)),
            },
            variants={"chunk-triton": _TRITON["chunk-triton"]},
        ),
        "triton_sequences": replace(
            OPERATORS["selective_scan"], sizes=[(3, 2), (17, 1), (3, 0), (0, 2)],
            structures=_TRITON_SEQUENCES,
            variants={"triton": {"delta_softplus": True, "backend": "triton"}},
        ),
        "triton_filters": replace(
            OPERATORS["causal_conv1d"], structures=_TRITON_SEQUENCES,
            variants={"triton": {"backend": "triton"}},
        ),
        **{
            f"triton_{key}": replace(
                OPERATORS["channels_of_paths"], shapes=OPERATORS[key].shapes,
                sizes=[(3,), (37,), (0,)],
                structures={**PATHS, "several_blocks": _paths_of(70, 129, 5)},
                variants={"triton": {"backend": "triton"}},
            )
            for key in ("channels_of_paths", "channels_of_nodes")
        },
        "triton_delta_paths": replace(
            OPERATORS["delta_paths"], sizes=[x for x in _FEW if x[2] > 0],
            structures={**PATHS, "several_blocks": _paths_of(70, 33, 5)},
            variants={"chunk-triton": _TRITON["chunk-triton"]},
        ),
        "triton_delta_dags": replace(
            OPERATORS["delta_dags"], sizes=[x for x in _FEW if x[2] > 0],
            structures={**DAGS, "several_blocks": _blocks_of((17, 5), True)},
            variants={"triton": {"form": "state", "backend": "triton"}},
        ),
    }  # fmt: skip


# --------------------------------------------------------------------------- the calls


@dataclass(frozen=True)
class Case:
    """Inputs of an operator."""

    operator: Operator
    structure: Structure
    floats: Floats

    @property
    def integers(self) -> dict[str, Tensor]:
        return self.operator.arguments(self.structure)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {**self.floats, **self.integers}

    def __call__(self, **options: Any) -> Tensor:
        return self.operator.function(**{**self.inputs, **options})

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, floats={x: y.to(dtype) for x, y in self.floats.items()})

    def changed(self, **floats: Tensor) -> "Case":
        return replace(self, floats={**self.floats, **floats})

    def take(self, index: dict[str, Tensor], sizes: tuple = ()) -> "Case":
        """Some nodes, edges and line edges, in a new order."""
        old, moved = self.structure, [None, None]
        for i, (axis, y) in enumerate(zip(old.axes, old[1:3], strict=False)):
            if y is not None:
                place = torch.full_like(old.graph_of(axis), -1)
                place[index[axis]] = torch.arange(len(index[axis]))
                moved[i] = place[y[:, index[old.axes[i + 1]]]]
        floats = {
            name: x if axis == "shared" else x[index[axis]]
            for (name, axis), x in zip(
                self.operator.axes.items(), self.floats.values(), strict=True
            )
        }
        graph = old.graph[index["node"]]
        return Case(self.operator, Structure(graph, *moved, sizes), floats)

    def graphs(self) -> Iterator[tuple[Tensor, "Case"]]:
        """Each graph alone, and which of the nodes are its own."""
        s = self.structure
        for g in range(len(s.sizes) or int(s.graph.max()) + 1):
            index = {x: (s.graph_of(x) == g).nonzero().view(-1) for x in s.axes}
            yield index["node"], self.take(index, s.sizes[g : g + 1])

    def shuffled(self) -> tuple[Tensor, "Case"]:
        """Renumbered: which node has become which, and the case.

        Grids and sequences keep the order of their nodes, but change places.
        """
        s = self.structure
        if s.edge_index is None:
            order = torch.randperm(len(s.sizes)).tolist()
            nodes = [(s.graph == g).nonzero().view(-1) for g in order]
            index = {"node": torch.cat([torch.empty(0).long(), *nodes])}
            return index["node"], self.take(index, tuple(s.sizes[g] for g in order))
        index = {axis: torch.randperm(len(s.graph_of(axis))) for axis in s.axes}
        return index["node"], self.take(index)


def make_case(
    operator: Operator, batch: Structure, size: tuple | None = None, seed: int = 0
) -> Case:
    """Random float64 inputs."""
    generator = torch.Generator().manual_seed(seed)
    length = dict(zip(operator.letters, size or operator.sizes[0], strict=False))
    counts = (len(batch.graph_of(axis)) for axis in batch.axes)
    length |= {"2": 2, **dict(zip("VEL", counts, strict=False))}
    floats = {}
    for name, letters in operator.layout.items():
        shape = [length[x] for x in letters if x in length]
        x = torch.randn(shape, generator=generator, dtype=torch.double)
        floats[name] = operator.scale.get(name, lambda x, s: x)(x, batch)
    return Case(operator, batch, floats)


@cache
def example(key: str, name: str = "", size: tuple | None = None) -> Case:
    """The same inputs at each call, of a small batch of several graphs by default."""
    operator = OPERATORS[key]
    if not name:
        name = "several" if "several" in operator.structures else "unsorted_batch"
    return make_case(operator, operator.structures[name], size)


# ------------------------------------------------------------------------- the results

Results = dict[str, Tensor]


def results(function: Callable[..., Tensor], floats: Floats) -> Results:
    """The output, and the gradients of all inputs for a fixed one of the output."""
    leaves = {x: y.detach().requires_grad_() for x, y in floats.items()}
    out = function(**leaves)
    generator = torch.Generator().manual_seed(7)
    weigh = torch.randn(out.shape, generator=generator).bfloat16()  # exact in any dtype
    grads = torch.autograd.grad(
        out, list(leaves.values()), weigh.to(out), allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip
    return {"output": out.detach(), **dict(zip(leaves, grads, strict=True))}


def computed(case: Case, options: dict[str, Any]) -> Results:
    """What the library says."""
    return results(lambda **x: case(**{**x, **options}), case.floats)


def expected_of(case: Case) -> Results:
    """What the oracle says."""
    floats = {name: x.double() for name, x in case.floats.items()}
    return results(lambda **x: case.operator.oracle(x, case.structure), floats)


@cache
def expected(key: str, name: str = "", size: tuple | None = None) -> Results:
    """What the oracle says of an example."""
    return expected_of(example(key, name, size))


def assert_results(
    got: Results, want: Results, tol: float | None = None, what: str = ""
) -> None:
    """The same output and gradients."""
    assert list(got) == list(want)
    for name, x in got.items():
        near = tolerance(x.dtype) if tol is None else tol
        if (want[name].abs() < 1e-12).all():  # which has no digits to compare
            assert (x.abs() < near).all(), f"{name} {what}"
            continue
        assert_near(x, want[name], near, f"{name} {what}")
