"""What is special to graphs with cycles: solvers, elimination, and where it fails."""

import warnings

import numpy as np
import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import (
    OPERATORS,
    Case,
    assert_results,
    computed,
    example,
    expected,
    expected_of,
    make_case,
    neumann_oracle,
    results,
    structure,
)
from strategies import Graph, graphs

from pyg_chimera.ops import (
    chimera_transition,
    explain,
    path_transition,
    resolvent_mix,
)
from pyg_chimera.ops.common import cache, memory
from pyg_chimera.ops.recurrence.plain import resolvent as torch_backend
from pyg_chimera.ops.structure import elimination_rank

OPERATOR = OPERATORS["resolvent_mix"]
SPARSE = {x: y for x, y in OPERATOR.variants.items() if x.startswith("sparse")}
sparse = pytest.mark.parametrize("options", SPARSE.values(), ids=SPARSE)


def weighted(edges, num_nodes, weight, size=(1, 1, 3, 2), batch=None) -> Case:
    """Random inputs on a graph of known weights."""
    case = make_case(OPERATOR, structure(edges, num_nodes, batch), size)
    weight = torch.as_tensor(weight, dtype=torch.double)
    return case.changed(edge_weight=weight.view(-1, 1).expand(-1, size[0]))


def ring(num_nodes):
    node = torch.arange(num_nodes)
    return torch.stack([node, (node + 1) % num_nodes])


# ------------------------------------------------------------------- powers and ranks


@pytest.mark.parametrize("name", ["mixed", "unsorted_batch"])
def test_neumann_is_the_sum_of_powers(name):
    case = example("neumann", name)
    # Rows may sum to more than one: a finite sum always exists.
    case = case.changed(edge_weight=1.7 * case.floats["edge_weight"])
    for num_terms in (0, 1, 2, 3, 5, 8):
        want = results(
            lambda k=num_terms, **x: neumann_oracle(x, case.structure, k), case.floats
        )
        for options in OPERATORS["neumann"].variants.values():
            got = computed(case, {**options, "num_terms": num_terms})
            assert_results(got, want, what=f"of {num_terms} terms, {options}")


@pytest.mark.parametrize("form", ["state", "mask"])
def test_enough_terms_are_exact_on_nilpotent_graphs(form):
    # A binary tree of depth 3: all powers beyond the third vanish.
    edges = [((i - 1) // 2, i) for i in range(1, 15)]
    case = make_case(OPERATOR, structure(edges, 15))
    exact = expected_of(case)["output"]
    options = {"solver": "neumann", "form": form}
    assert_near(case(**options, num_terms=3), exact, 1e-12)
    assert not torch.allclose(case(**options, num_terms=2), exact)


@pytest.mark.parametrize("options", OPERATOR.variants.values(), ids=OPERATOR.variants)
def test_rank_changes_nothing(options):
    case = example("resolvent_mix", "several_blocks")
    num_nodes = len(case.structure.graph)
    good = elimination_rank(case.structure.edge_index, num_nodes)
    # Ranks within graphs, as they come from a loader, tie across graphs.
    for rank in (good, good.int(), torch.randperm(num_nodes), good // 3):
        got = computed(case, {**options, "rank": rank})
        assert_results(got, expected("resolvent_mix", "several_blocks"))


def test_long_ring_is_exact():
    # Nothing decays: the first node hears itself through all of the others.
    n = 3000
    one = torch.ones(n, 1, 1, dtype=torch.double)
    weight = torch.full((n, 1), 0.999, dtype=torch.double)
    options = {"backend": "numba", "form": "state", "rank": torch.arange(n)}
    out = resolvent_mix(one, one, one, ring(n), weight, **options)
    assert_near(out, torch.full_like(out, 1000.0))


# -------------------------------------------------------------------------- the choice


def star(num_nodes):
    leaves = torch.arange(1, num_nodes)
    edges = torch.stack([torch.zeros_like(leaves), leaves])
    return torch.cat([edges, edges.flip(0)], dim=1)


def explained(edges, num_nodes, size, batch=None, **options):
    case = make_case(OPERATOR, structure(edges, num_nodes, batch), size)
    return explain("resolvent_mix", **case.inputs, **options)


def test_auto_prefers_masks_for_small_graphs_and_states_for_large_ones():
    assert explained(star(20), 20, (2, 1, 64, 64)).form == "mask"
    choice = explained(star(5000), 5000, (2, 1, 4, 4))
    assert choice[1:4] == ("sparse", "state", "numba")


def test_chunks_are_for_paths():
    path = torch.stack([torch.arange(399), torch.arange(1, 400)])
    path = torch.cat([path, path.flip(0)], dim=1)
    size = (2, 1, 64, 32)
    assert explained(path, 400, size)[1:4] == ("sparse", "chunk", "numba")
    assert explained(path, 400, size, backend="torch").form == "mask"
    for options, why in (
        ({}, "form='chunk' is for graphs whose components are paths"),
        ({"backend": "torch"}, "form='chunk' has no torch backend"),
    ):
        for edges in (star(5), ring(5)):
            with pytest.raises(ValueError, match=why):
                explained(edges, 5, (1, 1, 2, 2), form="chunk", **options)


@pytest.mark.parametrize("pivot", [0.0, 1e-9])
def test_paths_that_need_pivots_are_left_to_dense_matrices(pivot):
    edges = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 2, 1]])
    case = make_case(OPERATOR, structure(edges, 3), (1, 1, 2, 2))
    weight = torch.tensor([1 - pivot, 0.5, 0.5, 0.1, 0.1]).double().view(-1, 1)
    case = case.changed(edge_weight=weight)
    with pytest.raises(ValueError, match="without pivoting"):
        case(solver="sparse", form="chunk")
    with pytest.warns(UserWarning, match="solver='dense' is used"):
        assert_near(case(), expected_of(case)["output"], 1e-7)


def test_auto_does_not_fill_memory_with_masks():
    # One resolvent of 1.15 GB; or of 4 MB, and 550 more beside it.
    choice = explained(star(12_000), 12_000, (1, 1, 2, 2))
    assert choice.form == "state"
    assert "memory" in choice.reason
    batch = torch.arange(1101).repeat_interleave(torch.tensor([700] + [20] * 1100))
    edges = torch.arange(1, len(batch))
    edges = torch.stack([edges - 1, edges])[:, batch[1:] == batch[:-1]]
    choice = explained(edges, len(batch), (1, 1, 2, 2), batch, solver="sparse")
    assert "memory" not in choice.reason


def test_dense_matrices_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1e9)
    for options in ({"backend": "torch"}, {"solver": "dense"}):
        with pytest.raises(
            ValueError, match=r"12,000 nodes would take .*; use tensors"
        ):
            explained(star(12_000), 12_000, (1, 1, 2, 2), **options)
    assert explained(star(12_000), 12_000, (1, 1, 2, 2)).solver == "sparse"


@pytest.mark.parametrize("solver", ["sparse", "iterative", "neumann"])
def test_what_torch_does_not_compute(solver):
    terms = 2 if solver == "neumann" else None
    options = {"solver": solver, "form": "state", "num_terms": terms}
    with pytest.raises(ValueError, match="form='state' has no torch backend; use"):
        explained(star(5), 5, (1, 1, 2, 2), backend="torch", **options)


@pytest.mark.parametrize("name", ["mixed", "several_blocks"])
@pytest.mark.parametrize("most", [1000, 1 << 20])
def test_groups_of_blocks(name, most, monkeypatch):
    """As on a GPU: by size, padded to the largest."""
    cache._CACHE.values.clear()
    monkeypatch.setattr(torch_backend, "_CPU_NUMEL", most)
    case = example("resolvent_mix", name)
    assert_results(
        computed(case, {"backend": "torch"}), expected("resolvent_mix", name)
    )
    cache._CACHE.values.clear()


# ------------------------------------------------------- far from diagonally dominant

#: I - A is [[tiny, -1], [-1, 1]] for nodes 0, 1: fine for a solver that pivots.
SMALL_PIVOT = [(0, 0), (0, 1), (1, 0)]


@sparse
def test_sparse_is_right_or_refuses(options):
    refused = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        edges = torch.randint(12, (2, 60), generator=generator)
        weight = torch.randn(60, 1, generator=generator).double()
        for scale in (0.5, 3.0, 100.0):
            case = weighted(edges, 12, scale * weight)
            matrix = torch.eye(12, dtype=torch.double)
            matrix.index_put_((edges[1], edges[0]), -scale * weight[:, 0], True)
            tol = max(1e-12, 1e-14 * torch.linalg.cond(matrix).item())
            exact = expected_of(case)["output"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_near(case(**{**options, "solver": "auto"}), exact, tol)
            try:
                out = case(**options)
            except ValueError as refusal:
                refused.append(str(refusal))
            else:
                assert_near(out, exact, tol)
    assert len(refused) < 60
    assert all("without pivoting" in error for error in refused)


@sparse
@pytest.mark.parametrize("tiny", [0.0, 1e-12])
def test_small_pivot(options, tiny):
    # With so many isolated nodes that nobody would think of dense matrices.
    case = weighted(SMALL_PIVOT, 12, [1 - tiny, 1.0, 1.0], batch=[0] * 12)
    with pytest.raises(ValueError, match=r"without pivoting.*solver='dense' or 'auto'"):
        case(**options)
    auto = {**options, "solver": "auto"}
    with pytest.warns(UserWarning, match="solver='dense' is used"):
        out = case(**auto)
    choice = explain("resolvent_mix", **case.inputs, **auto)
    assert choice.solver == "dense"
    assert "dominant" in choice.reason
    assert torch.equal(out, case(solver="dense"))
    with warnings.catch_warnings():  # the backward pass may say it again
        warnings.simplefilter("ignore")
        assert_results(computed(case, auto), expected_of(case))


@sparse
def test_small_pivot_beside_large_weights(options):
    """A graph of large weights must not hide that another one needs pivots."""
    weight = [1 - 1e-13, 1.0, 1.0, 1e12]
    case = weighted([*SMALL_PIVOT, (2, 2)], 3, weight, batch=[0, 0, 1])
    try:
        out = case(**options)
    except ValueError as refusal:
        if "without pivoting" not in str(refusal):
            raise
    else:
        assert_near(out, expected_of(case)["output"])


@sparse
@pytest.mark.parametrize("flip", [False, True])
def test_dominant_rows_are_always_accepted(options, flip):
    """As the error message promises; a ring in either direction, natural order."""
    edges = ring(400).flip(0) if flip else ring(400)
    case = weighted(edges, 400, [0.999] * 400, (1, 1, 1, 1))
    exact = expected_of(case)["output"]
    assert_near(case(**options, rank=torch.arange(400)), exact)
    assert_near(case(**options), exact)


@sparse
@settings(max_examples=25, derandomize=True)
@given(graph=graphs(min_nodes=1, max_nodes=10), by_column=st.booleans())
def test_weakly_dominant_graphs_are_accepted(options, graph: Graph, by_column):
    """Any order of elimination will do, and no warning is given."""
    edges, num_nodes = graph
    case = make_case(
        OPERATOR, structure(edges.flip(0) if by_column else edges, num_nodes)
    )
    weight = case.floats["edge_weight"] * 0.999 / 0.9
    case = make_case(OPERATOR, structure(edges, num_nodes)).changed(edge_weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = case(**options, rank=torch.randperm(num_nodes))
    assert_near(out, expected_of(case)["output"])


@sparse
def test_undirected_path_is_an_m_matrix(options):
    """Not dominant at all, but A_ij A_ji < 1/4 makes elimination safe."""
    n = 60
    forward = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edges = torch.cat([forward, forward.flip(0)], dim=1)
    raw = 3 * torch.randn(2 * n - 2, 2, generator=torch.Generator().manual_seed(0))
    psi = torch.zeros(n, 2, dtype=torch.double)
    weight = path_transition(edges, n, raw.double().exp(), psi)
    for end in edges:
        assert torch.zeros_like(psi).index_add(0, end, weight).max() > 100
    case = make_case(OPERATOR, structure(edges, n), (2, 1, 3, 4))
    case = case.changed(edge_weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_results(computed(case, options), expected_of(case))


@pytest.mark.parametrize("options", OPERATOR.variants.values(), ids=OPERATOR.variants)
@pytest.mark.filterwarnings("ignore:.*solver='dense' is used")
def test_singular(options):
    """Two nodes that feed each other all they have."""
    case = weighted([(0, 1), (1, 0)], 2, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"singular|without pivoting|not converge"):
        case(**options)


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"query": torch.ones(7, 3, 5), "key": torch.ones(7, 3, 5)}, r"a divisor, got"),
        ({"query": torch.ones(7, 0, 5), "key": torch.ones(7, 0, 5)}, r"a divisor, got"),
        ({"key": torch.ones(7, 2, 4)}, r"channels\] = \[7, 2, 5\], got \[7, 2, 4\]"),
        ({"batch": torch.tensor([1, 0, 1, 0, 3, 0, 0])}, "of graph 1 to node 6 of"),
        ({"solver": "neumann"}, "'num_terms' must be given.*solver='neumann'"),
        ({"num_terms": 3}, "only with it.*solver='auto', num_terms=3"),
        ({"solver": "dense", "num_terms": 3}, "only with it.*'dense', num_terms=3"),
        ({"solver": "dense", "backend": "numba"},
         "'dense', form='mask' has no numba backend"),
        ({"solver": "neumann", "backend": "numba", "num_terms": 2, "form": "mask"},
         "'neumann', form='mask' has no numba backend"),
        ({"solver": "iterative", "form": "mask"}, "'form' must be 'auto' or 'state'"),
        ({"solver": "dense", "form": "state"}, "'form' must be 'auto' or 'mask'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(changes, match):
    inputs = {**example("resolvent_mix").inputs, **changes}
    for call in (resolvent_mix, lambda **x: explain("resolvent_mix", **x)):
        with pytest.raises(ValueError, match=match):
            call(**inputs)


@pytest.mark.parametrize("operator", ["resolvent_mix", "dag_scan"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_named(operator, bad):
    case = example(operator)
    weight = case.floats["edge_weight"].clone()
    weight[5, 2] = bad
    for backend in ("auto", "numba", "torch", "reference"):
        with pytest.raises(ValueError, match=f"finite, but edge 5 has {bad} in head 2"):
            case(edge_weight=weight, backend=backend)


def test_dense_solvers_are_exact_where_rows_sum_to_nearly_one():
    n, generator = 20, torch.Generator().manual_seed(0)
    edges = (1 - torch.eye(n)).nonzero().t()
    delta = torch.rand(n, 1, generator=generator)
    weight = chimera_transition(edges, n, delta, delta, torch.full((n, 1), 17.0))
    x = torch.randn(n, 1, 3, generator=generator)

    def results(solver, dtype, **options):
        floats = [y.to(dtype).requires_grad_() for y in (x, x.flip(0), x.cos(), weight)]
        out = resolvent_mix(*floats[:3], edges, floats[3], solver=solver, **options)
        return out, *torch.autograd.grad(out.square().sum(), floats)

    want = results("sparse", torch.double)
    got = results("dense", torch.float, backend="torch")
    for y, z in zip(got, want, strict=True):
        assert (y - z).abs().max() < 1e-5 * z.abs().max()


def test_samples_may_have_different_graphs():
    """Under `torch.vmap`, although what is saved for gradients differs in size."""
    torch.manual_seed(0)
    x = torch.randn(4, 1, 3, dtype=torch.double)
    path = torch.tensor([[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]])
    ring = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 3, 0, 2, 3]])
    both = torch.stack([path, ring])
    weight = torch.full((6, 1), 0.3, dtype=torch.double)

    def gradient(edges, w):
        def loss(y):
            return resolvent_mix(y, x, x, edges, w).square().sum()

        return torch.func.grad(loss)(x)

    got = torch.vmap(gradient, (0, None))(both, weight)
    assert_near(got, torch.stack([gradient(edges, weight) for edges in both]), 1e-12)
    with pytest.raises(ValueError, match="at least one sample"):
        torch.vmap(gradient, (0, None))(both[:0], weight)


def test_what_small_graphs_need_not_read_has_gradients():
    for n, backend in ((0, "reference"), (1, "reference"), (0, "auto"), (1, "auto")):
        floats = [torch.randn(n, 1, 2, requires_grad=True) for _ in range(3)]
        weight = torch.zeros(0, 1, requires_grad=True)
        edges = torch.zeros(2, 0, dtype=torch.long)
        out = resolvent_mix(*floats, edges, weight, backend=backend)
        grads = torch.autograd.grad(out.sum(), [*floats, weight])
        assert [g.shape for g in grads] == [y.shape for y in (*floats, weight)]


@pytest.mark.parametrize("form", ["state", "mask", "chunk"])
def test_no_heads(form):
    x, edges = torch.randn(3, 1, 2), torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match=r"'value' must have heads, got \[3, 0, 2\]"):
        resolvent_mix(x, x, x[:, :0], edges, torch.zeros(1, 0), form=form)


@pytest.mark.parametrize("solver", ["dense", "neumann"])
def test_only_eliminations_cut_paths(solver):
    x, edges = torch.randn(3, 1, 2), torch.tensor([[0], [1]])
    terms = 1 if solver == "neumann" else None
    with pytest.raises(ValueError, match=f"'form' must .* with solver='{solver}'"):
        resolvent_mix(
            x, x, x, edges, torch.zeros(1, 1), solver=solver, num_terms=terms,
            form="chunk",
        )  # fmt: skip


@pytest.mark.parametrize("solver", ["dense", "neumann"])
def test_hooks_on_saved_tensors(solver):
    """Also in the backward pass, where autograd differentiates plain PyTorch."""
    case = example("resolvent_mix")
    options = {"solver": solver, "form": "mask", "backend": "torch"}
    if solver == "neumann":
        options["num_terms"] = 3
    want = computed(case, options)
    with torch.autograd.graph.save_on_cpu():
        assert_results(computed(case, options), want)


@pytest.mark.parametrize("form", ["auto", "mask", "state"])
def test_terms_as_transforms_store_them(form):
    case = example("resolvent_mix").inputs
    options = {"solver": "neumann", "form": form}
    expected = resolvent_mix(**case, **options, num_terms=3)
    for three in (torch.tensor([3]), np.int64(3), np.array(3)):
        assert torch.equal(resolvent_mix(**case, **options, num_terms=three), expected)
