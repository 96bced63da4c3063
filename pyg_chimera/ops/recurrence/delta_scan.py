"""The gated delta rule on graphs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    FORMS,
    check_finite,
    check_flag,
    check_floats,
    check_graph,
    check_indices,
    check_option,
    check_shape,
    in_one_dtype,
    trusted,
)
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.common.examples import Draw, Example, mixes, rounded
from pyg_chimera.ops.recurrence.choose import Recurrence
from pyg_chimera.ops.recurrence.cpu import delta_mask, delta_sweep
from pyg_chimera.ops.recurrence.dense import delta as reference
from pyg_chimera.ops.recurrence.gpu import delta as triton_backend
from pyg_chimera.ops.recurrence.plain import delta_levels, delta_matrices
from pyg_chimera.ops.recurrence.plan.delta_forms import ByForm
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph, delta_graph
from pyg_chimera.ops.structure.topological import find_cycle

#: How far the length of a key may be from one, due to rounding to bfloat16.
_ROUNDING = 1e-2


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    edge_weight: Tensor
    edge_index: Tensor
    batch: Tensor | None
    acyclic: bool
    form: str
    backend: str


class _DeltaScan(Recurrence[Inputs, DeltaGraph]):
    name = "delta_scan"
    inputs = Inputs
    backends = {  # noqa: RUF012
        "numba": ByForm(("cpu",), {"mask": delta_mask, "state": delta_sweep}),
        "triton": triton_backend,
        "torch": ByForm(None, {"mask": delta_matrices, "state": delta_levels}),
        "reference": reference,
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        graph = (inputs.edge_index, inputs.batch)
        return Recipe(delta_graph, graph, (inputs.value.size(0),))

    def check(self, inputs: Inputs, structure: DeltaGraph) -> None:
        if inputs.acyclic and structure.on_cycle.any():
            cycle = find_cycle(inputs.edge_index.cpu(), structure.num_nodes)
            if cycle is not None:
                raise CycleError(cycle)
        if trusted():
            return
        check_finite("edge_weight", inputs.edge_weight, lambda e: f"edge {e}")
        _check_beta(inputs.beta)
        _check_key(inputs.key)
        if structure.cyclic_edges.size:
            _check_contraction(inputs.edge_weight, structure)


def _check_beta(beta: Tensor) -> None:
    """Checks that the strengths are in [0, 2]; NaN passes."""
    outside = (beta < 0) | (beta > 2)
    if bool(outside.any()):
        node, head = outside.nonzero()[0].tolist()
        raise ValueError(
            f"'beta' must be in [0, 2], but node {node} has {beta[node, head].item()} "
            f"in head {head}"
        )


def _check_key(key: Tensor) -> None:
    """Checks that keys are of length one; NaN passes."""
    length = torch.linalg.vector_norm(key, dim=-1)
    wrong = (length - 1).abs() > _ROUNDING
    if bool(wrong.any()):
        node, group = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"'key' must hold vectors of length one, but that of node {node} in group "
            f"{group} is of length {length[node, group].item():.4g}; use "
            "'torch.nn.functional.normalize(key, dim=-1)', and no zeros"
        )


def _check_contraction(edge_weight: Tensor, graph: DeltaGraph) -> None:
    """Checks that the rows of |A| on cycles sum to less than one; NaN passes."""
    edge = torch.from_numpy(graph.cyclic_edges).to(edge_weight.device)
    col, row = (
        torch.from_numpy(x[graph.cyclic_edges]).to(edge_weight.device)
        for x in (graph.col, graph.row)
    )
    weight = edge_weight[edge]

    def sums(row: Tensor, weight: Tensor) -> Tensor:
        zero = weight.new_zeros(graph.num_nodes, weight.size(1))
        return zero.index_add_(0, row, weight.abs())

    if not bool((sums(row, weight) >= 1).any()):
        return
    # Duplicate edges add up to one entry of A before its absolute value is taken.
    pair, place = (row * graph.num_nodes + col).unique(return_inverse=True)
    entries = weight.new_zeros(len(pair), weight.size(1)).index_add_(0, place, weight)
    total = sums(pair // graph.num_nodes, entries)
    large = total >= 1
    if bool(large.any()):
        node, head = large.nonzero()[0].tolist()
        raise ValueError(
            "'edge_weight' must, on cycles, make rows of |A| sum to less than one, for "
            f"the rule to have a solution, but the row of node {node} sums to "
            f"{total[node, head].item():.4g} in head {head}; scale it (as "
            "'chimera_transition' does), or make a DAG of the graph"
        )


_delta_scan = _DeltaScan()


def _examples(draw: Draw) -> Iterator[Example]:
    for inputs in mixes(draw, "graph", "path", "dag"):
        inputs["key"] = rounded(F.normalize(inputs["key"], dim=-1))
        inputs["beta"] = rounded(1.5 * draw(*inputs["value"].shape[:2]).sigmoid())
        yield inputs


@_delta_scan.public(_examples)
def delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor | None = None,
    *,
    acyclic: bool = False,
    form: str = "auto",
    backend: str = "auto",
) -> Tensor:
    r"""Runs the gated delta rule along the edges of any graph. It is the rule of
    `"Gated Delta Networks: Improving Mamba2 with Delta Rule"
    <https://arxiv.org/abs/2412.06464>`_ and `"Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length" <https://arxiv.org/abs/2406.06484>`_, with the
    neighbours of a node in place of the previous step:

    .. math::
        \mathbf{S}'_i = \sum_{j \to i} A_{ij} \mathbf{S}_j, \qquad
        \mathbf{S}_i = \mathbf{S}'_i + \beta_i \mathbf{k}_i (\mathbf{v}_i -
        \mathbf{S}_i'^{\top} \mathbf{k}_i)^{\top}, \qquad
        \mathbf{y}_i = \mathbf{S}_i^{\top} \mathbf{q}_i.

    A node writes the difference between its value and what its key already reads, where
    :func:`resolvent_mix` and :func:`dag_scan` only add. The rule is linear in the
    values: with the resolvent :math:`\mathbf{L} = (\mathbf{I} - \mathbf{A})^{-1}`,

    .. math::
        \mathbf{u} = \left( \mathbf{I} + \textrm{diag}(\beta) ((\mathbf{L} -
        \mathbf{I}) \odot \mathbf{K} \mathbf{K}^{\top}) \right)^{-1}
        \textrm{diag}(\beta) \mathbf{V}, \qquad
        \mathbf{y} = (\mathbf{L} \odot \mathbf{Q} \mathbf{K}^{\top}) \mathbf{u}.

    On DAGs both matrices are triangular, and weights may be of any size. On graphs with
    cycles, the rule has exactly one solution if rows of :math:`|\mathbf{A}|` sum to
    less than one, as writing never makes a state larger. On a directed path, it is that
    of Gated DeltaNet. Differentiable once in all floating-point tensors. float16 and
    bfloat16 are computed in float32. The query is not scaled.

    Args:
        query (torch.Tensor): The queries, :math:`[|\mathcal{V}|, G, N]`. The number of
            groups :math:`G` divides the number of heads; the heads of a group share
            them.
        key (torch.Tensor): The keys, of length one, :math:`[|\mathcal{V}|, G, N]`.
        value (torch.Tensor): The values, :math:`[|\mathcal{V}|, H, P]`.
        beta (torch.Tensor): The share of what its key reads that a node replaces, in
            :math:`[0, 2]`, :math:`[|\mathcal{V}|, H]`: 1 replaces all of it, more
            reflects.
        edge_index (torch.Tensor): The edges, integer :math:`[2, |\mathcal{E}|]`.
            Self-loops and duplicates count.
        edge_weight (torch.Tensor): Their weights, :math:`[|\mathcal{E}|, H]`.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. Used for speed only; without it,
            connected components are computed and used instead. (default: :obj:`None`)
        acyclic (bool, optional): Whether a cycle is an error, even where there is a
            solution. (default: :obj:`False`)
        form (str, optional): :obj:`"mask"` solves for :math:`\mathbf{u}` of each graph
            (cubic in its nodes), :obj:`"state"` carries :math:`\mathbf{S}` along a DAG
            (linear in its edges), :obj:`"chunk"` combines both, in chunks of directed
            paths (the WY form of DeltaNet). All give the same result. (default:
            :obj:`"auto"`: matrices if there are cycles; otherwise states, or chunks
            of long paths on GPUs)
        backend (str, optional): :obj:`"numba"` (on CPUs, all but :obj:`"chunk"`),
            :obj:`"triton"` (on GPUs, all but :obj:`"mask"`), :obj:`"torch"` (any
            device, all but :obj:`"chunk"`), :obj:`"reference"` (dense, slow, for
            tests). (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`.

    Raises:
        CycleError: With :obj:`acyclic`, if there is a cycle, which the error names. A
            :class:`ValueError`.
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, a weight is not finite, a key is not of length one, :obj:`beta` is
            outside of :math:`[0, 2]`, a row of :math:`|\mathbf{A}|` on a cycle sums to
            one or more, or so nearly to one that :obj:`backend="numba"` loses too much
            accuracy, if matrices do not fit into memory, or if an option is unknown or
            incompatible.
        TypeError: If a tensor has the wrong dtype.
    """
    *floats, edge_index = check_graph(query, key, value, edge_index, edge_weight)
    check_floats(value=value, beta=beta)
    q, k, v, w, b = in_one_dtype([*floats, beta])
    check_shape("beta", beta, "[nodes, heads]", list(value.shape[:2]))
    (batch,) = check_indices(value, batch=batch)
    check_option("form", form, FORMS)
    check_flag("acyclic", acyclic)
    inputs = Inputs(q, k, v, b, w, edge_index, batch, acyclic, form, backend)
    return _delta_scan(inputs).to(value.dtype)
