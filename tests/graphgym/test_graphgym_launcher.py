"""``python -m pyg_chimera.graphgym main.py`` runs scripts that know nothing of us."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("yacs", reason="GraphGym needs yacs")
launcher = importlib.import_module("pyg_chimera.graphgym.__main__")

HERE = Path(__file__).parent

# The steps of the script that PyG has for GraphGym, which also logs.
MAIN = """
import custom_graphgym  # the user's own registrations
import torch_geometric
from torch_geometric import graphgym
from torch_geometric.graphgym import cfg
from torch_geometric.graphgym.train import GraphGymDataModule
from torch_geometric.graphgym.utils import agg_runs, auto_select_device, params_count

if __name__ == "__main__":
    args = graphgym.parse_args()
    graphgym.load_cfg(cfg, args)
    graphgym.set_out_dir(cfg.out_dir, args.cfg_file)
    graphgym.dump_cfg(cfg)
    for _ in range(args.repeat):
        graphgym.set_run_dir(cfg.out_dir)
        graphgym.set_printing()
        torch_geometric.seed_everything(cfg.seed)
        auto_select_device()
        data, model = GraphGymDataModule(), graphgym.create_model()
        cfg.params = params_count(model)
        graphgym.train(model, data)
    agg_runs(cfg.out_dir, cfg.metric_best)
"""


def launch(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "pyg_chimera.graphgym", *args],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_it_runs_graphgym(tmp_path):
    pytest.importorskip("pytorch_lightning")
    config = "chimera_gps"
    (tmp_path / "main.py").write_text(MAIN)
    shutil.copy(HERE / "generated.py", tmp_path / "custom_graphgym.py")
    shutil.copy(HERE / "configs" / f"{config}.yaml", tmp_path)
    result = launch(
        *("main.py", "--cfg", f"{config}.yaml", "train.eval_period", "1"), cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    stats = tmp_path / "results" / config / "0" / "val" / "stats.json"
    epochs = [json.loads(line) for line in stats.read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs][-2:] == [0, 1]
    assert all(epoch["loss"] > 0 for epoch in epochs)


def test_scripts_see_what_python_would_show_them(tmp_path):
    """Arguments, path, name, and neighbours, GraphGPS among them, from another folder;
    and they exit.
    """
    folder = tmp_path / "GraphGPS"
    shutil.copytree(HERE / "miniature", folder)
    (folder / "neighbour.py").write_text("value = 5\n")
    probe = """
import json, sys
import graphgps, neighbour
from torch_geometric.graphgym.register import layer_dict, network_dict
print(json.dumps([__name__, sys.argv, sys.path[0], __file__, neighbour.value,
                  "chimera" in layer_dict]))
print(network_dict["GPSModel"].__module__)
raise SystemExit(3)
"""
    (folder / "main.py").write_text(probe)
    script = os.path.join("GraphGPS", "main.py")
    result = launch(script, "--cfg", "a.yaml", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    *_, seen, network = result.stdout.splitlines()
    args, path = [script, "--cfg", "a.yaml"], os.path.realpath(folder)
    assert json.loads(seen) == ["__main__", args, path, script, 5, True]
    assert network == "pyg_chimera.graphgym.gps_model"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "error: no script given"),
        (["other.py"], "error: no such file: 'other.py'"),
    ],
)
def test_there_must_be_a_script(args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pyg_chimera.graphgym", *args])
    with pytest.raises(SystemExit) as stopped:
        launcher.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
