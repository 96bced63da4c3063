import math
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches

from pyg_chimera.ops.common import cache
from pyg_chimera.ops.structure.node_sequences import NodeSequences, node_sequences

SCORES = st.sampled_from(["tied", "few", "wide", "float"])


def scores(kind, num_nodes):
    if kind == "few":  # small integers with many ties
        return torch.randint(-1, 2, (num_nodes,))
    if kind == "wide":  # integers that need all 64 bits
        big = torch.tensor([torch.iinfo(torch.long).min, torch.iinfo(torch.long).max])
        return big[torch.randint(0, 2, (num_nodes,))]
    if kind == "float":
        pool = torch.tensor([-math.inf, -1.5, -0.0, 0.0, 1e-300, math.inf])
        return pool.double()[torch.randint(0, 6, (num_nodes,))]
    return torch.zeros(num_nodes)


def sequences(out: NodeSequences) -> list[list[int]]:
    ptr = out.ptr.tolist()
    return [out.index[a:b].tolist() for a, b in pairwise(ptr)]


def test_two_graphs():
    score = torch.tensor([3.0, 1.0, 2.0, -1.0, -2.0])
    out = node_sequences(score, torch.tensor([0, 0, 0, 1, 1]))
    assert out.index.dtype == out.ptr.dtype == torch.long
    assert out.index.tolist() == [1, 2, 0, 4, 3]
    assert out.ptr.tolist() == [0, 3, 5]


def test_permutations_then_graphs_then_bins():
    batch = torch.tensor([1, 0, 1, 1, 3])
    score = torch.tensor([5, 9, 4, 6, 0])
    out = node_sequences(score, batch, num_permutations=2, num_bins=2, shuffle=False)
    each = [[1], [], [2, 0], [3], [4], []]
    assert sequences(out) == each + each


def test_one_graph():
    out = node_sequences(torch.zeros(3), shuffle=False)
    assert out.index.tolist() == [0, 1, 2]
    assert out.ptr.tolist() == [0, 3]
    assert node_sequences(torch.tensor([2, 1, 0])).index.tolist() == [2, 1, 0]


def test_nothing():
    empty = torch.empty(0, dtype=torch.long)
    for kwargs in ({}, {"seed": 1}, {"shuffle": False}, {"num_bins": 2}):
        out = node_sequences(empty, num_permutations=2, **kwargs)
        assert out.index.numel() == 0
        assert out.ptr.tolist() == [0] * (2 * kwargs.get("num_bins", 1) + 1)
        for clusters in (False, True):
            out = node_sequences(empty, empty, clusters=clusters, **kwargs)
            assert out.index.numel() == 0
            assert out.ptr.tolist() == [0]


def test_graphs_without_nodes():
    """Have no sequences."""
    score = torch.zeros(3)
    assert node_sequences(score, torch.tensor([1, 1, 1])).ptr.tolist() == [0, 3]
    assert node_sequences(score, torch.tensor([4, 1, 4])).ptr.tolist() == [0, 1, 3]


@pytest.mark.parametrize("kwargs", [{"seed": 3}, {"shuffle": False}])
def test_labels_make_no_difference(kwargs):
    """However large they are, and in no more time and memory."""
    batch = torch.tensor([2, 0, 1, 1, 2, 0, 2])
    score = torch.tensor([1, 1, 0, 1, 0, 0, 0])
    expected = node_sequences(score, batch, num_bins=2, **kwargs)
    for labels in ([5, 6, 90_000_000], [0, 2**40, 2**62], [3, 4, 7]):
        begin = time.process_time()
        out = node_sequences(score, torch.tensor(labels)[batch], num_bins=2, **kwargs)
        assert time.process_time() - begin < 1
        assert out.index.equal(expected.index)
        assert out.ptr.equal(expected.ptr)


def test_seeded_sequences_are_remembered_but_nobody_shares_them(monkeypatch):
    score, batch = torch.rand(9), torch.arange(9) // 4
    expected = node_sequences(score, batch, seed=1)
    node_sequences(score, batch, seed=1).index.zero_()
    out = node_sequences(score.clone().requires_grad_(), batch.clone(), seed=1)
    assert out.index.equal(expected.index)
    monkeypatch.setattr(cache._CACHE, "put", None)  # nothing is computed any more
    node_sequences(score, batch, seed=1)
    for args, seed in (((score, batch), 2), ((-score, batch), 1), ((score, None), 1)):
        with pytest.raises(TypeError, match="not callable"):
            node_sequences(*args, seed=seed)


@given(
    batches(),
    SCORES,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([{}, {"seed": 3}, {"shuffle": False}]),
)
def test_sorted_sequences_of_each_graph(batch, kind, m, num_bins, kwargs):
    score = scores(kind, batch.num_nodes)
    out = node_sequences(
        score,
        batch.batch,
        num_permutations=m,
        num_bins=num_bins,
        **kwargs,
    )
    V = batch.num_nodes
    graphs = [nodes for nodes in batch.node_map if len(nodes)]
    assert out.ptr.numel() == m * len(graphs) * num_bins + 1
    for part in out.index.split(V) if V > 0 else []:
        assert part.sort().values.equal(torch.arange(V))
    each = iter(sequences(out))
    for _ in range(m):
        for nodes in graphs:
            bins = [next(each) for _ in range(num_bins)]
            assert (
                sorted(i for part in bins for i in part) == nodes.sort().values.tolist()
            )
            assert max(map(len, bins)) - min(map(len, bins)) <= 1
            for part in bins:
                assert score[part].tolist() == sorted(score[part].tolist())


@given(batches(), SCORES, st.integers(1, 3), st.integers(0, 2**63 - 1), st.booleans())
def test_seeded_batch_is_its_graphs(batch, kind, num_bins, seed, clusters):
    kind = "few" if clusters and kind in ("tied", "float") else kind
    score = scores(kind, batch.num_nodes)
    kwargs = {
        "num_permutations": 2,
        "num_bins": num_bins,
        "clusters": clusters,
        "seed": seed,
    }
    out = sequences(node_sequences(score, batch.batch, **kwargs))
    graphs = batch.batch.unique().tolist()
    for i, graph in enumerate(graphs):
        nodes = (batch.batch == graph).nonzero().flatten()
        alone = node_sequences(score[nodes], **kwargs)
        alone = [nodes[part].tolist() for part in sequences(alone)]
        size = len(graphs) * num_bins
        mine = out[i * num_bins :][:num_bins] + out[size + i * num_bins :][:num_bins]
        assert mine == alone


@given(batches(min_graphs=1), st.sampled_from([{}, {"seed": 5}]))
def test_clusters_stay_together(batch, kwargs):
    cluster = torch.randint(0, 4, (batch.num_nodes,))
    out = node_sequences(cluster, batch.batch, clusters=True, **kwargs)
    for part in sequences(out):
        runs = cluster[part].unique_consecutive()
        assert runs.numel() == runs.unique().numel()


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("num_bins", [1, 2])
def test_ties_are_uniform(seeded, num_bins):
    """All orders of three equal nodes, the least one always first."""
    score = torch.tensor([1, 1, 0, 1])
    kwargs = {"seed": 7} if seeded else {"generator": torch.Generator().manual_seed(0)}
    m = 6000
    out = node_sequences(score, num_permutations=m, num_bins=num_bins, **kwargs)
    parts = sequences(out)
    if num_bins == 1:
        assert all(part[0] == 2 for part in parts)
        counts = Counter(tuple(part) for part in parts)
    else:  # any two nodes are in the first bin
        counts = Counter(frozenset(part) for part in parts[::2])
    assert len(counts) == 6
    expected = m / 6
    deviation = sum((count - expected) ** 2 / expected for count in counts.values())
    assert deviation < 25  # chi squared of 5 degrees of freedom: 1 in 7,000


@pytest.mark.parametrize("seeded", [False, True])
def test_clusters_and_their_nodes_are_uniform(seeded):
    """Small clusters come first as often as large ones."""
    cluster = torch.tensor([4, 9, 9, 9, 9, 2])
    kwargs = {"seed": 7} if seeded else {"generator": torch.Generator().manual_seed(0)}
    m = 6000
    out = node_sequences(cluster, num_permutations=m, clusters=True, **kwargs)
    parts = out.index.view(m, 6)
    for counts in (
        Counter(tuple(c.unique_consecutive().tolist()) for c in cluster[parts]),
        Counter(parts[cluster[parts] == 9].view(m, 4)[:, 0].tolist()),
    ):
        expected = m / len(counts)
        assert len(counts) in (4, 6)
        assert sum((c - expected) ** 2 / expected for c in counts.values()) < 25


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_hash_looks_random(seed):
    """No place, permutation or seed is before another one too often."""
    V, m = 64, 512
    out = node_sequences(torch.zeros(V), num_permutations=m, seed=seed)
    place = out.index.view(m, V).argsort(dim=1).double()
    # Places of a node have mean (V - 1) / 2 and variance (V^2 - 1) / 12.
    std = math.sqrt((V * V - 1) / 12 / m)
    assert float((place.mean(0) - (V - 1) / 2).abs().max()) < 4.5 * std
    correlation = torch.corrcoef(place)  # of permutations
    correlation.fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6.5 / math.sqrt(V)
    other = node_sequences(torch.zeros(V), num_permutations=m, seed=seed + 1)
    assert float((out.index == other.index).double().mean()) < 2 / V


def test_permutations_don_t_depend_on_their_number():
    three = node_sequences(torch.zeros(9), num_permutations=3, seed=4)
    one = node_sequences(torch.zeros(9), seed=4)
    assert three.index[:9].equal(one.index)
    assert not three.index[:9].equal(three.index[9:18])


def test_seed_leaves_the_generator_alone():
    state = torch.get_rng_state()
    first = node_sequences(torch.zeros(50), seed=2).index
    torch.manual_seed(9)
    assert node_sequences(torch.zeros(50), seed=2).index.equal(first)
    torch.set_rng_state(state)
    node_sequences(torch.zeros(50), seed=2)
    assert torch.get_rng_state().equal(state)
    assert not node_sequences(torch.zeros(50), seed=3).index.equal(first)


def test_without_a_seed_every_call_is_new():
    first = node_sequences(torch.zeros(50)).index
    assert not node_sequences(torch.zeros(50)).index.equal(first)
    torch.manual_seed(0)
    assert node_sequences(torch.zeros(50)).index.equal(first)
    generator = torch.Generator().manual_seed(0)
    assert node_sequences(torch.zeros(50), generator=generator).index.equal(first)


def test_known_order():
    """The same in any process, and of earlier versions."""
    out = node_sequences(torch.zeros(8), num_permutations=2, seed=0)
    assert out.index.tolist() == [0, 2, 3, 1, 7, 5, 6, 4, 1, 4, 2, 7, 6, 0, 3, 5]
    node = torch.arange(12)
    out = node_sequences(node % 3, node % 2, num_bins=2, clusters=True, seed=11)
    assert out.index.tolist() == [8, 0, 10, 2, 6, 4, 11, 9, 1, 5, 3, 7]


def test_many_graphs_and_scores_that_do_not_fit_one_key(monkeypatch):
    """The same order if what is sorted by has too few bits."""
    monkeypatch.setattr(sys.modules[node_sequences.__module__], "_FREE_BITS", 1)
    batch = torch.randint(0, 9, (200,))
    for score in (torch.rand(200).round(decimals=1), torch.randint(0, 5, (200,))):
        few = node_sequences(score, batch, num_permutations=2, seed=0, num_bins=2)
        monkeypatch.undo()
        cache._CACHE.values.clear()
        enough = node_sequences(score, batch, num_permutations=2, seed=0, num_bins=2)
        assert few.index.equal(enough.index)
        assert few.ptr.equal(enough.ptr)


def test_score_has_no_gradient():
    score = torch.tensor([2.0, 1.0], requires_grad=True)
    assert node_sequences(score).index.tolist() == [1, 0]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.half, torch.float8_e5m2],
)
def test_dtypes(dtype):
    score = torch.tensor([1, 0, 1, 0]).to(dtype)
    out = node_sequences(score, torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert out.index.tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize("kwargs", [{"seed": 3}, {"shuffle": False}, {}])
@pytest.mark.parametrize(
    ("kind", "num_bins"), [("few", 1), ("float", 2), ("clusters", 2), ("tied", 1)]
)
def test_compile(kwargs, num_bins, kind):
    batch = torch.tensor([0, 2, 0, 2, 2, 0, 3, 3, 0])
    score = scores("few" if kind == "clusters" else kind, 9)

    def function(score, batch):
        return node_sequences(
            score,
            batch,
            num_permutations=3,
            num_bins=num_bins,
            clusters=kind == "clusters",
            **kwargs,
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = compiled(score, batch)
    if kwargs:
        expected = function(score, batch)
        assert out.index.equal(expected.index)
        assert out.ptr.unique().equal(expected.ptr.unique())
    assert out.index[:9].sort().values.equal(torch.arange(9))


def test_compile_without_the_number_of_graphs():
    compiled = torch.compile(node_sequences, fullgraph=True, backend="aot_eager")
    for batch in (torch.tensor([5, 0, 5, 9]), torch.tensor([0, 2**40, 1, 1, 0])):
        score = torch.zeros(len(batch))
        index, ptr = compiled(score, batch, seed=1, num_bins=2)
        expected = node_sequences(score, batch, seed=1, num_bins=2)
        assert index.equal(expected.index)
        assert ptr.numel() == 2 * batch.numel() + 1
        assert ptr[:7].equal(expected.ptr)
        assert set(ptr[7:].tolist()) == {batch.numel()}


@pytest.mark.parametrize("kwargs", [{"seed": 3}, {"shuffle": False}, {}])
def test_compile_for_all_sizes(kwargs):
    compiled = torch.compile(
        lambda score: node_sequences(score, **kwargs),
        dynamic=True,
        backend="aot_eager",
        fullgraph=True,
    )
    for size in (5, 9):
        score = torch.randperm(size)
        out = compiled(score)
        assert score[out.index].equal(torch.arange(size))
        assert out.ptr.tolist() == [0, size]


def test_bad_input():
    score = torch.rand(4)
    with pytest.raises(ValueError, match=r"'score' must not hold NaN, got 1 of 4"):
        node_sequences(torch.tensor([0.0, math.nan, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"shape \[3\], got shape \[4\]"):
        node_sequences(score, torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"shape \[num_nodes\], got shape \[4, 1\]"):
        node_sequences(score.view(4, 1))
    with pytest.raises(ValueError, match="'batch' must hold no negative"):
        node_sequences(score, torch.tensor([0, -1, 0, 0]))
    with pytest.raises(TypeError, match="'batch' must hold integers"):
        node_sequences(score, torch.zeros(4))
    for name in ("num_bins", "num_permutations"):
        with pytest.raises(ValueError, match=f"'{name}' must be at least 1, got 0"):
            node_sequences(score, **{name: 0})
        with pytest.raises(TypeError, match=f"'{name}' must be an integer, got 'float"):
            node_sequences(score, **{name: 1.5})
    with pytest.raises(TypeError, match="'seed' must be an integer"):
        node_sequences(score, seed=0.5)
    with pytest.raises(TypeError, match=r"clusters.*got dtype torch.float32"):
        node_sequences(score, clusters=True)
    with pytest.raises(TypeError, match="real"):
        node_sequences(score.to(torch.cfloat))
    for name in ("score", "batch"):
        with pytest.raises(TypeError, match=f"'{name}' must be a tensor.*got 'list'"):
            node_sequences(**{"score": score, name: [0, 0, 1, 1]})
    for dtype in (torch.cfloat, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(TypeError, match="'batch' must hold integers"):
            node_sequences(score, torch.zeros(4).to(dtype))
    for name in ("num_permutations", "num_bins"):
        for number in (2**40, 2**70):
            with pytest.raises(ValueError, match=f"'{name}'.*less than 2.*31"):
                node_sequences(score, **{name: number})
    with pytest.raises(ValueError, match="'batch' must be of the device of 'score'"):
        node_sequences(score, torch.zeros(4, device="meta").long())
    with pytest.raises(ValueError, match="'generator' and 'seed'"):
        node_sequences(score, seed=0, generator=torch.Generator())


@pytest.mark.cuda
def test_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    batch = torch.arange(100) % 7
    for kind in ("tied", "few", "wide", "float"):
        score = scores(kind, 100)
        out = node_sequences(score.cuda(), batch.cuda(), seed=3, num_bins=2)
        expected = node_sequences(score, batch, seed=3, num_bins=2)
        assert out.index.is_cuda
        assert out.ptr.is_cuda
        assert out.index.cpu().equal(expected.index)
    with pytest.raises(ValueError, match="'generator' must be of the device"):
        node_sequences(score.cuda(), batch.cuda(), generator=torch.Generator())
