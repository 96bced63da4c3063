"""Each comparison: its recipes, its models, and whole runs."""

import ast
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import arrow_pointing
import common
import graph_data
import graph_mamba
import image_grid
import lrgb
import masked_lm
import networkx as nx
import node_classification
import numpy as np
import pytest
import recall
import sentences
import syntax_trees
import torch
import tudataset
from common import count_parameters
from torch_geometric.data import Batch, Data

from pyg_chimera.transforms import ImageToGraph


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch):
    """To draw them takes longer than these small runs, and has a test elsewhere."""
    monkeypatch.setattr(common, "draw_curves", lambda *_: None)


@pytest.fixture(scope="session")
def generated(tmp_path_factory) -> tuple[str, ...]:
    """Arguments of short runs on generated peptides."""
    root = tmp_path_factory.mktemp("data")
    return ("--smoke", "--root", str(root), "--dataset", "generated", "--epochs", "1")


def get_args(script, *argv: str):
    return script.get_args(["--device", "cpu", *argv])


def run(script, out: Path, *argv: str) -> dict:
    return script.run(get_args(script, "--out", str(out), *argv))


def read(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def without_times(rows: dict[str, dict]) -> dict[str, dict]:
    return {name: {**row, "seconds": 0} for name, row in rows.items()}


def check_metrics(out: Path, model, task, datasets: dict) -> None:
    """The metrics of a run are those of its best weights, on one batch."""
    state = torch.load(out / "best.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
    model.eval()
    for split in list(datasets)[1:]:
        batch = Batch.from_data_list(list(datasets[split]))
        with torch.no_grad():
            output = model(**model.inputs(batch))
        for name, row in task.rows(output, batch).items():
            task.metrics[name].reset()
            task.metrics[name].update(*row)
            expected = pytest.approx(float(task.metrics[name].compute()), abs=1e-5)
            assert read(out)["best"][f"{split}_{name}"] == expected


# Command lines -------------------------------------------------------------------


def test_defaults(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    args = get_args(lrgb)
    assert (args.dataset, args.preset, args.model) == ("generated", "demo", "chimera")
    assert args.out == Path("runs/lrgb/generated-chimera-demo-seed0")
    assert get_args(lrgb, "--preset", "paper", "--lr", "0.5").lr == 0.5
    # A root that is named must be of use.
    for script, published in ((lrgb, "released"), (graph_mamba, "paper")):
        root = tmp_path / script.__name__
        (root / "raw").mkdir(parents=True)
        text = refused(get_args, script, "--root", str(root))
        assert "has no raw Peptides-func: pass --dataset" in text
        (root / "raw" / "peptide_multi_class_dataset.csv.gz").touch()
        args = get_args(script, "--root", str(root))
        assert (args.dataset, args.preset) == ("peptides-func", published)


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (lrgb, "--minutes 1 --epochs 2"),
        (graph_mamba, "--ablation --order degree"),
        (arrow_pointing, "--model vit --mode P"),
        (tudataset, "--folds 2"),
        (node_classification, "--dataset actor --splits 3 10"),
        (image_grid, "--dataset cifar10"),
        (masked_lm, "--causal --models depths"),
        (masked_lm, "--causal --length 3 --prompt abc"),
        (sentences, "--pretrained nowhere"),
        (recall, "--structure graph --models rg-lru"),
        (syntax_trees, "--models gat"),
    ],
)
def test_command_lines_that_make_no_sense(script, argv, refused):
    assert refused(get_args, script, *argv.split()).count("\n") == 1


# Recipes and models ----------------------------------------------------------------


@pytest.mark.parametrize("preset", [x for x in lrgb.PRESETS if x != "smoke"])
def test_models_have_the_same_size(preset):
    argv = ("--preset", preset, "--dataset", "peptides-func")
    target = count_parameters(lrgb.build_model(get_args(lrgb, *argv)))
    if preset in ("released", "paper"):  # the benchmark's budget
        assert 300_000 < target < 500_000
    # One more channel for each of four heads is a seventh of the small model.
    tolerance = 0.09 if preset == "demo" else 0.05
    for name in lrgb.MODELS[1:]:
        args = lrgb.match_chimera(get_args(lrgb, *argv, "--model", name))
        model = lrgb.build_model(args)
        assert count_parameters(model) == pytest.approx(target, rel=tolerance)
        assert model.channels % args.heads == 0


#: Parameters of a Mamba block and of the model by tables 6 and 7 of the paper, and by
#: how many ours differ.
TABLES = {
    "peptides-func": (34_080, 373_018, 0),
    "peptides-struct": (34_080, 491_867, 0),
    "malnet-tiny": (16_320, 285_125, 0),
    "cifar10": (11_388, 113_818, 0),
    "cluster": (9_840, 508_966, 0),
    "pattern": (16_320, 335_281, 65),  # two logits, where the released code has one
    "pcqm-contact": (34_080, 500_112, 0),
}


@pytest.mark.parametrize("name", TABLES)
def test_graph_mamba_has_the_published_sizes(name):
    args = get_args(graph_mamba, "--dataset", name, "--preset", "paper")
    block, total, difference = TABLES[name]
    model = graph_mamba.build_model(args)
    mixer = model.layers[0].mixer
    assert count_parameters(mixer) - count_parameters(mixer.norm) == block
    assert count_parameters(model) == total + difference


def sizes(script, names, *argv: str, more=()) -> list[int]:
    """Of models that are compared."""
    args = get_args(script, *argv)
    return [count_parameters(script.build_model(args, x, *more)) for x in names]


def test_compared_models_have_one_size():
    for edge_dim in (None, 4):
        for name in tudataset.MODELS:
            size = count_parameters(tudataset.build_model(name, 39, edge_dim, 2))
            assert size == pytest.approx(300_000, rel=0.002)
    for argv in ((), ("--directions", "down"), ("--preset", "full")):
        found = sizes(syntax_trees, syntax_trees.MODELS, *argv, more=([9, 9], 1))
        assert found == pytest.approx([found[0]] * len(found), rel=0.01)
    goal = get_args(masked_lm).parameters
    for size in sizes(masked_lm, masked_lm.MODELS):
        assert size == pytest.approx(goal, rel=0.01)
    for structure in recall.STRUCTURES:
        names = [x for x in recall.MODELS if structure != "graph" or x != "rg-lru"]
        goal = get_args(recall, "--structure", structure).parameters
        for size in sizes(recall, names, "--structure", structure):
            assert size == pytest.approx(goal, rel=0.01)
    for arm, told in image_grid.ARMS.items():
        patches = told.get("patches", "grid")
        graph = image_grid.lay(ImageToGraph()(torch.rand(8, 8)), patches)
        (size,) = sizes(image_grid, [arm], more=(graph,))
        assert size == pytest.approx(150_000, rel=0.01)


@pytest.mark.parametrize("preset", ["--preset=paper", "--preset=demo", "--smoke"])
def test_recipes_of_arrow_pointing(preset):
    for mode in ("PD", "P", "D"):  # of layers in turn
        args = get_args(arrow_pointing, preset, "--mode", mode)
        model = arrow_pointing.build_model(args)
        modes = "".join(layer.mixer.mode for layer in model.layers)
        assert modes == (mode * args.num_layers)[: args.num_layers]
        args.model = "vit"
        size = count_parameters(arrow_pointing.build_model(args))
        assert size == pytest.approx(count_parameters(model), rel=0.02)
    if preset == "--preset=paper":
        assert 5e6 < count_parameters(model) < 7e6  # "6M"


# Metrics ------------------------------------------------------------------------


NAN = float("nan")


def evaluate(name: str, out, batch) -> dict[str, float]:
    task = graph_data.get_task(name)
    for key, row in task.rows(out, batch).items():
        task.metrics[key].update(*row)
    return {key: float(metric.compute()) for key, metric in task.metrics.items()}


def test_unlabelled_entries_have_no_loss():
    out = torch.tensor([[1.0, 5.0], [-1.0, 2.0]])
    batch = Data(y=torch.tensor([[1.0, NAN], [0.0, 1.0]]))
    p = torch.tensor([1.0, 1.0, 2.0]).sigmoid()
    loss = graph_data.get_task("peptides-func").loss(out, batch)
    assert float(loss) == pytest.approx(float(-p.log().mean()))


def test_average_precision_by_hand():
    out = torch.tensor(
        [[0.9, 0.1, 5.0], [0.8, 0.2, 4.0], [0.7, 9.0, 3.0], [0.6, 0.3, 2]]
    )
    y = torch.tensor([[1, 0, 1], [0, 1, 1], [1, NAN, 1], [0, 0, NAN]])
    # Precision at the positives of the first label: 1/1 and 2/3, of the second: 1/2.
    # The third one has no negatives and is left out.
    found = evaluate("peptides-func", out, Data(y=y))["ap"]
    assert found == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)


# TUDataset: graphs and folds -------------------------------------------------------


@pytest.mark.parametrize("folds", [3, 10])
def test_folds_are_disjoint_stratified_and_cover_everything(folds):
    mutag = [1] * 125 + [0] * 63
    splits = tudataset.split_folds(mutag, folds, seed=0)
    assert len(splits) == folds
    for split in splits:
        rows = [i for part in ("train", "val", "test") for i in split[part]]
        assert sorted(rows) == list(range(188))
        for part in split.values():
            share = sum(mutag) / len(mutag) * len(part)
            assert abs(sum(mutag[i] for i in part) - share) <= 1.5
    for part in ("val", "test"):
        rows = [i for split in splits for i in split[part]]
        assert sorted(rows) == list(range(188))  # each graph once
    torch.manual_seed(5)
    assert tudataset.split_folds(mutag, folds, 0) == splits
    assert tudataset.split_folds(mutag, folds, 1) != splits


# Runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [lrgb, graph_mamba])
@pytest.mark.parametrize("name", ["peptides-func", "peptides-struct"])
def test_each_data_set_trains_from_downloaded_files(root, tmp_path, script, name):
    argv = ("--dataset", name, "--root", str(root), "--smoke", "--epochs", "1")
    assert run(script, tmp_path, *argv)["epochs_done"] == 1
    args = get_args(script, *argv)
    datasets = graph_data.get_datasets(args, script.get_transforms(args))
    assert [len(dataset) for dataset in datasets.values()] == [12, 5, 7]
    model, task = script.build_model(args), graph_data.get_task(name)
    check_metrics(tmp_path, model, task, datasets)


@pytest.mark.parametrize("name", lrgb.MODELS[1:])
def test_models_train(generated, tmp_path, name):
    results = run(lrgb, tmp_path, *generated, "--model", name)
    assert 0 < results["best"]["test_ap"] <= 1


@pytest.mark.parametrize("dataset", ["LABELLED", "BARE"])
def test_all_models_in_one_table(root, tmp_path, capsys, dataset):
    argv = ("--smoke", "--dataset", dataset, "--root", str(root), "--epochs", "1")
    results = run(tudataset, tmp_path, *argv, "--models", *tudataset.MODELS)
    assert read(tmp_path) == results
    assert list(results["rows"]) == list(tudataset.MODELS)
    printed = re.sub(" +", " ", capsys.readouterr().out)
    for name, row in results["rows"].items():
        found = [read(tmp_path / name / f"fold-{i}") for i in range(3)]
        assert {f["parameters"] for f in found} == {row["parameters"]}
        for split in ("test", "val"):
            values = [f["best"][f"{split}_accuracy"] for f in found]
            mean, std = statistics.mean(values), statistics.pstdev(values)
            assert row[f"{split}_accuracy"] == pytest.approx(mean)
            assert row[f"{split}_std"] == pytest.approx(std)
        assert f"{name} {row['parameters']} 3 {row['test_accuracy']:.4g}" in printed


def test_paths_and_stars_are_learnt(root, tmp_path):
    argv = ("--smoke", "--root", str(root), "--dataset", "LABELLED", "--models", "gin")
    learn = ("--epochs", "25", "--lr", "0.01")
    row = run(tudataset, tmp_path / "a", *argv, *learn)["rows"]["gin"]
    assert row["test_accuracy"] == 1
    for fold in range(3):
        # Of the epochs without an error, the one with the lowest loss on validation.
        found = read(tmp_path / "a" / "gin" / f"fold-{fold}")
        right = [row for row in found["history"] if row["val_accuracy"] == 1]
        best = min(right, key=lambda row: row["val_loss"])
        assert found["best"]["epoch"] == best["epoch"]
    losses = []
    for i, seed in enumerate("001"):  # a run is a function of the seed
        run(tudataset, tmp_path / str(i), *argv, "--epochs", "1", "--seed", seed)
        history = read(tmp_path / str(i) / "gin" / "fold-2")["history"]
        losses.append(history[0]["train_loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("script", "argv", "call", "done"),
    [  # a variant has five calls of the loss, a fold three
        (graph_mamba, ["--ablation"], 7, "order"),
        (tudataset, ["--dataset=LABELLED", "--models", "gin", "gcn"], 4, "gin/fold-0"),
    ],
)
def test_many_runs_go_on_where_they_were(
    root, generated, tmp_path, monkeypatch, interrupt, refused, script, argv, call, done
):
    smoke = generated
    if script is tudataset:
        smoke = ("--smoke", "--root", str(root), "--epochs", "1")
    one, two = tmp_path / "one", tmp_path / "two"
    straight = run(script, one, *smoke, *argv)["rows"]
    if script is graph_mamba:
        assert list(straight) == list(graph_mamba.VARIANTS)
        assert len({row["parameters"] for row in straight.values()}) == 1
        found = [read(one / order)["best"] for order in straight]
        assert [row["test_ap"] for row in straight.values()] == [
            best["test_ap"] for best in found
        ]
        assert len({best["val_loss"] for best in found}) == 5  # orders matter

    get_task = script.get_task
    with monkeypatch.context() as patch:
        patch.setattr(
            script,
            "get_task",
            lambda name: interrupt(get_task(name), call, signal.SIGTERM),
        )
        args = get_args(script, *smoke, *argv, "--out", str(two))
        assert common.main(script.run, args) == 143
    assert read(two)["stopped_by"] == "SIGTERM"
    assert len(read(two)["rows"]) == 1
    before = (two / done / "last.ckpt").stat().st_mtime_ns
    assert "holds a run" in refused(run, script, two, *smoke, *argv)
    stopped = run(script, two, *smoke, *argv, "--resume", "--time-limit", "1e-9")
    assert stopped["stopped_by"] == "time limit"
    assert len(stopped["rows"]) < len(straight)
    resumed = run(script, two, *smoke, *argv, "--resume")["rows"]
    assert (two / done / "last.ckpt").stat().st_mtime_ns == before
    assert without_times(resumed) == without_times(straight)


# Real data -------------------------------------------------------------------------


@pytest.mark.parametrize("script", [lrgb, graph_mamba])
def test_real_peptides_from_a_read_only_root(shared_data, tmp_path, script):
    source = shared_data / "peptides-functional"
    splits = json.loads((source / "splits.json").read_text())
    root, cache = tmp_path / "root", tmp_path / "cache"
    (root / "raw").mkdir(parents=True)
    cache.mkdir()
    few = {split: rows[:24] for split, rows in splits.items()}
    (root / "splits.json").write_text(json.dumps(few))
    name = "peptide_multi_class_dataset.csv.gz"
    (root / "raw" / name).symlink_to(source / "raw" / name)
    argv = ("--root", str(root), "--processed-root", str(cache), "--smoke")
    results = run(script, tmp_path / "run", *argv, "--epochs", "1")
    assert results["config"]["dataset"] == "peptides-func"
    assert list(cache.glob("processed-*/train.pt"))
    assert {path.name for path in root.rglob("*")} == {"raw", name, "splits.json"}


# Programs --------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes(generated, tmp_path):
    """They report metrics of whole splits, and go on bit for bit."""
    argv = [*generated[:-1], "2", "--device", "cpu", "--out"]
    one, two = tmp_path / "one", tmp_path / "two"

    # Starting two processes takes longer than training: all runs in one go.
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import common, lrgb
lrgb.run(lrgb.get_args({[*argv, str(one)]}))
args = lrgb.get_args({[*argv, str(two)]})
args.time_limit, elapsed = 1e9, common.TimeLimit.time_elapsed
common.TimeLimit.time_elapsed = lambda t, *_: 1e10 * bool(t.start_time())
assert lrgb.run(args)["epochs_done"] == 1
common.TimeLimit.time_elapsed, args.resume = elapsed, True
assert lrgb.run(args)["epochs_done"] == 2
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [*command, "--nproc_per_node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "2 process(es) on cpu" in done.stdout
    # The first one speaks for both, of each run.
    lines = done.stdout.splitlines()
    assert [sum(x.startswith(f"epoch {n} ") for x in lines) for n in (1, 2)] == [2, 2]
    args = get_args(lrgb, *argv, str(one))
    datasets = graph_data.get_datasets(args, lrgb.get_transforms(args))
    assert len(datasets["val"]) == 5  # on two processes: each counts, and counts once
    model, task = lrgb.build_model(args), graph_data.get_task("generated")
    check_metrics(one, model, task, datasets)
    states = [torch.load(out / "last.ckpt", weights_only=True) for out in (one, two)]
    for key, value in states[0]["state_dict"].items():
        assert torch.equal(value, states[1]["state_dict"][key]), key


# Images ----------------------------------------------------------------------------


def test_arms(tmp_path):
    argv = ("--smoke", "--seeds", "2", "--rates", "0.01", "0.001")
    argv = (*argv, "--arms", "grid", "shuffled", "vit-learned")
    results = run(image_grid, tmp_path, *argv)
    args, rows = get_args(image_grid, *argv), results["rows"]
    assert read(tmp_path)["rows"] == rows
    assert list(rows) == args.arms
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")
    graphs = image_grid.get_graphs(args)
    for arm, row in rows.items():
        assert row["parameters"] == pytest.approx(6000, rel=0.05)
        found = {
            rate: read(tmp_path / arm / f"rate-{rate:g}" / "seed-0")["best"]
            for rate in args.rates
        }
        rate = max(found, key=lambda rate: found[rate]["val_accuracy"])
        assert row["rate"] == rate
        path = tmp_path / arm / f"rate-{rate:g}"
        runs = [read(path / f"seed-{seed}")["best"] for seed in (0, 1)]
        tests = [best["test_accuracy"] for best in runs]
        assert row["test_accuracy"] == pytest.approx(statistics.mean(tests))
        if arm == args.arms[0]:
            first = tests
        paired = [a - b for a, b in zip(tests, first, strict=True)]
        assert row["difference"] == pytest.approx(statistics.mean(paired))
        # Of two differences the standard error is half of that between them.
        wide = 12.7062 * abs(paired[0] - paired[1]) / 2
        assert row["interval"] == pytest.approx(wide, rel=1e-4)
    patches = image_grid.ARMS["shuffled"]["patches"]
    data = {part: [image_grid.lay(g, patches) for g in graphs[part]] for part in graphs}
    model = image_grid.build_model(args, "shuffled", data["train"][0])
    rate = rows["shuffled"]["rate"]
    path = tmp_path / "shuffled" / f"rate-{rate:g}" / "seed-1"
    check_metrics(path, model, image_grid.get_task(), data)
    for graph, moved in zip(graphs["test"], data["test"], strict=True):
        assert not torch.equal(graph.x, moved.x)
        assert torch.equal(graph.x.sort(0).values, moved.x.sort(0).values)


# Text ------------------------------------------------------------------------------


def test_windows_of_a_text():
    text = torch.arange(1000) % 200
    for fixed in (False, True):
        windows = masked_lm.Windows(text, 100, 9, causal=False, fixed=fixed)
        shares = []
        for i in range(9):
            data = windows[i]
            hidden = data.x == masked_lm.MASK
            assert torch.equal(hidden, data.y != masked_lm.NOT_ASKED)
            whole = torch.where(hidden, data.y, data.x)
            assert torch.equal(whole, (torch.arange(100) + whole[0]) % 200)
            assert not fixed or whole[0] == 100 * i % 200
            assert torch.equal(windows[i].x, data.x) == fixed
            shares.append(hidden.float().mean().item())
        assert statistics.mean(shares) == pytest.approx(0.3, abs=0.05)
        causal = masked_lm.Windows(text, 100, 9, causal=True, fixed=fixed)[3]
        assert torch.equal(causal.x[1:], causal.y[:-1])
        assert causal.y[-1] == (causal.x[-1] + 1) % 200


def test_equal_minutes(tmp_path, monkeypatch):
    seconds = iter(range(1000))
    args = get_args(masked_lm, "--smoke")
    data = masked_lm.get_datasets(args, torch.arange(3000) % 256, [16])
    model = masked_lm.build_model(args, "chimera")
    before = [p.clone() for p in model.parameters()]
    clock = "monotonic" if args.device == "cuda" else "process_time"
    monkeypatch.setattr(common.time, clock, lambda: next(seconds))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # A step takes one second. An epoch has two of four windows, and three to evaluate.
    assert (len(data["train"]), len(data["val"])) == (8, 9)
    task = masked_lm.get_task()
    assert common.epochs_within(3.0, model, task, args, data) == 36
    assert common.epochs_within(0.001, model, task, args, data) == 1
    assert all(map(torch.equal, before, model.parameters()))


# One large graph ------------------------------------------------------------------


def datasets_of(argv, split: int = 0) -> dict:
    """Those that ``node_classification`` trains and tests on."""
    args = get_args(node_classification, *argv)
    return node_classification.get_datasets(
        args, node_classification.get_parts(args), split
    )


def test_node_classification(tmp_path):
    argv = ("--smoke", "--splits", "1", "7")
    results = run(
        node_classification, tmp_path, *argv, "--models", *node_classification.MODELS
    )
    args = get_args(node_classification, *argv)
    whole = node_classification.load_graph(args)
    masks = [whole[f"{name}_mask"] for name in node_classification.PARTS]
    total = sum(mask.long() for mask in masks)
    assert torch.equal(total, torch.ones(whole.num_nodes, 10, dtype=torch.long))
    # Features tell half of the numbers of mines around, and nothing of the others.
    hidden = whole.x[:, 9] == 1
    count = torch.zeros_like(whole.y)
    count.index_add_(0, whole.edge_index[1], whole.y[whole.edge_index[0]])
    assert torch.equal(whole.x.argmax(1)[~hidden], count[~hidden])
    assert list(results["rows"]) == list(node_classification.MODELS)
    for name in node_classification.MODELS:
        for split in (1, 7):
            built = node_classification.build_model(args, name, whole.num_features, 2)
            check_metrics(
                tmp_path / name / f"split-{split}",
                built,
                node_classification.get_task(2),
                datasets_of(argv, split),
            )


def test_nodes_count_alike_in_the_loss():
    task = node_classification.get_task(3)
    masks = [[True, True, True], [False, False, True], [False, False, False]]
    out, y = torch.randn(9, 3), torch.tensor([0, 1, 2] * 3)
    parts = [
        Batch.from_data_list([Data(y=y[:3], mask=torch.tensor(mask), num_nodes=3)])
        for mask in masks
    ]
    weights = [task.weight(part) for part in parts]
    assert weights == [3, 1, 0]
    losses = [
        task.loss(rows, part) for rows, part in zip(out.split(3), parts, strict=True)
    ]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / 4
    keep = torch.tensor(masks).flatten()
    expected = torch.nn.functional.cross_entropy(out[keep], y[keep])
    torch.testing.assert_close(mean, expected)


def heterophilous(root: Path, name: str, num_classes: int) -> None:
    """A file as it is published, of a small graph."""
    generator = np.random.default_rng(0)
    part = generator.integers(3, size=(10, 50))
    np.savez(
        root / f"{name}.npz",
        node_features=generator.random((50, 4), dtype=np.float32),
        node_labels=np.arange(50) % num_classes,
        edges=np.stack([np.arange(49), np.arange(1, 50)], 1),
        **{f"{x}_masks": part == i for i, x in enumerate(node_classification.PARTS)},
    )


def test_heterophilous_files(tmp_path, refused):
    heterophilous(tmp_path, "actor", 5)
    heterophilous(tmp_path / ".", "tolokers", 2)
    for dataset, metric in (("actor", "accuracy"), ("tolokers", "auroc")):
        argv = ("--smoke", "--root", str(tmp_path), "--dataset", dataset)
        graph = datasets_of(argv, 3)["val"][0]
        assert graph.is_undirected()
        raw = np.load(tmp_path / f"{dataset}.npz")
        assert (graph.mask.numpy() == raw["val_masks"][3]).all()
        out = tmp_path / f"run-{dataset}"
        results = run(node_classification, out, *argv, "--splits", "3")
        assert 0 <= results["rows"]["chimera"][f"test_{metric}"] <= 1
    (tmp_path / "actor.npz").unlink()
    args = get_args(node_classification, *argv[:3], "--dataset", "actor", "--overwrite")
    assert "there is no" in refused(common.main, node_classification.run, args)


# Syntax trees ---------------------------------------------------------------------


def functions(source: str) -> list[syntax_trees.Function]:
    module = ast.parse(source)
    found = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    return [syntax_trees.read_tree(node) for node in found]


def test_a_function_as_a_tree():
    (found,) = functions("def f(x):\n    if x:\n        return 1\n    y = x")
    kinds = "FunctionDef arguments arg If Name Return Constant Assign Name Name"
    roles = "body args args body test body value body targets value"
    assert [syntax_trees.KINDS[kind] for kind in found.kinds] == kinds.split()
    assert [syntax_trees.ROLES[role] for role in found.roles] == roles.split()
    assert found.parents == [-1, 0, 1, 0, 3, 3, 5, 0, 7, 7]
    assert (found.name, found.returns) == ("f", True)


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """Sources in the place of the standard library's."""
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    (root / "test" / "test_a.py").write_text("def left_out(): pass")
    (root / "broken.py").write_text("def")
    for i in range(40):
        lines = [f"def get_{i}(self): return self.a{i}"]  # all the same tree
        lines += [f"def {'read' if i % 2 else 'write'}_all(x):", *["    x()"] * i]
        lines += ["    if x:", "        return x"] if i % 3 else []
        (root / f"m{i}.py").write_text("\n".join([*lines, "    x.y", ""]))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


def test_no_tree_is_in_two_splits(library):
    parts = syntax_trees.standard_library(1000)
    found = [row for rows in parts.values() for row in rows]
    assert all(parts.values())
    assert len(found) == 41
    trees = {(str(data.x), str(data.edge_index)) for _, data in found}
    assert len(trees) == len(found)
    assert sum(function.returns for function, _ in found) == 26


@pytest.mark.parametrize("dataset", ["names", "returns"])
def test_functions_of_a_library(library, tmp_path, dataset):
    argv = ("--smoke", "--epochs", "1", "--dataset", dataset)
    out = tmp_path / "run"
    results = run(syntax_trees, out, *argv, "--models", *syntax_trees.MODELS)
    assert list(results["rows"]) == list(syntax_trees.MODELS)
    source = syntax_trees.load(get_args(syntax_trees, *argv))
    if dataset == "names":
        assert {tuple(data.name) for data in source.parts["train"]} <= {
            ("read", "all"),
            ("write", "all"),
            ("get", "0"),
        }
    for name in syntax_trees.MODELS:
        model = syntax_trees.build_model(
            get_args(syntax_trees, *argv), name, source.in_channels, source.out_channels
        )
        check_metrics(out / name / "seed-0", model, source.task(), source.parts)


# Recall ----------------------------------------------------------------------------


@pytest.mark.parametrize("structure", recall.STRUCTURES)
@pytest.mark.parametrize("task", recall.TASKS)
def test_what_there_is_to_recall(task, structure):
    """Looked up once more, by networkx."""
    args = get_args(recall, "--task", task, "--structure", structure)
    nothing, asked = args.num_keys, 0
    for size in (1, 2, 40):
        for data in recall.Recall(args, size, 5, seed=3):
            graph = nx.DiGraph(data.edge_index.t().tolist())
            graph.add_nodes_from(range(size))
            key, value = data.x.t().tolist()
            pairs = [i for i in range(size) if nothing not in (key[i], value[i])]
            assert len(pairs) == 1 or task != "needle"
            if task == "chain" or structure in ("dag", "graph"):
                assert len({key[i] for i in pairs}) == len(pairs)
            for i in range(size):
                if data.y[i] == recall.NOT_ASKED:
                    assert value[i] != nothing
                    assert data.distance[i] == -1
                    continue
                asked += 1
                assert value[i] == nothing
                heard = sorted(nx.ancestors(graph, i) & set(pairs))
                writer = [j for j in heard if key[j] == key[i]][-1]
                if task == "chain":
                    writer = [j for j in heard if key[j] == value[writer]][-1]
                assert data.y[i] == value[writer]
                steps = nx.shortest_path_length(graph, writer, i)
                assert data.distance[i] == steps
    assert asked > 10


def test_graphs_to_recall_are_fresh_or_fixed():
    args = get_args(recall)
    fresh, fixed = recall.Recall(args, 30, 2), recall.Recall(args, 30, 2, seed=1)
    assert not torch.equal(fresh[0].x, fresh[0].x)
    assert torch.equal(fixed[0].x, fixed[0].x)
    assert not torch.equal(fixed[0].x, fixed[1].x)
    with pytest.raises(IndexError):
        fixed[2]


@pytest.mark.parametrize("structure", ["path", "graph"])
def test_runs_of_recall(tmp_path, structure):
    argv = ["--smoke", "--structure", structure, "--seeds", "2"]
    names = [x for x in recall.MODELS if structure != "graph" or x != "rg-lru"]
    out = tmp_path / "run"
    results = run(recall, out, *argv, "--models", *names)
    assert list(results["rows"]) == names
    args = get_args(recall, *argv, "--out", str(out))
    for name, row in results["rows"].items():
        found = [read(out / name / f"seed-{x}")["best"] for x in (0, 1)]
        for size in (12, 16):
            values = [x[f"test_{size}_accuracy"] for x in found]
            assert row[str(size)] == pytest.approx(statistics.mean(values))
            assert row[f"{size}_std"] == pytest.approx(statistics.pstdev(values))
            tables = [x[str(size)] for x in results["by_distance"][name]]
            for table, value in zip(tables, values, strict=True):
                right = sum(share * count for _, share, count in table)
                total = sum(count for *_, count in table)
                assert right / total == pytest.approx(value)
    args.seed, data = 1, recall.get_datasets(args)
    model = recall.build_model(args, "delta")
    check_metrics(out / "delta" / "seed-1", model, recall.get_task(args), data)
    assert (out / "distances.png").stat().st_size > 0


def test_the_area_under_a_curve_does_not_depend_on_batches():
    """Nor do large logits tie."""

    def area(*batches):
        task = node_classification.get_task(2)
        for logits, labels in batches:
            out = torch.tensor([[0.0, z] for z in logits])
            mask = torch.ones(len(labels), dtype=torch.bool)
            data = Data(y=torch.tensor(labels), mask=mask)
            task.metrics["auroc"].update(*task.rows(out, data)["auroc"])
        return float(task.metrics["auroc"].compute())

    few, more = ([0.05, 0.1], [1, 1]), ([-1.0, -2.0, -1.5, 3.0], [0, 0, 0, 1])
    both = few[0] + more[0], few[1] + more[1]
    assert area(few, more) == area(both) == 1
    assert area(([20.0, 30.0, 40.0, math.inf], [0, 0, 1, 1])) == 1
