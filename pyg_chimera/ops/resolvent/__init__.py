"""Mixing by the resolvent of a graph's adjacency, in all its forms."""

from pyg_chimera.ops.resolvent.mix import Choice, dag_scan, explain_mix, resolvent_mix

__all__ = ["Choice", "dag_scan", "explain_mix", "resolvent_mix"]
