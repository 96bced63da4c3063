"""The delta rule in plain PyTorch: matrices, and states without cycles."""

from pyg_chimera.ops.recurrence.plain import delta_levels, delta_matrices
from pyg_chimera.ops.recurrence.plan.delta_forms import by_form

DEVICES = None
FORMS = {"mask": delta_matrices, "state": delta_levels}

why_not, forward, backward = by_form(FORMS)
