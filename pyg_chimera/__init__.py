"""Linear recurrences on graphs for PyTorch Geometric."""

__version__ = "0.4.0.dev0"

__all__ = ["__version__"]
