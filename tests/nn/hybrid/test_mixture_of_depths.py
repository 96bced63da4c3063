import math

import networkx
import pytest
import torch
import torch.nn.functional as F
from asserts import assert_batched_equals_single, assert_near, assert_permutes
from convs import BATCH, DAGS, GRAPH, LAYOUTS, matrix
from torch import Tensor
from torch.func import functional_call
from torch_geometric.data import Batch, Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCNConv

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
    MixtureOfDepths,
    SelfAttention,
    SwiGLU,
)
from pyg_chimera.nn.hybrid.mixture_of_depths import contracted_dag
from pyg_chimera.ops import CycleError
from pyg_chimera.transforms import PadBatch

C = 8
BATCHES = torch.tensor(BATCH)  # 4, 1 and 2 nodes
MIXERS = {
    "delta": (lambda: GatedDeltaConv(C, heads=2, state_channels=3), False),
    "attention": (lambda: SelfAttention(C, 2), False),
    "dag": (lambda: ChimeraDAGConv(C, heads=2, state_channels=3), True),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)
NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def edges_of(acyclic: bool) -> Tensor:
    return torch.tensor(DAGS[0] if acyclic else GRAPH).t()


def routing(name: str, capacity: float = 0.6) -> MixtureOfDepths:
    make, acyclic = MIXERS[name]
    layer = GPSLayer(C, mixer=make(), norm="layer_norm", norm_first=True, mlp=SwiGLU(C))
    conv = MixtureOfDepths(layer, C, capacity, acyclic=acyclic).double().eval()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return conv


def nodes(num_nodes: int = 7) -> Tensor:
    return torch.randn(num_nodes, C, dtype=torch.double)


def contracted(edges: list, kept: set) -> list:
    """By a search for paths through what is not kept."""
    graph = networkx.MultiDiGraph(edges)
    return sorted(
        (j, i)
        for j in kept & set(graph)
        for i in kept & set(graph) - {j}
        if networkx.has_path(graph.subgraph(({*graph} - kept) | {j, i}), j, i)
    )


def by_graphs(conv: MixtureOfDepths, x: Tensor, index: Tensor, batch: Tensor) -> Tensor:
    """The formula, one graph and one node after the other."""
    out = x.clone()
    for graph in batch.unique():
        own = (batch == graph).nonzero().view(-1).tolist()
        score = {i: x[i] @ conv.weight for i in own}
        ranked = sorted(own, key=lambda i: -score[i].item())
        share = math.ceil(conv.capacity * len(own))
        routed, passed = sorted(ranked[:share]), ranked[share:]
        edges = [tuple(edge) for edge in index.t().tolist()]
        if conv.acyclic:
            edges = contracted(edges, {*routed})
        edges = [(routed.index(j), routed.index(i)) for j, i in edges
                 if j in routed and i in routed]  # fmt: skip
        y = conv.layer(x[routed], torch.tensor(edges).long().view(-1, 2).t())
        for place, i in enumerate(routed):
            weight = torch.tanh(score[i] - score[passed[0]]) if passed else 1.0
            out = out.index_copy(
                0, torch.tensor([i]), (x[i] + weight * (y[place] - x[i])).unsqueeze(0)
            )
    return out


@every_mixer
@pytest.mark.parametrize("capacity", [0.01, 0.3, 0.5, 0.9, 1])
def test_the_formula(name: str, capacity: float):
    """Of outputs, and all gradients: of nodes, the layer, and the router."""
    conv, x = routing(name, capacity), nodes().requires_grad_()
    index, leaves = edges_of(conv.acyclic), [x, *conv.parameters()]
    outs = conv(x, index, BATCHES), by_graphs(conv, x, index, BATCHES)
    assert_near(*outs)
    assert (outs[0] != x).any(1).sum() == sum(
        math.ceil(capacity * n) for n in (4, 1, 2)
    )
    grads = [
        torch.autograd.grad(
            out.sin().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        for out in outs
    ]
    for got, want in zip(*grads, strict=True):
        assert_near(got, want, 1e-8)
    assert grads[0][1].any() == (capacity < 0.9)  # where nobody is left out
    index = index.unique(dim=1)
    if capacity >= 0.9:
        assert_near(conv(x, index, BATCHES), conv.layer(x, index, BATCHES))


@every_mixer
def test_gradients_by_differences(name: str):
    conv, index = routing(name), edges_of(MIXERS[name][1])

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(conv, {"weight": weight}, (x, index, BATCHES))

    router = conv.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(function, (nodes().requires_grad_(), router))


@every_mixer
def test_permutations_and_batches(name: str):
    conv, x, index = routing(name), nodes(), edges_of(MIXERS[name][1])

    def layer(nodes, edge_index, edges, batch):
        return conv(nodes[0], edge_index, batch)

    assert_permutes(layer, (x,), index, (), BATCHES)
    assert_batched_equals_single(layer, (x,), index, (), BATCHES, needs_batch=True)
    assert conv(x, index, BATCHES * 2**40).equal(conv(x, index, BATCHES))
    for n in (0, 1, 3):
        assert conv(nodes(n), NO_EDGES).shape == (n, C)
    # NaN of a graph stays in it, or is refused.
    bad, other = x.clone(), BATCHES != 2
    bad[1, 1] = torch.nan
    try:
        out = conv(bad, index, BATCHES)
    except ValueError as error:
        assert "must be finite" in str(error)  # noqa: PT017
    else:
        assert_near(out[other], conv(x, index, BATCHES)[other], 1e-14)


def test_contraction():
    """Of random DAGs, compared with a search."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        edges = torch.randint(12, (2, 20), generator=generator).sort(0).values
        edges = edges[:, edges[0] < edges[1]]
        kept = torch.rand(12, generator=generator) < 0.4
        want = contracted(edges.t().tolist(), {*kept.nonzero().view(-1).tolist()})
        assert [*map(tuple, contracted_dag(edges, kept).t().tolist())] == want
    path = torch.stack([torch.arange(8), torch.arange(1, 9)])
    kept = torch.isin(torch.arange(9), torch.tensor([0, 3, 4, 8]))
    assert contracted_dag(path, kept).tolist() == [[0, 3, 4], [3, 4, 8]]


@pytest.mark.parametrize(("capacity", "routed"), [(0.07, 7), (0.1, 10), (0.101, 11)])
def test_shares_are_not_rounded_twice(capacity: float, routed: int):
    x = torch.randn(100, C)
    out = MixtureOfDepths(SwiGLU(C), C, capacity)(x, NO_EDGES)
    assert (out != x).any(1).sum() == routed


def test_ties_go_to_lower_numbers():
    """Which hear of each other, but are not changed where they are tied."""
    conv = MixtureOfDepths(SwiGLU(C), C, 0.5)
    x, seen = torch.ones(6, C), []
    conv.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert conv(x, NO_EDGES, torch.tensor([1, 0, 1, 0, 1, 1])).equal(x)
    conv.weight.data.fill_(0.1)
    x[5] = 2
    out = conv(x, NO_EDGES)
    assert [len(y) for y in seen] == [3, 3]
    change = conv.layer(x[5:])[0] - x[5]
    assert_near(out[5], x[5] + math.tanh(0.1 * C) * change, 1e-6)


def test_edges_are_updated_among_routed_nodes():
    conv = GatedGCNConv(C, C, edge_dim=C, norm="layer_norm")
    layer = MixtureOfDepths(GPSLayer(C, conv, norm="layer_norm"), C, 0.5).eval()
    x, index = torch.randn(7, C), edges_of(False)
    edge_attr = torch.randn(index.size(1), C)
    out, edges = layer(x, index, BATCHES, edge_attr)
    inside = (out != x).any(1)[index].all(0)
    assert 0 < inside.sum() < index.size(1)
    assert (edges != edge_attr).any(1).equal(inside)


def test_compiled():
    conv = routing("dag")
    compiled = torch.compile(conv, backend="aot_eager", dynamic=True)
    for n in (7, 11):
        x = nodes(n)
        assert_near(compiled(x, edges_of(True)), conv(x, edges_of(True)))


def test_in_a_model():
    def layer(index: int) -> torch.nn.Module:
        block = GPSLayer(
            C, mixer=GatedDeltaConv(C, edge_dim=C), norm="layer_norm", norm_first=True
        )
        return MixtureOfDepths(block, C, 0.5) if index % 2 == 1 else block

    model = GraphModel(3, C, 2, layer, 4, edge_dim=2, norm="layer_norm").eval()
    index = edges_of(False)
    data = Data(torch.randn(7, 3), index, torch.randn(index.size(1), 2))
    batch = Batch.from_data_list([data, data.subgraph(torch.arange(3))])
    out = model(**model.inputs(batch))
    each = [model(**model.inputs(graph)) for graph in batch.to_data_list()]
    assert_near(out, torch.cat(each), 1e-5)
    out.square().sum().backward()
    assert any(m.weight.grad.any() for m in model.layers[1::2])


def test_the_router_learns_which_nodes_matter():
    """A quarter of the nodes are flagged, and only what is done to these counts."""
    torch.manual_seed(0)
    layer = GPSLayer(C, mixer=SwiGLU(C), norm="layer_norm", norm_first=True)
    conv = MixtureOfDepths(layer, C, 0.25)
    optimizer = torch.optim.Adam(conv.parameters(), lr=2e-2)
    found = []
    for _ in range(150):
        x = torch.randn(64, C)
        flag = torch.randperm(64) < 16
        x[:, 0] = flag
        out = conv(x, NO_EDGES)
        loss = F.mse_loss(out, x + flag.view(-1, 1) * x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(((out != x).any(1) & flag).sum() / 16))
    assert sum(found[:5]) / 5 < 0.6
    assert sum(found[-20:]) / 20 > 0.9


def test_padded_batches():
    """Padding is left out of norms within the layer, too."""
    block = GPSLayer(C, mixer=SelfAttention(C, 2), norm="graph_batch_norm")
    model = GraphModel(C, C, 2, [MixtureOfDepths(block, C, 0.5)], head="node").double()
    graphs = [Data(x=nodes(n), edge_index=NO_EDGES) for n in (5, 2)]
    out = model(**model.inputs(Batch.from_data_list(graphs)))
    padded = PadBatch()(graphs)
    assert padded.num_nodes > 7
    assert_near(model(**model.inputs(padded))[:7], out, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [0.6, 1.0])
def test_weights_of_a_sparse_matrix(layout: str, capacity: float):
    """They are for a convolution to read, as without routing."""
    layer = GPSLayer(C, GCNConv(C, C), ChimeraConv(C), norm="layer_norm")
    conv = MixtureOfDepths(layer, C, capacity).double().eval()
    x, index = nodes(), edges_of(False).unique(dim=1)
    values = torch.rand(index.size(1)).double() + 0.5
    dense = torch.zeros(7, 7).double()
    dense[index[1], index[0]] = values
    graph = matrix(index, values, layout)
    node, weight = conv._routed(x, BATCHES * 0)
    y = layer(x[node], dense[node][:, node].to_sparse_coo())
    expected = x.index_copy(0, node, torch.lerp(x[node], y, weight.unsqueeze(1)))
    assert_near(conv(x, graph), expected, 1e-12)
    assert (conv(x, graph) - conv(x, index)).abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_of_a_sparse_matrix(layout: str):
    """Of which an edge has several."""
    layer = GPSLayer(C, mixer=ChimeraConv(C, edge_dim=3), norm="layer_norm")
    conv = MixtureOfDepths(layer, C, 0.6).double().eval()
    x, index = nodes(), edges_of(False).unique(dim=1)
    values = torch.randn(index.size(1), 3).double()
    graph = matrix(index, values, layout)
    with torch.device("meta"):
        out = conv(x, graph)
    assert_near(out, conv(x, index, None, values), 1e-12)


def test_contracted_paths_have_no_weights():
    index, conv = edges_of(True), routing("dag")
    graph = torch.sparse_coo_tensor(index.flip(0), 3 * torch.ones(6).double(), (7, 7))
    x = nodes()
    assert_near(conv(x, graph), conv(x, index), 1e-12)


def test_edge_masks_are_refused():
    """As they have an entry for each edge of the whole graph."""
    for name, capacity in (("delta", 0.5), ("dag", 1.0)):
        index = edges_of(name == "dag")

        def explained(mask: str | None, name=name, capacity=capacity, index=index):
            explainer = Explainer(
                routing(name, capacity),
                GNNExplainer(epochs=2),
                explanation_type="model",
                node_mask_type="object",
                edge_mask_type=mask,
                model_config=dict(
                    mode="regression", task_level="node", return_type="raw"
                ),
            )
            return explainer(nodes(), index)

        with pytest.raises(ValueError, match="GPSLayer read some: explain features"):
            explained("object")
        assert explained(None).node_mask.shape == (7, 1)


def test_bad_arguments():
    for capacity in (0, -0.5, 1.01, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"'capacity' must be"):
            MixtureOfDepths(SwiGLU(C), C, capacity)
    x, index, conv = nodes(), edges_of(True), routing("dag")
    with pytest.raises(ValueError, match="'edge_attr' must be None"):
        conv(x, index, None, torch.randn(6, 3))
    with pytest.raises(ValueError, match=r"'pad_node_mask' are all.*\['rank'"):
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
    with pytest.raises(ValueError, match=r"'layer' must return.*got \[4, 4\]"):
        MixtureOfDepths(GCNConv(C, 4), C, 0.5)(x.float(), index)
    # Structure of all nodes is refused by a model, and not left out by some layers.
    block = GPSLayer(C, mixer=ChimeraConv(C, state_channels=3))
    model = GraphModel(C, C, 2, [block, MixtureOfDepths(block, C, 0.5)])
    with pytest.raises(ValueError, match=r"all nodes, got \['rank'\]"):
        model(x.float(), edges_of(False), rank=torch.arange(7))
