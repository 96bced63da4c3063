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
from pyg_chimera.datasets.water_networks import SampleSensors, WaterNetworks

__all__ = [
    "ATOM_FEATURE_SIZES",
    "BOND_FEATURE_SIZES",
    "ArrowPointing",
    "CityRoads",
    "GeneratedPeptides",
    "PeptidesFunctional",
    "SampleSensors",
    "WaterNetworks",
    "long_range_labels",
]
