"""Rows and columns of mixing matrices, against the layers themselves and dense ones."""

import inspect
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import CASES, CHANNELS
from torch_geometric.nn import GCNConv

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraPathConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    PLSTMGridConv,
)
from pyg_chimera.nn.conv import chimera_conv, chimera_dag_conv, plstm_conv
from pyg_chimera.utils import influence

MIXING = {
    name: case for name, case in CASES.items() if name.startswith(("Chimera", "PLSTM"))
}
del MIXING["ChimeraDAGConv-divided"]  # what two calls mix, on the halves of a graph
every_mixing = pytest.mark.parametrize("case", MIXING.values(), ids=MIXING)


def matrix(case, conv, inputs, **options):
    """All rows, or columns, [heads, V, V] in [to, from]."""
    role = options.get("role", "target")

    class Asked:  # what the case calls in place of the layer
        edge_dim = getattr(conv, "edge_dim", None)

        def __call__(self, *args, **kwargs):
            given = inspect.signature(conv.forward).bind(*args, **kwargs).arguments
            x, edge_index = given.pop("x"), given.pop("edge_index", None)
            each = [
                influence(conv, x, edge_index, node, **options, **given)
                for node in range(x.size(0))
            ]
            return torch.stack(each, dim=0 if role == "target" else 1)

    return case.call(Asked(), inputs).permute(2, 0, 1)


def projected_and_mixed(case, conv, inputs):
    """Query, key and value of a layer, and what it mixes."""
    seen = {}

    def spy(name, function):
        def called(*args):
            seen[name] = args
            return function(*args)

        return patch.object(conv, name, called)

    with spy("query_key_value", conv.query_key_value), spy("output", conv.output):
        case.call(conv, inputs)
    nodes, *gate = seen["query_key_value"]
    gated = gate and isinstance(gate[0], torch.Tensor)
    query, key, value = conv.query_key_value(nodes, *([] if gated else gate))
    mixed, *more = seen["output"]
    if len(more) > 2:  # states were divided by these
        mixed = mixed * more[2].exp().unsqueeze(-1)
    return query, key, value, mixed


def expanded(x, heads):
    return x.repeat_interleave(heads // x.size(1), dim=1)


@every_mixing
def test_it_is_what_the_layer_mixes_by(case):
    conv = case.trained()
    given = case.inputs()
    for inputs in (given, given.without_edges(4), given.without_edges(1)):
        query, key, value, mixed = projected_and_mixed(case, conv, inputs)
        rows = matrix(case, conv, inputs)
        columns = matrix(case, conv, inputs, role="source")
        assert rows.shape == (conv.heads, len(inputs.x), len(inputs.x))
        assert_near(rows, columns)
        assert_near(torch.einsum("hij,jhp->ihp", columns, value), mixed)
        if getattr(conv, "share", "all") == "none":  # products of each DAG differ
            continue
        products = torch.einsum(
            "ihn,jhn->hij", *(expanded(y, conv.heads) for y in (query, key))
        )
        for role in ("target", "source"):
            paths = matrix(case, conv, inputs, role=role, measure="paths")
            assert_near(paths * products, columns)


@every_mixing
def test_nothing_leaks_between_graphs(case):
    conv, inputs = case.trained(), case.inputs()
    found = matrix(case, conv, inputs, measure="paths")
    assert (found[:, inputs.batch[:, None] != inputs.batch] == 0).all()


def dense(weight, edge_index, num_states):
    """(I - A)^-1, [heads, states, states]."""
    A = torch.zeros(weight.size(1), num_states, num_states, dtype=torch.float64)
    for (source, target), w in zip(edge_index.t().tolist(), weight, strict=True):
        A[:, target, source] += w
    return torch.linalg.inv(torch.eye(num_states, dtype=torch.float64) - A)


def gate_of(gated, value):
    """What values were multiplied by, [V, heads]."""
    return (gated * value).sum(2) / value.square().sum(2)


def calls(module, name, case, conv, inputs):
    with patch.object(module, name, wraps=getattr(module, name)) as spy:
        case.call(conv, inputs)
    return [call.args for call in spy.call_args_list]


@pytest.mark.parametrize(
    "name",
    [
        "ChimeraConv",
        "ChimeraConv-edges",
        "ChimeraConv-released",
        "ChimeraDAGConv",
        "ChimeraDAGConv-edges",
        "ChimeraDAGConv-several",
    ],
)
def test_paths_of_chimera_are_a_gated_resolvent(name):
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    _, _, value, _ = projected_and_mixed(case, conv, inputs)
    operator = {ChimeraConv: (chimera_conv, "resolvent_mix"),
                ChimeraDAGConv: (chimera_dag_conv, "dag_scan")}[type(conv)]  # fmt: skip
    (args,) = calls(*operator, case, conv, inputs)
    _, _, gated, edge_index, weight = args[:5]
    V, D = len(value), conv.num_dags  # all DAGs are one graph, side by side
    gate = gate_of(gated, value.repeat(D, 1, 1)).t().unsqueeze(1)
    L = (dense(weight, edge_index, D * V) * gate).unflatten(2, (D, V))
    expected = L.unflatten(1, (D, V)).diagonal(dim1=1, dim2=3).sum(-1)
    found = matrix(case, conv, inputs, measure="paths")
    assert_near(found, expected / conv.num_dags**0.5)


@pytest.mark.parametrize("name", ["PLSTMConv", "PLSTMConv-D", "PLSTMConv-several"])
def test_paths_of_plstm_lead_over_edges(name):
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    (args,) = calls(plstm_conv, "stm_scan", case, conv, inputs)
    value, source, transition, mark, direct, edge_index, line_edge_index = args[2:9]
    begins, ends = F.one_hot(edge_index, len(value)).double()
    L = dense(transition, line_edge_index, edge_index.size(1))
    reads, writes = (x.t().unsqueeze(2) for x in (mark, source))
    expected = (ends * reads).mT @ L @ (begins * writes)
    expected = expected + torch.diag_embed(direct.t())
    assert_near(matrix(case, conv, inputs, measure="paths"), expected)


def test_in_inference_mode():
    conv, index = ChimeraConv(2), torch.tensor([[0, 1], [1, 0]])
    x = torch.randn(2, 2)
    for measure in ("mixing", "jacobian"):
        expected = influence(conv, x, index, 0, measure=measure)
        with torch.inference_mode():
            assert_near(influence(conv, x, index, 0, measure=measure), expected, 1e-6)
            made = index.clone(), {"batch": torch.zeros(2, dtype=torch.long)}
            out = influence(conv, x, made[0], 0, measure=measure, **made[1])
            assert_near(out, expected, 1e-6)


def test_a_path_by_hand():
    """Of three nodes with transitions of 1/2, each of which writes 1."""
    conv = ChimeraDAGConv(2, heads=1, reach=None, selectivity="target").double()
    for name, parameter in conv.named_parameters():
        if name.startswith("lin_delta"):
            torch.nn.init.zeros_(parameter)
    log2 = torch.tensor(2.0, dtype=torch.double).log()
    torch.nn.init.constant_(conv.delta_bias, torch.expm1(log2).log().item())
    edge_index = torch.tensor([[0, 1], [1, 2]])
    x = torch.randn(3, 2, dtype=torch.double)
    row = influence(conv, x, edge_index, 2, measure="paths")
    assert_near(row / log2, torch.tensor([[0.25], [0.5], [1.0]], dtype=torch.double))
    column = influence(conv, x, edge_index, 1, role="source", measure="paths")
    assert_near(column / log2, torch.tensor([[0.0], [1.0], [0.5]], dtype=torch.double))


# --------------------------------------------------------------------------- jacobian

EDGES = torch.tensor([[0, 1, 1, 2, 2, 2, 4, 5, 0], [1, 0, 2, 1, 2, 0, 5, 4, 1]])


class Mean(torch.nn.Module):
    def forward(self, x, edge_index):
        return x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    "module",
    [
        GCNConv(4, 3),
        ChimeraConv(4, 6, heads=2),
        GraphMambaConv(4),
        GatedGCNConv(4, 4, norm="layer_norm"),
        GPSLayer(4, GCNConv(4, 4), ChimeraConv(4, heads=2), dropout=0.5),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("edge_index", [EDGES, EDGES[:, :0]], ids=["graph", "no edges"])
def test_jacobian(module, edge_index):
    module = module.double()
    x = torch.randn(7, 4, dtype=torch.double)

    def out(x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            result = deepcopy(module).eval()(x, edge_index)
        return result[0] if isinstance(result, tuple) else result

    expected = torch.autograd.functional.jacobian(out, x).abs().sum((1, 3))
    for node in (0, 3):
        torch.manual_seed(0)
        found = influence(module, x, edge_index, node, measure="jacobian")
        assert_near(found, expected[node].unsqueeze(1))


def test_it_takes_further_arguments():
    x, width = torch.randn(6, CHANNELS), {"height": 2, "width": 3}
    grid = influence(PLSTMGridConv(CHANNELS, heads=2), x, None, 0, **width)
    assert grid.shape == (6, 2)
    conv, rank = ChimeraConv(CHANNELS, edge_dim=3), torch.arange(6)
    attr = {"edge_attr": torch.randn(9, 3), "rank": rank}
    assert influence(conv, x, EDGES, 1, **attr).shape == (6, 4)


@pytest.mark.parametrize("measure", ["mixing", "jacobian"])
def test_the_module_is_left_alone(measure):
    conv = ChimeraConv(-1, 8, heads=2).train()
    lazy = influence(conv, torch.randn(6, CHANNELS), EDGES, 1, measure=measure)
    assert lazy.size(0) == 6
    assert isinstance(conv.lin_value.weight, torch.nn.UninitializedParameter)
    x = torch.randn(6, CHANNELS, requires_grad=True)
    expected = conv(x, EDGES)
    with torch.no_grad():
        found = influence(conv, x, EDGES, 1, measure=measure)
    assert not found.requires_grad
    assert conv.training
    assert x.grad is None
    assert all(p.grad is None and p.requires_grad for p in conv.parameters())
    assert torch.equal(conv(x, EDGES), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["target", "source"])
def test_dtypes(dtype, role):
    conv = ChimeraPathConv(CHANNELS, heads=2)
    x, edge_index = torch.randn(3, CHANNELS), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    expected = influence(conv, x, edge_index, 0, role=role, measure="paths")
    found = influence(
        conv.to(dtype), x.to(dtype), edge_index, 0, role=role, measure="paths"
    )
    assert found.dtype == dtype
    assert_near(found.float(), expected, 0.05)


def test_compiled_layers():
    conv = ChimeraConv(CHANNELS, heads=2)
    x = torch.randn(6, CHANNELS)
    compiled = torch.compile(conv, backend="eager")
    found = influence(compiled, x, EDGES, 1)
    assert torch.equal(found, influence(conv, x, EDGES, torch.tensor(1)))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"node": 6}, ValueError, r"'node' must be in \[0, 6\), as 'x' is \[6, 8\]"),
        ({"node": -1}, ValueError, "'node' must be in"),
        ({"node": 1.0}, TypeError, "'node' must be an integer, got float"),
        ({"x": torch.zeros(6, 8).long()}, TypeError, "'x' must be floating point"),
        ({"x": torch.zeros(0, 8)}, ValueError, r"'node' must be in \[0, 0\)"),
        ({"role": "to"}, ValueError, "'role' must be one of"),
        ({"measure": "norm"}, ValueError, "'measure' must be one of"),
        ({"module": GCNConv(8, 8)}, ValueError, "got GCNConv; measure='jacobian'"),
        ({"module": GraphMambaConv(8)}, ValueError, "must be a Chimera or pLSTM layer"),
        ({"module": GatedDeltaConv(8)}, ValueError, "got GatedDeltaConv; measure='jac"),
        (
            {"measure": "jacobian", "role": "source"},
            ValueError,
            "'role' must be 'target' with measure='jacobian'",
        ),
        (
            {"measure": "jacobian", "module": Mean()},
            ValueError,
            r"a row for each of 6 nodes, got \[1, 8\]",
        ),
        ({"edge_index": EDGES + 5}, ValueError, "edge_index"),
    ],
)
def test_bad_input(given, error, message):
    arguments = {
        "module": ChimeraConv(8),
        "x": torch.randn(6, 8),
        "edge_index": EDGES,
        "node": 0,
    }
    with pytest.raises(error, match=message):
        influence(**(arguments | given))
