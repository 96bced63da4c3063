"""All layers in one form, with options that differ in kind, and inputs for them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    ChimeraPathConv,
    DifferentialAttentionConv,
    DifferentialGatedDeltaConv,
    GatedDeltaConv,
    GatedGCNConv,
    GraphMambaConv,
    HierarchicalMemoryConv,
    KHopAttentionConv,
    LatentAttentionConv,
    PLSTMConv,
    PLSTMGridConv,
    RGLRUConv,
    SurpriseGatedDeltaConv,
    WindowAttentionConv,
)

__all__ = [
    "CASES",
    "CHANNELS",
    "EDGE",
    "LAYOUTS",
    "Case",
    "Inputs",
    "every_conv",
    "matrix",
]

CHANNELS, EDGE = 8, 3
NODES = 7
BATCH = [2, 2, 2, 0, 5, 5, 2]  # unsorted, with gaps; node 3 is alone
#: With self-loops, and with duplicates against the order of nodes.
GRAPH = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 0), (0, 1), (4, 5), (5, 4), (2, 6), (6, 0)]
PATH = [(0, 2), (2, 0), (2, 1), (1, 2), (6, 0), (0, 6), (4, 5), (5, 4)]
DAGS = [
    [(0, 1), (1, 2), (0, 2), (0, 2), (2, 6), (4, 5)],
    [(2, 1), (1, 0), (6, 2), (6, 1), (5, 4), (2, 0)],
    [(6, 0), (4, 5), (1, 6), (1, 0)],
]


LAYOUTS = ("coo", "uncoalesced", "csr", "csc")


def matrix(
    index: Tensor, values: Tensor, layout: str, size: tuple[int, int] = (7, 7)
) -> Tensor:
    """An adjacency matrix in the convention of PyG's 'adj_t'."""
    shape = (*size, *values.shape[1:])
    if layout == "uncoalesced":
        return torch.sparse_coo_tensor(index.flip(0, 1), values.flip(0), shape)
    source, target = index
    by = source * 99 + target if layout == "csc" else target * 99 + source
    order = by.argsort()
    (source, target), values = index[:, order], values[order]
    if layout == "coo":
        return torch.sparse_coo_tensor(
            torch.stack([target, source]), values, shape, is_coalesced=True
        )
    outer, inner = (source, target) if layout == "csc" else (target, source)
    counts = torch.bincount(outer, minlength=size[layout == "csc"])
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    make = {"csr": torch.sparse_csr_tensor, "csc": torch.sparse_csc_tensor}[layout]
    return make(ptr, inner, values, shape)


class Inputs(NamedTuple):
    """Nodes, edges of all DAGs in one list, and the DAG of each edge."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    dag: Tensor
    batch: Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self._replace(x=self.x.to(dtype), edge_attr=self.edge_attr.to(dtype))

    def without_edges(self, num_nodes: int) -> "Inputs":
        parts = (y[..., :0] for y in (self.edge_index, self.edge_attr.t(), self.dag))
        index, attr, dag = parts
        batch = torch.full((num_nodes,), 3)
        return Inputs(self.x[:num_nodes], index, attr.t(), dag, batch)


class Case(NamedTuple):
    """A layer with options, and what it takes for granted."""

    make: Callable[..., torch.nn.Module]
    edges: Sequence[list]  #: of each DAG
    on_grids: bool = False
    equivariant: bool = True
    scores: bool = False  #: whether it is given something to sort nodes by
    #: Whether outputs depend on which nodes are a graph, and not on edges alone.
    needs_batch: bool = False

    def conv(self, channels: int = CHANNELS, **kwargs: Any) -> torch.nn.Module:
        """As it is made, in evaluation."""
        return self.make(channels, **kwargs).eval()

    def trained(self) -> torch.nn.Module:
        """In float64, with no parameter where it starts."""
        conv = self.conv().double()
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.copy_(torch.randn_like(parameter) / 3)
        return conv

    def inputs(self, dtype: torch.dtype = torch.double) -> Inputs:
        edges = torch.tensor([edge for dag in self.edges for edge in dag])
        edges = edges.long().view(-1, 2).t()
        attr = torch.randn(edges.size(1), EDGE, dtype=dtype)
        sizes = torch.tensor([len(dag) for dag in self.edges])
        dag = torch.arange(len(sizes)).repeat_interleave(sizes)
        batch = torch.tensor(sorted(BATCH) if self.on_grids else BATCH)
        x = torch.randn(NODES, CHANNELS, dtype=dtype)
        return Inputs(x, edges.contiguous(), attr, dag, batch)

    def call(
        self, conv: Any, inputs: Inputs, form: Callable | None = None, **kwargs: Any
    ) -> Tensor:
        """Nodes; `form` turns edge indices into what else layers take as a graph."""
        x, index, attr, dag, batch = inputs
        module = getattr(conv, "_orig_mod", conv)
        if self.on_grids:  # graphs are sequences
            width = torch.tensor([x.size(0)])
            if batch is not None:
                width = batch.unique(return_counts=True)[1]
            height = torch.ones_like(width)
            return conv(x, batch=batch, height=height, width=width, **kwargs)
        if isinstance(module, GraphMambaConv):
            if self.scores:
                kwargs = {"score": x[:, 0].detach()} | kwargs
            index = index if form is None else form(index)
            return conv(x, index, batch=batch, **kwargs)
        if getattr(module, "edge_dim", None) in (None, 0):
            attr = None
        dags = [
            (index[:, dag == d], None if attr is None else attr[dag == d])
            for d in range(len(self.edges))
        ]
        if form is not None:
            dags = [(form(index), attr) for index, attr in dags]
        indices, attrs = (list(y) for y in zip(*dags, strict=True))
        if len(dags) == 1:
            indices, attrs = indices[0], attrs[0]
        if isinstance(module, GatedGCNConv):
            out = conv(x, indices, attrs, **kwargs)
            return out[0] if isinstance(out, tuple) else out
        return conv(x, indices, None if attr is None else attrs, batch, **kwargs)

    def layer(self, conv: torch.nn.Module) -> Callable:
        """As the assertions on permutations and batches call it."""

        def run(nodes, edge_index, edges, batch):
            return self.call(conv, Inputs(nodes[0], edge_index, *edges, batch))

        return run


def chimera(**kwargs: Any) -> Case:
    return Case(partial(ChimeraConv, state_channels=3, **kwargs), [GRAPH])


def chimera_dag(**kwargs: Any) -> Case:
    make = partial(ChimeraDAGConv, state_channels=3, **kwargs)
    return Case(make, DAGS[: kwargs.get("num_dags", 1)])


def divided(layer: type[torch.nn.Module], **kwargs: Any) -> Case:
    """A layer for DAGs on a graph with cycles, which depends on the order of nodes."""
    return Case(partial(layer, **kwargs), [GRAPH], equivariant=False)


def gated_delta(**kwargs: Any) -> Case:
    edges = DAGS[0] if kwargs.get("acyclic") else GRAPH
    return Case(partial(GatedDeltaConv, state_channels=3, **kwargs), [edges])


def hybrid(layer: type[torch.nn.Module], edges: list = GRAPH, **kwargs: Any) -> Case:
    return Case(partial(layer, **kwargs), [edges])


def rg_lru(**kwargs: Any) -> Case:
    return Case(partial(RGLRUConv, **kwargs), DAGS[: kwargs.get("num_dags", 1)])


def k_hop(**kwargs: Any) -> Case:
    edges = DAGS[0] if kwargs.get("rotary") else GRAPH
    return Case(partial(KHopAttentionConv, **kwargs), [edges])


def plstm(**kwargs: Any) -> Case:
    ordered = "order" in kwargs
    edges = [GRAPH] if ordered else DAGS[: kwargs.get("num_dags", 1)]
    return Case(partial(PLSTMConv, **kwargs), edges, equivariant=not ordered)


def on_grids(layer: type[torch.nn.Module], **kwargs: Any) -> Case:
    make = partial(layer, **kwargs)
    return Case(make, [[]], on_grids=True, equivariant=False, needs_batch=True)


def mamba(scores: bool = False, **kwargs: Any) -> Case:
    make = partial(GraphMambaConv, state_channels=3, **kwargs)
    return Case(make, [GRAPH], equivariant=scores, scores=scores, needs_batch=True)


def gated_gcn(**kwargs: Any) -> Case:
    def make(channels: int, **more: Any) -> GatedGCNConv:
        options = {"norm": "layer_norm", **kwargs, **more}
        return GatedGCNConv(channels, CHANNELS, **options)

    return Case(make, [GRAPH])


MEMORY = {"state_channels": 3, "heads": 2}
GROUPED = {"state_channels": 3, "heads": 4, "groups": 2, "edge_dim": EDGE}
CASES = {
    "ChimeraConv": chimera(),
    "ChimeraConv-edges": chimera(heads=4, groups=2, edge_dim=EDGE, gamma=0.5),
    "ChimeraConv-released": chimera(heads=2, normalization="released", gated=False),
    "ChimeraConv-neumann": chimera(solver="neumann", num_terms=3, bias=False),
    "ChimeraConv-log_sums": chimera(heads=2, edge_dim=EDGE, log_sums=2),
    "ChimeraConv-free": chimera(heads=2, edge_dim=EDGE, input_gate="free"),
    "ChimeraConv-sizes": chimera(heads=2, reach_nodes=5)._replace(needs_batch=True),
    "ChimeraConv-torch": chimera(local_conv=True, backend="torch"),
    "ChimeraDAGConv": chimera_dag(heads=2),
    "ChimeraDAGConv-edges": chimera_dag(edge_dim=EDGE, local_conv=True, roots="silent"),
    "ChimeraDAGConv-several": chimera_dag(
        num_dags=3, share="none", heads=4, groups=2, edge_dim=EDGE, selectivity="target"
    ),
    "ChimeraDAGConv-mamba": chimera_dag(
        num_dags=3, share="none", heads=4, groups=2, norm_before_gate=False
    ),
    "ChimeraDAGConv-divided": divided(
        ChimeraDAGConv, state_channels=3, edge_dim=EDGE, local_conv=True
    ),
    "ChimeraPathConv": Case(
        partial(ChimeraPathConv, state_channels=3, heads=2, edge_dim=EDGE), [PATH]
    ),
    "GatedDeltaConv": gated_delta(heads=2),
    "GatedDeltaConv-edges": gated_delta(
        heads=4, groups=2, edge_dim=EDGE, conv_kernel=3
    ),
    "GatedDeltaConv-acyclic": gated_delta(acyclic=True, heads=4, groups=2, gated=False),
    "GatedDeltaConv-states": gated_delta(
        acyclic=True, edge_dim=EDGE, form="state", bias=False, selectivity="target"
    ),
    "RGLRUConv": rg_lru(heads=2),
    "RGLRUConv-edges": rg_lru(edge_dim=EDGE, gated=False, bias=False),
    "RGLRUConv-several": rg_lru(
        num_dags=3, heads=4, edge_dim=EDGE, conv_kernel=2, released=True
    ),
    "RGLRUConv-divided": divided(RGLRUConv, edge_dim=EDGE),
    "RGLRUConv-torch": rg_lru(reach=None, conv_kernel=1, backend="torch"),
    "KHopAttentionConv": k_hop(heads=2, k=2),
    "KHopAttentionConv-edges": k_hop(heads=4, groups=2, k=2, edge_dim=EDGE),
    "KHopAttentionConv-rotary": k_hop(heads=2, groups=1, k=3, rotary=True, bias=False),
    "KHopAttentionConv-torch": k_hop(heads=2, groups=1, backend="torch"),
    "PLSTMConv": plstm(heads=2),
    "PLSTMConv-D": plstm(mode="D", heads=2, edge_dim=EDGE),
    "PLSTMConv-row": plstm(normalization="row", edge_dim=EDGE, bias=False),
    "PLSTMConv-several": plstm(num_dags=3, heads=2, mode="D", state_channels=3),
    "PLSTMConv-tracking": plstm(tracking=2, edge_dim=EDGE, backend="torch"),
    "ChimeraGridConv": on_grids(ChimeraGridConv, state_channels=3, heads=2),
    "ChimeraGridConv-past": on_grids(
        ChimeraGridConv, state_channels=3, num_dags=1, selectivity="target"
    ),
    "PLSTMConv-order": plstm(order="order", heads=2),
    "PLSTMConv-degree": plstm(order="degree", mode="D", edge_dim=EDGE),
    "PLSTMConv-bfs": plstm(order="bfs", normalization="row", tracking=2),
    "PLSTMConv-divided": divided(PLSTMConv, mode="D", edge_dim=EDGE, tracking=2),
    "PLSTMGridConv": on_grids(PLSTMGridConv, heads=2),
    "PLSTMGridConv-D": on_grids(
        PLSTMGridConv, mode="D", state_channels=3, heads=4, num_dags=2
    ),
    "GraphMambaConv": mamba(),
    "GraphMambaConv-scores": mamba(scores=True, order=None, expand=2, bias=True),
    "GraphMambaConv-bins": mamba(order="pagerank", num_bins=2, bidirectional=True),
    "GatedGCNConv": gated_gcn(),
    "GatedGCNConv-edges": gated_gcn(edge_dim=EDGE),
    "SurpriseGatedDeltaConv": hybrid(SurpriseGatedDeltaConv, DAGS[0], **MEMORY),
    "SurpriseGatedDeltaConv-edges": hybrid(
        SurpriseGatedDeltaConv, DAGS[0], **GROUPED, selectivity="target", gated=False
    ),
    "SurpriseGatedDeltaConv-divided": divided(
        SurpriseGatedDeltaConv, state_channels=3, edge_dim=EDGE
    ),
    "DifferentialGatedDeltaConv": hybrid(DifferentialGatedDeltaConv, **MEMORY),
    "DifferentialGatedDeltaConv-edges": hybrid(
        DifferentialGatedDeltaConv, DAGS[0], **GROUPED, acyclic=True, depth=3
    ),
    "HierarchicalMemoryConv": hybrid(HierarchicalMemoryConv, DAGS[0], **MEMORY),
    "HierarchicalMemoryConv-edges": hybrid(
        HierarchicalMemoryConv, DAGS[0], **GROUPED, conv_kernel=1, bias=False
    ),
    "DifferentialAttentionConv": hybrid(DifferentialAttentionConv, heads=2, k=2),
    "DifferentialAttentionConv-edges": hybrid(
        DifferentialAttentionConv, heads=4, groups=2, k=2, edge_dim=EDGE, depth=3
    ),
    "DifferentialAttentionConv-rotary": hybrid(
        DifferentialAttentionConv, DAGS[0], heads=2, groups=1, k=3, rotary=True
    ),
    "LatentAttentionConv": hybrid(LatentAttentionConv, heads=2, k=2, latent_channels=3),
    "LatentAttentionConv-edges": hybrid(
        LatentAttentionConv, DAGS[0], heads=4, groups=2, k=2, rotary=True, edge_dim=EDGE
    ),
    "WindowAttentionConv": hybrid(
        WindowAttentionConv, DAGS[0], heads=2, k=3, stretch=2.0
    ),
    "WindowAttentionConv-edges": hybrid(
        WindowAttentionConv, DAGS[0], heads=2, groups=2, k=2, edge_dim=EDGE, stretch=1.5
    ),
}
every_conv = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
