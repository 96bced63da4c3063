"""Numbers of the released implementations: inputs, outputs and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from asserts import assert_near
from operators import OPERATORS

from pyg_chimera.ops import (
    dag_scan,
    delta_scan,
    grid_scan,
    resolvent_mix,
    selective_scan,
    stm_scan,
)

GATES = ("query", "key", "value", "source", "transition", "mark", "direct")


def load(name):
    path = Path(__file__).parents[1] / "golden" / f"{name}.npz"
    with np.load(path) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def variants(key):
    options = OPERATORS[key].variants
    return pytest.mark.parametrize("options", options.values(), ids=options)


def leaves(data, *names):
    """[heads, nodes or edges, ...] -> [nodes or edges, heads, ...], with gradients."""
    return [data[name].transpose(0, 1).contiguous().requires_grad_() for name in names]


@variants("resolvent_mix")
def test_resolvent_of_a_graph(options):
    data = load("resolvent_graph")
    C, B, V, weight = leaves(data, "C", "B", "V", "edge_weight")
    out = resolvent_mix(C, B, V, data["edge_index"], weight, **options)
    assert_near(out.transpose(0, 1), data["out"])
    out.backward(data["grad_out"].transpose(0, 1))
    for name, x in (("C", C), ("B", B), ("V", V), ("edge_weight", weight)):
        assert_near(x.grad.transpose(0, 1), data[f"grad_{name}"], what=name)


@variants("neumann")
def test_truncated_resolvent_of_a_graph(options):
    data = load("resolvent_graph")
    inputs = leaves(data, "C", "B", "V", "edge_weight")
    options = {**options, "num_terms": int(data["diameter"])}
    out = resolvent_mix(*inputs[:3], data["edge_index"], inputs[3], **options)
    assert_near(out.transpose(0, 1), data["out_truncated"])


@pytest.mark.parametrize("name", ["resolvent", "truncated"])
def test_resolvent_itself(name):
    """With one-hot keys and values, and queries of ones, the output is the matrix."""
    data = load("resolvent_graph")
    (weight,) = leaves(data, "edge_weight")
    heads, n, _ = data["resolvent"].shape
    one = torch.ones(n, 1, 1, dtype=torch.double)
    eye = torch.eye(n, dtype=torch.double)[:, None].expand(n, heads, n)
    options = {}
    if name == "truncated":
        options = {"solver": "neumann", "num_terms": int(data["diameter"])}
    out = resolvent_mix(one, one, eye, data["edge_index"], weight, **options)
    assert_near(out.transpose(0, 1), data[name])


@variants("dag_scan")
@pytest.mark.parametrize("operator", [dag_scan, resolvent_mix])
def test_ssd_is_a_directed_path(operator, options):
    """Mamba-2 on two sequences of 20 tokens; each edge decays as its target says."""
    if operator is resolvent_mix and options == {"form": "state", "backend": "torch"}:
        options = {"form": "mask", "backend": "torch"}
    data = load("ssd")
    batches, length = data["X"].shape[:2]
    node = torch.arange(batches * length).view(batches, length)
    edge_index = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    names = ("C", "B", "X", "log_a")
    C, B, X, log_a = (data[name].flatten(0, 1).requires_grad_() for name in names)
    out = operator(C, B, X, edge_index, log_a[edge_index[1]].exp(), **options)
    assert_near(out, data["out"].flatten(0, 1))
    out.backward(data["grad_out"].flatten(0, 1))
    for name, x in zip(names, (C, B, X, log_a), strict=True):
        assert_near(x.grad, data[f"grad_{name}"].flatten(0, 1), what=name)


@variants("delta_dags")
def test_gated_delta_rule_on_paths(options):
    """Sequences side by side; each edge decays as its target says."""
    data = load("gated_delta")
    batches, length = data["query"].shape[:2]
    node = torch.arange(batches * length).view(batches, length)
    edge_index = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    names = ("query", "key", "value", "beta", "log_decay")
    x = [data[name].flatten(0, 1).clone().requires_grad_() for name in names]
    out = delta_scan(
        x[0] / data["query"].size(-1) ** 0.5,
        *x[1:4],
        edge_index,
        x[4][edge_index[1]].exp(),
        **options,
    )
    assert_near(out, data["out"].flatten(0, 1))
    out.backward(data["grad_out"].flatten(0, 1))
    for name, y in zip(names, x, strict=True):
        assert_near(y.grad, data[f"grad_{name}"].flatten(0, 1), what=name)


@variants("stm_scan")
def test_plstm_on_a_dag(options):
    data = load("plstm_dag")
    inputs = leaves(data, *GATES)
    out = stm_scan(*inputs, data["edge_index"], data["line_edge_index"], **options)
    assert_near(out.transpose(0, 1), data["out"])
    out.backward(data["grad_out"].transpose(0, 1))
    for name, x in zip(GATES, inputs, strict=True):
        assert_near(x.grad.transpose(0, 1), data[f"grad_{name}"], what=name)


def by_node(x):
    """[batch, column, row, ...] -> [nodes, ...]: axis 1 leads to the right there."""
    return x.transpose(1, 2).flatten(0, 2)


@variants("grid_scan")
def test_plstm_on_grids(options):
    data = load("plstm_grid")
    names = [name for name in data if f"grad_{name}" in data and name != "out"]
    assert len(names) == 12
    x = {name: data[name].clone().requires_grad_() for name in names}
    heads = {name: by_node(y).unsqueeze(1) for name, y in x.items()}  # one of them

    def directions(first, second):
        return torch.stack([heads[first], heads[second]], dim=1)

    right = directions("t_right_from_left", "t_right_from_up")
    down = directions("t_down_from_left", "t_down_from_up")
    _, width, height, states = data["query"].shape
    out = grid_scan(
        heads["query"] / states**0.5,
        heads["key"],
        heads["value"],
        directions("source_right", "source_down").unsqueeze(1),
        torch.stack([right, down], dim=1).unsqueeze(1),
        directions("mark_left", "mark_up").unsqueeze(1),
        heads["direct"],
        height,
        width,
        **options,
    )
    assert_near(out.squeeze(1), by_node(data["out"]))
    out.backward(by_node(data["grad_out"]).unsqueeze(1))
    for name in names:
        assert_near(x[name].grad, data[f"grad_{name}"], what=name)


@variants("selective_scan")
def test_selective_scan_of_mamba(options):
    data = load("selective_scan")
    graphs, _, length = data["u"].shape

    def packed(x):  # [graphs, channels or states, length] there
        return x.transpose(1, 2).reshape(graphs * length, -1) if x.dim() == 3 else x

    names = list(OPERATORS["selective_scan"].axes)
    inputs = {name: packed(data[name]).clone().requires_grad_() for name in names}
    ptr = length * torch.arange(graphs + 1)
    out = selective_scan(**inputs, ptr=ptr, **options)
    assert (out - packed(data["out"])).abs().max() < 1e-12
    out.backward(packed(data["grad_out"]))
    for name, x in inputs.items():
        assert (x.grad - packed(data[f"grad_{name}"])).abs().max() < 1e-9, name
