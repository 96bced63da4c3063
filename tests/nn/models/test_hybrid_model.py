import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import DAGS, GRAPH
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    DifferentialAttentionConv,
    GatedDeltaConv,
    GPSLayer,
    HybridModel,
    KHopAttentionConv,
    MixtureOfDepths,
    RGLRUConv,
    SelfAttention,
    SurpriseGatedDeltaConv,
    SwiGLU,
    WindowAttentionConv,
)
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.ops import CycleError
from pyg_chimera.transforms import SequenceToGraph

C, TOKENS = 16, 5
KINDS = ("graph", "dag", "sequence")
RECURRENCES = ("gated_delta", "chimera", "rg_lru", "surprise")
every_model = pytest.mark.parametrize(
    ("kind", "causal", "recurrence"),
    [
        (kind, causal, recurrence)
        for kind, causal, recurrence in product(KINDS, (False, True), RECURRENCES)
        if kind != "graph" or not (causal or recurrence == "rg_lru")
    ],
)


def hybrid(kind: str, causal: bool = False, **kwargs) -> HybridModel:
    kwargs.setdefault("pattern", "r" if (kind, causal) == ("dag", True) else "rra")
    if kwargs.get("recurrence") != "rg_lru":
        kwargs.setdefault("recurrence_kwargs", {"state_channels": 4})
    args = ([TOKENS], C, kwargs.pop("out_channels", TOKENS), kwargs.pop("layers", 4))
    return HybridModel(*args, heads=2, kind=kind, causal=causal, **kwargs)


def graph(kind: str, num_nodes: int = 7) -> Data:
    x = torch.randint(TOKENS, (num_nodes,))
    if kind == "sequence":
        return SequenceToGraph()(x)
    index = torch.tensor(GRAPH if kind == "graph" else DAGS[0]).t()
    index = index[:, (index < num_nodes).all(0)]
    return Data(x=x, edge_index=index)


def mixers(model: HybridModel) -> list[torch.nn.Module]:
    blocks = [getattr(layer, "layer", layer) for layer in model.layers]
    return [block.mixer for block in blocks]


@every_model
@pytest.mark.parametrize("head", ["graph", "node"])
def test_a_batch_is_its_graphs(kind, causal, recurrence, head):
    model = hybrid(kind, causal, recurrence=recurrence, head=head)
    batch = Batch.from_data_list([graph(kind, n) for n in (7, 1, 3)])
    out = model(**model.inputs(batch))
    assert out.shape == (3 if head == "graph" else 11, TOKENS)
    each = [model(**model.inputs(data)) for data in batch.to_data_list()]
    assert_near(out, torch.cat(each), 1e-4)
    out.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@every_model
def test_who_is_heard(kind, causal, recurrence):
    """What comes before alone, or both sides."""
    model = hybrid(kind, causal, recurrence=recurrence, head="node").eval()
    with torch.no_grad():  # gates start the same everywhere
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    data = graph(kind)
    if kind == "graph":
        data.edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], 1)
    x = data.x.clone()
    x[1] = (x[1] + 1) % TOKENS
    out = model(**model.inputs(data))
    differs = (out != model(**(model.inputs(data) | {"x": x}))).any(1).tolist()
    if causal:  # descendants of node 1
        assert differs == [
            i in {"dag": (1, 2, 6)}.get(kind, range(1, 7)) for i in range(7)
        ]
    else:
        assert differs[0]
        assert differs[2]


def test_blocks():
    model = HybridModel(3, C, 2, 10, heads=2, dropout=0.5)
    kinds = [type(mixer) for mixer in mixers(model)]
    r, a = GatedDeltaConv, SelfAttention
    assert kinds == [r, r, r, a, r, r, r, a, r, r]
    for layer in model.layers:
        assert isinstance(layer, GPSLayer)
        assert layer.norm_first
        assert isinstance(layer.mlp[0], SwiGLU)
        assert layer.mlp[0].dropout == layer.drop.p == 0.5
        assert {type(norm.norm) for norm in layer.norms.values()} == {RMSNorm}
    assert isinstance(model.norm.norm, RMSNorm)
    assert [type(m) for m in mixers(hybrid("graph", pattern="a"))] == [a] * 4
    wide = hybrid("graph", mlp_channels=5)
    assert wide.layers[0].mlp[0].hidden_channels == 5


def test_every_other_one_runs_against_the_edges():
    for kind in ("dag", "sequence"):
        model = hybrid(kind, layers=6)
        flows = [mixer.flow for mixer in mixers(model) if hasattr(mixer, "flow")]
        there, back = "source_to_target", "target_to_source"
        assert flows == [there, back, there, back]
        assert not any(m.causal for m in mixers(model) if isinstance(m, SelfAttention))
    model = hybrid("sequence", True, layers=6)
    flows = [mixer.flow for mixer in mixers(model) if hasattr(mixer, "flow")]
    assert flows == [there] * 4
    assert all(m.causal for m in mixers(model) if isinstance(m, SelfAttention))
    assert {m.flow for m in mixers(hybrid("graph", pattern="r"))} == {there}


@pytest.mark.parametrize(
    ("kind", "recurrence", "layer", "acyclic"),
    [
        ("graph", "gated_delta", GatedDeltaConv, False),
        ("dag", "gated_delta", GatedDeltaConv, True),
        ("graph", "chimera", ChimeraConv, None),
        ("sequence", "chimera", ChimeraDAGConv, None),
        ("dag", "rg_lru", RGLRUConv, None),
    ],
)
def test_recurrences(kind, recurrence, layer, acyclic):
    for mixer in mixers(hybrid(kind, recurrence=recurrence, pattern="r")):
        assert type(mixer) is layer
        assert mixer.heads == 2
        assert getattr(mixer, "state_channels", 4) == 4
        assert getattr(mixer, "acyclic", None) == acyclic


def test_attention_along_edges():
    options = {"k": 2, "groups": 1}
    model = hybrid(
        "dag", pattern="a", attention="khop", attention_kwargs=options, edge_dim=3
    )
    assert [type(m) for m in mixers(model)] == [KHopAttentionConv] * 4
    assert [m.flow[0] for m in mixers(model)] == ["s", "t", "s", "t"]
    assert {(m.edge_dim, m.k, m.groups) for m in mixers(model)} == {(C, 2, 1)}
    with pytest.raises(ValueError, match=r"'chimera'\) for kind='graph', got 'rg_lru'"):
        hybrid("graph", recurrence="rg_lru")


@pytest.mark.parametrize("kind", ["dag", "sequence"])
def test_griffin(kind):
    """Nodes hear of their ancestors, through all blocks."""
    model = hybrid(
        kind, True, recurrence="rg_lru", attention="khop", head="node", pattern="rra",
        attention_kwargs={"k": 2, "groups": 1, "rotary": True},
    ).eval()  # fmt: skip
    data = graph(kind)
    x = data.x.clone()
    x[1] = (x[1] + 1) % TOKENS
    out = model(**model.inputs(data))
    differs = (out != model(**(model.inputs(data) | {"x": x}))).any(1).tolist()
    heard = (1, 2, 6) if kind == "dag" else range(1, 7)
    assert differs == [i in heard for i in range(7)]


@pytest.mark.parametrize("kind", ["graph", "dag"])
def test_edge_features(kind):
    model = hybrid(kind, edge_dim=3).eval()
    data = graph(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    out = []
    for _ in range(2):
        data.edge_attr = torch.randn(data.num_edges, 3)
        out.append(model(**model.inputs(data)))
    assert not out[0].equal(out[1])


def test_sequences_are_paths_to_later_nodes():
    model = hybrid("sequence", edge_dim=2, pattern="r", recurrence="chimera")
    data = graph("sequence")
    data.edge_attr = torch.randn(data.num_edges, 2)
    out = model(**model.inputs(data))
    later = data.edge_index[0] < data.edge_index[1]
    assert later.sum() == 6
    args = data.edge_index[:, later], data.edge_attr[later]
    assert model(data.x, *args).equal(out)
    for layer in model.layers:  # as an explainer, whose mask has an entry for each edge
        layer.mixer.explain = True
    with pytest.raises(
        ValueError, match="HybridModel read some: remove edges to earlier"
    ):
        model(**model.inputs(data))
    for layer in model.layers:
        layer.mixer.explain = None
    model.kind = "dag"
    assert model(data.x, *args).equal(out)
    with pytest.raises(CycleError, match="has the cycle"):
        model(**model.inputs(data))


def test_recall():
    """The token behind the first one like the last: look-ups are learnt."""
    torch.manual_seed(1)
    model = hybrid(
        "sequence", head="graph", pool="max", out_channels=TOKENS,
        recurrence_kwargs={"state_channels": 8, "conv_kernel": 2},
    )  # fmt: skip

    paths = Batch.from_data_list([SequenceToGraph()([0] * 5) for _ in range(32)])
    rows = torch.arange(32)

    def drawn() -> Tensor:
        keys = torch.stack([torch.randperm(2) for _ in rows])
        values, asked = torch.randint(2, TOKENS, (32, 2)), torch.randint(2, (32,))
        parts = [keys[:, 0], values[:, 0], keys[:, 1], values[:, 1], keys[rows, asked]]
        paths.x = torch.stack(parts, dim=1).flatten()
        return values[rows, asked]

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        wanted = drawn()
        loss = F.cross_entropy(model(**model.inputs(paths)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1
    assert sum(losses[-10:]) < 0.5 * 10


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"kind": "path"}, r"'kind' must be one of \('graph', 'dag', 'sequence'\)"),
        ({"pattern": ""}, "'pattern' must be a string of 'r', .* got ''"),
        ({"pattern": "rrm"}, "'pattern' must be a string of 'r', .* got 'rrm'"),
        ({"causal": True}, "'causal' must not be set for kind='graph'"),
        ({"recurrence": "lstm"}, "'recurrence' must be one of .*'chimera'.*'lstm'"),
        ({"attention": "sparse"}, "'attention' must be one of .*'full'.*'sparse'"),
        ({"kind": "dag", "causal": True}, "'attention' must not be 'full' in a causal"),
        ({"recurrence_kwargs": {"acyclic": True}}, r"not have \['acyclic'\], which"),
        ({"attention_kwargs": {"heads": 2}}, r"'attention_kwargs'.*\['heads'\], which"),
        ({"heads": 3}, "'heads' must divide"),
    ],
)  # fmt: skip
def test_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        HybridModel(3, C, 2, **kwargs)


def test_presets():
    """The review's architecture and its proposal, by name, with changes."""
    x = SequenceToGraph()(torch.randint(TOKENS, (9,)))
    for name, kinds in {
        "review": [RGLRUConv, RGLRUConv, WindowAttentionConv],
        "proposed": [*[SurpriseGatedDeltaConv] * 3, DifferentialAttentionConv],
    }.items():
        model = HybridModel.preset(
            name, [TOKENS], C, TOKENS, heads=4, num_layers=4, causal=True, head="node"
        )
        found = mixers(model)
        assert [type(m) for m in found[: len(kinds)]] == kinds
        assert model(**model.inputs(x)).shape == (9, TOKENS)
    assert abs(found[3].contrast.initial - (0.8 - 0.6 * math.exp(-0.9))) < 1e-9
    model = HybridModel.preset("review", [TOKENS], C, 2, pattern="r", kind="dag")
    assert {type(m) for m in mixers(model)} == {RGLRUConv}
    with pytest.raises(ValueError, match=r"'name' must be one of \('review', 'propo"):
        HybridModel.preset("best", [TOKENS], C, 2)
    model = HybridModel.preset("proposed", [TOKENS], C, 2, attention="full")
    assert isinstance(model.layers[-1].mixer, SelfAttention)
    model = HybridModel.preset("proposed", [TOKENS], C, 2, attention="differential")
    assert model.layers[-1].mixer.k == 128


@pytest.mark.parametrize("attention", ["window", "latent", "differential"])
def test_attention_of_other_kinds(attention):
    model = hybrid("dag", pattern="ra", attention=attention, layers=2)
    model(**model.inputs(graph("dag"))).sum().backward()
    dense = hybrid("graph", pattern="a", attention="differential_full", layers=2)
    assert [round(m.contrast.initial, 2) for m in mixers(dense)] == [0.2, 0.36]
    with pytest.raises(ValueError, match="'attention' must not be 'differential_full'"):
        hybrid("dag", True, pattern="a", attention="differential_full")


@pytest.mark.parametrize("kind", KINDS)
def test_every_second_block_is_routed(kind):
    model = hybrid(kind, capacity=0.5).eval()
    assert [isinstance(m, MixtureOfDepths) for m in model.layers] == [False, True] * 2
    batch = Batch.from_data_list([graph(kind, n) for n in (7, 1, 3)])
    each = [model(**model.inputs(data)) for data in batch.to_data_list()]
    assert_near(model(**model.inputs(batch)), torch.cat(each), 1e-4)
    for wrong in ({"causal": True}, {"edge_dim": 2}):
        if kind != "graph":
            with pytest.raises(ValueError, match="'capacity' must be None in causal"):
                hybrid(kind, capacity=0.5, **wrong)
