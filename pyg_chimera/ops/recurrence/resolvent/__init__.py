"""Mixing by the resolvent of a graph's adjacency."""

from pyg_chimera.ops.recurrence.resolvent.op import resolvent_mix

__all__ = ["resolvent_mix"]
