"""A linear recurrence on DAGs with a weight for each channel."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.ops.common.checks import (
    check_dim,
    check_edges,
    check_finite,
    check_floats,
    check_indices,
    check_shape,
)
from pyg_chimera.ops.common.examples import Draw, Example
from pyg_chimera.ops.common.operator import Operator
from pyg_chimera.ops.recurrence.cpu import channels as numba_backend
from pyg_chimera.ops.recurrence.dense import channels as reference
from pyg_chimera.ops.recurrence.gpu import channels as triton_backend
from pyg_chimera.ops.recurrence.plain import channels as torch_backend
from pyg_chimera.ops.recurrence.plan.states import StateGraph, node_states


class Inputs(NamedTuple):
    """The inputs of the registered operator."""

    value: Tensor
    edge_weight: Tensor | None
    decay: Tensor | None
    edge_index: Tensor
    batch: Tensor | None
    rank: Tensor | None
    backend: str


class _ChannelScan(Operator[Inputs, StateGraph]):
    name = "channel_scan"
    inputs = Inputs
    saves_output = True  # the states
    backends = {  # noqa: RUF012
        "numba": numba_backend,
        "triton": triton_backend,
        "torch": torch_backend,
        "reference": reference,
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        graph = (inputs.edge_index, inputs.batch, inputs.rank)
        return Recipe(node_states, graph, (inputs.value.size(0),))

    def check(self, inputs: Inputs, structure: StateGraph) -> None:
        for name, weight, of in (
            ("edge_weight", inputs.edge_weight, "edge"),
            ("decay", inputs.decay, "node"),
        ):
            if weight is not None:
                check_finite(name, weight, lambda i, of=of: f"{of} {i}", "channel")  # type: ignore[misc]


_channel_scan = _ChannelScan()


def _examples(draw: Draw) -> Iterator[Example]:
    for kind in ("dag", "path"):
        graph = draw.graph(kind)
        value, decay = (draw(len(graph["batch"]), 17) for _ in range(2))
        weight = draw.weights(graph, 17)
        yield {"value": value, "decay": decay, "edge_weight": weight, **graph}


@_channel_scan.public(_examples)
def channel_scan(
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    batch: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    rank: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Runs a linear recurrence along a directed acyclic graph, in which each channel
    has its own weights:

    .. math::
        \mathbf{h}_i = \mathbf{d}_i \odot \sum_{j \to i} \mathbf{w}_{ij} \odot
        \mathbf{h}_j + \mathbf{x}_i.

    On a directed path, this is the recurrence of `"Griffin: Mixing Gated Linear
    Recurrences with Local Attention for Efficient Language Models"
    <https://arxiv.org/abs/2402.19427>`_ (Section 2.4), and of other gated linear RNNs.
    Weights may belong to edges, to nodes, or to both. Weights that are the same for all
    edges into a node, such as the gates of an RNN or a division by
    :math:`\sqrt{|p(i)|}`, belong to the node: there are fewer nodes than edges, and the
    sum over parents is multiplied once.

    Differentiable once in all floating-point tensors. float16 and bfloat16 are computed
    in float32. Nothing but the inputs and the output is kept for the backward pass.

    Args:
        value (torch.Tensor): The inputs :math:`\mathbf{x}`, :math:`[|\mathcal{V}|, C]`.
        edge_index (torch.Tensor): The edges of a DAG, integer
            :math:`[2, |\mathcal{E}|]`. Duplicates count.
        edge_weight (torch.Tensor, optional): The weights :math:`\mathbf{w}` of the
            edges, of any sign and size, :math:`[|\mathcal{E}|, C]`. (default:
            :obj:`None`, ones)
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. Used for speed only; without it,
            connected components are computed and used instead. (default: :obj:`None`)
        decay (torch.Tensor, optional): The weights :math:`\mathbf{d}` of the sums that
            arrive at the nodes, of any sign and size, :math:`[|\mathcal{V}|, C]`.
            (default: :obj:`None`, ones)
        rank (torch.Tensor, optional): A topological rank, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddTopologicalOrder`. Computed if absent.
            (default: :obj:`None`)
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"triton"` (GPU,
            any number of directed paths, but no other graphs), :obj:`"torch"` (any
            device, level by level; on directed paths, the number of passes is the
            number of binary digits of the longest path's length), :obj:`"reference"` (a
            loop, in float64) or :obj:`"auto"`: numba on the CPU; elsewhere triton where
            possible, otherwise torch. (default: :obj:`"auto"`)

    Returns:
        torch.Tensor: The states :math:`\mathbf{h}`, :math:`[|\mathcal{V}|, C]`, in the
        dtype of :obj:`value`.

    Raises:
        CycleError: If the graph has a cycle or a self-loop, which the error names. A
            :class:`ValueError`.
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, a weight is not finite, :obj:`rank` does not increase along every
            edge, or :obj:`backend` is unknown or can't run on the device.
        TypeError: If a tensor has the wrong dtype.
    """
    weights = {"edge_weight": edge_weight, "decay": decay}
    given = {name: x for name, x in weights.items() if x is not None}
    x, *floats = check_floats(value=value, **given)
    check_dim("value", value, "[nodes, channels]", 2)
    edge_index = check_edges("edge_index", edge_index, value)
    num_nodes, channels = value.shape
    shapes = {
        "edge_weight": ("[edges, channels]", [edge_index.size(1), channels]),
        "decay": ("[nodes, channels]", [num_nodes, channels]),
    }
    for name, weight in given.items():
        check_shape(name, weight, *shapes[name])
    batch, rank = check_indices(value, batch=batch, rank=rank)
    found = dict(zip(given, floats, strict=True))
    inputs = Inputs(
        x, found.get("edge_weight"), found.get("decay"), edge_index, batch, rank,
        backend,
    )  # fmt: skip
    return _channel_scan(inputs).to(value.dtype)
