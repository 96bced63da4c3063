"""The direct term of scans, which `plan.direct_term` defines, and its gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import pointer
from pyg_chimera.ops.common.vector_kit import add_multiple, inner_product_of_rows


class _Inputs(NamedTuple):
    """The inputs, or their gradients."""

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]
    direct: np.ndarray  #: [V, heads]


def add_direct_term(out: Tensor, *inputs: Tensor) -> None:
    """Adds `direct_term` of query, key, value and direct to an output, in place."""
    _on_nodes(_add, _Inputs(*arrays(*inputs)), _written(out))


def add_direct_gradients(grads: Sequence[Tensor], *inputs: Tensor) -> Tensor:
    """Adds the gradients of `direct_term` to those of query, key and value, in place.

    `inputs` are query, key, value, direct and the output's gradient. Returns the
    gradient of direct.
    """
    grad_direct = torch.empty_like(inputs[3], memory_format=torch.contiguous_format)
    *x, grad = arrays(*inputs)
    d = _Inputs(*map(_written, (*grads, grad_direct)))
    _on_nodes(_add_gradients, _Inputs(*x), grad, d)
    return grad_direct


def _written(x: Tensor) -> np.ndarray:
    """The memory of a tensor, to be written."""
    assert x.is_contiguous()
    return as_array(x)


def _on_nodes(kernel: Callable, x: _Inputs, *args: object) -> None:
    cost = 5.0 + 0.1 * (x.query[:1].size + x.value[:1].size)
    run(kernel, np.full(len(x.query), cost), 0, x.query.dtype, x, *args)


@jit
def _add(first, last, stop, scratch, x, out):
    heads, channels = x.value.shape[1:]
    groups, num_keys = x.query.shape[1:]
    for u in range(first, last):
        if u % 1024 == 0 and stopped(stop):
            return
        for h in range(heads):
            at = (u * groups + h // (heads // groups)) * num_keys
            q, k = pointer(x.query) + at, pointer(x.key) + at
            at = (u * heads + h) * channels
            score = x.direct[u, h] * inner_product_of_rows(q, k, num_keys)
            add_multiple(pointer(out) + at, score, pointer(x.value) + at, channels)


@jit
def _add_gradients(first, last, stop, scratch, x, grad, d):
    heads, channels = x.value.shape[1:]
    groups, num_keys = x.query.shape[1:]
    for u in range(first, last):
        if u % 1024 == 0 and stopped(stop):
            return
        for h in range(heads):
            of_keys = (u * groups + h // (heads // groups)) * num_keys
            at = (u * heads + h) * channels
            q, k = pointer(x.query) + of_keys, pointer(x.key) + of_keys
            v, dy = pointer(x.value) + at, pointer(grad) + at
            score = inner_product_of_rows(q, k, num_keys)
            read = inner_product_of_rows(v, dy, channels)
            d.direct[u, h] = score * read
            read *= x.direct[u, h]
            add_multiple(pointer(d.query) + of_keys, read, k, num_keys)
            add_multiple(pointer(d.key) + of_keys, read, q, num_keys)
            add_multiple(pointer(d.value) + at, score * x.direct[u, h], dy, channels)
