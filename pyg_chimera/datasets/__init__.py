"""Generated and wrapped datasets."""

from pyg_chimera.datasets.arrow_pointing import ArrowPointing
from pyg_chimera.datasets.city_roads import CityRoads
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
    "CityRoads",
    "GeneratedPeptides",
    "PeptidesFunctional",
    "long_range_labels",
]
