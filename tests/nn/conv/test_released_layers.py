"""Whole layers on sequences against the released code of Mamba, Mamba-2, Gated DeltaNet
and Griffin: outputs, and gradients of inputs and parameters.

The files in `tests/golden` hold what that code computed once, in float64, for random
parameters. `grad_` precedes the names of gradients. The rates A of Mamba-2 and Gated
DeltaNet are -1, and the convolutions of these and Griffin have biases of zero. Gated
DeltaNet divided by the lengths of queries and keys without an eps, and had one for the
norm that makes up for queries divided by the root of their size.
"""

from pathlib import Path

import numpy as np
import torch
from asserts import assert_near

from pyg_chimera.nn import (
    ChimeraGridConv,
    GatedDeltaConv,
    GraphMambaConv,
    RGLRUConv,
)
from pyg_chimera.nn.conv import gated_delta_conv
from pyg_chimera.nn.conv.graph_mamba_conv import _Scan
from pyg_chimera.ops import delta_scan

GRAPHS, LENGTH, C = 2, 9, 8
NODE = torch.arange(GRAPHS * LENGTH).view(GRAPHS, LENGTH)
PATHS = torch.stack([NODE[:, :-1].flatten(), NODE[:, 1:].flatten()])
BATCH = NODE.flatten() // LENGTH


def load(name):
    path = Path(__file__).parents[2] / "golden" / f"{name}_layer.npz"
    with np.load(path) as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def check(conv, translate, data, *args, **kwargs):
    """Compares with the released layer, whose parameters or gradients of parameters
    `translate` puts in our terms; all others are zero.
    """
    conv = conv.double()
    own = {name: p.data.zero_().view(-1) for name, p in conv.named_parameters()}
    for name, value in translate(data).items():
        own[name][: value.numel()] = value.flatten()
    x = data["x"].flatten(0, 1).requires_grad_()
    out = conv(x, *args, **kwargs)
    assert_near(out, data["out"].flatten(0, 1), 1e-12)
    out.backward(data["grad_out"].flatten(0, 1))
    assert_near(x.grad, data["grad_x"].flatten(0, 1), 1e-11, "x")
    grads = {key.removeprefix("grad_"): y for key, y in data.items() if "grad_" in key}
    for name, want in translate(grads).items():
        got = conv.get_parameter(name).grad.flatten()[: want.numel()]
        assert_near(got, want.flatten(), 1e-11, name)


def mamba(data):
    value, gate = data["in_proj.weight"].chunk(2)
    return {
        "lin_in.weight": value,
        "lin_gate.weight": gate,
        "scans.0.conv_weight": data["conv1d.weight"],
        "scans.0.conv_bias": data["conv1d.bias"],
        "scans.0.lin_states.weight": data["x_proj.weight"],
        "scans.0.lin_delta.weight": data["dt_proj.weight"],
        "scans.0.lin_delta.bias": data["dt_proj.bias"],
        "scans.0.A_log": data["A_log"],
        "scans.0.D": data["D"],
        "lin_out.weight": data["out_proj.weight"],
    }


def test_mamba():
    conv = GraphMambaConv(C, state_channels=4, expand=2, order="order", norm=False)
    conv.scans[0] = _Scan(2 * C, 4, 4, dt_rank=2)  # of the release's parameters
    check(conv, mamba, load("mamba"), batch=BATCH)


def mamba2(data):
    gate, value, key, query, delta = data["in_proj.weight"].split([C, C, 4, 4, 2])
    return {
        "lin_gate.weight": gate,
        "lin_value.weight": value,
        "lin_key.weight": key,
        "lin_query.weight": query,
        "lin_delta.weight": delta,
        "delta_bias": data["dt_bias"],
        "local_weight": data["conv1d.weight"],  # of values, keys and queries
        "skip": data["D"],
        "norm.weight": data["norm.weight"],
        "lin_out.weight": data["out_proj.weight"],
    }


def test_mamba2():
    conv = ChimeraGridConv(
        C, heads=2, state_channels=4, num_dags=1, window=(1, 4), bias=False,
        selectivity="target", norm_before_gate=False, qk_norm=False,
    )  # fmt: skip
    check(conv, mamba2, load("mamba2"), batch=BATCH, height=1, width=LENGTH)


def gated_deltanet(data):
    parts = ("q", "k", "v")
    query, key, value = (data[f"{part}_proj.weight"] for part in parts)
    kernels = torch.cat([data[f"{part}_conv1d.weight"] for part in reversed(parts)])
    return {
        "lin_query.weight": query,
        "lin_key.weight": key,
        "lin_value.weight": value,
        "lin_gate.weight": data["g_proj.weight"],
        "lin_delta.weight": torch.cat([data["a_proj.weight"], data["b_proj.weight"]]),
        "delta_bias": data["dt_bias"],  # none of beta
        "local_weight": kernels.squeeze(1).flip(1),
        "norm.weight": data["o_norm.weight"],
        "lin_out.weight": data["o_proj.weight"],
    }


class NormOfHeads(torch.nn.RMSNorm):
    """Normalizes each head, with the same weight for all."""

    def forward(self, y):
        return super().forward(y.unflatten(1, (-1, len(self.weight)))).flatten(1)


def test_gated_deltanet(monkeypatch):
    def doubled(query, key, value, beta, *args, **kwargs):  # 'allow_neg_eigval'
        return delta_scan(query, key, value, 2 * beta, *args, **kwargs)

    monkeypatch.setattr(gated_delta_conv, "delta_scan", doubled)
    conv = GatedDeltaConv(
        C, heads=2, state_channels=4, groups=2, bias=False, acyclic=True,
        selectivity="target",
    )  # fmt: skip
    conv.norm = NormOfHeads(4, eps=1e-5)
    check(conv, gated_deltanet, load("gated_deltanet"), PATHS)


def griffin(data):
    gates = ("rg_lru.a_gate", "rg_lru.input_gate")
    return {
        "lin_value.weight": data["linear_x.weight"],
        "lin_value.bias": data["linear_x.bias"],
        "lin_gate.weight": data["linear_y.weight"],
        "lin_gate.bias": data["linear_y.bias"],
        "gate_weight": torch.stack([data[f"{gate}.w"] for gate in gates]),
        "gate_bias": torch.stack([data[f"{gate}.b"] for gate in gates]),
        "Lambda": -data["rg_lru.a_param"],
        "local_weight": data["conv_1d.w"].flip(0).t(),
        "lin_out.weight": data["linear_out.weight"],
        "lin_out.bias": data["linear_out.bias"],
    }


def test_griffin():
    data = load("griffin")
    check(RGLRUConv(C, heads=2, released=True), griffin, data, PATHS)
