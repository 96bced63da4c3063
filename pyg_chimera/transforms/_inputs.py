"""The base class of transforms; checks of edges, names and scores."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.structure.checksum import SUFFIX, checksum
from pyg_chimera.ops.structure.edges import edges_of

#: Attributes of the graph itself, without which it would be another one.
_OF_THE_GRAPH = ("edge_index", "edge_attr", "x", "y", "pos", "num_nodes")


class Transform(BaseTransform):
    """A transform with its arguments, other than defaults, in its `repr`.

    PyG compares this with that of a processed data set, to tell whether that is stale.
    """

    def __repr__(self) -> str:
        arguments = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if parameter.default is parameter.empty or value != parameter.default:
                value = getattr(value, "__name__", value)  # of a function
                arguments.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def graph_of(data: Data) -> tuple[Tensor, int]:
    """The checked edges and the number of nodes of homogeneous data."""
    if not isinstance(data, Data):
        raise TypeError(
            "The transform takes a homogeneous 'torch_geometric.data.Data', got "
            f"'{type(data).__name__}'"
        )
    if data.edge_index is None:
        raise ValueError(
            "The transform needs 'data.edge_index' of shape [2, num_edges], got data "
            f"with {data.keys()}"
        )
    # PyG infers the number of nodes from edges if necessary.
    num_nodes = data.num_nodes if isinstance(data.edge_index, Tensor) else 0
    assert num_nodes is not None
    check_edge_index(data.edge_index, num_nodes)
    return edges_of(data.edge_index), num_nodes  # functions take no EdgeIndex


def mark(data: Data, stem: str, dags: Sequence[Tensor] = ()) -> None:
    """Stores the checksum of the edges with the attributes named `stem...`."""
    data[f"{stem}{SUFFIX}"] = checksum(
        *graph_of(data), dags, multigraph=stem == "line_edge"
    )


def check_attr_name(argument: str, name: str) -> None:
    """Refuses names of the graph itself, and names of indices by PyG's rules."""
    if not isinstance(name, str):
        raise TypeError(f"'{argument}' must be a string, got {name!r}")
    if "index" in name or "batch" in name or name in ("", "face", "ptr"):
        raise ValueError(
            f"'{argument}' must not contain 'index' or 'batch' or be 'face', 'ptr' or "
            f"empty, as PyG tells by the name how to batch an attribute, got '{name}'"
        )
    taken = argument == "prefix" and (name == "edge" or f"_{name}".endswith("_line"))
    if name in _OF_THE_GRAPH or taken:
        raise ValueError(
            f"'{argument}' must not name what belongs to the graph itself, such as its "
            f"edges, or to a line graph, got '{name}'"
        )


def score_of(order: Callable[[Data], Tensor], data: Data, num_nodes: int) -> Tensor:
    """Calls a function of the data for real scores of nodes; returns a new tensor."""
    score = order(data)
    try:
        score = torch.as_tensor(score).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            "'order' must return a tensor of a score per node, got "
            f"'{type(score).__name__}'"
        ) from error
    if score.shape != (num_nodes,):
        raise ValueError(
            f"'order' must return a score per node, of shape [{num_nodes}], got shape "
            f"{list(score.shape)}"
        )
    if score.is_complex():
        raise TypeError(f"'order' must return real scores, got dtype {score.dtype}")
    if bool(score.isnan().any()):
        raise ValueError(
            f"'order' must not return NaN, got {int(score.isnan().sum())} of "
            f"{num_nodes} entries"
        )
    return score
