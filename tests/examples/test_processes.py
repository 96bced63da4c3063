"""The command line in processes of its own: signals, and several of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lrgb import DATASETS, get_datasets, get_task, main, parse
from presets import build_model, get_recipe
from torch_geometric.data import Batch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "lrgb.py"


def environment() -> dict[str, str]:
    """One thread each, whose waiting takes no core from the others."""
    plain = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    return {
        **plain,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
    }


def smoke(root: str, out: Path, *more: str) -> list[str]:
    return ["--smoke", "--device", "cpu", "--root", root, "--out", str(out), *more]


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def evaluate(root: str, out: Path, split: str) -> dict[str, float]:
    """Metrics of the best weights, all graphs of the split in one batch."""
    datasets = get_datasets(parse(smoke(root, out)))
    model = build_model(get_recipe("smoke", "generated"), **DATASETS["generated"])
    model.load_state_dict(load(out / "best.pt")["model"])
    batch = Batch.from_data_list(list(datasets[split]))
    task = get_task("generated")
    with torch.no_grad():
        result = model.eval()(**model.inputs(batch))
    loss = float(task.loss(result, batch))
    return {"loss": loss, **task.metrics(task.collect(result, batch))}


def wait_for_epochs(process: subprocess.Popen, out: Path, epochs: int) -> None:
    """Returns as soon as a running process has logged so many epochs."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        table = out / "metrics.csv"
        if table.is_file() and len(table.read_text().splitlines()) > epochs:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no {epochs} epochs after 90 s")


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(data_root, tmp_path, capsys):
    get_datasets(parse(smoke(data_root, tmp_path)))  # made before the clock runs
    command = [sys.executable, str(SCRIPT), *smoke(data_root, tmp_path)]
    process = subprocess.Popen(
        [*command, "--epochs", "5000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        wait_for_epochs(process, tmp_path, 2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Stopped (SIGINT)" in output
    assert "--resume" in output
    state = load(tmp_path / "last.pt")
    done = state["epoch"]
    assert done >= 2
    assert len(state["history"]) == done
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert (summary["stopped_by"], summary["epochs_done"]) == ("SIGINT", done)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    more = ("--resume", "--epochs", str(done + 2))
    assert main(smoke(data_root, tmp_path, *more)) == 0
    assert f"after {done} epochs, {state['step']} steps" in capsys.readouterr().out
    history = load(tmp_path / "last.pt")["history"]
    assert [row["epoch"] for row in history] == list(range(1, done + 3))
    assert history[:done] == state["history"]


def torchrun(*arguments: str) -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--master_addr=127.0.0.1", f"--master_port={port}"),
            *(str(SCRIPT), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_report_metrics_of_the_whole_split(data_root, tmp_path):
    datasets = get_datasets(parse(smoke(data_root, tmp_path)))
    assert len(datasets["val"]) % 2 == 1  # shares of unequal size
    output = torchrun(*smoke(data_root, tmp_path))
    assert output.count("epoch   2/2") == 1  # the first process speaks for both
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert summary["processes"] == 2
    assert summary["epochs_done"] == 2
    state = load(tmp_path / "last.pt")
    assert len(state["rng"]) == len(state["total"]) == 2
    assert not torch.equal(state["rng"][0]["torch"], state["rng"][1]["torch"])
    for split in ("val", "test"):
        reported = summary["best"][split]
        assert reported == pytest.approx(evaluate(data_root, tmp_path, split), rel=1e-4)

    # One process goes on from there, although not bit for bit.
    more = ("--resume", "--epochs", "3")
    assert main(smoke(data_root, tmp_path, *more)) == 0
    assert load(tmp_path / "last.pt")["epoch"] == 3
