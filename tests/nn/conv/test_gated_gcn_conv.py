import pytest
import torch
from asserts import assert_is_formula, assert_near
from dense_layers import Graphs, dense
from torch import Tensor
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

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


NAMES = ("root", "value", "target", "source", "edge")


def test_hand_computed() -> None:
    conv = GatedGCNConv(1, 1, edge_dim=1, norm=None, act=None, bias=False)
    conv.eps = 0.0
    for name, value in zip(NAMES, (1.0, 2.0, 1.0, -1.0, 1.0), strict=True):
        torch.nn.init.constant_(getattr(conv, f"lin_{name}").weight, value)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    edge_index = torch.tensor([[0, 1], [2, 2]])
    # Both gates are sigmoid(0) = 1/2: 3 - 1 - 2 and 3 - 2 - 1.
    out, edge = conv(x, edge_index, torch.tensor([[-2.0], [-1.0]]))
    assert edge.tolist() == [[0.0], [0.0]]
    assert out[2].tolist() == [3.0 + (2.0 + 4.0) / 2]
    assert out[:2].isnan().all()  # 0 / 0, which the default `eps` is there for.


@pytest.mark.parametrize(
    "options",
    [
        {"norm": None, "act": None},
        {"norm": None, "edge_dim": 3},
        {"norm": "layer_norm", "act": "gelu", "edge_dim": 3},
        {"edge_dim": 3, "update_edges": False},
    ],
    ids=str,
)
def test_formula(options: dict) -> None:
    """Of nodes with all gradients, and of edges."""
    conv = make_conv(4, 5, **options).double()
    x, edge_index, edge_attr = make_inputs()
    x = x.double().requires_grad_()
    attrs = [edge_attr.double()] if "edge_dim" in options else None
    out, graphs = conv(x, edge_index, *(attrs or [])), Graphs([edge_index], attrs)
    out, *edges = out if isinstance(out, tuple) else (out,)
    assert_is_formula(conv, out, x, graphs)
    own = dict(conv.named_parameters()) | dict(conv.named_buffers())
    expected = dense(conv, own, x, graphs)[1:]
    assert len(edges) == len(expected)
    for a, b in zip(edges, expected, strict=True):
        assert_near(a, b)


def test_batch_norm_statistics_in_training() -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3, act=None)
    out, edge = conv(*make_inputs())
    for part in (out, edge):
        torch.testing.assert_close(part.mean(0), torch.zeros(5), atol=1e-5, rtol=0)


def test_one_edge_in_training() -> None:
    conv = GatedGCNConv(4, 5, edge_dim=3)
    out, edge = conv(*make_inputs(2, torch.tensor([[0], [1]])))
    assert out.isfinite().all()
    assert edge.isfinite().all()


def test_bipartite_and_node_only() -> None:
    conv = make_conv((4, 6), 5)
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


def test_shut_gates_in_half_precision() -> None:
    """Sums of gates of 1e-6 are divided by in float32, forward and backward."""
    conv = GatedGCNConv(4, 8, norm=None, act=None)
    torch.nn.init.constant_(conv.lin_target.bias, -14.0)
    x, edge_index, _ = make_inputs()
    grads = []
    for dtype in (torch.float32, torch.float16):
        leaf = x.to(torch.float16).to(dtype).requires_grad_()
        conv.to(torch.float16).to(dtype)(leaf, edge_index).sum().backward()
        grads.append(leaf.grad.float())
    assert torch.allclose(*grads, atol=0.02 * grads[0].abs().max().item())


@pytest.mark.parametrize("edge_dim", [None, 0, 3, -1])
@pytest.mark.parametrize("update_edges", [True, False])
def test_the_constructor_decides_what_is_read_and_returned(
    edge_dim: int | None, update_edges: bool
) -> None:
    conv = GatedGCNConv(4, 5, edge_dim, update_edges=update_edges).eval()
    x, edge_index, edge_attr = make_inputs()
    if not edge_dim:
        assert conv.edge_dim is None
        assert conv(x, edge_index).shape == (5, 5)
        with pytest.raises(ValueError, match=r"'edge_attr' must be None .*edge_dim=No"):
            conv(x, edge_index, edge_attr)
        return
    for attr in (edge_attr, edge_attr[:0]):
        out = conv(x, edge_index[:, : len(attr)], attr)
        assert isinstance(out, tuple) == update_edges
    with pytest.raises(ValueError, match=r"'edge_attr' must be given, as 'edge_dim' i"):
        conv(x, edge_index)


def test_errors() -> None:
    x, edge_index, edge_attr = make_inputs()
    with pytest.raises(ValueError, match=r"'norm' must be .* got 'graph_norm'"):
        GatedGCNConv(4, 5, norm="graph_norm")
    with pytest.raises(TypeError, match="aggr"):
        GatedGCNConv(4, 5, aggr="mean")
    with pytest.raises(ValueError, match="'in_channels' must be an integer, or a pair"):
        GatedGCNConv((4, 4, 4), 5)
    with pytest.raises(IndexError, match="larger than 4"):
        GatedGCNConv(4, 5, edge_dim=3)(x, edge_index + 2, edge_attr)
