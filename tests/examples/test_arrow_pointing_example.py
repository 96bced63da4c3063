import json
from dataclasses import replace
from pathlib import Path

import arrow_pointing
import pytest
import torch
import vision
from engine import count_parameters
from torch_geometric.data import Batch

SMOKE = arrow_pointing.PRESETS["smoke"]


def run(*args: str) -> dict:
    return arrow_pointing.run(arrow_pointing.parse([*args, "--device", "cpu"]))


def a_batch(split: str = "test", size: int = 4) -> Batch:
    dataset = arrow_pointing.get_dataset(SMOKE, split)
    return Batch.from_data_list(list(dataset[:size]))


# Recipes ----------------------------------------------------------------------------


def test_the_preset_of_the_paper():
    recipe = arrow_pointing.get_recipe("paper")
    assert (recipe.image_size, recipe.larger_size, recipe.patch_size) == (192, 384, 16)
    assert (recipe.channels, recipe.num_layers, recipe.heads) == (192, 12, 3)
    assert (recipe.epochs, recipe.batch_size, recipe.warmup_epochs) == (50, 128, 1)
    assert (recipe.num_train, recipe.num_val) == (100_000, 5120)
    assert recipe.lr == 1e-4
    assert arrow_pointing.get_recipe("paper", "vit").lr == 3e-4
    model = arrow_pointing.get_model(recipe, "plstm")
    assert 5e6 < count_parameters(model) < 7e6  # "6M"
    assert [layer.mixer.mode for layer in model.layers[:-1]] == ["P", "D"] * 6


@pytest.mark.parametrize("preset", arrow_pointing.PRESETS)
def test_presets_are_consistent(preset):
    recipe = arrow_pointing.get_recipe(preset)
    for size in (recipe.image_size, recipe.larger_size):
        assert size % recipe.patch_size == 0
    assert recipe.larger_size == 2 * recipe.image_size
    small = replace(recipe, num_train=2, num_val=2, num_test=2)
    for split, size in (("val", recipe.image_size), ("larger", recipe.larger_size)):
        dataset = arrow_pointing.get_dataset(small, split)
        data = dataset[0]
        assert (data.height, data.width) == (size // recipe.patch_size,) * 2
        assert data.x.shape == (data.height**2, recipe.patch_size**2)
        assert dataset.circle[:, 2].max() <= recipe.radius[1]


@pytest.mark.parametrize("preset", arrow_pointing.PRESETS)
@pytest.mark.parametrize("mode", vision.MODES)
def test_the_vit_has_the_size_of_plstm(preset, mode):
    recipe = arrow_pointing.get_recipe(preset)
    plstm, vit = (
        count_parameters(arrow_pointing.get_model(recipe, name, mode))
        for name in vision.MODELS
    )
    assert vit == pytest.approx(plstm, rel=0.02)


@pytest.mark.parametrize("mode", ["PD", "P", "D"])
def test_modes_take_turns(mode):
    recipe = replace(SMOKE, num_layers=3)
    model = arrow_pointing.get_model(recipe, "plstm", mode)
    found = "".join(layer.mixer.mode for layer in model.layers[:-1])
    assert found == {"PD": "PDP", "P": "PPP", "D": "DDD"}[mode]


def test_larger_images_are_other_ones():
    test, larger = (arrow_pointing.get_dataset(SMOKE, s) for s in ("test", "larger"))
    assert (test.image_size, larger.image_size) == (24, 48)
    assert len(test) == len(larger) == SMOKE.num_test
    assert not (test.arrow == larger.arrow).any()


# Models -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", vision.MODELS)
def test_a_prediction_is_that_of_the_image_alone(name):
    model = arrow_pointing.get_model(SMOKE, name).eval()
    for split in ("test", "larger"):
        batch = a_batch(split)
        out = model(**model.inputs(batch))
        assert out.shape == (4, 1)
        alone = [model(**model.inputs(data)) for data in batch.to_data_list()]
        assert torch.allclose(out, torch.cat(alone), atol=1e-5)
        assert out.std() > 0


@pytest.mark.parametrize("name", vision.MODELS)
def test_all_parameters_learn(name):
    model = arrow_pointing.get_model(SMOKE, name)
    batch = a_batch()
    arrow_pointing.TASK.loss(model(**model.inputs(batch)), batch).backward()
    idle = [k for k, p in model.named_parameters() if p.grad is None]
    assert idle == []


def test_images_of_different_sizes_are_refused():
    model = arrow_pointing.get_model(SMOKE, "vit")
    batch = Batch.from_data_list([a_batch("test", 1)[0], a_batch("larger", 1)[0]])
    with pytest.raises(ValueError, match=r"same size \(got heights \[4, 8\]"):
        model(**model.inputs(batch))


def test_positions_are_interpolated():
    position = vision.PositionEmbedding(2, 3)
    x, edge_index = torch.zeros(18, 2), torch.empty(2, 0, dtype=torch.long)
    sides = torch.tensor([3, 3])
    out = position(x, edge_index, sides, sides)
    for part in out.view(2, 9, 2):
        assert torch.equal(part.t().reshape(1, 2, 3, 3), position.weight)
    # At twice the size each vector lies where it did, amid four new patches.
    with torch.no_grad():
        position.weight[0, 0] = torch.arange(3.0)[:, None]  # the row
        position.weight[0, 1] = torch.arange(3.0)  # the column
    row, column = position(torch.zeros(36, 2), edge_index, 6, 6).view(6, 6, 2).unbind(2)
    assert torch.allclose(row, column.t())
    assert torch.allclose(row[:, :1].expand(6, 6), row)
    assert torch.allclose(row[2:4, 0], torch.tensor([0.75, 1.25]), atol=0.1)
    assert (row[:, 0].diff()[1:-1] > 0.4).all()


def test_attention_by_hand():
    attention = vision.SelfAttention(4, 2)
    x = torch.randn(6, 4)
    out = attention(x, torch.tensor([1, 1]), torch.tensor([3, 3]))
    q, k, v = attention.lin_in(x).split(4, dim=1)
    for image in (slice(0, 3), slice(3, 6)):
        parts = []
        for head in (slice(0, 2), slice(2, 4)):
            score = q[image, head] @ k[image, head].t() / 2**0.5
            parts.append(score.softmax(-1) @ v[image, head])
        expected = attention.lin_out(torch.cat(parts, dim=1))
        assert torch.allclose(out[image], expected, atol=1e-6)


def test_the_mean_of_corner_patches():
    corners = vision.CornerPatches(4)
    x, edge_index = torch.randn(2 * 6, 4), torch.empty(2, 0, dtype=torch.long)
    out = corners(x, edge_index, torch.tensor([2, 2]), torch.tensor([3, 3]))
    normal = corners.norm(x).view(2, 6, 4)
    expected = normal[:, [0, 2, 3, 5]].mean(1)
    assert torch.allclose(out.view(2, 6, 4).mean(1), expected, atol=1e-6)
    single = corners(x[:1], edge_index, 1, 1)
    assert torch.allclose(single, corners.norm(x[:1]))


# Runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", vision.MODELS)
def test_a_run_tests_both_sizes(tmp_path, name, capsys):
    summary = run("--smoke", "--model", name, "--out", str(tmp_path))
    assert summary["epochs_done"] == 2
    assert summary["config"]["model"] == name
    test = summary["best"]["test"]
    metrics = {"loss", "accuracy", "loss_larger", "accuracy_larger"}
    assert set(test) == metrics
    assert "at 24 x 24, " in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.json").read_text())["best"]["test"] == test

    # Both are those of the best weights.
    model = arrow_pointing.get_model(SMOKE, name).eval()
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    model.load_state_dict(best["model"])
    for split, suffix in (("test", ""), ("larger", "_larger")):
        batch = a_batch(split, SMOKE.num_test)
        with torch.no_grad():
            right = (model(**model.inputs(batch)).view(-1) > 0) == batch.y.bool()
        assert test[f"accuracy{suffix}"] == pytest.approx(float(right.float().mean()))


def test_resume(tmp_path):
    one, two = (("--smoke", "--out", str(tmp_path / name)) for name in "ab")
    run(*one)
    assert run(*two, "--time-limit", "0")["epochs_done"] == 0
    run(*two, "--resume")
    states = [
        torch.load(tmp_path / name / "last.pt", weights_only=True) for name in "ab"
    ]
    for key, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][key]), key


def test_an_interrupted_model_is_not_resumed_as_another(tmp_path):
    args = ("--smoke", "--out", str(tmp_path))
    run(*args, "--time-limit", "0")
    with pytest.raises(SystemExit, match="mode: 'PD' then, 'P' now"):
        run(*args, "--resume", "--mode", "P")


def test_samples_are_drawn(tmp_path):
    path = tmp_path / "new" / "samples.png"
    assert arrow_pointing.main(["--samples", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 150_000
    assert [p.name for p in path.parent.iterdir()] == ["samples.png"]


def test_the_default_is_the_demo():
    args = arrow_pointing.parse(["--seed", "7"])
    assert (args.preset, args.model, args.mode) == ("demo", "plstm", "PD")
    assert args.out == Path("runs/arrow-pointing/plstm-demo-seed7")
    args = arrow_pointing.parse(["--mode", "D", "--preset", "paper"])
    assert args.out == Path("runs/arrow-pointing/plstm-D-paper-seed0")


@pytest.mark.parametrize(
    "args",
    [
        ["--preset", "none"],
        ["--smoke", "--preset", "demo"],
        ["--resume", "--overwrite"],
        ["--model", "cnn"],
        ["--mode", "DP"],
        ["--model", "vit", "--mode", "P"],
    ],
)
def test_command_lines_that_make_no_sense(args, capsys):
    with pytest.raises(SystemExit):
        arrow_pointing.parse(args)
    assert "error" in capsys.readouterr().err
