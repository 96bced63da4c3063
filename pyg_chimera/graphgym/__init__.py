"""The layers for `GraphGym <https://pytorch-geometric.readthedocs.io>`_, both PyG's own
and that of GraphGPS, selected by name in YAML files. Importing this package registers
them.
"""

try:
    import yacs  # noqa: F401, without which PyG's GraphGym has no configuration
except ModuleNotFoundError as error:
    if error.name != "yacs":
        raise
    raise ImportError(
        "'pyg_chimera.graphgym' needs what PyG's GraphGym needs: install it with "
        "'pip install \"pyg-chimera[graphgym]\"', or 'pip install yacs "
        "pytorch-lightning'"
    ) from error

from pyg_chimera.graphgym.config import chimera_cfg
from pyg_chimera.graphgym.layers import MixerLayer
from pyg_chimera.graphgym.networks import GPSNetwork
from pyg_chimera.graphgym.registration import register

__all__ = ["GPSNetwork", "MixerLayer", "chimera_cfg", "register"]

register()
