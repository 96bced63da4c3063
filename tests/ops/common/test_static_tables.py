"""Tables of other graphs copied over those of a captured step."""

import copy

import pytest
import torch
from asserts import assert_near
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
)
from pyg_chimera.ops import StaticTables, unchecked
from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.transforms import AddEliminationOrder, PadBatch

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
pytest.importorskip("triton")

from captures import captured
from operations import as_on_gpus

C = 4


def molecules(sizes, seed=0):
    """Padded: random trees with a few rings."""
    generator, graphs = torch.Generator().manual_seed(seed), []
    for size in sizes:
        child, ring = (
            torch.arange(1, max(size, 1)),
            torch.arange(0, max(size - 6, 0), 8),
        )
        back = 1 + (torch.rand(len(child), generator=generator) * 3).long()
        edges = torch.stack([child, (child - back).clamp(min=0)])
        edges = torch.cat([edges, torch.stack([ring, ring + 5])], 1)
        edge_index = to_undirected(edges, num_nodes=size)
        x, edge = (
            torch.randn(rows, C, generator=generator, dtype=torch.double)
            for rows in (size, edge_index.size(1))
        )
        graph = Data(x=x, edge_index=edge_index, edge_attr=edge)
        graphs.append(AddEliminationOrder()(graph))
    return PadBatch(steps=1)(graphs)


def layer():
    torch.manual_seed(0)
    options = {"edge_dim": C, "form": "mask", "backend": "triton"}
    return ChimeraConv(C, C, 2, 4, **options).double()


def step(conv, batch, names=("batch",)):
    conv.zero_grad()
    given = {name: batch[name] for name in names}
    given = {x.replace("elimination_", ""): y for x, y in given.items()}
    with unchecked():
        out = conv(batch.x, batch.edge_index, batch.edge_attr, **given)
    (out * out).sum().backward()
    return [out.detach(), *(x.grad for x in conv.parameters())]


def indices(batch, names=("batch",)):
    return batch.edge_index, *(batch[name] for name in names)


@pytest.mark.parametrize(
    ("inverse", "names", "captured_sizes", "sizes"),
    [
        ("_inverse_by_rows", ("batch",), (9, 5, 7), (0, 13, 8)),
        ("_inverse", ("batch", "elimination_rank"), (20, 15, 18), (36, 8, 9)),
    ],
    ids=["rows", "tiles"],
)
def test_replay(inverse, names, captured_sizes, sizes):
    """A captured step computes another batch, with larger graphs, and the first."""
    conv, static = layer(), molecules(captured_sizes)
    first, other = copy.deepcopy(static), molecules(sizes, 1)
    tables = StaticTables(*indices(static, names), room=2)
    with tables:
        with as_on_gpus():
            step(conv, static, names)  # warm up
        with captured() as graph:
            found = step(conv, static, names)
    assert {inverse, "_sources"} < {name for name, *_ in graph.launches}
    for batch in (other, first):
        with as_on_gpus():
            want = step(copy.deepcopy(conv), batch, names)
        tables.update(*indices(batch, names))
        for name in ("x", "edge_attr"):
            static[name].copy_(batch[name])
        graph.replay()
        for got, x in zip(found, want, strict=True):
            assert_near(got, x, 1e-13)
    with tables, captured() as again:  # what it depends on has not changed
        step(conv, static, names)
    assert again.launches == graph.launches


def test_training_steps_of_a_model():
    """As `docs/gpu.md` captures them."""
    torch.manual_seed(0)
    layers = [GPSLayer(C, GatedGCNConv(C, C, edge_dim=C), layer())]
    model = GraphModel(C, C, 1, layers, edge_dim=C).double()
    static, other = molecules((9, 5, 7)), molecules((0, 13, 8), 1)

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        error = model(**model.inputs(batch)).square().mean(1)
        mask = batch.pad_graph_mask
        loss = error.where(mask, 0.0).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    tables = StaticTables(*indices(static))
    with tables, unchecked():
        with as_on_gpus():
            step(model, static)
        with captured() as graph:
            loss = step(model, static)
    again = copy.deepcopy(model)
    tables.update(*indices(other))
    for name, x in other:
        if isinstance(x, torch.Tensor):
            static[name].copy_(x)
    graph.replay()
    with as_on_gpus(), unchecked():
        assert_near(loss, step(again, other), 1e-13)
    for got, want in zip(model.parameters(), again.parameters(), strict=True):
        assert_near(got, want, 1e-13)


def leaves(tables):
    """All tensors that kernels read."""
    held = (x if isinstance(x, tuple) else x.tables for x in tables._held.values())
    found = tree_leaves((tables.tensors, [*held]))
    return [x for x in found if isinstance(x, torch.Tensor)]


def test_what_does_not_fit_changes_nothing():
    static, large = molecules((15, 2, 4)), molecules((9, 5, 7))
    tables = StaticTables(*indices(static), room=1)
    with tables, as_on_gpus():
        step(layer(), static)
    before = [x.clone() for x in leaves(tables)]
    assert len(before) > 6
    with pytest.raises(ValueError, match="with more 'room' in 'StaticTables'"):
        tables.update(*indices(large))
    for x, y in zip(before, leaves(tables), strict=True):
        assert x.equal(y)


def test_errors():
    static = molecules((9, 5, 7))
    tables = StaticTables(*indices(static))
    with pytest.raises(ValueError, match="PadBatch' pads batches to few shapes"):
        tables.update(*indices(molecules((20, 15, 18))))
    with pytest.raises(ValueError, match=r"of the step, \(32,\), got None"):
        tables.update(static.edge_index)
    with pytest.raises(TypeError, match=r"of the step, torch.int64, got torch.int32"):
        tables.update(static.edge_index.int(), static.batch)
    with pytest.raises(TypeError, match=r"of integers, got 'torch.float64'"):
        StaticTables(static.x)
    with pytest.raises(ValueError, match=r"'room' must be at least 1, got 0\.5"):
        StaticTables(static.edge_index, room=0.5)
    with StaticTables(static.edge_index), pytest.raises(ValueError, match=r"\(32,\)"):
        step(layer(), static)  # reads the vector of the batch, too


def test_tables_that_cannot_be_replaced():
    """Nor can structures of other operators."""
    static, options = molecules((9, 5, 7)), {"backend": "triton"}
    with StaticTables(*indices(static)), as_on_gpus():
        conv = ChimeraConv(C, C, 2, 4, solver="sparse", form="state", **options)
        with pytest.raises(ValueError, match="cannot replace 'tuple', which this step"):
            conv.double()(static.x, static.edge_index, batch=static.batch)
    source, target = static.edge_index
    edge_index = static.edge_index[:, source < target]
    conv = ChimeraDAGConv(C, C, 2, 4, order=None, **options).double()
    with (
        StaticTables(edge_index),
        as_on_gpus(),
        pytest.raises(ValueError, match="which this step needs; they take Chimera"),
    ):
        conv(static.x, edge_index)
