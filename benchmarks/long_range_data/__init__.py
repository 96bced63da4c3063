"""The graphs of the long-range tasks, but for those of the package's data sets."""

from long_range_data.echo import FAMILIES, HOPS, echo_graphs
from long_range_data.ising import couplings_of, fields_of, ising_graphs
from long_range_data.kept import Kept
from long_range_data.power_flow import power_flow_graphs
from long_range_data.sentiment_trees import sentiment_trees
from long_range_data.superpixels import superpixel_graphs

__all__ = [
    "FAMILIES",
    "HOPS",
    "Kept",
    "couplings_of",
    "echo_graphs",
    "fields_of",
    "ising_graphs",
    "power_flow_graphs",
    "sentiment_trees",
    "superpixel_graphs",
]
