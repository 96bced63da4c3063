"""Graphs whose answers depend on distant nodes, but for the package's data sets."""

from long_range_data.echo import HOPS, echo_graphs
from long_range_data.power_flow import power_flow_graphs

__all__ = ["HOPS", "echo_graphs", "power_flow_graphs"]
