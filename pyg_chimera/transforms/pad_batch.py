import copy
import math
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.common.checks import check_integer
from pyg_chimera.ops.structure.checksum import SUFFIX, checksum
from pyg_chimera.transforms._inputs import Transform

__all__ = ["PadBatch"]

#: Of numbers of nodes and edges. For others, Triton would compile further kernels.
_MULTIPLE = 16
#: What PyG batches as a list, or numbers as a tensor.
_PLAIN = (str, bool, int, float, type(None))
#: Of nodes, as the transforms of this package name them.
_RANKS = ("elimination_rank", "topological_rank")


@functional_transform("chimera_pad_batch")
class PadBatch(Transform):
    r"""Pads a mini-batch with graphs of its own, so that few shapes occur, which
    :func:`torch.compile` and CUDA graphs need (functional name:
    :obj:`chimera_pad_batch`).

    Nodes, edges and graphs are padded to sizes :math:`2^{k / \textrm{steps}}`, rounded
    up, of nodes and edges to multiples of 16. What is added comes last and is joined to
    nothing: graphs of equal size, about as large as the others at most, since some
    layers' cost grows with the largest graph. Outputs of the others do not change,
    except by norms over whole batches:
    :class:`~pyg_chimera.nn.GraphModel`, :class:`~pyg_chimera.nn.GPSLayer`,
    :class:`~pyg_chimera.nn.GatedGCNConv` and :class:`~pyg_chimera.nn.GraphBatchNorm`
    leave padding out, given :obj:`pad_node_mask`. Losses and metrics have to leave it
    out as well. PyG's own :class:`~torch_geometric.loader.DataLoader` ignores
    :obj:`collate_fn`; PyTorch's does not::

        loader = torch.utils.data.DataLoader(dataset, 64, collate_fn=PadBatch())
        for batch in loader:
            out = model(**model.inputs(batch))
            loss = F.l1_loss(out[batch.pad_graph_mask], batch.y[batch.pad_graph_mask])

    Adds :obj:`pad_node_mask`, :obj:`pad_edge_mask` and :obj:`pad_graph_mask`, bool
    :math:`[|\mathcal{V}|]`, :math:`[|\mathcal{E}|]` and :math:`[B]`, in which padding
    is :obj:`False`, as by :class:`torch_geometric.transforms.Pad`. An added edge leads
    from one of two added nodes to the other, so that acyclic graphs remain so; if all
    graphs are undirected, every other one leads back, and an odd one from a node to
    itself. Several may join the same two nodes. Attributes of nodes, edges and graphs
    are zero there, but :obj:`elimination_rank`, :obj:`topological_rank` and checksums
    are those of the added graphs, which :obj:`height` and :obj:`width` make grids of
    one row, and further :obj:`"..._index"` of shape :math:`[2, *]` hold pairs as
    :obj:`edge_index` does. An :class:`~torch_geometric.EdgeIndex` becomes a plain
    tensor.

    As in PyG, what has a row for each node or edge of each graph is an attribute of
    these, and for graphs with as many nodes as edges, of edges if the name contains
    :obj:`"edge"`. Where this may be chance, name attributes of graphs in
    :obj:`graph_attrs`.

    Args:
        steps (int, optional): The number of sizes up to the double of a size. With the
            default, each is 1.26 times the one before. (default: :obj:`3`)
        max_num_nodes (int, optional): The largest number of nodes, in place of sizes
            above it. (default: :obj:`None`, no limit)
        max_num_edges (int, optional): The same for edges. (default: :obj:`None`)
        follow_batch (Sequence[str], optional): As of a loader, if called with a list.
            (default: :obj:`None`)
        graph_attrs (Sequence[str], optional): The attributes of graphs, even if they
            have as many rows as nodes or edges. If set to :obj:`None`, :obj:`y` is
            refused where it may belong to either, as in a batch of one graph with a
            target for each node: pass :obj:`[]` for such targets. (default:
            :obj:`None`)

    Shapes:
        - **input:** a :class:`~torch_geometric.data.Batch`, or a list of graphs, which
          is faster, as by the argument :obj:`collate_fn` of
          :class:`torch.utils.data.DataLoader`
        - **output:** a :class:`~torch_geometric.data.Batch`

    Raises:
        ValueError: If the batch does not fit into the largest number of nodes or edges,
            has padding already, has attributes that some graphs lack, or without one
            row for each node, edge or graph, such as line graphs: apply the transforms
            that add these to padded batches.
        TypeError: If the input is neither a batch nor a list of homogeneous graphs.
    """

    def __init__(
        self,
        steps: int = 3,
        max_num_nodes: int | None = None,
        max_num_edges: int | None = None,
        follow_batch: Sequence[str] | None = None,
        graph_attrs: Sequence[str] | None = None,
    ) -> None:
        self.steps = check_integer("steps", steps, 1)
        limits = {"max_num_nodes": max_num_nodes, "max_num_edges": max_num_edges}
        self.max_num_nodes, self.max_num_edges = (
            None if limit is None else check_integer(name, limit, 1)
            for name, limit in limits.items()
        )
        self.follow_batch, self.graph_attrs = follow_batch, graph_attrs

    def forward(self, data: Batch | Sequence[Data]) -> Batch:
        """Returns a padded batch."""
        follow = list(self.follow_batch or [])
        graphs: Any = data
        if isinstance(data, Batch):
            follow += [key for key, _ in data if f"{key}_ptr" in data]
            graphs = data.to_data_list()
        if not isinstance(graphs, (list, tuple)) or not all(
            isinstance(graph, Data) for graph in graphs
        ):
            raise TypeError(
                "'data' must be a batch of homogeneous graphs or a list of "
                f"'torch_geometric.data.Data', got '{type(data).__name__}'"
            )
        if len(graphs) == 0:
            raise ValueError("'data' must have at least one graph, got none")
        names = [set(graph.keys()) for graph in graphs]
        if isinstance(data, Batch):  # whose own attributes would get lost
            own = {key for key, _ in data if not key.endswith(("batch", "ptr"))}
            names.append(own | names[0])
        _check_names(names)
        nodes = [int(graph.num_nodes or 0) for graph in graphs]
        edges = [graph.num_edges for graph in graphs]
        kinds = {key: self._kind(key, graphs, nodes, edges) for key, _ in graphs[0]}

        # One size more than that of the graphs: by the same factor as nodes at least.
        added = self._size(self._size(len(graphs)) + 1) - len(graphs)
        more_nodes = self._more("nodes", sum(nodes), 2 * added, self.max_num_nodes)
        more_edges = 0
        if "edge_index" in kinds:
            more_edges = self._more("edges", sum(edges), 0, self.max_num_edges)
        both = {key for key in kinds if _undirected(key, graphs, nodes)}
        shares = (
            _shares(more_nodes, added, 2),
            _shares(more_edges, added, 2 if "edge_index" in both else 1),
        )
        padding = [
            _padding(graphs[0], kinds, both, *sizes)
            for sizes in zip(*shares, strict=True)
        ]
        out = Batch.from_data_list([*graphs, *padding], follow_batch=follow)
        for kind, number, more in (
            ("node", sum(nodes), more_nodes),
            ("edge", sum(edges), more_edges),
            ("graph", len(graphs), added),
        ):
            index = torch.arange(number + more, device=out.batch.device)
            out[f"pad_{kind}_mask"] = index < number
        return out

    def _kind(
        self, key: str, graphs: Sequence[Data], nodes: list[int], edges: list[int]
    ) -> str:
        """Whether an attribute has rows of nodes or of edges, or is one of graphs."""
        if key in ("num_nodes", "edge_index"):
            return key
        values = [graph[key] for graph in graphs]
        first = values[0]
        if isinstance(first, Tensor) and first.layout == torch.strided and first.dim():
            dim = graphs[0].__cat_dim__(key, first)
            rows = [1 if dim is None else value.size(dim) for value in values]
            of_nodes, of_edges = rows == nodes, rows == edges
            is_alike = all(value.shape == first.shape for value in values)
            has_rows, named = of_nodes or of_edges, self.graph_attrs
            if key == "y" and named is None and is_alike and has_rows:
                raise ValueError(
                    "'data.y' may belong to graphs, or to their nodes or edges, as all "
                    f"graphs of the batch have {rows[0]} of these, and it as many "
                    "rows; set 'graph_attrs' of the transform to ['y'] if it belongs "
                    "to graphs, otherwise to []"
                )
            if has_rows and key not in (named or ()):  # if of both: as PyG, by the name
                is_node = of_nodes and not (of_edges and "edge" in key)
                return "node" if is_node else "edge"
            if is_alike:
                return "graph"
        elif not isinstance(first, Tensor):
            items = first if isinstance(first, (list, tuple)) else [first]
            if all(isinstance(x, _PLAIN) for x in items):
                return "graph"
        elif first.dim() == 0:
            return "graph"
        raise ValueError(
            f"'data.{key}' cannot be padded, as it is not a tensor with a row for each "
            "node or edge, or of the same shape for each graph; apply the transform "
            "that adds it to padded batches, or delete it"
        )

    def _size(self, number: int) -> int:
        """The smallest size that is not below a number."""
        k = math.floor(self.steps * math.log2(max(number, 1)))
        sizes = (math.ceil(2 ** ((k + i) / self.steps) - 1e-9) for i in count())
        return next(size for size in sizes if size >= number)

    def _more(self, name: str, number: int, least: int, most: int | None) -> int:
        """How many to add to a number of nodes or edges, at least some."""
        wanted = number + least
        if most is not None and wanted > most:
            raise ValueError(
                f"'max_num_{name}' must be at least {wanted}, for a batch of {number} "
                f"{name} and {least} of added graphs, got {most}; it may also be "
                "None, for no limit"
            )
        size = -(-self._size(wanted) // _MULTIPLE) * _MULTIPLE
        return (size if most is None else min(size, most)) - number


def _shares(number: int, parts: int, unit: int) -> list[int]:
    """A number in almost equal multiples of a unit, and what is left in the last."""
    share, rest = divmod(number // unit, parts)
    shares = [unit * (share + (i < rest)) for i in range(parts)]
    shares[-1] += number % unit
    return shares


def _check_names(names: list[set[str]]) -> None:
    """Checks that graphs, and their batch, have the same attributes, not masks."""
    if any("pad_node_mask" in some for some in names):
        raise ValueError(
            "'data' must have no padding yet, got 'data.pad_node_mask': former padding "
            "would count as part of the graphs. Pad once"
        )
    if different := sorted(names[0].union(*names) - names[0].intersection(*names)):
        raise ValueError(
            f"'data.{different[0]}' must be an attribute of each graph, but some lack "
            "it; add it to all of them before they are batched, or delete it"
        )


def _is_pairs(key: str, value: Any) -> bool:
    """Whether an attribute is a list of edges."""
    return "index" in key and list(getattr(value, "shape", []))[:-1] == [2]


def _undirected(key: str, graphs: Sequence[Data], nodes: list[int]) -> bool:
    """Whether there are edges, and each of each graph has a reverse, by checksums."""
    if not _is_pairs(key, graphs[0][key]):
        return False
    each = [graph[key].long() for graph in graphs]
    firsts = [0, *accumulate(nodes)]
    edges = torch.cat([x + first for x, first in zip(each, firsts, strict=False)], 1)
    there, back = (
        checksum(x, firsts[-1], multigraph=True) for x in (edges, edges.flip(0))
    )
    return bool((edges[0] != edges[1]).any()) and torch.equal(there, back)


def _padding(
    graph: Data, kinds: dict[str, str], both: set[str], num_nodes: int, num_edges: int
) -> Any:
    """A graph of pairs of nodes, with attributes like those of another graph."""
    out = copy.copy(graph)
    out.num_nodes = num_nodes
    if "edge_index" in kinds:  # of which checksums are
        back = "edge_index" in both
        out.edge_index = _pairs(graph.edge_index, num_edges, num_nodes, back)
    for key, kind in kinds.items():
        value = graph[key]
        if kind in ("node", "edge"):
            shape = list(value.shape)
            shape[graph.__cat_dim__(key, value)] = (
                num_nodes if kind == "node" else num_edges
            )
            out[key] = value.new_zeros(shape)
        elif kind == "graph":
            is_tensor = isinstance(value, Tensor)
            out[key] = torch.zeros_like(value) if is_tensor else type(value)()
        if kind == "graph" and key in ("height", "width"):
            if isinstance(value, (int, Tensor)):
                out[key] += 1 if key == "height" else num_nodes
        elif key == "edge_index":
            continue
        elif _is_pairs(key, value):
            out[key] = _pairs(value, out[key].size(1), num_nodes, key in both)
        elif kind == "node" and key in _RANKS:
            out[key] += torch.arange(num_nodes, device=value.device) % 2
        elif kind == "node" and key.endswith(SUFFIX):
            out[key] = checksum(out.edge_index, num_nodes)
    return out


def _pairs(like: Tensor, number: int, num_nodes: int, both: bool) -> Tensor:
    """Edges, each from one of two nodes to the other, and, with `both`, back."""
    edge = torch.arange(number, device=like.device)
    pair, back = (edge // 2, edge % 2) if both else (edge, 0 * edge)
    first = 2 * (pair % max(num_nodes // 2, 1))
    pairs = torch.stack([first + back, first + 1 - back])
    if both and number % 2:
        pairs[1, -1] = pairs[0, -1]
    return pairs.to(like.dtype)
