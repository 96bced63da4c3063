import copy
from functools import partial
from itertools import chain, pairwise

import asserts
import pytest
import torch
from asserts import assert_is_formula, assert_near, assert_permutes
from dense_layers import Graphs
from hypothesis import given, settings
from plstm import named
from strategies import Batch, batches
from torch import Tensor
from torch_geometric.utils import (
    grid,
)

from pyg_chimera.nn.conv.graph_mamba_conv import GraphMambaConv
from pyg_chimera.ops import explain
from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.ops.structure.node_sequences import node_sequences

CHANNELS, STATES = 6, 3
GRAPH = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 0), (0, 1), (4, 5), (5, 4), (2, 6), (6, 0)]
NODES = 7  # node 3 is alone
BATCH = [1, 1, 1, 4, 0, 0, 1]  # unsorted; some graphs have no nodes

Sequences = list[list[int]]


def formula(conv: GraphMambaConv, x: Tensor, permutations: list[Sequences]) -> Tensor:
    for sequences in permutations:
        assert sorted(chain(*sequences)) == list(range(x.size(0)))
    return asserts.formula(conv, x, Graphs([], permutations=permutations))


def by_hand(score: list[float], batch: list[int] | None = None) -> Sequences:
    """The nodes of each graph, by score."""
    batch = [0] * len(score) if batch is None else batch
    nodes = sorted(range(len(score)), key=score.__getitem__)
    return [[v for v in nodes if batch[v] == graph] for graph in sorted(set(batch))]


def drawn(num_nodes: int, score, batch=None, copies=1, **kwargs) -> list[Sequences]:
    """The sequences of each permutation, as the operator says."""
    kwargs["num_permutations"] = copies
    score = torch.zeros(num_nodes) if score is None else score
    index, ptr = node_sequences(score, batch, **kwargs)
    assert ptr[0] == 0
    assert ptr[-1] == copies * num_nodes
    sequences = [index[start:end].tolist() for start, end in pairwise(ptr.tolist())]
    size = len(sequences) // copies
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def make_conv(channels: int = CHANNELS, states: int = STATES, **kw) -> GraphMambaConv:
    """A layer whose states last and differ, and in which nothing is zero or one."""
    conv = GraphMambaConv(channels, state_channels=states, **kw).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return conv


def make_inputs(dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(NODES, CHANNELS, dtype=dtype)
    return x, torch.tensor(GRAPH).t().contiguous(), torch.tensor(BATCH)


OPTIONS = [
    {},
    {"bidirectional": True, "bias": True},
    {"norm": False},
    {"expand": 2, "conv_kernel": 1},
    {"conv_kernel": 9, "bidirectional": True, "backend": "reference"},
    {"states": 1, "backend": "torch"},
]


everywhere = pytest.mark.parametrize("options", OPTIONS, ids=named)


@everywhere
@pytest.mark.parametrize("training", [True, False])
def test_formula(options, training):
    """With an order in which no two nodes are equal."""
    conv = make_conv(order=None, **options).train(training)
    x, _, batch = make_inputs()
    x.requires_grad_()
    score = [0.5, -1.0, 7.0, 3.0, 2.0, 1.5, 0.7]
    out = conv(x, score=torch.tensor(score))
    assert_is_formula(conv, out, x, Graphs([], permutations=[by_hand(score)]))
    out = conv(x, batch=batch, score=torch.tensor(score))
    graphs = Graphs([], permutations=[by_hand(score, BATCH)])
    assert_is_formula(conv, out, x, graphs)


def test_integer_scores():
    conv = make_conv(order=None).eval()
    x, _, _ = make_inputs()
    score = [1 << 60, (1 << 60) + 1, -5, 3, 0, 2, 9]  # of which floats know less
    out = conv(x, score=torch.tensor(score))
    assert_near(out, formula(conv, x, [by_hand(score)]))


def test_important_nodes_hear_from_others():
    conv = make_conv(order=None).eval()
    x, _, _ = make_inputs()
    score = torch.tensor([2, 0, 1, 3, 6, 5, 4])
    before = conv(x, score=score)
    x[6, 0] += 1
    changed = (conv(x, score=score) != before).any(1)
    assert changed.tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize("options", [{}, {"num_bins": 2}, {"bidirectional": True}])
@pytest.mark.parametrize("order", ["degree", "cluster", "random", "order"])
def test_formula_of_drawn_permutations(order, options):
    conv = make_conv(order=order, num_eval_permutations=3, **options)
    x, edge_index, batch = make_inputs()
    score = node_score(edge_index, NODES, order, batch)
    kwargs = {
        "num_bins": conv.num_bins,
        "clusters": order == "cluster",
        "shuffle": order != "order",
    }
    permutations = drawn(NODES, score, batch, 3, seed=0, **kwargs)
    assert len(permutations) == 3
    out = conv.eval()(x, edge_index, batch=batch)
    assert_near(out, formula(conv, x, permutations))

    generator = torch.Generator().manual_seed(3)
    out = conv.train()(x, edge_index, batch=batch, generator=generator)
    generator.manual_seed(3)
    permutations = drawn(NODES, score, batch, generator=generator, **kwargs)
    assert len(permutations) == 1
    assert_near(out, formula(conv, x, permutations))


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order):
    """At run time as if their scores were given."""
    conv = make_conv(order=order).eval()
    x, edge_index, batch = make_inputs()
    out = conv(x, edge_index, batch=batch)
    assert out.shape == x.shape
    score = node_score(edge_index, NODES, order, batch)
    assert conv(x, batch=batch, score=score).equal(out)
    if order not in ("order", "random"):
        flipped = -score if order != "cluster" else torch.arange(NODES)
        assert not torch.allclose(conv(x, batch=batch, score=flipped), out)
    conv.train()(x, edge_index, batch=batch).sum().backward()
    assert all(p.grad.isfinite().all() for p in conv.parameters())


def test_orders_without_edges():
    x, edge_index, batch = make_inputs()
    for order in ("order", "random"):
        conv = make_conv(order=order).eval()
        assert conv(x, None, batch=batch).equal(conv(x, edge_index, batch=batch))
    conv = make_conv(order="order").train()
    assert conv(x, None, batch=batch).equal(
        conv(x, None, batch=batch)
    )  # nothing is drawn


# --------------------------------------------------------------- training, evaluation


def test_evaluation_twice():
    """The same bits, whatever happened to random numbers, modes and other layers."""
    conv = make_conv(order="degree").eval()
    x, edge_index, batch = make_inputs()
    out = conv(x, edge_index, batch=batch)
    other = make_conv()
    for step in range(3):
        torch.manual_seed(step)
        other(x, edge_index, batch=batch).sum().backward()
        state = torch.get_rng_state()
        assert conv(x, edge_index, batch=batch).equal(out)
        assert torch.get_rng_state().equal(state)
    with torch.no_grad():
        assert conv.train().eval()(x, edge_index, batch=batch).equal(out)
    with torch.inference_mode():
        assert conv(x, edge_index, batch=batch).equal(out)
    assert copy.deepcopy(conv)(x, edge_index, batch=batch).equal(out)
    assert conv(x, edge_index, batch=batch, generator=torch.Generator()).equal(out)
    # With scores that are given and forgotten, too.
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32):
        outs = [conv(x, batch=batch, score=torch.arange(NODES).to(dtype) // 2) for _ in
                range(2)]  # fmt: skip
        assert outs[0].equal(outs[1])


def test_evaluation_is_the_mean_of_permutations():
    """Before the gate and the projection, which is linear."""
    x, edge_index, batch = make_inputs()
    conv = make_conv(num_eval_permutations=4).eval()
    score = node_score(edge_index, NODES, "degree", batch)
    single = make_conv(order=None, num_eval_permutations=1).eval()
    single.load_state_dict(conv.state_dict())
    index, _ = node_sequences(score, batch, num_permutations=4, seed=0)
    places = [row.argsort() for row in index.view(4, NODES)]
    assert len({tuple(place.tolist()) for place in places}) > 1
    outs = [single(x, batch=batch, score=place) for place in places]
    assert_near(conv(x, edge_index, batch=batch), torch.stack(outs).mean(0))


def test_training_permutations():
    conv = make_conv(order="random")
    x, edge_index, batch = make_inputs()
    generator = torch.Generator()
    outs = [conv(x, edge_index, batch=batch, generator=generator.manual_seed(seed))
            for seed in (0, 0, 1)]  # fmt: skip
    assert outs[0].equal(outs[1])
    assert not torch.allclose(outs[0], outs[2])
    torch.manual_seed(7)
    outs = [conv(x, edge_index, batch=batch) for _ in range(2)]
    assert not torch.allclose(outs[0], outs[1])
    torch.manual_seed(7)
    assert conv(x, edge_index, batch=batch).equal(outs[0])


# ------------------------------------------------------------------------------ batches


@settings(max_examples=20, derandomize=True, deadline=None)
@given(batch=batches())
def test_batches(batch: Batch):
    """What the graphs give one by one: sorted or not, empty ones among them."""
    for options in ({}, {"num_bins": 2, "bidirectional": True}, {"order": "cluster"}):
        conv = make_conv(num_eval_permutations=2, **options).eval()
        x = torch.randn(batch.num_nodes, CHANNELS, dtype=torch.double)
        out = conv(x, batch.edge_index, batch=batch.batch)
        assert out.shape == x.shape
        for node_map, graph in zip(batch.node_map, batch.graphs, strict=True):
            nodes, place = node_map.sort()  # ties are broken by place
            place = place.argsort()
            assert_near(out[nodes], conv(x[nodes], place[graph.edge_index]))


def test_renumbered_nodes():
    conv = make_conv(order=None, bidirectional=True).eval()
    x, edge_index, batch = make_inputs()
    score = torch.randn(NODES)

    def layer(nodes, edge_index, edges, batch):
        return conv(nodes[0], edge_index, batch=batch, score=nodes[1])

    assert_permutes(layer, (x, score), edge_index, (), batch)
    # The smallest tree in which no two nodes are alike.
    legs = torch.tensor([[0, 0, 2, 0, 4, 5], [1, 2, 3, 4, 5, 6]])
    tree = torch.cat([legs, legs.flip(0)], dim=1)
    for order in ("pagerank", "closeness"):
        assert node_score(tree, NODES, order).unique().numel() == NODES
        conv = make_conv(order=order).eval()
        assert_permutes(lambda x, e, *_, conv=conv: conv(*x, e), (x,), tree)


@pytest.mark.parametrize("num_bins", [1, 2, 3, 10])
def test_bins(num_bins):
    """A node hears from those of its own bin only, more bins than nodes or not."""
    conv = make_conv(order="order", num_bins=num_bins, num_eval_permutations=1).eval()
    x = torch.randn(9, CHANNELS, dtype=torch.double, requires_grad=True)
    heard = torch.autograd.functional.jacobian(conv, x).abs().sum((1, 3)) > 0
    (sequences,) = drawn(9, None, num_bins=num_bins, shuffle=False, seed=0)
    sizes = sorted(len(nodes) for nodes in sequences)
    assert sizes[-1] - sizes[0] <= 1
    for nodes in sequences:
        for t, v in enumerate(nodes):
            assert heard[v].nonzero().view(-1).tolist() == sorted(nodes[: t + 1])


# -------------------------------------------------------------------- the start, sizes


@pytest.mark.parametrize(
    ("channels", "count"), [(96, 34080), (64, 16320), (52, 11388), (48, 9840)]
)
def test_number_of_parameters(channels, count):
    """Of the paper's tables, which leave out the layer norm."""
    conv = GraphMambaConv(channels)
    assert sum(p.numel() for p in conv.parameters()) == count + 2 * channels
    conv = GraphMambaConv(channels, norm=False)
    assert sum(p.numel() for p in conv.parameters()) == count


def test_start():
    conv = GraphMambaConv(64, state_channels=5, conv_kernel=3, expand=2)
    (scan,) = conv.scans
    assert conv.dt_rank == 4
    rates = torch.arange(1, 6).expand(128, 5).double()
    assert_near(scan.A_log.detach().double().exp(), rates, 1e-6)
    assert (scan.D == 1).all()
    step = torch.nn.functional.softplus(scan.lin_delta.bias.detach())
    assert step.min() >= 0.001 - 1e-6
    assert step.max() <= 0.1 + 1e-6
    assert step.log().std() > 0.5
    assert scan.lin_delta.weight.abs().max() <= 0.5
    assert scan.conv_weight.abs().max() <= 3**-0.5
    for lin in (conv.lin_in, conv.lin_gate, conv.lin_out):
        assert lin.bias is None


def test_gates_are_not_rounded():
    """Under autocast, the scan gets float32, in which states last long."""
    conv = GraphMambaConv(16, order="order").eval()
    x = torch.randn(300, 16)
    expected = conv(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x)
    assert_near(out, expected, 0.03)


# ---------------------------------------------------------------------- a PyG citizen


@pytest.mark.parametrize("training", [True, False])
def test_compile(training):
    """In one piece, for scores that are given."""
    conv = make_conv(order=None, bidirectional=True, num_bins=2).train(training)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x, _, batch = make_inputs()
    score = torch.randn(NODES)
    grads = []
    for layer in (conv, compiled):
        conv.zero_grad()
        torch.manual_seed(0)
        out = layer(x, batch=batch, score=score)
        out.square().sum().backward()
        grads.append([out, *(p.grad.clone() for p in conv.parameters())])
    for a, b in zip(*grads, strict=True):
        assert_near(a, b)


def test_compile_training_for_a_second_size():
    conv = GraphMambaConv(8).train()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for size in (6, 9):
        x = torch.randn(size, 8)
        edge_index = grid(size // 3, 3)[0]
        # Scores that differ leave nothing to chance.
        out = compiled(x, edge_index, score=torch.arange(size))
        assert_near(out, conv(x, edge_index, score=torch.arange(size)), 1e-5)
        conv.zero_grad()
        compiled(x, edge_index).sum().backward()
        assert all(p.grad.isfinite().all() for p in conv.parameters())


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "name",
    ["out_channels", "state_channels", "conv_kernel", "expand",
     "num_eval_permutations", "num_bins"],
)  # fmt: skip
def test_sizes_that_are_refused(name):
    for size in (0, -1, 1.5):
        said = f"'{name}' must be an integer.*, got {size}"
        with pytest.raises((TypeError, ValueError), match=said):
            GraphMambaConv(**({"in_channels": 4} | {name: size}))


def test_options_that_are_refused():
    with pytest.raises(
        ValueError, match=r"'order' must be one of .*'pagerank'.*'dgree"
    ):
        GraphMambaConv(4, order="dgree")
    with pytest.raises(ValueError, match=r"'backend' must be one of .*, got 'cuda'"):
        GraphMambaConv(CHANNELS, backend="cuda")(*make_inputs(torch.float)[:2])


@pytest.mark.parametrize("training", [True, False])
def test_bad_inputs(training):
    conv = GraphMambaConv(CHANNELS).train(training)
    x, edge_index, batch = make_inputs(torch.float)
    with pytest.raises(ValueError, match="'edge_index' or 'score' must be given with"):
        conv(x)
    with pytest.raises(ValueError, match=r"= \[0, 7\), got 9"):
        conv(x, edge_index + 3)
    with pytest.raises(ValueError, match="'batch' must be of shape"):
        conv(x, edge_index, batch=batch[:5])
    with pytest.raises(ValueError, match=r"'score' must .* \[7\], got \[8\]"):
        conv(x, edge_index, batch=batch, score=torch.zeros(NODES + 1))
    score = torch.zeros(NODES)
    score[3] = torch.nan
    for dtype in (torch.float, torch.double, torch.float16):
        with pytest.raises(ValueError, match="'score' must not hold NaN"):
            conv(x, edge_index, batch=batch, score=score.to(dtype))
    conv = GraphMambaConv(CHANNELS, order=None).train(training)
    with pytest.raises(ValueError, match="'score' must be given with order=None"):
        conv(x, edge_index)


def test_forward_mode():
    conv, x = GraphMambaConv(8, backend="reference").double().eval(), torch.randn(3, 8)
    edges, x = torch.tensor([[0, 1], [1, 2]]), x.double()
    run = partial(conv, edge_index=edges)
    _, found = torch.func.jvp(run, (x,), (x.cos(),))
    step = 1e-6 * x.cos()
    assert_near(found, (run(x + step) - run(x - step)) / 2e-6, 1e-6)
    with pytest.raises(NotImplementedError, match="reverse mode only"):
        torch.func.jvp(
            partial(GraphMambaConv(8), edge_index=edges), *[(x.float(),)] * 2
        )


def test_explain_leaves_a_generator_as_it_was():
    conv = GraphMambaConv(4)
    x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    explain(conv, x, edge_index, generator=generator)
    assert torch.equal(generator.get_state(), state)
