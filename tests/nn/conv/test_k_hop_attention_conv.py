"""What is special to `KHopAttentionConv`: positions, edges and stored pairs."""

from functools import partial

import pytest
import torch
from asserts import assert_near, formula
from dense_layers import Graphs
from torch_geometric.data import Batch, Data

from pyg_chimera.nn import GPSLayer, GraphModel, KHopAttentionConv
from pyg_chimera.ops import k_hop_index, unchecked
from pyg_chimera.transforms import AddKHopIndex

#: A diamond with a tail: 0 -> 1, 2 -> 3 -> 4 -> 5, and 6 alone.
DAG = torch.tensor([[0, 0, 1, 2, 3, 4], [1, 2, 3, 3, 4, 5]])
DEPTH = torch.tensor([0, 1, 1, 2, 3, 4, 0])


def make(**kwargs):
    """In float64, with no parameter where it starts."""
    torch.manual_seed(0)
    conv = KHopAttentionConv(8, 16, **{"heads": 2, "k": 2, **kwargs}).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return conv, torch.randn(7, 8, dtype=torch.double)


def test_rotary_positions_are_depths_of_dags():
    conv, x = make(rotary=True)
    expected = formula(conv, x, Graphs([DAG], pos=DEPTH))
    assert_near(conv(x, DAG), expected, 1e-6)
    assert_near(conv(x, DAG, pos=DEPTH), expected, 1e-6)
    # Only differences of positions count.
    assert_near(conv(x, DAG, pos=DEPTH + 100.0), expected, 1e-4)
    assert not torch.allclose(conv(x, DAG, pos=2 * DEPTH), expected)


def test_rotary_positions_of_several_coordinates():
    """Each of them has half of the channels."""
    conv, x = make(rotary=True)
    pos = torch.rand(7, 2)
    out = conv(x, DAG, pos=pos)
    assert not torch.allclose(conv(x, DAG, pos=pos.flip(1)), out)
    assert_near(conv(x, DAG, pos=pos + torch.tensor([3.0, -5.0])), out, 1e-4)


def test_depths_of_cyclic_graphs():
    conv, x = make(rotary=True)
    cycle = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"'pos' must be given .* with cycles"):
        conv(x, cycle)
    assert conv(x, cycle, pos=DEPTH).isfinite().all()


def test_edge_features_are_biases_of_neighbours():
    """Also of precomputed pairs; those of duplicate edges add up."""
    conv, x = make(edge_dim=3)
    attr = torch.randn(7, 3, dtype=torch.double)
    edges = torch.cat([DAG, DAG[:, :1]], dim=1)
    expected = formula(conv, x, Graphs([edges], [attr]))
    assert_near(conv(x, edges, attr), expected)
    pairs = k_hop_index(DAG, 7, 2)
    order = torch.randperm(pairs.edge_index.size(1))
    given = {
        "k_hop_index": pairs.edge_index[:, order],
        "k_hop_distance": pairs.distance[order],
    }
    assert_near(conv(x, edges, attr, **given), expected)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_stored_pairs_of_a_batch(flow):
    """Through PyG's batching, by the names that the transform gives them."""
    conv, x = make(flow=flow)
    data = [Data(x=x, edge_index=DAG), Data(x=x[:3], edge_index=DAG[:, :2])]
    batch = Batch.from_data_list([AddKHopIndex(2)(item) for item in data])
    out = conv(
        batch.x, batch.edge_index, batch=batch.batch, k_hop_index=batch.k_hop_index,
        k_hop_distance=batch.k_hop_distance,
    )  # fmt: skip
    assert_near(out, conv(batch.x, batch.edge_index))


def test_in_a_model():
    def layer(_):
        return GPSLayer(16, mixer=KHopAttentionConv(16, heads=2, k=2))

    names = {x: x for x in ("k_hop_index", "k_hop_distance")}
    model = GraphModel(8, 16, 1, layer, num_layers=2, structure=names).eval()
    data = AddKHopIndex(2)(Data(x=torch.randn(7, 8), edge_index=DAG))
    inputs = model.inputs(data)
    assert inputs["k_hop_index"].equal(data.k_hop_index)
    assert_near(model(**inputs), model(data.x, data.edge_index), 1e-6)


def test_nodes_alone_attend_to_themselves():
    conv, x = make()
    alone = torch.empty(2, 0, dtype=torch.long)
    value = conv.lin_value(x)
    assert_near(conv(x, alone), conv.lin_out(value))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"k": 0}, "'k' must be an integer >= 1"),
        ({"heads": 3}, "'heads' must divide 'out_channels', got 3 and 16"),
        ({"heads": 4, "groups": 3}, "'groups' must divide 'heads', got 3 and 4"),
        ({"groups": 0}, "'groups' must be an integer >= 1 .*got 0"),
        ({"heads": 16, "rotary": True}, "channels of a head must be a multiple of 2"),
        ({"backend": "cuda"}, "'backend' must be one of"),
    ],
)
def test_bad_options(kwargs, match):
    with pytest.raises(ValueError, match=match):
        KHopAttentionConv(8, 16, **{"heads": 2, **kwargs})(torch.randn(7, 8), DAG)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"pos": torch.zeros(6)}, ValueError, r"'pos' must be \[nodes\] .*got \[6\]"),
        ({"pos": [0.0] * 7}, TypeError, "'pos' must be a torch.Tensor, got list"),
        ({"pos": torch.zeros(7, 3)}, ValueError, "must be a multiple of 6"),
        ({"k_hop_index": DAG}, ValueError, "must be given together"),
        (
            {"k_hop_index": DAG, "k_hop_distance": [1] * 6},
            TypeError, "'k_hop_distance' must be a tensor of integers, got list",
        ),
        (
            {"k_hop_index": DAG, "k_hop_distance": torch.ones(6)},
            TypeError, "'k_hop_distance' must be .* integers, got torch.float32",
        ),
        (
            {"k_hop_index": DAG, "k_hop_distance": torch.ones(5).long()},
            ValueError, r"'k_hop_distance' must be \[pairs\] = \[6\], .* got \[5\]",
        ),
        (
            {"k_hop_index": DAG, "k_hop_distance": torch.full((6,), 3)},
            ValueError, r"'k_hop_distance' must be in .* \[0, 2\], got 3",
        ),
    ],
)  # fmt: skip
def test_bad_input(kwargs, error, match):
    conv, x = make(rotary=True)
    with pytest.raises(error, match=match):
        conv(x, DAG, **kwargs)


@pytest.mark.parametrize("trusted", [False, True])
def test_pairs_of_fewer_steps_are_refused(trusted):
    path, x = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.randn(4, 8)
    conv = KHopAttentionConv(8, 8, k=3)
    far = k_hop_index(path, 4, 9)  # at most three steps
    given = {"k_hop_index": far.edge_index, "k_hop_distance": far.distance}
    for k in (3, 9):
        wide = KHopAttentionConv(8, 8, k=k)
        assert_near(wide(x, path, **given), wide(x, path), 1e-6)
    near = k_hop_index(path, 4, 2)
    given = {"k_hop_index": near.edge_index, "k_hop_distance": near.distance}
    with (
        unchecked()
        if trusted
        else pytest.raises(
            ValueError, match=r"up to k=3 steps apart, got those up to 2"
        )
    ):
        conv(x, path, **given)


def test_stored_pairs_of_a_batch_and_of_dense_graphs():
    path = Data(x=torch.randn(6, 8), edge_index=torch.arange(6).repeat(2, 1))
    path.edge_index = torch.stack([torch.arange(5), torch.arange(1, 6)])
    dense = Data(x=torch.randn(9, 8), edge_index=torch.ones(9, 9).nonzero().t())
    conv = KHopAttentionConv(8, 8, k=3)
    for steps in ((3, 3), (2, 3), (3, 2)):
        graphs = [
            AddKHopIndex(k)(graph)
            for graph, k in zip((path, dense), steps, strict=True)
        ]
        batch = Batch.from_data_list([graphs[0], graphs[1], graphs[0]])
        given = {name: batch[name] for name in ("k_hop_index", "k_hop_distance")}
        call = partial(conv, batch.x, batch.edge_index, batch=batch.batch)
        if steps[0] == 3:  # all pairs of the dense graph are one step apart
            assert_near(call(**given), call(), 1e-6)
        else:
            with pytest.raises(ValueError, match="up to k=3 steps apart"):
                call(**given)
