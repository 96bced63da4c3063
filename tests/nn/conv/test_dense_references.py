"""Every layer is its formula: for random options and graphs, and features of any size.

`tests/campaign.py` does the same for many more cases, in half precision too.
"""

import pytest
import torch
from asserts import assert_is_formula
from convs import CASES, Case, Inputs
from dense_layers import Graphs
from random_layers import CONVS, FAILED, check, draw

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
    return Graphs([inputs.edge_index[:, mine] for mine in of], attrs)


#: Graph-Mamba's permutations are those of its own tests.
FIXED = {name: case for name, case in CASES.items() if "Mamba" not in name}


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
