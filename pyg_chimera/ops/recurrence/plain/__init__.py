"""Algorithms in plain PyTorch, on any device."""
