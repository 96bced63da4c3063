"""The hybrid layers once more, by loops and dense matrices, without the package."""

import math
from collections.abc import Callable
from typing import Any

import torch
from dense_layers import (
    Graphs,
    Layer,
    adjacency,
    along_halves,
    ancestors,
    by_head,
    chimera_block,
    chimera_gates,
    chimera_transitions,
    dag_transitions,
    distances,
    edge_gates,
    edge_means,
    equations,
    memories,
    projections,
    ranks,
    rms,
    softplus,
    unit_silu,
    values,
)
from torch import Tensor

__all__ = ["HYBRIDS", "dense"]


def dense(
    conv: torch.nn.Module, parameters: dict, x: Tensor, graphs: Graphs, **options: Any
) -> Tensor:
    """What a hybrid layer returns in float64."""
    eps, same = torch.finfo(torch.double).eps, lambda y, *_: y
    if getattr(conv, "flow", "") == "target_to_source":
        graphs = graphs._replace(edges=[index.flip(0) for index in graphs.edges])
    layer = Layer(conv, parameters, eps, same, same, lambda *_: None, same)
    return HYBRIDS[type(conv).__name__](layer, x, graphs, **options)


# ----------------------------------------------------------------------------- memories


def surprised(
    transitions: Tensor, index: Tensor, query: Tensor, key: Tensor, value: Tensor,
    beta: Tensor, tau: Tensor,
) -> Tensor:  # fmt: skip
    """As `dense_layers.memories`, one node and head after the other."""
    out, states = torch.zeros_like(value), {}
    for i in ancestors(index, len(value)):
        for h in range(value.size(1)):
            S = torch.zeros_like(torch.outer(key[i, h], value[i, h]))
            for e, (j, target) in enumerate(index.t().tolist()):
                if target == i:
                    S = S + transitions[e, h] * states[j, h]
            unexpected = value[i, h] - query[i, h] @ S
            surprise = torch.sigmoid((unexpected**2).mean() / tau[h])
            written = beta[i, h] * surprise * (value[i, h] - key[i, h] @ S)
            states[i, h] = S + torch.outer(key[i, h], written)
            row = torch.zeros_like(out)
            row[i, h] = 1
            out = out + row * (query[i, h] @ states[i, h])
    return out


def gates_of(p: Layer, x: Tensor, graphs: Graphs, each: int) -> tuple[Tensor, ...]:
    """Value, query and key by head; transitions, or A on graphs with cycles; beta."""
    value, key, query = projections(p, x, graphs)
    query, key = (
        by_head(unit_silu(y.unflatten(1, (p.groups, -1))), p.heads).transpose(0, 1)
        for y in (query, key)
    )
    gates, (edge,), (index,) = (
        chimera_gates(p, x)[1],
        edge_gates(p, graphs),
        graphs.edges,
    )
    beta = torch.sigmoid(gates[:, -1])
    if p.acyclic:
        node = softplus(gates[:, 0])
        delta = edge_means(index, node, p.selectivity, edge)
        weight = dag_transitions(index, delta, node)[0]
    else:
        weight = chimera_transitions(p, index, gates, edge)
    weight, beta = (y.unflatten(1, (p.heads, each)) for y in (weight, beta))
    return values(p, value), query, key, weight, beta


def surprise_gated(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    value, query, key, weight, beta = gates_of(p, x, graphs, 1)
    tau = p["log_temperature"].exp()
    y = surprised(weight[..., 0], graphs.edges[0], query, key, value, beta[..., 0], tau)
    return chimera_block(p, y, x, value)


def hierarchical(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    value, query, key, weight, beta = gates_of(p, x, graphs, 3)
    index, tau = graphs.edges[0], p["log_temperature"].exp()
    fast, slow = (
        memories(weight[..., m], index, query, key, value, beta[..., m]) for m in (0, 1)
    )
    new = surprised(weight[..., 2], index, query, key, value, beta[..., 2], tau)
    share = p.linear("lin_router", x).unflatten(1, (p.heads, 3)).exp()
    share = (share / share.sum(2, keepdim=True)).unsqueeze(3).unbind(2)
    y = share[0] * fast + share[1] * slow + share[2] * new
    return chimera_block(p, y, x, value)


def contrast(p: Layer, depth: int) -> tuple[Tensor, float]:
    """The factor of each head, and where it starts."""
    start = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
    (q1, k1), (q2, k2) = p["contrast.weight"]
    return (q1 * k1).sum(1).exp() - (q2 * k2).sum(1).exp() + start, start


def differential_delta(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    value, query, key, weight, beta = gates_of(p, x, graphs, 2)
    (index,), read = graphs.edges, []
    for m in (0, 1):
        own, share = weight[..., m], beta[..., m]
        if p.acyclic:
            read.append(memories(own, index, query, key, value, share))
        else:
            A = adjacency(index, own, len(x))
            read.append(equations(A, query, key, value, share))
    factor, _ = contrast(p, 3 if p.acyclic else 1)  # as in the table of layers
    return chimera_block(p, read[0] - factor.view(-1, 1) * read[1], x, value)


# ---------------------------------------------------------------------------- attention


def turned(y: Tensor, place: Tensor, stretch: float = 1.0) -> Tensor:
    """Pairs of channels, one of each half, as complex numbers, times the number of
    length one at their angles; the base is that of YaRN.
    """
    size = y.size(-1) // 2
    power = torch.arange(size, dtype=torch.double) / size
    base = 1e4 * stretch ** (2 * size / (2 * size - 2)) if stretch > 1 else 1e4
    turn = torch.exp(1j * place.double().unsqueeze(-1) * base**-power)
    z = torch.complex(y[..., :size], y[..., size:]) * turn.unsqueeze(-2)
    return torch.cat([z.real, z.imag], -1)


def maps(p: Layer, query: Tensor, key: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Attention of heads, [H, V, V], given queries and keys [V, H, N]."""
    logits = torch.einsum("ihn,jhn->hij", query, key) / math.sqrt(query.size(2)) + bias
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), 2)


def biases(p: Layer, x: Tensor, graphs: Graphs) -> tuple[Tensor, Tensor]:
    """Of distances and edges, [maps, V, V], and who sees whom."""
    (index,) = graphs.edges
    steps = distances(index, len(x), p.k)
    bias = p["hop_bias"][steps.clamp(max=p.k)].permute(2, 0, 1)
    if "lin_edge.weight" in p and graphs.attrs is not None:
        bias = bias + adjacency(index, p.linear("lin_edge", graphs.attrs[0]), len(x))
    return bias, steps <= p.k


def along_edges(p: Layer, x: Tensor, graphs: Graphs, stretch: float = 1.0) -> Tensor:
    """With keys and values of groups, from a latent vector if there is one."""
    source = x
    if "lin_latent.weight" in p:
        source = rms(p.linear("lin_latent", x)) * p["norm_latent.weight"]
    size, place = (
        p.out_channels // p.heads,
        torch.tensor(ranks(graphs.edges[0], len(x))),
    )
    query = p.linear("lin_query", x).unflatten(1, (-1, size))
    key, value = (
        p.linear(name, source).unflatten(1, (-1, size)).repeat_interleave(
            p.heads // p.groups, 1
        )
        for name in ("lin_key", "lin_value")
    )  # fmt: skip
    if p.rotary:
        query, key = turned(query, place, stretch), turned(key, place, stretch)
    A = maps(p, query, key, *biases(p, x, graphs))
    return p.linear("lin_out", torch.einsum("hij,jhp->ihp", A, value).flatten(1))


def window(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    return along_edges(p, x, graphs, p.stretch)


def differential_attention(p: Layer, x: Tensor, graphs: Graphs) -> Tensor:
    """The difference of matrices, one head after the other."""
    place, heads = torch.tensor(ranks(graphs.edges[0], len(x))), []
    query, key, value = (p.linear(f"lin_{y}", x) for y in ("query", "key", "value"))
    query = query.unflatten(1, (p.groups, 2, p.heads // p.groups, -1))
    key, value = key.unflatten(1, (p.groups, 2, -1)), value.unflatten(1, (p.groups, -1))
    bias, seen = biases(p, x, graphs)
    bias = bias.unflatten(0, query.shape[1:4])
    factor, start = contrast(p, 3 if p.edge_dim else 1)  # as in the table of layers
    for h in range(p.heads):
        g, r = divmod(h, p.heads // p.groups)
        both = []
        for m in (0, 1):
            q, k = query[:, g, m, r].unsqueeze(1), key[:, g, m].unsqueeze(1)
            if p.rotary:
                q, k = turned(q, place), turned(k, place)
            both.append(maps(p, q, k, bias[g, m, r], seen)[0])
        y = (both[0] - factor[h] * both[1]) @ value[:, g]
        heads.append(rms(y) * p["contrast.norm.weight"] * (1 - start))
    return p.linear("lin_out", torch.cat(heads, 1))


def differential_dense(
    p: Layer, x: Tensor, _: Graphs, depth: int = 1, causal: bool = False,
    rotary: bool = False,
) -> Tensor:  # fmt: skip
    """Of one graph, [N, F]: first maps have the first halves of channels."""
    query, key, value = (
        y.unflatten(1, (p.heads, -1)) for y in p.linear("lin_in", x).chunk(3, 1)
    )
    seen, place = torch.ones(len(x), len(x), dtype=torch.bool), torch.arange(len(x))
    seen = seen.tril() if causal else seen
    both = []
    for q, k in zip(query.chunk(2, 2), key.chunk(2, 2), strict=True):
        if rotary:
            q, k = turned(q, place), turned(k, place)
        both.append(maps(p, q, k, torch.zeros(()), seen))
    factor, start = contrast(p, depth)
    A = both[0] - factor.view(-1, 1, 1) * both[1]
    y = rms(torch.einsum("hij,jhp->ihp", A, value)) * p["contrast.norm.weight"]
    return p.linear("lin_out", (y * (1 - start)).flatten(1))


HYBRIDS: dict[str, Callable[..., Tensor]] = {
    "SurpriseGatedDeltaConv": along_halves(surprise_gated),
    "HierarchicalMemoryConv": along_halves(hierarchical),
    "DifferentialGatedDeltaConv": differential_delta,
    "DifferentialAttentionConv": differential_attention,
    "DifferentialSelfAttention": differential_dense,
    "LatentAttentionConv": along_edges,
    "WindowAttentionConv": window,
}
