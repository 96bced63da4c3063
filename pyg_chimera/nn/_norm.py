import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn import InstanceNorm
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import normalization_resolver
from torch_geometric.resolver import normalize_string

from pyg_chimera.nn._routing import Route
from pyg_chimera.nn.graph_batch_norm import GraphBatchNorm, masked_norm
from pyg_chimera.ops.gated_norm import gated_norm, rms_norm

#: PyG's norms that do not take the number of channels.
_WITHOUT_SIZE = ("pair", "meansubtraction", "graphsize")


def norm_arguments(
    norm: str, norm_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of a norm, with defaults for one row and for layer norm."""
    kwargs = dict(norm_kwargs or {})
    name = normalize_string(norm)
    if name in ("batch", "batchnorm"):
        # A single row has no variance; use the running one if it exists.
        tracked = kwargs.get("track_running_stats", True)
        kwargs.setdefault("allow_single_element", tracked)
    elif name in ("layer", "layernorm"):
        kwargs.setdefault("mode", "node")
    return kwargs


class Norm(torch.nn.Module):
    """Any norm of PyG, or ours, by one signature, also for few or no nodes.

    Given by name, layer norm normalizes each node: PyG's own default, over a whole
    graph, would mix the graphs of a batch whenever there is no batch vector.

    Args:
        norm (str or torch.nn.Module, optional): The norm's name, or a module, which
            is copied. :obj:`None` is the identity.
        channels (int): Size of each input sample.
        norm_kwargs (Dict[str, Any], optional): Arguments of a norm given by name.
    """

    norm: torch.nn.Module | None

    def __init__(
        self,
        norm: str | torch.nn.Module | None,
        channels: int,
        norm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(norm, str) and normalize_string(norm) == "graphbatchnorm":
            self.norm = GraphBatchNorm(channels, **(norm_kwargs or {}))
        elif isinstance(norm, str):
            kwargs = norm_arguments(norm, norm_kwargs)
            sized = normalize_string(norm).removesuffix("norm") not in _WITHOUT_SIZE
            sizes = (channels,) if sized else ()
            self.norm = normalization_resolver(norm, *sizes, **kwargs)
        elif norm_kwargs:
            raise ValueError(
                "'norm_kwargs' are the arguments of a norm that is given by name, got "
                f"{norm_kwargs} and norm={norm!r}"
            )
        elif norm is None or isinstance(norm, torch.nn.Module):
            self.norm = copy.deepcopy(norm)
        else:
            raise TypeError(
                "'norm' must be a name, a module or None, got "
                f"{getattr(norm, '__name__', type(norm).__name__)!r}."
            )
        made = self.norm
        self._with_batch = made is not None and Route.of(made).accepts("batch")

    @property
    def reads_graphs(self) -> bool:
        """Whether nodes are normalized by others of their graph, in evaluation too."""
        if self._with_batch:
            return getattr(self.norm, "mode", "") != "node"
        return any(isinstance(x, GraphBatchNorm) for x in self.modules())

    def reset_parameters(self) -> None:
        reset(self.norm)

    def forward(
        self, x: Tensor, batch: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.norm is None or x.size(0) == 0:
            return x
        if isinstance(self.norm, GraphBatchNorm):
            return self.norm(x, batch, mask)
        if mask is not None and not self._with_batch:
            return masked_norm(self.norm, x, mask)
        lone = isinstance(self.norm, InstanceNorm) and x.size(0) == 1 and batch is None
        if lone and not (self.training and self.norm.track_running_stats):
            # PyG's norm refuses a single node otherwise.
            zero = torch.zeros(1, dtype=torch.long, device=x.device)
            return self.norm(x, zero, batch_size=1)
        return self.norm(x, batch=batch) if self._with_batch else self.norm(x)


class LazyLayerNorm(LazyModuleMixin, torch.nn.LayerNorm):
    """PyTorch's layer norm, with the size of the first input."""

    cls_to_become = torch.nn.LayerNorm
    weight: UninitializedParameter  # type: ignore[assignment]
    bias: UninitializedParameter  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(0)
        self.weight = UninitializedParameter()
        self.bias = UninitializedParameter()

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, x: Tensor) -> None:
        self.normalized_shape = (x.size(-1),)
        if self.has_uninitialized_params():  # or their values have been loaded
            self.weight.materialize(self.normalized_shape)
            self.bias.materialize(self.normalized_shape)
            self.reset_parameters()


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's, but see `rms_norm`; times the SiLU of a gate, if there is one."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:
            return rms_norm(x, self.weight, self.eps)
        return gated_norm(x, self.weight, gate, eps=self.eps)
