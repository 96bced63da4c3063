"""A linear recurrence on DAGs with a weight for each channel."""

from pyg_chimera.ops.recurrence.channel_scan.op import channel_scan

__all__ = ["channel_scan"]
