"""What is special to `delta_scan`: the rule itself, its forms, and what it refuses."""

import resource
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from operators import (
    OPERATORS,
    computed,
    example,
    make_case,
    structure,
)

from pyg_chimera.ops import CycleError, dag_scan, delta_scan, explain
from pyg_chimera.ops.common import memory
from pyg_chimera.ops.recurrence.cpu.block_elimination import (
    SIDE,
    eliminate,
    solve,
)
from pyg_chimera.ops.recurrence.plain import delta_levels

FORMS = ("mask", "state")


def path(length):
    node = torch.arange(length)
    return torch.stack([node[:-1], node[1:]])


def inputs(num_nodes, num_edges, heads=2, keys=4, channels=3):
    generator = torch.Generator().manual_seed(0)
    x = [
        torch.randn(num_nodes, heads, size, generator=generator, dtype=torch.double)
        for size in (keys, keys, channels)
    ]
    x[1] = F.normalize(x[1], dim=-1)
    beta, weight = (
        torch.rand(n, heads, generator=generator, dtype=torch.double)
        for n in (num_nodes, num_edges)
    )
    return [*x, 2 * beta, weight]


def step_by_step(query, key, value, beta, weight):
    """Gated DeltaNet on a path: S = a S, then S = S + b k (v - k^T S)."""
    outs, S = [], torch.zeros_like(key[0].unsqueeze(-1) * value[0].unsqueeze(-2))
    for t in range(len(query)):
        S = S if t == 0 else weight[t - 1, :, None, None] * S
        k = key[t].unsqueeze(-1)
        found = (k * S).sum(-2, keepdim=True)
        S = S + beta[t, :, None, None] * k * (value[t].unsqueeze(-2) - found)
        outs.append((query[t].unsqueeze(-1) * S).sum(-2))
    return torch.stack(outs)


def results(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


# --------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [2, 63, 64, 65, 200])
def test_a_path_is_gated_deltanet(form, length):
    index, tensors = path(length), inputs(length, length - 1)
    got = results(lambda *x: delta_scan(*x[:4], index, x[4], form=form), tensors)
    want = results(step_by_step, tensors)
    for x, y in zip(got, want, strict=True):
        assert_near(x, y)


def test_a_key_reads_what_it_has_written_last():
    """The second node replaces, the third adds, the fourth reflects."""
    one, other = torch.eye(2)
    key = torch.stack([one, one, other, one])[:, None]
    value = torch.tensor([3.0, 5.0, 7.0, 0.0]).view(4, 1, 1)
    beta = torch.tensor([1.0, 1.0, 1.0, 2.0]).view(4, 1)
    query = torch.tensor([1.0, 10.0]).expand(4, 1, 2)
    for form in FORMS:
        out = delta_scan(query, key, value, beta, path(4), torch.ones(3, 1), form=form)
        assert_near(out.view(4), torch.tensor([3.0, 5.0, 75.0, 65.0]), 1e-6)


def test_keys_at_right_angles_only_add():
    """Then nothing is overwritten: it is `dag_scan`."""
    V = 6
    query, _, value, _, weight = inputs(V, V - 1, keys=V)
    key = torch.eye(V).double()[:, None].expand(V, 2, V)
    beta = torch.ones(V, 2).double()
    out = delta_scan(query, key, value, beta, path(V), weight)
    assert_near(out, dag_scan(query, key, value, path(V), weight))


@pytest.mark.parametrize("form", FORMS)
def test_nodes_that_write_nothing(form):
    """Their outputs and gradients, that of beta among them, are right."""
    tensors = inputs(70, 69)
    tensors[3][::3] = 0
    index = path(70)
    got = results(lambda *x: delta_scan(*x[:4], index, x[4], form=form), tensors)
    for x, y in zip(got, results(step_by_step, tensors), strict=True):
        assert_near(x, y)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_zero_and_below(form):
    tensors = inputs(140, 139)
    tensors[4][::5] = 0
    tensors[4][1::4] *= -1
    index = path(140)
    got = results(lambda *x: delta_scan(*x[:4], index, x[4], form=form), tensors)
    for x, y in zip(got, results(step_by_step, tensors), strict=True):
        assert_near(x, y)


@pytest.mark.parametrize(
    "options", [{"backend": "numba"}, {"backend": "torch"}], ids=str
)
def test_cycles_that_hardly_lose_anything(options):
    """In float32: L is a hundred times what is left of a state."""
    case = make_case(
        OPERATORS["delta_scan"], structure([(0, 1), (1, 2), (2, 0), (0, 0)], 3)
    )
    case = case.changed(edge_weight=1.1 * case.floats["edge_weight"])  # rows of 0.99
    want = computed(case, {"backend": "reference"})
    got = computed(case.to(torch.float32), options)
    for name, x in want.items():
        assert_near(got[name], x, 1e-5, name)


def reflected(lost):
    """Pairs of nodes that reflect one key: the smallest pivots there are."""
    pairs = 20
    first = torch.arange(0, 2 * pairs, 2)
    index = torch.cat([torch.stack([first, first + 1]), path(2 * pairs)[:, 1::2]], 1)
    index = torch.cat([index, index.flip(0)], 1)
    x = inputs(2 * pairs, index.size(1))
    x[1] = x[1][:1].expand_as(x[1])
    x[3] = torch.full_like(x[3], 2)
    own = index[0] // 2 == index[1] // 2
    x[4] = torch.where(own, 1 - lost, lost / 100).double()[:, None].expand(-1, 2)
    return x, index


@pytest.mark.parametrize("lost", [1e-1, 1e-3, 1e-4])
def test_reflections_that_nearly_all_come_back(lost):
    """Conditions are those of the matrices, 1 / lost^2, with pivots or without."""
    x, index = reflected(lost)
    for y, z in zip(
        results(lambda *x: delta_scan(*x[:4], index, x[4], backend="numba"), x),
        results(lambda *x: delta_scan(*x[:4], index, x[4], backend="reference"), x),
        strict=True,
    ):
        assert_near(y, z, 1e-15 / lost**2)


def test_reflections_that_take_pivots():
    x, index = reflected(1e-7)
    with pytest.raises(ValueError, match=r"'edge_weight' has rows .* so nearly one"):
        delta_scan(*x[:4], index, x[4], backend="numba")


def in_long_doubles(x, index):
    """The output and all gradients, from dense states in extended precision."""
    query, key, value, beta, weight = (y[:, 0].numpy().astype("g") for y in x)
    (V, N), (col, row) = key.shape, index.numpy()
    A = np.zeros((V, V), "g")
    np.add.at(A, (row, col), weight)
    written = beta[:, None] * key
    E = np.eye(N, dtype="g") - written[:, :, None] * key[:, None, :]
    M = np.eye(V * N) - (A[:, None, :, None] * E[:, :, None]).reshape(V * N, V * N)

    def solved(M, rhs):
        M, X = M.copy(), rhs.reshape(V * N, -1)
        for k in range(V * N):
            factor = M[k + 1 :, k, None] / M[k, k]
            M[k + 1 :, k:] -= factor * M[k, k:]
            X[k + 1 :] -= factor * X[k]
        for k in reversed(range(V * N)):
            X[k] = (X[k] - M[k, k + 1 :] @ X[k + 1 :]) / M[k, k]
        return X.reshape(V, N, -1)

    S = solved(M, written[:, :, None] * value[:, None])
    out = np.einsum("va,vap->vp", query, S)
    Z = solved(M.T, query[:, :, None] * 2 * out[:, None])
    X = np.einsum("ij,jap->iap", A, S)
    e = value - np.einsum("va,vap->vp", key, X)
    g = np.einsum("va,vap->vp", key, Z)
    erased = Z - written[:, :, None] * g[:, None]
    return (
        out,
        2 * np.einsum("vap,vp->va", S, out),
        beta[:, None] * (np.einsum("vap,vp->va", Z, e) - np.einsum("vap,vp->va", X, g)),
        beta[:, None] * g,
        (g * e).sum(1),
        np.einsum("eap,eap->e", erased[row], S[col]),
    )


@pytest.mark.skipif(np.finfo("g").eps > 1e-18, reason="long doubles are doubles")
def test_large_weights_off_cycles():
    """They may be of any size, and nothing returns along them."""
    n = 60
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    index = torch.cat([path, torch.tensor([[1], [0]])], 1)
    x = inputs(n, n, heads=1)
    x[4] = torch.full_like(x[4], 2.0).index_fill(0, torch.tensor([0, n - 1]), 0.5)
    got = results(lambda *x: delta_scan(*x[:4], index, x[4]), x)
    for y, z in zip(got, in_long_doubles(x, index), strict=True):
        assert_near(y[:, 0], torch.from_numpy(z.astype(float)), 1e-9)


@pytest.mark.parametrize("n", [1, SIDE, 3 * SIDE, 3 * SIDE + 5])
def test_block_elimination(n):
    generator = np.random.default_rng(0)
    M = np.eye(n) + generator.uniform(-0.5, 0.5, (n, n)) / n
    X = generator.standard_normal((n, 3))
    factors, inverse, stop = M.copy(), np.empty((n, SIDE)), np.zeros(1, np.int64)
    spare = np.empty(SIDE * (n + 3))
    eliminate(factors, inverse, spare, stop)
    for matrix, transposed in ((M, False), (M.T, True)):
        found = X.copy()
        solve(factors, inverse, found, spare, transposed)
        assert abs(matrix @ found - X).max() < 1e-13


@pytest.mark.parametrize("threads", [1, 2])
def test_heads_of_a_group_share_tasks_or_do_not(threads):
    """Threads that would have too few tasks take heads apart, and value channels."""
    torch.set_num_threads(threads)
    index = torch.cat([path(30), path(30).flip(0)], 1)
    for edges, form in ((index, "mask"), (path(30), "mask"), (path(30), "state")):
        x = inputs(30, edges.size(1), heads=4, keys=5, channels=37)
        x[:2] = x[0][:, :2], x[1][:, :2]
        x[4] = x[4] / 3

        def run(*x, edges=edges, **options):
            return delta_scan(*x[:4], edges, x[4], **options)

        got = results(lambda *x: run(*x, form=form, backend="numba"), x)  # noqa: B023
        want = results(lambda *x: run(*x, form="mask", backend="torch"), x)
        for y, z in zip(got, want, strict=True):
            assert_near(y, z)


@pytest.mark.parametrize("form", FORMS)
def test_reflections_of_one_key_stay_exact(form):
    """All keys alike and beta two: sums of matrix powers would cancel."""
    _, _, value, _, weight = inputs(128, 127)
    key = F.normalize(torch.ones(128, 2, 4), dim=-1)
    beta = torch.full((128, 2), 2.0)
    weight = torch.ones_like(weight)
    tensors = [key.double(), key.double(), value, beta.double(), weight]
    want = step_by_step(*tensors)
    *nodes, weight = (x.float() for x in tensors)
    assert_near(delta_scan(*nodes, path(128), weight, form=form), want, 1e-5)


# ------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (
            torch.zeros(2, 2, 3),
            r"'edge_weight' must be .* = \[2, 2\], got \[2, 2, 3\]",
        ),
        (
            torch.full((2, 2), torch.nan),
            "'edge_weight' must be finite, but edge 0 has nan in head 0",
        ),
    ],
)
def test_bad_options(weight, match):
    q, k, v, b, w = inputs(3, 2, keys=3)
    with pytest.raises(ValueError, match=match):
        delta_scan(q, k, v, b, path(3), weight)
    with pytest.raises(TypeError, match="'acyclic' must be True or False, got 'yes'"):
        delta_scan(q, k, v, b, path(3), w, acyclic="yes")


@pytest.mark.parametrize("most", [1, 300])
def test_levels_in_slices_of_value_channels(most, monkeypatch):
    case = example("delta_dags", "several_blocks")
    options = {"backend": "torch", "form": "state"}
    want = computed(case, options)
    monkeypatch.setattr(delta_levels, "MAX_NUMEL", most)
    for name, got in computed(case, options).items():
        assert_near(got, want[name])


def test_cycles_where_none_must_be():
    x, cycle = inputs(3, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(CycleError, match=r"has the cycle \d -> \d -> \d"):
        delta_scan(*x[:4], cycle, x[4] / 9, acyclic=True)


def test_what_is_taken():
    """States on DAGs, and matrices where there are cycles, or on request."""

    def taken(index, num_nodes, **options):
        x = inputs(num_nodes, index.size(1), heads=1)
        choice = explain("delta_scan", *x[:4], index, x[4] / 9, **options)
        return choice.form, choice.backend

    tree = torch.stack([torch.arange(1, 3000) // 2, torch.arange(1, 3000)])
    cycles = torch.cat([path(50), path(50).flip(0)], 1)
    assert taken(path(4096), 4096) == ("state", "numba")
    assert taken(tree, 3000) == ("state", "numba")
    assert taken(tree[:, :200], 201, form="mask") == ("mask", "numba")
    assert taken(tree, 3000, backend="torch") == ("state", "torch")
    assert taken(cycles, 50) == ("mask", "numba")
    assert taken(cycles, 50, backend="torch") == ("mask", "torch")


def test_large_weights_beside_a_cycle():
    """In another graph of the batch, which has none: they may be of any size."""
    index = torch.cat([path(20), torch.tensor([[20, 21], [21, 20]])], 1)
    x = inputs(22, index.size(1))
    x[4] = torch.where(index[0] < 20, 9.0, 0.9).double()[:, None].expand(-1, 2)
    for y, z in zip(
        results(lambda *x: delta_scan(*x[:4], index, x[4], backend="numba"), x),
        results(lambda *x: delta_scan(*x[:4], index, x[4], backend="reference"), x),
        strict=True,
    ):
        assert_near(y, z)


def test_states_of_large_dags_are_not_held_in_pairs():
    """A hundred thousand nodes: matrices of them would be tens of gigabytes."""
    V = 100_000
    index = torch.stack([torch.arange(1, V) // 2, torch.arange(1, V)])
    x = [y.float() for y in inputs(V, V - 1, heads=1, keys=4, channels=4)]
    leaves = [y.requires_grad_() for y in x]
    out = delta_scan(*leaves[:4], index, leaves[4])
    out.sum().backward()
    assert all(y.grad.isfinite().all() for y in leaves)


# ------------------------------------------------------------------------------ errors


def changed(name, change):
    """Inputs on a cycle of three, with one of them changed."""
    names = ("query", "key", "value", "beta", "edge_weight")
    x = dict(zip(names, inputs(3, 3), strict=True))
    x["edge_weight"] = 0.9 * torch.ones_like(x["edge_weight"])
    x[name] = x[name].clone()
    change(x[name])
    index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return {**x, "edge_index": index}


def put(at, value):
    def change(x):
        x[at] = value

    return change


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("name", "at", "value", "error"),
    [
        ("beta", (1, 0), -0.1, r"'beta' must be in \[0, 2\], but node 1 has -0.1 in"),
        (
            "beta",
            (2, 1),
            2.5,
            r"'beta' must be in \[0, 2\], but node 2 has 2.5 in head",
        ),
        ("beta", (2, 1), torch.inf, r"'beta' must be in \[0, 2\], but node 2 has inf"),
        (
            "key",
            (1, 1),
            0,
            r"'key' must hold .* length one, .* node 1 in group 1 .* 0;",
        ),
        ("key", 2, 1, r"'key' must hold .* node 2 in group 0 is of length 2;"),
        ("edge_weight", (1, 0), -1, r"row of node 2 sums to 1 in head 0"),
        ("edge_weight", (1, 1), torch.nan, r"'edge_weight' must be finite, but edge 1"),
    ],
)
def test_bad_inputs(name, at, value, error, backend):
    x = changed(name, put(at, value))
    for call in (delta_scan, lambda **x: explain("delta_scan", **x)):
        with pytest.raises(ValueError, match=error):
            call(**x, backend=backend)


def test_rows_that_do_not_count():
    """Edges that are on no cycle, and duplicates of which little is left."""
    x = changed("edge_weight", lambda y: y)
    index = torch.tensor([[0, 1, 2, 3, 2, 0], [1, 2, 0, 0, 3, 4]])[:, [0, 1, 2, 5]]
    *nodes, _ = inputs(5, 0)
    weight = torch.tensor([0.9, 0.9, 0.9, 5.0]).double()[:, None].expand(4, 2)
    out = delta_scan(*nodes, index, weight)
    assert_near(out, delta_scan(*nodes, index, weight, backend="reference"))
    twice = torch.cat([x["edge_index"], x["edge_index"][:, :1]], 1)
    weight = torch.cat([x["edge_weight"], -0.5 * x["edge_weight"][:1]])
    out = delta_scan(**x | {"edge_index": twice, "edge_weight": weight})
    assert out.isfinite().all()


def test_forms_that_do_not_fit():
    x = changed("beta", lambda y: y)
    with pytest.raises(ValueError, match=r"for .*without cycles, but node 0 .*'mask'"):
        delta_scan(**x, form="state")
    with pytest.raises(ValueError, match=r"'chunk' has no numba backend; use .*'auto'"):
        delta_scan(**x, form="chunk")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_cycles_of_too_many_nodes(backend, monkeypatch):
    """Refused at once, before matrices are allocated, with what to do instead."""
    V, GiB = 12_000, 2**30
    index = torch.stack([torch.arange(V), torch.arange(V).roll(1)])
    query, key, value, beta, weight = (y.float() for y in inputs(V, V, 1, 4, 3))
    x = (query, key, value, beta, index, 0.9 * weight)
    needed = {"auto": 6, "torch": 13}[backend] * 8 * V**2 / GiB
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1.1 * needed * GiB)
    assert explain("delta_scan", *x, backend=backend)[1:3] == ("dense", "mask")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0.9 * needed * GiB)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.time()
    said = (
        rf"matrices of up to 12000 nodes would take {needed:.0f} GiB, more than the "
        rf"{0.9 * needed:.0f} GiB that are left; .*clusters or samples, 'ChimeraConv' "
        r".*DAGDecomposition.*acyclic=True"
    )
    with pytest.raises(ValueError, match=said) as error:
        delta_scan(*x, backend=backend)
    assert str(error.value).count("would take") == 1
    assert time.time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    acyclic = (*x[:4], index[:, 1:], x[5][1:])
    assert explain("delta_scan", *acyclic, backend=backend).form == "state"
    monkeypatch.setattr(memory, "available_bytes", lambda device: GiB)
    with pytest.raises(ValueError, match="GiB that are left; use form='state'"):
        delta_scan(*acyclic, form="mask", backend=backend)
