"""Pins the public names. A failure here means: was that change meant?

If so, change the list below, and tell users in CHANGELOG.md.
"""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_chimera

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "pyg_chimera.ops": {
        *("resolvent_mix", "dag_scan", "stm_scan", "grid_conv", "grid_scan"),
        *("delta_scan", "channel_scan", "k_hop_index", "neighborhood_attention"),
        *("explain", "Choice", "Cost", "warn_above", "CycleError", "structure"),
        *("unchecked", "portable", "StaticTables"),
        *("selective_scan", "causal_conv1d", "node_score", "node_sequences"),
        *("line_graph", "multitree", "node_order", "householder_product"),
        *("chimera_transition", "released_transition", "balanced_path_transition"),
        *("dag_transition", "path_transition"),
        *("grid_dag_scan", "grid_transition", "solve"),
    },
    "pyg_chimera.ops.structure": {
        *("topological_rank", "find_cycle", "CycleError", "parent_scale"),
        "elimination_rank",
        *("line_graph", "LineGraph", "multitree", "node_order"),
        *("ORDERS", "node_score", "node_sequences", "NodeSequences"),
        *("diameter", "connected_components", "KHop", "k_hop_index"),
        *("grid_parents", "check_stored"),
    },
    "pyg_chimera.nn": {
        *("ChimeraConv", "ChimeraDAGConv", "ChimeraGridConv"),
        *("ChimeraPathConv", "RGLRUConv"),
        *("PLSTMConv", "PLSTMGridConv", "GraphMambaConv"),
        *("GatedDeltaConv", "GatedGCNConv", "GPSLayer", "KHopAttentionConv"),
        "HeteroLayer",
        *(
            "CategoricalEncoder",
            "LaplacianEncoder",
            "ImageClassifier",
            "PositionEmbedding",
            "RandomWalkEncoder",
            "SelfAttention",
            "SequenceEncoder",
        ),
        *("GraphBatchNorm", "GraphModel", "HybridModel", "SwiGLU"),
        *("DifferentialAttentionConv", "DifferentialGatedDeltaConv"),
        *("DifferentialSelfAttention", "HierarchicalMemoryConv"),
        *("LatentAttentionConv", "MixtureOfDepths", "SurpriseGatedDeltaConv"),
        "WindowAttentionConv",
    },
    "pyg_chimera.transforms": {
        *("AddDiameter", "AddEliminationOrder", "AddKHopIndex", "AddTopologicalOrder"),
        *("DAGDecomposition", "DirectedLineGraph", "MultitreePruning"),
        *("LineGraphData", "EventsToDAG", "ImageToGraph"),
        *("NodeOrder", "PadBatch", "SequenceToGraph", "LaplacianEncoding"),
    },
    "pyg_chimera.loader": {"ClusterData", "ClusterLoader"},
    "pyg_chimera.datasets": {
        *("GeneratedPeptides", "PeptidesFunctional", "long_range_labels"),
        *("ArrowPointing", "CityRoads", "SampleSensors", "WaterNetworks"),
        *("ATOM_FEATURE_SIZES", "BOND_FEATURE_SIZES"),
    },
    "pyg_chimera.utils": {"influence", "plot_dags", "plot_influence"},
    "pyg_chimera.graphgym": {
        *("GPSNetwork", "MixerLayer", "chimera_cfg", "register"),
    },
}
#: Cannot be imported without GraphGPS or Triton, and have tests of their own.
FOREIGN = (
    "pyg_chimera.graphgym.gps_model",
    "pyg_chimera.ops.causal_conv1d.triton_taps",
    "pyg_chimera.ops.triton_edge_softmax",
    "pyg_chimera.ops.triton_gated_norm",
    "pyg_chimera.ops.recurrence.gpu.channel_spans",
    "pyg_chimera.ops.recurrence.gpu.carry",
    "pyg_chimera.ops.recurrence.gpu.chains",
    "pyg_chimera.ops.recurrence.gpu.chunks",
    "pyg_chimera.ops.recurrence.gpu.mask",
    "pyg_chimera.ops.recurrence.gpu.walk",
    "pyg_chimera.ops.recurrence.gpu.delta_chunks",
    "pyg_chimera.ops.recurrence.gpu.delta_walk",
    "pyg_chimera.ops.recurrence.gpu.fronts",
    "pyg_chimera.ops.recurrence.gpu.paths",
    "pyg_chimera.ops.recurrence.gpu.selective_spans",
    "pyg_chimera.ops.recurrence.gpu.sparse_inverse",
)
MODULES = [
    "pyg_chimera",
    *(
        info.name
        for info in pkgutil.walk_packages(pyg_chimera.__path__, "pyg_chimera.")
        if info.name not in FOREIGN
    ),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    names = importlib.import_module(name).__all__
    assert len(set(names)) == len(names)
    assert set(names) == PUBLIC[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_subpackages_are_described(name):
    assert (importlib.import_module(name).__doc__ or "").strip()


def test_names_of_all_exist_and_are_described():
    missing, undescribed = [], []
    for name in MODULES:
        module = importlib.import_module(name)
        defined = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == name
        ]
        for public in getattr(module, "__all__", defined):
            if not hasattr(module, public):
                missing.append(f"{name}.{public}")
                continue
            value = getattr(module, public)
            # Not inspect.getdoc, which would take the docstring of a base class.
            if callable(value) and not (value.__doc__ or "").strip():
                undescribed.append(f"{name}.{public}")
    assert missing == []
    assert undescribed == []


@pytest.mark.parametrize("name", PUBLIC)
def test_classes_and_functions_say_where_they_belong(name):
    """Nothing foreign is public by accident."""
    module = importlib.import_module(name)
    for public in PUBLIC[name]:
        home = getattr(getattr(module, public), "__module__", "pyg_chimera")
        assert home.startswith("pyg_chimera"), public


def test_imports_whatever_the_default_device():
    """As after `torch.set_default_device("cuda")`."""
    names = ("nn", "transforms", "datasets", "utils", "graphgym")
    lines = ["import torch", "torch.set_default_device('meta')"]
    lines += [f"import pyg_chimera.{name}" for name in names]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_documentation_has_a_page_for_each_subpackage():
    index = (ROOT / "docs" / "api" / "index.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^ {3}(pyg_chimera\S*)$", index, re.MULTILINE)
    assert listed == list(PUBLIC)
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    block = re.search(r"^API = \[\n(.*?)^\]", conf, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r'"(.*?)"', block) == listed
