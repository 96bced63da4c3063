import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch

from pyg_chimera.nn import ChimeraDAGConv, ChimeraGridConv
from pyg_chimera.transforms import DAGDecomposition, ImageToGraph, SequenceToGraph

IN, OUT = 5, 8


def images(sizes, channels: int = IN) -> Batch:
    decompose = DAGDecomposition(method="grid")
    return Batch.from_data_list(
        [decompose(ImageToGraph()(torch.randn(channels, h, w))) for h, w in sizes]
    )


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from(["all", "none", "diagonal", "row"]),
)
def test_it_is_the_layer_of_dags(sizes, share):
    data = images(sizes)
    conv = ChimeraGridConv(IN, OUT, 2, 3, share=share, window=None).double()
    dags = ChimeraDAGConv(IN, OUT, 2, 3, num_dags=4, share=share).double()
    dags.load_state_dict(conv.state_dict())
    x = data.x.double()
    out = conv(x, batch=data.batch, height=data.height, width=data.width)
    assert_near(out, dags(x, data.dag_edge_index))
    assert_near(out, dags(x, data.dag_edge_index, None, data.batch, data.dag_rank))


def results(conv, *args, **kwargs):
    """The output, and the gradients of the input and of all parameters."""
    x, *rest = args
    x = x.clone().requires_grad_()
    out = conv(x, *rest, **kwargs)
    out.backward(torch.linspace(-1, 2, out.numel()).view_as(out).to(out.dtype))
    return out.detach(), x.grad, *(p.grad for p in conv.parameters())


OPTIONS = {
    **{x: {"num_dags": 4, "share": x} for x in ("all", "none", "diagonal", "row")},
    "two": {"num_dags": 2, "share": "none"},
    "one": {"num_dags": 1, "share": "all"},
}


@pytest.mark.parametrize("selectivity", ["mean", "target"])
@pytest.mark.parametrize("roots", ["write", "silent"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_the_layer_of_dags(options, roots, selectivity):
    options = dict(
        options, heads=4, groups=2, state_channels=5, roots=roots,
        selectivity=selectivity,
    )  # fmt: skip
    conv = ChimeraGridConv(IN, OUT, window=None, **options).double()
    dags = ChimeraDAGConv(IN, OUT, **options, backend="torch").double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    dags.load_state_dict(conv.state_dict())
    data = images([(3, 4), (1, 6), (5, 1), (1, 1), (4, 3)])
    x, number = data.x.double(), options["num_dags"]
    edges = data.dag_edge_index[:number] if number > 1 else data.dag_edge_index[0]
    found = results(conv, x, height=data.height, width=data.width)
    expected = results(dags, x, edges)
    for y, z in zip(found, expected, strict=True):
        assert_near(y, z, 1e-12)


def test_sequences():
    data = SequenceToGraph()(torch.randn(6, IN))
    data = DAGDecomposition(method="path")(data)
    conv = ChimeraGridConv(IN, OUT, 2, 3, num_dags=2, selectivity="target", window=None)
    dags = ChimeraDAGConv(IN, OUT, 2, 3, num_dags=2, selectivity="target", share="none")
    dags.load_state_dict(conv.state_dict())
    out = conv(data.x, height=1, width=6)
    assert_near(out, dags(data.x, data.dag_edge_index), 1e-5)
    assert_near(conv(data.x.repeat(3, 1), height=1, width=6), out.repeat(3, 1), 1e-5)


def test_with_one_dag_nothing_is_heard_of_the_future():
    conv = ChimeraGridConv(IN, OUT, 2, 3, num_dags=1)
    x = torch.randn(6, IN, requires_grad=True)
    conv(x, height=1, width=6)[3].sum().backward()
    assert x.grad[:4].abs().sum(1).gt(0).all()
    assert x.grad[4:].eq(0).all()


def test_flipped_images():
    """Turning an image around exchanges the DAGs along one diagonal."""
    conv = ChimeraGridConv(IN, OUT, 2, 3, share="diagonal", window=None)
    with torch.no_grad():  # the same selectivities in both
        weight = conv.lin_delta.weight.view(4, 2, IN)
        weight[1::2] = weight[::2]
        conv.delta_bias[1::2] = conv.delta_bias[::2]
    x = torch.randn(12, IN)
    assert_near(
        conv(x.flip(0), height=3, width=4), conv(x, height=3, width=4).flip(0), 1e-5
    )


def test_bad_grids():
    for num_dags in (0, 3, 5):
        with pytest.raises(ValueError, match=f"1, 2 or 4 of a grid, got {num_dags}"):
            ChimeraGridConv(IN, OUT, num_dags=num_dags)
    with pytest.raises(ValueError, match="'edge_dim' must be None for grids"):
        ChimeraGridConv(IN, OUT, edge_dim=3)
    conv, x = ChimeraGridConv(IN, OUT), torch.randn(6, IN)
    with pytest.raises(ValueError, match="'height' and 'width' must be given"):
        conv(x)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 8"):
        conv(x, height=2, width=4)
    with pytest.raises(ValueError, match=r"'batch' must be .* = \[6\], .*\[3\]"):
        conv(x, batch=torch.zeros(3, dtype=torch.long), height=2, width=3)
    sides = torch.tensor([1] * 3), torch.tensor([3] * 2)
    with pytest.raises(ValueError, match="of as many grids, got 3 and 2"):
        conv(x, None, None, torch.zeros(6).long(), *sides)
    conv.explain = True
    with pytest.raises(ValueError, match="Edge masks explain edges"):
        conv(x, height=2, width=3)
    conv.explain = False
    batch = torch.tensor([0, 0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
        conv(x, batch=batch, height=1, width=torch.tensor([3, 3]))
