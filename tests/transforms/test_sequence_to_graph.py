import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from pyg_chimera.transforms import SequenceToGraph


def test_small_sequence():
    out = SequenceToGraph()([5, 3, 5])
    assert set(out.keys()) == {"x", "edge_index", "pos", "height", "width"}
    assert out.x.tolist() == [5, 3, 5]
    assert out.x.dtype == torch.long
    assert out.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert out.pos.tolist() == [[0], [1], [2]]
    assert (out.height, out.width, out.num_nodes) == (1, 3, 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (4, 2), (1,), (1, 3)])
def test_numbers_of_all_kinds(dtype, shape):
    x = torch.randint(9, shape).to(dtype)
    for sequence in (x, x.numpy(), x.tolist()):
        out = SequenceToGraph()(sequence)
        assert torch.equal(out.x.double(), x.double())
        assert out.edge_index.shape == (2, 2 * (len(x) - 1))
        assert out.edge_index.dtype == torch.long
    kept = dtype if len(shape) == 2 or dtype.is_floating_point else torch.long
    assert SequenceToGraph()(x).x.dtype == kept


def test_the_sequence_is_not_shared():
    x = torch.zeros(3)
    out = SequenceToGraph()(x)
    out.x += 1
    assert x.tolist() == [0, 0, 0]


@given(st.text("abcß", min_size=1, max_size=9))
def test_characters_and_bytes(text):
    out = SequenceToGraph("abcß")(text)
    assert "".join("abcß"[i] for i in out.x) == text
    words = SequenceToGraph(["ab", "c"])(["c", "ab"])
    assert words.x.tolist() == [1, 0]
    out = SequenceToGraph()(text.encode())
    assert bytes(out.x.tolist()).decode() == text


def test_other_attributes_stay():
    before = Data(sequence=[1, 2], y=torch.tensor([3]), edge_attr=torch.ones(5, 1))
    out = SequenceToGraph()(before)
    assert set(out.keys()) == {"x", "edge_index", "pos", "height", "width", "y"}
    assert "sequence" in before
    assert SequenceToGraph(attr_name="tokens")(Data(tokens=[1])).x.tolist() == [1]


@pytest.mark.parametrize(
    ("vocabulary", "sequence", "error", "match"),
    [
        (None, [], ValueError, r"n > 0, got shape \[0\]"),
        (None, torch.ones(2, 2, 2), ValueError, r"got shape \[2, 2, 2\]"),
        (None, torch.ones(2, 0), ValueError, r"got shape \[2, 0\]"),
        (None, "text", TypeError, "give its characters as 'vocabulary'"),
        (None, ["a"], TypeError, "must be numbers"),
        (None, Data(x=torch.ones(2)), ValueError, "needs 'data.sequence'"),
        (None, Batch.from_data_list([Data(x=torch.ones(2))]), TypeError, "one by one"),
        ("ab", "", ValueError, "must not be empty"),
        ("ab", "abz", ValueError, "got 'z' at place 2, which is none of its 2"),
        ("ab", [["a"]], ValueError, r"got \['a'\] at place 0"),
        ("ab", 3, TypeError, "got 'int'"),
    ],
)
def test_bad_sequences(vocabulary, sequence, error, match):
    with pytest.raises(error, match=match):
        SequenceToGraph(vocabulary)(sequence)


def test_reversed_arrays_and_bytes(recwarn):
    assert SequenceToGraph()(np.arange(4)[::-1]).x.tolist() == [3, 2, 1, 0]
    assert SequenceToGraph()(b"ab").x.tolist() == [97, 98]
    assert [str(w.message) for w in recwarn] == []


def test_bad_vocabulary():
    for vocabulary in ({"a", "b"}, {"a": 0}):
        with pytest.raises(TypeError, match="must be a string or a sequence, got"):
            SequenceToGraph(vocabulary)
    with pytest.raises(ValueError, match="must not have 'a' twice"):
        SequenceToGraph("aba")


def test_representation():
    assert repr(SequenceToGraph()) == "SequenceToGraph()"
    assert repr(SequenceToGraph("abc")).startswith("SequenceToGraph(3 tokens, ")
    # PyG tells by it whether a processed data set is stale.
    assert repr(SequenceToGraph("abc")) == repr(SequenceToGraph("abc"))
    assert repr(SequenceToGraph("abc")) != repr(SequenceToGraph("cba"))
    assert (
        repr(SequenceToGraph(attr_name="text")) == "SequenceToGraph(attr_name='text')"
    )
