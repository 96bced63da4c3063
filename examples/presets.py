"""Published recipes, small ones, and the models that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from engine import count_parameters
from torch.nn import Module, MultiheadAttention
from torch_geometric.nn import GCNConv

from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel

BASELINES = ("gcn", "gatedgcn", "gps")


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained."""

    epochs: int
    batch_size: int
    lr: float
    warmup_epochs: float
    optimizer: str
    weight_decay: float
    dropout: float
    num_layers: int
    channels: int
    heads: int
    state_channels: int
    conv: str  # the local convolution: "gatedgcn" or "gcn"
    arrangement: str
    norm_first: bool
    act: str
    head_layers: int
    normalization: str  # of Chimera's transitions
    #: Bias of the slack of the first and of the last head (None: the layer's own).
    #: The larger, the farther a layer hears before it has learnt anything: at 0 the
    #: transitions halve what they pass on at each bond, at 6 they keep almost all.
    slack: tuple[float, float] | None = None


_RELEASED = Recipe(
    epochs=250,
    batch_size=64,
    lr=1e-3,
    warmup_epochs=5,
    optimizer="adamw",
    weight_decay=1e-2,
    dropout=0.1,
    num_layers=8,
    channels=64,
    heads=2,
    state_channels=64,
    conv="gatedgcn",
    arrangement="sequential",
    norm_first=True,
    act="gelu",
    head_layers=4,
    normalization="released",
)
_PAPER = Recipe(
    epochs=200,
    batch_size=64,
    lr=1e-3,
    warmup_epochs=5,
    optimizer="adam",
    weight_decay=0.0,
    dropout=0.1,
    num_layers=8,
    channels=64,
    heads=2,
    state_channels=96,
    conv="gcn",
    arrangement="parallel",
    norm_first=False,
    act="gelu",
    head_layers=2,
    normalization="paper",
)
#: ``released`` is the authors' released code, ``paper`` the paper's table 11;
#: ``demo`` shows learning within two minutes on two cores, ``smoke`` only runs.
PRESETS = {
    "released": _RELEASED,
    "paper": _PAPER,
    "demo": replace(
        _RELEASED,
        epochs=16,
        batch_size=32,
        lr=3e-3,
        warmup_epochs=1,
        dropout=0.0,
        num_layers=3,
        channels=32,
        state_channels=16,
        normalization="paper",
        head_layers=2,
        slack=(1.0, 6.0),
    ),
    "smoke": replace(
        _RELEASED,
        epochs=2,
        batch_size=8,
        warmup_epochs=0.5,
        num_layers=2,
        channels=16,
        state_channels=8,
    ),
}
_SUPERPIXELS = {"heads": 4, "batch_size": 32}
_TABLE_11 = {"lr": 3.5e-3, "dropout": 0.05, "state_channels": 64, **_SUPERPIXELS}
_OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("released", "peptides-struct"): {"heads": 4},
    ("released", "pascalvoc-sp"): _SUPERPIXELS,
    ("released", "coco-sp"): _SUPERPIXELS,
    ("released", "pcqm-contact"): {"heads": 4, "batch_size": 256},
    ("paper", "peptides-struct"): {"heads": 4, "lr": 1.5e-3, "state_channels": 80},
    ("paper", "pascalvoc-sp"): _TABLE_11,
    ("paper", "coco-sp"): _TABLE_11,
    # Not in table 11; the batch size is GraphGPS's.
    ("paper", "pcqm-contact"): {"heads": 4, "state_channels": 64, "batch_size": 256},
}


def get_recipe(preset: str, dataset: str) -> Recipe:
    """The recipe of a preset for a data set."""
    return replace(PRESETS[preset], **_OVERRIDES.get((preset, dataset), {}))


def build_model(
    recipe: Recipe,
    name: str = "chimera",
    *,
    in_channels: int | Sequence[int],
    edge_dim: int | Sequence[int],
    out_channels: int | None,
    head: str,
) -> GraphModel:
    """Chimera, or a baseline that differs from it in layers only.

    Args:
        recipe: The recipe.
        name: ``"chimera"``; ``"gcn"`` and ``"gatedgcn"``, which have that local
            convolution and nothing else; or ``"gps"``, with GatedGCN and multi-head
            attention in Chimera's place. No model has a positional encoding.
        in_channels: Of nodes, as for ``GraphModel``.
        edge_dim: Of edges, as for ``GraphModel``.
        out_channels: Outputs a graph or node; None for as many as channels.
        head: ``"graph"`` or ``"node"``.
    """
    channels = recipe.channels
    local = {"chimera": recipe.conv, "gcn": "gcn"}.get(name, "gatedgcn")

    def conv() -> Module:
        if local == "gcn":
            return GCNConv(channels, channels)
        return GatedGCNConv(channels, channels, act=recipe.act)

    def mixer() -> Module | None:
        if name == "gps":
            return MultiheadAttention(
                channels, recipe.heads, dropout=recipe.dropout, batch_first=True
            )
        if name != "chimera":
            return None
        mixer = ChimeraConv(
            channels,
            channels,
            heads=recipe.heads,
            state_channels=recipe.state_channels,
            edge_dim=channels,
            normalization=recipe.normalization,
            gated=False,  # the published recipes for graphs leave the gate out
        )
        if recipe.slack is not None:
            with torch.no_grad():
                mixer.delta_bias[2] = torch.linspace(*recipe.slack, recipe.heads)
        return mixer

    # LayerNorm of each node by itself, not of the whole graph.
    norm: dict[str, Any] = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
    return GraphModel(
        in_channels,
        channels,
        channels if out_channels is None else out_channels,
        layers=lambda _: GPSLayer(
            channels,
            conv(),
            mixer(),
            dropout=recipe.dropout,
            arrangement=recipe.arrangement,
            norm_first=recipe.norm_first,
            act=recipe.act,
            **norm,
        ),
        num_layers=recipe.num_layers,
        edge_dim=edge_dim,
        head=head,
        head_layers=recipe.head_layers,
        act=recipe.act,
        structure={"rank": "elimination_rank"} if name == "chimera" else None,
        **(norm if recipe.norm_first else {}),
    )


def match_width(recipe: Recipe, name: str, **data: Any) -> Recipe:
    """The recipe with the width at which a baseline has Chimera's size."""
    target = count_parameters(build_model(recipe, **data))
    widths = range(recipe.heads, 4 * recipe.channels + 1, recipe.heads)

    def distance(channels: int) -> int:
        candidate = build_model(replace(recipe, channels=channels), name, **data)
        return abs(count_parameters(candidate) - target)

    # The size grows with the width: bisect instead of building them all.
    low, high = 0, len(widths) - 1
    while low < high:
        middle = (low + high) // 2
        candidate = replace(recipe, channels=widths[middle])
        if count_parameters(build_model(candidate, name, **data)) < target:
            low = middle + 1
        else:
            high = middle
    best = min(widths[max(0, low - 1) : low + 1], key=distance)
    return replace(recipe, channels=best)
