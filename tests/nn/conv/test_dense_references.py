"""Every layer is its formula: for random options and graphs, and features of any size.

`tests/campaign.py` does the same for many more cases, in half precision too.
"""

import pytest
import torch
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
