"""Road networks: which junctions are asked, and how they are measured."""

import pytest
import roads as compared
import torch
from torch_geometric.data import Batch


@pytest.fixture
def data():
    args = compared.get_args(["--smoke", "--out", "unused"])
    return compared.get_datasets(args)


def test_each_junction_is_asked_in_one_set(data):
    sets = [data["train"].graphs, data["val"], data["test"]]
    asked = torch.stack([graphs[0].asked for graphs in sets])
    assert (asked.sum(0) == 1).all()
    assert (asked.sum(1) > 0).all()
    same = [graphs[0].y.equal(data["val"][0].y) for graphs in sets]
    assert all(same)
    assert len(data["train"]) == 2  # steps


def test_others_are_not_measured(data):
    """Neither by the accuracy nor by the loss."""
    batch, task = Batch.from_data_list(data["test"]), compared.get_task()
    right = 30 * torch.nn.functional.one_hot(batch.y, compared.CLASSES).float()
    wrong = right.roll(1, dims=1)
    for asked, others, accuracy in ((right, wrong, 1), (wrong, right, 0)):
        metric = compared.get_task().metrics["accuracy"]
        here = torch.where(batch.asked[:, None], asked, others)
        metric.update(*task.rows(here, batch)["accuracy"])
        assert metric.compute() == accuracy
        assert (task.loss(here, batch) < 1e-3) == accuracy


def test_the_most_frequent_class_in_training(data):
    row = compared.untrained(data)["most frequent"]
    assert list(row) == ["val_accuracy", "test_accuracy"]
    train, test = data["train"].graphs[0], data["test"][0]
    most = train.y[train.asked].bincount().argmax()
    expected = (test.y[test.asked] == most).float().mean()
    assert row["test_accuracy"] == pytest.approx(expected.item())


@pytest.mark.parametrize("arm", compared.SHARED_ARMS)
def test_all_models_have_dropout(data, arm):
    option = compared.SHARED_ARMS[arm][1][0]
    model = compared.build_model("layer_norm", arm, option, 16, 16)
    inputs = model.inputs(Batch.from_data_list(data["test"]))
    model.eval()
    for training in (False, True):
        model.layers.train(training)
        assert model(**inputs).equal(model(**inputs)) != training


@pytest.mark.parametrize("city", compared.CITIES)
def test_real_cities(shared_data, tmp_path, city):
    (tmp_path / "raw").symlink_to(shared_data / "city-networks")
    args = compared.get_args(["--root", str(tmp_path), "--city", city])
    data = compared.get_datasets(args)
    train, (val,), (test,) = data["train"].graphs, data["val"], data["test"]
    assert (val.num_features, val.num_edge_features) == compared.SIZES
    shares = [float(x.asked.float().mean()) for x in (*train, val, test)]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=1e-3)
