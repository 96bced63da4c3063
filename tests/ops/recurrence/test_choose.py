"""Which algorithm calls take, as committed in `tests/golden/choices.json`.

``python tests/ops/recurrence/test_choose.py`` writes it anew, where a choice is meant
to change.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pyg_chimera.ops import explain, line_graph
from pyg_chimera.ops.common import operator, triton_runtime
from pyg_chimera.ops.recurrence import choose

FILE = Path(__file__).parents[2] / "golden" / "choices.json"

# ------------------------------------------------------------------------------- graphs


def path(size: int) -> Tensor:
    node = torch.arange(size)
    return torch.stack([node[:-1], node[1:]])


def tree(size: int) -> Tensor:
    node = torch.arange(1, size)
    return torch.stack([(node - 1) // 2, node])


def dag(size: int) -> Tensor:
    """Three edges into each node, from anywhere before it."""
    node = torch.arange(1, size).repeat(3)
    step = torch.tensor([1, 7, 13]).repeat_interleave(size - 1)
    return torch.stack([(step * node + step) % node, node])


def lattice(size: int) -> Tensor:
    side = max(2, round(size**0.5))
    node = torch.arange(side * side).view(side, side)
    pairs = [(node[:, :-1], node[:, 1:]), (node[:-1], node[1:])]
    return torch.cat([torch.stack([x.ravel(), y.ravel()]) for x, y in pairs], 1)


def star(size: int) -> Tensor:
    leaf = torch.arange(1, size)
    return torch.stack([torch.zeros_like(leaf), leaf])


def molecules(size: int) -> Tensor:
    """As many components of twenty nodes, each with a ring."""
    first = torch.arange(0, size - 19, 20)
    ring = torch.cat([tree(20), torch.tensor([[18], [19]])], 1)
    return (ring[:, None] + first[:, None]).flatten(1)


KINDS = {x.__name__: x for x in (path, tree, dag, lattice, star, molecules)}


def both_ways(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], 1)


def mixed(edges: Tensor, heads: int, keys: int, channels: int) -> dict:
    size = int(edges.max()) + 1
    degree = torch.bincount(edges[1], minlength=size)[edges[1]]
    weight = (0.9 / degree).unsqueeze(1).repeat(1, heads)
    key = torch.nn.functional.one_hot(torch.zeros(size, 1).long(), keys).float()
    value = torch.ones(size, heads, channels)
    nodes = {"query": key, "key": key, "value": value}
    return {**nodes, "edge_index": edges, "edge_weight": weight}


def overwriting(edges: Tensor, heads: int, keys: int, channels: int) -> dict:
    inputs = mixed(edges, heads, keys, channels)
    return {**inputs, "beta": torch.ones(inputs["value"].shape[:2])}


def gated(edges: Tensor, heads: int, keys: int, channels: int) -> dict:
    inputs = mixed(edges, heads, keys, channels)
    del inputs["edge_weight"]
    nodes = len(inputs["value"])
    lines = line_graph(edges, nodes).edge_index
    gates = {"source": edges.size(1), "mark": edges.size(1), "direct": nodes}
    gates["transition"] = lines.size(1)
    inputs |= {name: torch.ones(count, heads) / 9 for name, count in gates.items()}
    return {**inputs, "line_edge_index": lines}


def on_grids(
    name: str, number: int, side: int, heads: int, keys: int, channels: int
) -> dict:
    nodes = number * side * side
    inputs = mixed(path(nodes), heads, keys, channels)
    del inputs["edge_index"], inputs["edge_weight"]
    ones, sizes = torch.ones, torch.full((number,), side)
    if name == "grid_dag_scan":
        gates = {"source": ones(nodes, 2, heads)}
        gates["transition"] = ones(nodes, 2, 2, heads) / 9
    else:
        gates = {x: ones(nodes, 4, 2, heads) for x in ("source", "mark")}
        gates["transition"] = ones(nodes, 4, 2, 2, heads) / 9
        gates["direct"] = ones(nodes, heads)
    return {**inputs, **gates, "height": sizes, "width": sizes}


# -------------------------------------------------------------------------------- calls

#: Heads, state channels and value channels.
WIDTHS = ((1, 4, 4), (4, 16, 16), (2, 64, 32))
Call = tuple[str, dict[str, Any]]  #: an operator, and its arguments


def of_graph(operator: str, edges: Tensor, width: tuple[int, int, int]) -> dict:
    if operator == "stm_scan":
        return gated(edges, *width)
    if operator == "delta_scan":
        return overwriting(edges, *width)
    return mixed(both_ways(edges) if operator == "resolvent_mix" else edges, *width)


def calls() -> Iterator[tuple[str, Call]]:
    """Calls by name, without options."""
    for kind, size, width in product(KINDS, (20, 120, 700, 4000), WIDTHS):
        if size == 4000 and width != WIDTHS[1]:
            continue
        operators = ["resolvent_mix"]
        operators += ["dag_scan"] * (size != 120 and kind != "star")
        operators += ["delta_scan"] * (size != 120 and kind in ("path", "dag"))
        operators += ["stm_scan"] * (size < 4000 and kind in ("path", "lattice"))
        for name in operators:
            inputs = of_graph(name, KINDS[kind](size), width)
            yield f"{name}, {kind} of {size}, {width}", (name, inputs)
    for name, (number, side), width in product(
        ("grid_scan", "grid_dag_scan"), ((8, 4), (2, 12), (1, 40)), WIDTHS
    ):
        inputs = on_grids(name, number, side, *width)
        yield f"{name}, {number} of {side} x {side}, {width}", (name, inputs)
    inputs = overwriting(both_ways(lattice(100)), *WIDTHS[1])
    yield "delta_scan, undirected lattice", ("delta_scan", inputs)
    for size in (20, 500):
        inputs = of_graph("resolvent_mix", lattice(size), WIDTHS[1])
        wide = {
            x: y.double() if y.is_floating_point() else y for x, y in inputs.items()
        }
        yield f"resolvent_mix, lattice of {size}, float64", ("resolvent_mix", wide)


def asked(backends: tuple[str, ...]) -> Iterator[tuple[str, Call]]:
    """Calls by name, with options."""
    forms = ("auto", "state", "mask", "chunk")
    for kind, backend, form in product(("path", "lattice"), backends, forms):
        options: dict[str, Any] = {"form": form, "backend": backend}
        for name in ("dag_scan", "delta_scan"):
            inputs = of_graph(name, KINDS[kind](300), WIDTHS[1]) | options
            yield f"{name}, {kind}, {form}, {backend}", (name, inputs)
        for solver in ("auto", "sparse", "dense", "iterative", "neumann"):
            inputs = of_graph("resolvent_mix", KINDS[kind](300), WIDTHS[1]) | options
            inputs |= {"solver": solver}
            inputs |= {"num_terms": 7} if solver == "neumann" else {}
            name = f"resolvent_mix, {kind}, {solver}, {form}, {backend}"
            yield name, ("resolvent_mix", inputs)


def chosen(call: Call) -> str:
    name, inputs = call
    try:
        return " ".join(explain(name, **inputs)[1:4])
    except ValueError:
        return "refused"


@contextmanager
def one_machine() -> Iterator[None]:
    """One core, and vectors of 64 bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with patch.object(choose, "vector_lanes", lambda x: (64 // x.itemsize, None)):
        yield
    torch.set_num_threads(threads)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What runs on a GPU is chosen for tensors on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(triton_runtime, "_problem", lambda _: None))
        for name in ("resolvent_mix", "dag_scan", "delta_scan"):
            declared = operator.OPERATORS[name]
            backends = {x: y for x, y in declared.backends.items() if x != "numba"}
            for patched in (
                patch.object(backends["triton"], "DEVICES", ("cpu",)),
                patch.object(type(declared), "backends", backends),
            ):
                stack.enter_context(patched)
        yield


def on_cpus() -> dict[str, str]:
    with one_machine():
        found = {name: chosen(call) for name, call in calls()}
        return found | {
            name: chosen(call) for name, call in asked(("auto", "numba", "torch"))
        }


def on_gpus() -> dict[str, str]:
    with one_machine(), as_on_a_gpu():
        found = {name: chosen(call) for name, call in calls() if "4000" not in name}
        return found | {
            name: chosen(call) for name, call in asked(("auto", "triton", "torch"))
        }


@pytest.mark.parametrize("where", [on_cpus, on_gpus])
def test_choices_are_those_that_were_committed(where):
    expected = json.loads(FILE.read_text(encoding="utf-8"))[where.__name__]
    found = where()
    changed = {
        x: (expected.get(x), y) for x, y in found.items() if expected.get(x) != y
    }
    assert not changed
    assert found.keys() == expected.keys()
    assert len(set(found.values())) > 8


if __name__ == "__main__":
    choices = {where.__name__: where() for where in (on_cpus, on_gpus)}
    FILE.write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")
