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


@pytest.mark.parametrize("edge", [(2, 0), (1, 1)], ids=["cycle", "self-loop"])
def test_cycles_where_there_may_be_none_are_nan(edge):
    """Programs can neither refuse a graph nor divide it into DAGs."""
    edge_index = torch.tensor([[0, 1, edge[0]], [1, 2, edge[1]]])
    lines = (edge_index[1].unsqueeze(1) == edge_index[0]).nonzero().t()
    x, gate = torch.ones(3, 1, 2), torch.full((3, 1), 0.5)
    unit, step = x / 2**0.5, torch.full((lines.size(1), 1), 0.5)
    calls = {
        "dag_scan": lambda: ops.dag_scan(x, x, x, edge_index, gate),
        "delta_scan": lambda: ops.delta_scan(
            unit, unit, x, gate, edge_index, gate, acyclic=True
        ),
        "channel_scan": lambda: ops.channel_scan(x[:, 0], edge_index),
        "stm_scan": lambda: ops.stm_scan(
            x, x, x, gate, step, gate, gate, edge_index, lines
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ops.CycleError):
            call()
        with ops.portable():
            assert call().isnan().all(), name
