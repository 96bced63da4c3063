"""Every convolution once more, from its formula, by dense matrices.

Nothing here is imported from the package, and nothing is sparse, packed or cached: an
entry of a matrix is a pair of nodes or of edges. Exponentials are normalised by their
logarithms, so that features may be of any size. Autograd differentiates all of it, in
any floating dtype; systems are solved in float64.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import networkx
import torch
from torch import Tensor

__all__ = ["Graphs", "dense"]


class Graphs(NamedTuple):
    """All that a layer takes besides features of nodes."""

    edges: list[Tensor]  #: [2, E] of the graph, or of each DAG
    attrs: list[Tensor] | None = None  #: the features of these edges
    batch: Tensor | None = None
    sizes: list[tuple[int, int]] | None = None  #: the rows and columns of grids
    pos: Tensor | None = None  #: positions for rotary attention
    #: What Graph-Mamba runs along: for each permutation, the nodes of each sequence.
    permutations: list[list[list[int]]] | None = None
    mask: Tensor | None = None  #: what explainers multiply weights of edges by


class Layer:
    """A layer's sizes and options, and its parameters by their names.

    Attributes:
        eps: The machine epsilon in `ChimeraConv`'s least margin.
        rounded: Applied to projections and to what enters them: the identity, or a cast
            to half precision and back.
        shaken: Applied to sums over nodes, with the sums of absolute values: the
            identity, or adds rounding errors.
        solved: Told of the transitions on graphs with cycles, and of the largest entry
            of the resolvent, after which it may add rounding errors to gradients.
        stored: Applied to the transitions on graphs with cycles: the identity, or
            rounds them. Of a margin of 16 epsilons, a sixteenth is lost.
    """

    def __init__(
        self,
        conv: Any,
        parameters: Mapping[str, Tensor],
        eps: float,
        rounded: Callable[[Tensor], Tensor],
        shaken: Callable[[Tensor, Tensor], Tensor],
        solved: Callable[[Tensor, Tensor], None],
        stored: Callable[[Tensor], Tensor],
    ) -> None:
        self.conv, self.parameters, self.eps = conv, parameters, eps
        self.rounded, self.shaken = rounded, shaken
        self.solved, self.stored = solved, stored

    def __getattr__(self, name: str) -> Any:
        """An option, such as `heads`."""
        return getattr(self.conv, name)

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.rounded(x) @ self.rounded(self[f"{name}.weight"]).t()
        if f"{name}.bias" in self:
            y = y + self.rounded(self[f"{name}.bias"])
        return self.rounded(y)


def dense(
    conv: torch.nn.Module,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    graphs: Graphs,
    eps: float | None = None,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
    shaken: Callable[[Tensor, Tensor], Tensor] = lambda x, size: x,
    solved: Callable[[Tensor, Tensor], None] = lambda x, size: None,
    stored: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, ...]:
    """What a layer returns, as a tuple, given its parameters and buffers by name.

    By default, `eps` is that of the layer's own dtype, or of float32 if that is less
    precise, as layers compute gates in float32 at least.
    """
    if eps is None:
        dtype = next(conv.parameters()).dtype
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if getattr(conv, "flow", "") == "target_to_source":
        graphs = graphs._replace(edges=[index.flip(0) for index in graphs.edges])
    out = FORMULAS[type(conv).__name__](
        Layer(conv, parameters, eps, rounded, shaken, solved, stored), x, graphs
    )
    return out if isinstance(out, tuple) else (out,)


# ------------------------------------------------------------------------------- shared


def softplus(x: Tensor) -> Tensor:
    """PyTorch's, which is linear from 20 on."""
    return torch.where(x > 20, x, log_1_plus_exp(x))


def log_1_plus_exp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def unit_silu(x: Tensor) -> Tensor:
    """SiLU, divided by its length, however small; zeros become equal numbers."""
    x = torch.where((x == 0).all(-1, keepdim=True), torch.ones_like(x), x)
    size = torch.where(x == 0, torch.ones_like(x), x.abs()).log()
    size = (size - log_1_plus_exp(-x)).masked_fill(x == 0, -torch.inf)
    y = x.sign() * torch.exp(size - size.amax(-1, keepdim=True).detach())
    return y / y.square().sum(-1, keepdim=True).sqrt()


def rms(x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """Divided by the root mean square of the last axis, whose square may overflow; the
    factor is that of the norm's epsilon.
    """
    big = x.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    mean = (x / big).square().mean(-1, keepdim=True) + 1e-5 * factor / big.square()
    return x / big / mean.sqrt()


def masked(graphs: Graphs, weight: Tensor) -> Tensor:
    return weight if graphs.mask is None else weight * graphs.mask.unsqueeze(1)


def matrix(rows: Tensor, columns: Tensor, weight: Tensor, *shape: int) -> Tensor:
    """Sums of weights [entries, H] by row and column, [H, *shape]."""
    out = weight.new_zeros(weight.size(1), *shape)
    head = torch.arange(weight.size(1)).view(-1, 1)
    return out.index_put((head, rows, columns), weight.t(), accumulate=True)


def adjacency(index: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """A of each head, with a row for each target."""
    return matrix(index[1], index[0], weight, num_nodes, num_nodes)


def inverse(A: Tensor) -> Tensor:
    """(I - A)^-1 = I + A + A A + ... of each head, node by node: after k nodes, entries
    are sums over walks by way of these (Kleene). Nothing reaches what it is not joined
    to, as by rounding errors of a factorisation.
    """
    walks = A.double()
    for k in range(A.size(-1)):
        through = walks[:, :, k, None] * walks[:, k, None, :]
        walks = walks + through / (1 - walks[:, k, None, None, k])
    return (torch.eye(A.size(-1), dtype=torch.double) + walks).to(A.dtype)


def degrees(index: Tensor, num_nodes: int) -> Tensor:
    """The number of edges into each node, [V, 1]."""
    return torch.bincount(index[1], minlength=num_nodes).view(-1, 1)


def means(index: Tensor, x: Tensor) -> Tensor:
    """The mean of each node's parents; zero without any."""
    ones = x.new_ones(index.size(1), 1)
    count = degrees(index, len(x)).clamp(min=1)
    return adjacency(index, ones, len(x))[0] @ x / count


def log_sums(values: Tensor, owner: Tensor, num_owners: int) -> Tensor:
    """The logarithm of the sum of exponentials [E, H] of each owner; zero without."""
    mine = (owner == torch.arange(num_owners).view(-1, 1)).unsqueeze(2)  # [owners, E]
    nothing = values.new_zeros(num_owners, 1, values.size(1))
    nothing = nothing.masked_fill(mine.any(1, keepdim=True), -torch.inf)
    logits = values.masked_fill(~mine, -torch.inf)
    return torch.cat([nothing, logits], 1).logsumexp(1)


def ancestors(index: Tensor, num_nodes: int) -> list[int]:
    """The nodes of a DAG, parents first; its ranks are those of longest paths."""
    rank = ranks(index, num_nodes)
    return sorted(range(num_nodes), key=rank.__getitem__)


def ranks(index: Tensor, num_nodes: int) -> list[int]:
    """The number of edges of the longest path that ends in each node of a DAG."""
    rank, edges = [0] * num_nodes, index.t().tolist()
    for _ in range(num_nodes):
        for j, i in edges:
            rank[i] = max(rank[i], rank[j] + 1)
    return rank


def by_head(x: Tensor, heads: int) -> Tensor:
    """[V, groups, N] -> [heads, V, N]: consecutive heads form a group."""
    return x.repeat_interleave(heads // x.size(1), 1).transpose(0, 1)


def mixed(p: Layer, L: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(L * Q K^T) V of each head, [V, H, P]."""
    query, key = (by_head(y, value.size(1)) for y in (query, key))
    value = value.transpose(0, 1)
    y = (L * (query @ key.mT)) @ value
    size = (L.abs() * (query.abs() @ key.abs().mT)) @ value.abs()
    return p.shaken(y, size).transpose(0, 1)


# ------------------------------------------------------------------------ local filters


def along_dags(weight: Tensor, y: Tensor, dags: list[Tensor]) -> Tensor:
    """A filter over the node, the mean of its parents, the mean of theirs, ..."""
    out, sides = weight[:, 0] * y, weight[:, 1:].unflatten(1, (len(dags), -1))
    for d, index in enumerate(dags):
        far = y
        for side in sides[:, d].unbind(1):
            far = means(index, far)
            out = out + side * far
    return out


def over_windows(
    weight: Tensor, y: Tensor, sizes: list[tuple[int, int]], causal: bool
) -> Tensor:
    """A filter over the nodes around each node of a grid, or above and to the left."""
    rows, columns = weight.shape[1:]
    above, left = (rows - 1, columns - 1) if causal else (rows // 2, columns // 2)
    out = torch.zeros_like(y)
    for a in range(rows):
        for b in range(columns):
            shift, first = y.new_zeros(len(y), len(y)), 0
            for height, width in sizes:
                for i in range(height * width):
                    r, c = i // width + a - above, i % width + b - left
                    if 0 <= r < height and 0 <= c < width:
                        shift[first + i, first + r * width + c] = 1
                first += height * width
            out = out + weight[:, a, b] * (shift @ y)
    return out


#: The horizontal and vertical step of the four DAGs of a grid.
WAYS = [(1, 1), (-1, -1), (1, -1), (-1, 1)]


def grid_dag(sizes: list[tuple[int, int]], d: int) -> tuple[Tensor, Tensor]:
    """The edges of a grid's DAG, and for each whether it is vertical."""
    edges, first, (right, down) = [], 0, WAYS[d]
    for height, width in sizes:
        for i in range(height * width):
            r, c = i // width, i % width
            if 0 <= c + right < width:
                edges.append((first + i, first + i + right, 0))
            if 0 <= r + down < height:
                edges.append((first + i, first + i + down * width, 1))
        first += height * width
    table = torch.tensor(edges, dtype=torch.long).view(-1, 3).t()
    return table[:2], table[2]


# ------------------------------------------------------------------------------ Chimera


def projections(
    p: Layer, x: Tensor, graphs: Graphs, names: str = "value key query"
) -> list[Tensor]:
    """Linear projections and the local filter over all of them, if there is one."""
    parts = [p.linear(f"lin_{name}", x) for name in names.split()]
    if "local_weight" not in p:
        return parts
    y = torch.cat(parts, 1)
    if graphs.sizes is not None:
        y = over_windows(p["local_weight"], y, graphs.sizes, p.num_dags == 1)
    else:
        y = along_dags(p["local_weight"], y, graphs.edges)
    return list(p.rounded(y).split([part.size(1) for part in parts], 1))


def chimera_inputs(
    p: Layer, x: Tensor, graphs: Graphs
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [V, groups, N], and value [V, heads, P]."""
    value, key, query = projections(p, x, graphs)
    query, key = (silu(y).unflatten(1, (-1, p.state_channels)) for y in (query, key))
    if p.qk_norm:
        query, key = rms(query) / math.sqrt(p.state_channels), rms(key)
    return query, key, values(p, value)


def values(p: Layer, value: Tensor) -> Tensor:
    return silu(value).unflatten(1, (p.heads, -1))


def gated_by(p: Layer, x: Tensor) -> Tensor:
    """Without the norm of the block, gates read directions only."""
    return x if "norm.weight" in p else p.rounded(rms(x))


def chimera_gates(p: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """All gates of a node without and with their biases, [V, gates, heads]."""
    gates = p.linear("lin_delta", gated_by(p, x)).unflatten(1, p["delta_bias"].shape)
    return gates, gates + p["delta_bias"]


def edge_gates(p: Layer, graphs: Graphs) -> list[Tensor | None]:
    """The selectivities of the edges of each DAG, [E, heads]."""
    if "edge_bias" not in p or graphs.attrs is None:
        return [None] * len(graphs.edges)
    shape = p["edge_bias"].shape
    return [
        softplus(p.linear("lin_edge", attr).unflatten(1, shape)[:, d] + bias)
        for d, (attr, bias) in enumerate(zip(graphs.attrs, p["edge_bias"], strict=True))
    ]


def chimera_block(
    p: Layer, y: Tensor, x: Tensor, value: Tensor, log_scale: Tensor | None = None
) -> Tensor:
    """What follows the recurrence: skip, norm, gate and projection.

    Rows of y may be given without a factor exp(log_scale), [V, 1].
    """
    scale = torch.zeros(len(x), 1, dtype=x.dtype) if log_scale is None else log_scale
    skip = p["skip"].view(-1, 1) * torch.exp(-scale).unsqueeze(2)
    y, gate = (y + skip * value).flatten(1), torch.ones_like(scale)
    if "lin_gate.weight" in p:
        gate = silu(p.linear("lin_gate", gated_by(p, x)))
    if not p.norm_before_gate:
        y, gate = y * gate, torch.ones_like(scale)
    if "norm.weight" in p:
        y = rms(y, torch.exp(-2 * scale)) * p["norm.weight"]
    return p.linear("lin_out", y * gate)


def chimera_transitions(
    p: Layer,
    index: Tensor,
    gates: Tensor,
    edge: Tensor | None,
    batch: Tensor | None = None,
) -> Tensor:
    """Weights, normalised over the edges into (released: out of) a node.

    In floating point, the margin exp(-psi) is at least 16 epsilons of the sum.
    """
    target, source, psi = softplus(gates[:, :3]).unbind(1)
    (col, row), num_nodes = index, len(gates)
    reach_nodes = getattr(p.conv, "reach_nodes", None)
    if reach_nodes is not None:
        graph = [0] * num_nodes if batch is None else batch.tolist()
        share = psi.new_tensor([graph.count(i) / reach_nodes for i in graph])
        psi = psi + share.log().view(-1, 1)
    parts = [target[row], source[col]] + ([] if edge is None else [edge])
    log_a = -sum(parts) / len(parts)
    if getattr(p.conv, "normalization", "paper") == "released":
        total = adjacency(index, log_a.exp(), num_nodes).sum(1).t() + torch.exp(-psi)
        return log_a.exp() / (total.clamp(min=1) + 0.05)[col]
    # Relative to the largest term of a row.
    shift = -psi.detach()
    owner = row.unsqueeze(1).expand_as(log_a)
    shift = shift.scatter_reduce(0, owner, log_a.detach(), "amax")
    a = torch.exp(log_a - shift[row])
    total = adjacency(index, a, num_nodes).sum(2).t()
    margin = torch.hypot(torch.exp(-psi - shift), 16 * p.eps * total)
    return p.gamma * a / (total + margin)[row]


def chimera(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    query, key, value = chimera_inputs(p, x, graphs)
    plain, gates = chimera_gates(p, x)
    (index,), (edge,) = graphs.edges, edge_gates(p, graphs)
    weight = masked(
        graphs, p.stored(chimera_transitions(p, index, gates, edge, graphs.batch))
    )
    A = adjacency(index, weight, len(x))
    L = eye = torch.eye(len(x), dtype=x.dtype)
    if p.solver == "neumann":
        for _ in range(p.num_terms):
            L = eye + A @ L
    elif len(x):
        L = inverse(A)
        p.solved(weight, L.detach().max())
    if p.normalization == "released":
        write = plain[:, 3]
    elif gates.size(1) == 3:  # tied
        write = 1 - A.sum(2).t()
    else:
        write = softplus(gates[:, 3])
    y = mixed(p, L, query, key, write.unsqueeze(2) * value)
    out = chimera_block(p, y, x, value)
    if "log_sums.lin_out.weight" not in p:
        return out
    sources = p.linear("log_sums.lin_source", x).unflatten(1, (len(A), -1))
    sources = torch.exp(300 * torch.tanh(sources.double() / 300))
    logs = (L.double() @ sources.transpose(0, 1)).log()  # [H, V, sums]
    logs = logs.transpose(0, 1).flatten(1).to(x.dtype)
    return out + p.linear("log_sums.lin_out", 0.1 * logs)


def chimera_path(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    query, key, value = chimera_inputs(p, x, graphs)
    gates = chimera_gates(p, x)[1]
    target, source, psi = softplus(gates[:, :3]).unbind(1)
    (index,), (edge,) = graphs.edges, edge_gates(p, graphs)
    col, row = index
    parts = [target[row], source[col]] + ([] if edge is None else [edge])
    delta, psi = sum(parts) / len(parts), (psi[row] + psi[col]) / 2
    place = {pair: e for e, pair in enumerate(map(tuple, index.t().tolist()))}
    back = delta[[place[i, j] for j, i in index.t().tolist()]]
    bound = log_1_plus_exp(delta + back - psi) / 2  # of the mean of both directions
    log_A = (back - delta) / 2 - bound - math.log(2)
    product = torch.exp(-2 * bound) / 4
    if graphs.mask is not None:
        other = graphs.mask[[place[i, j] for j, i in index.t().tolist()]]
        product = product * (graphs.mask * other).unsqueeze(1)
        log_A = log_A + graphs.mask.log().unsqueeze(1)
    log_write = log_resolvent(place, log_A, product, len(x))
    log_write = log_write + log_softplus(gates[:, 3]).t().unsqueeze(1)
    # Entries may be of any size: rows are scaled, and so is the epsilon of the norm.
    q, k = (by_head(y.detach(), len(log_write)) for y in (query, key))
    size = (q @ k.mT).abs().log() + value.detach().abs().amax(2).t().unsqueeze(1).log()
    at_least = size.new_zeros(*size.shape[:2], 1)
    scale = torch.cat([log_write.detach() + size, at_least], 2).amax((0, 2))
    # Up to the range of numbers, and where products have underflowed to zero.
    most = math.log(torch.finfo(x.dtype).max) - 5
    write = torch.exp((log_write - scale.view(-1, 1)).clamp(max=most))
    # Beyond this, products of queries, keys and values that underflow here matter.
    if log_write.numel() and log_write.max() > 600:
        write = write * torch.nan
    y = mixed(p, write, query, key, value)
    return chimera_block(p, y, x, value, scale.view(-1, 1))


def log_softplus(x: Tensor) -> Tensor:
    """The logarithm of softplus, which may underflow."""
    return torch.where(x < -40, x, softplus(x.clamp(min=-40)).log())


def log_resolvent(
    place: dict[tuple[int, int], int], log_A: Tensor, product: Tensor, num_nodes: int
) -> Tensor:
    """log (I - A)^-1 of paths, [H, V, V], from pivots of eliminations from both ends.

    Products are those of the weights of both directions of an edge.
    """
    near: list[list[int]] = [[] for _ in range(num_nodes)]
    for j, i in place:
        near[i].append(j)
    one = torch.ones(log_A.size(1), dtype=log_A.dtype)
    rows = [[one * -torch.inf] * num_nodes for _ in range(num_nodes)]
    seen: set[int] = set()
    for first in range(num_nodes):
        if first in seen or len(near[first]) > 1:
            continue
        path = [first]
        while further := {*near[path[-1]]} - {*path}:
            path += further
        seen |= {*path}
        steps = [product[place[pair]] for pair in pairwise(path)]
        before, after = [one], [one]  # pivots
        for step in steps:
            before.append(1 - step / before[-1])
        for step in steps[::-1]:
            after.append(1 - step / after[-1])
        after.reverse()
        for b, j in enumerate(path):
            own = -torch.log(before[b] + after[b] - 1)
            rows[j][j] = total = own
            for a in range(b + 1, len(path)):  # towards the end
                total = total + log_A[place[path[a - 1], path[a]]] - after[a].log()
                rows[path[a]][j] = total
            total = own
            for a in range(b - 1, -1, -1):
                total = total + log_A[place[path[a + 1], path[a]]] - before[a].log()
                rows[path[a]][j] = total
    if num_nodes == 0:
        return log_A.new_zeros(log_A.size(1), 0, 0)
    return torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)


def parent_scales(index: Tensor, like: Tensor, most: float = 2.0**56) -> Tensor:
    """1 / sqrt(parents) of each node, less where sums over paths exceed a bound."""
    scale, grown, edges = [1.0] * len(like), [1.0] * len(like), index.t().tolist()
    parents: list[list[int]] = [[] for _ in scale]
    for j, i in edges:
        parents[i].append(j)
    for i in ancestors(index, len(like)):
        if parents[i]:
            total = sum(grown[j] for j in parents[i])
            scale[i] = min(len(parents[i]) ** -0.5, most / total)
            grown[i] = min(1 + scale[i] * total, most)
    return like.new_tensor(scale).unsqueeze(1)


def dag_transitions(
    index: Tensor, delta: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights of edges and input gates of nodes, given those of roots."""
    count = degrees(index, len(root))
    scale = parent_scales(index, root)
    write = adjacency(index, delta, len(root)).sum(2).t() * scale
    return torch.exp(-delta) * scale[index[1]], torch.where(count > 0, write, root)


def edge_means(index: Tensor, node: Tensor, ends: str, edge: Tensor | None) -> Tensor:
    """The mean of the selectivities of an edge and of its ends, or its target."""
    parts = [node[index[1]]] + ([node[index[0]]] if ends == "mean" else [])
    return sum(parts + ([] if edge is None else [edge])) / (
        len(parts) + (edge is not None)
    )


#: Which query and key each of several DAGs has.
SHARED = {
    "all": [0] * 8, "none": [*range(8)], "diagonal": [0, 0, 1, 1, 2, 2, 3, 3],
    "row": [0, 1, 1, 0],
}  # fmt: skip


def chimera_dag(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    if graphs.sizes is not None:
        edges = [grid_dag(graphs.sizes, d)[0] for d in range(p.num_dags)]
        graphs = graphs._replace(edges=edges)
    query, key, value = chimera_inputs(p, x, graphs)
    node = softplus(chimera_gates(p, x)[1])
    query, key = (y.unflatten(1, (-1, p.groups)) for y in (query, key))
    y = torch.zeros_like(value)
    for d, edge in enumerate(edge_gates(p, graphs)):
        index, c = graphs.edges[d], SHARED[p.share][d]
        delta = edge_means(index, node[:, d], p.selectivity, edge)
        root = node[:, d] * (p.roots == "write")
        weight, write = dag_transitions(index, delta, root)
        L = inverse(adjacency(index, masked(graphs, weight), len(x)))
        y = y + mixed(p, L, query[:, c], key[:, c], write.unsqueeze(2) * value)
    return chimera_block(p, y / math.sqrt(p.num_dags), x, value)


# ----------------------------------------------------------------------------- memories


def memories(
    transitions: Tensor,
    index: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
) -> Tensor:
    """The gated delta rule along a DAG, one node after the other, [V, H, P].

    Transitions are [E, H], queries and keys [V, H, N].
    """
    states: dict[int, Tensor] = {}
    out: dict[int, Tensor] = {}
    edges = index.t().tolist()
    for i in ancestors(index, len(value)):
        S = torch.zeros_like(key[i].unsqueeze(2) * value[i].unsqueeze(1))
        into = [e for e, (_, w) in enumerate(edges) if w == i]
        for e in into:
            S = S + transitions[e][:, None, None] * states[edges[e][0]]
        wrong = value[i] - torch.einsum("hnp,hn->hp", S, key[i])
        wrong = beta[i].unsqueeze(1) * wrong
        states[i] = S + key[i].unsqueeze(2) * wrong.unsqueeze(1)
        out[i] = torch.einsum("hnp,hn->hp", states[i], query[i])
    rows = [out[i] for i in range(len(value))]
    return torch.stack(rows) if rows else value


def equations(
    A: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor
) -> Tensor:
    """The same on any graph: S = (I - beta k k^T) A S + beta k v^T, solved for S."""
    dtype, (V, H, N) = value.dtype, key.shape
    query, key, value, beta = (
        y.double().transpose(0, 1) for y in (query, key, value, beta)
    )
    outer = torch.einsum("hia,hib->hiab", key, key)
    erase = torch.eye(N, dtype=torch.double) - beta[..., None, None] * outer
    moved = torch.einsum("hiab,hij->hiajb", erase, A.double()).reshape(H, V * N, V * N)
    write = torch.einsum("hi,hia,hip->hiap", beta, key, value).flatten(1, 2)
    eye = torch.eye(V * N, dtype=torch.double)
    S = torch.linalg.solve(eye - moved, write).unflatten(1, (V, N))
    return torch.einsum("hiap,hia->ihp", S, query).to(dtype)


def gated_delta(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    value, key, query = projections(p, x, graphs)
    query, key = (
        by_head(unit_silu(y.unflatten(1, (p.groups, -1))), p.heads).transpose(0, 1)
        for y in (query, key)
    )
    value, gates = values(p, value), chimera_gates(p, x)[1]
    (index,), (edge,) = graphs.edges, edge_gates(p, graphs)
    beta = torch.sigmoid(gates[:, -1])
    if not p.acyclic:
        weight = chimera_transitions(p, index, gates, edge)
        y = equations(adjacency(index, weight, len(x)), query, key, value, beta)
        return chimera_block(p, y, x, value)
    node = softplus(gates[:, :-1]).flatten(1)  # [V, heads]
    delta = edge_means(index, node, p.selectivity, edge)
    weight = dag_transitions(index, delta, node)[0]
    y = memories(weight, index, query, key, value, beta)
    return chimera_block(p, y, x, value)


def rg_lru(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    u = p.linear("lin_value", x)
    if "local_weight" in p:
        u = p.rounded(along_dags(p["local_weight"], u, graphs.edges))
    h = torch.zeros_like(u)
    for d, index in enumerate(graphs.edges):
        heads = u.unflatten(1, (p.heads, -1))
        forget, take = (
            torch.einsum("vhp,hpq->vhq", heads, p["gate_weight"][g, d]).flatten(1)
            + p["gate_bias"][g, d]
            for g in range(2)
        )
        log_rate = torch.log(8 * softplus(-p["Lambda"][d]))
        gate = forget[index[1]]
        if graphs.attrs is not None and "lin_edge.weight" in p:
            own = p.linear("lin_edge", graphs.attrs[d])
            gate = gate + own.unflatten(1, (p.num_dags, -1))[:, d]

        def lost(gate: Tensor, log_rate: Tensor = log_rate) -> Tensor:
            """-log a."""
            return torch.exp(log_rate - log_1_plus_exp(-gate))

        # log(1 - a^2), which is log(-2 log a) where a rounds to one.
        def log_fresh(gate: Tensor, log_rate: Tensor = log_rate) -> Tensor:
            log_lost = math.log(2) + log_rate - log_1_plus_exp(-gate)
            small = log_lost < -30
            twice = torch.where(small, torch.ones_like(gate), log_lost.exp())
            return torch.where(small, log_lost, torch.log(-torch.expm1(-twice)))

        count = degrees(index, len(x))
        fresh = (
            log_sums(log_fresh(gate), index[1], len(x))
            - count.clamp(min=1).to(x.dtype).log()
        )
        root = torch.zeros_like(fresh) if p.released else log_fresh(forget)
        fresh = torch.where(count > 0, fresh, root)
        written = torch.exp(fresh / 2) * torch.sigmoid(take) * u
        scale = parent_scales(index, x, 2.0**10)[index[1]]
        L = inverse(adjacency(index, torch.exp(-lost(gate)) * scale, len(x)))
        h = h + torch.einsum("fij,jf->if", L, written)
    h = h / math.sqrt(p.num_dags)
    if "lin_gate.weight" in p:
        kind = "tanh" if p.released else "none"
        h = h * torch.nn.functional.gelu(p.linear("lin_gate", x), approximate=kind)
    return p.linear("lin_out", h)


# -------------------------------------------------------------------------------- pLSTM


def plstm_inputs(p: Layer, x: Tensor, graphs: Graphs) -> tuple[Tensor, ...]:
    parts = projections(p, x, graphs, "query key value")
    query, key, value = (y.unflatten(1, (p.heads, -1)) for y in parts)
    scale = math.sqrt(p.state_channels) * len(p["gate_bias"])  # a mean over DAGs
    return query / scale, key, value


def plstm_gates(p: Layer, x: Tensor) -> Tensor:
    """All gates of nodes, [V, DAGs, columns]; those with a bias come first."""
    bias = p["gate_bias"]
    gates = p.linear("lin_gate", x).unflatten(1, (len(bias), -1))
    zeros = bias.new_zeros(len(bias), gates.size(2) - bias.size(1))
    return gates + torch.cat([bias, zeros], 1)


def plstm_reads(
    p: Layer,
    index: Tensor,
    source: Tensor,
    mark: Tensor,
    T: Tensor,
    qkv: tuple[Tensor, ...],
) -> Tensor:
    """What nodes read of the states of edges, [V, H, P].

    Gates are [E, H, J], and T[h, e, i, e', j] leads from component j of e' to i of e.
    """
    query, key, value = qkv
    (E, H, J), V = source.shape, len(value)
    state = torch.arange(E * J)
    S, M = (
        matrix(
            state, end.repeat_interleave(J), y.transpose(1, 2).reshape(-1, H), E * J, V
        )
        for end, y in ((index[0], source), (index[1], mark))
    )
    L = M.mT @ inverse(T.reshape(H, E * J, E * J)) @ S
    return mixed(p, L, query, key, value)


def plstm_output(
    p: Layer, y: Tensor, direct: Tensor, qkv: tuple[Tensor, ...]
) -> Tensor:
    query, key, value = qkv
    own = direct * (query * key).sum(2)
    y = rms(y + own.unsqueeze(2) * value).flatten(1) * p["norm_weight"]
    return p.linear("lin_out", y)


def shares(score: Tensor, owner: Tensor) -> Tensor:
    """The softmax of scores [E, H] over the edges of each owner."""
    num = int(owner.max()) + 1 if len(owner) else 0
    return torch.exp(score - log_sums(score, owner, num)[owner])


def reflections(vectors: Tensor) -> Tensor:
    """The product of Householder reflections, [..., J, J], of [..., number, J]."""
    size = vectors.size(-1)
    out = eye = torch.eye(size, dtype=vectors.dtype)
    for v in vectors.unbind(-2):
        v = v / v.detach().abs().amax(-1, keepdim=True)
        v = v / v.square().sum(-1, keepdim=True).sqrt()
        out = out @ (eye - 2 * v.unsqueeze(-1) * v.unsqueeze(-2))
    return out


def plstm(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    H, J, D = p.heads, p.tracking, len(p["gate_bias"])
    index, dag, attr, mask = dags_of(p, len(x), graphs)
    own = dag % D  # the gates of an edge, which two DAGs may share
    lines = line_edges(p, index, dag)
    qkv = plstm_inputs(p, x, graphs)
    S, shared = H * J, H if p.mode == "P" else 0
    rows = shared if p.normalization == "row" else 0
    gates = plstm_gates(p, x)
    direct, tail, head = gates.split([H, 4 * S + rows, 3 * S + shared - rows], 2)
    tail, head = tail[index[0], own], head[index[1], own]
    gate, first = tail[:, : 3 * S] + head[:, : 3 * S], tail[:, 3 * S : 4 * S]
    score = tail[:, 4 * S :] if p.normalization == "row" else head[:, 3 * S :]
    if attr is not None:
        edge = p.linear("lin_edge", attr).unflatten(1, (D, -1))
        edge = edge[torch.arange(len(dag)), own]
        gate, first = gate + edge[:, : 3 * S], first + edge[:, 3 * S : 4 * S]
        score = score + edge[:, 4 * S :]
    source, mark, second = gate.unflatten(1, (3, H, J)).unbind(1)
    first, (out, into) = first.unflatten(1, (H, J)), lines
    # From out to into, by way of the node between them.
    T = torch.diag_embed(torch.tanh(5 * (first[out] + second[into])))
    if J > 1:
        vectors = p.linear("lin_track", x).unflatten(1, p["track_bias"].shape)
        turned = reflections(vectors + p["track_bias"])[index[0, into], own[into]]
        U, W = turned.unbind(1)
        T = U @ T @ W.mT
    if p.mode == "P":
        end, which = (index[1], out) if p.normalization == "row" else (index[0], into)
        alpha = shares(score, end * max(D, 2) + dag)
        T = alpha[which][..., None, None] * T
    table = x.new_zeros(H, len(dag), J, len(dag), J)
    for line, (a, b) in enumerate(lines.t().tolist()):
        step = torch.zeros_like(table)
        step[:, b, :, a] = 1
        table = table + step * T[line].view(H, 1, J, 1, J)
    source = source.sigmoid()
    if mask is not None:  # of whole states
        source, table = source * mask.view(-1, 1, 1), table * mask.view(-1, 1, 1, 1)
    y = plstm_reads(p, index, source, mark.sigmoid(), table, qkv)
    return plstm_output(p, y, direct.sigmoid().sum(1), qkv)


def dags_of(
    p: Layer, num_nodes: int, graphs: Graphs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The edges of all DAGs, the DAG of each, features and masks."""
    index, attr, mask = torch.cat(graphs.edges, 1), None, graphs.mask
    if "lin_edge.weight" in p and graphs.attrs is not None:
        attr = torch.cat(graphs.attrs)
    if p.order is None or p.num_dags > 1:
        sizes = torch.tensor([edges.size(1) for edges in graphs.edges])
        return index, torch.arange(len(sizes)).repeat_interleave(sizes), attr, mask
    place = torch.tensor(node_order(p.order, index, num_nodes), dtype=torch.long)
    before, after = place[index]
    kept = before != after
    dag = (before > after).long()  # to later nodes, then to earlier ones
    attr, mask = (None if y is None else y[kept] for y in (attr, mask))
    return index[:, kept], dag[kept], attr, mask


def node_order(order: str, index: Tensor, num_nodes: int) -> list[int]:
    """The place of each node: as numbered, by degree, by a breadth-first search, or by
    one of components with cycles and along the edges of others.
    """
    near: list[set[int]] = [set() for _ in range(num_nodes)]
    for j, i in index.t().tolist():
        if i != j:
            near[i].add(j)
            near[j].add(i)
    nodes = list(range(num_nodes))
    if order == "degree":
        nodes.sort(key=lambda i: len(near[i]))
    elif order in ("bfs", "auto"):
        found: dict[int, None] = {}
        for root in nodes:
            queue = [root]
            while queue:
                i = queue.pop(0)
                if i not in found:
                    found[i] = None
                    queue += sorted(near[i])
        nodes = list(found)
    if order == "auto":
        graph = networkx.DiGraph((j, i) for j, i in index.t().tolist() if i != j)
        graph.add_nodes_from(range(num_nodes))
        parts = list(networkx.weakly_connected_components(graph))
        for part in (graph.subgraph(part) for part in parts):
            if networkx.is_directed_acyclic_graph(part):
                free = sorted(nodes.index(i) for i in part)
                ordered = networkx.topological_sort(part)
                for place, i in zip(free, list(ordered), strict=True):
                    nodes[place] = i
    return [nodes.index(i) for i in range(num_nodes)]


def line_edges(p: Layer, index: Tensor, dag: Tensor) -> Tensor:
    """Pairs of consecutive edges of a DAG, and turns from the second to the first."""
    edges = [
        (*pair, d) for pair, d in zip(index.t().tolist(), dag.tolist(), strict=True)
    ]
    turns = p.order is not None and p.num_dags == 1 and p.turns
    lines = [
        (a, b)
        for a, (t, u, d) in enumerate(edges)
        for b, (v, w, e) in enumerate(edges)
        if u == v and (d == e or (turns and d > e and t != w))
    ]
    table = torch.tensor(lines, dtype=torch.long).view(-1, 2).t()
    if p.mode == "P":
        return table
    # D: by rank and number, keep a line unless it makes a second path to some state.
    reached: dict[int, set[int]] = {}
    kept = []
    for b in ancestors(table, len(edges)):
        reached[b] = {b}
        for a in sorted(a for a, to in lines if to == b):
            if not reached[a] & reached[b]:
                reached[b] |= reached[a]
                kept.append((a, b))
    return torch.tensor(kept, dtype=torch.long).view(-1, 2).t()


def plstm_grid(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    H, qkv = p.heads, plstm_inputs(p, x, graphs)
    assert graphs.sizes is not None
    turns = 4 if p.mode == "P" else 3
    gates = plstm_gates(p, x)
    names = [H, 2 * H, 2 * H, turns * H, gates.size(2) - (5 + turns) * H]
    direct, source, mark, decay, angle = gates.split(names, 2)
    source, mark = (y.sigmoid().unflatten(2, (2, H)) for y in (source, mark))
    decay = torch.tanh(5 * decay).unflatten(2, (turns, H))
    y = torch.zeros_like(qkv[2])
    for d in range(p.num_dags):
        index, vertical = grid_dag(graphs.sizes, d)
        S, M = source[index[0], d, vertical], mark[index[1], d, vertical]
        T = x.new_zeros(H, len(vertical), len(vertical))
        for a, (_, u) in enumerate(index.t().tolist()):
            for b in (index[0] == u).nonzero().view(-1).tolist():
                start, to = int(vertical[a]), int(vertical[b])
                if p.mode == "D":
                    if (start, to) == (1, 0):
                        continue
                    t = decay[u, d, start + to]
                else:
                    way = to if p.normalization == "column" else start
                    share = (angle[u, d] if way == 0 else -angle[u, d]).sigmoid()
                    t = decay[u, d, 2 * to + start] * share
                step = torch.zeros_like(T)
                step[:, b, a] = 1
                T = T + step * t.view(H, 1, 1)
        T = T.view(H, len(vertical), 1, len(vertical), 1)
        y = y + plstm_reads(p, index, S.unsqueeze(2), M.unsqueeze(2), T, qkv)
    return plstm_output(p, y, direct.sigmoid().sum(1), qkv)


# ------------------------------------------------------------------------- other layers


def graph_mamba(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    if "norm.weight" in p:
        x = layer_norm(p, "norm", x)
    inputs = p.linear("lin_in", x)
    permutations = graphs.permutations
    assert permutations is not None
    y = torch.zeros_like(inputs)
    for number in range(1 + p.bidirectional):
        for sequences in permutations:
            for nodes in sequences:
                way = nodes[::-1] if number else nodes
                out = selective_scan(p, f"scans.{number}", inputs[way])
                y = y.index_add(
                    0, torch.tensor(way, dtype=torch.long), out / len(permutations)
                )
    return p.linear("lin_out", y * silu(p.linear("lin_gate", x)))


def selective_scan(p: Layer, name: str, x: Tensor) -> Tensor:
    """A convolution and Mamba's recurrence along one sequence."""
    kernel, outs = p[f"{name}.conv_weight"], []
    A, D = -torch.exp(p[f"{name}.A_log"]), p[f"{name}.D"]
    u = torch.zeros_like(x)
    for k in range(min(kernel.size(1), len(x))):
        past = torch.cat([torch.zeros_like(x[:k]), x[: len(x) - k]])
        u = u + kernel[:, kernel.size(1) - 1 - k] * past
    u = silu(u + p[f"{name}.conv_bias"])
    rank = p[f"{name}.lin_delta.weight"].size(1)
    low, B, C = p.linear(f"{name}.lin_states", u).split([rank, A.size(1), A.size(1)], 1)
    delta = softplus(p.linear(f"{name}.lin_delta", low))
    h = torch.zeros_like(A)
    for t in range(len(x)):
        write = (delta[t] * u[t]).unsqueeze(1) * B[t]
        h = torch.exp(delta[t].unsqueeze(1) * A) * h + write
        outs.append(h @ C[t] + D * u[t])
    return torch.stack(outs) if outs else x


def layer_norm(p: Layer, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    x = x - x.mean(1, keepdim=True)
    big = x.detach().abs().amax(1, keepdim=True).clamp(min=1)
    variance = (x / big).square().mean(1, keepdim=True) + eps / big.square()
    return x / big / variance.sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def batch_norm(p: Layer, name: str, x: Tensor) -> Tensor:
    mean, variance = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    if p.training and len(x) > 1:
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
    scale = p[f"{name}.weight"] / torch.sqrt(variance + 1e-5)
    return (x - mean) * scale + p[f"{name}.bias"]


def k_hop_attention(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    (index,), H = graphs.edges, p.heads
    size = p.out_channels // H
    query, key, value = (
        p.linear(name, x).unflatten(1, (-1, size))
        for name in ("lin_query", "lin_key", "lin_value")
    )
    if p.rotary:
        angles = rotary_angles(x, graphs, size)
        query, key = rotated(query, angles), rotated(key, angles)
    steps = distances(index, len(x), p.k)
    bias = p["hop_bias"][steps.clamp(max=p.k)].permute(2, 0, 1)
    if "lin_edge.weight" in p and graphs.attrs is not None:
        (attr,) = graphs.attrs
        bias = bias + adjacency(index, p.linear("lin_edge", attr), len(x))
    logits = by_head(query, H) @ by_head(key, H).mT / math.sqrt(size) + bias
    weight = torch.softmax(logits.masked_fill(steps > p.k, -torch.inf), 2)
    y = weight @ by_head(value, H)
    return p.linear("lin_out", y.transpose(0, 1).flatten(1))


def distances(index: Tensor, num_nodes: int, k: int) -> Tensor:
    """The number of steps from j to i at [i, j], if it is at most k; else k + 1."""
    step = torch.zeros(num_nodes, num_nodes, dtype=torch.double)
    step[index[1], index[0]] = 1
    steps = torch.full((num_nodes, num_nodes), k + 1)
    reach = torch.eye(num_nodes, dtype=torch.double)
    for n in range(k + 1):
        steps = torch.where((reach > 0) & (steps > n), n, steps)
        reach = ((step @ reach) > 0).double()
    return steps


def rotary_angles(x: Tensor, graphs: Graphs, size: int) -> Tensor:
    """By positions [V, coordinates] or depths, each for as many pairs of channels."""
    pos = graphs.pos
    if pos is None:
        pos = torch.tensor(ranks(graphs.edges[0], len(x)))
    pos = pos.to(x.dtype).reshape(len(x), *pos.shape[1:] or [1])
    channels = size // pos.size(1)
    power = torch.arange(channels // 2).to(x.dtype) / (channels // 2)
    return (pos.unsqueeze(2) * 1e4**-power).flatten(1).unsqueeze(1)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 2)


def gated_gcn(p: Layer, x: Tensor, graphs: Graphs) -> Tensor | tuple[Tensor, Tensor]:
    (index,) = graphs.edges
    edge = p.linear("lin_target", x)[index[1]] + p.linear("lin_source", x)[index[0]]
    if graphs.attrs is not None:
        edge = edge + p.linear("lin_edge", graphs.attrs[0])
    edge = p.rounded(edge)
    gates = adjacency(index, edge.sigmoid(), len(x))  # [F, V, V]
    y = torch.einsum("fij,jf->if", gates, p.linear("lin_value", x))
    y = p.rounded(p.linear("lin_root", x) + y / (gates.sum(2).t() + p.conv.eps))

    def finished(y: Tensor, name: str) -> Tensor:
        if f"{name}.module.weight" in p:
            y = batch_norm(p, f"{name}.module", y)
        elif f"{name}.weight" in p:
            y = layer_norm(p, name, y)
        return y if p.act is None else p.act(y)

    if graphs.attrs is None or not p.update_edges:
        return finished(y, "norm")
    return finished(y, "norm"), finished(edge, "norm_edge")


def along_halves(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mean over two DAGs, of edges to later and to earlier nodes, where components
    have edges of both kinds.
    """

    def run(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
        if p.order is None or p.num_dags > 1:
            return formula(p, x, graphs)
        (index,) = graphs.edges
        place = torch.tensor(node_order("auto", index, len(x)), dtype=torch.long)
        before, after = place[index]
        later, earlier = (
            formula(
                p, x, graphs._replace(
                    edges=[index[:, kept]],
                    attrs=graphs.attrs and [graphs.attrs[0][kept]],
                    mask=None if graphs.mask is None else graphs.mask[kept],
                ),
            )
            for kept in (before < after, before > after)
        )  # fmt: skip
        graph = networkx.Graph(index.t().tolist())
        cyclic = torch.zeros(len(x), 1, dtype=torch.bool)
        for i in index[0, before > after].tolist():
            cyclic[list(networkx.node_connected_component(graph, i))] = True
        return torch.where(cyclic, (later + earlier) / 2, later)

    return run


FORMULAS = {
    "ChimeraConv": chimera,
    "ChimeraDAGConv": along_halves(chimera_dag),
    "ChimeraGridConv": chimera_dag,
    "ChimeraPathConv": chimera_path,
    "GatedDeltaConv": gated_delta,
    "GatedGCNConv": gated_gcn,
    "GraphMambaConv": graph_mamba,
    "KHopAttentionConv": k_hop_attention,
    "PLSTMConv": plstm,
    "PLSTMGridConv": plstm_grid,
    "RGLRUConv": along_halves(rg_lru),
}
