"""Linear recurrences on graphs for PyTorch Geometric."""

__version__ = "0.3.0"

__all__ = ["__version__"]
