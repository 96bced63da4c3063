from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module, RMSNorm
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import as_edges
from pyg_chimera.nn.attention import SelfAttention
from pyg_chimera.nn.conv import ChimeraConv, ChimeraDAGConv, GatedDeltaConv
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.nn.mixture_of_depths import MixtureOfDepths
from pyg_chimera.nn.models.graph_model import GraphModel
from pyg_chimera.nn.swiglu import SwiGLU
from pyg_chimera.ops.common.checks import check_option

__all__ = ["HybridModel"]

#: Recurrences by name: for any graph, if there is one, and for DAGs.
_RECURRENCES: dict[str, tuple[Callable[..., Module] | None, Callable[..., Module]]] = {
    "gated_delta": (GatedDeltaConv, partial(GatedDeltaConv, acyclic=True)),
    "chimera": (ChimeraConv, ChimeraDAGConv),
}
#: Attention along edges, by name; "full" attention needs none.
_ATTENTIONS: dict[str, Callable[..., Module]] = {}
_SET = {"in_channels", "out_channels", "channels", "heads", "edge_dim", "flow",
        "causal", "acyclic", "num_dags"}  # fmt: skip


class HybridModel(GraphModel):
    r"""A model whose blocks are recurrences and, now and then, attention: the hybrid of
    `"Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" <https://arxiv.org/abs/2402.19427>`_, on graphs, DAGs and
    sequences.

    Each block is a :class:`~pyg_chimera.nn.GPSLayer`,

    .. math::
        \mathbf{H} = \mathbf{X} + \text{mixer}(\text{RMSNorm}(\mathbf{X})), \qquad
        \mathbf{X}' = \mathbf{H} + \text{SwiGLU}(\text{RMSNorm}(\mathbf{H}))

    Recurrences remember in states of fixed size, in time linear in nodes; attention
    finds single nodes among many.

    .. code-block:: python

        # Any graph:
        model = HybridModel(9, 64, 10, edge_dim=3)
        # The next token of a sequence:
        model = HybridModel(
            [256], 64, 256, kind="sequence", causal=True, head="node",
            attention_kwargs={"rotary": "sequence"},
        )
        out = model(**model.inputs(data))

    Args:
        in_channels (int or Sequence[int]): As of :class:`~pyg_chimera.nn.GraphModel`:
            the size of each node's features, or the number of categories in each
            column.
        channels (int): The size of nodes (and edges) between the blocks.
        out_channels (int): Size of each output sample.
        num_layers (int, optional): The number of blocks. (default: :obj:`8`)
        pattern (str, optional): What the blocks are in turn, a recurrence (:obj:`"r"`)
            or attention (:obj:`"a"`), repeated over the depth.
            (default: :obj:`"rrra"`)
        heads (int, optional): The number of heads of the mixers. (default: :obj:`4`)
        kind (str, optional): What the data are: any :obj:`"graph"`; a :obj:`"dag"`; or
            a :obj:`"sequence"`, whose nodes are in order, as of
            :class:`~pyg_chimera.transforms.SequenceToGraph`, and which is taken for a
            DAG of those edges that lead to later nodes. (default: :obj:`"graph"`)
        causal (bool, optional): Whether nodes of DAGs and sequences hear of what comes
            before them alone. Otherwise every other recurrence, and every other
            attention along edges, runs against the edges. (default: :obj:`False`)
        recurrence (str or Callable, optional): :obj:`"gated_delta"`
            (:class:`~pyg_chimera.nn.GatedDeltaConv`), :obj:`"chimera"`
            (:class:`~pyg_chimera.nn.ChimeraConv`, for DAGs and sequences
            :class:`~pyg_chimera.nn.ChimeraDAGConv`), or a function that makes a layer
            from its position in the stack. (default: :obj:`"gated_delta"`)
        attention (str or Callable, optional): :obj:`"full"`
            (:class:`~pyg_chimera.nn.SelfAttention` between all nodes of a graph), or a
            function that makes a layer from its position in the stack.
            (default: :obj:`"full"`)
        recurrence_kwargs (Mapping[str, Any], optional): Further arguments of the
            recurrences. (default: :obj:`None`)
        attention_kwargs (Mapping[str, Any], optional): Further arguments of the
            attention. (default: :obj:`None`)
        capacity (float, optional): The share of nodes that go through every second
            block, the others past it, see :class:`~pyg_chimera.nn.MixtureOfDepths`.
            With :obj:`None`, all nodes go through all blocks. (default: :obj:`None`)
        mlp_channels (int, optional): The hidden size of the
            :class:`~pyg_chimera.nn.SwiGLU`. (default: :obj:`None`, 8/3 of
            :obj:`channels`)
        edge_dim (int or Sequence[int], optional): As :obj:`in_channels`, for edges,
            whose features are read by all mixers along edges.
            (default: :obj:`None`)
        dropout (float, optional): Dropout probability behind the mixers, in the
            feed-forward networks and in the head. (default: :obj:`0.0`)
        **kwargs (optional): Further arguments of :class:`~pyg_chimera.nn.GraphModel`,
            such as :obj:`head`, :obj:`pool` and :obj:`encodings`.

    Shapes:
        - **inputs** and **outputs:** as of :class:`~pyg_chimera.nn.GraphModel`

    Raises:
        ValueError: If an option is unknown, does not go with another, or does not fit
            the mixers.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        channels: int,
        out_channels: int,
        num_layers: int = 8,
        pattern: str = "rrra",
        heads: int = 4,
        *,
        kind: str = "graph",
        causal: bool = False,
        recurrence: str | Callable[[int], Module] = "gated_delta",
        attention: str | Callable[[int], Module] = "full",
        recurrence_kwargs: Mapping[str, Any] | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        capacity: float | None = None,
        mlp_channels: int | None = None,
        edge_dim: int | Sequence[int] | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_option("kind", kind, ("graph", "dag", "sequence"))
        if not pattern or set(pattern) - set("ra"):
            raise ValueError(
                "'pattern' must be a string of 'r', for recurrences, and 'a', for "
                f"attention, got {pattern!r}"
            )
        if causal and kind == "graph":
            raise ValueError(
                "'causal' must not be set for kind='graph', where nothing comes before "
                "anything; use 'dag' or 'sequence'"
            )
        if causal and kind == "dag" and attention == "full" and "a" in pattern:
            raise ValueError(
                "'attention' must not be 'full' in a causal model of DAGs: it attends "
                "to all nodes, and not to ancestors alone; give another, or a "
                f"'pattern' without 'a', got {pattern!r}"
            )
        if causal and capacity not in (None, 1):
            raise ValueError(
                "'capacity' must not be set in a causal model: whether a node is "
                f"routed depends on those behind it, got {capacity}"
            )
        if capacity not in (None, 1) and edge_dim is not None and kind != "graph":
            raise ValueError(
                "'capacity' must not be set for DAGs and sequences with 'edge_dim': of "
                f"the paths between routed nodes there are no features, got {capacity}"
            )
        along = {
            "heads": heads,
            "edge_dim": None if edge_dim is None else channels,
        }
        make = {
            "r": _recurrence(recurrence, kind, dict(recurrence_kwargs or {})),
            "a": _attention(attention, causal, dict(attention_kwargs or {})),
        }

        def layer(index: int) -> Module:
            letters = [pattern[i % len(pattern)] for i in range(index + 1)]
            back = (
                kind != "graph" and not causal and letters.count(letters[-1]) % 2 == 0
            )
            flow = "target_to_source" if back else "source_to_target"
            block = GPSLayer(
                channels,
                mixer=make[letters[-1]](index, channels, flow=flow, **along),
                dropout=dropout,
                norm=RMSNorm(channels),
                norm_first=True,
                mlp=SwiGLU(channels, mlp_channels, dropout=dropout),
            )
            if capacity is None or index % 2 == 0:
                return block
            return MixtureOfDepths(block, channels, capacity, acyclic=kind != "graph")

        super().__init__(
            in_channels, channels, out_channels, layer, num_layers, edge_dim=edge_dim,
            norm=RMSNorm(channels), dropout=dropout, **kwargs,
        )  # fmt: skip
        self.kind = kind
        self.pattern = pattern

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features.
                (default: :obj:`None`)
            *args (optional): Further arguments of :class:`~pyg_chimera.nn.GraphModel`.
            **kwargs (optional): The same, by name.
        """
        if self.kind == "sequence":
            edges, _ = as_edges(edge_index, None, x.size(0), "source_to_target")
            later = (edges[0] < edges[1]).nonzero().view(-1)
            edge_attr = None if edge_attr is None else edge_attr[later]
            edge_index = edges[:, later]
        return super().forward(x, edge_index, edge_attr, *args, **kwargs)


def _recurrence(
    given: str | Callable[[int], Module], kind: str, options: dict[str, Any]
) -> Callable[..., Module]:
    """Makes a recurrence from its position, width, and how it runs along edges."""
    if callable(given):
        return _own("recurrence", given, options)
    check_option("recurrence", given, tuple(_RECURRENCES))
    _check_kwargs("recurrence", options)
    on_graphs, on_dags = _RECURRENCES[given]
    make = on_graphs if kind == "graph" else on_dags
    if make is None:
        known = [name for name, (any_graph, _) in _RECURRENCES.items() if any_graph]
        raise ValueError(
            f"'recurrence' must be one of {known} for kind='graph', got {given!r}, "
            "which runs along DAGs; set 'kind' if the data are"
        )
    return lambda _, channels, **along: make(channels, **along, **options)


def _attention(
    given: str | Callable[[int], Module], causal: bool, options: dict[str, Any]
) -> Callable[..., Module]:
    """The same for attention."""
    if callable(given):
        return _own("attention", given, options)
    check_option("attention", given, ("full", *_ATTENTIONS))
    _check_kwargs("attention", options)
    if given != "full":
        make = _ATTENTIONS[given]
        return lambda _, channels, **along: make(channels, **along, **options)
    return lambda _, channels, heads, **along: SelfAttention(
        channels, heads, causal=causal, **options
    )


def _own(
    name: str, given: Callable[[int], Module], options: dict[str, Any]
) -> Callable[..., Module]:
    """A function of the user's."""
    if options:
        raise ValueError(
            f"'{name}_kwargs' must not be given if '{name}' is a function, which sets "
            f"them itself, got {sorted(options)}"
        )
    return lambda index, channels, **along: given(index)


def _check_kwargs(name: str, options: dict[str, Any]) -> None:
    taken = sorted(_SET & set(options))
    if taken:
        raise ValueError(f"'{name}_kwargs' must not have {taken}, which the model sets")
