"""Several projections of nodes by one matrix product."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear, is_uninitialized_parameter

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.nn.conv._init import GateLinear
from pyg_chimera.nn.conv._window import Filter
from pyg_chimera.ops.common.fused import Fused
from pyg_chimera.ops.common.torch_private import is_hooked

_ORDINARY = (Tensor, Parameter, type(None))
_PLAIN = (Linear, torch.nn.Linear, GateLinear, RMSNorm)


def projected(
    x: Tensor,
    lins: Sequence[Callable[[Tensor], Tensor]],
    filtered: Filter | None = None,
) -> list[Tensor]:
    """Projections of nodes, by one product if layers are plain, perhaps filtered
    together; in float32 at least, as their products would overflow half precision.
    """
    for lin in lins:
        if is_uninitialized_parameter(getattr(lin, "weight", None)):
            lin(x[:0])
    plain: list[Any] = [lin for lin in lins if is_plain(lin)]
    if len(plain) == len(lins):
        tensors = x, *(lin.weight for lin in plain), *(lin.bias for lin in plain)
        whole, sizes = _JOINT(tensors, None), [lin.weight.size(0) for lin in plain]
    else:
        parts = [lin(x) for lin in lins]
        whole, sizes = torch.cat(parts, dim=1), [y.size(1) for y in parts]
    whole = at_least_float32(whole)
    return [*(whole if filtered is None else filtered(whole)).split(sizes, dim=1)]


def is_plain(module: Any) -> bool:
    """Whether a module is no more than its weights: no hooks, no adapter, no weights of
    other kinds, so that what it computes may be computed elsewhere.
    """
    return (
        type(module) in _PLAIN
        and "forward" not in vars(module)
        and not is_hooked(module)
        and all(type(x) in _ORDINARY for x in module._parameters.values())
    )


def _composed(x: Tensor, *rest: Any) -> Tensor:
    return F.linear(x, *_joined(rest[:-1]))


def _joined(tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights and biases of all layers, zero where one has none."""
    count = len(tensors) // 2
    weights, biases = [*tensors[:count]], [*tensors[count:]]
    weight = torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    pairs = zip(weights, biases, strict=True)
    return weight, torch.cat(
        [w.new_zeros(len(w)) if b is None else b for w, b in pairs]
    )


def _fits(x: Tensor, *rest: Any) -> bool:
    one_dtype = len({y.dtype for y in (x, *rest[:-1]) if y is not None}) == 1
    return one_dtype and not torch.is_autocast_enabled("cpu")


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, Sequence[Tensor], None]:
    weight, bias = _joined(rest[:-1])
    return F.linear(x, weight, bias), (weight,), None


def _backward(
    given: Any, _: None, saved: Sequence[Tensor], grads: Sequence[Tensor], __: None
) -> list[Tensor | None]:
    (x, *rest), (weight,), (grad,) = given, saved, grads
    weights, biases = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    sizes = [len(w) for w in weights]
    dx = grad @ weight if x.requires_grad else None
    dweights: Sequence[Any] = [None] * len(weights)
    if any(w.requires_grad for w in weights):
        dweights = (grad.t() @ x).split(sizes)
    dbiases: Sequence[Any] = biases
    if any(bias is not None for bias in biases):
        pairs = zip(grad.sum(0).split(sizes), biases, strict=True)
        dbiases = [None if b is None else d for d, b in pairs]
    return [dx, *dweights, *dbiases]


_JOINT = Fused("pyg_chimera.projections", _composed, _fits, _forward, _backward)
