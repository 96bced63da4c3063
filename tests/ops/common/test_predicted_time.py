import json
import warnings
from pathlib import Path

import pytest
import torch

from pyg_chimera.nn import ChimeraConv, GPSLayer, GraphMambaConv
from pyg_chimera.ops import Choice, explain, resolvent_mix, warn_above
from pyg_chimera.ops.common import predicted_time

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def limit_as_it_was():
    yield
    warn_above(60)


def inputs(num_nodes=30):
    node = torch.arange(num_nodes)
    edges = torch.stack([node, node.roll(1)])
    x = torch.randn(num_nodes, 1, 4)
    return x, x, x, edges, torch.full((num_nodes, 1), 0.5)


def test_a_long_call_warns_once_with_what_to_do():
    warn_above(0)
    with pytest.warns(
        UserWarning, match=r"operations.*(?s:.)*takes long\. Fewer state"
    ):
        resolvent_mix(*inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolvent_mix(*inputs(31))
        warn_above(float("inf"))
        resolvent_mix(*inputs(), solver="dense")
        explain("resolvent_mix", *inputs())


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_limits_that_make_no_sense(bad):
    with pytest.raises(ValueError, match="'seconds' must be 0 or more"):
        warn_above(bad)


def test_costs_are_of_this_machine(monkeypatch):
    slow = explain("resolvent_mix", *inputs())
    monkeypatch.setattr(predicted_time, "_slowness", lambda _: 1e3)
    fast = explain("resolvent_mix", *inputs())
    assert fast.cost.seconds > 10 * slow.cost.seconds
    assert fast.cost.operations == slow.cost.operations > 0
    assert all(x.cost.seconds > 0 for x in fast.alternatives)
    assert f"{fast.solver}, {fast.form}, {fast.backend}" in str(fast)
    assert "instead: " in str(fast)


def test_a_busy_machine_is_not_slower(monkeypatch):
    """What counts is the time on the processor, not that of waiting for it; and not
    that of the first products, which load code.
    """
    needed, waited = iter([9.0, 7.0, 5.0, 4.0, 3.0] + 20 * [2.0]), iter(range(100))
    now = 0.0

    def thread_time():
        nonlocal now
        now += next(needed) / 2
        return now

    predicted_time._slowness.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(predicted_time.time, "thread_time", thread_time)
        patch.setattr(predicted_time.time, "perf_counter", lambda: 1e3 * next(waited))
        found = predicted_time._slowness(1)
    predicted_time._slowness.cache_clear()
    if predicted_time.time.get_clock_info("thread_time").resolution < 1e-5:
        assert found == pytest.approx(50 * 1e9 / 512**3)


def test_costs_say_what_they_include():
    """Both passes, the output and gradients, and what any call takes."""
    x, edges = torch.randn(5000, 64), torch.arange(4999)
    edges = torch.stack([edges, edges + 1])
    (choice,) = explain(ChimeraConv(64, 64, heads=4, state_channels=64), x, edges)
    for shown in str(choice).splitlines()[::2]:
        assert "(forward and backward: " in shown
    assert choice.cost.memory > 7 * x.nbytes  # query, key, value and output, twice
    tiny = explain("resolvent_mix", *inputs(3)).cost
    assert tiny.seconds > 1e-4


def test_predicted_times_are_those_that_were_measured():
    """Memory below a MiB is mostly what was free before."""
    path = ROOT / "benchmarks" / "results" / "predictions-cpu.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["predictions"]
    assert len(rows) >= 5
    for row in rows:
        few = row["measured"]["mebibytes"] < 1
        for what in ("seconds",) if few else ("seconds", "mebibytes"):
            ratio = row["predicted"][what] / row["measured"][what]
            assert 0.5 <= ratio <= 2, (row["name"], what)


def test_larger_calls_cost_more():
    small, large = (explain("resolvent_mix", *inputs(n)).cost for n in (20, 2000))
    assert large.operations > 10 * small.operations
    assert large.seconds > small.seconds
    assert large.memory > small.memory


def test_layers_are_explained_and_left_alone():
    x, edges = torch.randn(30, 8), inputs()[3]
    conv = ChimeraConv(-1, 8, heads=2)
    (choice,) = explain(conv, x, edges)
    assert isinstance(choice, Choice)
    assert choice.operator == "resolvent_mix"
    assert any(map(torch.nn.parameter.is_lazy, conv.parameters()))

    layer = GPSLayer(
        8,
        ChimeraConv(8, 8, heads=2),
        GraphMambaConv(8, state_channels=8),
        norm="batch_norm",
    )
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    generator = torch.get_rng_state()
    found = [choice.operator for choice in explain(layer, x, edges)]
    assert found[0] == "resolvent_mix"
    assert "selective_scan" in found
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_cannot_be_explained_or_is_no_limit():
    with pytest.raises(TypeError, match="not its class: make a ChimeraConv first"):
        explain(ChimeraConv, torch.randn(30, 8), inputs()[3])
    with pytest.raises(TypeError, match="'seconds' must be a number, got None"):
        warn_above(None)


@pytest.mark.parametrize("form", ["state", "chunk"])
def test_forms_of_scans_have_costs(form):
    node = torch.arange(3000)
    edges = torch.stack([node[:-1], node[1:]])
    x, weight = torch.randn(3000, 2, 16), torch.rand(2999, 2)
    choice = explain("dag_scan", x, x, x, edges, weight)
    assert (choice.form, choice.solver) == ("chunk", "scan")
    by_form = {x.form: x.cost for x in (choice, *choice.alternatives)}
    assert choice.cost.seconds == min(x.seconds for x in by_form.values())
    asked = explain("dag_scan", x, x, x, edges, weight, form=form)
    assert asked.alternatives == ()
    assert asked.cost.operations == by_form[form].operations > 0
    assert explain("dag_scan", x, x, x, edges, weight, backend="torch").cost is None
