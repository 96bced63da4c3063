from graphgps.network import gps_model  # noqa: F401
