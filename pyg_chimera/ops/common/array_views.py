"""Tensors as numpy arrays that leave no mark on them."""

import ctypes
import sys

import torch
from numpy import dtype, ndarray
from torch import Tensor

_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64"
_DTYPES = {getattr(torch, name): dtype(name) for name in _NAMES.split()}


class _Memory(ctypes.c_char * sys.maxsize):  # type: ignore[misc]
    """All bytes from an address on, and the tensor that keeps them alive."""

    __slots__ = ("owner",)


_from = _Memory.from_address


def as_view(x: Tensor, size: int | None = None) -> ndarray:
    """The memory of a tensor on the CPU, with its strides, or that of `size` numbers
    from its first one on; see `as_array`.
    """
    if x.is_neg() or not x.is_cpu:
        raise TypeError(f"expected a plain tensor in memory, got one on {x.device}")
    memory = _from(x.data_ptr())
    memory.owner = x
    if size is not None:
        return ndarray((size,), _DTYPES[x.dtype], memory)
    strides = [x.element_size() * n for n in x.stride()]
    return ndarray((*x.shape,), _DTYPES[x.dtype], memory, strides=strides)


def in_range(edge_index: Tensor, num_nodes: int) -> ndarray:
    """Edges as an array, for kernels, which do not look where they write.

    Raises:
        IndexError: If a node is out of range, as where PyTorch gathers them.
    """
    edges = as_array(edge_index)
    if edges.size > 0 and not 0 <= edges.min() <= edges.max() < num_nodes:
        raise IndexError(
            f"'edge_index' must hold nodes in [0, {num_nodes}), got {edges.min()} to "
            f"{edges.max()}"
        )
    return edges


def as_array(x: Tensor) -> ndarray:
    """The memory of a contiguous tensor on the CPU, or of a contiguous copy.

    After `Tensor.numpy`, storage can never be resized again, not even by its owner:
    FSDP resizes parameters between calls, and users the tensors that they fill by
    `out=`. For the same reason, an array of what a call is given must not outlive it.

    Raises:
        TypeError: If the tensor is on another device, or has no memory (fake ones).
        KeyError: If numpy does not have its dtype.
    """
    x = (x.resolve_neg() if x.is_neg() else x).contiguous()
    address = x.data_ptr()
    if not (x.is_cpu and (address or x.numel() == 0)):
        raise TypeError(f"expected a tensor in memory, got {type(x)} on {x.device}")
    memory = _from(address)
    memory.owner = x
    return ndarray((*x.shape,), _DTYPES[x.dtype], memory)
