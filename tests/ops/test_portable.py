"""The plain forms of operators, which exporters translate."""

from itertools import product

import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, example, expected

from pyg_chimera import ops


@pytest.mark.parametrize("key", [x for x in OPERATORS if not x.startswith("triton")])
def test_outputs(key):
    operator = OPERATORS[key]
    options = next(iter(operator.variants.values()))
    options = {x: y for x, y in options.items() if x not in ("form", "backend")}
    for name, size in product(operator.structures, operator.sizes):
        if name == "several_blocks" and size != operator.sizes[0]:
            continue
        case = example(key, name, size)
        with torch.no_grad(), ops.portable():
            out = case(**options)
        assert_near(out, expected(key, name, size)["output"], what=f"{name}, {size}")
