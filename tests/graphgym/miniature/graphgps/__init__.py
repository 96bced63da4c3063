"""A miniature of GraphGPS: what `pyg_chimera.graphgym.gps_model` relies on, and how
GraphGPS does it. Two local models and one global model stand for all.
"""

from graphgps import config, network  # noqa: F401
