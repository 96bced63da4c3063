"""What is refused, and what happens far from diagonal dominance."""

import warnings

import numpy as np
import pytest
import torch
from asserts import (
    Inputs,
    assert_gradients_match,
    assert_near,
    dense_mix,
    make_inputs,
    ring,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Graph, graphs

from pyg_chimera.ops import dag_scan, explain, path_transition, resolvent_mix

EDGES = [(0, 1), (1, 2), (3, 4)]  # good for both operators
BACKENDS = ("auto", "numba", "torch", "reference")
SPARSE = [(form, backend) for form in ("state", "mask") for backend in BACKENDS[1:3]]

operators = pytest.mark.parametrize("operator", [resolvent_mix, dag_scan])
backends = pytest.mark.parametrize("backend", BACKENDS)
sparse = pytest.mark.parametrize(("form", "backend"), SPARSE, ids=map("-".join, SPARSE))


def good() -> Inputs:
    return make_inputs(EDGES, 5, [0, 0, 0, 1, 1])


def spoilt(x: torch.Tensor, edge: int, head: int, by: float) -> torch.Tensor:
    x = x.clone()
    x[edge, head] = by
    return x


# ------------------------------------------------------------------------- bad input

BAD = {
    "query_2d": ({"query": lambda x: x[:, 0]}, ValueError,
                 r"'query' must be \[nodes, heads, channels\], got \[5, 5\]"),
    "key_4d": ({"key": lambda x: x[None]}, ValueError,
               r"'key' must be \[nodes, heads, channels\], got \[1, 5, 2, 5\]"),
    "value_1d": ({"value": lambda x: x[:, 0, 0]}, ValueError,
                 r"'value' must be \[nodes, heads, channels\], got \[5\]"),
    "key_states": ({"key": lambda x: x[..., :4]}, ValueError,
                   r"same shape, got \[5, 2, 5\] and \[5, 2, 4\]"),
    "nodes": ({"value": lambda x: x[:4]}, ValueError,
              r"as many nodes, got \[5, 2, 5\] and \[4, 4, 3\]"),
    "groups": ({"value": lambda x: x[:, :3]}, ValueError,
               r"a divisor, got \[5, 2, 5\] and \[5, 3, 3\]"),
    "no_groups": ({"query": lambda x: x[:, :0], "key": lambda x: x[:, :0]}, ValueError,
                  r"a divisor, got \[5, 0, 5\] and \[5, 4, 3\]"),
    "weight_1d": ({"edge_weight": lambda x: x[:, 0]}, ValueError,
                  r"\[edges, heads\] with 4 heads, got \[3\]"),
    "weight_heads": ({"edge_weight": lambda x: x[:, :1]}, ValueError,
                     r"\[edges, heads\] with 4 heads, got \[3, 1\]"),
    "weight_edges": ({"edge_weight": lambda x: x[:2]}, ValueError,
                     r"as many edges, got \[2, 3\] and \[2, 4\]"),
    "edge_index_shape": ({"edge_index": lambda x: x.t()}, ValueError,
                         r"'edge_index' must be \[2, edges\], got \[3, 2\]"),
    "edge_index_1d": ({"edge_index": lambda x: x[0]}, ValueError,
                      r"'edge_index' must be \[2, edges\], got \[3\]"),
    "edge_index_float": ({"edge_index": lambda x: x.float()}, TypeError,
                         "'edge_index' must be integer, got torch.float32"),
    "edge_index_bool": ({"edge_index": lambda x: x.bool()}, TypeError,
                        "'edge_index' must be integer, got torch.bool"),
    "query_int": ({"query": lambda x: x.long()}, TypeError,
                  "'query' must be floating point, got torch.int64"),
    "key_bool": ({"key": lambda x: x > 0}, TypeError,
                 "'key' must be floating point, got torch.bool"),
    "value_complex": ({"value": lambda x: x + 0j}, TypeError,
                      "'value' must be floating point, got torch.complex128"),
    "weight_int": ({"edge_weight": lambda x: x.int()}, TypeError,
                   "'edge_weight' must be floating point, got torch.int32"),
    "index_high": ({"edge_index": lambda x: x + 1}, ValueError,
                   r"node indices in \[0, num_nodes\) = \[0, 5\) \(got 5 in"),
    "index_negative": ({"edge_index": lambda x: x - 1}, ValueError,
                       r"node indices in \[0, num_nodes\) = \[0, 5\) \(got -1 in"),
    "batch_length": ({"batch": lambda x: x[:4]}, ValueError,
                     r"shape \[num_nodes\] = \[5\] \(got shape \[4\]\)"),
    "batch_2d": ({"batch": lambda x: x[:, None]}, ValueError,
                 r"\(got shape \[5, 1\]\)"),
    "batch_negative": ({"batch": lambda x: x - 1}, ValueError,
                       r"no negative entries \(got -1\)"),
    "batch_float": ({"batch": lambda x: x.float()}, TypeError,
                    "'batch' must hold integers .*float32"),
    "batch_bool": ({"batch": lambda x: x.bool()}, TypeError,
                   "'batch' must hold integers .*bool"),
    "batch_crossed": ({"batch": lambda x: torch.tensor([0, 0, 1, 1, 1])}, ValueError,
                      "edge 1 goes from node 1 of graph 0 to node 2 of graph 1"),
    "weight_nan": ({"edge_weight": lambda x: spoilt(x, 1, 2, np.nan)}, ValueError,
                   "finite, but edge 1 has nan in head 2"),
    "weight_inf": ({"edge_weight": lambda x: spoilt(x, 2, 0, -np.inf)}, ValueError,
                   "finite, but edge 2 has -inf in head 0"),
}  # fmt: skip


@operators
@backends
@pytest.mark.parametrize("case", BAD)
def test_bad_tensors(operator, case, backend):
    changes, error, match = BAD[case]
    inputs = good()
    operator(*inputs, backend=backend)  # nothing that is remembered may let bad pass
    inputs = inputs._replace(
        **{name: change(getattr(inputs, name)) for name, change in changes.items()}
    )
    with pytest.raises(error, match=match):
        operator(*inputs, backend=backend)
    with pytest.raises(error, match=match):
        explain(operator.__name__, *inputs, backend=backend)


@operators
@backends
def test_bad_rank(operator, backend):
    for rank, error, match in (
        (torch.arange(4), ValueError, r"one entry per node, \[5\], got \[4\]"),
        (torch.arange(5)[None], ValueError, r"one entry per node, \[5\], got \[1, 5\]"),
        (torch.arange(5.0), TypeError, "'rank' must .*integer"),
    ):
        with pytest.raises(error, match=match):
            operator(*good(), rank=rank, backend=backend)


BAD_OPTIONS = [
    ({"solver": "lu"}, r"'solver' must be one of \('auto', .*\), got 'lu'"),
    ({"form": "states"}, r"'form' must be one of \('auto', .*\), got 'states'"),
    ({"backend": "cuda"}, r"'backend' must be one of \('auto', .*\), got 'cuda'"),
    ({"solver": "neumann"}, "'num_terms' must be given.*solver='neumann'"),
    ({"num_terms": 3}, "only with it.*solver='auto', num_terms=3"),
    ({"solver": "dense", "num_terms": 3}, "only with it.*'dense', num_terms=3"),
    ({"solver": "neumann", "num_terms": -1}, "integer >= 0, got -1"),
    ({"solver": "neumann", "num_terms": 2.5}, "integer >= 0, got 2.5"),
    ({"solver": "dense", "backend": "numba"}, "'dense' has no numba backend"),
    (
        {"solver": "neumann", "backend": "numba", "num_terms": 2},
        "'neumann' has no numba backend",
    ),
]


@pytest.mark.parametrize(("options", "match"), BAD_OPTIONS)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        resolvent_mix(*good(), **options)
    with pytest.raises(ValueError, match=match):
        explain("resolvent_mix", *good(), **options)


@pytest.mark.parametrize(("options", "match"), BAD_OPTIONS[1:3])
def test_bad_options_of_dag_scan(options, match):
    with pytest.raises(ValueError, match=match):
        dag_scan(*good(), **options)
    with pytest.raises(ValueError, match=match):
        explain("dag_scan", *good(), **options)


def test_bad_operator_to_explain():
    with pytest.raises(ValueError, match=r"'operator' must be one of .*, got 'mix'"):
        explain("mix", *good())


# ------------------------------------------------------- far from diagonally dominant


def undominated(seed: int, num_nodes: int = 12, scale: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, 5 * num_nodes), generator=generator)
    inputs = make_inputs(edge_index, num_nodes, size=(1, 1, 3, 2), seed=seed)
    weight = torch.randn(edge_index.size(1), 1, generator=generator).double()
    return inputs._replace(edge_weight=scale * weight)


def right_or_refused(inputs: Inputs, form: str, backend: str) -> bool:
    """Whether sparse refuses; if not, it must be about as good as a dense solve."""
    exact = dense_mix(*inputs[:5])
    matrix = torch.eye(len(exact), dtype=torch.double)
    source, target = inputs.edge_index
    matrix.index_put_((target, source), -inputs.edge_weight[:, 0], accumulate=True)
    tol = max(1e-12, 1e-14 * torch.linalg.cond(matrix).item())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = resolvent_mix(*inputs, form=form, backend=backend)
    assert_near(auto, exact, tol)
    try:
        out = resolvent_mix(*inputs, solver="sparse", form=form, backend=backend)
    except ValueError as error:
        assert "without pivoting" in str(error)  # noqa: PT017
        return True
    assert_near(out, exact, tol)
    return False


@sparse
def test_sparse_is_right_or_refuses(form, backend):
    refused = [
        right_or_refused(undominated(seed, scale=scale), form, backend)
        for seed in range(20)
        for scale in (0.5, 3.0, 100.0)
    ]
    assert not all(refused)


#: I - A is [[tiny, -1], [-1, 1]] for nodes 0, 1: fine for a solver that pivots.
SMALL_PIVOT = [(0, 0), (0, 1), (1, 0)]


@sparse
@pytest.mark.parametrize("tiny", [0.0, 1e-12])
def test_small_pivot(form, backend, tiny):
    # With so many isolated nodes that nobody would think of dense matrices.
    inputs = make_inputs(SMALL_PIVOT, 12, size=(1, 1, 3, 2))
    weight = torch.tensor([[1 - tiny], [1.0], [1.0]], dtype=torch.double)
    inputs = inputs._replace(edge_weight=weight)
    with pytest.raises(ValueError, match=r"without pivoting.*solver='dense' or 'auto'"):
        resolvent_mix(*inputs, solver="sparse", form=form, backend=backend)

    def auto(*args):
        with pytest.warns(UserWarning, match="solver='dense' is used"):
            return resolvent_mix(*args, form=form, backend=backend)

    with warnings.catch_warnings():  # the backward pass may say it again
        warnings.simplefilter("ignore")
        assert_gradients_match(auto, inputs)


@sparse
def test_small_pivot_beside_large_weights(form, backend):
    """A graph of large weights must not hide that another one needs pivots."""
    weight = torch.tensor([[1 - 1e-13], [1.0], [1.0], [1e12]], dtype=torch.double)
    inputs = make_inputs([*SMALL_PIVOT, (2, 2)], 3, [0, 0, 1], (1, 1, 3, 2))
    inputs = inputs._replace(edge_weight=weight)
    try:
        out = resolvent_mix(*inputs, solver="sparse", form=form, backend=backend)
    except ValueError as error:
        assert "without pivoting" in str(error)  # noqa: PT017
    else:
        assert_near(out, dense_mix(*inputs[:5]), 1e-9)


@sparse
@pytest.mark.parametrize("flip", [False, True])
def test_dominant_rows_are_always_accepted(form, backend, flip):
    """As the error message promises; a ring in either direction, natural order."""
    n = 400
    edge_index = ring(n).flip(0) if flip else ring(n)
    inputs = make_inputs(edge_index, n, size=(1, 1, 1, 1))
    weight = torch.full((n, 1), 0.999, dtype=torch.double)
    inputs = inputs._replace(edge_weight=weight)
    mix = {"solver": "sparse", "form": form, "backend": backend}
    out = resolvent_mix(*inputs, **mix, rank=torch.arange(n))
    assert_near(out, dense_mix(*inputs[:5]), 1e-9)
    assert_near(resolvent_mix(*inputs, **mix), out, 1e-9)


@sparse
@settings(max_examples=25, derandomize=True, deadline=None)
@given(graph=graphs(min_nodes=1, max_nodes=10), by_column=st.booleans())
def test_weakly_dominant_graphs_are_accepted(form, backend, graph: Graph, by_column):
    """Any order of elimination will do, and no warning is given."""
    edge_index, num_nodes = graph
    inputs = make_inputs(edge_index.flip(0) if by_column else edge_index, num_nodes,
                         size=(2, 1, 3, 2), bound=0.999)  # fmt: skip
    inputs = inputs._replace(edge_index=edge_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = resolvent_mix(*inputs, solver="sparse", form=form, backend=backend,
                            rank=torch.randperm(num_nodes))  # fmt: skip
    assert_near(out, dense_mix(*inputs[:5]), 1e-9)


@sparse
def test_undirected_path_is_an_m_matrix(form, backend):
    """Not dominant at all, but A_ij A_ji < 1/4 makes elimination safe."""
    n = 60
    forward = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = torch.cat([forward, forward.flip(0)], dim=1)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(2 * n - 2, 2, generator=generator, dtype=torch.double)
    weight = path_transition(
        edge_index, n, torch.exp(3 * raw), torch.zeros(n, 2, dtype=torch.double)
    )
    rows = torch.zeros(n, 2, dtype=torch.double).index_add(0, edge_index[1], weight)
    columns = torch.zeros(n, 2, dtype=torch.double).index_add(0, edge_index[0], weight)
    assert rows.max() > 100
    assert columns.max() > 100
    inputs = make_inputs(edge_index, n, size=(2, 1, 3, 4))
    inputs = inputs._replace(edge_weight=weight)

    def mix(*args):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return resolvent_mix(*args, solver="sparse", form=form, backend=backend)

    assert_gradients_match(mix, inputs)


@pytest.mark.parametrize("solver", ["auto", "sparse", "dense"])
@pytest.mark.parametrize("form", ["state", "mask"])
@backends
@pytest.mark.filterwarnings("ignore:.*solver='dense' is used")
def test_singular(solver, form, backend):
    """Two nodes that feed each other all they have."""
    if (solver, backend) == ("dense", "numba"):
        backend = "auto"
    inputs = make_inputs([(0, 1), (1, 0)], 2, size=(1, 1, 3, 2))
    inputs = inputs._replace(edge_weight=torch.ones(2, 1, dtype=torch.double))
    with pytest.raises(ValueError, match=r"singular|without pivoting"):
        resolvent_mix(*inputs, solver=solver, form=form, backend=backend)
