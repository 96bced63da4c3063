from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyg_chimera.ops.common import cache

EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
BATCH = torch.tensor([0, 0, 0, 0])


class Made:
    """A structure, which is told apart from equal ones by identity."""

    def __init__(self, *args):
        self.args = args


def other(*args):
    return Made(*args)


def made(*tensors, make=Made, options=()):
    return cache.remembered(make, tensors, *options)


@pytest.fixture(autouse=True)
def _empty_cache():
    cache._CACHE.values.clear()


def test_equal_contents_share_a_structure():
    first = made(EDGES, None, BATCH, options=(4,))
    assert made(EDGES.clone(), None, BATCH.clone(), options=(4,)) is first
    nothing = torch.zeros(1, dtype=torch.long).expand(4)[:0]
    assert made(nothing) is made(EDGES[0, :0])
    strided = EDGES.t().contiguous().t()
    assert made(strided, None, BATCH, options=(4,)) is first


def test_different_contents_do_not():
    variants = [
        made(EDGES),
        made(EDGES, None),
        made(EDGES, BATCH),
        made(EDGES, None, BATCH),
        made(EDGES.int()),
        made(EDGES.flip(0)),
        made(EDGES.view(-1)),
        made(EDGES, options=(4,)),
        made(EDGES, options=(5,)),
        made(EDGES, make=other),
    ]
    assert len({id(x) for x in variants}) == len(variants)


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.vjp])
def test_structures_made_within_transforms_of_functions_are_plain(transform):
    structures = []

    def function(x):
        structures.append(made(EDGES, make=lambda edges: Made(edges + 0)))
        return x * 2

    x = torch.ones(3)
    transform(function, *((x,), (x,)) if transform is torch.func.jvp else (x,))
    (edges,) = structures[0].args
    assert (edges.numpy() == EDGES.numpy()).all()


def test_tables_made_within_transforms_of_functions_are_plain():
    structure, x = SimpleNamespace(tables={}), torch.ones(3)

    def function(x):
        return x * cache.table(lambda *_: torch.arange(3) + 0, structure, x.device)

    torch.func.hessian(lambda x: function(x).sum())(x)
    assert function(x).tolist() == [0, 1, 2]


def test_changed_in_place():
    edges = EDGES.clone()
    first = made(edges)
    edges[0, 0] = 3
    second = made(edges)
    assert second is not first
    assert first.args[0].equal(EDGES)  # of a copy
    edges[0, 0] = 0
    assert made(edges) is first


def test_it_is_small_and_keeps_what_is_used(monkeypatch):
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=32))
    first = made(EDGES)
    for i in range(40):
        made(EDGES, options=(i,))
        assert made(EDGES) is first
    assert len(cache._CACHE.values) == cache._CACHE.size
    for i in range(cache._CACHE.size):
        made(EDGES, options=(100 + i,))
    assert made(EDGES) is not first


def test_what_is_forgotten_is_made_again():
    recipe = cache.Recipe(Made, (EDGES,))
    first = cache.recalled(recipe.key(), recipe.build)
    assert cache.recalled(recipe.key(), recipe.build) is first
    cache._CACHE.values.clear()
    again = cache.recalled(recipe.key(), recipe.build)
    assert again is not first
    assert again.args[0].equal(EDGES)


def test_it_forgets_what_is_large():
    small = cache._Cache(size=32, num_bytes=10 * 80)
    for i in range(20):
        small.put(str(i), (np.zeros(10), torch.zeros(5)))
    assert len(small.values) == 8  # at least, however large
    assert small.get("19") is not None
    assert small.get("0") is None
    large = cache._Cache(size=32, num_bytes=10 * 100)
    for i in range(20):
        large.put(str(i % 10), (np.zeros(10), torch.zeros(5)))
    assert large.held == 8 * 100 + 2 * 100
    assert len(large.values) == 10


def test_what_is_derived_counts_too(monkeypatch):
    """Tables may be many times as large as the structure that they are kept with."""
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=32, num_bytes=1000))

    class Structure:
        def __init__(self, *_):
            self.tables, self.nbytes = {}, 10

    def levels(structure, device, number):
        return [torch.zeros(25), {"array": np.zeros(number)}]

    cpu = torch.device("cpu")
    for i in range(20):
        structure = made(EDGES, make=Structure, options=(i,))
        for _ in range(2):
            cache.table(levels, structure, cpu, 5)
    assert cache._CACHE.held == 8 * (10 + 100 + 40)
    assert len(cache._CACHE.values) == len(cache._CACHE.keys) == 8
    cache.table(levels, Structure(), cpu, 5)  # of a structure that is not kept
    assert cache._CACHE.held == 8 * (10 + 100 + 40)


def test_errors_are_not_remembered():
    def fail(x):
        raise ValueError("bad")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            made(EDGES, make=fail)


def test_many_threads():
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda i: made(EDGES, options=(i % 12,)), range(400))
        for i, x in enumerate(results):
            assert x.args[1] == i % 12


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_large_tensors_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cache, "_MOST_COPIED", 0)
    edges = EDGES.cuda()
    first = made(edges, BATCH.cuda())
    assert made(edges.clone(), BATCH.cuda()) is first
    edges[0, 0] = 2
    assert made(edges, BATCH.cuda()) is not first


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.uint8, torch.double])
def test_large_tensors_are_recognised_on_their_device(dtype):
    """By sums of hashes that depend on every entry and on its place."""
    x = torch.randint(100, (2, 500), generator=torch.Generator().manual_seed(0))
    x = x.to(dtype)
    found = {tuple(cache._sums_of_hashes(x).tolist())}
    assert found == {tuple(cache._sums_of_hashes(x.clone()).tolist())}
    for i in range(200):
        changed = x.clone()
        changed[i % 2, i] += 1
        found.add(tuple(cache._sums_of_hashes(changed).tolist()))
        swapped = x.clone()
        swapped[:, [i, i + 1]] = x[:, [i + 1, i]]
        if not swapped.equal(x):
            found.add(tuple(cache._sums_of_hashes(swapped).tolist()))
    assert len({x for x, _ in found}) == len({x for _, x in found}) == len(found) > 390
