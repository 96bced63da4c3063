import pytest
import torch
from asserts import assert_is_formula, assert_near
from dense_layers import Graphs
from plstm import IN, NODES, OUT, make_conv, on_grids
from torch_geometric.data import Data
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.loader import DataLoader

from pyg_chimera.nn import PLSTMGridConv


@on_grids
@pytest.mark.parametrize("size", [(3, 4), (1, 3), (2, 1), (1, 1)])
def test_formula_on_grids(options, size):
    conv = make_conv(IN, OUT, layer=PLSTMGridConv, **options).double()
    height, width = size
    x = torch.randn(height * width, IN, dtype=torch.double, requires_grad=True)
    out = conv(x, height=height, width=width)
    assert_is_formula(conv, out, x, Graphs([], sizes=[size]))


@on_grids
def test_batches_of_grids(options):
    conv = make_conv(IN, OUT, layer=PLSTMGridConv, **options).double()
    none = torch.empty(2, 0, dtype=torch.long)
    items = [
        Data(x=torch.randn(h * w, IN, dtype=torch.double), edge_index=none, height=h,
             width=w)
        for h, w in [(2, 3), (1, 4), (3, 1), (1, 1)]
    ]  # fmt: skip
    (data,) = DataLoader(items, batch_size=len(items))
    outs = [conv(y.x, y.edge_index, height=y.height, width=y.width) for y in items]
    out = conv(data.x, batch=data.batch, height=data.height, width=data.width)
    assert_near(out, torch.cat(outs))
    x = data.x[:12]  # two grids that are alike
    out = conv(x, height=2, width=3)
    assert_near(out[6:], conv(x[6:], height=2, width=3))


def test_bad_grids():
    conv = PLSTMGridConv(IN, OUT)
    x = torch.randn(6, IN)
    with pytest.raises(ValueError, match="'height' and 'width' must be given"):
        conv(x)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 8"):
        conv(x, height=2, width=4)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 5"):
        conv(x, height=torch.tensor([2, 1]), width=torch.tensor([2, 1]))
    for name in ("edge_attr", "line_edge_index"):
        with pytest.raises(TypeError, match=name):
            conv(x, height=2, width=3, **{name: torch.tensor([[0], [1]])})


def test_grids_are_the_graphs_of_the_batch():
    conv = PLSTMGridConv(IN, OUT)
    x, batch = torch.randn(10, IN), torch.tensor([0] * 4 + [1] * 6)
    height, width = torch.tensor([2, 2]), torch.tensor([2, 3])
    assert conv(x, batch=batch, height=height, width=width).shape == (10, OUT)
    for sizes in ((height, width.flip(0)), (2, 5), (1, 1)):
        with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
            conv(x, batch=batch, height=sizes[0], width=sizes[1])
    with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
        conv(x, batch=batch.flip(0), height=height.flip(0), width=width.flip(0))


def test_masks_that_are_refused():
    conv = PLSTMGridConv(IN, OUT)
    set_masks(conv, torch.ones(1), torch.tensor([[0], [1]]), apply_sigmoid=False)
    with pytest.raises(ValueError, match="which grids do not look at"):
        conv(x=torch.randn(NODES, IN), height=1, width=NODES)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "PD"}, r"'mode' must be one of \('P', 'D'\), got 'PD'"),
        ({"normalization": "rows"}, "'normalization' must be one of .*, got 'rows'"),
        ({"gate_biases": (1.0,)}, "'gate_biases' must be three numbers"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        PLSTMGridConv(IN, OUT, **options)(torch.randn(6, IN), height=2, width=3)


@pytest.mark.parametrize("option", ["tracking", "edge_dim", "order"])
def test_options_of_the_other_layer(option):
    with pytest.raises(TypeError, match=option):
        PLSTMGridConv(IN, OUT, **{option: 2})


def test_defaults():
    conv = PLSTMGridConv(16, heads=2, mode="D")
    assert (conv.in_channels, conv.out_channels, conv.state_channels) == (16, 16, 8)
    assert str(conv) == "PLSTMGridConv(16, 16, heads=2, mode='D')"
