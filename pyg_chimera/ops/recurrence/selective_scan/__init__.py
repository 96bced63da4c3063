"""Mamba's recurrence over packed sequences."""

from pyg_chimera.ops.recurrence.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
