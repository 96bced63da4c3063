"""The models that the studies with one protocol compare."""

import importlib
import math

import distances
import protocol
import pytest
from common import count_parameters
from protocol import NORMS, OURS

from pyg_chimera.nn import ChimeraConv

STUDIES = {
    "distances": ("sssp", "eccentricity", "diameter"),
    "meshes": ("poisson", "convection-diffusion", "elasticity"),
    "power_grids": (),
    "rna": ("families", "degradation"),
    "roads": (),
    "water_networks": (),
}


@pytest.fixture(
    params=[(x, y) for x, tasks in STUDIES.items() for y in tasks or (None,)],
    ids=lambda pair: "-".join(filter(None, pair)),
)
def study(request):
    script, task = request.param
    if script == "water_networks":
        pytest.importorskip("wntr", reason="reads networks: the extra 'water'")
    script = importlib.import_module(script)
    return script.STUDY if task is None else script.get_study(task)


def options(study):
    """Each arm with each of its options."""
    return [(arm, option) for arm, found in study.arms.items() for option in found[1]]


@pytest.mark.parametrize(
    "study",
    [(name, tasks[0] if tasks else None) for name, tasks in STUDIES.items()],
    ids=STUDIES,
    indirect=True,
)
def test_models_have_one_size(study):
    """With one norm, and the first task of each study; those of others have few inputs
    or outputs more or less.
    """

    def size(*kind):
        sizes = study.sizes(*kind, 64)
        return count_parameters(study.build(NORMS[0], *kind, *sizes))

    ours, *others = options(study)
    assert ours == (OURS, 0 if study.arms[OURS][0] == "log_sums" else 3)
    target = size(*ours)
    for kind in others:
        assert size(*kind) == pytest.approx(target, rel=0.02), kind


def test_which_layers_mix(study):
    """All three, or every third of six."""
    for option in study.arms[OURS][1]:
        model = study.build(NORMS[0], OURS, option, 16, 16)
        mixes = [isinstance(x.mixer, ChimeraConv) for x in model.layers]
        assert mixes == (2 * [False, False, True] if option == 6 else 3 * [True])


def test_models_have_one_norm(study):
    """But for those of encodings, mixers, and layers that are no blocks."""
    own = {"mlp", "meshgraphnets", "gru"}
    for arm, option in options(study):
        models = [study.build(norm, arm, option, 16, 16) for norm in NORMS]
        assert len(set(map(count_parameters, models))) == 1, arm
        for model, name in zip(models, ("LayerNorm", "GraphBatchNorm"), strict=True):
            model.encodings = None
            kinds = {type(x).__name__ for x in model.modules()}
            norms = {x for x in kinds if x.endswith("Norm")} - {"Norm", "RMSNorm"}
            assert norms - ({"LayerNorm"} if arm in own else set()) <= {name}, arm
            assert name in norms, arm


def smoke(out, *more):
    argv = ["--smoke", "--arms", "mlp", "gat", "--out", str(out), *more]
    return distances.get_args(argv)


def test_a_search_is_a_fifth_of_training(monkeypatch):
    monkeypatch.setattr(protocol, "read", lambda *_: {"best": {"val_mae": 1.0}})
    args = distances.get_args(["--epochs", "10", "--out", "unused"])
    plan = dict(distances.get_study("sssp").plan(args, ["gat"], True))
    epochs = [changes.get("epochs", 10) for changes in plan.values()]
    assert epochs == [2] * 4 + [10] * 3 + [60]
    args = distances.get_args(["--out", "unused"])
    plan = dict(distances.get_study("sssp").plan(args, ["gat"], True))
    minutes = [changes.get("minutes", 10) for changes in plan.values()]
    assert minutes == [2] * 4 + [10] * 3 + [60]


def test_rates_are_not_given(capsys):
    with pytest.raises(SystemExit):
        smoke("unused", "--lr", "0.5")
    assert "--lr is of no use here" in capsys.readouterr().err


def test_a_run_that_diverges_is_a_result(monkeypatch, tmp_path):
    """Whether the loss shows it first, or gradients."""
    real, study = protocol.fit, distances.get_study("sssp")

    def fit(own, model, *rest):
        if own.out.name == "seed-0":
            first = next(model.parameters())
            if own.arm == "mlp":
                first.data.fill_(float("nan"))
            else:
                first.register_hook(lambda grad: grad * float("nan"))
        return real(own, model, *rest)

    monkeypatch.setattr(protocol, "fit", fit)
    rows = study.run(smoke(tmp_path / "run"))["rows"]
    for arm in ("mlp", "gat"):
        assert math.isnan(rows[arm]["val_mae"])
        assert math.isnan(rows[arm]["val_mae_std"])
    found = protocol.read(tmp_path / "run", "gat/seed-0")
    assert "a gradient is not finite in epoch 1" in found["problem"]


def test_a_table_is_kept_when_a_run_that_goes_on_is_stopped(tmp_path):
    study = distances.get_study("sssp")
    out = tmp_path / "run"
    rows = study.run(
        distances.get_args(["--smoke", "--arms", "mlp", "--out", str(out)])
    )
    more = ["--resume", "--arms", "gat", "--time-limit", "0.00001"]
    stopped = study.run(distances.get_args(["--smoke", *more, "--out", str(out)]))
    assert stopped["stopped_by"] == "time limit"
    assert stopped["rows"] == rows["rows"]
    assert "mlp" in stopped["rows"]
    more = ["--resume", "--arms", "gat"]
    ended = study.run(distances.get_args(["--smoke", *more, "--out", str(out)]))
    assert {"mlp", "gat"} < {*ended["rows"]}
    assert ended["rows"]["mlp"] == rows["rows"]["mlp"]
