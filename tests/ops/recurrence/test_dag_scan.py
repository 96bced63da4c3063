"""What is special to `dag_scan`: ranks, long paths, cycles."""

import pytest
import torch
from asserts import assert_near
from operators import (
    OPERATORS,
    assert_results,
    computed,
    example,
    expected,
    expected_of,
    make_case,
    structure,
)

from pyg_chimera.ops import CycleError, dag_scan, explain
from pyg_chimera.ops.structure import topological_rank

OPERATOR = OPERATORS["dag_scan"]
VARIANTS = OPERATOR.variants
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def path(num_nodes):
    return torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)])


@variants
def test_weights_of_any_size(options):
    # Far from diagonally dominant: 1e3 along a path, 1e-3 beside it.
    edges = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]
    factor = torch.tensor([1e3, 1e3, 1e3, 1e-3, 1e-3, -1.0], dtype=torch.double)
    case = make_case(OPERATOR, structure(edges, 4))
    weight = case.floats["edge_weight"] * factor.unsqueeze(-1)
    case = case.changed(edge_weight=weight)
    assert_results(computed(case, options), expected_of(case))


@variants
def test_any_topological_rank_will_do(options):
    case = example("dag_scan", "several_blocks")
    rank = topological_rank(case.structure.edge_index, len(case.structure.graph))
    for good in (rank, rank.int(), 3 * rank - 7):
        got = computed(case, {**options, "rank": good})
        assert_results(got, expected("dag_scan", "several_blocks"))


@variants
def test_future_is_not_seen(options):
    case = make_case(OPERATOR, structure(path(50), 50))
    value = case.floats["value"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(case(value=value, **options)[20].sum(), value)
    assert (grad[21:] == 0).all()
    assert (grad[:21] != 0).any(-1).all()


def test_long_path():
    # Half of a state survives a step: geometric sums, far beyond any recursion limit.
    n = 20_000
    one = torch.ones(n, 1, 1, dtype=torch.double)
    weight = torch.full((n - 1, 1), 0.5, dtype=torch.double)
    out = dag_scan(one, one, one, path(n), weight)
    assert_near(out.view(-1), 2 - 0.5 ** torch.arange(n, dtype=torch.double), 1e-12)


def test_states_decay_to_zero_not_to_denormals():
    """What decays to nothing far from where it was written stays nothing."""
    case = make_case(OPERATOR, structure(path(400), 400), (1, 1, 2, 2)).to(
        torch.float32
    )
    key = torch.zeros_like(case.floats["key"])
    key[0] = 1
    weight = torch.full((399, 1), 0.5)
    out = case(key=key, edge_weight=weight, form="state", backend="numba")
    assert out[100].abs().max() > 0
    assert (out[150:] == 0).all()


def test_chunks_are_for_paths():
    case = example("paths", "several_blocks", (2, 1, 16, 16))
    choice = explain("dag_scan", **case.inputs)
    assert (choice.form, choice.backend) == ("chunk", "numba")
    assert explain("dag_scan", **case.inputs, backend="torch").form != "chunk"
    with pytest.raises(ValueError, match="form='chunk' has no torch backend"):
        case(form="chunk", backend="torch")
    for name in ("diamonds", "several_blocks"):
        case = example("dag_scan", name)
        assert explain("dag_scan", **case.inputs).form != "chunk"
        with pytest.raises(ValueError, match="form='chunk' is for paths"):
            case(form="chunk")


@pytest.mark.parametrize("size", [(1, 1, 4, 32), (3, 1, 4, 5), (6, 2, 4, 8)])
def test_chunks_of_few_paths_on_many_threads(size):
    """Heads, and slices of channels, are shared out among them."""
    case = make_case(OPERATOR, structure(path(200), 200), size)
    weight = case.floats["edge_weight"]
    weight[[0, 63, 64, 150]] = 0
    want = expected_of(case)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert_results(computed(case, {"form": "chunk"}), want)


@variants
@pytest.mark.parametrize(
    ("edges", "cycle"),
    [([(0, 1), (1, 4), (4, 2), (2, 1), (2, 3)], [1, 4, 2]), ([(0, 1), (2, 2)], [2])],
)
def test_cycle_is_named(options, edges, cycle):
    case = make_case(OPERATOR, structure(edges, 5))
    for rank in (None, torch.arange(5)):
        with pytest.raises(CycleError, match=" -> ".join(map(str, cycle))) as info:
            case(rank=rank, **options)
        assert info.value.cycle == cycle
        assert isinstance(info.value, ValueError)


@variants
def test_bad_rank(options):
    case = make_case(OPERATOR, structure([(0, 1), (0, 2)], 3))
    with pytest.raises(
        ValueError, match=r"grow along every edge, but edge 1 goes from node 0 "
        r"\(rank 1\) to node 2 \(rank 1\)",
    ):  # fmt: skip
        case(rank=torch.tensor([1, 2, 1]), **options)
    with pytest.raises(ValueError, match=r"be \[nodes\] = \[3\], got \[2\]"):
        case(rank=torch.tensor([0, 1]), **options)


def test_lists_of_grids_are_absent():
    """AOTInductor passes None for empty ones, which exported programs may have."""
    query, key, value = torch.randn(3, 3, 1, 2).unbind()
    index, weight = path(3), torch.rand(2, 1)
    graph = (None, None, weight, None, index, None, None, None, 1)
    for lists in (None, []):
        out, _ = torch.ops.pyg_chimera.dag_scan(
            query, key, value, *graph, lists, lists, "auto", "auto"
        )
        assert out.equal(dag_scan(query, key, value, index, weight))
    for name in ("dag_scan", "stm_scan", "grid_scan", "grid_dag_scan"):
        for op in (name, f"{name}_backward"):
            schema = str(getattr(torch.ops.pyg_chimera, op).default._schema)
            assert "int[]? sizes, int[]? orientations" in schema
