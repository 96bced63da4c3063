"""Checks and conversions of the arguments of layers, with uniform errors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj, SparseTensor
from torch_geometric.utils import is_sparse

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_edges,
    check_float,
    check_integer,
    readable,
    trusted,
)
from pyg_chimera.ops.common.portability import is_portable
from pyg_chimera.ops.structure.edges import edges_of
from pyg_chimera.ops.structure.grid import grid_sizes


def all_parameters(cls: type) -> list[inspect.Parameter]:
    """The parameters of a constructor; those passed on to base classes by name only."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__[: cls.__mro__.index(MessagePassing)]:
        if "__init__" not in vars(base):
            continue
        given = [*inspect.signature(vars(base)["__init__"]).parameters.values()][1:]
        inherited = len(parameters) > 0
        for x in given:
            if x.name not in parameters and x.kind is not x.VAR_POSITIONAL:
                by_name = inherited and x.kind is not x.VAR_KEYWORD
                parameters[x.name] = x.replace(kind=x.KEYWORD_ONLY) if by_name else x
        if all(x.kind is not x.VAR_KEYWORD for x in given):
            break
    return sorted(parameters.values(), key=lambda x: x.kind)


def named(layer: MessagePassing, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Checks that the further arguments of a layer are those of message passing."""
    known = {*inspect.signature(MessagePassing).parameters}
    known -= {"aggr", "node_dim", "decomposed_layers"}  # without effect, or worse
    for name in kwargs:
        if name not in known:
            found = all_parameters(type(layer))
            names = [x.name for x in found if x.kind is not x.VAR_KEYWORD]
            raise TypeError(
                f"{type(layer).__name__} has no argument '{name}'; it has {names}, "
                "and those of MessagePassing"
            )
    return kwargs


def heads_of(channels: int, heads: int | None, multiple: int = 1) -> int:
    """The number of heads; by default the largest of 4, 2 and 1 to divide the channels,
    into multiples of `multiple` if possible.
    """
    if heads is not None:
        return heads
    return next(n for n in (4, 2, 1) if n == 1 or channels % (n * multiple) == 0)


def check_channels(
    in_channels: Any, out_channels: Any, edge_dim: Any = None
) -> tuple[int, int, int | None]:
    """Checks the sizes of a layer's input and output; returns plain integers.

    The output is as wide as the input unless given. No edge features may also be zero
    of them, as in `dataset.num_edge_features`.
    """
    for name, size in {
        "in_channels": in_channels,
        "out_channels": out_channels,
    }.items():
        if isinstance(size, (tuple, list)):
            raise TypeError(
                f"'{name}' must be one integer, as the layer is for graphs with one "
                f"type of nodes, not for bipartite ones, got {size!r}; for several "
                "types, see 'pyg_chimera.nn.HeteroLayer'"
            )
    in_channels = check_in_channels(in_channels)
    if out_channels is None and in_channels == -1:
        raise ValueError("'out_channels' must be given if 'in_channels' is -1")
    out_channels = in_channels if out_channels is None else out_channels
    if edge_dim is not None:
        edge_dim = check_integer("edge_dim", edge_dim, -1) or None
    return in_channels, check_integer("out_channels", out_channels, 1), edge_dim


def check_in_channels(in_channels: Any) -> int:
    """The number of features of nodes, -1 if it is known later."""
    in_channels = check_integer("in_channels", in_channels, -1)
    if in_channels == 0:
        raise ValueError(
            "'in_channels' must be positive, or -1 for that of the first input, got 0: "
            "give nodes without features a constant one, such as by "
            "'torch_geometric.transforms.Constant'"
        )
    return in_channels


def check_heads(
    out_channels: int, heads: Any, state_channels: Any = 1, groups: Any = 1
) -> tuple[int, int, int]:
    """Checks numbers of heads, state channels and groups; returns plain integers."""
    heads = heads_of(out_channels, heads)
    sizes = {"heads": heads, "state_channels": state_channels, "groups": groups}
    for name, size in sizes.items():
        sizes[name] = check_integer(name, size, 1)
    if out_channels % heads != 0:
        raise ValueError(
            f"'heads' must divide 'out_channels', got {heads} and {out_channels}"
        )
    if heads % groups != 0:
        raise ValueError(f"'groups' must divide 'heads', got {groups} and {heads}")
    return sizes["heads"], sizes["state_channels"], sizes["groups"]


def check_inputs(x: Any, channels: int = -1, batch: Any = None) -> None:
    """Checks that node features are floating point, [nodes, channels] (any number if
    negative), and that the batch vector, if any, has an entry for each; does not read
    their contents.
    """
    if isinstance(x, (tuple, Mapping)):
        raise TypeError(
            f"'x' must be a torch.Tensor, got {type(x).__name__}; for a graph of "
            "several types of nodes, see 'pyg_chimera.nn.HeteroLayer'"
        )
    check_float("x", x)
    if x.dim() != 2 or (channels >= 0 and x.size(1) != channels):
        expected = channels if channels >= 0 else "channels"
        raise ValueError(f"'x' must be [nodes, {expected}], got {list(x.shape)}")
    if x.size(1) == 0:
        raise ValueError(
            f"'x' must have features, got {list(x.shape)}: give nodes a constant one, "
            "such as by 'torch_geometric.transforms.Constant'"
        )
    if batch is not None:
        check_batch(batch, x.size(0), read=False)


def check_edge_attr(edge_attr: Any) -> None:
    """Checks that edge features are floating point, rather than a batch vector."""
    if edge_attr is not None:
        check_float("edge_attr", edge_attr, "; pass a batch vector as 'batch=...'")


def check_no_edge_attr(layer: Any, edge_attr: Any) -> None:
    """Refuses edge features, for a layer without them."""
    check_edge_attr(edge_attr)
    if edge_attr is not None:
        raise ValueError(
            f"'edge_attr' must be None, as {type(layer).__name__} reads no features or "
            f"weights of edges, got shape {list(edge_attr.shape)}; put a convolution "
            "that does beside it, as 'conv' of a GPSLayer"
        )


def check_edge_rows(edge_attr: Any, edge_index: Any) -> None:
    """Checks that edge features, of any dtype, have one row per edge.

    Where they follow the batch vector as an argument, the two may have been confused.
    """
    if not isinstance(edge_attr, Tensor) or not isinstance(edge_index, Tensor):
        return
    if is_sparse(edge_index) or edge_index.dim() != 2:
        return
    if edge_attr.dim() == 0 or edge_attr.size(0) != edge_index.size(1):
        raise ValueError(
            f"'edge_attr' must have a row for each of {edge_index.size(1)} edges, got "
            f"{list(edge_attr.shape)}; pass a batch vector as 'batch=...'"
        )


def check_no_edge_mask(module: torch.nn.Module, misses: bool, advice: str) -> None:
    """Refuses the edge mask of an explainer where layers miss some of its edges."""
    is_explained = any(
        isinstance(x, MessagePassing) and x.explain for x in module.modules()
    )
    if is_explained and misses:  # in this order, as exported sizes are unknown
        raise ValueError(
            "Edge masks explain layers that read all edges, but those of this "
            f"{type(module).__name__} read some: {advice}explain features of nodes "
            "only, with edge_mask_type=None"
        )


def has_edge_mask(conv: MessagePassing, num_dags: int) -> bool:
    """Whether an explainer's edge mask applies to a layer; there must be one DAG."""
    if not conv.explain:
        return False
    if num_dags > 1:
        raise ValueError("Edge masks explain one graph, not several DAGs")
    read = [*inspect.signature(conv.explain_message).parameters][1:]
    if read != [*inspect.signature(MessagePassing.explain_message).parameters][2:]:
        raise ValueError(
            f"{type(conv).__name__} computes no messages that an explainer could read "
            "or replace, as 'GraphMaskExplainer' does: use one that masks edges, such "
            "as 'GNNExplainer'"
        )
    return True


def check_grids(
    x: Tensor,
    batch: Tensor | None,
    height: int | Tensor | None,
    width: int | Tensor | None,
) -> tuple[int | Tensor, int | Tensor]:
    """Checks that grids of these sizes are the graphs of a batch; returns the sizes."""
    if height is None or width is None:
        raise ValueError(
            "'height' and 'width' must be given (to a 'GraphModel' as "
            "structure={'height': 'height', 'width': 'width'}), got "
            f"{height} and {width}"
        )
    if batch is None or not readable():
        return height, width
    sides = grid_sizes(height, width, x.size(0))
    sizes = torch.tensor(sides, dtype=torch.long, device="cpu").view(-1, 2).prod(1)
    counts = batch.unique_consecutive(return_counts=True)[1].cpu()
    fits = sizes.numel() == counts.numel() and bool((counts == sizes).all())
    if not fits or bool((batch.diff() < 0).any()):
        raise ValueError(
            "'height' and 'width' must be those of the graphs of 'batch', which must "
            f"be sorted: got graphs of {counts.tolist()[:8]} nodes and grids of "
            f"{sizes.tolist()[:8]}"
        )
    return height, width


def check_size(graph: Any, num_targets: int, num_sources: int | None = None) -> None:
    """Checks that a sparse matrix is one of these nodes.

    Indices are looked at elsewhere, also those of an `EdgeIndex`, whose size PyG may
    have derived from them.
    """
    if torch.compiler.is_compiling():
        return
    if isinstance(graph, SparseTensor):
        size = list(graph.sparse_sizes())
    elif is_sparse(graph):
        size = list(graph.shape[: graph.dim() - graph.dense_dim()])
    else:
        return
    expected = [num_targets, num_targets if num_sources is None else num_sources]
    if size != expected:
        raise ValueError(
            "'edge_index' must be a matrix of size [target nodes, source nodes] = "
            f"{expected}, as PyG's 'adj_t', got {size}"
        )


def with_values(graph: Adj) -> tuple[Adj, Tensor | None]:
    """A graph, and the values of its edges; None unless a sparse matrix has them.

    Duplicates in a matrix that is not coalesced are added, as in all of PyTorch.
    """
    if isinstance(graph, SparseTensor):
        return graph, graph.storage.value()  # None, where PyG would say one
    if not is_sparse(graph):
        return graph, None
    if graph.layout == torch.sparse_coo:
        graph = graph.coalesce()
    return graph, graph.values()


def plain_edges(
    graph: Adj, edge_attr: Tensor | None, edge_dim: int | None
) -> tuple[Tensor, Tensor | None]:
    """The edges of a graph, and their features, or else the values of a sparse matrix,
    unless `edge_dim` is None: values are then for other layers to read.
    """
    if edge_attr is None:
        graph, values = with_values(graph)
        edge_attr = None if edge_dim is None else values
    check_edge_attr(edge_attr)
    if edge_attr is not None and edge_dim is None:
        raise ValueError(
            "'edge_attr' must be None for a layer with 'edge_dim=None', got shape "
            f"{list(edge_attr.shape)}. Construct the layer with 'edge_dim' (1 for edge "
            "weights) to read edge features"
        )
    return edges_of(graph), edge_attr


def as_edges(
    edge_index: Adj,
    edge_attr: Tensor | None,
    num_nodes: int,
    flow: str,
    edge_dim: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The checked edges from j to i as a plain tensor, and their features."""
    check_size(edge_index, num_nodes)
    edge_index, edge_attr = plain_edges(edge_index, edge_attr, edge_dim)
    if torch.compiler.is_compiling():
        pass  # the operators check it anyway
    elif trusted():
        check_edges("edge_index", edge_index, edge_index)
    else:
        check_edge_index(edge_index, num_nodes)
    edge_index = edge_index.long()  # narrow integers do not index, or as masks
    if flow == "target_to_source":
        edge_index = edge_index.flip(0)
    return edge_index, edge_attr


def edge_features(
    edge_attr: Tensor | None, edge_dim: int | None, num_edges: int
) -> Tensor:
    """Checked features with one row for each edge, [edges, channels]."""
    if edge_attr is None:
        raise ValueError(
            f"'edge_attr' must be given, as 'edge_dim' is {edge_dim}: pass the edge "
            "features, or construct the layer without 'edge_dim'"
        )
    check_edge_attr(edge_attr)
    if edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    if edge_dim is not None and edge_dim > 0 and edge_attr.size(-1) != edge_dim:
        raise ValueError(
            f"'edge_attr' must be [edges, {edge_dim}], as 'edge_dim' is {edge_dim}, "
            f"got {list(edge_attr.shape)}"
        )
    if edge_attr.size(0) != num_edges:
        raise ValueError(
            f"'edge_attr' must have a row for each of {num_edges} edges, got "
            f"{list(edge_attr.shape)}"
        )
    return edge_attr


class TakesTensors:
    """A module called with tensors: refuses a whole data object with a clear error."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], BaseData):
            how = "'data.x, data.edge_index, batch=data.batch'"
            if hasattr(self, "inputs"):
                how = "'**model.inputs(data)'"
            elif isinstance(args[0], HeteroData):
                how = "'data.x_dict, data.edge_index_dict' (a 'HeteroLayer')"
            raise TypeError(
                f"{type(self).__name__} takes tensors, not a {type(args[0]).__name__}: "
                f"call it with {how}"
            )
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def why_not_finite(layer: torch.nn.Module, given: dict[str, Any]) -> str:
    """The reason for results of a layer that are not finite, as an error message."""
    tensors = []
    for name in ("x", "edge_attr"):
        value = given.get(name)
        several = value if isinstance(value, (list, tuple)) else [value]
        tensors += [(f"'{name}'", x, "row") for x in several]
    advice = "; the learning rate may be too high"
    tensors += [(f"parameter '{k}'", p, advice) for k, p in layer.named_parameters()]
    for name, x, where in tensors:
        if not isinstance(x, Tensor) or bool(x.isfinite().all()):
            continue
        place = (~x.isfinite()).nonzero()[0].tolist()
        said = f"{name} must be finite, but has {x[tuple(place)].item()}"
        return f"{said} in row {place[0]}" if where == "row" else f"{said}{where}"
    return (
        "what it computes is not finite, although 'x' and the parameters are: 'x' is "
        "too large, or a parameter; normalize 'x'"
    )


def for_each_dag(num_dags: int, **arguments: Any) -> list[tuple]:
    """The arguments of each DAG; if there are several DAGs, arguments are lists."""
    lists = []
    for name, x in arguments.items():
        is_list = isinstance(x, (list, tuple)) and not _is_numbers(x)
        if num_dags == 1 and is_list:
            raise TypeError(
                f"'{name}' must be one tensor, got a list of {len(x)}; set 'num_dags'"
            )
        entries: Sequence[Any] = x if is_list else [x] * num_dags
        if num_dags > 1 and not is_list and x is not None:
            raise TypeError(
                f"'{name}' must be a list with an entry for each of {num_dags} DAGs, "
                f"got one {type(x).__name__}"
            )
        if len(entries) != num_dags:
            raise ValueError(
                f"'{name}' must be a list with an entry for each of {num_dags} DAGs, "
                f"got {len(entries)}"
            )
        lists.append(entries)
    return list(zip(*lists, strict=True))


def may_be_divided(layer: Any, edge_index: Any) -> bool:
    """Whether `order="auto"` divides a graph into two DAGs if it has cycles: not while
    code is compiled, as sizes of DAGs are then unknown.
    """
    several = layer.num_dags > 1 or isinstance(edge_index, (list, tuple))
    fixed = torch.compiler.is_compiling() or is_portable()
    return layer.order == "auto" and not (several or fixed)


def _is_numbers(x: Sequence) -> bool:
    """Whether a sequence holds numbers, or lists of them, instead of tensors."""
    return len(x) > 0 and isinstance(x[0], (int, float, list, tuple))


def side_by_side(
    num_nodes: int,
    num_dags: int,
    flow: str,
    edge_dim: int | None,
    edge_index: Any,
    edge_attr: Any,
    batch: Tensor | None,
    rank: Any,
) -> tuple[Tensor, list[tuple[Tensor | None, int]], Tensor | None, Tensor | None]:
    """Several DAGs over the same nodes as one: node i of DAG d becomes node d V + i.

    Returns:
        Its edges; for each DAG, the features and the number of its edges; and the batch
        vector and the rank, if given.
    """

    def rank_along_edges(order: Any) -> Any:
        """Negates a rank if edges are reversed."""
        reverse = flow == "target_to_source" and isinstance(order, Tensor)
        return -order.long() if reverse else order

    dags = [
        (*as_edges(index, attr, num_nodes, flow, edge_dim), rank_along_edges(order))
        for index, attr, order in for_each_dag(
            num_dags, edge_index=edge_index, edge_attr=edge_attr, rank=rank
        )
    ]
    if num_dags == 1:  # keep the tensors themselves, by which graphs are recognised
        ((index, attr, order),) = dags
        return index, [(attr, index.size(1))], batch, order
    index = torch.cat([dag[0] + d * num_nodes for d, dag in enumerate(dags)], 1)
    features = [(attr, edges.size(1)) for edges, attr, _ in dags]
    if batch is not None:
        batch = batch.long()  # narrow integers overflow
        batch = torch.cat([num_dags * batch + d for d in range(num_dags)])
    order = None if dags[0][2] is None else torch.cat([dag[2] for dag in dags])
    return index, features, batch, order


def at_least_float32(x: Tensor) -> Tensor:
    """Widens x to float32 at least, as gates are too inexact in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
