import argparse
import copy
import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: In place of Chimera in its files: the network, options, and further arguments.
OTHERS = {
    "plstm": ("PLSTMGPS", "mode D order bfs state_channels None", {}),
    "graph_mamba": ("GraphMambaGPS", "order degree num_eval_permutations 2", {}),
    "gated_delta": ("GatedDeltaGPS", "", {"conv_kernel": 2}),
    "k_hop_attention": ("KHopAttentionGPS", "state_channels None", {"k": 2}),
}


@pytest.fixture
def gym(monkeypatch):
    """GraphGym's registries and its configuration, fresh and given back unchanged."""
    pytest.importorskip("yacs", reason="GraphGym needs yacs")
    from torch_geometric.graphgym import register
    from torch_geometric.graphgym.config import cfg, set_cfg

    monkeypatch.syspath_prepend(HERE)
    # First: the loader of GraphGPS refuses what it does not know.
    importlib.import_module("generated")
    importlib.import_module("pyg_chimera.graphgym").register()
    kept = {
        name: copy.copy(mapping)
        for name, mapping in vars(register).items()
        if name.endswith("_dict")
    }
    set_cfg(cfg)
    yield register
    for name, mapping in kept.items():
        getattr(register, name).clear()
        getattr(register, name).update(mapping)
    cfg.clear()
    set_cfg(cfg)


@pytest.fixture
def load(gym, tmp_path):
    """Loads a YAML file of this folder, and options after it, into the live `cfg`."""
    from torch_geometric.graphgym.config import cfg, load_cfg, set_cfg

    def load(name: str, *opts: object):
        set_cfg(cfg)
        mixer, _, kind = name.rpartition("_")
        own: list[str] = []
        if mixer in OTHERS:
            name, (network, options, kwargs) = f"chimera_{kind}", OTHERS[mixer]
            types = {"gps": ["model.type", network], "layer": ["gnn.layer_type", mixer]}
            own, words = types[kind], options.split()
            for option, setting in zip(words[::2], words[1::2], strict=True):
                own += [f"chimera.{option}", setting]
        args = argparse.Namespace(
            cfg_file=str(HERE / "configs" / f"{name}.yaml"),
            opts=["out_dir", str(tmp_path), *map(str, (*own, *opts))],
        )
        load_cfg(cfg, args)
        if mixer in OTHERS and kind == "layer":
            cfg.chimera.kwargs.clear()
            cfg.chimera.kwargs.update(kwargs)
        return cfg

    return load
