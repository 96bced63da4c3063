"""Every layer is its formula: for random options and graphs, and features of any size.

`tests/campaign.py` does the same for many more cases, in half precision too.
"""

from functools import partial

import pytest
import torch
from asserts import assert_is_formula
from convs import CASES, EDGE, PATH, Case, Inputs, chimera, chimera_dag, plstm
from dense_layers import FORMULAS, Graphs
from random_layers import CONVS, FAILED, check, draw

from pyg_chimera.nn import ChimeraPathConv

SCALES = (1e-3, 1.0, 1e3, 1e5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", CONVS)
def test_outputs_and_gradients(name: str, scale: float):
    for seed in range(3):
        for dtype in (torch.float64, torch.float32):
            case = draw(seed, name, dtype, scale)
            result = check(case)
            assert result.status not in FAILED, (result, str(case))


def graphs_of(case: Case, conv: torch.nn.Module, inputs: Inputs) -> Graphs:
    if case.on_grids:
        widths = inputs.batch.unique(return_counts=True)[1].tolist()
        return Graphs([], sizes=[(1, width) for width in widths])
    of = [inputs.dag == d for d in range(len(case.edges))]
    attrs = None
    if getattr(conv, "edge_dim", None):
        attrs = [inputs.edge_attr[mine] for mine in of]
    edges = [inputs.edge_index[:, mine] for mine in of]
    return Graphs(edges, attrs, inputs.batch)


DAG = partial(chimera_dag, edge_dim=EDGE)
PATHS = partial(ChimeraPathConv, state_channels=3)
#: Beside those of all suites. Permutations of Graph-Mamba have tests of their own.
MORE = {
    "Chimera-groups": chimera(heads=2, groups=2),
    "Chimera-released-edges": chimera(normalization="released", edge_dim=EDGE),
    "Chimera-local": chimera(local_conv=True, gated=False),
    "Chimera-queries": chimera(qk_norm=False, heads=2, bias=False),
    "Chimera-state": chimera(solver="sparse", form="state"),
    "Chimera-dense": chimera(solver="dense", backend="torch"),
    "Chimera-reference": chimera(backend="reference"),
    "Path-queries": Case(partial(PATHS, qk_norm=False), [PATH]),
    "Path-local": Case(partial(PATHS, edge_dim=EDGE, heads=2, local_conv=True), [PATH]),
    "Path-mask": Case(
        partial(PATHS, gated=False, form="mask", groups=4, heads=8), [PATH]
    ),
    "DAG-target": DAG(selectivity="target", roots="silent"),
    "DAG-groups": DAG(qk_norm=False, groups=2, heads=2),
    "DAG-silent": chimera_dag(roots="silent", heads=4, groups=2),
    "DAG-several": chimera_dag(num_dags=3),
    "DAG-mamba": chimera_dag(norm_before_gate=False, heads=2),
    "DAG-none": DAG(num_dags=2, share="none", heads=2),
    "DAG-local": DAG(num_dags=3, local_conv=True),
    "DAG-reference": chimera_dag(num_dags=2, backend="reference", bias=False),
    "PLSTM-row": plstm(edge_dim=EDGE, heads=2, normalization="row"),
    "PLSTM-states": plstm(state_channels=3, heads=4, bias=False),
    "PLSTM-torch": plstm(backend="torch", form="state", heads=2),
    "PLSTM-reference": plstm(backend="reference", mode="D"),
    "PLSTM-track": plstm(tracking=3, mode="D", edge_dim=EDGE),
    "PLSTM-track-row": plstm(
        tracking=2, normalization="row", edge_dim=EDGE, order="order"
    ),
    "PLSTM-dags-D": plstm(num_dags=3, mode="D", edge_dim=EDGE),
    "PLSTM-dags-track": plstm(num_dags=2, tracking=2, normalization="row"),
    "PLSTM-bfs": plstm(order="bfs", backend="reference"),
    "PLSTM-turns": plstm(order="bfs", turns=False, edge_dim=EDGE),
    "PLSTM-bfs-D": plstm(order="bfs", mode="D", tracking=2, heads=2),
}
FIXED = {
    name: case
    for name, case in CASES.items()
    if "Mamba" not in name and name.split("-")[0] in FORMULAS
} | MORE


@pytest.mark.parametrize("case", FIXED.values(), ids=FIXED)
def test_kinds_of_layers(case: Case):
    conv, inputs = case.trained(), case.inputs()
    inputs.x.requires_grad_()
    out = case.call(conv, inputs)
    assert_is_formula(conv, out, inputs.x, graphs_of(case, conv, inputs))


def test_wrong_layers_are_found():
    """So that the test above means something: each has one weight that is off."""
    for seed, name in enumerate(CONVS):
        case = draw(seed + 1, name, torch.float32, 1.0)
        while len(case.x) < 3:
            case = draw(case.seed + 100, name, torch.float32, 1.0)
        forward = case.conv.forward

        def wrong(*args, forward=forward, **kwargs):
            out = forward(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            first = first * (1 + 1e-3 * torch.rand_like(first))
            return (first, *out[1:]) if isinstance(out, tuple) else first

        case.conv.forward = wrong
        assert check(case).status == "wrong", str(case)
