import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_batched_equals_single, assert_near, assert_permutes
from convs import BATCH, DAGS, GRAPH
from torch import Tensor
from torch.nn import MultiheadAttention
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_torch_csr_tensor

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
    MixtureOfDepths,
    PLSTMGridConv,
    SelfAttention,
    SwiGLU,
)
from pyg_chimera.ops import CycleError
from pyg_chimera.ops.structure import contracted_dag

C = 8
BATCHES = torch.tensor(BATCH)  # 4, 1 and 2 nodes
MIXERS = {
    "delta": (lambda: GatedDeltaConv(C, heads=2, state_channels=3), False),
    "chimera": (lambda: ChimeraConv(C, state_channels=3), False),
    "attention": (lambda: SelfAttention(C, 2), False),
    "dag": (lambda: ChimeraDAGConv(C, heads=2, state_channels=3), True),
    "delta-dag": (lambda: GatedDeltaConv(C, state_channels=3, acyclic=True), True),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def edges_of(acyclic: bool) -> Tensor:
    return torch.tensor(DAGS[0] if acyclic else GRAPH).t()


def trained(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return module.eval()


def routing(name: str, capacity: float = 0.6) -> MixtureOfDepths:
    make, acyclic = MIXERS[name]
    layer = GPSLayer(C, mixer=make(), norm_first=True, mlp=SwiGLU(C))
    return trained(MixtureOfDepths(layer, C, capacity, acyclic=acyclic))


def nodes(num_nodes: int = 7) -> Tensor:
    return torch.randn(num_nodes, C, dtype=torch.double)


def by_graphs(conv: MixtureOfDepths, x: Tensor, index: Tensor, batch: Tensor) -> Tensor:
    """The formula, one graph and one node after the other."""
    out = x.clone()
    for graph in batch.unique():
        own = (batch == graph).nonzero().view(-1).tolist()
        score = {i: (x[i] @ conv.weight).item() for i in own}
        ranked = sorted(own, key=lambda i: -score[i])
        share = math.ceil(conv.capacity * len(own))
        routed, passed = sorted(ranked[:share]), ranked[share:]
        edges = index
        if conv.acyclic:
            kept = torch.isin(torch.arange(len(x)), torch.tensor(routed))
            edges = contracted_dag(index, kept)
        edges = [(routed.index(j), routed.index(i)) for j, i in edges.t().tolist()
                 if j in routed and i in routed]  # fmt: skip
        edges = torch.tensor(edges, dtype=torch.long).view(-1, 2).t()
        y = conv.layer(x[routed], edges)
        for place, i in enumerate(routed):
            weight = 1.0
            if passed:
                weight = math.tanh(score[i] - score[passed[0]])
            out[i] = x[i] + weight * (y[place] - x[i])
    return out


@every_mixer
@pytest.mark.parametrize("capacity", [0.01, 0.3, 0.5, 0.9])
def test_the_formula(name, capacity):
    conv, x = routing(name, capacity), nodes()
    index = edges_of(conv.acyclic)
    expected = by_graphs(conv, x, index, BATCHES)
    out = conv(x, index, BATCHES)
    assert_near(out, expected)
    routed = sum(math.ceil(capacity * n) for n in (4, 1, 2))
    assert (out != x).any(1).sum() == routed
    alone = torch.zeros_like(BATCHES)
    assert_near(conv(x, index), by_graphs(conv, x, index, alone))


@every_mixer
def test_gradients(name):
    """Of nodes, of the layer, and of the router."""
    conv, x, index = routing(name), nodes().requires_grad_(), None
    index = edges_of(conv.acyclic)
    router = conv.weight

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(conv, {"weight": weight}, (x, index, BATCHES))

    assert torch.autograd.gradcheck(function, (x, router.detach().requires_grad_()))
    function(x, router).square().sum().backward()
    assert [n for n, p in conv.named_parameters() if not p.grad.any()] == []


@every_mixer
def test_full_capacity_is_the_layer(name):
    conv, x = routing(name, 1), nodes()
    index = edges_of(conv.acyclic)
    expected = conv.layer(x, index, BATCHES)
    assert conv(x, index, BATCHES).equal(expected)
    # And so it is where rounding up leaves nobody out.
    index = index.unique(dim=1)
    expected = conv.layer(x, index, BATCHES)
    conv = MixtureOfDepths(conv.layer, C, 0.9, acyclic=conv.acyclic).double().eval()
    out = conv(x.requires_grad_(), index, BATCHES)
    assert_near(out, expected, 1e-14)
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert not conv.weight.grad.any()


def test_full_capacity_passes_structure_on():
    layer = GPSLayer(C, mixer=ChimeraGridConv(C, state_channels=3))
    x = torch.randn(6, C)
    empty = torch.empty(2, 0, dtype=torch.long)
    out = MixtureOfDepths(layer, C, 1)(x, empty, height=2, width=3)
    assert out.equal(layer(x, empty, height=2, width=3))


@every_mixer
def test_permutations_and_batches(name):
    conv, x = routing(name), nodes()
    index = edges_of(conv.acyclic)

    def layer(nodes, edge_index, edges, batch):
        return conv(nodes[0], edge_index, batch)

    assert_permutes(layer, (x,), index, (), BATCHES)
    assert_batched_equals_single(layer, (x,), index, (), BATCHES, needs_batch=True)
    expected = conv(x, index, BATCHES)
    assert conv(x, index, BATCHES * 2**40).equal(expected)
    for n in (0, 1, 3):
        assert conv(nodes(n), index[:, :0]).shape == (n, C)


@every_mixer
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_graph_keeps_its_nan(name, value):
    conv, x = routing(name), nodes()
    index, other = edges_of(conv.acyclic), BATCHES != 2

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = conv(x, index, BATCHES)[other]
        out.square().sum().backward()
        return out, x.grad[other]

    changed = x.clone()
    changed[1, 1] = value
    try:
        results = run(changed)
    except ValueError as error:
        assert "must be finite" in str(error) or "must not hold NaN" in str(error)  # noqa: PT017
        return
    for result, expected in zip(results, run(x), strict=True):
        assert_near(result, expected, 1e-14)  # rounded elsewhere, as nodes have moved


@pytest.mark.parametrize(("capacity", "routed"), [(0.07, 7), (0.1, 10), (0.101, 11)])
def test_shares_are_not_rounded_twice(capacity, routed):
    conv = MixtureOfDepths(SwiGLU(C), C, capacity)
    x = torch.randn(100, C)
    out = conv(x, torch.empty(2, 0, dtype=torch.long))
    assert (out != x).any(1).sum() == routed


def test_ties_go_to_lower_numbers():
    """Which hear of each other, but are not changed where they are tied."""
    seen = []

    def layer(x: Tensor, batch: Tensor) -> Tensor:
        seen.append(batch)
        return x + 1

    module = torch.nn.Module()
    module.forward = layer
    conv = MixtureOfDepths(module, C, 0.5)
    x, empty = torch.ones(6, C), torch.empty(2, 0, dtype=torch.long)
    out = conv(x, empty, torch.tensor([1, 0, 1, 0, 1, 1]))
    assert seen[0].tolist() == [1, 0, 1]
    assert out.equal(x)
    # Above them, whoever is routed counts as much as it exceeds them.
    conv.weight.data.fill_(0.1)
    x[5] = 2
    out = conv(x, empty)
    assert seen[1].numel() == 3
    assert_near(out[5], x[5] + math.tanh(0.1 * C), 1e-6)
    assert out[:5].equal(x[:5])


def test_a_path_remains_one():
    """What is routed of a sequence is a sequence, along which the layer runs."""
    conv = routing("dag", 0.5)
    x, place = nodes(9), torch.arange(9)
    routed = (x @ conv.weight).argsort(descending=True)[:5].sort().values
    path = torch.stack([place[:-1], place[1:]])
    expected = conv.layer(x[routed], path[:, :4])
    out = conv(x, path)
    theta = (x @ conv.weight).sort(descending=True).values[5]
    weight = (x[routed] @ conv.weight - theta).tanh().view(-1, 1)
    assert_near(out[routed], x[routed] + weight * (expected - x[routed]))


def test_several_dags():
    there = edges_of(True)
    dags = [there, there.flip(0)]
    mixer = ChimeraDAGConv(C, state_channels=3, num_dags=2)
    conv = trained(MixtureOfDepths(mixer, C, 0.5, acyclic=True))
    x = nodes()
    out = conv(x, dags, BATCHES)
    score = (x @ conv.weight).masked_fill(BATCHES != 2, -torch.inf)
    i, j = score.topk(2).indices.sort().values.tolist()
    kept = torch.isin(torch.arange(7), torch.tensor([i, j]))
    edges = (contracted_dag(there, kept) == j).long()
    y = mixer(x[[i, j]], [edges, edges.flip(0)])
    weight = (score[[i, j]] - score.topk(3).values[2]).tanh().view(-1, 1)
    assert_near(out[[i, j]], torch.lerp(x[[i, j]], y, weight))


def test_edges_are_updated_among_routed_nodes():
    conv = GatedGCNConv(C, C, norm="layer_norm")
    layer = trained(MixtureOfDepths(GPSLayer(C, conv), C, 0.5))
    x, index = nodes(), edges_of(False)
    edge_attr = torch.randn(index.size(1), C, dtype=torch.double)
    out, edges = layer(x, index, BATCHES, edge_attr)
    routed = (out != x).any(1)
    inside = routed[index].all(0)
    assert 0 < inside.sum() < index.size(1)
    assert (edges != edge_attr).any(1).equal(inside)
    place = routed.cumsum(0) - 1
    _, expected = layer.layer(
        x[routed], place[index[:, inside]], BATCHES[routed], edge_attr[inside]
    )
    assert_near(edges[inside], expected)
    other = layer(x, index, BATCHES, edge_attr + 1)[0]
    assert not other.equal(out)


LAYERS = {
    "convolution": lambda: GCNConv(C, C),
    "torch's attention": lambda: MultiheadAttention(C, 2, batch_first=True),
    "nodes": lambda: SwiGLU(C),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_others(name):
    layer = LAYERS[name]()
    conv = MixtureOfDepths(layer, C, 0.5)
    x, index = torch.randn(7, C), edges_of(False)
    out = conv(x, index, BATCHES)
    out.sum().backward()
    assert [n for n, p in conv.named_parameters() if p.grad is None] == []
    assert conv(x, index).shape == x.shape
    # Reset by the name that its layer has for it.
    fresh = MixtureOfDepths(LAYERS[name](), C, 0.5)
    for parameter in conv.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    for each in (conv, fresh):
        torch.manual_seed(1)
        each.reset_parameters()
    torch.testing.assert_close(conv.state_dict(), fresh.state_dict())
    assert not conv(x, index, BATCHES).equal(out)


def test_forms_of_graphs():
    index = edges_of(False).unique(dim=1)
    forms = {
        "int32": index.int(),
        "uint8": index.to(torch.uint8),
        "EdgeIndex": EdgeIndex(index.contiguous(), sparse_size=(7, 7)),
        "csr": to_torch_csr_tensor(index.flip(0), size=(7, 7)),
    }
    x, conv = nodes(), routing("delta")
    expected = conv(x, index, BATCHES)
    dag, scan = edges_of(True).unique(dim=1), routing("dag")
    expected_dag = scan(x, dag, BATCHES)
    for form in forms.values():
        assert_near(conv(x, form, BATCHES), expected)
    for form in (EdgeIndex(dag.contiguous(), sparse_size=(7, 7)), dag.int()):
        assert_near(scan(x, form, BATCHES), expected_dag)


def test_files_and_copies():
    layer = GPSLayer(C, mixer=GatedDeltaConv(C), norm_first=True)
    conv, x = MixtureOfDepths(layer, C, 0.5), torch.randn(7, C)
    loaded = MixtureOfDepths(copy.deepcopy(layer), C, 0.5)
    index = edges_of(False)
    out = conv(x, index)
    file = io.BytesIO()
    torch.save(conv.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert other(x, index).equal(out)
    assert repr(conv).startswith("MixtureOfDepths(GPSLayer(8, ")
    assert repr(conv).endswith(", 8, capacity=0.5)")
    assert repr(routing("dag")).endswith(", 8, capacity=0.6, acyclic=True)")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    conv, x = routing("dag").float(), torch.randn(7, C)
    index = edges_of(True)
    expected = conv(x, index, BATCHES)
    with torch.autocast("cpu", dtype=dtype):
        out = conv(x, index, BATCHES)
        assert_near(out, expected, 0.05)
        assert conv(x.to(dtype), index, BATCHES).dtype == dtype
    conv.to(dtype)(x.to(dtype), index, BATCHES).sum().backward()
    assert all(p.grad.isfinite().all() for p in conv.parameters())


@pytest.mark.parametrize(
    ("name", "backend"), [("attention", "aot_eager"), ("dag", "eager")]
)
def test_compile(name, backend):
    make, acyclic = MIXERS[name]
    conv = trained(MixtureOfDepths(make(), C, 0.6, acyclic=acyclic))
    compiled = torch.compile(conv, backend=backend, dynamic=True)
    for n in (7, 11):
        x = nodes(n)
        assert_near(compiled(x, edges_of(acyclic)), conv(x, edges_of(acyclic)))


def test_in_a_model():
    """The layers of a stack that it wraps get what they take."""

    def layer(index: int) -> torch.nn.Module:
        block = GPSLayer(C, mixer=GatedDeltaConv(C, edge_dim=C), norm_first=True)
        return MixtureOfDepths(block, C, 0.5) if index % 2 == 1 else block

    model = GraphModel(3, C, 2, layer, 4, edge_dim=2).eval()
    index = edges_of(False)
    data = Data(torch.randn(7, 3), index, torch.randn(index.size(1), 2))
    batch = Batch.from_data_list([data, data.subgraph(torch.arange(3))])
    out = model(**model.inputs(batch))
    each = [model(**model.inputs(graph)) for graph in batch.to_data_list()]
    assert_near(out, torch.cat(each), 1e-5)
    model.train()(**model.inputs(batch)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert any(m.weight.grad.any() for m in model.layers[1::2])


def test_structure_of_all_nodes_is_refused_by_a_model():
    """And not left out, so that some layers take it and others don't."""
    block = GPSLayer(C, mixer=ChimeraConv(C, state_channels=3))
    layers = [block, MixtureOfDepths(copy.deepcopy(block), C, 0.5)]
    model = GraphModel(C, C, 2, layers)
    x, index, rank = torch.randn(7, C), edges_of(False), torch.arange(7)
    with pytest.raises(ValueError, match=r"\['rank'\] belong to all nodes"):
        model(x, index, rank=rank)


def test_the_router_learns_which_nodes_matter():
    """A quarter of the nodes are flagged, and only what is done to these counts."""
    torch.manual_seed(0)
    layer = GPSLayer(C, mixer=SwiGLU(C), norm_first=True)
    conv = MixtureOfDepths(layer, C, 0.25)
    empty = torch.empty(2, 0, dtype=torch.long)
    optimizer = torch.optim.Adam(conv.parameters(), lr=2e-2)
    found = []
    for _ in range(150):
        x = torch.randn(64, C)
        flag = torch.randperm(64) < 16
        x[:, 0] = flag
        target = x + flag.view(-1, 1) * x.flip(1)
        out = conv(x, empty)
        loss = F.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(((out != x).any(1) & flag).sum() / 16))
    assert sum(found[:5]) / 5 < 0.6
    assert sum(found[-20:]) / 20 > 0.9


@pytest.mark.parametrize("capacity", [0, -0.5, 1.01, math.nan, math.inf])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match=rf"'capacity'.* \(0, 1\], got {capacity}"):
        MixtureOfDepths(SwiGLU(C), C, capacity)


@pytest.mark.parametrize("mixer", [ChimeraGridConv, PLSTMGridConv])
def test_grids_are_refused(mixer):
    for layer in (mixer(C), GPSLayer(C, mixer=mixer(C))):
        with pytest.raises(ValueError, match=r"'layer' works on grids.*capacity=1"):
            MixtureOfDepths(layer, C, 0.5)


def test_bad_input():
    x, index = nodes(), edges_of(True)
    conv = routing("dag")
    with pytest.raises(ValueError, match="'edge_attr' must not be given"):
        conv(x, index, None, torch.randn(6, 3))
    with pytest.raises(ValueError, match=r"\['rank'\] belong to all nodes"):
        conv(x, index, rank=torch.arange(7))
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        conv(x, torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match=r"'batch'.*\[7\].*\[3\]"):
        conv(x, index, torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="'batch' must hold integers"):
        conv(x, index, torch.randn(7))
    with pytest.raises(ValueError, match=r"'x' must be \[nodes, 8\]"):
        conv(x[0], index)
    with pytest.raises(ValueError, match="'edge_index' must hold"):
        conv(x, index + 5)
    wide = MixtureOfDepths(GatedGCNConv(C, C, edge_dim=3), C, 0.6).double()
    edges = torch.randn(index.size(1) + 1, 3).double()
    for attr in (edges, edges[2:]):  # also where those inside would be there
        with pytest.raises(ValueError, match="'edge_attr' must have a row for each"):
            wide(x, index, None, attr)
    with pytest.raises(ValueError, match=r"edge features with the shape .*, 3\], got"):
        wide(x, index, None, edges[1:])
    narrow = MixtureOfDepths(GCNConv(C, 4), C, 0.5).double()
    with pytest.raises(ValueError, match=r"'layer' must return.*got \[4, 4\]"):
        narrow(x, index)


def test_weights_of_a_sparse_adjacency():
    """They belong to a convolution, which does not get them if only some are routed."""
    x, index = nodes().float(), edges_of(False)
    layer = GPSLayer(C, GatedGCNConv(C, C)).eval()
    ones = to_torch_csr_tensor(index.flip(0), size=(7, 7))
    conv = MixtureOfDepths(layer, C, 0.5).eval()
    assert torch.equal(conv(x, ones), conv(x, index))
    weighted = to_torch_csr_tensor(index.flip(0), torch.rand(index.size(1)), (7, 7))
    with pytest.raises(ValueError, match="'edge_index' must not hold edge weights"):
        conv(x, weighted)


def test_no_router_without_routing():
    layer = MixtureOfDepths(GPSLayer(C, GCNConv(C, C)), C, 1)
    layer.reset_parameters()
    layer(nodes().float(), edges_of(False)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
