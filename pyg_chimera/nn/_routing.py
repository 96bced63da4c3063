"""How to call a module: which arguments its ``forward`` takes."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj
from torch_geometric.utils import to_dense_batch

__all__ = ["Route", "reset_layer", "unwrapped"]

#: Where modules that wrap others, to compile, checkpoint or shard them, keep these.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_ENCODERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module without PyTorch's wrappers, whose own ``forward`` takes anything."""
    for name in _WRAPPED:
        if name in vars(module) or name in module._modules:
            return unwrapped(getattr(module, name))
    return module


def reset_layer(module: torch.nn.Module) -> None:
    """Resets all learnable parameters of a layer, by the name that it has for this."""
    reset(module)
    # Attention modules have another name for it, and one of them resets only some of
    # its parameters.
    own_reset = getattr(module, "_reset_parameters", None)
    if own_reset is not None:
        own_reset()


class Route(NamedTuple):
    """How to call a module on a graph, determined once from its ``forward``.

    Args:
        style (str): ``"graph"`` modules take ``(x, edge_index, ...)``, ``"nodes"``
            modules ``(x, ...)``, ``"dense"`` modules padded graphs and their mask,
            ``"attention"`` is :class:`torch.nn.MultiheadAttention`, and ``"encoder"``
            are PyTorch's layers around it.
        names (tuple[str, ...]): The parameters after the first one.
        is_open (bool): Whether ``forward`` takes any keyword (``**kwargs``).
    """

    style: str
    names: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(cls, module: torch.nn.Module, *, graph: bool = False) -> "Route":
        """Inspects :obj:`module`, which takes edges if :obj:`graph` is set."""
        module = unwrapped(module)
        parameters = inspect.signature(module.forward).parameters.values()
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = tuple(
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
        if isinstance(module, GraphSequential):  # Its `forward` is (*args, **kwargs).
            names, is_open = tuple(module.signature.param_dict), False
        if graph and not names:
            raise TypeError(
                f"'forward' of {type(module).__name__} must name what it takes, such "
                "as 'x', 'edge_index' and 'batch', which is passed to it by these "
                "names; got (*args, **kwargs)"
            )
        names = names[1:]
        # PyG's sign for no edge features, and that of GatedGCNConv, which may be lazy
        if getattr(module, "edge_dim", -1) in (None, 0):
            names = tuple(name for name in names if name != "edge_attr")

        if isinstance(module, torch.nn.MultiheadAttention):
            style, names = "attention", ()
        elif isinstance(module, _ENCODERS):
            style, names = "encoder", ()
        elif graph or "edge_index" in names or isinstance(module, MessagePassing):
            style = "graph"
        elif "mask" in names:
            style = "dense"
        else:
            style = "nodes"
        return cls(style, names, is_open)

    def accepts(self, name: str) -> bool:
        """Whether ``forward`` has a parameter called :obj:`name`."""
        return name in self.names

    def select(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The part of :obj:`given` for which ``forward`` has a parameter."""
        return {name: value for name, value in given.items() if name in self.names}

    def call(
        self,
        module: torch.nn.Module,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls :obj:`module` with keyword arguments out of :meth:`select`."""
        if self.style == "graph":
            if "edge_index" in self.names[1:]:
                return module(x, edge_index=edge_index, **kwargs)
            return module(x, edge_index, **kwargs)
        if self.style == "nodes":
            return module(x, **kwargs)
        if x.size(0) == 0:
            return x

        if batch is None:  # no padding, whose size exporters would not know
            mask = x.new_ones(1, x.size(0), dtype=torch.bool)
            return self._call_dense(module, x.unsqueeze(0), mask, kwargs).squeeze(0)
        # Pad each graph: sort the nodes by graph, and leave out empty graphs, in which
        # attention would have nothing to average.
        index = batch.unique(return_inverse=True)[1]
        order = index.argsort(stable=True)
        dense, mask = to_dense_batch(x[order], index[order])
        return self._call_dense(module, dense, mask, kwargs)[mask][order.argsort()]

    def _call_dense(
        self, module: Any, dense: Tensor, mask: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Calls :obj:`module` on padded graphs."""
        if self.style == "dense":
            return module(dense, mask=mask, **kwargs)
        turned = not _is_batch_first(module)
        dense = dense.transpose(0, 1) if turned else dense
        if self.style == "encoder":
            out = module(dense, src_key_padding_mask=~mask)
        else:
            out, _ = module(
                dense, dense, dense, key_padding_mask=~mask, need_weights=False
            )
        return out.transpose(0, 1) if turned else out


def _is_batch_first(module: torch.nn.Module) -> bool:
    """Whether attention, or PyTorch's layers around it, count graphs first."""
    kind = torch.nn.MultiheadAttention
    return next(m for m in module.modules() if isinstance(m, kind)).batch_first
