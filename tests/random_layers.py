"""Random layers on random graphs, and how far each is from its dense formula.

A case follows from its number: `check(draw(17))` is the same in any process.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from dense_layers import Graphs, dense
from torch import Tensor

from pyg_chimera import nn
from pyg_chimera.ops import node_score, node_sequences

__all__ = ["CONVS", "FAILED", "Case", "Result", "check", "draw"]

Edges = list[tuple[int, int]]

#: How large an error may be, relative to the largest entry, beside what the formula
#: itself loses at this precision.
BASE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 8 * 2**-8,
    torch.float16: 8 * 2**-11,
}
#: By how much it may exceed what the formula loses.
FACTOR = 40.0
#: Which statuses of a result are failures.
FAILED = ("wrong", "not finite", "error")
#: How often the formula is evaluated with rounding to measure what it loses.
DRAWS = 3


class Case(NamedTuple):
    """A layer in float32 (or float64), with parameters and inputs to be rounded."""

    seed: int
    name: str
    options: dict[str, Any]
    conv: torch.nn.Module
    x: Tensor
    graphs: Graphs
    score: Tensor | None  #: by which Graph-Mamba sorts nodes
    scale: float  #: the standard deviation of features
    dtype: torch.dtype
    autocast: bool  #: whether half precision is that of autocast, with float32 inputs
    compiler: str | None

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        way = " autocast" if self.autocast else ""
        way += f" compiled by {self.compiler}" if self.compiler else ""
        kind = str(self.dtype).removeprefix("torch.")
        edges = [index.size(1) for index in self.graphs.edges]
        return (
            f"seed {self.seed}: {self.name}({options}), {len(self.x)} nodes, {edges} "
            f"edges, scale {self.scale:.1e}, {kind}{way}"
        )


class Result(NamedTuple):
    """How far a layer is from its formula.

    `status` is "right"; "wrong", if an output or gradient is further off than allowed;
    "not finite", if it has NaN or infinity where the formula has none; "out of range",
    if the formula itself is not finite at this precision, so that there is nothing to
    compare; "ill-conditioned", if it loses a tenth at this precision, so that only
    outputs are compared; or "error", with the message.
    """

    status: str
    error: float  #: the largest relative error of outputs
    excess: float  #: the largest error, of gradients too, as a share of what is allowed
    worst: str  #: the tensor with this ratio, or the message


# ------------------------------------------------------------------------------ drawing


def draw(
    seed: int,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    compiling: float = 0.0,
) -> Case:
    """A case of this number, with what is given; a share of layers is compiled."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    drawn = r.choice(sorted(CONVS))  # drawn always, for the same case with it given
    name = drawn if name is None else name
    size = 10 ** r.uniform(-3, 5)
    scale = size if scale is None else scale
    half = [torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]
    kind = r.choice(half)
    dtype = kind if dtype is None else dtype
    autocast = r.random() < 0.5 and dtype in half[3:]
    share, native = r.random(), r.random() < 0.02
    compiler = ("inductor" if native else "aot_eager") if share < compiling else None
    num_nodes = r.choice([r.randint(0, 3), r.randint(2, 9), r.randint(5, 16)])

    options, kinds = CONVS[name](r)
    if name == "GatedGCNConv" and dtype in half[3:]:
        options["act"] = r.choice(["silu", None])  # rounding crosses kinks
    if options.get("solver") == "iterative" and scale > 10:
        options["solver"] = "auto"  # where rows sum to one, it refuses or is less exact
    conv = getattr(nn, name)(CHANNELS, **options)
    with torch.no_grad():
        if r.random() < 0.5:  # not as it starts
            for parameter in conv.parameters():
                parameter.add_(torch.randn_like(parameter) / 3)
        for key, buffer in conv.named_buffers():
            if "running" in key:
                buffer.copy_(torch.rand_like(buffer) + 0.5)

    parts = batch_of(num_nodes, r, on_grids="height" in kinds)
    graphs = Graphs([], batch=torch.tensor(parts, dtype=torch.long))
    if "height" in kinds:
        graphs = graphs._replace(sizes=grid_sizes(parts, r))
    else:
        edges = [
            torch.tensor(KINDS[kinds](parts, r), dtype=torch.long).view(-1, 2).t()
            for _ in range(1 if options.get("order") else options.get("num_dags", 1))
        ]
        graphs = graphs._replace(edges=[index.contiguous() for index in edges])
    few = min([num_nodes, *(index.size(1) for index in graphs.edges)]) < 5
    conv.train(name == "GatedGCNConv" and not few and r.random() < 0.5)  # batch norm
    if r.random() < 0.2 and graphs.sizes is None and name != "GraphMambaConv":
        graphs = graphs._replace(batch=None)
    if options.get("edge_dim"):
        size = r.choice([1.0, scale])
        attrs = [size * torch.randn(e.size(1), EDGE) for e in graphs.edges]
        graphs = graphs._replace(attrs=attrs)
    if options.get("rotary") and kinds == "any":
        coordinates = r.choice([1, 2]) if options["out_channels"] == 16 else 1
        graphs = graphs._replace(pos=4 * torch.rand(num_nodes, coordinates))
    score = None
    if name == "GraphMambaConv":
        score, graphs = sequences_of(conv, num_nodes, graphs)
    x = scale * torch.randn(num_nodes, CHANNELS)
    if graphs.sizes is not None and len(graphs.sizes) != 1:
        compiler = None
    if kinds == "any" and getattr(conv, "order", None) == "auto":
        compiler = None  # only DAGs then
    return Case(seed, name, options, conv, x, graphs, score, scale, dtype, autocast,
                compiler)  # fmt: skip


def batch_of(num_nodes: int, r: random.Random, on_grids: bool) -> list[int]:
    """The graph of each node; grids are consecutive."""
    parts = [r.randint(0, r.choice([0, 1, 3])) for _ in range(num_nodes)]
    return sorted(parts) if on_grids else parts


def grid_sizes(parts: list[int], r: random.Random) -> list[tuple[int, int]]:
    """The rows and columns of each grid, of any area."""
    sizes = []
    for graph in sorted(set(parts)):
        area = parts.count(graph)
        height = r.choice([h for h in range(1, area + 1) if area % h == 0])
        sizes.append((height, area // height))
    return sizes


def members(parts: list[int], r: random.Random) -> Iterator[list[int]]:
    """The nodes of each graph, in random order."""
    for graph in sorted(set(parts)):
        nodes = [v for v, part in enumerate(parts) if part == graph]
        r.shuffle(nodes)
        yield nodes


def any_edges(parts: list[int], r: random.Random) -> Edges:
    """With self-loops and duplicates, or in both directions, or of a path."""
    edges: Edges = []
    for nodes in members(parts, r):
        kind = r.choice(["directed", "undirected", "path", "none"])
        if kind == "path":
            edges += path_edges(nodes, r)
        elif kind != "none":
            count = r.randint(0, 3 * len(nodes))
            new = [(r.choice(nodes), r.choice(nodes)) for _ in range(count)]
            both = [(i, j) for j, i in new] if kind == "undirected" else []
            edges += new + both
    r.shuffle(edges)
    return edges


def dag_edges(parts: list[int], r: random.Random) -> Edges:
    """From earlier to later nodes of a random order, some of them twice."""
    edges: Edges = []
    for nodes in members(parts, r):
        count = r.randint(0, 2 * len(nodes)) if len(nodes) > 1 else 0
        pairs = [sorted(r.sample(range(len(nodes)), 2)) for _ in range(count)]
        edges += [(nodes[a], nodes[b]) for a, b in pairs]
    r.shuffle(edges)
    return edges


def path_edges(nodes: list[int], r: random.Random) -> Edges:
    """Of undirected paths, some of which are broken."""
    edges: Edges = []
    for pair in pairwise(nodes):
        if r.random() < 0.9:
            edges += [pair, pair[::-1]]
    return edges


def chain_edges(nodes: list[int], r: random.Random) -> Edges:
    return [pair for pair in pairwise(nodes) if r.random() < 0.9]


def each(edges_of: Callable[[list[int], random.Random], Edges]) -> Callable[..., Edges]:
    """Such edges of each graph, in random order."""

    def edges(parts: list[int], r: random.Random) -> Edges:
        out = [edge for nodes in members(parts, r) for edge in edges_of(nodes, r)]
        r.shuffle(out)
        return out

    return edges


KINDS: dict[str, Callable[[list[int], random.Random], Edges]] = {
    "any": any_edges,
    "dag": dag_edges,
    "path": each(path_edges),
    "chain": each(chain_edges),
}


def sequences_of(
    conv: Any, num_nodes: int, graphs: Graphs
) -> tuple[Tensor | None, Graphs]:
    """A score for layers that need one, and the sequences of nodes of any layer."""
    m = 1 if conv.order == "order" else conv.num_eval_permutations
    score, given = torch.zeros(num_nodes, dtype=torch.long), None
    if conv.order is None:
        score = given = torch.randperm(num_nodes).float()
    elif conv.order not in ("order", "random"):
        score = node_score(graphs.edges[0], num_nodes, conv.order, graphs.batch)
    index, ptr = node_sequences(
        score, graphs.batch, num_permutations=m, num_bins=conv.num_bins,
        clusters=conv.order == "cluster", shuffle=conv.order != "order", seed=conv.seed,
    )  # fmt: skip
    lists = [index[a:b].tolist() for a, b in pairwise(ptr.tolist())]
    size = max(len(lists) // m, 1)
    permutations = [lists[i : i + size] for i in range(0, len(lists), size)] or [[]]
    return given, graphs._replace(permutations=permutations)


# ----------------------------------------------------------------------------- checking


def check(case: Case) -> Result:
    """Compares outputs and gradients of all parameters, nodes and edges.

    The formula is evaluated in float64 on what the layer is given, rounded inputs and
    parameters. An error is the largest difference over a tensor's entries. It may be
    `BASE` of the tensor's largest entry, plus `FACTOR` times what the formula loses at
    this precision: the largest of `DRAWS` errors of the formula itself, evaluated in
    the layer's dtype (in half precision: in float32, but for projections and what
    enters them, whose gradients are off by up to one epsilon, too) from inputs and
    parameters each of which is off by up to one epsilon,
    and with sums over nodes that are off by up to one epsilon of their absolute terms,
    and with gradients of transitions on cycles that are off by one epsilon, times the
    largest entry of the resolvent for that of float64.
    An ill-conditioned case is thus no failure, and a well-conditioned one that a layer
    computes badly is one. Gradients of inputs may also be off by 8 epsilons of the sum
    of which they are gradients, those of parameters by one times the largest input,
    and those of gates by 128 times that: where gates saturate, they are smaller than
    rounding errors. A gradient that is zero for any inputs, such as that of a bias
    before batch norm, may be off by 100 `BASE` of the largest gradient.
    """
    dtype, wide = case.dtype, torch.promote_types(case.dtype, torch.float32)
    held = wide if case.autocast else dtype  # the dtype of inputs and parameters
    conv = copy.deepcopy(case.conv).to(held)
    x, *attrs = (y.to(held) for y in (case.x, *(case.graphs.attrs or [])))
    leaves = {"x": x, **{f"edge_attr.{d}": y for d, y in enumerate(attrs)}}
    leaves = {**leaves, **dict(conv.named_parameters())}
    buffers = {k: v for k, v in conv.named_buffers() if v.is_floating_point()}
    if not all(y.isfinite().all() for y in leaves.values()):
        return Result("out of range", math.nan, 0.0, "inputs")

    def formula(
        convert: Callable[[Tensor], Tensor], **errors: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        given = {k: convert(v.detach()).requires_grad_() for k, v in leaves.items()}
        own = given | {k: v.to(given["x"].dtype) for k, v in buffers.items()}
        graphs = case.graphs
        if attrs:
            graphs = graphs._replace(
                attrs=[given[f"edge_attr.{d}"] for d in range(len(attrs))]
            )
        eps = torch.finfo(wide).eps
        outs = dense(conv, own, given["x"], graphs, eps, **errors)
        return results(outs, given, case)

    try:
        exact = formula(lambda y: y.double())
    except torch.linalg.LinAlgError:
        return Result("out of range", math.nan, 0.0, "singular")
    if not exact["out.0"].isfinite().all():
        return Result("out of range", math.nan, 0.0, "out.0")
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(case.seed)

    def noise(like: Tensor) -> Tensor:
        return 2 * torch.rand(like.shape, generator=generator, dtype=torch.double) - 1

    def off(y: Tensor) -> Tensor:
        return (y * (1 + eps * noise(y))).to(wide)

    overflow = []

    def rounded(y: Tensor) -> Tensor:
        out = y.to(dtype).to(wide)
        if not out.isfinite().all():
            overflow.append(out)
        if out.requires_grad:  # of biases before batch norm, gradients cancel
            out.register_hook(lambda g: (g * (1 + eps * noise(g))).to(g.dtype))
        return out

    def shaken(y: Tensor, size: Tensor) -> Tensor:
        return y + (torch.finfo(wide).eps * noise(y) * size.detach()).to(wide)

    def solved(y: Tensor, size: Tensor) -> None:
        """Systems are solved in float64."""
        loss = torch.finfo(wide).eps + torch.finfo(torch.float64).eps * size.double()
        y.register_hook(lambda g: (g * (1 + loss * noise(g))).to(g.dtype))

    def stored(y: Tensor) -> Tensor:
        """Transitions are float64."""
        return y * (1 + torch.finfo(torch.float64).eps * noise(y)).to(y.dtype)

    errors = {"rounded": rounded, "shaken": shaken, "solved": solved, "stored": stored}
    try:
        draws = [formula(off, **errors) for _ in range(DRAWS)]
    except torch.linalg.LinAlgError:
        return Result("out of range", math.nan, 0.0, "singular")
    if overflow or not all(drawn["out.0"].isfinite().all() for drawn in draws):
        return Result("out of range", math.nan, 0.0, "out.0")
    try:
        found = layer_results(case, conv, x, attrs)
    except Exception as error:
        return Result("error", math.nan, 0.0, f"{type(error).__name__}: {error}")
    largest = x.abs().max().item() if x.numel() else 0.0
    return judged(case, exact, found, draws, max(largest, 1))


def judged(
    case: Case,
    exact: dict[str, Tensor],
    found: dict[str, Tensor],
    draws: list[dict[str, Tensor]],
    features: float,
) -> Result:
    limits = torch.finfo(case.dtype)
    excess, worst, error = 0.0, "", math.nan
    total, solver = exact.pop("total").item(), case.options.get("solver")
    steepest = max(
        y.abs().max().item()
        for name, y in exact.items()
        if not name.startswith("out.") and y.numel()
    )
    for name, expected in exact.items():
        if expected.numel() == 0:
            continue
        loose = [draw[name].to(case.dtype).double() for draw in draws]
        largest = expected.abs().max().item()
        within = all(y.isfinite().all() for y in (expected, *loose))
        if not within or largest > limits.max / 4:
            if name == "out.0":
                return Result("out of range", math.nan, 0.0, name)
            continue
        if not found[name].isfinite().all():
            return Result("not finite", math.nan, math.inf, name)
        lost = max((y - expected).abs().max().item() for y in loose)
        wrong = (found[name].double() - expected).abs().max().item()
        base = BASE[case.dtype]
        if solver == "iterative":  # residuals are of that size, not errors
            base *= 1000
        elif case.options.get("acyclic") is False:
            base *= 100  # systems are solved up to the largest of all entries
        allowed = FACTOR * lost + base * largest
        if not name.startswith("out."):
            outer = name == "x" or name.startswith("edge_attr.")
            gate = any(part in name for part in ("gate", "delta", "track", "edge_"))
            noise = limits.eps * total
            allowed += noise * (8 if outer else features * (128 if gate else 1))
            if largest < 1e-12 * steepest:
                allowed += 100 * BASE[case.dtype] * steepest
        allowed += 64 * limits.smallest_normal * limits.eps  # underflow
        if name == "out.0":
            error = wrong / max(largest, limits.smallest_normal)
            if lost > largest / 10 and wrong <= allowed:
                return Result("ill-conditioned", error, wrong / allowed, name)
        if wrong / allowed > excess:
            excess, worst = wrong / allowed, name
    return Result("wrong" if excess > 1 else "right", error, excess, worst)


def results(
    outs: tuple[Tensor, ...], leaves: dict[str, Tensor], case: Case
) -> dict[str, Tensor]:
    """The outputs, and the gradients of a random combination of them, by name."""
    generator = torch.Generator().manual_seed(case.seed)
    weigh = [
        torch.randn(y.shape, generator=generator).to(case.dtype).to(y.dtype)
        for y in outs
    ]
    grads = torch.autograd.grad(
        outs, list(leaves.values()), weigh, allow_unused=True, materialize_grads=True
    )
    total = sum((y.detach() * w).abs().sum() for y, w in zip(outs, weigh, strict=True))
    named = {f"out.{i}": y.detach() for i, y in enumerate(outs)} | {"total": total}
    return named | dict(zip(leaves, grads, strict=True))


def layer_results(
    case: Case, conv: torch.nn.Module, x: Tensor, attrs: list[Tensor]
) -> dict[str, Tensor]:
    x, *attrs = (y.detach().clone().requires_grad_() for y in (x, *attrs))
    leaves = {"x": x, **{f"edge_attr.{d}": y for d, y in enumerate(attrs)}}
    layer: Any = conv
    if case.compiler is not None:
        torch._dynamo.reset()
        layer = torch.compile(conv, backend=case.compiler, fullgraph=True)
    context = nullcontext()
    if case.autocast:
        context = torch.autocast("cpu", dtype=case.dtype)  # type: ignore[assignment]
    with context:
        outs = call(layer, case, x, attrs)
    return results(outs, leaves | dict(conv.named_parameters()), case)


def call(layer: Any, case: Case, x: Tensor, attrs: list[Tensor]) -> tuple[Tensor, ...]:
    graphs = case.graphs
    many = case.options.get("num_dags", 1) > 1
    edges: Any = graphs.edges if many or not graphs.edges else graphs.edges[0]
    attr: Any = None if not attrs else attrs if many else attrs[0]
    if graphs.sizes is not None:
        sides = torch.tensor(graphs.sizes, dtype=torch.long).view(-1, 2)
        height, width = sides.unbind(1)
        if case.compiler is not None:  # takes numbers only
            height, width = graphs.sizes[0]
        out = layer(x, batch=graphs.batch, height=height, width=width)
    elif case.name == "GraphMambaConv":
        out = layer(x, edges, batch=graphs.batch, score=case.score)
    elif case.name == "GatedGCNConv":
        out = layer(x, edges, attr)
    elif graphs.pos is not None:
        out = layer(x, edges, attr, graphs.batch, pos=graphs.pos)
    else:
        out = layer(x, edges, attr, graphs.batch)
    return out if isinstance(out, tuple) else (out,)


# ------------------------------------------------------------------------------ options

CHANNELS, EDGE = 5, 3


def flag(r: random.Random) -> bool:
    return r.random() < 0.5


def some(r: random.Random, **options: Any) -> dict[str, Any]:
    """Each option with one of its values, or left out."""
    return {k: r.choice(v) for k, v in options.items() if flag(r)}


def heads_of(r: random.Random, multiple: int = 1) -> dict[str, Any]:
    heads = r.choice([1, 1, 2, 4])
    size = multiple * r.choice([2, 3, 4, 6])  # the norm of one number is its sign
    return {"heads": heads, "out_channels": heads * size}


def chimera_options(r: random.Random) -> dict[str, Any]:
    options = heads_of(r)
    groups = r.choice([g for g in (1, 2, 4) if options["heads"] % g == 0])
    options |= {"state_channels": r.choice([2, 3, 5]), "groups": groups}
    return options | some(
        r, edge_dim=[EDGE], gated=[False], bias=[False], reach=[None, (1.0, 1000.0)],
        backend=["torch"],
    )  # fmt: skip


def with_form(
    r: random.Random, options: dict[str, Any], kind: str, *, masks: bool = True
) -> dict[str, Any]:
    chunks = kind in ("chain", "path") and "backend" not in options
    forms = ["state"] + ["mask"] * masks + ["chunk"] * chunks
    return options | some(r, form=forms)


def chimera(r: random.Random) -> tuple[dict[str, Any], str]:
    kind = r.choice(["any", "any", "path", "chain"])
    options = chimera_options(r) | some(
        r, local_conv=[True], qk_norm=[False], norm=[None]
    )
    if flag(r):
        options |= some(r, gamma=[0.5, 0.99], log_sums=[1, 3], input_gate=["free"])
        options |= some(r, reach_nodes=[1, 30])
    elif flag(r):
        options["normalization"] = "released"
    solvers = ["auto", "auto", "dense", "neumann"]
    if "backend" not in options:  # PyTorch has dense matrices only
        solvers += ["sparse", "iterative"]
    solver = options["solver"] = r.choice(solvers)
    if solver == "neumann":
        options["num_terms"] = r.randint(0, 5)
    if solver == "iterative":
        options.pop("log_sums", None)
    if solver in ("auto", "sparse") and "backend" not in options:
        options = with_form(r, options, kind)
    return options, kind


def chimera_path(r: random.Random) -> tuple[dict[str, Any], str]:
    options = chimera_options(r) | some(r, local_conv=[True], qk_norm=[False])
    if "backend" not in options:
        options = with_form(r, options, "path")
    return options, "path"


def dag_options(r: random.Random) -> tuple[dict[str, Any], int]:
    dags = r.choice([1, 1, 2, 4])
    shares = ["all", "none"] + ["diagonal"] * (dags > 1) + ["row"] * (dags == 4)
    return some(
        r, qk_norm=[False], selectivity=["target"], roots=["silent"],
        norm_before_gate=[False],
    ) | {"num_dags": dags, "share": r.choice(shares)}, dags  # fmt: skip


def chimera_dag(r: random.Random) -> tuple[dict[str, Any], str]:
    options, dags = dag_options(r)
    kind = r.choice(["dag", "dag", "chain"] + ["any"] * (dags == 1))
    options |= chimera_options(r) | some(r, local_conv=[True])
    return with_form(r, options, kind, masks=False), kind


def chimera_grid(r: random.Random) -> tuple[dict[str, Any], str]:
    options, more = chimera_options(r), some(r, window=[None, (1, 4), (2, 3)])
    options.pop("edge_dim", None)
    options |= dag_options(r)[0] | more
    return with_form(r, options, "height", masks=False), "height"


def gated_delta(r: random.Random) -> tuple[dict[str, Any], str]:
    options = chimera_options(r) | some(r, conv_kernel=[1, 2, 4])
    options["acyclic"] = flag(r)
    if not options["acyclic"]:
        return options, "any"
    kind = r.choice(["dag", "chain"])
    options |= some(r, selectivity=["target"])
    return options | some(r, form=["state", "mask"]), kind


def rg_lru(r: random.Random) -> tuple[dict[str, Any], str]:
    options = heads_of(r) | {"num_dags": r.choice([1, 1, 2, 3])} | some(
        r, edge_dim=[EDGE], conv_kernel=[1, 2], gated=[False], bias=[False],
        reach=[None, (4.0, 64.0)], released=[True], backend=["torch"],
    )  # fmt: skip
    kinds = ["dag", "chain"] + ["any"] * (options["num_dags"] == 1)
    return options, r.choice(kinds)


def plstm_options(r: random.Random) -> dict[str, Any]:
    return heads_of(r) | {"mode": r.choice(["P", "D"])} | some(
        r, state_channels=[1, 3], normalization=["row"], bias=[False], reach=[None],
        backend=["torch"],
    )  # fmt: skip


def plstm(r: random.Random) -> tuple[dict[str, Any], str]:
    options = plstm_options(r) | some(r, edge_dim=[EDGE], tracking=[2, 3])
    if flag(r):
        options["order"] = r.choice(["order", "degree", "bfs", "auto"])
        return options | some(r, turns=[False], form=["state"]), "any"
    kind = r.choice(["dag", "chain"])
    options["num_dags"] = r.choice([1, 1, 2, 3])
    if options.get("tracking", 1) > 1:
        return with_form(r, options, "dag", masks=False), kind
    return with_form(r, options, kind, masks=False), kind


def plstm_grid(r: random.Random) -> tuple[dict[str, Any], str]:
    more = {"num_dags": r.choice([1, 2, 4])} | some(r, window=[None, (1, 4), (2, 3)])
    options = plstm_options(r) | more
    masks = "backend" not in options
    return with_form(r, options, "height", masks=masks), "height"


def graph_mamba(r: random.Random) -> tuple[dict[str, Any], str]:
    orders = ["order", "degree", "pagerank", "bfs", "random", "cluster", None]
    return {"order": r.choice(orders)} | some(
        r, state_channels=[1, 3], conv_kernel=[1, 2, 9], expand=[2],
        num_eval_permutations=[1, 3], num_bins=[2], bidirectional=[True], norm=[False],
        bias=[True], backend=["torch"],
    ), "any"  # fmt: skip


def k_hop_attention(r: random.Random) -> tuple[dict[str, Any], str]:
    options = heads_of(r, 2) | {"k": r.choice([1, 2, 3])} | some(
        r, rotary=[True], edge_dim=[EDGE], bias=[False], backend=["torch"],
    )  # fmt: skip
    options["groups"] = r.choice([g for g in (1, 2, 4) if options["heads"] % g == 0])
    return options, r.choice(["any", "dag", "chain"])


def gated_gcn(r: random.Random) -> tuple[dict[str, Any], str]:
    return {
        "out_channels": r.choice([3, 8]),
        "edge_dim": r.choice([0, EDGE]),
        "norm": r.choice([None, "layer_norm", "batch_norm", "graph_batch_norm"]),
    } | some(r, update_edges=[False], bias=[False], act=[None]), "any"


#: For each layer, its options and the kind of graph that they are for.
CONVS: dict[str, Callable[[random.Random], tuple[dict[str, Any], str]]] = {
    "ChimeraConv": chimera,
    "ChimeraDAGConv": chimera_dag,
    "ChimeraGridConv": chimera_grid,
    "ChimeraPathConv": chimera_path,
    "GatedDeltaConv": gated_delta,
    "GatedGCNConv": gated_gcn,
    "GraphMambaConv": graph_mamba,
    "KHopAttentionConv": k_hop_attention,
    "PLSTMConv": plstm,
    "PLSTMGridConv": plstm_grid,
    "RGLRUConv": rg_lru,
}
