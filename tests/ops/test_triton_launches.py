"""How often Triton's kernels are launched, and what else a GPU is made to wait for.

A launch takes some microseconds whatever it computes, so their number must not depend
on how many graphs there are in a batch, nor on how deep they are. Fronts are eliminated
and swept level by level, and may depend on how many levels there are.
"""

import pytest
import torch
from asserts import assert_near
from host_waits import host_waits
from operators import OPERATORS, computed, grids_of, make_case
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected

from pyg_chimera.nn import ChimeraConv
from pyg_chimera.ops import unchecked
from pyg_chimera.ops.common import cache, triton_runtime
from pyg_chimera.ops.recurrence.plan import fronts
from pyg_chimera.ops.structure.supernodes import Merging
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
pytest.importorskip("triton")

from triton_watch import counted

from pyg_chimera.ops.recurrence.gpu import fronts as triton_fronts

#: What a training step of an operator or a layer may launch.
MOST = 16

KINDS = {
    f"{key}-{name}": (key, options)
    for key, operator in OPERATORS.items()
    for name, options in operator.variants.items()
    if key.startswith("triton_") and key != "triton_sparse"
}


@pytest.mark.parametrize(("key", "options"), KINDS.values(), ids=KINDS)
def test_operators(key, options):
    """As many for a few small graphs as for large and deep ones."""
    operator, counts = OPERATORS[key], []
    size = (1, 1, 5, 3) if "form" in options else operator.sizes[0]
    small = "unsorted_batch" if "unsorted_batch" in operator.structures else "several"
    for name in (small, "several_blocks"):
        case = make_case(operator, operator.structures[name], size)
        with counted() as launches:
            computed(case, options)
        counts.append(launches)
    assert counts[0] == counts[1]
    inverse = {"triton_graphs": "_inverse", "triton_sparse_blocks": "_inverse_by_rows"}
    assert key not in inverse or counts[0][inverse[key]] == 1
    assert 2 <= counts[0].total() <= MOST


def test_fronts(monkeypatch):
    """As many for a batch as for its largest graph."""
    monkeypatch.setattr(fronts, "_MERGING", Merging(8, 8, 40))
    monkeypatch.setattr(triton_fronts, "TILE", 16)
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=4))
    operator, options = OPERATORS["triton_sparse"], {"backend": "triton"}
    for grids in ([(10, 10)], [(10, 10), (2, 3), (10, 10)]):
        case = make_case(operator, grids_of(*grids), (1, 1, 2, 2))
        found = symbolic_factor(*(case.integers[x] for x in ("edge_index", "batch")),
                                None, len(case.structure.graph))  # fmt: skip
        levels = fronts.Fronts.of(found, torch.device("cpu"), 16).levels
        assert [x.steps for x in levels] == [2, 0, 2]
        with counted() as launches:
            computed(case, {**options, "solver": "sparse", "form": "state"})
        assert launches == {
            "_add_up": 3, "_eliminate": 4, "_sweep_up": 6, "_sweep_down": 6,
            "_edge_gradient": 1,
        }  # fmt: skip


def molecules(sizes):
    """Chains of atoms, with rings."""
    graphs = []
    for size in sizes:
        chain = torch.arange(size - 1)
        rings = torch.arange(0, size - 6, 8)
        edges = [torch.stack([chain, chain + 1]), torch.stack([rings, rings + 5])]
        edge_index = to_undirected(torch.cat(edges, 1), num_nodes=size)
        graphs.append(Data(edge_index=edge_index, num_nodes=size))
    return Batch.from_data_list(graphs)


@pytest.mark.parametrize(
    ("sizes", "inverse"), [((9,), "_inverse_by_rows"), ((7, 36, 12), "_inverse")],
    ids=["one", "several"],
)  # fmt: skip
def test_training_step_of_a_layer(sizes, inverse):
    """And in `unchecked`, nothing that the host waits for."""
    batch = molecules(sizes)
    conv = ChimeraConv(8, 8, 2, 4, form="mask", backend="triton")
    x = torch.randn(batch.num_nodes, 8)

    def step():
        out = conv(x, batch.edge_index, batch=batch.batch)
        out.square().sum().backward()
        return out

    want = step()
    with unchecked():
        step()
        with host_waits() as waits, counted() as launches:
            got = step()
    assert waits == set()
    assert_near(got, want, 1e-6)
    assert launches == {
        inverse: 1, "_masked_product": 1, "_gradients": 1, "_adjoint": 1,
        "_edge_gradient": 1,
    }  # fmt: skip
