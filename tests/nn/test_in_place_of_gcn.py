"""PyG's own scripts, in which each layer takes the place of `GCNConv`, and nothing else
changes.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim
from torch.nn import BatchNorm1d, Linear, ReLU
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import FakeDataset, KarateClub
from torch_geometric.nn import (
    GAE,
    DeepGCNLayer,
    DeepGraphInfomax,
    GCNConv,
    JumpingKnowledge,
    MessagePassing,
    SAGPooling,
    Sequential,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    to_hetero,
)
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import dropout_edge, to_undirected

from pyg_chimera import nn
from pyg_chimera.nn import ChimeraDAGConv, PLSTMConv, RGLRUConv
from pyg_chimera.ops import CycleError, portable

#: Layers on grids and paths, and by depth, take no other graphs, and say so.
OTHERS = ("ChimeraGridConv", "ChimeraPathConv", "PLSTMGridConv", "WindowAttentionConv")
LAYERS = {
    name: getattr(nn, name)
    for name in nn.__all__
    if name.endswith("Conv") and name not in OTHERS
}
LAYERS["GCNConv"] = GCNConv  # the scripts are right
every_layer = pytest.mark.parametrize("conv", LAYERS.values(), ids=LAYERS)


@pytest.fixture(scope="module")
def club() -> Data:
    """34 people in 4 classes, out of 7."""
    return KarateClub()[0]


@pytest.fixture(scope="module")
def graphs() -> Batch:
    """Two classes, told apart by features; with isolated nodes and graphs of one."""
    torch.manual_seed(0)
    made = [
        Data(
            x=torch.randn(size, 9) + label,
            edge_index=to_undirected(torch.randint(size, (2, 2 * size))),
            y=torch.tensor([label]),
        )
        for label in (0, 1)
        for size in (1, 5, 12, 20)
    ]
    return Batch.from_data_list(made)


def assert_learns(
    model: torch.nn.Module, loss, fraction: float = 0.7, steps: int = 40
) -> None:
    """Within some steps of Adam, the loss falls to a fraction, and it stays finite."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(value))
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-3:]) / 3 < fraction * losses[0]


@every_layer
def test_nodes(conv, club: Data):
    """PyG's `examples/gcn.py`."""

    class GCN(torch.nn.Module):
        def __init__(self, in_channels, hidden_channels, out_channels):
            super().__init__()
            self.conv1 = conv(in_channels, hidden_channels)
            self.conv2 = conv(hidden_channels, out_channels)

        def forward(self, x, edge_index, edge_weight=None):
            x = F.dropout(x, p=0.1, training=self.training)
            x = self.conv1(x, edge_index, edge_weight).relu()
            x = F.dropout(x, p=0.1, training=self.training)
            return self.conv2(x, edge_index, edge_weight)

    torch.manual_seed(0)
    model = GCN(-1, 16, 7)
    assert model(club.x, club.edge_index).shape == (34, 7)  # lazy sizes are known now

    def loss():
        out = model(club.x, club.edge_index)
        return F.cross_entropy(out, club.y)

    assert_learns(model, loss)


@every_layer
def test_graphs(conv, graphs: Batch):
    """As PyG's `examples/mutag_gin.py`, with sizes that four does not divide."""

    class GIN(torch.nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.convs = torch.nn.ModuleList([conv(9, channels)])
            for _ in range(2):
                self.convs.append(conv(channels, channels))
            self.norms = torch.nn.ModuleList(
                [BatchNorm1d(channels) for _ in self.convs]
            )
            self.lin = Linear(channels, 2)

        def forward(self, x, edge_index, batch, batch_size):
            for layer, norm in zip(self.convs, self.norms, strict=True):
                x = norm(layer(x, edge_index)).relu()
            return self.lin(global_add_pool(x, batch, size=batch_size))

    torch.manual_seed(0)
    model = GIN(18)

    def loss():
        out = model(graphs.x, graphs.edge_index, graphs.batch, graphs.batch_size)
        return F.cross_entropy(out, graphs.y)

    assert_learns(model, loss)


@every_layer
def test_pooling(conv, graphs: Batch):
    """PyG's `examples/proteins_topk_pool.py`, but with `SAGPooling`, whose scores are
    those of a layer of 1 channel.
    """
    pool_of = partial(SAGPooling, GNN=conv)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.pool1 = conv(9, 24), pool_of(24, ratio=0.8)
            self.conv2, self.pool2 = conv(24, 24), pool_of(24, ratio=0.8)
            self.lin = Linear(48, 2)

        def forward(self, x, edge_index, batch):
            total = 0
            for layer, pool in ((self.conv1, self.pool1), (self.conv2, self.pool2)):
                x = layer(x, edge_index).relu()
                x, edge_index, _, batch, *_ = pool(x, edge_index, None, batch)
                parts = [global_max_pool(x, batch), global_mean_pool(x, batch)]
                total = total + torch.cat(parts, dim=1)
            return self.lin(total)

    torch.manual_seed(0)
    model = Net()

    def loss():
        out = model(graphs.x, graphs.edge_index, graphs.batch)
        return F.cross_entropy(out, graphs.y)

    assert_learns(model, loss)


@every_layer
def test_autoencoder(conv, club: Data):
    """PyG's `examples/autoencoder.py`."""

    class Encoder(torch.nn.Module):
        def __init__(self, in_channels, out_channels):
            super().__init__()
            self.conv1 = conv(in_channels, 2 * out_channels)
            self.conv2 = conv(2 * out_channels, out_channels)

        def forward(self, x, edge_index):
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    torch.manual_seed(0)
    model = GAE(Encoder(34, 10))
    kept, _ = dropout_edge(club.edge_index, p=0.1, force_undirected=True)

    def loss():
        return model.recon_loss(model.encode(club.x, kept), kept)

    assert_learns(model, loss, fraction=0.95)


@every_layer
@pytest.mark.parametrize("jk", [None, "cat", "lstm"])
def test_basic_gnn(conv, jk: str | None, club: Data):
    class Stack(BasicGNN):
        supports_edge_weight = supports_edge_attr = False

        def init_conv(self, in_channels, out_channels, **kwargs) -> MessagePassing:
            return conv(in_channels, out_channels, **kwargs)

    model = Stack(34, 10, num_layers=3, out_channels=7, jk=jk, norm="batch_norm")
    assert model(club.x, club.edge_index).shape == (34, 7)
    assert Stack(-1, 6, num_layers=2)(club.x, club.edge_index).shape == (34, 6)


@every_layer
def test_containers(conv, graphs: Batch):
    x, edge_index, batch = graphs.x, graphs.edge_index, graphs.batch
    model = Sequential(
        "x, edge_index, batch",
        [
            (conv(9, 10), "x, edge_index -> x1"),
            ReLU(),
            (conv(10, 10), "x1, edge_index -> x2"),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (JumpingKnowledge("cat"), "xs -> x"),
            (DeepGCNLayer(conv(20, 20), Linear(20, 20), ReLU()), "x, edge_index -> x"),
            (global_mean_pool, "x, batch -> x"),
            Linear(20, 3),
        ],
    )
    assert model(x, edge_index, batch).shape == (graphs.num_graphs, 3)


@every_layer
def test_infomax(conv, club: Data):
    """PyG's `examples/infomax_transductive.py`."""
    model = DeepGraphInfomax(
        12,
        encoder=conv(34, 12),
        summary=lambda z, *_: z.mean(dim=0).sigmoid(),
        corruption=lambda x, edge_index: (x[torch.randperm(len(x))], edge_index),
    )
    loss = model.loss(*model(club.x, club.edge_index))
    loss.backward()
    assert loss.isfinite()


@every_layer
def test_random_graphs_as_generated(conv):
    """Directed, with duplicates and self-loops."""
    data = FakeDataset(1, 40, 4, num_channels=5, is_undirected=False)[0]
    assert conv(5, 7)(data.x, data.edge_index).isfinite().all()


@pytest.mark.parametrize("conv", [ChimeraDAGConv, RGLRUConv, PLSTMConv])
def test_programs_take_dags(conv):
    """Compiled and exported ones cannot look at a graph first; errors say so."""
    layer = conv(8, 8).eval()
    x, dag = torch.randn(4, 8), torch.tensor([[0, 0, 1, 2], [1, 2, 3, 3]])
    want = layer(x, dag)
    nodes, edges = Dim("nodes", min=2), Dim("edges", min=2)
    sizes = ({0: nodes}, {1: edges})
    program = torch.export.export(layer, (x, dag), dynamic_shapes=sizes).module()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with portable():
        assert torch.allclose(layer(x, dag), want, atol=1e-5)
    for run in (program, compiled):
        assert torch.allclose(run(x, dag), want, atol=1e-6)
        with pytest.raises(CycleError, match="where nothing is compiled"):
            run(x, torch.tensor([[0, 1, 2], [1, 2, 0]]))


@every_layer
def test_to_hetero_names_what_to_use_instead(conv):
    if conv in (nn.GatedGCNConv, GCNConv):
        pytest.skip("takes bipartite graphs")
    kinds = ["a", "b"], [("a", "to", "b"), ("b", "to", "a")]
    model = Sequential("x, edge_index", [(conv(8, 8), "x, edge_index -> x")])
    index = torch.tensor([[0, 1], [1, 0]])
    x, edges = {k: torch.randn(2, 8) for k in "ab"}, dict.fromkeys(kinds[1], index)
    model = to_hetero(model, kinds)
    with pytest.raises(TypeError, match="HeteroLayer"):
        model(x, edges)


def test_the_others_say_what_they_take():
    x, edge_index = torch.randn(4, 8), torch.tensor([[0, 1, 2, 3], [1, 2, 0, 0]])
    for edges in (edge_index, to_undirected(edge_index)):
        with pytest.raises(ValueError, match=r"'ChimeraConv'.* any graph"):
            nn.ChimeraPathConv(8, 7)(x, edges)
    for conv in (nn.ChimeraGridConv, nn.PLSTMGridConv):
        with pytest.raises(ValueError, match="'height' and 'width' must be given"):
            conv(8, 7)(x, edge_index)


# ------------------------------------------------------ cycles, and layers for DAGs

#: A cycle with a tail, a DAG that is numbered against its edges, and a self-loop.
CYCLE = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 2)]
DAG = [(6, 5), (5, 4), (6, 4), (7, 6)]


def index(edges: list) -> Tensor:
    return torch.tensor(edges).t().contiguous()


@pytest.mark.parametrize("conv", [ChimeraDAGConv, RGLRUConv, PLSTMConv])
def test_dags_are_used_unaltered(conv):
    """Also beside components with cycles; self-loops are left out."""
    torch.manual_seed(0)
    layer = conv(8, 8).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    x = torch.randn(8, 8, dtype=torch.double)
    strict = conv(8, 8, order=None).double()
    strict.load_state_dict(layer.state_dict())
    want = strict(x, index(DAG))
    assert layer(x, index(DAG)).equal(want)
    assert torch.allclose(layer(x, index([*DAG, (6, 6)])), want)
    loops = layer(x, index([(i, i) for i in range(8)]))
    assert loops.equal(strict(x, index(DAG)[:, :0]))
    both = layer(x, index([*CYCLE, *DAG]))
    assert torch.allclose(both[4:], want[4:])
    assert torch.allclose(both[:4], layer(x[:4], index(CYCLE)))
    assert (both[:4] - want[:4]).abs().min() > 1e-6
    with pytest.raises(ValueError, match="must be acyclic"):
        strict(x, index(CYCLE))


@pytest.mark.parametrize("conv", [ChimeraDAGConv, RGLRUConv])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_means_along_both_halves(conv, flow: str):
    """A breadth-first search from node 0 visits 1 and 2, then 3."""
    layer = conv(8, 8, edge_dim=2, flow=flow).double()
    x = torch.randn(4, 8, dtype=torch.double)
    attr = torch.randn(len(CYCLE), 2, dtype=torch.double)
    later = torch.tensor([s < t for s, t in CYCLE])
    edges = index(CYCLE)
    halves = [layer(x, edges[:, half], attr[half]) for half in (later, ~later)]
    assert torch.allclose(layer(x, edges, attr), (halves[0] + halves[1]) / 2)


@pytest.mark.parametrize("mode", ["P", "D"])
def test_plstm_shares_its_gates(mode: str):
    """As by `order="bfs"`, whose two DAGs have equal gates then."""
    options = {"mode": mode, "edge_dim": 2, "tracking": 2}
    shared = PLSTMConv(8, 8, **options).double()
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
        shared.gate_bias[:, : shared.heads] = -100  # read once here, and twice there
        shared.lin_value.weight.mul_(1e4)  # far above the epsilon of the norm
    apart = PLSTMConv(8, 8, order="bfs", **options).double()
    state = shared.state_dict()
    for name, value in apart.state_dict().items():
        if state[name].shape != value.shape:
            state[name] = torch.cat([state[name]] * 2)
    apart.load_state_dict(state)
    x = torch.randn(4, 8, dtype=torch.double)
    attr = torch.randn(len(CYCLE), 2, dtype=torch.double)
    got, want = (c(x, index(CYCLE), attr) for c in (shared, apart))
    assert torch.allclose(got, want, atol=1e-5)
