"""The gated delta rule on graphs: states that overwrite what a key has read before."""

from pyg_chimera.ops.recurrence.delta_scan.op import delta_scan

__all__ = ["delta_scan"]
