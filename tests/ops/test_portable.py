"""The plain forms of operators, which exporters translate."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, assert_results, computed, example, expected

from pyg_chimera import ops

every_operator = pytest.mark.parametrize(
    "key", [x for x in OPERATORS if not x.startswith("triton")]
)


def options_of(key: str) -> dict:
    options = next(iter(OPERATORS[key].variants.values()))
    return {x: y for x, y in options.items() if x not in ("form", "backend")}


@every_operator
def test_outputs(key):
    operator, options = OPERATORS[key], options_of(key)
    for name, size in product(operator.structures, operator.sizes):
        if name == "several_blocks" and size != operator.sizes[0]:
            continue
        case = example(key, name, size)
        with torch.no_grad(), ops.portable():
            out = case(**options)
        assert_near(out, expected(key, name, size)["output"], what=f"{name}, {size}")


@every_operator
def test_gradients(key):
    """Of all inputs, and of each alone: loops may lose what they do not begin with."""
    case, want, options = example(key), expected(key), options_of(key)
    with ops.portable():
        assert_results(computed(case, options), want)
        weigh = torch.randn(want["output"].shape, dtype=want["output"].dtype)
        for name in case.floats:
            found = []
            for context in (ops.portable, nullcontext):
                leaf = case.floats[name].clone().requires_grad_()
                with context():
                    out = case(**{name: leaf}, **options)
                found += torch.autograd.grad((out * weigh).sum(), leaf)
            assert_near(*found, what=name)


def test_ties_are_in_the_order_of_nodes():
    score = torch.arange(60) % 3
    for num_bins in (1, 2):
        for given in ({}, {"batch": torch.arange(60) % 4}):
            options = {"num_bins": num_bins, "shuffle": False, **given}
            want = ops.node_sequences(score, **options)
            with ops.portable():
                found = ops.node_sequences(score, **options)
            assert found.index.equal(want.index)
