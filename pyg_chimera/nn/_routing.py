"""How to call a module: the arguments of its ``forward``."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import MultiheadAttention, TransformerEncoder, TransformerEncoderLayer
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import CGConv, GPSConv, MessagePassing
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.typing import Adj

from pyg_chimera.ops.common.memory import check_memory

#: Where modules that wrap others, to compile, checkpoint or shard them, keep these.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
#: PyTorch's modules on padded graphs.
_PADDED = (MultiheadAttention, TransformerEncoderLayer, TransformerEncoder)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module without PyTorch's wrappers, as their ``forward`` takes anything."""
    for name in _WRAPPED:
        if name in vars(module) or name in module._modules:
            return unwrapped(getattr(module, name))
    return module


def _is_unsure(module: torch.nn.Module) -> bool:
    """Whether it, or a part that it calls by itself, takes no batch vector to mean that
    graphs are unknown.
    """
    module = unwrapped(module)
    if hasattr(module, "_route") or hasattr(module, "_routes"):  # calls by routes
        return False
    if getattr(module, "unsure_without_batch", False):
        return True
    passes = not isinstance(module, GPSConv)  # which passes no batch vector on
    return passes and any(map(_is_unsure, module.children()))


def reset_layer(module: Any) -> None:
    """Resets all learnable parameters of a layer."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        return
    for child in module.children():
        reset_layer(child)
    # PyTorch's attention has another name for it, for some of its parameters.
    if hasattr(module, "_reset_parameters"):
        module._reset_parameters()


class Wrapper:
    """A layer passing keyword arguments on to others, named by :meth:`accepts`."""

    def accepts(self, name: str) -> bool:
        """Whether the layer, or a part of it, takes a keyword argument of this name."""
        raise NotImplementedError


class Route(NamedTuple):
    """How to call a module on a graph, determined once from its ``forward``.

    Args:
        kind (type): The module's class.
        names (tuple[str, ...]): The parameters after the first one, ``x``.
        is_open (bool): Whether ``forward`` takes any keyword (``**kwargs``).
        edges (bool): Whether it takes ``(x, edge_index, ...)``.
        padded (bool): Whether it takes padded graphs and their mask.
        unsure (bool): Whether it would take no batch vector to mean that graphs are
            unknown, rather than that there is one.
    """

    kind: type[torch.nn.Module]
    names: tuple[str, ...]
    is_open: bool
    edges: bool
    padded: bool
    unsure: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module, *, graph: bool = False) -> "Route":
        """Inspects :obj:`module`; with :obj:`graph` set, it takes edges."""
        module = unwrapped(module)
        kind = type(module)
        if is_parametrized(module):  # a class of its own, until it no longer is
            kind = kind.__mro__[1]
        if isinstance(module, _PADDED):
            return cls(kind, (), is_open=False, edges=False, padded=True)
        parameters = inspect.signature(module.forward).parameters.values()
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        kinds = (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        names = [p.name for p in parameters if p.kind in kinds]
        if isinstance(module, GraphSequential):  # Its `forward` is (*args, **kwargs).
            names, is_open = [*module.signature.param_dict], False
        if graph and not names:
            raise TypeError(
                f"'forward' of {type(module).__name__} must name what it takes, such "
                "as 'x', 'edge_index' and 'batch', which is passed to it by these "
                "names; got (*args, **kwargs)"
            )
        names = names[1:]
        if isinstance(module, GPSConv) and is_open and module.conv is not None:
            names += [x for x in cls.of(module.conv).names if x not in names]
        # PyG's signs for no edge features, and that of GatedGCNConv, which may be lazy
        signs = [getattr(module, x, -1) for x in ("edge_dim", "in_edge_channels")]
        if isinstance(module, CGConv):
            signs.append(module.dim)
        if "edge_attr" in names and any(sign in (None, 0) for sign in signs):
            names.remove("edge_attr")
        edges = graph or "edge_index" in names
        if isinstance(module, MessagePassing):  # of any name, or found from nodes
            edges = names[:1] not in ([], ["batch"])
        padded = not edges and "mask" in names
        return cls(kind, tuple(names), is_open, edges, padded, _is_unsure(module))

    def accepts(self, name: str, module: torch.nn.Module | None = None) -> bool:
        """Whether ``forward`` has a parameter called :obj:`name`, or :obj:`module`
        accepts it, if given and passing arguments on.
        """
        base = None if module is None else unwrapped(module)
        return base.accepts(name) if isinstance(base, Wrapper) else name in self.names

    def select(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The part of :obj:`given` with parameters of ``forward``."""
        return {name: value for name, value in given.items() if name in self.names}

    def call(
        self,
        module: torch.nn.Module,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a module of the same class with arguments out of :meth:`select`."""
        if not isinstance(unwrapped(module), self.kind):
            raise TypeError(
                f"a {self.kind.__name__} has been replaced by {module}, which may take "
                "other arguments; pass it to the constructor of the layer or model"
            )
        if batch is None and self.unsure and "batch" in self.names:
            one = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
            kwargs = {**kwargs, "batch": one}
        if self.padded:
            return x if x.size(0) == 0 else _on_padded(module, x, batch, kwargs)
        if not self.edges:
            return module(x, **kwargs)
        if "edge_index" in self.names[1:]:
            return module(x, edge_index=edge_index, **kwargs)
        return module(x, edge_index, **kwargs)


def _on_padded(
    module: torch.nn.Module, x: Tensor, batch: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Pads graphs, calls the module on them, and returns the nodes without padding."""
    dense, mask, place = _padded(x, batch)
    if not isinstance(unwrapped(module), _PADDED):
        return module(dense, mask=mask, **kwargs).flatten(0, 1).index_select(0, place)
    attention = next(m for m in module.modules() if isinstance(m, MultiheadAttention))
    axes = (0, 1, 2) if attention.batch_first else (1, 0, 2)
    dense = dense.permute(axes)
    if isinstance(unwrapped(module), MultiheadAttention):
        out, _ = module(dense, dense, dense, key_padding_mask=~mask, need_weights=False)
    else:
        out = module(dense, src_key_padding_mask=~mask)
    return out.permute(axes).flatten(0, 1).index_select(0, place)


def _padded(x: Tensor, batch: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Padded graphs [B, N, F], a mask of their nodes, and each node's place in all B N;
    without empty graphs, as attention has nothing to average in them.
    """
    place = torch.arange(x.size(0), device=x.device)
    if batch is None:
        return x.unsqueeze(0), torch.ones_like(place, dtype=torch.bool)[None], place
    _, graph, size = batch.unique(return_inverse=True, return_counts=True)
    order = graph.argsort(stable=True)
    before = torch.empty_like(place).scatter_(0, order, place)  # in all graphs
    shape = size.numel(), int(size.max())
    place = before - (size.cumsum(0) - size)[graph] + graph * shape[1]
    check_memory(
        f"{shape[0]:,} graphs padded to {shape[1]:,} nodes",
        x.element_size() * shape[0] * shape[1] * x[:1].numel(),
        "batch graphs of similar sizes, or use a mixer that needs no padding",
        x.device,
    )
    mask = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=x.device)
    mask = mask.index_fill_(0, place, True).view(shape)
    # Not in place, where `torch.vmap` would have to turn the zeros into a batch.
    dense = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, place, x)
    return dense.unflatten(0, shape), mask, place
