from pyg_chimera.ops.selective_scan.scan import causal_conv1d, selective_scan

__all__ = ["causal_conv1d", "selective_scan"]
