"""The delta rule on the CPU, jitted: matrices, and states without cycles."""

from pyg_chimera.ops.recurrence.cpu import delta_mask, delta_sweep
from pyg_chimera.ops.recurrence.plan.delta_forms import by_form

DEVICES = ("cpu",)
FORMS = {"mask": delta_mask, "state": delta_sweep}

why_not, forward, backward = by_form(FORMS)
