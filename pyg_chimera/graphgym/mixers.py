"""Mixers built from the configuration, and their inputs from a batch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.graphgym.config import cfg

from pyg_chimera.nn import (
    ChimeraConv,
    GatedDeltaConv,
    GraphMambaConv,
    HybridModel,
    KHopAttentionConv,
    PLSTMConv,
)
from pyg_chimera.nn._routing import Route
from pyg_chimera.ops.common.checks import readable
from pyg_chimera.ops.structure import check_stored

_Module = TypeVar("_Module", bound=torch.nn.Module)

MIXERS: dict[str, type[torch.nn.Module]] = {
    "Chimera": ChimeraConv,
    "PLSTM": PLSTMConv,
    "GraphMamba": GraphMambaConv,
    "GatedDelta": GatedDeltaConv,
    "KHopAttention": KHopAttentionConv,
}

#: Arguments of the mixers, and the attributes in which transforms store them.
_STRUCTURE = {
    "rank": "elimination_rank",
    "score": "node_score",
    "k_hop_index": "k_hop_index",
    "k_hop_distance": "k_hop_distance",
}


def make_mixer(
    name: str,
    channels: int,
    *,
    heads: int,
    edge_dim: int | None,
    index: int | None = None,
) -> torch.nn.Module:
    """Makes the mixer called `name`, with equal input and output width, according to
    the options `chimera.*`. The number of heads is the host's, unless these set one,
    and `index` the position in a stack, if known.
    """
    options = cfg.chimera
    make = MIXERS[name]
    known = set(inspect.signature(make).parameters)
    mode = options.mode
    if index is not None and mode and set(mode) == {"P", "D"}:
        mode = mode[index % len(mode)]
    order = options.order
    if order == "auto":
        order = "bfs" if name == "PLSTM" else "degree"
    offered: dict[str, Any] = {
        "heads": heads if options.heads is None else options.heads,
        "edge_dim": edge_dim,
        "mode": mode,
        "order": order,
        "num_bins": options.num_bins,
        "num_eval_permutations": options.num_eval_permutations,
    }
    if options.state_channels is not None:
        offered["state_channels"] = options.state_channels
        if "state_channels" not in known:
            warn(
                f"chimera.state_channels={options.state_channels} has no effect with "
                f"{make.__name__}",
                stacklevel=2,
            )
    args = {k: offered[k] for k in offered if k in known}
    return _made(make, (channels,), args, options.kwargs)


def make_hybrid(
    channels: int, num_layers: int, *, heads: int, edge_dim: int | None, dropout: float
) -> HybridModel:
    """Makes the hybrid model for encoded nodes, as `make_mixer`."""
    options, own = cfg.chimera, dict(cfg.chimera.kwargs)
    recurrence = dict(own.pop("recurrence_kwargs", {}))
    if options.state_channels is not None:
        recurrence["state_channels"] = options.state_channels
    own["recurrence_kwargs"] = recurrence
    args = {
        "num_layers": num_layers,
        "pattern": options.pattern,
        "heads": heads if options.heads is None else options.heads,
        "edge_dim": edge_dim,
        "dropout": dropout,
        "kind": "graph",
        "causal": False,
    }
    return _made(HybridModel, (channels, channels, 1), args, own)


def _made(
    make: type[_Module],
    sizes: Sequence[int],
    args: Mapping[str, Any],
    more: Mapping[str, Any],
) -> _Module:
    """Makes a module from the arguments set by options, and others by name."""
    known = set(inspect.signature(make).parameters)
    known -= {*args, "in_channels", "out_channels", "channels", "kwargs"}
    for option in more:
        if option not in known:
            raise ValueError(
                f"'chimera.kwargs' takes those arguments of {make.__name__} that have "
                f"no option of their own, {sorted(known)}; got '{option}'"
            )
    try:
        return make(*sizes, **args, **more)
    except ValueError as error:
        raise ValueError(
            f"The options 'chimera.*' make no {make.__name__}: {error}"
        ) from error


def edge_width(encoded: int) -> int | None:
    """The size of the edge features that a mixer reads, given that of the host's
    encoded ones; None if it reads none.
    """
    edge_dim = cfg.chimera.edge_dim
    if edge_dim is None:
        return encoded if cfg.dataset.edge_encoder else None
    if not isinstance(edge_dim, int) or isinstance(edge_dim, bool) or edge_dim < 0:
        raise ValueError(
            "'chimera.edge_dim' must be null, for the width of the edge encoder, 0 for "
            f"none, or the width of raw edge features, got {edge_dim!r}"
        )
    return edge_dim or None


def edges_read(batch: Data, edge_dim: int | None) -> Tensor | None:
    """The edge features of a batch, [E, edge_dim]; None if none are read."""
    if edge_dim is None:
        return None
    edge_attr = batch.edge_attr if "edge_attr" in batch else None
    if edge_attr is not None and edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    if edge_attr is None or edge_attr.size(-1) != edge_dim:
        got = "none" if edge_attr is None else f"shape {list(edge_attr.shape)}"
        raise ValueError(
            f"The batch must have an 'edge_attr' of width {edge_dim}, got {got}. "
            "'chimera.edge_dim' says which width to expect, and 0 to read none."
        )
    return edge_attr.to(batch.x.dtype)


def structure(batch: Data, accepts: Callable[[str], bool]) -> dict[str, Tensor]:
    """What transforms have stored in the batch, as arguments that a mixer accepts."""
    stored = {
        name: key for name, key in _STRUCTURE.items() if key in batch and accepts(name)
    }
    if readable():
        check_stored(batch, stored.values())
    return {name: batch[key] for name, key in stored.items()}


def run_mixer(
    mixer: torch.nn.Module, route: Route, x: Tensor, batch: Data, edge_dim: int | None
) -> Tensor:
    """The mixer's output for the nodes of a batch, given how to call it."""
    given = {
        **structure(batch, route.accepts),
        "batch": batch.batch,
        "edge_attr": edges_read(batch, edge_dim),
    }
    args = route.select(given)
    return route.call(mixer, x, batch.edge_index, batch.batch, args)
