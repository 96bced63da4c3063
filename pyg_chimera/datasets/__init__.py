"""Generated and wrapped datasets."""

from pyg_chimera.datasets.arrow_pointing import ArrowPointing
from pyg_chimera.datasets.peptides import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
    PeptidesFunctional,
    long_range_labels,
)

__all__ = [
    "ATOM_FEATURE_SIZES",
    "BOND_FEATURE_SIZES",
    "ArrowPointing",
    "GeneratedPeptides",
    "PeptidesFunctional",
    "long_range_labels",
]
