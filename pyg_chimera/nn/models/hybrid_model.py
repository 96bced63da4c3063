from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import as_edges, check_edge_rows, check_no_edge_mask
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.nn.attention import SelfAttention
from pyg_chimera.nn.conv import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedDeltaConv,
    KHopAttentionConv,
    RGLRUConv,
)
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.nn.hybrid import (
    DifferentialAttentionConv,
    DifferentialGatedDeltaConv,
    DifferentialSelfAttention,
    HierarchicalMemoryConv,
    LatentAttentionConv,
    MixtureOfDepths,
    SurpriseGatedDeltaConv,
    WindowAttentionConv,
)
from pyg_chimera.nn.models.graph_model import GraphModel
from pyg_chimera.nn.swiglu import SwiGLU
from pyg_chimera.ops.common.checks import check_option

__all__ = ["HybridModel"]

_Make = Callable[..., Module]

#: Recurrences by name, on any graph and on DAGs.
_ON_GRAPHS: dict[str, _Make] = {
    "gated_delta": GatedDeltaConv,
    "differential": DifferentialGatedDeltaConv,
    "surprise": SurpriseGatedDeltaConv,
    "hierarchical": HierarchicalMemoryConv,
    "chimera": ChimeraConv,
}
_ON_DAGS: dict[str, _Make] = {
    "gated_delta": partial(GatedDeltaConv, acyclic=True),
    "chimera": partial(ChimeraDAGConv, order=None),
    "rg_lru": partial(RGLRUConv, order=None),
    "differential": partial(DifferentialGatedDeltaConv, acyclic=True),
    "surprise": partial(SurpriseGatedDeltaConv, order=None),
    "hierarchical": partial(HierarchicalMemoryConv, order=None),
}
#: Attention along edges by name, and between all nodes of a graph.
_ALONG_EDGES: dict[str, _Make] = {
    "khop": KHopAttentionConv,
    "window": WindowAttentionConv,
    "latent": LatentAttentionConv,
    "differential": DifferentialAttentionConv,
}
_DENSE: dict[str, _Make] = {
    "full": SelfAttention,
    "differential_full": DifferentialSelfAttention,
}
#: The options of :meth:`HybridModel.preset`.
_PRESETS: dict[str, dict[str, Any]] = {
    "review": {"pattern": "rra", "recurrence": "rg_lru", "attention": "window"},
    "proposed": {"pattern": "rrra", "recurrence": "surprise",
        "attention": "differential", "attention_kwargs": {"k": 128, "rotary": True}},
}  # fmt: skip
#: Arguments of the mixers that the model sets.
_SET = {"in_channels", "out_channels", "channels", "heads", "edge_dim"}
_SET |= {"flow", "causal", "acyclic", "num_dags", "depth"}


class HybridModel(GraphModel):
    r"""A stack of recurrences and attention, as in `"Griffin: Mixing Gated Linear
    Recurrences with Local Attention for Efficient Language Models"
    <https://arxiv.org/abs/2402.19427>`_, on graphs, DAGs and sequences.

    Each block is a :class:`~pyg_chimera.nn.GPSLayer`,

    .. math::
        \mathbf{H} = \mathbf{X} + \text{mixer}(\text{RMSNorm}(\mathbf{X})), \qquad
        \mathbf{X}' = \mathbf{H} + \text{SwiGLU}(\text{RMSNorm}(\mathbf{H}))

    Recurrences store what they have seen in states of fixed size, in time linear in the
    number of nodes; attention can find a single node among many.

    .. code-block:: python

        # Any graph:
        model = HybridModel(9, 64, 10, edge_dim=3)
        # The next token of a sequence:
        model = HybridModel(
            [256], 64, 256, kind="sequence", causal=True, head="node",
            attention_kwargs={"rotary": "sequence"},
        )
        out = model(**model.inputs(data))

    Mixers of the kinds that Griffin has, RG-LRU and attention in a sliding window, here
    with four heads per key and rotary positions, are

    .. code-block:: python

        model = HybridModel(
            [num_tokens], 256, num_tokens, heads=8, kind="sequence", causal=True,
            recurrence="rg_lru", attention="khop",
            attention_kwargs={"k": 128, "groups": 2, "rotary": True},
            head="node", head_layers=1,
        )

    Args:
        in_channels (int or Sequence[int]): As in :class:`~pyg_chimera.nn.GraphModel`:
            the size of the node features, or the number of categories in each column.
        channels (int): The size of nodes (and edges) between the blocks.
        out_channels (int): Size of each output sample.
        num_layers (int, optional): The number of blocks. (default: :obj:`8`)
        pattern (str, optional): The sequence of blocks, each a recurrence (:obj:`"r"`)
            or attention (:obj:`"a"`), repeated over the depth. (default: :obj:`"rrra"`)
        heads (int, optional): The number of heads of the mixers. (default: the
            largest of 4, 2 and 1 that divides :obj:`channels`)
        kind (str, optional): What the data are: any :obj:`"graph"`; a :obj:`"dag"`; or
            a :obj:`"sequence"`, whose nodes are in order, as from
            :class:`~pyg_chimera.transforms.SequenceToGraph`, and whose edges to later
            nodes are used as a DAG. (default: :obj:`"graph"`)
        causal (bool, optional): Whether nodes of DAGs and sequences are influenced only
            by what comes before them. Otherwise, every other recurrence, and every
            other attention along edges, runs against the edges. (default: :obj:`False`)
        recurrence (str, optional): :obj:`"gated_delta"`
            (:class:`~pyg_chimera.nn.GatedDeltaConv`), :obj:`"chimera"`
            (:class:`~pyg_chimera.nn.ChimeraConv`, or for DAGs and sequences
            :class:`~pyg_chimera.nn.ChimeraDAGConv`), :obj:`"differential"`
            (:class:`~pyg_chimera.nn.DifferentialGatedDeltaConv`), :obj:`"surprise"`
            (:class:`~pyg_chimera.nn.SurpriseGatedDeltaConv`), :obj:`"hierarchical"`
            (:class:`~pyg_chimera.nn.HierarchicalMemoryConv`), or for DAGs and sequences
            :obj:`"rg_lru"` (:class:`~pyg_chimera.nn.RGLRUConv`). (default:
            :obj:`"gated_delta"`)
        attention (str, optional): :obj:`"full"`
            (:class:`~pyg_chimera.nn.SelfAttention` between all nodes of a graph),
            :obj:`"differential_full"`
            (:class:`~pyg_chimera.nn.DifferentialSelfAttention`), or along edges, up to
            the :obj:`k` steps given in :obj:`attention_kwargs`, :obj:`"khop"`
            (:class:`~pyg_chimera.nn.KHopAttentionConv`), :obj:`"window"`
            (:class:`~pyg_chimera.nn.WindowAttentionConv`), :obj:`"latent"`
            (:class:`~pyg_chimera.nn.LatentAttentionConv`) or :obj:`"differential"`
            (:class:`~pyg_chimera.nn.DifferentialAttentionConv`). (default:
            :obj:`"full"`)
        recurrence_kwargs (Mapping[str, Any], optional): Further arguments of the
            recurrences. (default: :obj:`None`)
        attention_kwargs (Mapping[str, Any], optional): Further arguments of the
            attention. (default: :obj:`None`)
        capacity (float, optional): The share of nodes that every second block processes
            (:class:`~pyg_chimera.nn.MixtureOfDepths`), unless :obj:`causal`, and on
            DAGs and sequences without edge features. (default: :obj:`None`, for all)
        mlp_channels (int, optional): The hidden size of the
            :class:`~pyg_chimera.nn.SwiGLU`. (default: :obj:`None`, 8/3 of
            :obj:`channels`)
        edge_dim (int or Sequence[int], optional): Like :obj:`in_channels`, for edges,
            whose features are read by all mixers along edges. (default: :obj:`None`)
        dropout (float, optional): Dropout probability after the mixers, in the
            feed-forward networks and in the head. (default: :obj:`0.0`)
        **kwargs (optional): Further arguments of :class:`~pyg_chimera.nn.GraphModel`,
            such as :obj:`head`, :obj:`pool` and :obj:`encodings`.

    Shapes:
        - **inputs** and **outputs:** as in :class:`~pyg_chimera.nn.GraphModel`

    Raises:
        ValueError: If an option is unknown, incompatible with another, or does not fit
            the mixers.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        channels: int,
        out_channels: int,
        num_layers: int = 8,
        pattern: str = "rrra",
        heads: int | None = None,
        *,
        kind: str = "graph",
        causal: bool = False,
        recurrence: str = "gated_delta",
        attention: str = "full",
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
        if causal and kind == "dag" and attention in _DENSE and "a" in pattern:
            raise ValueError(
                f"'attention' must not be {attention!r} in a causal model of DAGs: it "
                "attends to all nodes, and not to ancestors alone; use 'khop', or a "
                f"'pattern' without 'a', got {pattern!r}"
            )
        if capacity is not None and (causal or (edge_dim and kind != "graph")):
            raise ValueError(
                "'capacity' must be None in causal models, as later nodes take part in "
                "the choice, and with features of edges of DAGs, as paths have none, "
                f"got {capacity}"
            )

        def full(
            channels: int, heads: int | None, edge_dim: Any, flow: str, **options: Any
        ) -> Any:
            return _DENSE[attention](channels, heads, causal=causal, **options)

        on = _ON_GRAPHS if kind == "graph" else _ON_DAGS
        attentions: dict[str, _Make] = {**dict.fromkeys(_DENSE, full), **_ALONG_EDGES}
        make = {
            "r": _mixer("recurrence", recurrence, on, recurrence_kwargs, kind),
            "a": _mixer("attention", attention, attentions, attention_kwargs, kind),
        }
        names = {"r": recurrence, "a": attention}
        alternating = kind != "graph" and not causal

        def layer(index: int) -> Module:
            before = [pattern[i % len(pattern)] for i in range(index)]
            letter = pattern[index % len(pattern)]
            back = alternating and before.count(letter) % 2 == 1
            differs = names[letter].startswith("differential")
            mixer = make[letter](
                channels,
                heads=heads,
                edge_dim=None if edge_dim is None else channels,
                flow="target_to_source" if back else "source_to_target",
                **({"depth": index + 1} if differs else {}),
            )
            block = GPSLayer(
                channels,
                mixer=mixer,
                dropout=dropout,
                norm=RMSNorm(channels),
                norm_first=True,
                mlp=SwiGLU(channels, mlp_channels, dropout=dropout),
            )
            if capacity is None or index % 2 == 0:
                return block
            return MixtureOfDepths(block, channels, capacity, acyclic=kind != "graph")

        refused = sorted(kwargs.keys() & {"layers", "norm"})
        if refused:
            raise TypeError(f"HybridModel takes no {refused}: it makes its own")
        kwargs |= {"edge_dim": edge_dim, "norm": RMSNorm(channels), "dropout": dropout}
        super().__init__(
            in_channels, channels, out_channels, layer, num_layers, **kwargs
        )
        self.kind = kind
        self.pattern = pattern

    @classmethod
    def preset(cls, name: str, *sizes: Any, **kwargs: Any) -> "HybridModel":
        r"""The model of a review of hybrid architectures, on sequences unless
        :obj:`kind` is given.

        Args:
            name (str): :obj:`"review"`, what it found: two RG-LRU and one attention in
                a window, four heads per key, rotary positions; or :obj:`"proposed"`:
                three recurrences gated by surprise and one differential attention.
            *sizes: :obj:`in_channels`, :obj:`channels` and :obj:`out_channels`.
            **kwargs (optional): As of the constructor, in place of the preset's; with
                another recurrence or attention, without the preset's options of it.

        Raises:
            ValueError: If there is no such preset.
        """
        check_option("name", name, tuple(_PRESETS))
        options = {"kind": "sequence", **_PRESETS[name]}
        for role in ("recurrence", "attention"):
            if kwargs.get(role, options[role]) != options[role]:  # has other options
                options.pop(f"{role}_kwargs", None)
        return cls(*sizes, **{**options, **kwargs})

    def _edges(
        self, x: Tensor, edge_index: Adj, edge_attr: Tensor | None
    ) -> tuple[Adj, Tensor | None]:
        edge_index, edge_attr = super()._edges(x, edge_index, edge_attr)
        if self.kind != "sequence":
            return edge_index, edge_attr
        edges, _ = as_edges(edge_index, None, x.size(0), "source_to_target", None)
        check_edge_rows(edge_attr, edges)
        later = (edges[0] < edges[1]).nonzero().view(-1)
        check_no_edge_mask(
            self,
            later.numel() < edges.size(1),
            "remove edges to earlier nodes first, or ",
        )
        return edges[:, later], None if edge_attr is None else edge_attr[later]


def _mixer(
    role: str,
    name: str,
    known: Mapping[str, _Make],
    options: Mapping[str, Any] | None,
    kind: str,
) -> _Make:
    """A function of the model's settings to make a mixer with the given options."""
    if name not in known:
        raise ValueError(
            f"'{role}' must be one of {tuple(known)} for kind={kind!r}, got {name!r}"
        )
    taken = sorted(_SET & {*(options or {})})
    if taken:
        raise ValueError(f"'{role}_kwargs' must not have {taken}, which the model sets")
    return partial(known[name], **(options or {}))
