"""Base classes of layers, as modules of PyTorch and PyG."""

import inspect
from typing import Any, ClassVar, NoReturn

from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.nn._inputs import (
    TakesTensors,
    all_parameters,
    has_edge_mask,
    named,
    why_not_finite,
)
from pyg_chimera.ops.common.checks import (
    BACKENDS,
    NO_TORCHSCRIPT,
    check_flag,
    check_option,
)
from pyg_chimera.ops.common.errors import NotFiniteError

_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


class Layer(TakesTensors):
    r"""A module with :obj:`edge_weight` as another name of one-channel edge features,
    as passed by :class:`~torch_geometric.nn.pool.ASAPooling`.
    """

    def __call__(
        self, *args: Any, edge_weight: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if edge_weight is not None:
            given = self._by_name(args, kwargs)
            if given.get("edge_attr") is not None:
                raise TypeError(
                    "'edge_weight' must be None if there are edge features: "
                    "concatenate them as 'edge_attr'"
                )
            has_option = "edge_dim" in inspect.signature(type(self)).parameters
            if has_option and getattr(self, "edge_dim", None) is None:
                raise ValueError(
                    "'edge_weight' must be None for a layer with 'edge_dim=None'; "
                    "construct it with 'edge_dim=1' to read weights of edges"
                )
            args, kwargs = (), {**given, "edge_attr": edge_weight}
        try:
            return super().__call__(*args, **kwargs)
        except NotFiniteError as error:
            why = why_not_finite(self, self._by_name(args, kwargs))  # type: ignore[arg-type]
            raise ValueError(f"{type(self).__name__}: {why}") from error

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `forward` by name."""
        names = inspect.signature(self.forward).parameters  # type: ignore[attr-defined]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`, for parts of a model too."""
        raise NotImplementedError(f"{type(self).__name__}: {NO_TORCHSCRIPT}")


class Mixer(Layer, MessagePassing):
    r"""A layer with the interface of :class:`MessagePassing`, except for messages:
    nodes are joined by operators over the whole graph.

    Args:
        bias (bool, optional): Whether projections have an additive bias.
        backend (str, optional): That of the operators.
        **kwargs (optional): Arguments of :class:`MessagePassing`, :obj:`aggr` and
            :obj:`node_dim` excepted.
    """

    num_dags: int
    _backends: ClassVar[tuple[str, ...]] = BACKENDS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds options of base classes to the signature."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(all_parameters(cls))

    def __init__(
        self, *, bias: bool = True, backend: str = "auto", **kwargs: Any
    ) -> None:
        super().__init__(aggr="add", node_dim=0, **named(self, kwargs))
        check_flag("bias", bias)
        check_option("backend", backend, self._backends)
        self.bias = bias
        self.backend = backend

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for lin in self.children():
            if isinstance(lin, Linear):
                lin.reset_parameters()

    def explained(self, passed: Tensor, num_nodes: int) -> Tensor:
        """Multiplies values of edges by an explainer's edge mask, if there is one."""
        if not has_edge_mask(self, self.num_dags):
            return passed
        return self.explain_message(passed, num_nodes)

    def _refuse_hook(self, hook: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} computes no messages that could be hooked, as by "
            "'to_hetero_with_bases' or 'AttentionExplainer'. Pass types of edges as "
            "'edge_attr' (one-hot, with 'edge_dim'); explain edges with "
            "'GNNExplainer', or set 'explain = False' to leave the layer out. "
            "'register_forward_hook' works as on any module"
        )


for _name in _HOOKED:
    for _kind in ("forward_pre_hook", "forward_hook"):
        setattr(Mixer, f"register_{_name}_{_kind}", Mixer._refuse_hook)
