"""The molecules, graphs and models of the comparison on RNA."""

import gzip
import json
from functools import partial

import common
import numpy as np
import pytest
import rna as compared
import torch
from protocol import NORMS
from torch_geometric.data import Batch, Data


@pytest.fixture
def call(smoke):
    """Runs the comparison on few molecules that it makes."""

    def run(args):
        return compared.get_study(args.task).run(args)

    return partial(smoke, compared.get_args, run)


# Structures ----------------------------------------------------------------------


def draw_structure(rng, size):
    """Pairs that do not cross, with other brackets and dots between them."""
    if size < 2 or rng.random() < 0.3:
        return "".join(rng.choice(list("..[]{}<>"), size))
    inside = int(rng.integers(size - 1))
    rest = draw_structure(rng, size - 2 - inside)
    return f"({draw_structure(rng, inside)}){rest}"


def recursive_partners(structure):
    """By the first bracket, the one that closes it, and both sides of this."""
    pairs = {}

    def visit(begin, end):
        if begin >= end:
            return
        if structure[begin] != "(":
            visit(begin + 1, end)
            return
        depth = np.cumsum([(x == "(") - (x == ")") for x in structure[begin:end]])
        close = begin + int(np.argmin(depth > 0))
        pairs[begin], pairs[close] = close, begin
        visit(begin + 1, close)
        visit(close + 1, end)

    visit(0, len(structure))
    return [pairs.get(i, i) for i in range(len(structure))]


@pytest.mark.parametrize("seed", range(20))
def test_partners_are_those_of_a_recursive_parser(seed):
    structure = draw_structure(np.random.default_rng(seed), 5 * seed)
    assert compared.find_partners(structure) == recursive_partners(structure)


def test_partners_by_hand():
    assert compared.find_partners("((.[)](.))") == [9, 4, 2, 3, 1, 5, 8, 7, 6, 0]


@pytest.mark.parametrize(("structure", "place"), [("(.))", 3), ("(.(.)", 0)])
def test_brackets_without_partner_are_refused(structure, place):
    with pytest.raises(ValueError, match=f"'structure' .* at {place}: "):
        compared.find_partners(structure)


def test_letters_of_several_bases_have_shares():
    found = compared.encode_bases("AcTURN")
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    expected += [[0.5, 0, 0.5, 0], [0.25] * 4]
    assert torch.equal(found, torch.tensor(expected))
    with pytest.raises(ValueError, match=r"'sequence' .* got '-'"):
        compared.encode_bases("AC-")


# Graphs --------------------------------------------------------------------------


def test_a_graph_by_hand():
    """Of four bases, the outer ones a pair."""
    data = compared.get_graph(compared.Molecule("GANC", "(..)", 7))
    share = 0.25
    assert data.x.tolist() == [
        [0, 0, 1, 0, 1],
        [1, 0, 0, 0, 0],
        [share, share, share, share, 0],
        [0, 1, 0, 0, 1],
    ]
    edges = zip(data.edge_index.t().tolist(), data.edge_attr.tolist(), strict=True)
    forward, back, pair = [1, 0, 0], [0, 1, 0], [0, 0, 1]
    assert sorted(edges) == [
        ([0, 1], forward),
        ([0, 3], pair),
        ([1, 0], back),
        ([1, 2], forward),
        ([2, 1], back),
        ([2, 3], forward),
        ([3, 0], pair),
        ([3, 2], back),
    ]
    assert data.partner_index.tolist() == [3, 1, 2, 0]
    assert data.y.tolist() == [7]


def test_bases_without_a_value_are_not_scored():
    values = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    molecule = compared.Molecule("GACC", "(..)", values, "SHHS")
    data = compared.get_graph(molecule)
    assert data.x[:, 4:].tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert data.y.tolist() == values
    assert data.scored.tolist() == [True, True, False, False]
    batch = Batch.from_data_list([data, data])
    assert batch.partner_index.tolist() == [3, 1, 2, 0, 7, 5, 6, 4]
    assert batch.x[batch.scored].shape[0] == batch.y.shape[0] == 4


def test_lengths_must_fit():
    with pytest.raises(ValueError, match="equally long, got 3 and 4"):
        compared.get_graph(compared.Molecule("GAC", "(..)", 0))


@pytest.mark.parametrize("task", compared.TASKS)
def test_molecules_that_are_drawn(task):
    rng = np.random.default_rng(0)
    molecules = [compared.draw_molecule(task, rng) for _ in range(20)]
    shape = compared.TASKS[task]
    for molecule in molecules:
        data = compared.get_graph(molecule)
        assert data.x.shape == (len(molecule.sequence), shape.in_channels)
        paired = data.partner_index != torch.arange(data.num_nodes)
        base, other = data.x[:, :4], data.x[data.partner_index, :4].flip(1)
        assert torch.equal(base[paired], other[paired])  # A and U, C and G
        if task == "families":
            ends = molecule.structure.replace(".", "").count(")(")
            assert data.y.item() == ends
        else:
            assert data.y[paired[data.scored]].mean() < 0.1
            assert data.y[~paired[data.scored]].mean() > 0.5
    if task == "families":
        assert {molecule.target for molecule in molecules} == {0, 1, 2, 3}


# Files ---------------------------------------------------------------------------


def write(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(f"{row}\n" for row in rows)


def test_families_are_read(tmp_path):
    write(tmp_path / "nrc_train.tsv.gz", ["tRNA\tGAC\t(.)", "IRES\tGCC\t..."])
    write(tmp_path / "nrc_val.tsv.gz", ["IRES\tGAA\t..."])
    write(tmp_path / "nrc_test_13_classes.tsv.gz", ["tRNA\tGAC\t(.)", "tRNA\tU\t."])
    found = compared.read_families(tmp_path)
    assert found["train"][0] == compared.Molecule("GAC", "(.)", 12)
    assert [len(x) for x in found.values()] == [2, 1, 2, 1]
    assert [x.sequence for x in found["unseen"]] == ["U"]


def test_degradation_is_read(tmp_path):
    def row(size, **kwargs):
        values = dict.fromkeys(compared.CONDITIONS, [0.5, 1.5] + [None] * (size - 2))
        strings = {"sequence": "A" * size, "structure": "." * size}
        return json.dumps(strings | {"loop_type": "E" * size} | values | kwargs)

    train = [row(107, sn_filter=x, fold=y) for x, y in ((1, 0), (1, 3), (0, 0), (0, 4))]
    test = [row(107, test_filter=0), row(130, test_filter=0), row(130, test_filter=1)]
    write(tmp_path / "openvaccine_train.jsonl.gz", train)
    write(tmp_path / "openvaccine_test.jsonl.gz", test)
    found = compared.read_degradation(tmp_path)
    sizes = {"train": 1, "val": 1, "short": 1, "long": 2, "filtered": 1}
    assert {name: len(molecules) for name, molecules in found.items()} == sizes
    molecule = found["filtered"][0]
    assert molecule.target == [(0.5, 0.5, 0.5), (1.5, 1.5, 1.5)]
    assert molecule.loops == "E" * 130


def test_real_files(shared_data):
    root = shared_data / "rna"
    found = compared.read_families(root)
    assert [len(x) for x in found.values()] == [5670, 650, 2600, 2253]
    for molecules in found.values():
        assert {x.target for x in molecules} == set(range(13))
        for molecule in molecules[::50]:
            assert compared.get_graph(molecule).num_nodes == len(molecule.sequence)
    found = compared.read_degradation(root)
    assert [len(x) for x in found.values()] == [1263, 324, 629, 3005, 1172]
    for name, molecules in found.items():
        sizes = {(len(x.sequence), len(x.target)) for x in molecules}
        assert sizes == {(130, 91) if name in ("long", "filtered") else (107, 68)}
        data = compared.get_graph(molecules[0])
        assert torch.equal(data.x[:, 4], data.x[:, -1])  # stems


# Metrics -------------------------------------------------------------------------


def test_the_error_is_that_of_all_scored_bases():
    """Not a mean over molecules or batches, by NumPy."""
    torch.manual_seed(0)
    task = compared.get_task("degradation")
    parts = []
    for sizes in ((3, 5), (4,)):
        graphs = [
            Data(
                x=torch.zeros(n + 2, 1),
                y=torch.randn(n, 3),
                scored=torch.arange(n + 2) < n,
            )
            for n in sizes
        ]
        batch = Batch.from_data_list(graphs)
        out = torch.randn(batch.num_nodes, 3)
        task.metrics["mcrmse"].update(*task.rows(out, batch)["mcrmse"])
        rows = np.concatenate(
            [out[batch.ptr[i] :][:n].numpy() for i, n in enumerate(sizes)]
        )
        parts.append(np.square(rows - batch.y.numpy()))
        expected = np.sqrt(parts[-1].mean(axis=0)).mean()
        assert task.loss(out, batch).item() == pytest.approx(expected, rel=1e-5)
    expected = np.sqrt(np.concatenate(parts).mean(axis=0)).mean()
    found = task.metrics["mcrmse"].compute().item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_accuracy_counts_molecules_and_f1_families():
    task = compared.get_task("families")
    batch = Batch.from_data_list([Data(y=torch.tensor([y])) for y in (0, 0, 0, 1)])
    out = torch.eye(13)[[0, 0, 2, 1]]
    for name, row in task.rows(out, batch).items():
        task.metrics[name].update(*row)
    assert task.metrics["accuracy"].compute() == 0.75
    # Of families 0, 1 and 2; the others are neither true nor predicted.
    assert task.metrics["f1"].compute().item() == pytest.approx((0.8 + 1 + 0) / 3)


def test_means_of_bases_that_are_alike():
    def graphs(values, loops):
        values = np.repeat(np.array(values)[:, None], 3, axis=1)
        return [compared.get_graph(compared.Molecule("AAA", "...", values, loops))]

    train = compared.DrawnGraphs(graphs([1.0, 3.0, 8.0], "EEH"), 1)
    data = {"train": train, "val": graphs([2.0, 8.0], "EHH")}
    rows = compared.untrained("degradation", data)
    assert rows["base-and-loop"]["val_mcrmse"] == 0
    assert rows["mean"]["val_mcrmse"] == pytest.approx((4 + 16) ** 0.5 / 2**0.5)
    assert compared.untrained("families", data) == {}


# Models --------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("arm", ["gru", "transformer"])
def test_sequence_models_read_the_fold_and_not_other_molecules(arm, norm):
    structures = ("((...)).", "(.).(.)(...)")
    molecules = [
        compared.Molecule("ACGU" * 3, x + "." * (12 - len(x)), 0) for x in structures
    ]
    molecules[0] = molecules[0]._replace(sequence="ACGUACGU", structure=structures[0])
    study, option = compared.get_study("families"), compared.ARMS[arm][1][0]
    model = study.build(norm, arm, option, 16, 16).eval()
    first, second = map(compared.get_graph, molecules)
    batch = Batch.from_data_list([first, second])
    with torch.no_grad():
        together = model(**model.inputs(batch))
        alone = [model(**model.inputs(x))[0] for x in (first, second)]
        assert torch.allclose(together, torch.stack(alone), atol=1e-5)
        # The same bases are paired, in another way.
        second.partner_index = second.partner_index.roll(1)
        assert not torch.allclose(model(**model.inputs(second))[0], alone[1], atol=1e-5)


def test_a_gru_is_that_of_bases_and_partners():
    torch.manual_seed(0)
    layer, x = compared.FoldGRU(4, 3), torch.randn(5, 4)
    partner = torch.tensor([4, 1, 2, 3, 0])
    h = layer.norm(x)
    h, _ = layer.gru(torch.cat([h, h[partner]], dim=1)[None])
    found = layer(x, torch.empty(2, 0).long(), partner)
    assert torch.allclose(found, x + layer.lin(h[0]), atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("arm", compared.ARMS)
def test_all_arms_have_the_dropout(arm, dropout):
    build, option = compared.get_study("families", dropout).build, compared.ARMS[arm][1]
    model = build(NORMS[0], arm, option[0], 16, 16)
    graph = compared.get_graph(compared.Molecule("ACGU" * 3, "." * 12, 0))
    inputs = model.inputs(compared.PREPARE(graph))
    same = torch.equal(model(**inputs), model(**inputs))
    assert same == (dropout == 0)


# Runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("task", compared.TASKS)
def test_arms_are_trained_and_tested(task, call, tmp_path):
    rows = call("--task", task, "--arms", "chimera", "gru")["rows"]
    given = [] if task == "families" else list(compared.UNTRAINED)
    assert list(rows) == [*given, "chimera", "gru"]
    metrics = compared.get_task(task).metrics
    keys = {f"{x}_{y}" for x in ("val", *compared.TASKS[task].tests) for y in metrics}
    for row in rows.values():
        assert keys <= set(row)
        assert all(row[key] >= 0 for key in keys)
    search = tmp_path / "out" / "gru" / "search-depth-1-lr-0.001" / "results.json"
    found = json.loads(search.read_text())
    assert not any(f"{compared.TASKS[task].tests[0]}_" in key for key in found["best"])
    assert found["config"]["task"] == task


def test_missing_files_are_named(tmp_path, refused):
    argv = ["--root", str(tmp_path), "--out", str(tmp_path / "out")]
    args = compared.get_args([*argv, "--device", "cpu"])
    line = refused(common.main, compared.get_study("families").run, args)
    assert "nrc_train.tsv.gz" in line


def test_each_task_has_its_folder():
    for task in compared.TASKS:
        args = compared.get_args(["--task", task])
        assert args.out.parts == ("runs", "rna", task, "default")


@pytest.mark.parametrize("share", ["1", "2", "-0.1", "nan"])
def test_dropout_is_a_share(share, capsys):
    with pytest.raises(SystemExit):
        compared.get_args(["--smoke", "--dropout", share])
    assert "--dropout: must be a number from 0 to below 1" in capsys.readouterr().err
