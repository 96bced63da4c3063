"""DAGs whose paths part and meet again: sums over all of them grow with the depth."""

import gzip
from functools import partial
from itertools import chain

import pytest
import torch
from dense_layers import Graphs
from random_layers import Case, check
from torch import Tensor

from pyg_chimera.nn import (
    ChimeraDAGConv,
    ChimeraGridConv,
    GatedDeltaConv,
    RGLRUConv,
)
from pyg_chimera.ops.structure import topological_rank

LAYERS = {
    "ChimeraDAGConv": partial(ChimeraDAGConv, heads=2, state_channels=4),
    "ChimeraDAGConv-two": partial(ChimeraDAGConv, state_channels=4, num_dags=2),
    "GatedDeltaConv": partial(GatedDeltaConv, acyclic=True, state_channels=4),
    "RGLRUConv": RGLRUConv,
    "RGLRUConv-edges": partial(RGLRUConv, edge_dim=3),
}


def doubled_path(length: int) -> Tensor:
    """Two edges from each node to the next, which multiply states by up to sqrt(2)."""
    node = torch.arange(length - 1)
    return torch.stack([node, node + 1]).repeat(1, 2)


def case_of(name: str, length: int, dtype: torch.dtype = torch.float32) -> Case:
    options = LAYERS[name].keywords if isinstance(LAYERS[name], partial) else {}
    edges = [doubled_path(length), doubled_path(length).flip(0)]
    edges = edges[: options.get("num_dags", 1)]
    graphs = Graphs(edges, batch=torch.zeros(length, dtype=torch.long))
    if "edge_dim" in options:
        graphs = graphs._replace(attrs=[torch.randn(e.size(1), 3) for e in edges])
    torch.manual_seed(0)
    conv, x = LAYERS[name](6), torch.randn(length, 6)
    kind = name.split("-")[0]
    return Case(0, kind, options, conv, x, graphs, None, 1.0, dtype, False, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_their_formulas(name: str, dtype: torch.dtype):
    case = case_of(name, 100, dtype)  # the formula inverts dense matrices
    result = check(case)
    assert result.status == "right", (result, str(case))


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_overflows(name: str):
    case = case_of(name, 3000)
    x = case.x.requires_grad_()
    edges = case.graphs.edges
    args = (edges if len(edges) > 1 else edges[0],)
    if case.graphs.attrs is not None:
        args = (*args, case.graphs.attrs[0])
    out = case.conv(x, *args)
    assert out.isfinite().all()
    assert out.abs().max() < 1e5
    out.square().mean().backward()
    for parameter in (x, *case.conv.parameters()):
        assert parameter.grad.isfinite().all()


def test_large_images():
    conv = ChimeraGridConv(4, heads=1, state_channels=4)
    x = torch.randn(2 * 200 * 200, 4, requires_grad=True)
    out = conv(x, height=200, width=200)
    out.square().mean().backward()
    for y in (out, x.grad, *(p.grad for p in conv.parameters())):
        assert y.isfinite().all()
    alone = conv(x[:40000], height=200, width=200)
    torch.testing.assert_close(out[:40000], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [ChimeraDAGConv, RGLRUConv])
def test_a_circuit_of_thousands_of_levels(shared_data, make):
    with gzip.open(shared_data / "circuits" / "sqrt.blif.gz", "rt") as file:
        lines = file.read().replace("\\\n", " ").splitlines()
    gates = [line.split()[1:] for line in lines if line.startswith(".names")]
    number = {name: i for i, name in enumerate(dict.fromkeys(chain(*gates)))}
    edges = [(number[x], number[g[-1]]) for g in gates for x in g[:-1]]
    edge_index = torch.tensor(edges).t().contiguous()
    x = torch.randn(len(number), 8, requires_grad=True)
    assert topological_rank(edge_index, len(x)).max() > 3000
    out = make(8)(x, edge_index)
    out.square().mean().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
