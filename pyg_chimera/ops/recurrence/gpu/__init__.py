"""Algorithms for GPUs, compiled by Triton."""
