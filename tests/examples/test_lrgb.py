import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import loading
import lrgb
import presets
import pytest
import tasks
import torch
from engine import count_parameters
from layouts import LRGB, lrgb_graph, write_lrgb
from sklearn.metrics import average_precision_score, f1_score
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import LRGBDataset

SCRIPT = Path(lrgb.__file__)


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory) -> Path:
    """A root with the raw files of all five data sets, as a download leaves them."""
    root = tmp_path_factory.mktemp("lrgb")
    for name in LRGB:
        write_lrgb(root, name)
    return root


def run(*args: str) -> dict:
    return lrgb.run(lrgb.parse([*args, "--device", "cpu"]))


# Data sets -------------------------------------------------------------------------


METRICS = {
    "generated": {"ap"},
    "peptides-func": {"ap"},
    "peptides-struct": {"mae"},
    "pascalvoc-sp": {"macro_f1"},
    "coco-sp": {"macro_f1"},
    "pcqm-contact": {"mrr_raw", "mrr_filtered", "mrr_extended_filtered"},
}


@pytest.mark.parametrize("name", LRGB)
def test_each_data_set_trains_from_downloaded_files(downloaded, tmp_path, name):
    args = ("--dataset", name, "--root", str(downloaded), "--smoke", "--epochs", "1")
    summary = run(*args, "--out", str(tmp_path))
    assert set(summary["best"]["test"]) == {"loss"} | METRICS[name]
    assert all(0 <= value < 10 for value in summary["best"]["test"].values())
    assert summary["epochs_done"] == 1

    # The metrics are those of all test graphs, one batch, best weights.
    args = lrgb.parse([*args])
    datasets = lrgb.get_datasets(args)
    assert [len(datasets[split]) for split in loading.SPLITS] == [12, 5, 7]
    recipe = presets.get_recipe("smoke", name)
    model = presets.build_model(recipe, **lrgb.DATASETS[name])
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    model.load_state_dict(best["model"])
    model.eval()
    batch = Batch.from_data_list(list(datasets["test"]))
    with torch.no_grad():
        out = model(**model.inputs(batch))
    if name == "peptides-struct":
        expected = float((out - batch.y).abs().mean())
    elif name == "peptides-func":
        tasks = zip(batch.y.T.numpy(), out.T.numpy(), strict=True)
        known = [average_precision_score(t, s) for t, s in tasks if 0 < t.sum() < 7]
        expected = sum(known) / len(known)
    elif name == "pcqm-contact":
        return  # its ranks have tests of their own
    else:
        expected = f1_score(batch.y, out.argmax(-1), average="macro", zero_division=0)
    (metric,) = METRICS[name]
    assert summary["best"]["test"][metric] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", LRGB)
def test_raw_files_are_read_as_pyg_reads_them(downloaded, tmp_path, name):
    args = lrgb.parse(["--dataset", name, "--root", str(downloaded)])
    dataset = lrgb.get_datasets(args)["val"]
    generator = torch.Generator().manual_seed(1)
    for data in dataset:
        x, edge_attr, edge_index, *labels = lrgb_graph(name, generator)
        assert torch.equal(data.edge_index, edge_index)
        assert sorted(data.elimination_rank.tolist()) == list(range(len(x)))
        assert "fill_index" not in data
        if not name.endswith("-sp"):
            assert torch.equal(data.x, x)
            assert torch.equal(data.edge_attr, edge_attr)
        if name == "coco-sp":
            assert data.y.tolist() == [
                {13: 12, 27: 25, 90: 80}.get(c, c) for c in labels[0]
            ]
        elif name == "pcqm-contact":
            assert torch.equal(data.edge_label_index, labels[0])
            assert torch.equal(data.edge_label, labels[1])
        elif name == "pascalvoc-sp":
            assert data.y.tolist() == labels[0]
        else:
            assert torch.equal(data.y, labels[0])


@pytest.mark.filterwarnings("ignore:The `pre_transform` argument")
def test_superpixels_are_standardized_by_the_training_set(downloaded):
    args = lrgb.parse(["--dataset", "pascalvoc-sp", "--root", str(downloaded)])
    datasets = lrgb.get_datasets(args)
    for name in ("x", "edge_attr"):
        values = torch.cat([data[name] for data in datasets["train"]])
        assert values.mean(0).abs().max() < 1e-5
        assert (values.std(0) - 1).abs().max() < 1e-5
    raw, train = (
        LRGBDataset(str(downloaded), "pascalvoc-sp", split)
        for split in ("val", "train")
    )
    expected = (raw[0].x - train.x.mean(0)) / train.x.std(0)
    assert torch.allclose(datasets["val"][0].x, expected)
    assert torch.equal(
        raw[0].x, LRGBDataset(str(downloaded), "pascalvoc-sp", "val")[0].x
    )


def test_files_that_pyg_processed_before_get_ranks_on_access(tmp_path):
    raw = tmp_path / "peptides-struct" / "raw"
    raw.mkdir(parents=True)
    for split in loading.SPLITS:
        generator = torch.Generator().manual_seed(0)
        torch.save([lrgb_graph("peptides-struct", generator)] * 2, raw / f"{split}.pt")
    LRGBDataset(str(tmp_path), "peptides-struct")
    args = lrgb.parse(["--dataset", "peptides-struct", "--root", str(tmp_path)])
    with pytest.warns(UserWarning, match="pre_transform"):
        datasets = lrgb.get_datasets(args)
    assert "elimination_rank" in datasets["test"][0]


def test_the_default_is_generated_or_what_root_holds(tmp_path):
    assert lrgb.parse(["--root", str(tmp_path)]).dataset == "generated"
    assert lrgb.parse(["--root", str(tmp_path)]).preset == "demo"
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "peptide_multi_class_dataset.csv.gz").touch()
    args = lrgb.parse(["--root", str(tmp_path), "--seed", "7"])
    assert (args.dataset, args.preset) == ("peptides-func", "released")
    assert args.out == Path("runs/lrgb/peptides-func-chimera-released-seed7")


@pytest.mark.parametrize(
    "args",
    [
        ["--preset", "none"],
        ["--smoke", "--preset", "demo"],
        ["--resume", "--overwrite"],
        ["--baseline", "mlp"],
    ],
)
def test_command_lines_that_make_no_sense(args, capsys):
    with pytest.raises(SystemExit):
        lrgb.parse(args)
    assert "error" in capsys.readouterr().err


def test_real_peptides_from_a_read_only_root(shared_data, tmp_path):
    source = shared_data / "peptides-functional"
    splits = json.loads((source / "splits.json").read_text())
    root = tmp_path / "root"
    (root / "raw").mkdir(parents=True)
    (root / "raw" / "splits.json").write_text(
        json.dumps({split: rows[:24] for split, rows in splits.items()})
    )
    name = "peptide_multi_class_dataset.csv.gz"
    (root / "raw" / name).symlink_to(source / "raw" / name)
    cache = tmp_path / "cache"
    args = ("--root", str(root), "--processed-root", str(cache), "--smoke")
    summary = run(*args, "--epochs", "1", "--out", str(tmp_path / "run"))
    assert summary["config"]["dataset"] == "peptides-func"
    assert summary["epochs_done"] == 1
    assert (cache / "processed" / "train.pt").is_file()
    assert {path.name for path in root.rglob("*")} == {"raw", name, "splits.json"}


# Losses and models -------------------------------------------------------------------


def test_weighted_cross_entropy_by_hand():
    out = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    batch = Data(y=torch.tensor([0, 0, 1]))
    log_p = out.log_softmax(-1)
    weights = [1 / 3, 2 / 3]  # of class 0, which two of three nodes have, and of 1
    terms = [-weights[0] * log_p[0, 0], -weights[0] * log_p[1, 0]]
    expected = (sum(terms) - weights[1] * log_p[2, 1]) / (2 * weights[0] + weights[1])
    loss = tasks.get_task("coco-sp").loss(out, batch)
    assert float(loss) == pytest.approx(float(expected))


def test_a_batch_of_one_class_has_a_loss():
    out = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    batch = Data(y=torch.tensor([0, 0]))
    loss = tasks.get_task("coco-sp").loss(out, batch)
    assert float(loss) == pytest.approx(float(-out.log_softmax(-1)[:, 0].mean()))


def test_unlabelled_entries_have_no_loss():
    out = torch.tensor([[1.0, 5.0], [-1.0, 2.0]])
    batch = Data(y=torch.tensor([[1.0, float("nan")], [0.0, 1.0]]))
    p = torch.tensor([1.0, 1.0, 2.0]).sigmoid()
    loss = tasks.get_task("peptides-func").loss(out, batch)
    assert float(loss) == pytest.approx(float(-p.log().mean()))


def test_contacts_are_scored_by_inner_products():
    out = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    index = torch.tensor([[0, 1], [1, 2]])  # scores 2 and 3
    batch = Data(edge_label_index=index, edge_label=torch.tensor([1, 0]))
    p = torch.tensor([2.0, -3.0]).sigmoid()
    loss = tasks.get_task("pcqm-contact").loss(out, batch)
    assert float(loss) == pytest.approx(float(-p.log().mean()))


@pytest.mark.parametrize("preset", ["released", "paper"])
@pytest.mark.parametrize("name", lrgb.DATASETS)
def test_published_recipes_stay_below_500k_parameters(preset, name):
    recipe = presets.get_recipe(preset, name)
    assert (recipe.num_layers, recipe.channels, recipe.heads) == (
        8,
        64,
        2 if name in ("peptides-func", "generated") else 4,
    )
    model = presets.build_model(recipe, **lrgb.DATASETS[name])
    assert 300_000 < count_parameters(model) < 500_000


@pytest.mark.parametrize("preset", ["released", "paper", "demo"])
@pytest.mark.parametrize("name", presets.BASELINES)
def test_baselines_have_the_same_budget(preset, name):
    recipe = presets.get_recipe(preset, "peptides-func")
    data = lrgb.DATASETS["peptides-func"]
    target = count_parameters(presets.build_model(recipe, **data))
    matched = presets.match_width(recipe, name, **data)
    model = presets.build_model(matched, name, **data)
    assert count_parameters(model) == pytest.approx(target, rel=0.05)
    assert matched.channels % matched.heads == 0


@pytest.mark.parametrize("name", presets.BASELINES)
def test_baselines_train(data_root, tmp_path, name, capsys):
    args = ("--smoke", "--root", data_root, "--epochs", "1", "--out", str(tmp_path))
    summary = run(*args, "--baseline", name)
    assert summary["config"]["model"] == name
    assert 0 < summary["best"]["test"]["ap"] <= 1
    assert "(Chimera: " in capsys.readouterr().out


def test_chimera_starts_with_the_reach_that_the_recipe_asks_for():
    recipe = presets.get_recipe("demo", "generated")
    model = presets.build_model(recipe, **lrgb.DATASETS["generated"])
    n = 40
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = torch.cat([path, path.flip(0)], dim=1)

    def influence(slack):
        """Of the first node on the last one, relative to that on itself."""
        torch.manual_seed(0)
        changed = presets.replace(recipe, slack=slack)
        model = presets.build_model(changed, **lrgb.DATASETS["generated"])
        x = torch.randn(n, recipe.channels, requires_grad=True)
        edge_attr = torch.randn(2 * n - 2, recipe.channels)
        out = model.layers[0].mixer(x, edge_index, edge_attr)
        (grad,) = torch.autograd.grad(out[-1].square().sum(), x)
        return float(grad[0].norm() / grad[-1].norm())

    assert recipe.slack is not None
    assert model.layers[0].mixer.delta_bias[2].tolist() == [*recipe.slack]
    assert influence(recipe.slack) > 1e3 * influence(None)


# Whole runs -----------------------------------------------------------------------


def test_resume_through_the_command_line(data_root, tmp_path):
    args = ("--smoke", "--root", data_root)
    one, two = (("--out", str(tmp_path / name)) for name in "ab")
    run(*args, *one)
    summary = run(*args, *two, "--time-limit", "0")
    assert summary["epochs_done"] == 0
    run(*args, *two, "--resume")
    states = [
        torch.load(tmp_path / name / "last.pt", weights_only=True) for name in "ab"
    ]
    assert states[0]["epoch"] == states[1]["epoch"] == 2
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key
    for a, b in zip(states[0]["history"], states[1]["history"], strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_to_resume(data_root, tmp_path):
    command = [
        *(sys.executable, str(SCRIPT), "--smoke", "--baseline", "gcn"),
        *("--root", data_root, "--out", str(tmp_path), "--num-workers", "1"),
    ]
    process = subprocess.Popen(
        [*command, "--epochs", "1000"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,  # to signal its workers as well, as a terminal does
    )
    for line in process.stdout:
        if line.startswith("epoch   2/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Stopped (SIGINT)" in output
    assert "--resume" in output
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert 2 <= state["epoch"] < 1000
    assert json.loads((tmp_path / "metrics.json").read_text())["stopped_by"] == "SIGINT"
    assert not list(tmp_path.glob("*.part"))

    epochs = state["epoch"] + 1
    summary = run(*command[2:], "--resume", "--epochs", str(epochs))
    assert summary["epochs_done"] == epochs


def torchrun(script: Path, *args: str) -> str:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node=2", str(script), *args),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes(data_root, tmp_path):
    """They report metrics of whole splits, and go on bit for bit."""
    smoke = ["--smoke", "--root", data_root, "--device", "cpu", "--out"]
    one, two = [*smoke, str(tmp_path / "one")], [*smoke, str(tmp_path / "two")]
    output = torchrun(SCRIPT, *one)
    assert "2 process(es) on cpu" in output
    assert output.count("epoch   2/2") == 1  # the first one speaks for both
    summary = json.loads((tmp_path / "one" / "metrics.json").read_text())
    assert (summary["processes"], summary["epochs_done"]) == (2, 2)

    # Five graphs on two processes: each must count, and count once.
    best = torch.load(tmp_path / "one" / "best.pt", weights_only=True)
    datasets = lrgb.get_datasets(lrgb.parse(smoke[:-1]))
    recipe = presets.get_recipe("smoke", "generated")
    model = presets.build_model(recipe, **lrgb.DATASETS["generated"]).eval()
    model.load_state_dict(best["model"])
    task = tasks.get_task("generated")
    for split in ("val", "test"):
        assert len(datasets[split]) == 5
        batch = Batch.from_data_list(list(datasets[split]))
        with torch.no_grad():
            out = model(**model.inputs(batch))
        expected = task.metrics(task.collect(out, batch))
        expected["loss"] = float(task.loss(out, batch))
        assert summary["best"][split] == pytest.approx(expected, rel=1e-5)

    # Starting two processes takes longer than training: stop and resume in one go.
    script = tmp_path / "stop_and_resume.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"import lrgb\n"
        f"assert lrgb.main([*{two}, '--time-limit', '0']) == 0\n"
        f"assert lrgb.main([*{two}, '--resume']) == 0\n"
    )
    assert "Stopped (time limit) in epoch 1/2" in torchrun(script)
    states = [
        torch.load(tmp_path / name / "last.pt", weights_only=True)
        for name in ("one", "two")
    ]
    assert len(states[0]["rng"]) == 2
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key

    # One process can go on from there as well, although not exactly.
    summary = run(*one, "--resume", "--epochs", "3")
    assert (summary["processes"], summary["epochs_done"]) == (1, 3)
