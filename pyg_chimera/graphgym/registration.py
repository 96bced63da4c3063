import importlib
from typing import Any

from torch_geometric.graphgym import register as registry
from torch_geometric.graphgym.config import cfg

from pyg_chimera.graphgym.config import chimera_cfg
from pyg_chimera.graphgym.layers import (
    ChimeraLayer,
    GatedDeltaLayer,
    GraphMambaLayer,
    KHopAttentionLayer,
    PLSTMLayer,
)
from pyg_chimera.graphgym.networks import (
    PLSTMGPS,
    ChimeraGPS,
    GatedDeltaGPS,
    GraphMambaGPS,
    HybridGPS,
    KHopAttentionGPS,
)

__all__ = ["register"]


def register() -> None:
    r"""Registers layers, networks and options with GraphGym, as importing
    :mod:`pyg_chimera.graphgym` does, and with GraphGPS if that can be imported.

    If GraphGPS was not on the path at that time, call it again, which does no harm.

    Raises:
        KeyError: If one of the names is already registered by other code.
    """
    _register(registry.layer_dict, "chimera", ChimeraLayer)
    _register(registry.layer_dict, "plstm", PLSTMLayer)
    _register(registry.layer_dict, "graph_mamba", GraphMambaLayer)
    _register(registry.layer_dict, "gated_delta", GatedDeltaLayer)
    _register(registry.layer_dict, "k_hop_attention", KHopAttentionLayer)
    _register(registry.network_dict, "ChimeraGPS", ChimeraGPS)
    _register(registry.network_dict, "PLSTMGPS", PLSTMGPS)
    _register(registry.network_dict, "GraphMambaGPS", GraphMambaGPS)
    _register(registry.network_dict, "GatedDeltaGPS", GatedDeltaGPS)
    _register(registry.network_dict, "KHopAttentionGPS", KHopAttentionGPS)
    _register(registry.network_dict, "HybridGPS", HybridGPS)
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
    if taken is not None and taken.__module__ != module.__module__:
        raise KeyError(
            f"'{key}' is already registered with GraphGym, by '{taken.__module__}': "
            "rename that one to use 'pyg_chimera.graphgym'"
        )
    mapping[key] = module
