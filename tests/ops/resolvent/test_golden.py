"""Numbers of the released implementations, inputs, outputs and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from asserts import assert_near

from pyg_chimera.ops import dag_scan, resolvent_mix
from pyg_chimera.ops.resolvent.reference import reference_mix

GOLDEN = Path(__file__).parents[2] / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def leaves(data: dict, *names: str) -> list[torch.Tensor]:
    """[heads, nodes or edges, ...] -> [nodes or edges, heads, ...], with gradients."""
    return [data[name].transpose(0, 1).contiguous().requires_grad_() for name in names]


FORMS = [("state", "numba"), ("mask", "numba"), ("state", "torch"), ("mask", "torch")]
MIX = [
    *({"solver": "sparse", "form": form, "backend": b} for form, b in FORMS),
    {"solver": "dense", "form": "state"},
    {"solver": "dense", "form": "mask"},
    {"backend": "reference"},
    {},
]


@pytest.mark.parametrize("options", MIX, ids=lambda x: "-".join(x.values()) or "auto")
def test_resolvent_graph(options):
    data = load("resolvent_graph")
    C, B, V, weight = leaves(data, "C", "B", "V", "edge_weight")
    out = resolvent_mix(C, B, V, data["edge_index"], weight, **options)
    assert_near(out.transpose(0, 1), data["out"])
    out.backward(data["grad_out"].transpose(0, 1))
    for name, x in (("C", C), ("B", B), ("V", V), ("edge_weight", weight)):
        assert_near(x.grad.transpose(0, 1), data[f"grad_{name}"], what=name)


@pytest.mark.parametrize(
    "options",
    [{"form": "state"}, {"form": "mask"}, {"backend": "reference"}],
    ids=lambda x: "-".join(x.values()),
)
def test_truncated_resolvent_graph(options):
    data = load("resolvent_graph")
    C, B, V, weight = leaves(data, "C", "B", "V", "edge_weight")
    out = resolvent_mix(
        C, B, V, data["edge_index"], weight, solver="neumann",
        num_terms=int(data["diameter"]), **options,
    )  # fmt: skip
    assert_near(out.transpose(0, 1), data["out_truncated"])


@pytest.mark.parametrize("num_terms", [None, "diameter"])
def test_resolvent_itself(num_terms):
    """With one-hot keys and values, and queries of ones, the output is the matrix."""
    data = load("resolvent_graph")
    (weight,) = leaves(data, "edge_weight")
    heads, n, _ = data["resolvent"].shape
    one = torch.ones(n, 1, 1, dtype=torch.double)
    eye = torch.eye(n, dtype=torch.double)[:, None].expand(n, heads, n)
    options = {}
    if num_terms is not None:
        options = {"solver": "neumann", "num_terms": int(data["diameter"])}
    out = resolvent_mix(one, one, eye, data["edge_index"], weight, **options)
    expected = data["resolvent" if num_terms is None else "truncated"]
    assert_near(out.transpose(0, 1), expected)


@pytest.mark.parametrize(
    ("form", "backend"), [*FORMS, ("auto", "auto"), ("auto", "reference")]
)
@pytest.mark.parametrize("operator", [dag_scan, resolvent_mix])
def test_ssd_is_a_directed_path(operator, form, backend):
    """Mamba-2 on two sequences of 20 tokens; each edge decays as its target says."""
    data = load("ssd")
    batches, length = data["X"].shape[:2]
    node = torch.arange(batches * length).view(batches, length)
    edge_index = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    C, B, X, log_a = (
        data[name].flatten(0, 1).requires_grad_() for name in ("C", "B", "X", "log_a")
    )
    weight = log_a[edge_index[1]].exp()
    out = operator(C, B, X, edge_index, weight, form=form, backend=backend)
    assert_near(out, data["out"].flatten(0, 1))
    out.backward(data["grad_out"].flatten(0, 1))
    for name, x in (("C", C), ("B", B), ("X", X), ("log_a", log_a)):
        assert_near(x.grad, data[f"grad_{name}"].flatten(0, 1), what=name)


def test_reference_alone():
    data = load("resolvent_graph")
    C, B, V, weight = leaves(data, "C", "B", "V", "edge_weight")
    out = reference_mix(C, B, V, data["edge_index"], weight)
    assert_near(out.transpose(0, 1), data["out"])
