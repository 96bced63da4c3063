"""Layers and models as functions of what they differentiate, on a small batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from convs import BATCH, CASES, CHANNELS, DAGS, GRAPH, Case, Inputs
from torch import Tensor
from torch.func import functional_call
from torch.nn import MultiheadAttention, TransformerEncoderLayer

from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
    HybridModel,
    KHopAttentionConv,
    PLSTMConv,
    SelfAttention,
    SwiGLU,
)

__all__ = ["LAYERS", "MODELS", "Floats", "Layer"]

Floats = dict[str, Tensor]


class _OnBatch(torch.nn.Module):
    """A convolution of the table with all of its inputs but features."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.conv = case, case.trained()
        self.inputs: Inputs = case.inputs()

    def forward(self, x: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        attr = self.inputs.edge_attr if edge_attr is None else edge_attr
        inputs = self.inputs._replace(x=x, edge_attr=attr)
        kwargs = {"score": self.inputs.x[:, 0]} if self.case.scores else {}
        return self.case.call(self.conv, inputs, **kwargs)

    def _apply(self, fn: Callable, recurse: bool = True) -> "_OnBatch":
        self.inputs = Inputs(*map(fn, self.inputs))
        return super()._apply(fn, recurse)


class _ModelOnBatch(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, edges: list) -> None:
        super().__init__()
        self.model = model.double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 4)
        self.register_buffer("edges", torch.tensor(edges).t(), persistent=False)

    def forward(self, x: Tensor, with_batch: bool = True) -> Tensor:
        if isinstance(self.model, SwiGLU):
            return self.model(x)
        batch = torch.tensor(BATCH, device=x.device) if with_batch else None
        return self.model(x, self.edges, batch=batch)


class Layer(NamedTuple):
    """A layer or model, all that it differentiates, by name, and the batch vector."""

    module: torch.nn.Module
    floats: Floats
    batch: Tensor

    @classmethod
    def of(cls, name: str) -> "Layer":
        module = LAYERS[name]()
        floats = {"x": torch.randn(len(BATCH), CHANNELS, dtype=torch.double)}
        batch = torch.tensor(BATCH)
        if isinstance(module, _OnBatch):
            floats["x"], batch = module.inputs.x, module.inputs.batch
            if getattr(module.conv, "edge_dim", None):
                floats["edge_attr"] = module.inputs.edge_attr
        named = module.named_parameters()
        return cls(module, floats | {x: y.detach().clone() for x, y in named}, batch)

    def __call__(self, **floats: Tensor) -> Tensor:
        """The output for some of them changed."""
        given = self.floats | floats
        inputs = {x: given.pop(x) for x in ("x", "edge_attr") if x in given}
        return functional_call(self.module, given, (), inputs)


def _gps(mixer: torch.nn.Module, **kwargs: object) -> GPSLayer:
    return GPSLayer(CHANNELS, mixer=mixer, norm="layer_norm", **kwargs)  # type: ignore[arg-type]


def _hybrid(**kwargs: object) -> HybridModel:
    options = {
        "num_layers": 2, "pattern": "ra", "heads": 2, "head": "node", **kwargs
    }  # fmt: skip
    return HybridModel(CHANNELS, CHANNELS, 3, **options)  # type: ignore[arg-type]


def _stack(conv: Callable[[], torch.nn.Module], **kwargs: object) -> GraphModel:
    return GraphModel(
        CHANNELS, CHANNELS, 3, lambda i: _gps(conv()), num_layers=2, **kwargs
    )  # type: ignore[arg-type]


#: How models are made, and the edges that they are given.
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], list]] = {
    "SwiGLU": (lambda: SwiGLU(CHANNELS), GRAPH),
    "SelfAttention": (lambda: _gps(SelfAttention(CHANNELS, 2)), GRAPH),
    "SelfAttention-causal": (
        lambda: _gps(SelfAttention(CHANNELS, 2, rotary="sequence", causal=True)), GRAPH
    ),
    "MultiheadAttention": (
        lambda: _gps(MultiheadAttention(CHANNELS, 2, batch_first=True)), GRAPH
    ),
    "TransformerEncoderLayer": (
        lambda: _gps(TransformerEncoderLayer(CHANNELS, 2, 16)), GRAPH
    ),
    "GPSLayer": (
        lambda: _gps(
            ChimeraConv(CHANNELS, heads=2), norm_first=True,
            conv=GatedGCNConv(CHANNELS, CHANNELS, norm="layer_norm"),
        ),
        GRAPH,
    ),
    "GraphModel": (
        lambda: _stack(lambda: PLSTMConv(CHANNELS, heads=2, order="bfs"), head="node"),
        GRAPH,
    ),
    "GraphModel-max": (
        lambda: _stack(lambda: KHopAttentionConv(CHANNELS, k=2), pool="max"), GRAPH
    ),
    "HybridModel": (_hybrid, GRAPH),
    "HybridModel-khop": (
        lambda: _hybrid(attention="khop", attention_kwargs={"k": 2}), GRAPH
    ),
    "HybridModel-dag": (lambda: _hybrid(kind="dag", recurrence="rg_lru"), DAGS[0]),
}  # fmt: skip
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: lambda case=case: _OnBatch(case) for name, case in CASES.items()},
    **{
        name: lambda make=make, edges=edges: _ModelOnBatch(make(), edges)
        for name, (make, edges) in MODELS.items()
    },
}
