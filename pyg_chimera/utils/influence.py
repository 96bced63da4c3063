"""The influence of nodes on each other."""

from copy import deepcopy
from operator import index
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.nn._inputs import check_inputs
from pyg_chimera.nn._routing import unwrapped
from pyg_chimera.nn.conv._plstm_block import PLSTMBlock
from pyg_chimera.ops.common.checks import check_option

__all__ = ["influence"]


def influence(
    module: torch.nn.Module,
    x: Tensor,
    edge_index: Any,
    node: int,
    *,
    role: str = "target",
    measure: str = "mixing",
    **kwargs: Any,
) -> Tensor:
    r"""How much all other nodes influence a node, or the node influences them: a row or
    a column of the mixing matrix, in the time of a call and its gradient.

    All layers of Chimera and pLSTM compute, for each head,

    .. math::
        \mathbf{y}_i = \sum_j P_{ij} \, (\mathbf{q}_i^{\top} \mathbf{k}_j) \,
        \mathbf{v}_j,

    where :math:`P_{ij}` is the sum over all paths from :math:`j` to :math:`i` of the
    products of the gates and transitions along them: in
    :class:`~pyg_chimera.nn.ChimeraConv`, :math:`(\mathbf{I} - \mathbf{A})^{-1}_{ij}
    s_j`. Several DAGs are summed as the layer sums them. A column is computed by a call
    of the layer with values of one at the node and zero elsewhere, a row by the
    gradient of such a call: no matrix has to be inverted, and both are exact.

    This describes what a layer mixes, before its norm, gate and projections. For other
    layers and whole models, :obj:`"jacobian"` is the influence score from
    `"Representation Learning on Graphs with Jumping Knowledge Networks"
    <https://arxiv.org/abs/1806.03536>`_, for the output :math:`\mathbf{h}_i` at the
    node.

    ===================  =============================================================
    :obj:`measure`       influence of node :math:`j` on node :math:`i`
    ===================  =============================================================
    :obj:`"mixing"`      :math:`P_{ij} \, \mathbf{q}_i^{\top} \mathbf{k}_j`
    :obj:`"paths"`       :math:`P_{ij}`, however similar queries and keys are
    :obj:`"jacobian"`    :math:`\sum_{c, f} |\partial h_{ic} / \partial x_{jf}|`
    ===================  =============================================================

    The module is copied, and the copy is called in evaluation mode.

    Args:
        module (torch.nn.Module): A Chimera or pLSTM layer; with
            :obj:`measure="jacobian"`, any layer or model that maps :obj:`x` and
            :obj:`edge_index` to a row for each node (as the first of several outputs,
            if there are several).
        x (torch.Tensor): The node features, floating point
            :math:`[|\mathcal{V}|, F]`.
        edge_index (torch.Tensor): The edges, as the module takes them.
        node (int): The node, in :math:`[0, |\mathcal{V}|)`.
        role (str, optional): :obj:`"target"` for the influence of all others on the
            node (:math:`i` is the node), or :obj:`"source"` for its influence on them
            (:math:`j` is the node). (default: :obj:`"target"`)
        measure (str, optional): :obj:`"mixing"`, :obj:`"paths"` or :obj:`"jacobian"`,
            which supports the target only and takes a backward pass for each output
            channel. (default: :obj:`"mixing"`)
        **kwargs (optional): Further arguments of the module, such as :obj:`batch`.

    Returns:
        torch.Tensor: :math:`[|\mathcal{V}|, H]` in the dtype of :obj:`x`, for each
        head; :math:`[|\mathcal{V}|, 1]` for a Jacobian.

    Raises:
        TypeError: If :obj:`node` is not an integer, :obj:`x` is not floating point, or
            where the module would raise.
        ValueError: If :obj:`node` is out of range, an option is unknown, the measure
            does not support the module, or where the module would raise.
    """
    check_inputs(x)
    check_option("role", role, ("target", "source"))
    check_option("measure", measure, ("mixing", "paths", "jacobian"))
    try:
        node = index(node)
    except TypeError as error:
        kind = type(node).__name__
        raise TypeError(f"'node' must be an integer, got {kind}") from error
    if not 0 <= node < x.size(0):
        raise ValueError(
            f"'node' must be in [0, {x.size(0)}), as 'x' is {list(x.shape)}, got {node}"
        )
    module = unwrapped(module)
    if measure == "jacobian" and role == "source":
        raise ValueError(
            "'role' must be 'target' with measure='jacobian', as operators have no "
            "forward mode derivatives, got 'source'"
        )
    is_sum = isinstance(module, PLSTMBlock) or getattr(module, "additive", False)
    if measure != "jacobian" and not is_sum:
        raise ValueError(
            f"'module' must be a Chimera or pLSTM layer with measure={measure!r} (of a "
            "model or of a 'GPSLayer', its mixer), got "
            f"{type(module).__name__}; measure='jacobian' takes any module"
        )
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors that were made in inference mode cannot be saved for gradients.
        x, edge_index, kwargs = _plain([x, edge_index, kwargs])
        copy = deepcopy(module).eval()
        if measure == "jacobian":
            return _jacobian(copy, x, edge_index, int(node), kwargs)
        return _mixing(
            copy, x, edge_index, int(node), role, measure == "mixing", kwargs
        )


def _plain(value: Any) -> Any:
    """The value with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _mixing(
    layer: Any,
    x: Tensor,
    edge_index: Any,
    node: int,
    role: str,
    products: bool,
    kwargs: dict[str, Any],
) -> Tensor:
    """The layer's output before its norm, for values of one channel at the probe."""
    # Layers compute with float32 at least.
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs, probe = (
        layer.query_key_value,
        x.new_zeros(x.size(0), layer.heads, 1, dtype=wide),
    )
    if role == "source":
        probe[node] = 1
    else:
        probe.requires_grad_()

    def probed(nodes: Any, gate: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = inputs(nodes) if gate is None else inputs(nodes, gate)
        if not products:
            query, key = (y.new_ones(*y.shape[:2], 1) for y in (query, key))
        return query, key, probe if gate is None else probe * gate.unsqueeze(2)

    layer.log_sums = None  # not linear in values

    def output(
        y: Tensor, x: Tensor, value: Any = None, log_scale: Any = None, *_: Any
    ) -> Tensor:
        return y if log_scale is None else y * log_scale.exp().unsqueeze(2)

    layer.query_key_value, layer.output = probed, output
    mixed = layer(x, edge_index, **kwargs)
    if role == "target":
        (mixed,) = torch.autograd.grad(mixed[node].sum(), probe)
    return mixed.detach().squeeze(2).to(x.dtype)


def _jacobian(
    module: torch.nn.Module,
    x: Tensor,
    edge_index: Any,
    node: int,
    kwargs: dict[str, Any],
) -> Tensor:
    x.requires_grad_()
    out = module(x, edge_index, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    if out.dim() != 2 or out.size(0) != x.size(0):
        raise ValueError(
            f"'module' must return a row for each of {x.size(0)} nodes, got "
            f"{list(out.shape)}; take it without what pools nodes"
        )
    total = x.new_zeros(x.size(0), 1)
    for channel in out[node]:
        (grad,) = torch.autograd.grad(
            channel, x, retain_graph=True, materialize_grads=True
        )
        total += grad.abs().sum(1, keepdim=True)
    return total
