from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_edge_rows,
    check_inputs,
    check_no_edge_mask,
)
from pyg_chimera.nn._routing import Route, Wrapper, reset_layer
from pyg_chimera.ops.common.checks import check_flag, check_integer, check_number
from pyg_chimera.ops.structure import topological_rank

__all__ = ["MixtureOfDepths"]


class MixtureOfDepths(Wrapper, torch.nn.Module):
    r"""Routes some nodes of each graph through a layer and lets the others skip it, as
    in `"Mixture-of-Depths: Dynamically Allocating Compute in Transformer-Based Language
    Models" <https://arxiv.org/abs/2404.02258>`_.

    A router scores nodes, :math:`s_i = \mathbf{w}^{\top} \mathbf{x}_i`. Of a graph with
    :math:`n` nodes, the :math:`\lceil \text{capacity} \cdot n \rceil` with the highest
    scores are routed, :math:`R`, and the layer sees them as the whole graph:

    .. math::
        \mathbf{x}'_i = \begin{cases} \mathbf{x}_i + \tanh(s_i - \theta) \left(
        \text{layer}(\mathbf{X}_R)_i - \mathbf{x}_i \right) & \text{if } i \in R \\
        \mathbf{x}_i & \text{otherwise} \end{cases}
        \qquad \theta = \max_{i \notin R} s_i

    For a layer of the form :math:`\mathbf{x} + f(\mathbf{x})`, such as a
    :class:`~pyg_chimera.nn.GPSLayer`, the difference is :math:`f`. Its weight, in the
    paper the score itself, is zero for a node about to skip the layer, so that outputs
    do not jump, and one if no node skips it.

    Routed nodes keep the edges among them. With :obj:`acyclic`, there is an edge
    wherever a path leads from one to another through nodes that are not routed. Ties go
    to lower numbers. Who is routed depends on all nodes of a graph: a causal layer no
    longer is. Sizes depend on values, so :func:`torch.compile` breaks its graph here,
    and :func:`torch.export` fails.

    Args:
        layer (torch.nn.Module): The layer, whose outputs are as wide as its inputs: a
            :class:`~pyg_chimera.nn.GPSLayer`, or a mixer of one, unless on grids.
        channels (int): Size of each input and output sample.
        capacity (float, optional): The share of nodes that are routed, in (0, 1].
            (default: :obj:`0.125`, as in the paper, there in every other layer)
        acyclic (bool, optional): Whether graphs are DAGs. (default: :obj:`False`)

    Shapes:
        As of a :class:`~pyg_chimera.nn.GPSLayer`; with :obj:`acyclic`, without edge
        features. Edge features change among routed nodes only.

    Raises:
        ValueError: If :obj:`capacity` is not in (0, 1].
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        channels: int,
        capacity: float = 0.125,
        *,
        acyclic: bool = False,
    ) -> None:
        super().__init__()
        check_number("capacity", capacity)
        if not 0 < capacity <= 1:
            raise ValueError(
                "'capacity' must be in (0, 1], the share of nodes that are routed, got "
                f"{capacity}"
            )
        check_flag("acyclic", acyclic)
        self.channels = check_integer("channels", channels, 1)
        self.capacity = capacity
        self.acyclic = acyclic
        self.layer = layer
        self._route = Route.of(layer)
        self.weight = torch.nn.Parameter(torch.empty(self.channels))
        self._reset_router()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        reset_layer(self.layer)
        self._reset_router()

    def _reset_router(self) -> None:
        torch.nn.init.normal_(self.weight, std=self.channels**-0.5)

    def accepts(self, name: str) -> bool:
        r"""Whether the layer accepts a keyword argument called :obj:`name`."""
        return self._route.accepts(name, self.layer)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        pad_node_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        r"""Runs the forward pass of the module.

        Raises:
            CycleError: With :obj:`acyclic`, if there is a cycle.
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or belongs to all nodes.
        """
        if kwargs:
            raise ValueError(
                "'batch', 'edge_attr' and 'pad_node_mask' are all that a "
                "MixtureOfDepths passes on, as other arguments belong to all nodes, "
                f"got {sorted(kwargs)}"
            )
        check_inputs(x, self.channels, batch)
        if self.acyclic and edge_attr is not None:
            raise ValueError(
                "'edge_attr' must be None with acyclic=True, as paths between routed "
                f"nodes have no features, got shape {list(edge_attr.shape)}"
            )
        are_values = edge_attr is None  # what a matrix has, if anything
        index, edge_attr = as_edges(
            edge_index, edge_attr, x.size(0), "", None if self.acyclic else -1
        )
        check_edge_rows(edge_attr, index)
        if batch is None:
            batch = x.new_zeros(x.size(0), dtype=torch.long)
        node, weight = self._routed(x, batch)
        graph, inside = _among(index, node, x.size(0), self.acyclic)
        check_no_edge_mask(
            self.layer, self.acyclic or inside.numel() < index.size(1), ""
        )
        attr = None if edge_attr is None else edge_attr[inside]
        if are_values and attr is not None and attr.dim() == 1:
            # Layers may read them as weights.
            size = 2 * (node.numel(),)
            graph = torch.sparse_coo_tensor(
                graph.flip(0), attr, size, device=attr.device
            )
            attr = None

        given = {"batch": batch[node], "edge_attr": attr}
        if pad_node_mask is not None and self.accepts("pad_node_mask"):
            given["pad_node_mask"] = pad_node_mask[node]
        given = self._route.select(given)
        out = self._route.call(self.layer, x[node], graph, batch[node], given)
        out, update = out if isinstance(out, tuple) else (out, None)
        if out.shape != x[node].shape:
            raise ValueError(
                "'layer' must return node features with the shape of its input, "
                f"{list(x[node].shape)}, got {list(out.shape)}"
            )
        mixed = torch.lerp(x[node], out.to(x.dtype), weight.to(x.dtype).unsqueeze(1))
        x = x.index_copy(0, node, mixed)
        if update is None or edge_attr is None:
            return x
        return x, edge_attr.index_copy(0, inside, update.to(edge_attr.dtype))

    @torch.compiler.disable
    def _routed(self, x: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The routed nodes, in order, and the weights of their updates."""
        # Not a matrix product, whose rounding depends on a row's place, and which
        # autocast computes in half precision: either may create or break ties.
        score = (at_least_float32(x) * at_least_float32(self.weight)).sum(dim=1)
        _, graph, size = batch.unique(return_inverse=True, return_counts=True)
        # 0.07 of 100 nodes is 7, and not 8 due to rounding errors.
        share = (size.double() * self.capacity - 1e-6).ceil().long().clamp(min=1)
        order = score.detach().argsort(descending=True, stable=True)
        order = order[graph[order].argsort(stable=True)]
        first = size.cumsum(0) - size
        place = torch.arange(x.size(0), device=x.device) - first[graph[order]]
        node = order[place < share[graph[order]]].sort().values
        passed = score[order[first + torch.minimum(share, size - 1)]]
        theta = torch.where(share < size, passed, -torch.inf)
        return node, torch.tanh(score[node] - theta[graph[node]])

    def __repr__(self) -> str:
        acyclic = ", acyclic=True" if self.acyclic else ""
        return (
            f"{self.__class__.__name__}({self.layer}, {self.channels}, "
            f"capacity={self.capacity}{acyclic})"
        )


@torch.compiler.disable
def _among(
    edges: Tensor, node: Tensor, num_nodes: int, acyclic: bool
) -> tuple[Tensor, Tensor]:
    """The edges among some nodes, renumbered, and which of all edges they are; with
    `acyclic`, an edge for each path.
    """
    kept = torch.zeros(num_nodes, dtype=torch.bool, device=node.device)
    kept[node] = True
    inside = kept[edges].all(dim=0).nonzero().view(-1)
    own = contracted_dag(edges, kept) if acyclic else edges[:, inside]
    return (kept.cumsum(0) - 1)[own], inside


def contracted_dag(edge_index: Tensor, kept: Tensor) -> Tensor:
    """The edges from j to i, without duplicates, such that a path of a DAG [2, E] leads
    from j to i through none but nodes that are not kept, of those [V] that are.
    """
    topological_rank(edge_index, kept.numel())  # a walk along a cycle would not end
    source, target = edge_index[:, edge_index[0].argsort()]
    degree = source.bincount(minlength=kept.numel())
    first = degree.cumsum(0) - degree
    # All walks from kept nodes, one step further at a time.
    start, place = edge_index[:, kept[edge_index[0]]]
    found = [edge_index[:, :0]]
    while start.numel() > 0:
        start, place = torch.stack([start, place]).unique(dim=1)
        arrived = kept[place]
        found.append(torch.stack([start, place])[:, arrived])
        start, place = start[~arrived], place[~arrived]
        count = degree[place]
        skipped = (first[place] - count.cumsum(0) + count).repeat_interleave(count)
        start = start.repeat_interleave(count)
        place = target[torch.arange(len(start), device=start.device) + skipped]
    return torch.cat(found, 1).unique(dim=1)
