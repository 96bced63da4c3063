from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import BatchNorm
from torch_geometric.utils import scatter

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.ops.common.checks import extremes
from pyg_chimera.ops.common.torch_private import is_followed
from pyg_chimera.ops.structure.node_sequences import dense_rank

__all__ = ["GraphBatchNorm"]


class GraphBatchNorm(BatchNorm):
    r"""Batch norm: a graph weighs as much in evaluation as in training.

    In training, it is :class:`torch_geometric.nn.BatchNorm`, whose statistics of a
    batch are in part those of a node's own graph: all of them if batches have a single
    graph. In evaluation, running statistics alone would lack this part, and they lag
    behind the weights, by which models of a single graph lose much while learning rates
    are constant. Here, each graph is normalized by mean and variance of a mixture of
    its own rows and of running statistics. The share of the former is

    .. math::
        s = \min \left( \overline{1 / B}, \; n \cdot \overline{1 / N} \right)

    for a graph of :math:`n` rows, where bars are running means over the batches of
    training, of :math:`B` graphs and :math:`N` rows. So models that are trained on a
    single graph evaluate as they train, running statistics prevail where batches have
    many graphs or a graph has few rows, and no graph depends on others of its batch.
    `"Four Things Everyone Should Know to Improve Batch Normalization"
    <https://arxiv.org/abs/1906.03548>`_ gives images such a share, chosen by
    validation.

    Weights of :class:`torch_geometric.nn.BatchNorm` can be loaded, and evaluate as
    there: without training, :math:`s` is zero.

    Args:
        in_channels (int): Size of each input sample.
        eps (float, optional): A value added to the variance. (default: :obj:`1e-5`)
        momentum (float, optional): The weight of a batch in running means, or
            :obj:`None` for means over all batches. (default: :obj:`0.1`)
        affine (bool, optional): If set to :obj:`False`, there are no learnable scale
            and shift. (default: :obj:`True`)

    Shapes:
        - **inputs:**
          rows :math:`(N, F)`,
          batch vector :math:`(N)` *(optional, all rows are of one graph without it)*,
          mask :math:`(N)` *(optional, all rows count without it)*
        - **output:** rows :math:`(N, F)`
    """

    graph_share: Tensor
    row_share: Tensor

    def __init__(
        self,
        in_channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(in_channels, eps, momentum, affine, allow_single_element=True)
        self.register_buffer("graph_share", torch.zeros(()))
        self.register_buffer("row_share", torch.zeros(()))

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        self.graph_share.zero_()
        self.row_share.zero_()

    def forward(
        self, x: Tensor, batch: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The rows.
            batch (torch.Tensor, optional): The batch vector, which assigns each row to
                a graph. (default: :obj:`None`)
            mask (torch.Tensor, optional): The rows that count, bool, such as those that
                are no padding of a :class:`~pyg_chimera.transforms.PadBatch`. Others
                are replaced by zeros, and normalized. (default: :obj:`None`)
        """
        if not self.training and x.size(0) > 0:
            return self._evaluate(x, batch, mask)
        out = super().forward(x) if mask is None else masked_norm(self, x, mask)
        # A single row is normalized by running statistics, and so is all if frozen.
        if x.size(0) > 1 and self.module.training:
            # Means of all batches until there are enough: right from the first on.
            weight = 1 / self.module.num_batches_tracked.clamp(min=1)
            weight = weight.clamp(min=self.module.momentum or 0.0)
            rows: Any = x.size(0)
            if mask is not None:
                rows = mask.sum(dtype=self.row_share.dtype)
                rows, weight = rows.clamp(min=1), weight * (rows > 1)
            if mask is not None and batch is not None:  # padding joins another graph
                batch = batch.where(mask, batch.where(mask, 0).max())
            graphs = 1 if batch is None else _num_graphs(batch)
            self.graph_share.add_(weight * (1 / graphs - self.graph_share))
            self.row_share.add_(weight * (1 / rows - self.row_share))
        return out

    def _evaluate(self, x: Tensor, batch: Tensor | None, mask: Tensor | None) -> Tensor:
        rows = at_least_float32(x)
        if mask is not None:  # other rows are graphs of their own
            rows = rows.where(mask.unsqueeze(-1), 0.0)
            batch = (~mask).long() if batch is None else 2 * batch.long() + ~mask
        if batch is None:
            size: Any = x.size(0)
            var, mean = torch.var_mean(rows, dim=0, correction=0, keepdim=True)
            index = batch
        else:
            index = dense_rank(batch)

            def means(values: Tensor) -> Tensor:
                return scatter(values, index, dim_size=x.size(0), reduce="mean")

            size = scatter(torch.ones_like(rows[:, :1]), index, dim_size=x.size(0))
            mean = means(rows)
            var = means((rows - mean[index]).square())

        share = torch.minimum(self.graph_share, size * self.row_share).to(rows.dtype)
        share = share.clamp(0, 1)
        gap = mean - self.module.running_mean
        mean = self.module.running_mean + share * gap
        var = self.module.running_var.to(rows.dtype).lerp(var, share)
        var = var + share * (1 - share) * gap.square()
        return _normalized(self.module, rows, mean, var, index).to(x.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        like = state_dict.get(f"{prefix}module.running_mean")
        if like is not None:
            for name in ("graph_share", "row_share"):  # which plain batch norm lacks
                state_dict.setdefault(prefix + name, like.new_zeros(()))
        super()._load_from_state_dict(state_dict, prefix, *args)


def masked_norm(norm: torch.nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """The norm of rows; batch norm, by the statistics of those in a mask alone.

    The same for any number of other rows, without a shape that depends on it. These are
    replaced by zeros: where they are not finite, gradients of weights would be NaN.
    """
    bn: Any = getattr(norm, "module", norm)
    if mask is not None:
        x = x.where(mask.unsqueeze(-1), 0.0)
    trains = bn.training or getattr(bn, "running_mean", None) is None
    is_plain = isinstance(bn, torch.nn.BatchNorm1d)
    is_batch_norm = isinstance(bn, _BatchNorm)
    if mask is None or not trains or not is_batch_norm:
        return bn(x) if isinstance(norm, GraphBatchNorm) else norm(x)
    if not is_plain:  # such as SyncBatchNorm
        raise ValueError(
            "'pad_node_mask' must be None in training with a "
            f"{type(bn).__name__}, whose statistics would count padding; use "
            "'BatchNorm1d', or batches without padding"
        )
    rows, counts = at_least_float32(x), mask.unsqueeze(-1)
    number = mask.sum(dtype=rows.dtype)
    several, number = number > 1, number.clamp(min=1)
    mean = rows.sum(0) / number
    var = (rows - mean).where(counts, 0.0).square().sum(0) / number
    found = mean.detach(), var.detach() * number / (number - 1).clamp(min=1)
    if bn.running_mean is not None:
        # A single row has no variance.
        mean, var = (
            new.where(several, running)
            for new, running in ((mean, bn.running_mean), (var, bn.running_var))
        )
        bn.num_batches_tracked.add_(several)
        weight = several.to(rows.dtype)
        if bn.momentum is not None:
            weight = weight * bn.momentum
        else:
            weight = weight / bn.num_batches_tracked.clamp(min=1)
        for new, running in zip(found, (bn.running_mean, bn.running_var), strict=True):
            running.add_(weight * (new - running))
    return _normalized(bn, rows, mean, var).to(x.dtype)


def _normalized(
    bn: Any, rows: Tensor, mean: Tensor, var: Tensor, graph: Tensor | None = None
) -> Tensor:
    """Rows after batch norm by a mean and a variance, or by those of their graphs."""
    scale = (var + bn.eps).rsqrt()
    if bn.affine:
        scale = scale * bn.weight
    if graph is not None:
        mean, scale = mean[graph], scale[graph]
    out = (rows - mean) * scale
    return out + bn.bias if bn.affine else out


def _num_graphs(batch: Tensor) -> Tensor:
    """The number of graphs that have rows."""
    if batch.is_cpu and not is_followed():  # counting is faster than sorting
        low, high = extremes(batch)
        if low >= 0 and high < 16 * len(batch):
            return torch.bincount(batch).count_nonzero()
    return dense_rank(batch).max() + 1
