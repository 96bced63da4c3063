"""Only what is right is timed."""

import re
from argparse import Namespace
from functools import partial

import decisions
import gpu
import pytest
from workloads import PEPTIDES

ARGS = Namespace(smoke=True, root=PEPTIDES, repeats=1, limit=1.0)


def test_wrong_operators_are_not_timed():
    """Neither ours, nor what stands beside it."""
    for row in decisions.rows(ARGS):
        first, *_, last = row.ways
        right = row.ways[last]
        for way in (first, last):
            wrong = partial(scaled, right)
            case = row._replace(ways={**row.ways, way: wrong, "right": right})
            with pytest.raises(SystemExit, match=re.escape(f"{way} is wrong on")):
                decisions.measure(case, ARGS)


def scaled(function, **tensors):
    return 1.001 * function(**tensors)


def test_wrong_results_of_a_gpu_are_not_timed():
    call = next(gpu.calls(gpu.parse(["--smoke", "--only", "molecules"])))
    function = gpu.Measured(
        call, lambda **x: 1.001 * call.function(**x), "cpu", trust=False
    )
    with pytest.raises(SystemExit, match="ours is wrong on two small graphs"):
        gpu.check(call, function, "cpu")
