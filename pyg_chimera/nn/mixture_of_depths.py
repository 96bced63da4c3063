from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_edge_attr,
    check_edge_rows,
    check_nodes,
    with_values,
)
from pyg_chimera.nn._routing import PassesOn, Route, reset_layer
from pyg_chimera.ops.common.checks import check_batch
from pyg_chimera.ops.structure import contracted_dag

__all__ = ["MixtureOfDepths"]


class MixtureOfDepths(PassesOn, torch.nn.Module):
    r"""Routes some nodes of each graph through a layer and lets the others skip it, as
    in `"Mixture-of-Depths: Dynamically Allocating Compute in Transformer-Based Language
    Models" <https://arxiv.org/abs/2404.02258>`_.

    A router scores nodes, :math:`s_i = \mathbf{w}^{\top} \mathbf{x}_i`. In a graph of
    :math:`n` nodes, the :math:`\lceil \text{capacity} \cdot n \rceil` nodes of highest
    score are the routed ones :math:`R`. The layer treats them as if they were the whole
    graph:

    .. math::
        \mathbf{x}'_i = \begin{cases} \mathbf{x}_i + \tanh(s_i - \theta) \left(
        \text{layer}(\mathbf{X}_R)_i - \mathbf{x}_i \right) & \text{if } i \in R \\
        \mathbf{x}_i & \text{otherwise} \end{cases}
        \qquad \theta = \max_{i \notin R} s_i

    With a layer of residual form :math:`\mathbf{x} + f(\mathbf{x})`, such as a
    :class:`~pyg_chimera.nn.GPSLayer`, the difference is :math:`f`, weighted by the
    score as in the paper, so that gradients reach the router. The paper uses the score
    itself; here, the weight depends on how far it exceeds :math:`\theta`, the highest
    score of the nodes that skip the layer. The weight is zero for a node that is about
    to skip the layer, so that its output does not jump. It is one if no node skips the
    layer, as :math:`\theta = -\infty`: with :obj:`capacity=1`, this is the layer
    itself.

    Routed nodes keep the edges among them (their induced subgraph). On DAGs, that would
    cut paths. With :obj:`acyclic`, routed nodes are therefore connected wherever a path
    leads from one to another through nodes that are not routed
    (:func:`~pyg_chimera.ops.structure.contracted_dag`), so that a directed path remains
    a path. Whatever the layer derives from the graph, such as depths or positions, it
    derives from the graph of the routed nodes.

    Among nodes of the same score, those with lower numbers are routed. If they are tied
    with a node that skips the layer, none of them changes, but those that are routed
    still influence others. Otherwise, outputs do not depend on the order of nodes.
    Which nodes are routed depends on all nodes of the graph, so a causal layer is no
    longer causal. :func:`torch.compile` breaks its graph here, as sizes depend on
    values.

    Args:
        layer (torch.nn.Module): The layer, whose outputs must have the width of its
            inputs: :obj:`layer(x, edge_index, ...)`, or any that
            :class:`~pyg_chimera.nn.GPSLayer` accepts as :obj:`mixer`. It may take
            :obj:`batch` and :obj:`edge_attr`, but no structure of the whole graph.
        channels (int): Size of each input and output sample.
        capacity (float): The share of nodes that are routed, in (0, 1]. The paper uses
            1/8, in every other layer.
        acyclic (bool, optional): Whether graphs are directed and acyclic.
            (default: :obj:`False`)

    Shapes:
        - **inputs:**
          node features :math:`(|\mathcal{V}|, F)`,
          edge indices :math:`(2, |\mathcal{E}|)`, a sparse adjacency, or with
          :obj:`acyclic` a list of them *(for layers of several DAGs)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*,
          edge features :math:`(|\mathcal{E}|, D)` *(optional, unless acyclic)*
        - **outputs:** node features :math:`(|\mathcal{V}|, F)`, and edge features
          :math:`(|\mathcal{E}|, D)` if the layer returns both, where edges from or to
          nodes that are not routed are unchanged

    Raises:
        ValueError: If :obj:`capacity` is not in (0, 1], or the layer works on grids; in
            the forward method, if an argument does not fit the layer, or it is given
            structure of the whole graph, or with :obj:`acyclic` edge features, which
            contracted paths do not have.
        TypeError: In the forward method, if an argument has the wrong type or dtype.
        CycleError: With :obj:`acyclic`, if there is a cycle.

    Example:
        >>> layer = GPSLayer(16, mixer=ChimeraConv(16), norm_first=True)
        >>> layer = MixtureOfDepths(layer, 16, capacity=0.5)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> layer(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        channels: int,
        capacity: float,
        *,
        acyclic: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < capacity <= 1:
            raise ValueError(
                "'capacity', the share of nodes that are routed, must be in (0, 1], "
                f"got {capacity}"
            )
        self.channels = channels
        self.capacity = capacity
        self.acyclic = acyclic
        self.layer = layer
        # Of the router, which all nodes pass without.
        self.weight = (
            torch.nn.Parameter(torch.empty(channels)) if capacity < 1 else None
        )
        self._route = Route.of(layer)
        if capacity < 1 and self.accepts("height"):
            raise ValueError(
                "'layer' works on grids, which routed nodes are not. Take one that "
                f"reads edges, such as with ChimeraDAGConv, or capacity=1; got {layer}"
            )
        self._reset_router()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        reset_layer(self.layer)
        self._reset_router()

    def _reset_router(self) -> None:
        if self.weight is not None:
            bound = self.channels**-0.5
            torch.nn.init.uniform_(self.weight, -bound, bound)

    def accepts(self, name: str) -> bool:
        r"""Whether the layer accepts a keyword argument called :obj:`name`."""
        return self._route.accepts(name, self.layer)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            batch (torch.Tensor, optional): The batch vector, which assigns each
                node to a graph. (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): The edge features.
                (default: :obj:`None`)
            **kwargs (optional): Further arguments of the layer, with
                :obj:`capacity=1` only.
        """
        if self.capacity == 1:
            return self._call(x, edge_index, batch, edge_attr, kwargs)
        if kwargs:
            raise ValueError(
                f"{sorted(kwargs)} belong to all nodes, and some of them are routed "
                "elsewhere: a MixtureOfDepths passes on 'batch' and 'edge_attr' only. "
                "Leave them out, and the layer computes what it needs of routed nodes."
            )
        check_nodes(x, self.channels)
        if batch is None:
            batch = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        check_batch(batch, x.size(0))
        if self.acyclic and edge_attr is not None:
            raise ValueError(
                "'edge_attr' must not be given with acyclic=True: of the paths that "
                "connect routed nodes there are no features"
            )
        node, weight, unknown = self._routed(x, batch)
        inside = node[:0]
        if self.acyclic:
            edges = _contracted(edge_index, node, x.size(0))
        else:
            edges, edge_attr, inside = _induced(edge_index, edge_attr, node, x.size(0))
        own = None if edge_attr is None else edge_attr[inside]
        x_routed = x[node]
        out = self._call(x_routed, edges, batch[node], own, {})

        out, update = out if isinstance(out, tuple) else (out, None)
        if out.shape != x_routed.shape:
            raise ValueError(
                "'layer' must return node features with the shape of its input, "
                f"{list(x_routed.shape)}, got {list(out.shape)}."
            )
        mixed = torch.lerp(x_routed, out.to(x.dtype), weight.to(x.dtype).view(-1, 1))
        x = x.index_copy(0, node, mixed) + unknown.to(x.dtype)
        if update is None:
            return x
        if edge_attr is None or own is None or update.shape != own.shape:
            expected = None if own is None else list(own.shape)
            raise ValueError(
                "'layer' must return edge features with the shape of its input, "
                f"{expected}, got {list(update.shape)}."
            )
        return x, edge_attr.index_copy(0, inside, update.to(edge_attr.dtype))

    @torch.compiler.disable
    def _routed(self, x: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The routed nodes, in order, the weights of their updates, and for all nodes
        [V, 1] zero, or NaN if their score is and they may as well have been routed.
        """
        # Not a matrix product, whose rounding depends on a row's place, and which
        # autocast computes in half precision: either may create or break ties.
        weight = at_least_float32(cast(Tensor, self.weight))
        score = (at_least_float32(x) * weight).sum(dim=1)
        _, graph, size = batch.unique(return_inverse=True, return_counts=True)
        # 0.07 of 100 nodes is 7, and not 8 due to rounding errors.
        share = (size.double() * self.capacity - 1e-6).ceil().long().clamp(min=1)
        order = score.detach().argsort(descending=True, stable=True)
        order = order[graph[order].argsort(stable=True)]
        first = size.cumsum(0) - size
        place = torch.arange(x.size(0), device=x.device) - first[graph[order]]
        try:
            node = order[place < share[graph[order]]].sort().values
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise NotImplementedError(
                "MixtureOfDepths has no batching rule for torch.vmap, as each sample "
                "routes other nodes; use a loop, or one batch of graphs"
            ) from error

        passed = score[order[first + torch.minimum(share, size - 1)]]
        theta = torch.where(share < size, passed, -torch.inf)
        weights = torch.tanh(score[node] - theta[graph[node]])
        return node, weights, torch.where(score.isnan(), torch.nan, 0).unsqueeze(1)

    def _call(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        given = {"batch": batch, "edge_attr": edge_attr}
        args = self._route.select(given) | kwargs
        return self._route.call(self.layer, x, edge_index, batch, args)

    def __repr__(self) -> str:
        acyclic = ", acyclic=True" if self.acyclic else ""
        return (
            f"{self.__class__.__name__}({self.layer}, {self.channels}, "
            f"capacity={self.capacity}{acyclic})"
        )


# The sizes of these results depend on values, which a compiler cannot know.


@torch.compiler.disable
def _contracted(edge_index: Any, node: Tensor, num_nodes: int) -> Any:
    """The edges of one or several DAGs between some of their nodes, renumbered."""
    if isinstance(edge_index, (list, tuple)):
        return [_contracted(dag, node, num_nodes) for dag in edge_index]
    edges, _ = as_edges(edge_index, None, num_nodes, "source_to_target", None)
    kept, place = _places(node, num_nodes)
    return place[contracted_dag(edges, kept)]


@torch.compiler.disable
def _induced(
    edge_index: Adj, edge_attr: Tensor | None, node: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The edges among some nodes, renumbered; the features of all edges; the indices of
    these edges.
    """
    if edge_attr is None:
        edge_index, edge_attr = with_values(edge_index)
        if edge_attr is not None and edge_attr.dim() == 1:
            if bool((edge_attr != 1).any()):
                raise ValueError(
                    "'edge_index' must not hold edge weights if only some nodes are "
                    "routed, as the layer would not get them; pass them as 'edge_attr'"
                )
            edge_attr = None
    check_edge_attr(edge_attr)
    edges, _ = as_edges(edge_index, None, num_nodes, "source_to_target", None)
    kept, place = _places(node, num_nodes)
    check_edge_rows(edge_attr, edges)
    inside = kept[edges].all(dim=0).nonzero().view(-1)
    return place[edges[:, inside]], edge_attr, inside


def _places(node: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """A mask of these nodes, and their new numbers."""
    kept = torch.zeros(num_nodes, dtype=torch.bool, device=node.device)
    kept[node] = True
    return kept, kept.cumsum(0) - 1
