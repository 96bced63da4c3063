import networkx as nx
import pytest
import torch
import torch_geometric.typing
from asserts import assert_is_formula, assert_near, formula
from dense_layers import Graphs
from plstm import graphs_of
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    NeighborLoader,
)
from torch_geometric.nn import GATConv, GINConv
from torch_geometric.utils import (
    from_networkx,
    k_hop_subgraph,
    subgraph,
)

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraPathConv,
    GatedGCNConv,
)
from pyg_chimera.ops import explain, unchecked
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddTopologicalOrder,
)

IN, OUT, EDGE = 5, 8, 3
GRAPH = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 0), (0, 1), (4, 5), (5, 4)]
DAGS = [
    [(0, 1), (1, 2), (0, 2), (0, 2), (4, 5), (2, 6)],
    [(2, 1), (1, 0), (6, 2), (5, 4)],
    [(5, 0), (4, 1), (3, 6)],
    [(0, 4), (4, 2), (0, 2)],
]
PATH = [(0, 2), (2, 0), (2, 1), (1, 2), (4, 3), (3, 4), (6, 0), (0, 6)]
NODES = 7  # nodes 3 and 6 are alone in GRAPH, node 5 is in PATH

Edges = tuple[Tensor, Tensor | None]
Conv = ChimeraConv | ChimeraDAGConv | ChimeraPathConv
LISTS = {ChimeraConv: [GRAPH], ChimeraDAGConv: DAGS, ChimeraPathConv: [PATH]}
each_layer = pytest.mark.parametrize("cls", LISTS)


def make_conv(*args, cls: type[Conv] = ChimeraConv, **kwargs) -> Conv:
    """A layer whose parameters are no identities."""
    conv = cls(*args or (IN, OUT), **kwargs)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return conv


def make_inputs(
    cls: type[Conv] = ChimeraConv, num_dags: int = 1, dtype: torch.dtype = torch.double
) -> tuple[Tensor, list[Edges]]:
    edges = LISTS[cls][:num_dags]
    dags = [
        (torch.tensor(e).t().contiguous(), torch.randn(len(e), EDGE, dtype=dtype))
        for e in edges
    ]
    return torch.randn(NODES, IN, dtype=dtype), dags


def call(conv: Conv, x: Tensor, dags: list[Edges], **kwargs) -> Tensor:
    edge_index, attrs = map(list, zip(*dags, strict=True))
    edge_attr = None if conv.edge_dim is None else attrs
    if len(dags) == 1:
        return conv(x, edge_index[0], edge_attr and edge_attr[0], **kwargs)
    return conv(x, edge_index, edge_attr, **kwargs)


@pytest.mark.parametrize("form", ["state", "mask"])
@pytest.mark.parametrize("num_terms", [0, 1, 4])
def test_neumann_formula(form, num_terms):
    conv = make_conv(state_channels=3, solver="neumann", form=form).double()
    x, dags = make_inputs()
    x.requires_grad_()
    fixed = make_conv(state_channels=3, solver="neumann", num_terms=num_terms).double()
    fixed.load_state_dict(conv.state_dict())
    graphs = graphs_of(conv, dags)
    for y in (call(conv, x, dags, num_terms=num_terms), call(fixed, x, dags)):
        assert_near(y, formula(fixed, x, graphs))
    assert_is_formula(fixed, call(fixed, x, dags), x, graphs)
    given = call(fixed, x, dags, num_terms=2)
    fixed.num_terms = 2
    assert_near(given, formula(fixed, x, graphs))


# ----------------------------------------------------------- what holds for any of them


# ---------------------------------------------------------------------- a PyG citizen


def test_edge_features():
    conv = make_conv(IN, OUT, 2, edge_dim=1).double()
    x, ((edge_index, attr),) = make_inputs()
    flat = conv(x, edge_index, attr[:, 0])
    assert_near(flat, conv(x, edge_index, attr[:, :1]))
    assert not torch.allclose(flat, conv(x, edge_index, attr[:, 1]))


@each_layer
def test_rank_changes_nothing(cls):
    conv = make_conv(IN, OUT, cls=cls).double()
    x, ((edge_index, _),) = make_inputs(cls)
    data = Data(x=x, edge_index=edge_index)
    if cls is ChimeraDAGConv:
        rank = AddTopologicalOrder()(data).topological_rank
    else:
        rank = AddEliminationOrder()(data).elimination_rank
    assert_near(conv(x, edge_index, rank=rank), conv(x, edge_index))


def test_ranks_of_several_dags():
    conv = make_conv(IN, OUT, cls=ChimeraDAGConv, num_dags=3).double()
    x, dags = make_inputs(ChimeraDAGConv, 3)
    ranks = [
        AddTopologicalOrder()(Data(x=x, edge_index=index)).topological_rank
        for index, _ in dags
    ]
    assert_near(call(conv, x, dags, rank=ranks), call(conv, x, dags))
    index = [index for index, _ in dags]
    assert_near(conv(x, tuple(index), rank=tuple(ranks)), conv(x, index))


def test_num_terms_of_a_batch():
    conv = make_conv(IN, OUT, solver="neumann").double()
    transform = AddDiameter()
    items = []
    for n in (2, 6, 3):
        edge_index = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        x = torch.randn(n, IN, dtype=torch.double)
        items.append(transform(Data(x=x, edge_index=edge_index)))
    batch = Batch.from_data_list(items)
    out = conv(batch.x, batch.edge_index, batch=batch.batch, num_terms=batch.diameter)
    exact = make_conv(IN, OUT).double()
    exact.load_state_dict(conv.state_dict())
    assert_near(out, exact(batch.x, batch.edge_index))  # paths are nilpotent
    assert_near(out, conv(batch.x, batch.edge_index, num_terms=5))
    none = torch.empty(0, dtype=torch.long)
    assert conv(batch.x[:0], batch.edge_index[:, :0], num_terms=none).shape == (0, OUT)
    short = conv(batch.x, batch.edge_index, num_terms=2)
    assert not torch.allclose(short, out)


@each_layer
def test_masks_scale_transitions(cls):
    conv = make_conv(IN, OUT, 2, cls=cls).double()
    x, dags = make_inputs(cls)
    edge_index = dags[0][0]
    mask = torch.rand(edge_index.size(1), dtype=torch.double)
    bare = conv(x, edge_index)
    set_masks(conv, mask, edge_index, apply_sigmoid=False)
    out = conv(x, edge_index)
    clear_masks(conv)
    assert_near(out, formula(conv, x, graphs_of(conv, dags, mask)))
    assert not torch.allclose(out, bare)
    assert conv(x, edge_index).equal(bare)


def test_masks_of_several_dags_are_refused():
    conv = make_conv(IN, OUT, cls=ChimeraDAGConv, num_dags=2)
    x, dags = make_inputs(ChimeraDAGConv, 2, torch.float32)
    set_masks(conv, torch.ones(6), dags[0][0], apply_sigmoid=False)
    with pytest.raises(ValueError, match="one graph, not several DAGs"):
        call(conv, x, dags)


# ----------------------------------------------------------------- loaders and training


def big_data() -> Data:
    edge_index = torch.randint(200, (2, 500))
    return Data(x=torch.randn(200, IN), edge_index=edge_index)


def check_part(conv: ChimeraConv, part: Data) -> None:
    out = conv(part.x, part.edge_index)
    expected = formula(conv.double(), part.x.double(), Graphs([part.edge_index]))
    conv.float()
    assert_near(out, expected, 1e-5)
    out.sum().backward()


def test_neighbour_batches():
    data, conv = big_data(), make_conv(IN, OUT)
    if torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE:
        loader = NeighborLoader(data, [3, 2], batch_size=20)
        part = next(iter(loader))
    else:
        nodes, edge_index, _, _ = k_hop_subgraph(
            [5, 77], 2, data.edge_index, relabel_nodes=True, num_nodes=200
        )
        part = Data(x=data.x[nodes], edge_index=edge_index)
    assert part.num_nodes < 200
    check_part(conv, part)


def test_cluster_batches():
    data, conv = big_data(), make_conv(IN, OUT)
    if torch_geometric.typing.WITH_METIS:
        parts = list(ClusterLoader(ClusterData(data, 4, log=False), batch_size=2))
    else:
        parts = []
        for nodes in torch.randperm(200).split(100):
            edge_index, _ = subgraph(
                nodes, data.edge_index, relabel_nodes=True, num_nodes=200
            )
            parts.append(Data(x=data.x[nodes.sort().values], edge_index=edge_index))
    assert sum(part.num_nodes for part in parts) == 200
    for part in parts:
        check_part(conv, part)


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"normalization": "row"}, "'normalization' must be one of .*, got 'row'"),
        ({"heads": 4, "groups": 3}, "'groups' must divide 'heads', got 3 and 4"),
        ({"groups": 0}, "'groups' must be an integer >= 1 .*got 0"),
        ({"gamma": 0.0}, r"'gamma' must be in \(0, 1\], .*, got 0.0"),
        ({"gamma": 1.5}, r"'gamma' must be in \(0, 1\], .*, got 1.5"),
        ({"gamma": 0.5, "normalization": "released"}, "and 1 with .*, got 0.5 and"),
        ({"reach_nodes": 0}, "'reach_nodes' must be an integer >= 1 .*, got 0"),
        ({"reach_nodes": 9, "normalization": "released"}, "must be None .*, got 9"),
        (
            {"num_terms": 2},
            "'num_terms' must be None unless .*, got 2 and solver='auto",
        ),
        ({"norm": "layer"}, "'norm' must be one of .*, got 'layer'"),
        ({"solver": "lu"}, "'solver' must be one of .*, got 'lu'"),
        ({"form": "matrix"}, "'form' must be one of .*, got 'matrix'"),
    ],
)
def test_bad_options(options, match):
    x, ((edge_index, _),) = make_inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match=match):
        ChimeraConv(IN, OUT, **options)(x, edge_index)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"share": "column"}, "'share' must be one of .*, got 'column'"),
        ({"share": "row"}, r"one of \['all', 'none'\] for num_dags=1, got 'row'"),
        ({"share": "diagonal", "num_dags": 3}, "for num_dags=3, got 'diagonal'"),
        ({"selectivity": "source"}, "'selectivity' must be one of .*, got 'source'"),
        ({"roots": "read"}, "'roots' must be one of .*, got 'read'"),
        ({"num_dags": 0}, "'num_dags' must be an integer >= 1 .*got 0"),
    ],
)
def test_bad_options_of_dags(options, match):
    with pytest.raises(ValueError, match=match):
        ChimeraDAGConv(IN, OUT, **options)


def test_options_of_other_layers_are_refused():
    for cls in (ChimeraConv, ChimeraPathConv):
        with pytest.raises(TypeError, match="num_dags"):
            cls(IN, OUT, num_dags=2)
    for cls in (ChimeraDAGConv, ChimeraPathConv):
        with pytest.raises(TypeError, match="solver"):
            cls(IN, OUT, solver="dense")
    for cls in (ChimeraConv, ChimeraDAGConv, ChimeraPathConv):  # grids have windows
        with pytest.raises(TypeError, match="taps"):
            cls(IN, OUT, taps=(3, 3))


@pytest.mark.parametrize("cls", [ChimeraConv, ChimeraDAGConv, ChimeraPathConv])
def test_local_conv_is_a_flag(cls):
    with pytest.raises(TypeError, match=r"'local_conv' must be .*, got \(3, 3\)"):
        cls(IN, OUT, local_conv=(3, 3))


def test_bad_inputs():
    x, ((edge_index, _attr),) = make_inputs(dtype=torch.float32)
    conv = ChimeraConv(IN, OUT)
    with pytest.raises(TypeError, match=r"'edge_index' must be a tensor .*'list'"):
        conv(x, [edge_index, edge_index])
    with pytest.raises(ValueError, match="from node 0 of graph 0 to node 1"):
        conv(x, edge_index, batch=torch.arange(NODES))
    with pytest.raises(ValueError, match=r"'rank' must be"):
        conv(x, edge_index, rank=torch.arange(3))

    conv = ChimeraConv(IN, OUT, solver="neumann")
    with pytest.raises(ValueError, match=r"needs 'num_terms'.*AddDiameter"):
        conv(x, edge_index)

    conv = ChimeraPathConv(IN, OUT)
    with pytest.raises(ValueError, match="has no reverse"):
        conv(x, edge_index)

    conv = ChimeraDAGConv(IN, OUT)
    match = "'edge_index' must be one tensor, got a list of 2; set 'num_dags'"
    with pytest.raises(TypeError, match=match):
        conv(x, [edge_index, edge_index])

    conv = ChimeraDAGConv(IN, OUT, num_dags=2)
    dag = torch.tensor(DAGS[0]).t()
    match = "'rank' must be a list with an entry for each of 2 DAGs, got one Tensor"
    with pytest.raises(TypeError, match=match):
        conv(x, [dag] * 2, rank=torch.arange(NODES))


def test_log_sums_are_distances():
    """On a path with equal selectivities, one step costs the inverse of the range."""
    torch.manual_seed(0)
    conv = ChimeraConv(1, 1, reach=(4.0, 4.0), log_sums=1).double()
    steps = torch.arange(201)
    edges = torch.stack([steps[:-1], steps[1:]])
    edges = torch.cat([edges, edges.flip(0)], 1)
    source = (steps == 100).double().view(-1, 1)
    found = {}
    conv.log_sums.register_forward_hook(lambda module, args, out: found.update(y=out))
    with torch.no_grad():
        conv.lin_delta.weight.zero_()
        conv.log_sums.lin_source.weight.fill_(200.0)  # nothing but the source
        conv.log_sums.lin_out.weight.fill_(10.0)
        conv(source, edges)
    y = found["y"].flatten()
    slope = y[110:130] - y[111:131]  # far from ends
    assert_near(slope, slope[:1].expand(20), tol=1e-12)
    assert abs(slope[0] - 1 / 4) < 1e-2
    assert_near(y[:100], y[101:].flip(0), tol=1e-12)


def with_a_tail(num_nodes, tail):
    """A random graph, and a path that hangs on its first node."""
    generator = torch.Generator().manual_seed(0)
    core = torch.randint(num_nodes, (2, 5 * num_nodes), generator=generator)
    last = torch.arange(num_nodes, num_nodes + tail)
    path = torch.stack([torch.cat([torch.zeros(1).long(), last[:-1]]), last])
    edges = torch.cat([core, path], 1)
    return torch.cat([edges, edges.flip(0)], 1)


@pytest.mark.parametrize("graph", [0, 1007, 1021, 1022])
@pytest.mark.parametrize("seed", range(3))
def test_log_sums_by_iteration(seed, graph):
    """Those that iterations round off, 10^100 times smaller than others, and gradients,
    are those of elimination.
    """
    torch.manual_seed(graph)
    edges, found = with_a_tail(60, 100), []
    x = torch.randn(160, 3).double()
    for solver in ("iterative", "sparse"):
        torch.manual_seed(seed)
        conv = ChimeraConv(3, 4, heads=2, log_sums=2, reach=(1, 4), solver=solver)
        conv = conv.double()
        with torch.no_grad():
            conv.log_sums.lin_source.weight[:, 0] = 200.0
        given = x.clone()
        given[:, 0] = torch.where(torch.arange(160) < 60, 1.0, -1.0)
        given.requires_grad_()
        out = conv(given, edges)
        out.sin().sum().backward()
        grads = {k: p.grad for k, p in conv.named_parameters()}
        found.append({"out": out.detach(), "x": given.grad, **grads})
    for name, want in found[1].items():
        assert_near(found[0][name], want, tol=1e-6)


@pytest.mark.parametrize("solver", ["auto", "iterative", "dense"])
def test_log_sums_are_explained(solver):
    conv = ChimeraConv(4, log_sums=2, solver=solver)
    found = explain(conv, torch.randn(3, 4), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    assert [choice.operator for choice in found] == ["resolvent_mix"] * len(found)
    assert len(found) > 1


def test_small_log_sums_are_nan_where_contents_are_not_read():
    """Rather than wrong, if they are those of an iteration."""
    edges, x = with_a_tail(60, 100), torch.zeros(160, 2)
    x[:, 0], x[0, 0] = -1, 1
    conv = ChimeraConv(2, 4, log_sums=1, reach=(1, 4), solver="iterative")
    with torch.no_grad():
        conv.log_sums.lin_source.weight.copy_(torch.tensor([[200.0, 0.0]]))
        exact = conv(x, edges)
        with unchecked():
            out = conv(x, edges)
    assert exact.isfinite().all()
    assert out[-50:].isnan().all()
    assert_near(out[:60], exact[:60])


def test_without_the_norm_outputs_grow_as_inputs():
    x, ((edge_index, _),) = make_inputs()
    torch.manual_seed(0)
    conv = ChimeraConv(IN, OUT, heads=2, norm=None, bias=False).double()
    small, large = (conv(size * x, edge_index) / size for size in (1e5, 1e8))
    assert_near(small, large, tol=1e-3)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_tied_gates_make_means(gamma):
    """What nodes write alike, all read, whatever the ranges and sizes of features: here
    a one, which neither keys nor queries turn.
    """
    conv = make_conv(IN, 4, 2, 1, gamma=gamma, reach=(4, 256))
    with torch.no_grad():
        for lin in (conv.lin_key, conv.lin_query, conv.lin_value):
            lin.weight.zero_()
            lin.bias.fill_(1.0)
    read, output = {}, conv.output
    conv.output = lambda y, nodes: output(read.setdefault("y", y), nodes)
    for size in (0.1, 3):
        x, ((edge_index, _),) = make_inputs(dtype=torch.float64)
        conv.double()(size * x, edge_index)
        y = read.pop("y")
        assert_near(y, y[:1, :1, :1].expand_as(y), 1e-9)
        assert y.min() > 0.1


def test_tied_gates_have_no_parameters_and_boundaries():
    """A node that nothing reaches keeps what it writes."""
    free, tied = ChimeraConv(IN, input_gate="free"), ChimeraConv(IN)
    assert free.delta_bias.size(0) == tied.delta_bias.size(0) + 1
    x, ((edge_index, _),) = make_inputs()
    alone = edge_index[:, edge_index[1] != 0]
    out = tied.double()(x, alone)
    assert_near(out[:1], tied(x[:1], alone[:, :0]))
    with pytest.raises(ValueError, match="'input_gate' must be 'free' with"):
        ChimeraConv(IN, input_gate="tied", normalization="released")
    assert ChimeraConv(IN, normalization="released").input_gate == "free"


def test_nodes_that_are_alike():
    """Means hardly tell them apart (docs/choosing.md, of the same name)."""
    torch.manual_seed(0)
    tree = from_networkx(nx.random_labeled_tree(60, seed=0)).edge_index
    x = torch.randn(1, 16).expand(60, 16)

    def spread(conv):
        out = conv.double()(x.double(), tree)
        return out.std(0).mean() / out.abs().mean()

    assert 1e-4 < spread(ChimeraConv(16, input_gate="free")) < 1e-3
    assert spread(ChimeraConv(16)) < 1e-12
    assert spread(GATConv(16, 16)) < 1e-12
    assert spread(GatedGCNConv(16, 16, norm=None, act=None)) < 1e-5
    assert spread(GINConv(torch.nn.Linear(16, 16))) > 0.2


def test_error_of_log_sums():
    with pytest.raises(ValueError, match="'log_sums' must be 0 with"):
        ChimeraConv(IN, OUT, log_sums=1, normalization="released")
    with pytest.raises(ValueError, match="'log_sums' must be an integer >= 0"):
        ChimeraConv(IN, OUT, log_sums=-1)
    with pytest.raises(TypeError, match="'log_sums' must be an integer"):
        ChimeraConv(IN, OUT, log_sums=2.0)
