import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.utils import coalesce

from pyg_chimera.transforms import ImageToGraph


def test_small_image():
    image = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    out = ImageToGraph()(image)
    assert set(out.keys()) == {"x", "edge_index", "pos", "height", "width"}
    assert out.x.tolist() == [[1], [2], [3], [4], [5], [6]]
    assert (out.height, out.width, out.num_nodes) == (2, 3, 6)
    assert out.pos.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert out.pos.dtype == torch.float
    assert out.edge_index.dtype == torch.long
    assert out.edge_index.tolist() == [
        [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5],
        [1, 3, 0, 2, 4, 1, 5, 0, 4, 1, 3, 5, 2, 4],
    ]


def test_patches():
    #  0  1  2 |  3  4           with 2 x 3 patches, padded at the right and below
    #  5  6  7 |  8  9
    # 10 11 12 | 13 14
    image = F.pad(torch.arange(30.0).view(2, 3, 5), (0, 1, 0, 1))
    out = ImageToGraph((2, 3))(image)
    assert (out.height, out.width) == (2, 2)
    first = [
        [0, 1, 2, 5, 6, 7],
        [3, 4, 0, 8, 9, 0],
        [10, 11, 12, 0, 0, 0],
        [13, 14, 0, 0, 0, 0],
    ]
    second = [
        [15, 16, 17, 20, 21, 22],
        [18, 19, 0, 23, 24, 0],
        [25, 26, 27, 0, 0, 0],
        [28, 29, 0, 0, 0, 0],
    ]
    assert out.x.tolist() == [a + b for a, b in zip(first, second, strict=True)]


@given(
    *(st.integers(1, n) for n in (3, 9, 9)),
    *(st.integers(1, 4) for _ in range(2)),
)
def test_any_size(channels, rows, columns, p, q):
    image = torch.rand(channels, rows * p, columns * q)
    out = ImageToGraph((p, q))(image)
    h, w = out.height, out.width
    assert (h, w) == (rows, columns)
    assert out.x.shape == (h * w, channels * p * q)
    # What was put in comes out, and nothing else.
    for i, (c, r) in enumerate(out.pos.long().tolist()):
        assert i == r * w + c
        patch = image[:, r * p : (r + 1) * p, c * q : (c + 1) * q]
        assert out.x[i].equal(patch.flatten())
    # Edges join all pairs of patches at distance 1, and are sorted.
    distance = torch.cdist(out.pos, out.pos, p=1)
    assert out.edge_index.equal((distance == 1).nonzero().t())
    assert out.edge_index.equal(coalesce(out.edge_index))


@pytest.mark.parametrize(
    "dtype", [torch.float, torch.double, torch.half, torch.bfloat16]
)
def test_floating_point_types_stay(dtype):
    image = torch.rand(2, 4, 6).to(dtype)
    out = ImageToGraph(2)(image)
    assert out.x.dtype == dtype
    assert out.x.sum(dtype=torch.double) == image.sum(dtype=torch.double)


def test_other_types_become_float():
    out = ImageToGraph()(torch.tensor([[0, 51, 255]], dtype=torch.uint8))
    assert out.x.dtype == torch.float
    assert out.x.flatten().tolist() == pytest.approx([0, 0.2, 1])
    out = ImageToGraph()(torch.tensor([[0, 51, 70_000]]))
    assert out.x.dtype == torch.float
    assert out.x.flatten().tolist() == [0, 51, 70_000]
    assert ImageToGraph()(torch.tensor([[False, True]])).x.tolist() == [[0], [1]]


def test_arrays():
    array = np.random.default_rng(0).integers(256, size=(4, 6, 3), dtype=np.uint8)
    expected = ImageToGraph(2)(torch.from_numpy(array).permute(2, 0, 1))
    assert ImageToGraph(2)(array).x.equal(expected.x)
    flipped = array[:, ::-1][:, ::-1]  # not contiguous
    assert ImageToGraph(2)(flipped).x.equal(expected.x)
    grey = ImageToGraph(2)(array[..., 0])
    assert grey.x.equal(expected.x[:, :4])
    assert ImageToGraph()(array.astype(np.float64)).x.dtype == torch.double


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("L", 1), ("RGB", 3), ("RGBA", 4), ("P", 3), ("PA", 3), ("1", 1), ("F", 1)],
)
def test_pil_images(mode, channels):
    pil = pytest.importorskip("PIL.Image")
    array = np.random.default_rng(0).integers(256, size=(4, 6, 3), dtype=np.uint8)
    image = pil.fromarray(array).convert(mode)
    out = ImageToGraph(2)(image)
    assert out.x.shape == (6, channels * 4)
    assert (out.height, out.width) == (2, 3)
    if mode == "RGB":
        assert out.x.equal(ImageToGraph(2)(array).x)
    if mode in ("P", "PA"):
        assert out.x.equal(ImageToGraph(2)(np.asarray(image.convert("RGB"))).x)
    if mode in "1LF":
        assert out.x.max() == np.asarray(image).max() / (255 if mode == "L" else 1)


def test_attributes_of_an_earlier_graph():
    data = Data(
        picture=np.zeros((2, 2), np.float32),
        x=torch.rand(9, 1),
        edge_index=torch.tensor([[0], [8]]),
        edge_attr=torch.rand(1, 2),
        num_nodes=9,
        height=9,
    )
    out = ImageToGraph(attr_name="picture")(data)
    assert set(out.keys()) == {"x", "edge_index", "pos", "height", "width"}
    assert (out.num_nodes, out.num_edges, out.height) == (4, 8, 2)
    assert data.num_nodes == 9
    again = ImageToGraph()(Data(image=torch.ones(2, 2), **out.to_dict()))
    assert again.edge_index.equal(out.edge_index)
    assert again.validate()


def test_graphs_share_no_memory():
    transform = ImageToGraph()
    one = transform(torch.ones(2, 3))
    expected = copy.deepcopy(one)
    one.edge_index += 100
    one.pos += 100
    two = transform(torch.ones(2, 3))
    assert two.edge_index.equal(expected.edge_index)
    assert two.pos.equal(expected.pos)


def test_gradients_reach_the_image():
    image = torch.rand(2, 4, 6, requires_grad=True)
    ImageToGraph(2)(image).x.sum().backward()
    assert image.grad.equal(torch.ones(2, 4, 6))


@pytest.mark.parametrize("patch_size", [0, -1, 1.5, True, (2, 0), (1, 2, 3), "2", None])
def test_bad_patch_size(patch_size):
    with pytest.raises((TypeError, ValueError), match="'patch_size' must be a"):
        ImageToGraph(patch_size)


def test_bad_images():
    transform = ImageToGraph()
    for image in (torch.rand(3), torch.rand(1, 3, 4, 4), torch.rand(0, 4, 4)):
        with pytest.raises(ValueError, match=r"\[C, H, W\].*got shape \["):
            transform(image)
    with pytest.raises(ValueError, match=r"got shape \[4, 0, 3\]"):
        transform(np.zeros((4, 0, 3)))
    with pytest.raises(ValueError, match=r"must divide .*2 x 2 for 3 x 4 pixels"):
        ImageToGraph(2)(torch.rand(3, 4))
    with pytest.raises(ValueError, match="complex64"):
        transform(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="'list'"):
        transform([[1.0, 2.0]])
    with pytest.raises(TypeError, match="'NoneType'"):
        transform(None)


def test_bad_data():
    transform = ImageToGraph()
    with pytest.raises(ValueError, match=r"'data.image'.*\['x'\]"):
        transform(Data(x=torch.rand(2, 2)))
    with pytest.raises(TypeError, match=r"one by one.*'DataBatch'"):
        transform(Batch.from_data_list([Data(image=torch.rand(2, 2))]))


def test_nodes_share_no_memory_with_the_image():
    for image in (torch.rand(1, 3, 4), np.zeros((3, 4), np.float32)):
        before = torch.as_tensor(image).clone()
        out = ImageToGraph()(Data(image=image) if torch.is_tensor(image) else image)
        out.x.add_(1)
        assert torch.as_tensor(image).equal(before)
