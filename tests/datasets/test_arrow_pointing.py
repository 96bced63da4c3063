import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets.arrow_pointing import ArrowPointing

SMALL = {"image_size": 48, "radius": (4.0, 8.0), "arrow_length": (8.0, 14.0)}
LARGE = {**SMALL, "image_size": 96}


@pytest.fixture(scope="module", params=[SMALL, LARGE], ids=["48", "96"])
def many(request) -> ArrowPointing:
    return ArrowPointing(num_samples=6000, **request.param)


def offsets(dataset: ArrowPointing) -> tuple[np.ndarray, ...]:
    """Along the ray and beside it, where the circle's centre is; and its radius."""
    arrow, circle = dataset.arrow.double().numpy(), dataset.circle.double().numpy()
    to = circle[:, :2] - arrow[:, :2]
    ray = np.exp(1j * arrow[:, 2])
    place = (to[:, 0] + 1j * to[:, 1]) / ray
    return place.real, np.abs(place.imag), circle[:, 2]


# What a sample is -------------------------------------------------------------------


def test_a_sample():
    dataset = ArrowPointing("val", 5, **SMALL)
    assert isinstance(dataset, InMemoryDataset)
    assert len(dataset) == 5
    data = dataset[3]
    assert isinstance(data, Data)
    assert (data.image.dtype, data.image.shape) == (torch.uint8, (1, 48, 48))
    assert (data.y.dtype, data.y.shape) == (torch.int64, (1,))
    assert (data.arrow.dtype, data.arrow.shape) == (torch.float, (1, 4))
    assert (data.circle.dtype, data.circle.shape) == (torch.float, (1, 3))
    assert [int(part.y) for part in dataset[1:4]] == dataset.y[1:4].tolist()
    assert repr(dataset) == "ArrowPointing(5, split='val', image_size=48)"


def test_samples_batch():
    dataset = ArrowPointing("val", 5, **SMALL)
    first, second = DataLoader(dataset, batch_size=3)
    assert torch.equal(torch.cat([first.image, second.image]), dataset.image)
    assert torch.equal(torch.cat([first.y, second.y]), dataset.y)
    assert first.num_graphs == 3


def test_the_sizes_of_the_paper_are_the_defaults():
    dataset = ArrowPointing(num_samples=40)
    assert dataset[0].image.shape == (1, 192, 192)
    assert 15 <= dataset.circle[:, 2].min() < dataset.circle[:, 2].max() <= 30
    assert 15 <= dataset.arrow[:, 3].min() < dataset.arrow[:, 3].max() <= 30


@pytest.mark.parametrize("size", [49, 51, 100])
def test_any_size(size):
    dataset = ArrowPointing(num_samples=20, **{**SMALL, "image_size": size})
    assert dataset.image.shape == (20, size, size)


def test_the_label_says_whether_the_ray_hits(many):
    along, aside, radius = offsets(many)
    hit = (along > 0) & (aside <= radius)
    assert np.array_equal(many.y.numpy(), hit.astype(int))
    # Clearly so.
    assert (aside[hit] <= 0.8001 * radius[hit]).all()
    ahead = ~hit & (along > 0)
    assert (aside[ahead] >= 1.1999 * radius[ahead]).all()
    assert ahead.sum() > 500
    assert (along[~hit] < 0).sum() > 200


def test_objects_keep_apart_and_inside(many):
    arrow, circle = many.arrow.numpy(), many.circle.numpy()
    gap = np.hypot(*(circle[:, :2] - arrow[:, :2]).T) - circle[:, 2] - arrow[:, 3] / 2
    assert gap.min() > 1.99
    for place, reach in (
        (arrow[:, :2], arrow[:, 3] / 2),
        (circle[:, :2], circle[:, 2]),
    ):
        border = np.minimum(place, many.image_size - place).min(1) - reach
        assert border.min() > 0.99
    assert not many.image[:, [0, -1]].any()
    assert not many.image[:, :, [0, -1]].any()


def test_objects_do_not_grow_with_the_image():
    small, large = (ArrowPointing(num_samples=2000, **kind) for kind in (SMALL, LARGE))
    for name, column in (("circle", 2), ("arrow", 3)):
        sizes = [getattr(dataset, name)[:, column] for dataset in (small, large)]
        means = [float(size.mean()) for size in sizes]
        assert means[0] == pytest.approx(means[1], rel=0.05)
        assert 0.99 < sizes[0].max() / sizes[1].max() < 1.01
    ink = [float(dataset.image.double().sum()) for dataset in (small, large)]
    assert ink[0] == pytest.approx(ink[1], rel=0.06)
    distances = [np.hypot(*offsets(dataset)[:2]).mean() for dataset in (small, large)]
    assert distances[1] > 1.8 * distances[0]


# The picture ------------------------------------------------------------------------


def draw(dataset: ArrowPointing, i: int, factor: int = 8) -> np.ndarray:
    """The image from its definition: which of many points of a pixel are painted."""
    n = dataset.image_size * factor
    y, x = (np.mgrid[:n, :n] + 0.5) / factor
    cx, cy, r = dataset.circle[i].double().tolist()
    disk = np.hypot(x - cx, y - cy) <= r
    cx, cy, angle, length = dataset.arrow[i].double().tolist()
    point = (x - cx + 1j * (y - cy)) * np.exp(-1j * angle)
    along, across = point.real / length, np.abs(point.imag) / length
    head = (along >= 0.1) & (across <= 0.875 * (0.5 - along))
    shaft = (across <= max(0.05, 0.5 / length)) & (along >= -0.5) & (along <= 0.1)
    level = np.where(head | shaft, 255, 128 * disk)
    return level.reshape(n // factor, factor, -1, factor).mean((1, 3))


@pytest.mark.parametrize("kind", [SMALL, {"image_size": 100}], ids=["48", "100"])
def test_the_image_shows_the_scene(kind):
    kind = {**SMALL, **kind}
    dataset = ArrowPointing(num_samples=20, **kind)
    for i in range(20):
        expected, found = draw(dataset, i), dataset[i].image[0].double().numpy()
        # Exact up to corners and curves, where coverage is not that of a half plane.
        assert np.abs(found - expected).max() < 110
        assert np.abs(found - expected).sum() < 0.06 * expected.sum()
        assert found.sum() == pytest.approx(expected.sum(), rel=0.03)
        assert found.max() > 250
        assert ((found > 0) & (found < 255)).sum() > 20  # smooth borders


def test_directions_can_be_read_off_the_image():
    """The head outweighs the tail."""
    dataset = ArrowPointing(num_samples=200, **SMALL)
    y, x = np.mgrid[:48, :48] + 0.5
    for data in dataset:
        ax, ay, angle, length = data.arrow[0].tolist()
        near = np.hypot(x - ax, y - ay) < length / 2 + 1
        ink = np.where(near, data.image[0].double().numpy(), 0)
        along = (x - ax) * math.cos(angle) + (y - ay) * math.sin(angle)
        assert (ink * along).sum() / ink.sum() > 0.04 * length


# Deterministic ----------------------------------------------------------------------


def test_a_sample_does_not_depend_on_how_many_there_are():
    long = ArrowPointing(num_samples=2100, seed=3, **SMALL)
    for n in (1, 7, 1024, 1025):
        short = ArrowPointing(num_samples=n, seed=3, **SMALL)
        for name in ("image", "y", "arrow", "circle"):
            assert torch.equal(getattr(short, name), getattr(long, name)[:n])


def test_samples_are_a_function_of_the_seed_split_and_size():
    kinds = [
        {"seed": 0},
        {"seed": 1},
        {"split": "val"},
        {"split": "test"},
        {"image_size": 50},
    ]
    made = [ArrowPointing(num_samples=50, **{**SMALL, **kind}) for kind in kinds]
    again = ArrowPointing(num_samples=50, **SMALL)
    assert torch.equal(again.image, made[0].image)
    for i, one in enumerate(made):
        for other in made[:i]:
            assert not (one.arrow == other.arrow).any()


def test_a_block_after_another_brings_new_samples():
    dataset = ArrowPointing(num_samples=2048, **SMALL)
    assert len(dataset.arrow.unique(dim=0)) == 2048


KNOWN = {
    "y": [0, 1],
    "arrow": [
        [38.14101, 29.38642, 2.85967, 10.56648],
        [24.30504, 23.01934, 2.97253, 9.82238],
    ],
    "circle": [[27.17138, 19.21139, 6.47045], [10.14867, 28.66316, 5.44327]],
}


def test_known_scenes():
    """What others reproduce with the same arguments."""
    dataset = ArrowPointing("test", 2, 48, (4.0, 8.0), (8.0, 14.0), seed=5)
    assert dataset.y.tolist() == KNOWN["y"]
    assert torch.allclose(dataset.arrow, torch.tensor(KNOWN["arrow"]), atol=1e-4)
    assert torch.allclose(dataset.circle, torch.tensor(KNOWN["circle"]), atol=1e-4)


# No shortcut ------------------------------------------------------------------------


def test_labels_are_balanced_to_the_pair():
    dataset = ArrowPointing(num_samples=3001, **SMALL)
    pairs = dataset.y[:3000].view(-1, 2)
    assert (pairs.sum(1) == 1).all()
    assert 0.45 < pairs[:, 0].double().mean() < 0.55


def test_labels_do_not_tell_on_distance_and_size(many):
    """All moments of what the label must be independent of agree within the noise."""
    arrow, circle = many.arrow.double().numpy(), many.circle.double().numpy()
    distance = np.hypot(*(circle[:, :2] - arrow[:, :2]).T)
    angle = arrow[:, 2]
    values = np.stack(
        [
            *(arrow[:, 0], arrow[:, 1], np.cos(angle), np.sin(angle), arrow[:, 3]),
            *(circle[:, 0], circle[:, 1], circle[:, 2], distance),
            # Looking inwards from the border: which is why, without the second circle,
            # arrows that point at one would differ.
            (arrow[:, 0] - many.image_size / 2) * np.cos(angle),
            (arrow[:, 1] - many.image_size / 2) * np.sin(angle),
            circle[:, 2] / distance,
        ]
    )
    y = many.y.numpy()
    for value in (*values, *values**2):
        one, other = value[y == 1], value[y == 0]
        error = math.sqrt(one.var() / len(one) + other.var() / len(other))
        assert abs(one.mean() - other.mean()) < 4 * error
        # Kolmogorov-Smirnov, at about the same level.
        at = np.sort(value)
        steps = [np.searchsorted(np.sort(v), at) / len(v) for v in (one, other)]
        assert np.abs(steps[0] - steps[1]).max() < 2.2 * math.sqrt(4 / len(value))


def held_out_accuracy(features: np.ndarray, y: np.ndarray) -> float:
    features = (features - features.mean(0)) / (features.std(0) + 1e-9)
    half = len(y) // 2
    model = LogisticRegression(C=0.1, max_iter=300).fit(features[:half], y[:half])
    return float(model.score(features[half:], y[half:]))


def test_simple_models_stay_near_chance(many):
    arrow, circle = many.arrow.double().numpy(), many.circle.double().numpy()
    image = many.image.numpy()
    distance = np.hypot(*(circle[:, :2] - arrow[:, :2]).T)
    place = np.column_stack([arrow[:, :2], circle[:, :2]]) / many.image_size
    pose = np.column_stack([arrow[:, :2], np.cos(arrow[:, 2]), np.sin(arrow[:, 2])])
    pairs = [np.triu_indices(4)] * 2
    products = [
        np.einsum("ni,nj->nij", v, v)[:, i, j]
        for v, (i, j) in zip((place, pose), pairs, strict=True)
    ]
    blocks = image.reshape(len(image), 12, many.image_size // 12, 12, -1)
    features = {
        "pixels": blocks.mean((2, 4)).reshape(len(image), -1),
        "statistics": np.column_stack(
            [image.mean((1, 2)), image.std((1, 2)), (image > 0).sum((1, 2))]
        ),
        "margins": np.column_stack([blocks.mean((1, 2, 4)), blocks.mean((2, 3, 4))]),
        "distance": np.column_stack([distance, distance**2, 1 / distance]),
        "positions": np.column_stack([place, products[0], distance, circle[:, 2]]),
        "arrow": np.column_stack([pose, products[1], arrow[:, 3]]),
    }
    for name, x in features.items():
        assert held_out_accuracy(x, many.y.numpy()) < 0.54, name

    # It can be told, by who sees all three of them.
    along, aside, radius = offsets(many)
    x = np.column_stack([along, aside / radius, np.sign(along) * (aside < radius)])
    assert held_out_accuracy(x, many.y.numpy()) > 0.99


# Transforms and errors -------------------------------------------------------------


def test_transforms():
    dataset = ArrowPointing(
        num_samples=6,
        transform=lambda data: Data(mark=data.image.sum(), y=data.y),
        **SMALL,
    )
    plain = ArrowPointing(num_samples=6, **SMALL)
    assert [int(x.mark) for x in dataset] == [int(x.image.sum()) for x in plain]
    assert "image" not in dataset[0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "valid"}, "'split' must be one of"),
        ({"num_samples": 0}, "'num_samples' must be at least 1"),
        ({"seed": -1}, "'seed' must not be negative"),
        ({"radius": (8.0, 4.0)}, "'radius' must be a smallest and a largest"),
        ({"radius": (1.0, 4.0)}, "2 pixels or more"),
        ({"arrow_length": (8.0,)}, "'arrow_length' must be"),
        ({"image_size": 47}, "'image_size' must be at least 48, three times"),
    ],
)
def test_rejects(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ArrowPointing(**{**SMALL, "num_samples": 2, **kwargs})
