"""What layers and models say if they are used wrongly: the argument that is at fault,
and what to do about it; and integers of all kinds, which are not a fault.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from convs import CASES, CHANNELS, Case, every_conv
from torch_geometric.data import Batch, Data, HeteroData

from pyg_chimera import nn, transforms
from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    HeteroLayer,
    KHopAttentionConv,
    PLSTMConv,
)

C = CHANNELS
INDEX = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
DAG = torch.tensor([[0, 1, 3], [1, 2, 4]])
TYPES = ["a", "b"], [("a", "to", "b")]
ONE_TYPE = [name for name in CASES if "-" not in name and name != "GatedGCNConv"]


def features() -> torch.Tensor:
    return torch.randn(5, C)


def refused(call: Callable, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# --------------------------------------------------------------------------- integers

SIZED: dict[str, tuple[Callable, dict[str, int]]] = {
    "ChimeraConv": (ChimeraConv, {
        "in_channels": C, "out_channels": C, "heads": 4, "state_channels": 2,
        "groups": 2, "edge_dim": 3, "log_sums": 1}),
    "ChimeraConv-neumann": (partial(ChimeraConv, C, solver="neumann"), {
        "num_terms": 2}),
    "ChimeraDAGConv": (partial(ChimeraDAGConv, C), {"heads": 2, "num_dags": 2}),
    "GatedDeltaConv": (partial(GatedDeltaConv, C), {"heads": 2, "conv_kernel": 2}),
    "RGLRUConv": (partial(nn.RGLRUConv, C), {"heads": 2, "num_dags": 2,
        "conv_kernel": 2, "edge_dim": 3}),
    "PLSTMConv": (partial(PLSTMConv, C), {"heads": 2, "state_channels": 3,
        "num_dags": 2, "tracking": 2, "edge_dim": 3}),
    "KHopAttentionConv": (partial(KHopAttentionConv, C), {"heads": 4, "k": 2,
        "groups": 2, "edge_dim": 3}),
    "GraphMambaConv": (partial(GraphMambaConv, C), {"state_channels": 2,
        "conv_kernel": 2, "expand": 2, "num_eval_permutations": 2, "num_bins": 2}),
    "GatedGCNConv": (GatedGCNConv, {
        "in_channels": C, "out_channels": C, "edge_dim": 3}),
    "SelfAttention": (nn.SelfAttention, {"channels": C, "heads": 2}),
    "SwiGLU": (nn.SwiGLU, {"channels": C, "hidden_channels": 6}),
    "LaplacianEncoder": (nn.LaplacianEncoder, {"out_channels": 3}),
    "RandomWalkEncoder": (nn.RandomWalkEncoder, {"walk_length": 3, "out_channels": 3}),
    "PositionEmbedding": (nn.PositionEmbedding, {"channels": C, "num_coordinates": 2}),
    "GPSLayer": (partial(GPSLayer, mixer=ChimeraConv(C)), {
        "channels": C, "mlp_channels": 4}),
    "GraphModel": (partial(GraphModel, layers=lambda _: ChimeraConv(C)), {
        "in_channels": 3, "channels": C, "out_channels": 2, "num_layers": 2,
        "head_layers": 1}),
    "HeteroLayer": (
        partial(HeteroLayer, ChimeraConv(C, edge_dim=C), metadata=TYPES),
        {"channels": C}),
    "AddKHopIndex": (transforms.AddKHopIndex, {"k": 2}),
    "LaplacianEncoding": (transforms.LaplacianEncoding, {"k": 2}),
    "DAGDecomposition": (transforms.DAGDecomposition, {"num_dags": 2}),
    "ImageToGraph": (transforms.ImageToGraph, {"patch_size": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_integers_of_numpy_are_integers(name: str) -> None:
    """And are kept as plain ones, which compilers and files of weights know."""
    make, sizes = SIZED[name]
    plain = make(**sizes)
    for kind in (np.int64, np.uint8):
        other = make(**{key: kind(size) for key, size in sizes.items()})
        assert repr(other) == repr(plain)
        for key, value in vars(plain).items():
            if isinstance(value, int):
                assert type(vars(other)[key]) is type(value), key
    for key in sizes:
        for wrong in (True, 2.0, "2"):
            with pytest.raises(TypeError, match="must be an integer"):
                make(**{**sizes, key: wrong})


@pytest.mark.parametrize("option", ["gated", "bias", "qk_norm", "local_conv"])
def test_flags_are_not_words(option: str) -> None:
    for wrong in ("no", None, 2):
        with pytest.raises(TypeError, match=f"'{option}' must be True or False"):
            ChimeraConv(C, **{option: wrong})
    with pytest.raises(TypeError, match="'bias' must be True or False, got 'no'"):
        KHopAttentionConv(C, bias="no")
    with pytest.raises(TypeError, match="'gamma' must be a number, got '1'"):
        ChimeraConv(C, gamma="1")


# -------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ONE_TYPE)
def test_bipartite_graphs_are_refused_in_words(name: str) -> None:
    said = r"must be (one|an) integer.*got \(8, 8\)"
    refused(lambda: CASES[name].conv((8, 8)), TypeError, said)
    x = features()
    said = r"'x' must be a torch.Tensor, got tuple; .*HeteroLayer"
    refused(lambda: CASES[name].conv()((x, x), DAG), TypeError, said)


@every_conv
def test_data_is_not_a_tensor(case: Case) -> None:
    data, conv = Data(x=features(), edge_index=INDEX), case.conv()
    for graph in (data, Batch.from_data_list([data, data])):
        said = "takes tensors, not a Data.*'data.x, data.edge_index, batch=data.batch'"
        refused(lambda graph=graph: conv(graph), TypeError, said)


def test_models_are_called_with_inputs() -> None:
    data = Data(x=features(), edge_index=INDEX)
    model = GraphModel(C, C, 2, [GPSLayer(C, mixer=ChimeraConv(C))])
    refused(lambda: model(data), TypeError, r"GraphModel takes .*model\.inputs\(data\)")
    layer = HeteroLayer(ChimeraConv(C, edge_dim=C), C, TYPES)
    several = HeteroData()
    refused(lambda: layer(several), TypeError, "not a HeteroData.*'data.x_dict")
    for batch in (several, Batch.from_data_list([several, several])):
        said = "got HeteroData.*'HeteroLayer'.*'data.x_dict, .*to_homogeneous"
        refused(lambda batch=batch: model.inputs(batch), TypeError, said)
    x = features()
    refused(lambda: layer(x, {}), TypeError, "'x_dict' must be a dictionary.*Tensor")
    xs = {"a": x, "b": x}
    refused(lambda: layer(xs, INDEX), TypeError, "'edge_index_dict' must be a dictio")
    said = "'metadata' must be lists.*got HeteroData"
    refused(lambda: HeteroLayer(layer.layer, C, several), TypeError, said)
    said = "'layers' must be a list.*got a single ChimeraConv"
    refused(lambda: GraphModel(C, C, 2, ChimeraConv, 2), TypeError, said)
    refused(lambda: model(x[:, :3], INDEX), ValueError, r"'x' must be \[rows, 8\]")


@pytest.mark.parametrize("name", ["ChimeraConv", "GatedGCNConv", "ChimeraDAGConv"])
def test_edges_that_are_something_else(name: str) -> None:
    conv, x = CASES[name].conv(), features()
    index = DAG if name == "ChimeraDAGConv" else INDEX
    said = r"'edge_index' must be.*transpose it: 'edge_index\.t\(\)'"
    refused(lambda: conv(x, index.t()), ValueError, said)
    said = r"'edge_index' must be.*'torch_geometric\.utils\.dense_to_sparse'"
    refused(lambda: conv(x, torch.eye(5)), ValueError, said)
    refused(lambda: conv(x, index.tolist()), TypeError, "must be a .*ensor.*'list'")


def test_nodes_numbered_from_one() -> None:
    said = r"= \[0, 5\), got 5 .*numbered from 0, and 'num_nodes' \(the rows of 'x'\)"
    refused(lambda: ChimeraConv(C)(features(), INDEX + 1), ValueError, said)


def test_weights_of_edges_without_edge_dim() -> None:
    said = "'edge_weight' must be None .*'edge_dim=None'; construct it with 'edge_dim=1"
    for conv in (ChimeraConv(C), GatedGCNConv(C, C), KHopAttentionConv(C)):
        weight = torch.rand(6)
        call = partial(conv, features(), INDEX, edge_weight=weight)
        refused(call, ValueError, said)


def test_a_batch_that_is_not_sorted() -> None:
    """Right if the edges are, too; else, it is named as the likely cause."""
    x, batch = features(), torch.tensor([0, 0, 0, 1, 1])
    conv, order = ChimeraConv(C).eval(), torch.tensor([3, 0, 4, 1, 2])
    said = r"joins different graphs.* 'batch' is not sorted \(node 1 of graph 0 follows"
    refused(lambda: conv(x, INDEX, batch=batch[order]), ValueError, said)
    out = conv(x[order], order.argsort()[INDEX], batch=batch[order])
    torch.testing.assert_close(out, conv(x, INDEX, batch=batch)[order])
    batch = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="joins different graphs") as error:
        conv(x, INDEX, batch=batch)
    assert "not sorted" not in str(error.value)


def test_scores_of_other_nodes() -> None:
    call = partial(GraphMambaConv(C), features(), INDEX, score=torch.rand(4))
    refused(call, ValueError, r"'score' must be \[nodes\] = \[5\], got \[4\]")


# ------------------------------------------------------------------- what is not finite

CHECKED = ["ChimeraConv-edges", "ChimeraDAGConv-edges", "ChimeraPathConv",
           "GatedDeltaConv-edges", "RGLRUConv-edges", "PLSTMConv-D"]  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_the_cause_of_nan_is_named(name: str) -> None:
    """If the layer says anything: NaNs of a graph may also stay in it."""
    case = CASES[name]
    for place in ("x", "edge_attr", "lin_edge"):
        conv, inputs = case.conv(), case.inputs(torch.float)
        said = rf"{type(conv).__name__}: '{place}' must be finite, but has nan in row"
        if place == "lin_edge":
            conv.lin_edge.weight.data[0, 0] = torch.nan
            said = "parameter 'lin_edge.weight' must be finite, but has nan; the learn"
        else:
            getattr(inputs, place)[2] = torch.nan
        try:
            out = case.call(conv, inputs)
        except ValueError as error:
            text = str(error)
        else:
            assert not out.isfinite().all()
            continue
        with pytest.raises(ValueError, match=said):
            raise ValueError(text)
        assert "edge_weight" not in text


def test_gates_of_all_these_are_checked() -> None:
    """The test above is not about nothing."""
    conv, x = ChimeraConv(C), features()
    x[3, 1] = torch.nan
    said = "ChimeraConv: 'x' must be finite, but has nan in row 3"
    refused(lambda: conv(x, INDEX), ValueError, said)
    conv = GatedDeltaConv(C).half()
    conv.delta_bias.data.fill_(6e4)
    conv.lin_delta.weight.data.fill_(6e4)
    said = "GatedDeltaConv: what it computes is not finite, although 'x' and the param"
    refused(lambda: conv(features().half() * 100, INDEX), ValueError, said)


# ------------------------------------------------------------------------------ cycles


def test_self_loops_are_called_that() -> None:
    loop = torch.cat([DAG, torch.tensor([[2], [2]])], 1)
    said = "has a self-loop at node 2.*'torch_geometric.utils.remove_self_loops'"
    for conv in (
        ChimeraDAGConv(C, order=None),
        nn.RGLRUConv(C, order=None),
        GatedDeltaConv(C, acyclic=True),
    ):
        call: Callable[[], Any] = partial(conv, features(), loop)
        refused(call, ValueError, said)


@pytest.mark.parametrize(
    ("conv", "name"),
    [
        *((conv, "form") for conv in (ChimeraConv, GatedDeltaConv, PLSTMConv)),
        *((conv, "backend") for conv in (ChimeraConv, PLSTMConv, GraphMambaConv)),
    ],
)
def test_unknown_algorithms_are_refused_at_once(conv, name):
    with pytest.raises(ValueError, match=f"'{name}' must be one of .*, got 'cuda'"):
        conv(C, **{name: "cuda"})
