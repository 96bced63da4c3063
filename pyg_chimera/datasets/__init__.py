"""Generated and wrapped datasets."""

from pyg_chimera.datasets.arrow_pointing import ArrowPointing
from pyg_chimera.datasets.city_roads import CityRoads
from pyg_chimera.datasets.echo_synth import EchoSynth
from pyg_chimera.datasets.ising import LongRangeIsing
from pyg_chimera.datasets.peptides import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
    PeptidesFunctional,
    long_range_labels,
)
from pyg_chimera.datasets.power_flow import PowerFlow
from pyg_chimera.datasets.sentiment_trees import SentimentTrees
from pyg_chimera.datasets.superpixels import Superpixels

__all__ = [
    "ATOM_FEATURE_SIZES",
    "BOND_FEATURE_SIZES",
    "ArrowPointing",
    "CityRoads",
    "EchoSynth",
    "GeneratedPeptides",
    "LongRangeIsing",
    "PeptidesFunctional",
    "PowerFlow",
    "SentimentTrees",
    "Superpixels",
    "long_range_labels",
]
