import importlib
from functools import partial
from typing import Any

from torch_geometric.graphgym import register as registry
from torch_geometric.graphgym.config import cfg

from pyg_chimera.graphgym.config import chimera_cfg
from pyg_chimera.graphgym.layers import MixerLayer
from pyg_chimera.graphgym.mixers import MIXERS
from pyg_chimera.graphgym.networks import GPSNetwork

__all__ = ["register"]

_LAYERS = {
    "chimera": partial(MixerLayer, mixer="Chimera"),
    "plstm": partial(MixerLayer, mixer="PLSTM"),
    "graph_mamba": partial(MixerLayer, mixer="GraphMamba"),
    "gated_delta": partial(MixerLayer, mixer="GatedDelta"),
    "k_hop_attention": partial(MixerLayer, mixer="KHopAttention"),
}
_NETWORKS = {
    f"{mixer}GPS": partial(GPSNetwork, mixer=mixer) for mixer in (*MIXERS, "Hybrid")
}


def register() -> None:
    r"""Registers layers, networks and options with GraphGym, as importing
    :mod:`pyg_chimera.graphgym` does, and with GraphGPS if that can be imported.

    If GraphGPS was not on the path at that time, call it again, which does no harm.

    Raises:
        KeyError: If one of the names is already registered by other code.
    """
    for name, layer in _LAYERS.items():
        _register(registry.layer_dict, name, layer)
    for name, network in _NETWORKS.items():
        _register(registry.network_dict, name, network)
    _register(registry.config_dict, "chimera", chimera_cfg)
    if "chimera" not in cfg:
        # GraphGym filled its configuration when it was imported, from what was
        # registered by then.
        chimera_cfg(cfg)

    try:
        graphgps = importlib.import_module("graphgps")
    except ModuleNotFoundError as error:
        if error.name != "graphgps":
            raise
        return
    if graphgps.__file__ is None:  # just a folder of that name
        return
    model = importlib.import_module("pyg_chimera.graphgym.gps_model").ChimeraGPSModel
    _register(registry.network_dict, "ChimeraGPSModel", model)
    # Also under GraphGPS's own name, so that 'gt.layer_type' is all that must be set.
    registry.network_dict["GPSModel"] = model


def _register(mapping: dict[str, Any], key: str, module: Any) -> None:
    """Registers a module, or replaces it if this package has been reloaded."""
    taken = mapping.get(key)
    if taken is not None and _origin(taken) != _origin(module):
        raise KeyError(
            f"'{key}' is already registered with GraphGym, by '{_origin(taken)}': "
            "rename that one to use 'pyg_chimera.graphgym'"
        )
    mapping[key] = module


def _origin(module: Any) -> str:
    """The Python module that defines a class, given itself or a call of it."""
    return getattr(module, "func", module).__module__
