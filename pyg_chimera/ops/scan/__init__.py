from pyg_chimera.ops.scan.stm import grid_scan, stm_scan

__all__ = ["grid_scan", "stm_scan"]
