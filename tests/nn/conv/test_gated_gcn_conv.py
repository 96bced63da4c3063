import copy

import pytest
import torch
import torch_geometric.typing
from hypothesis import given
from strategies import graphs
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import Sequential, summary
from torch_geometric.utils import to_torch_csr_tensor

from pyg_chimera.nn import GatedGCNConv

EDGE_INDEX = torch.tensor([[0, 1, 2, 2, 3, 0, 1, 1], [1, 2, 0, 3, 3, 1, 3, 0]])


def make_inputs(
    num_nodes: int = 5, edge_index: Tensor = EDGE_INDEX, edge_dim: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_nodes, 4)
    return x, edge_index, torch.randn(edge_index.size(1), edge_dim)


def make_conv(*args: object, **kwargs: object) -> GatedGCNConv:
    """A layer in evaluation whose norms are no identities."""
    conv = GatedGCNConv(*args, **kwargs)
    for module in conv.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            torch.nn.init.normal_(module.weight)
    return conv.eval()


def dense(
    conv: GatedGCNConv, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The docstring's formulas with dense pairs of nodes, edge by edge."""
    weight = {name: getattr(conv, f"lin_{name}").weight for name in NAMES[:4]}
    bias = {name: getattr(conv, f"lin_{name}").bias for name in NAMES[:3]}
    out, edges = [], []
    for k, (j, i) in enumerate(edge_index.t().tolist()):
        e = weight["target"] @ x[i] + bias["target"] + weight["source"] @ x[j]
        if edge_attr is not None:
            e = e + conv.lin_edge.weight @ edge_attr[k]
        edges.append(e)
    for i in range(x.size(0)):
        total = torch.zeros(conv.out_channels, dtype=x.dtype)
        weighted = torch.zeros(conv.out_channels, dtype=x.dtype)
        for k, (j, target) in enumerate(edge_index.t().tolist()):
            if target == i:
                gate = 1 / (1 + torch.exp(-edges[k]))
                total = total + gate
                weighted = weighted + gate * (weight["value"] @ x[j] + bias["value"])
        out.append(weight["root"] @ x[i] + bias["root"] + weighted / (total + 1e-6))
    none = x.new_zeros(0, conv.out_channels)
    return torch.stack(out), torch.stack(edges) if edges else none


NAMES = ("root", "value", "target", "source", "edge")


@pytest.mark.parametrize("with_edges", [True, False])
@given(graph=graphs(min_nodes=1, max_nodes=6))
def test_bare_formula(graph: object, with_edges: bool) -> None:
    edge_index, num_nodes = graph
    conv = GatedGCNConv(4, 5, edge_dim=3, norm=None, act=None).double()
    x = torch.randn(num_nodes, 4, dtype=torch.double, requires_grad=True)
    edge_attr = None
    if with_edges:
        edge_attr = torch.randn(edge_index.size(1), 3, dtype=torch.double)
    expected = dense(conv, x, edge_index, edge_attr)[: 1 + with_edges]
    out = conv(x, edge_index, edge_attr)
    out = out if with_edges else (out,)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    weights = [torch.randn_like(part) for part in out]
    inputs = [x, *conv.parameters()]
    grads = [
        torch.autograd.grad(
            sum((w * part).sum() for w, part in zip(weights, parts, strict=True)),
            inputs,
            allow_unused=True,
            materialize_grads=True,
        )
        for parts in (out, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_hand_computed() -> None:
    conv = GatedGCNConv(1, 1, norm=None, act=None, bias=False, eps=0.0)
    for name, value in zip(NAMES, (1.0, 2.0, 1.0, -1.0, 1.0), strict=True):
        torch.nn.init.constant_(getattr(conv, f"lin_{name}").weight, value)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    edge_index = torch.tensor([[0, 1], [2, 2]])
    # Both gates are sigmoid(0) = 1/2: 3 - 1 - 2 and 3 - 2 - 1.
    out, edge = conv(x, edge_index, torch.tensor([[-2.0], [-1.0]]))
    assert edge.tolist() == [[0.0], [0.0]]
    assert out[2].tolist() == [3.0 + (2.0 + 4.0) / 2]
    assert out[:2].isnan().all()  # 0 / 0, which the default `eps` is there for.


def test_norm_and_activation_around_the_formula() -> None:
    conv = make_conv(4, 5, edge_dim=3).double()
    x, edge_index, edge_attr = make_inputs()
    x, edge_attr = x.double(), edge_attr.double()
    nodes, edges = dense(conv, x, edge_index, edge_attr)
    out, edge = conv(x, edge_index, edge_attr)
    torch.testing.assert_close(out, conv.norm(nodes).relu())
    torch.testing.assert_close(edge, conv.norm_edge(edges).relu())

    conv = make_conv(4, 5, edge_dim=3, norm="layer_norm", act="gelu").double()
    nodes, edges = dense(conv, x, edge_index, edge_attr)
    out, edge = conv(x, edge_index, edge_attr)
    gelu, norm = torch.nn.functional.gelu, torch.nn.functional.layer_norm
    torch.testing.assert_close(out, gelu(norm(nodes, (5,))))
    torch.testing.assert_close(edge, gelu(norm(edges, (5,))))


def test_batch_norm_statistics_in_training() -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3, act=None)
    out, edge = conv(*make_inputs())
    for part in (out, edge):
        torch.testing.assert_close(part.mean(0), torch.zeros(5), atol=1e-5, rtol=0)


@given(graph=graphs(min_nodes=1))
def test_permutation_equivariance(graph: object) -> None:
    edge_index, num_nodes = graph
    conv = make_conv(4, 5, edge_dim=3)
    x, _, edge_attr = make_inputs(num_nodes, edge_index)
    out, edge = conv(x, edge_index, edge_attr)
    perm, order = torch.randperm(num_nodes), torch.randperm(edge_index.size(1))
    permuted = perm.argsort()[edge_index[:, order]]
    out2, edge2 = conv(x[perm], permuted, edge_attr[order])
    torch.testing.assert_close(out2, out[perm], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(edge2, edge[order], atol=1e-5, rtol=1e-5)


def test_batched_equals_one_by_one() -> None:
    conv = make_conv(4, 5, edge_dim=3)
    data = []
    for num_nodes, edge_index in ((5, EDGE_INDEX), (1, EDGE_INDEX[:, :0]), (4, None)):
        edge_index = EDGE_INDEX[:, 2:5] if edge_index is None else edge_index
        x, edge_index, edge_attr = make_inputs(num_nodes, edge_index)
        data.append(Data(x=x, edge_index=edge_index, edge_attr=edge_attr))
    batch = Batch.from_data_list(data)
    out, edge = conv(batch.x, batch.edge_index, batch.edge_attr)
    singles = [conv(d.x, d.edge_index, d.edge_attr) for d in data]
    torch.testing.assert_close(out, torch.cat([s[0] for s in singles]))
    torch.testing.assert_close(edge, torch.cat([s[1] for s in singles]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(num_nodes: int, training: bool) -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3).train(training)
    out, edge = conv(*make_inputs(num_nodes, EDGE_INDEX[:, :0]))
    assert out.shape == (num_nodes, 5)
    assert edge.shape == (0, 5)
    (out.sum() + edge.sum()).backward()
    for tensor in (out, *conv.state_dict().values()):
        assert tensor.isfinite().all()


def test_one_edge_in_training() -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3)
    out, edge = conv(*make_inputs(2, torch.tensor([[0], [1]])))
    assert out.isfinite().all()
    assert edge.isfinite().all()


def test_bipartite_and_node_only() -> None:
    conv = make_conv((4, 6), 5, edge_dim=0)
    assert conv.lin_edge is None
    assert conv.norm_edge is None
    x = (torch.randn(4, 4), torch.randn(2, 6))
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    out = conv(x, edge_index)
    assert out.shape == (2, 5)
    # The targets' view of a graph in which they come after the sources.
    alone = conv((x[0][2:], x[1][1:]), torch.tensor([[0, 1], [0, 0]]))
    torch.testing.assert_close(out[1:], alone)


def test_edges_read_but_not_updated() -> None:
    conv, inputs = make_conv(4, 5, edge_dim=3, update_edges=False), make_inputs()
    assert conv.norm_edge is None
    both = make_conv(4, 5, edge_dim=3)
    both.load_state_dict(conv.state_dict(), strict=False)
    torch.testing.assert_close(conv(*inputs), both(*inputs)[0])
    conv(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in conv.parameters())


def test_edge_features_of_one_channel() -> None:
    conv = make_conv(4, 5, edge_dim=1)
    x, edge_index, edge_attr = make_inputs(edge_dim=1)
    out = conv(x, edge_index, edge_attr)
    flat = conv(x, edge_index, edge_attr.squeeze(-1))
    torch.testing.assert_close(flat, out)


def test_lazy_channels() -> None:
    lazy, conv = GatedGCNConv(-1, 5, edge_dim=-1), GatedGCNConv(4, 5, edge_dim=3)
    assert GatedGCNConv(-1, 5).edge_dim == -1
    inputs = make_inputs()
    lazy(*inputs)
    shapes = {name: p.shape for name, p in lazy.state_dict().items()}
    assert shapes == {name: p.shape for name, p in conv.state_dict().items()}
    lazy.load_state_dict(conv.state_dict())
    torch.testing.assert_close(lazy.eval()(*inputs), conv.eval()(*inputs))


def test_deepcopy_and_state_dict() -> None:
    conv = make_conv(4, 5, edge_dim=3)
    inputs = make_inputs()
    out = conv(*inputs)
    torch.testing.assert_close(copy.deepcopy(conv)(*inputs), out)
    other = make_conv(4, 5, edge_dim=3)
    assert not torch.allclose(other(*inputs)[0], out[0])
    other.load_state_dict(conv.state_dict())
    torch.testing.assert_close(other(*inputs), out)


def test_reset_parameters() -> None:
    used, fresh = GatedGCNConv(4, 5, edge_dim=3), GatedGCNConv(4, 5, edge_dim=3)
    used(*make_inputs())
    for parameter in used.parameters():
        torch.nn.init.ones_(parameter)
    for conv in (used, fresh):
        torch.manual_seed(1)
        conv.reset_parameters()
    torch.testing.assert_close(used.state_dict(), fresh.state_dict())


def test_sequential() -> None:
    first, second = make_conv(4, 5, edge_dim=3), make_conv(5, 6)
    model = Sequential(
        "x, edge_index, edge_attr",
        [
            (first, "x, edge_index, edge_attr -> x, edge_attr"),
            (second, "x, edge_index, edge_attr -> x, edge_attr"),
        ],
    )
    x, edge_index, edge_attr = make_inputs()
    expected = first(x, edge_index, edge_attr)
    expected = second(expected[0], edge_index, expected[1])
    torch.testing.assert_close(model(x, edge_index, edge_attr), expected)


def test_summary() -> None:
    pytest.importorskip("tabulate")
    table = summary(GatedGCNConv(4, 5, edge_dim=3), *make_inputs())
    assert "[5, 4], [2, 8], [8, 3]" in table
    assert "[5, 5], [8, 5]" in table


def test_adjacency_forms() -> None:
    conv = make_conv(4, 5, edge_dim=3)
    x, edge_index, edge_attr = make_inputs()
    order = (edge_index[1] * 5 + edge_index[0]).argsort(stable=True)  # Rows first.
    edge_index, edge_attr = edge_index[:, order], edge_attr[order]
    unique = torch.ones(order.numel(), dtype=torch.bool)  # Without duplicate edges.
    unique[1:] = (edge_index[:, 1:] != edge_index[:, :-1]).any(0)
    edge_index, edge_attr = edge_index[:, unique], edge_attr[unique]
    out = conv(x, edge_index, edge_attr)

    index = EdgeIndex(edge_index, sparse_size=(5, 5), sort_order="col")
    torch.testing.assert_close(conv(x, index, edge_attr), out)

    plain = to_torch_csr_tensor(edge_index.flip(0), size=(5, 5))
    torch.testing.assert_close(conv(x, plain, edge_attr), out)
    torch.testing.assert_close(conv(x, plain), conv(x, edge_index))

    valued = torch.sparse_coo_tensor(edge_index.flip(0), edge_attr, (5, 5, 3))
    torch.testing.assert_close(conv(x, valued.coalesce()), out)


@pytest.mark.skipif(
    not torch_geometric.typing.WITH_TORCH_SPARSE, reason="needs torch-sparse"
)
def test_sparse_tensor() -> None:
    conv = make_conv(4, 5, edge_dim=3)
    x, edge_index, edge_attr = make_inputs()
    adj_t = torch_geometric.typing.SparseTensor(
        row=edge_index[1], col=edge_index[0], value=edge_attr, sparse_sizes=(5, 5)
    )
    row, col, value = adj_t.coo()
    expected = conv(x, torch.stack([col, row]), value)
    torch.testing.assert_close(conv(x, adj_t), expected)
    torch.testing.assert_close(conv(x, adj_t.set_value(None), value), expected)


def test_masks_scale_messages() -> None:
    conv = make_conv(4, 5, edge_dim=3, norm=None, act=None)
    inputs = x, edge_index, _ = make_inputs()
    mask = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.5, 1.0])
    set_masks(conv, mask, edge_index, apply_sigmoid=False)
    out, edge = conv(*inputs)
    clear_masks(conv)
    bare, bare_edge = conv(*inputs)
    torch.testing.assert_close(edge, bare_edge)
    total = torch.zeros(5, 5).index_add_(0, edge_index[1], edge.sigmoid()) + 1e-6
    lost = (1 - mask).view(-1, 1) * edge.sigmoid() * conv.lin_value(x)[edge_index[0]]
    lost = torch.zeros(5, 5).index_add_(0, edge_index[1], lost) / total
    torch.testing.assert_close(out, bare - lost)


def test_explainer() -> None:
    explainer = Explainer(
        make_conv(4, 5, edge_dim=3, update_edges=False),
        GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    x, edge_index, edge_attr = make_inputs()
    explanation = explainer(x, edge_index, edge_attr=edge_attr, index=3)
    into_3 = edge_index[1] == 3
    assert (explanation.edge_mask[into_3] > 0).all()
    assert (explanation.edge_mask[~into_3] == 0).all()


@pytest.mark.parametrize("with_edges", [True, False])
def test_compiles_without_graph_break(with_edges: bool) -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3)
    x, edge_index, edge_attr = make_inputs()
    inputs = (x, edge_index, edge_attr if with_edges else None)
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), conv(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    conv = make_conv(4, 5, edge_dim=3)
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=dtype):
        out, edge = conv(*inputs)
    for a, b in zip((out, edge), conv(*inputs), strict=True):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.1, check_dtype=False)


def test_repr() -> None:
    assert str(GatedGCNConv(4, 5)) == "GatedGCNConv(4, 5, edge_dim=4)"
    assert str(GatedGCNConv((4, 6), 5)) == "GatedGCNConv((4, 6), 5, edge_dim=4)"


def test_errors() -> None:
    x, edge_index, edge_attr = make_inputs()
    with pytest.raises(ValueError, match=r"'norm' must be .* got 'graph_norm'"):
        GatedGCNConv(4, 5, norm="graph_norm")
    with pytest.raises(TypeError, match="aggr"):
        GatedGCNConv(4, 5, aggr="mean")
    with pytest.raises(ValueError, match=r"edge_dim=0.*\[8, 3\]"):
        GatedGCNConv(4, 5, edge_dim=0)(x, edge_index, edge_attr)
    for num in (1, 7):
        with pytest.raises(ValueError, match=f"the 8 edges .* got {num} rows"):
            GatedGCNConv(4, 5, edge_dim=3)(x, edge_index, edge_attr[:num])
    with pytest.raises(IndexError, match="larger than 4"):
        GatedGCNConv(4, 5, edge_dim=3)(x, edge_index + 2, edge_attr)
