"""Checks of what users pass to operators, with uniform error messages."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.errors import NotFiniteError
from pyg_chimera.ops.common.torch_private import is_transforming

NO_TORCHSCRIPT = (
    "TorchScript ('torch.jit.script', 'torch.jit.trace', and what builds on them) is "
    "not supported: use 'torch.export.export', or 'torch.compile'"
)

_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def unchecked() -> Iterator[None]:
    r"""A context in which operators and layers do not read the contents of tensors, so
    that the host need not wait for a GPU. Only :obj:`ptr`, which divides sequences, is
    read all the same. ::

        with ops.unchecked():
            loss = criterion(model(x, edge_index, batch=batch), y)
        loss.backward()

    Shapes, dtypes, devices and options are checked as always. So are new graphs, when
    what depends on them is computed. The context assumes that:

    * *Weights and gates are finite.* If they are not, the results of their graph are
      NaN, where otherwise a :class:`ValueError` would be raised.
    * *Rows, or columns, of* :math:`|\mathbf{A}|` *sum to less than one* in
      :func:`resolvent_mix`, as :class:`~pyg_chimera.nn.ChimeraConv` makes them. If they
      do not, results may be inexact, as solvers neither pivot nor check the outcome;
      those of singular systems are infinite or NaN.
    * *The arguments of* :func:`delta_scan` *are as documented*: the length of keys, the
      range of :obj:`beta` and the row sums on cycles. Otherwise, states may grow
      without bound.
    * *float32 is enough*, although float64 is used otherwise where the system of
      :func:`resolvent_mix` is nearly singular.
    * *Index tensors are unchanged*, unless PyTorch has changed them: graphs are
      recognised by the tensor, not by its contents. Writing to its memory by other
      means, such as :obj:`data` or a numpy array, goes unnoticed. The contents of a
      tensor that has not been seen in the context are read once.
    * *What transforms have stored* belongs to the graph.
    * *Edge indices are in range* when a layer gathers the features of nodes. If they
      are not, PyTorch raises an :class:`IndexError`, or on a GPU stops with a failed
      assertion.

    The context applies to the thread, or :mod:`asyncio` task, that enters it, to
    compiled models called in it too, and to the forward pass; the backward pass reads
    no contents anyway. In compiled models, graphs are recognised by their contents, as
    compiled code writes to tensors without telling PyTorch.
    """
    with trusting(True):
        yield


def trusting(trusted: bool) -> AbstractContextManager[None]:
    """A context in which the contents of tensors are trusted, or not."""
    return setting(_TRUSTED, trusted)


@contextmanager
def setting(variable: ContextVar, value: Any) -> Iterator[None]:
    """A context in which a context variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def trusted() -> bool:
    """Whether the contents of tensors are trusted, as in `unchecked`."""
    return _TRUSTED.get()


def readable() -> bool:
    """Whether to check the contents of tensors: they are neither trusted nor unknown to
    a compiler, which cannot trace context variables either.
    """
    return not torch.compiler.is_compiling() and not trusted()


def _is_integer(tensor: Tensor) -> bool:
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def extremes(x: Tensor) -> tuple[int, int]:
    """The smallest and the largest of some integers."""
    if type(x) is Tensor and x.is_cpu and not is_transforming():  # without calls
        found = as_array(x if x.dtype == torch.long else x.long())
        return int(found.min()), int(found.max())
    low, high = torch.aminmax(x)
    return int(low), int(high)


def check_edge_index(
    edge_index: Tensor, num_nodes: int, name: str = "edge_index", end: str = "node"
) -> None:
    """Checks that edges, [2, edges], join nodes of a graph that has them; reads them.

    `end` is what they join, for messages.
    """
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"'{name}' must be a tensor of integers of shape [2, num_edges], "
            f"got '{type(edge_index).__name__}'"
        )
    if not isinstance(num_nodes, Integral):
        raise no_integer(f"num_{end}s", num_nodes)
    if num_nodes < 0:
        raise ValueError(f"'num_{end}s' must not be negative, got {num_nodes}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"'{name}' must be of shape [2, num_edges], "
            f"got shape {list(edge_index.shape)}{_instead(name, edge_index)}"
        )
    if not _is_integer(edge_index):
        raise TypeError(
            f"'{name}' must hold integers, got dtype {edge_index.dtype}; "
            f"convert it with '{name}.long()'"
        )
    if edge_index.numel() == 0:
        return
    low, high = extremes(edge_index)
    x_rows = " (the rows of 'x')" if end == "node" else ""
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"'{name}' must hold {end} indices in [0, num_{end}s) = [0, {num_nodes}), "
            f"got {low if low < 0 else high} in an '{name}' of shape "
            f"{list(edge_index.shape)}; {end}s are numbered from 0, and 'num_{end}s'"
            f"{x_rows} must count them all"
        )


def _instead(name: str, x: Tensor) -> str:
    """Advice on edges that are rows, as in a list of them, or a matrix."""
    if x.dim() != 2:
        return ""
    if x.size(1) == 2:
        return f"; transpose it: '{name}.t()'"
    if x.size(0) == x.size(1):
        return "; 'torch_geometric.utils.dense_to_sparse' makes edges of a dense matrix"
    return ""


def no_integer(name: str, value: Any) -> Exception:
    """The error about an argument that must be an integer."""
    if isinstance(value, Tensor) and torch.jit.is_tracing():  # traced sizes
        return NotImplementedError(NO_TORCHSCRIPT)
    return TypeError(f"'{name}' must be an integer, got '{type(value).__name__}'")


def check_batch(batch: Any, num_nodes: int, *, read: bool = True) -> None:
    """Checks that a batch vector assigns each node to a graph, in any order.

    Args:
        batch (torch.Tensor): The graph of each node.
        num_nodes (int): The number of nodes.
        read (bool, optional): Whether to look for negative entries.
    """
    if not isinstance(batch, Tensor):
        raise TypeError(
            f"'batch' must be a tensor of integers, got '{type(batch).__name__}'"
        )
    if not _is_integer(batch):
        raise TypeError(
            f"'batch' must hold integers, got {batch.dtype} of shape "
            f"{list(batch.shape)}; convert it with 'batch.long()', or pass edge "
            "features as 'edge_attr=...'"
        )
    if torch.compiler.is_compiling():
        return
    if list(batch.shape) != [num_nodes]:
        raise ValueError(
            f"'batch' must be of shape [num_nodes] = [{num_nodes}], "
            f"got shape {list(batch.shape)}"
        )
    if read and batch.numel() > 0 and int(batch.min()) < 0:
        raise ValueError(
            f"'batch' must hold no negative entries, got {int(batch.min())}"
        )


def check_within_graphs(col: np.ndarray, row: np.ndarray, batch: np.ndarray) -> None:
    """Checks that each edge, from `col` to `row`, joins nodes of one graph."""
    crossing = np.flatnonzero(batch[row] != batch[col])
    if crossing.size:
        e = int(crossing[0])
        raise ValueError(
            f"'edge_index' joins different graphs of 'batch': edge {e} goes from "
            f"node {col[e]} of graph {batch[col[e]]} to node {row[e]} of graph "
            f"{batch[row[e]]}{_unsorted(batch)}"
        )


def _unsorted(batch: np.ndarray) -> str:
    """Advice on a batch vector that is not that of a loader."""
    falls = np.flatnonzero(np.diff(batch) < 0)
    if not falls.size:
        return ""
    i = int(falls[0])
    return (
        f". 'batch' is not sorted (node {i + 1} of graph {batch[i + 1]} follows one of "
        f"graph {batch[i]}): if nodes have been sorted or shuffled, it must be, too, "
        "and node numbers in 'edge_index' must be those of the new order"
    )


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_float(name: str, x: Any, advice: str = "") -> None:
    """Checks that an argument is a floating-point tensor."""
    check_tensor(name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"'{name}' must be floating point (float16, bfloat16, float32 or float64), "
            f"got {x.dtype} of shape {list(x.shape)}{advice}"
        )


def check_floats(**tensors: Any) -> list[Tensor]:
    """Checks that all are floating-point tensors on one device.

    Returns:
        list[Tensor]: The tensors in the widest of their dtypes, at least float32.
    """
    first = next(iter(tensors))
    for name, x in tensors.items():
        check_float(name, x)
        _check_device(name, x, f"'{first}'", tensors[first])
    return in_one_dtype(tensors.values())


def in_one_dtype(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Floating-point tensors in the widest of their dtypes, at least float32."""
    several = list(tensors)
    is_wide = any(x.dtype == torch.float64 for x in several)
    dtype = torch.float64 if is_wide else torch.float32
    return [x if x.dtype == dtype else x.to(dtype) for x in several]


def check_integers(name: str, x: Any, like: Tensor) -> Tensor:
    """Checks that x is an integer tensor on the device of `like`; returns int64."""
    check_tensor(name, x)
    if not _is_integer(x):
        raise TypeError(f"'{name}' must be integer, got {x.dtype}")
    _check_device(name, x, "other tensors", like)
    return x if x.dtype == torch.long else x.long()


def check_indices(like: Tensor, **tensors: Any) -> list[Tensor | None]:
    """As `check_integers`, for optional tensors."""
    return [
        None if x is None else check_integers(name, x, like)
        for name, x in tensors.items()
    ]


def check_edges(name: str, x: Any, like: Tensor) -> Tensor:
    """Checks that edges are integer [2, edges], not their contents; returns int64."""
    check_tensor(name, x)
    if x.dim() != 2 or x.size(0) != 2:
        raise ValueError(
            f"'{name}' must be [2, edges], got {list(x.shape)}{_instead(name, x)}"
        )
    return check_integers(name, x, like)


def check_tensor(name: str, x: Any) -> None:
    """Checks that an argument is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a torch.Tensor, got '{type(x).__name__}'")


def _check_device(name: str, x: Tensor, other: str, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"'{name}' is on {x.device}, but {other} on {like.device}; all tensors "
            "must be on one device: move them with '.to(...)'"
        )


def check_dim(name: str, x: Any, layout: str, num_dims: int) -> None:
    """Checks that an argument is a tensor with `num_dims` dimensions."""
    check_tensor(name, x)
    if x.dim() != num_dims:
        raise ValueError(f"'{name}' must be {layout}, got {list(x.shape)}")


def check_shape(name: str, x: Tensor, layout: str, expected: list[int]) -> None:
    """Checks that an argument has the shape that matches the others."""
    if list(x.shape) != expected:
        raise ValueError(f"'{name}' must be {layout} = {expected}, got {list(x.shape)}")


def check_nodes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks that the shapes of query, key and value match."""
    for name, x in {"query": query, "key": key, "value": value}.items():
        check_dim(name, x, "[nodes, heads, channels]", 3)
    check_shape("key", key, "like 'query', [nodes, heads, channels]", [*query.shape])
    like_query = [query.size(0), *value.shape[1:]]
    check_shape("value", value, "[nodes, heads, channels]", like_query)
    groups, heads = query.size(1), value.size(1)
    if heads < 1:
        raise ValueError(f"'value' must have heads, got {list(value.shape)}")
    if groups < 1 or heads % groups != 0:
        raise ValueError(
            f"'query' must have as many heads as 'value', or a divisor, got "
            f"{list(query.shape)} and {list(value.shape)}"
        )


def check_graph(
    query: Any, key: Any, value: Any, edge_index: Any, edge_weight: Any
) -> list[Tensor]:
    """Checks nodes, edges and a weight per edge and head, but not their contents.

    Args:
        query: [nodes, groups, channels].
        key: [nodes, groups, channels].
        value: [nodes, heads, channels of values].
        edge_index: [2, edges].
        edge_weight: [edges, heads].

    Returns:
        list[Tensor]: Query, key and value in one dtype, weights, both at least float32,
        and edges as int64.
    """
    floats = check_floats(query=query, key=key, value=value)
    floats += check_floats(edge_weight=edge_weight)
    _check_device("edge_weight", edge_weight, "'query'", query)
    check_nodes(query, key, value)
    edge_index = check_edges("edge_index", edge_index, value)
    expected = [edge_index.size(1), value.size(1)]
    check_shape("edge_weight", edge_weight, "[edges, heads]", expected)
    return [*floats, edge_index]


def check_rank(rank: Tensor, num_nodes: int) -> None:
    """Checks that there is one elimination or topological rank per node."""
    check_shape("rank", rank, "[nodes]", [num_nodes])
    check_integers("rank", rank, rank)


def check_finite(
    name: str, x: Tensor, place: Callable[[int], str], column: str = "head"
) -> None:
    """Checks that weights [edges, heads, ...] are finite; `place` describes a row."""
    if trusted() or math.isfinite(x.sum().item()):  # in one pass; a sum may overflow
        return
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        row, head, *rest = (~finite).nonzero()[0].tolist()
        raise NotFiniteError(
            f"'{name}' must be finite, but {place(row)} has "
            f"{x[(row, head, *rest)].item()} in {column} {head}. (Layers compute it "
            "from 'x', 'edge_attr' and parameters.)"
        )


#: Of all operators; each has some of them.
BACKENDS = ("auto", "numba", "triton", "torch", "reference")
FORMS = ("auto", "state", "mask", "chunk")


def check_option(name: str, value: Any, known: tuple) -> None:
    """Checks that an option is one of the known values."""
    if value not in known:
        raise ValueError(f"'{name}' must be one of {known}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Checks that an option is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"'{name}' must be True or False, got {value!r}")


def check_number(name: str, value: Any) -> None:
    """Checks that an option is a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"'{name}' must be a number, got {value!r}")


def check_integer(name: str, value: Any, least: int) -> int:
    """Checks that a number is an integer from `least` on, and below 2**31; returns a
    plain one, where it may have been one of numpy.
    """
    try:
        number = value if type(value) is int else index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"'{name}' must be an integer, got {value!r}")
    if not least <= number < 2**31:
        raise ValueError(
            f"'{name}' must be an integer >= {least} and < 2**31, got {value!r}"
        )
    return number
