"""Softmax attention over any sparse pattern."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    check_dim,
    check_edges,
    check_floats,
    check_indices,
    check_number,
    check_shape,
)
from pyg_chimera.ops.common.examples import Draw, Example
from pyg_chimera.ops.common.operator import Operator
from pyg_chimera.ops.neighborhood_attention import reference, torch_backend
from pyg_chimera.ops.neighborhood_attention.torch_backend import Pattern, pattern


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    edge_bias: Tensor | None
    edge_index: Tensor
    batch: Tensor | None
    scale: float
    backend: str


class _NeighborhoodAttention(Operator[Inputs, Pattern]):
    name = "neighborhood_attention"
    inputs = Inputs
    solver, form = "softmax", "edge"
    backends = {  # noqa: RUF012
        "torch": torch_backend,
        "reference": reference,
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        graph = (inputs.edge_index, inputs.batch)
        query, key = inputs.query, inputs.key
        return Recipe(pattern, graph, (*query.shape[:2], key.size(1)))

    def _output(self, inputs: Inputs) -> Tensor:
        query, value = inputs.query, inputs.value
        return value.new_empty(*query.shape[:2], value.size(2))


_neighborhood_attention = _NeighborhoodAttention()


def _examples(draw: Draw) -> Iterator[Example]:
    graph = draw.graph("graph")
    size, edges = len(graph["batch"]), graph["edge_index"].size(1)
    query, key, value = draw(size, 2, 6), draw(size, 1, 6), draw(size, 1, 5)
    bias = draw(edges, 2)
    yield {"query": query, "key": key, "value": value, "edge_bias": bias, **graph}


@_neighborhood_attention.public(_examples)
def neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    batch: Tensor | None = None,
    *,
    edge_bias: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Softmax attention of each node over the sources of its incoming edges: that of
    `"Attention Is All You Need" <https://arxiv.org/abs/1706.03762>`_, with heads that
    share keys and values as in `"GQA: Training Generalized Multi-Query Transformer
    Models from Multi-Head Checkpoints" <https://arxiv.org/abs/2305.13245>`_, over any
    sparse pattern.

    .. math::
        \mathbf{y}_i = \sum_{j \to i} \alpha_{ij} \mathbf{v}_j, \qquad
        \alpha_{ij} = \frac{\exp(\ell_{ij})}{\sum_{j' \to i} \exp(\ell_{ij'})}, \qquad
        \ell_{ij} = s \, \mathbf{q}_i^{\top} \mathbf{k}_j + b_{ij}

    Time and memory are linear in the number of edges: there is no matrix of all pairs
    of nodes. Logits may be of any size. With edges from each node of a path to all
    later ones, this is causal attention, and with those of
    :func:`~pyg_chimera.ops.k_hop_index`, attention within a window. Differentiable
    once, in reverse mode, in query, key, value and bias. float16 and bfloat16 are
    computed in float32.

    Args:
        query (torch.Tensor): The queries, :math:`[|\mathcal{V}|, H, N]`.
        key (torch.Tensor): The keys, :math:`[|\mathcal{V}|, G, N]`. The number of
            groups :math:`G` divides the number of heads; consecutive heads form a
            group, which shares keys and values.
        value (torch.Tensor): The values, :math:`[|\mathcal{V}|, G, P]`.
        edge_index (torch.Tensor): The edges, integer :math:`[2, |\mathcal{E}|]`, from
            the nodes that are read to those that read them. Self-loops are treated like
            other edges, and duplicates count separately.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. If given, edges that join two graphs
            are an error; results do not depend on it. (default: :obj:`None`)
        edge_bias (torch.Tensor, optional): Added to the logits,
            :math:`[|\mathcal{E}|, H]`. Minus infinity removes an edge. (default:
            :obj:`None`)
        scale (float, optional): The factor :math:`s`. (default: :math:`1 / \sqrt{N}`)
        backend (str, optional): ``"torch"`` (PyTorch's sparse matrices, on CPUs and
            GPUs), ``"reference"`` (a loop over the nodes, in float64, for tests), or
            ``"auto"``, which is torch. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H, P]`, in the dtype of :obj:`value`. Nodes
        without incoming edges get zeros.

    Raises:
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, or :obj:`backend` is unknown or can't run on the device.
        TypeError: If a tensor has the wrong dtype, or :obj:`scale` is not a number.
    """
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        of = "heads" if name == "query" else "groups"
        check_dim(name, x, f"[nodes, {of}, channels]", 3)
    (num_nodes, heads, size), groups = query.shape, key.size(1)
    if min(heads, groups) < 1 or heads % groups != 0:
        raise ValueError(
            "'key' must have as many heads as 'query', or a divisor, got "
            f"{list(key.shape)} and {list(query.shape)}"
        )
    check_shape("key", key, "[nodes, groups, channels]", [num_nodes, groups, size])
    wanted = [num_nodes, groups, value.size(2)]
    check_shape("value", value, "[nodes, groups, channels]", wanted)
    if edge_bias is not None:
        given["edge_bias"] = edge_bias
    q, k, v, *rest = check_floats(**given)
    edge_index = check_edges("edge_index", edge_index, value)
    if edge_bias is not None:
        check_shape(
            "edge_bias", edge_bias, "[edges, heads]", [edge_index.size(1), heads]
        )
        (edge_bias,) = rest
    if scale is None:
        scale = max(size, 1) ** -0.5
    check_number("scale", scale)
    (batch,) = check_indices(value, batch=batch)
    inputs = Inputs(q, k, v, edge_bias, edge_index, batch, float(scale), backend)
    return _neighborhood_attention(inputs).to(value.dtype)
