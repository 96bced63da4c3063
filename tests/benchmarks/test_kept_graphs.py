import long_range_data
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


def test_graphs_are_made_once(tmp_path):
    def make(number, name):
        made.append(name)
        edges = torch.tensor([[0, 1], [1, 0]])
        return [Data(x=torch.full((2, 1), i), edge_index=edges) for i in range(number)]

    made = []
    for _ in range(2):
        kept = long_range_data.Kept(tmp_path / "new", make, 3, "a")
        assert [int(data.x[0]) for data in kept] == [0, 1, 2]
        assert kept.x.shape == (6, 1)
    (batch,) = DataLoader(kept, 3)
    assert int(batch.edge_index.max()) == 5
    assert len(long_range_data.Kept(tmp_path / "new", make, 2, "a")) == 2
    assert len(long_range_data.Kept(tmp_path / "new", make, 3, "b")) == 3
    assert made == ["a", "a", "b"]
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_nothing_is_kept_of_what_fails(tmp_path):
    def make():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        long_range_data.Kept(tmp_path, make)
    assert not list(tmp_path.iterdir())
