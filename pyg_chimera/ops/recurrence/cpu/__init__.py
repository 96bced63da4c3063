"""Algorithms for CPUs, compiled by numba."""
