"""Common to models of images and sequences: mixers by name, layers around them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn import Module

from pyg_chimera.nn.attention import SelfAttention
from pyg_chimera.nn.conv import (
    ChimeraGridConv,
    ChimeraPathConv,
    GraphMambaConv,
    PLSTMGridConv,
)
from pyg_chimera.nn.encoders import PositionEmbedding
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.ops.common.checks import check_integer, check_option

MIXERS = ("chimera", "chimera_path", "plstm", "graph_mamba", "attention")


def lattice_layers(
    mixer: str | Callable[[int], Module],
    channels: int,
    heads: int | None,
    num_layers: int,
    *,
    num_dags: int,
    position: str | None,
    size: tuple[int, ...] | None,
    mixer_kwargs: Mapping[str, Any] | None,
    **kwargs: Any,
) -> list[Module]:
    """Pre-norm layers of a mixer and a feed-forward network, after a position embedding
    if there is one.

    `num_dags` is 4 for a grid, 2 for a sequence, and 1 for a causal sequence. `kwargs`
    are those of the layers.
    """
    if not callable(mixer) and mixer not in MIXERS:
        raise ValueError(
            f"'mixer' must be a function or one of {MIXERS}, got {mixer!r}"
        )
    positions = (None, "learned", "sinusoidal", "rotary")
    check_option("position", position, positions)
    if position == "rotary" and mixer != "attention":
        raise ValueError(
            f"'position' can be 'rotary' for mixer='attention' only, got {mixer!r}"
        )
    if (position == "learned") != (size is not None):
        raise ValueError(
            "'size', the largest number of positions, must be given for "
            f"position='learned' and for no other, got {size} and {position!r}"
        )
    is_grid, causal = num_dags == 4, num_dags == 1
    wanted = 2 if is_grid else 1
    if size is not None and (not isinstance(size, tuple | list) or len(size) != wanted):
        raise ValueError(
            f"'size' must be the numbers of columns and rows of an image, got {size!r}"
        )
    for number in size or ():
        check_integer("size", number, 1)
    reserved = {"in_channels", "channels", "heads", "rotary", "causal", "order"}
    reserved.add("num_eval_permutations")
    if causal:  # which these would break
        reserved |= {"num_dags", "bidirectional"}
    taken = sorted(reserved & set(mixer_kwargs or {}))
    if taken or (callable(mixer) and mixer_kwargs):
        who = "the model" if taken else "the function 'mixer' itself"
        raise ValueError(
            f"'mixer_kwargs' must not have {taken or sorted(mixer_kwargs or {})}, "
            f"which {who} sets"
        )

    # As wide as Mamba's filter, in both directions unless the model is causal.
    window = (3, 3) if is_grid else (1, 4 if causal else 7)

    def make(index: int) -> Module:
        options = dict(mixer_kwargs or {})
        if callable(mixer):
            return mixer(index)
        if mixer == "chimera":
            options.setdefault("num_dags", num_dags)
            options.setdefault("window", window)
            return ChimeraGridConv(channels, heads=heads, **options)
        if mixer == "chimera_path":
            if is_grid or causal:
                raise ValueError(
                    "'mixer' must not be 'chimera_path', which mixes both sides of an "
                    "undirected path, for images and causal models; use 'chimera'"
                )
            options.setdefault("local_conv", True)
            return ChimeraPathConv(channels, heads=heads, **options)
        if mixer == "plstm":
            # In mode P, a single row would lose half of its signal downward.
            options.setdefault("mode", "PD"[index % 2] if is_grid else "D")
            options.setdefault("num_dags", num_dags)
            options.setdefault("window", window)
            return PLSTMGridConv(channels, heads=heads, **options)
        if mixer == "graph_mamba":
            options.setdefault("bidirectional", not causal)
            return GraphMambaConv(
                channels, order="order", num_eval_permutations=1, **options
            )
        rotary = ("grid" if is_grid else "sequence") if position == "rotary" else None
        return SelfAttention(channels, heads, rotary=rotary, causal=causal, **options)

    layers: list[Module] = [
        GPSLayer(
            channels,
            mixer=make(index),
            norm="layer_norm",
            norm_first=True,
            act="gelu",
            **kwargs,
        )
        for index in range(num_layers)
    ]
    if position in ("learned", "sinusoidal"):
        layers.insert(0, PositionEmbedding(channels, 2 if is_grid else 1, size))
    return layers


def structure_of(layers: Iterable[Module]) -> dict[str, str]:
    """The attributes of a lattice's data to pass to the layers."""
    taken = {
        name
        for layer in layers
        for name in ("height", "width", "pos")
        if (
            layer.accepts(name)
            if isinstance(layer, GPSLayer)
            else name == "pos" and isinstance(layer, PositionEmbedding)
        )
    }
    return {name: name for name in sorted(taken)}
