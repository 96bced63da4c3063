"""Batch norm that evaluates single graphs as it trains."""

import copy

import pytest
import torch
from asserts import assert_near
from torch.nn import Sequential
from torch_geometric.data import Batch, Data
from torch_geometric.nn import BatchNorm, GCNConv, LayerNorm

from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphBatchNorm,
    GraphModel,
)

C = 6


def trained(batch, rows=20, momentum=0.1, steps=300):
    """A norm after training on batches of other rows."""
    norm = GraphBatchNorm(C, momentum=momentum).double()
    torch.nn.init.normal_(norm.module.weight)
    torch.nn.init.normal_(norm.module.bias)
    for _ in range(steps):
        norm(torch.randn(rows, C, dtype=torch.double) * 3 + 1, batch)
    return norm.eval()


def expected(norm, x, share):
    """By the statistics of rows that are drawn from both with their shares."""
    bn = norm.module
    mean = share * x.mean(0) + (1 - share) * bn.running_mean
    second = (1 - share) * (bn.running_var + bn.running_mean.square())
    var = share * x.square().mean(0) + second - mean.square()
    return (x - mean) / (var + bn.eps).sqrt() * bn.weight + bn.bias


@pytest.mark.parametrize("steps", [1, 300])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_single_graph_evaluates_as_it_trains(momentum, steps):
    norm = trained(None, momentum=momentum, steps=steps)
    x = torch.randn(20, C).double() * 0.1 - 5
    out = norm(x)
    assert_near(out, norm.train()(x), 1e-5)
    plain = BatchNorm(C).double().eval()
    plain.module = norm.module.eval()
    assert (plain(x) - out).abs().max() > 1


@pytest.mark.parametrize("shuffled", [False, True])
def test_shares(shuffled):
    """Batches of four graphs and 20 rows: a quarter at most, a twentieth for a row."""
    norm = trained(torch.arange(4).repeat_interleave(5))
    parts = [torch.randn(n, C).double() + n for n in (1, 2, 30)]
    index = torch.tensor([2, 5, 9]).repeat_interleave(torch.tensor([1, 2, 30]))
    x = torch.cat(parts)
    want = [
        expected(norm, part, share)
        for part, share in zip(parts, (0.05, 0.1, 0.25), strict=True)
    ]
    order = torch.randperm(33) if shuffled else torch.arange(33)
    assert_near(norm(x[order], index[order]), torch.cat(want)[order], 1e-6)
    for part, one in zip(parts, want, strict=True):
        assert_near(norm(part), one, 1e-6)


def test_ids_of_small_integers_do_not_overflow():
    batch = torch.arange(128).repeat_interleave(2)
    norm = trained(batch.to(torch.int8), rows=256)
    assert_near(norm.graph_share, torch.tensor(1 / 128).double(), 1e-6)


def test_weights_of_batch_norm_are_loaded_and_evaluate_as_there():
    plain = BatchNorm(C, allow_single_element=True)
    plain(torch.randn(50, C) * 3 + 1)
    torch.nn.init.normal_(plain.module.weight)
    norm = trained(None).float()
    norm.load_state_dict(plain.state_dict())
    x = torch.randn(7, C)
    assert_near(norm(x), plain.eval()(x), 1e-6)
    norm.load_state_dict(trained(None).state_dict())
    assert norm.graph_share > 0.99
    norm.reset_parameters()
    assert norm.graph_share == norm.row_share == 0


def test_weights_of_other_modules_change_nothing():
    norm = trained(None)
    before = copy.deepcopy(norm.state_dict())
    missing = norm.load_state_dict({}, strict=False).missing_keys
    assert {*missing} >= {"graph_share", "row_share", "module.running_mean"}
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows, training):
    norm, x = trained(None).train(training), torch.randn(rows, C).double()
    before = copy.deepcopy(norm.state_dict())
    for batch in (None, torch.zeros(rows, dtype=torch.long)):
        out = norm(x, batch)
        assert out.shape == x.shape
        assert out.isfinite().all()
    assert torch.equal(norm.row_share, before["row_share"])


def test_gradients_in_evaluation():
    norm = trained(torch.arange(4).repeat_interleave(5))
    x = torch.randn(5, C, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x, torch.tensor([0, 0, 2, 2, 2])))


def test_half_precision():
    norm, x = trained(None).float(), torch.randn(20, C) * 300
    assert_near(norm.half()(x.half()), norm.float()(x), 5e-3)
    assert norm.half()(x.half()).dtype == torch.half


LAYERS = {
    "gcn": lambda: GPSLayer(C, GCNConv(C, C)),
    "gatedgcn": lambda: GPSLayer(C, GatedGCNConv(C, C, edge_dim=C)),
    "chimera": lambda: GPSLayer(
        C, GatedGCNConv(C, C, edge_dim=C), ChimeraConv(C, C), norm_first=True
    ),
    "parallel": lambda: GPSLayer(
        C, GCNConv(C, C), ChimeraConv(C, C), arrangement="parallel"
    ),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_models_of_a_single_graph_evaluate_as_they_train(name):
    """At a constant rate, also while weights change fast."""
    layers = [LAYERS[name]() for _ in range(2)]
    edge_dim = None if name in ("gcn", "parallel") else 2
    model = GraphModel(
        3, C, 1, layers, head="node", edge_dim=edge_dim, norm="graph_batch_norm"
    )
    edge_index = torch.randint(40, (2, 120))
    data = Data(torch.randn(40, 3), edge_index, torch.randn(120, 2))
    inputs, y = model.inputs(data), torch.randn(40, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        (model(**inputs) - y).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        found = model.eval()(**inputs)
        assert_near(found, model.train()(**inputs), 1e-4)


def test_graphs_of_a_batch_evaluate_one_by_one():
    layer = GPSLayer(C, GatedGCNConv(C, C, edge_dim=C), ChimeraConv(C, C))
    graphs = [
        Data(torch.randn(n, C), torch.randint(n, (2, 3 * n)), torch.randn(3 * n, C))
        for n in (3, 8, 1, 5)
    ]

    def run(graphs):
        batch = Batch.from_data_list(graphs)
        return layer(batch.x, batch.edge_index, batch.batch, batch.edge_attr)

    for _ in range(20):
        run(graphs)
    layer.eval()
    alone = [layer(g.x, g.edge_index, edge_attr=g.edge_attr) for g in graphs]
    for whole, parts in zip(run(graphs), zip(*alone, strict=True), strict=True):
        assert_near(whole, torch.cat(parts), 1e-5)


def test_frozen_statistics_stay_as_they_are():
    """As by the usual idiom, which finds the module inside."""
    norm = trained(None)
    norm.module.eval()
    shares = norm.graph_share.clone(), norm.row_share.clone()
    norm(torch.randn(7, C).double())
    assert (norm.graph_share, norm.row_share) == shares
    fresh = GraphBatchNorm(C)
    fresh.module.eval()
    fresh(torch.randn(7, C))
    assert fresh.graph_share == 0


def test_gaps_between_labels_are_no_graphs():
    norms = [GraphBatchNorm(C) for _ in range(2)]
    x = torch.randn(5, C)
    for norm, labels in zip(norms, ([0, 0, 1, 1, 2], [4, 4, 90, 90, 7]), strict=True):
        norm(x, torch.tensor(labels))
    assert norms[0].graph_share == norms[1].graph_share


def test_gated_gcn_by_itself_does_not_guess_graphs():
    """Without a batch vector, several graphs might be one."""
    conv = GatedGCNConv(C, C)
    x, edge_index = torch.randn(9, C) + 3, torch.tensor([[0, 1, 4], [1, 2, 5]])
    for _ in range(20):
        conv(x, edge_index)
    conv.eval()
    assert_near(conv(x, edge_index)[:3], conv(x[:3], edge_index[:, :2]), 1e-5)


def test_sequences_need_norms_of_each_node():
    x = torch.randn(2, C)
    mixer = ChimeraConv(C)
    mixer.step = lambda x, state: (x, state)
    with pytest.raises(ValueError, match="Construct it with norm='layer_norm'"):
        GPSLayer(C, mixer=mixer).step(x)
    for norm in ("batch_norm", "layer_norm"):
        assert GPSLayer(C, mixer=mixer, norm=norm).eval().step(x)[0].shape == x.shape


def test_memory_does_not_depend_on_labels():
    norms = [GraphBatchNorm(C) for _ in range(2)]
    x = torch.randn(4, C)
    for norm, label in zip(norms, (1, 1 << 40), strict=True):
        norm(x, torch.tensor([0, 0, label, label]))
    assert norms[0].graph_share == norms[1].graph_share


@pytest.mark.parametrize(
    "norm", ["graph_norm", "pair_norm", LayerNorm(C), Sequential(GraphBatchNorm(C))]
)
def test_sequences_refuse_all_norms_of_whole_graphs(norm):
    mixer = ChimeraConv(C)
    mixer.step = lambda x, state: (x, state)
    with pytest.raises(ValueError, match="reads whole graphs"):
        GPSLayer(C, mixer=mixer, norm=norm).step(torch.randn(2, C))
