"""What every layer and model survives: other memory, files, copies, quantization."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from asserts import assert_near
from convs import CASES, CHANNELS, LAYOUTS, matrix
from torch import Tensor
from torch.ao.quantization import quantize_dynamic
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GINEConv
from torch_geometric.transforms import ToSparseTensor

from pyg_chimera import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|invariant).*:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning"),
]

C = CHANNELS
GRAPH = torch.tensor([[0, 1, 2, 4, 1, 2, 6, 5], [1, 2, 6, 5, 0, 1, 2, 4]])
DAG = GRAPH[:, :4]
PATHS = torch.tensor([[0, 1, 2, 3, 5], [1, 2, 3, 4, 6]])
BATCH, ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 0]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
TO = ("a", "to", "b")
SIDES = {"height": torch.tensor([1, 1]), "width": torch.tensor([5, 2])}


class Row(NamedTuple):
    """A module, what it is called with, and how it is made if its size is unknown."""

    make: Callable[[], torch.nn.Module]
    call: Callable[..., Tensor]
    make_lazy: Callable[[], torch.nn.Module] | None = None

    def trained(self) -> torch.nn.Module:
        module = self.make().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter) / 3)
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
        return module


def conv(name: str) -> Row:
    case = CASES[name]
    torch.manual_seed(0)
    inputs = case.inputs(torch.float)

    def call(module: Any, dtype: torch.dtype = torch.float) -> Tensor:
        scores = {"score": inputs.x[:, 0]} if case.scores else {}
        return case.call(module, inputs.to(dtype), **scores)

    if name.startswith("GraphMamba"):
        return Row(case.conv, call)
    unknown: dict[str, int] = {} if "GatedGCN" in name else {"out_channels": C}
    if getattr(case.conv(), "edge_dim", None):
        unknown["edge_dim"] = -1
    return Row(case.conv, call, partial(case.conv, -1, **unknown))


def converted(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {name: converted(y, dtype) for name, y in x.items()}
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def model(make: Callable, *sizes: Any, **inputs: Any) -> Row:
    """A module that is made from one or more sizes, all of them C."""
    torch.manual_seed(0)
    given = {"x": torch.randn(7, C), **inputs}
    if sizes and "edge_index" in given:
        given["edge_attr"] = torch.randn(given["edge_index"].size(1), C)

    def call(module: Any, dtype: torch.dtype = torch.float, **changed: Any) -> Tensor:
        kwargs = converted(given | changed, dtype)
        out = module(**kwargs)
        return out[0] if isinstance(out, tuple) else out

    lazy = partial(make, *[-1] * len(sizes)) if sizes else None
    return Row(partial(make, *sizes), call, lazy)


def local_and_global(size: int) -> nn.GPSLayer:
    local = nn.GatedGCNConv(size, C, edge_dim=size)
    return nn.GPSLayer(C, local, nn.ChimeraConv(size, C, heads=2, edge_dim=size))


def typed(size: int) -> nn.HeteroLayer:
    return nn.HeteroLayer(
        local_and_global(size), C, (["a", "b"], [TO]), in_channels=size, edge_dim=size
    )  # fmt: skip


def call_typed(module: Any, dtype: torch.dtype = torch.float) -> Tensor:
    x_dict = {"a": torch.ones(2, C, dtype=dtype), "b": torch.zeros(3, C, dtype=dtype)}
    attr = torch.ones(2, C, dtype=dtype)
    return module(x_dict, {TO: torch.tensor([[0, 1], [1, 2]])}, {TO: attr})["b"]


def of_graphs(size: int, edge_dim: int) -> nn.GraphModel:
    return nn.GraphModel(
        size, C, 3, lambda _: local_and_global(C), 2, edge_dim=edge_dim,
        head_norm="batch_norm", norm="layer_norm",
    )  # fmt: skip


def of_categories() -> nn.GraphModel:
    encodings = {"pe": nn.LaplacianEncoder(2), "rw": nn.RandomWalkEncoder(3, 2)}

    def layer(_: int) -> nn.GPSLayer:
        local = GINEConv(torch.nn.Linear(C, C))
        return nn.GPSLayer(C, local, nn.GraphMambaConv(C))

    return nn.GraphModel([3], C, 2, layer, 2, edge_dim=[2], encodings=encodings)


def of_pairs() -> nn.GraphModel:
    layer = partial(nn.PLSTMConv, C, order="bfs")
    return nn.GraphModel(C, C, 1, lambda _: layer(), 2, head="edge")


def hybrid(kind: str, size: int, edge_dim: int) -> nn.HybridModel:
    return nn.HybridModel(size, C, 3, 2, "ra", 2, kind=kind, edge_dim=edge_dim)


def images(mixer: str, size: int) -> nn.ImageClassifier:
    options = {"position": "learned", "size": (5, 5)}
    return nn.ImageClassifier(size, C, 3, 2, mixer, heads=2, **options)


def encoded() -> dict[str, Any]:
    pe, rw = torch.randn(7, 3, 2), torch.rand(7, 3)
    return {"x": torch.arange(7).view(-1, 1) % 3, "encodings": {"pe": pe, "rw": rw},
            "edge_attr": torch.arange(8).view(-1, 1) % 2}  # fmt: skip


on_graph = {"edge_index": GRAPH, "batch": BATCH}
on_dag = {"edge_index": DAG, "batch": BATCH}
on_paths = {"edge_index": PATHS, "batch": ROWS}
MODELS = {
    "SelfAttention": model(lambda: nn.SelfAttention(C, 2), x=torch.randn(1, 7, C)),
    "DifferentialSelfAttention": model(
        lambda: nn.DifferentialSelfAttention(C, 2), x=torch.randn(1, 7, C)
    ),
    "MixtureOfDepths": model(
        lambda: nn.MixtureOfDepths(nn.GPSLayer(C, mixer=nn.ChimeraConv(C)), C, 0.5),
        **on_graph,
    ),
    "SwiGLU": Row(
        lambda: nn.SwiGLU(C),
        lambda m, dtype=torch.float: m(torch.ones(2, C, dtype=dtype)),
    ),
    "GraphBatchNorm": model(lambda: nn.GraphBatchNorm(C), batch=ROWS),
    "GPSLayer": model(local_and_global, C, **on_graph),
    "GPSLayer-attention": model(
        lambda: nn.GPSLayer(C, None, nn.SelfAttention(C, 2)), **on_graph
    ),
    "GPSLayer-torch": model(
        lambda: nn.GPSLayer(C, None, torch.nn.MultiheadAttention(C, 2)), **on_graph
    ),
    "HeteroLayer": Row(partial(typed, C), call_typed, partial(typed, -1)),
    "GraphModel": model(of_graphs, C, C, **on_graph),
    "GraphModel-categories": model(of_categories, **on_graph, **encoded()),
    "GraphModel-pairs": model(of_pairs, **on_graph, edge_label_index=GRAPH),
    "HybridModel": model(partial(hybrid, "graph"), C, C, **on_graph),
    "HybridModel-dag": model(partial(hybrid, "dag"), C, C, **on_dag),
    "HybridModel-sequence": model(
        partial(hybrid, "sequence"), C, C, edge_index=GRAPH, batch=BATCH
    ),
    "SequenceEncoder": model(
        lambda: nn.SequenceEncoder(5, C, heads=2), **on_paths, **SIDES,
        x=torch.arange(7) % 5,
    ),
    "SequenceEncoder-mamba": model(
        lambda: nn.SequenceEncoder(5, C, mixer="graph_mamba"), **on_paths,
        x=torch.arange(7) % 5,
    ),
}  # fmt: skip
for mixer in ("chimera", "plstm", "attention"):
    row = model(
        partial(images, mixer), C, **on_paths, pos=torch.zeros(7, 2, dtype=torch.long),
        **({} if mixer == "attention" else SIDES),
    )  # fmt: skip

    def call_images(module: Any, *args: Any, row: Row = row, **kwargs: Any) -> Tensor:
        return row.call(module, *args, edge_attr=None, **kwargs)

    MODELS[f"ImageClassifier-{mixer}"] = row._replace(call=call_images)
TABLE = {name: conv(name) for name in CASES} | MODELS
LAZY = {name: row for name, row in TABLE.items() if row.make_lazy}
# Options of convs differ in their parameters, which is of no matter for their forms.
KINDS = {name: row for name, row in TABLE.items() if name in MODELS or "-" not in name}

every_row = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
every_kind = pytest.mark.parametrize("row", KINDS.values(), ids=KINDS)
lazy_rows = pytest.mark.parametrize("row", LAZY.values(), ids=LAZY)


def test_there_is_a_row_of_each_class():
    found = {type(m).__name__ for row in TABLE.values() for m in row.make().modules()}
    assert set(nn.__all__) <= found


REPRS = {
    "GPSLayer(8, conv=GCNConv(8, 8), mixer=None, arrangement=sequential)": (
        nn.GPSLayer, 8, GCNConv(8, 8)),
    "GraphModel([3, 5], 8, 2, num_layers=1, head=graph)": (
        nn.GraphModel, [3, 5], 8, 2, [GCNConv(8, 8)]),
    "HybridModel([5], 16, 5, num_layers=4, head=graph)": (
        nn.HybridModel, [5], 16, 5, 4, "ra", 2),
    "CategoricalEncoder([3, 5], 8)": (nn.CategoricalEncoder, [3, 5], 8),
    "LaplacianEncoder(4)": (nn.LaplacianEncoder, 4),
    "RandomWalkEncoder(4, 2)": (nn.RandomWalkEncoder, 4, 2),
}  # fmt: skip


def test_reprs():
    for text, (make, *args) in REPRS.items():
        assert repr(make(*args)) == text


def marks(module: torch.nn.Module) -> dict[str, dict]:
    """What parameters carry, such as marks for optimizers."""
    return {name: vars(x) for name, x in module.named_parameters()}


def same_everywhere(module: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert marks(module) == marks(other)
    assert all(x.requires_grad for x in module.parameters())


# ------------------------------------------------------------------- other parameters


@every_row
def test_to_empty_and_reset(row: Row):
    with torch.device("meta"):
        module = row.make()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.fill_(torch.nan if x.is_floating_point() else 99)
    fresh = row.make()
    for made in (module, fresh):
        torch.manual_seed(1)
        made.reset_parameters()
    same_everywhere(module, fresh)


@every_row
def test_load_by_assignment(row: Row):
    trained = row.trained()
    with torch.device("meta"):
        modules = [row.make().eval()]
        modules += [row.make_lazy().eval()] if row.make_lazy else []
    for module in modules:
        module.load_state_dict(trained.state_dict(), assign=True)
        same_everywhere(module, trained)
        assert row.call(module).equal(row.call(trained))
    module.load_state_dict(trained.double().state_dict(), assign=True)
    assert row.call(module, torch.double).dtype == torch.double


@every_kind
def test_conversions(row: Row):
    module = row.trained()
    for dtype in (torch.double, torch.bfloat16, torch.half):
        kept = marks(module)
        module = module.to(dtype)
        assert marks(module) == kept
        assert row.call(module, dtype).dtype == dtype


@every_kind
def test_copies_and_files_of_what_has_run(row: Row):
    module = row.trained()
    row.call(module).square().sum().backward()
    out, file = row.call(module), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = row.make().eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(module)
    for other in (loaded, copied, pickle.loads(pickle.dumps(module))):
        same_everywhere(other, module)
        assert row.call(other).equal(out)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert row.call(module).equal(out)
    module.share_memory()
    assert row.call(module).equal(out)


@every_kind
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_dynamic_quantization(row: Row, dtype: torch.dtype):
    """PyTorch replaces its own linear layers, and leaves those of PyG as they are."""
    module = row.trained()
    out = row.call(module)
    quantized = quantize_dynamic(module, {torch.nn.Linear}, dtype=dtype)
    assert not any(type(m) is torch.nn.Linear for m in quantized.modules())
    assert_near(row.call(quantized), out, 0.1)
    assert row.call(module).equal(out)


@lazy_rows
def test_lazy_modules(row: Row):
    """Copied, converted and loaded before they know their sizes."""
    trained = row.trained()
    lazy = row.make_lazy().eval()
    for other in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        other.load_state_dict(lazy.state_dict())
        other.load_state_dict(trained.state_dict())
        assert row.call(other).equal(row.call(trained))
    double = copy.deepcopy(lazy).double()
    assert row.call(double, torch.double).isfinite().all()
    shapes = [
        {k: x.shape for k, x in m.state_dict().items()} for m in (double, trained)
    ]
    assert shapes[0] == shapes[1]
    assert {x.dtype for x in double.parameters()} == {torch.double}
    with pytest.raises(ValueError, match="uninitialized"):
        row.make_lazy().to_empty(device="cpu")


# -------------------------------------------------------------------- forms of graphs


ON_GRAPHS = {
    name: row for name, row in MODELS.items()
    if name in ("GPSLayer", "GraphModel", "HybridModel",
                "HybridModel-dag", "HybridModel-sequence")
}  # fmt: skip
on_graphs = pytest.mark.parametrize("row", ON_GRAPHS.values(), ids=ON_GRAPHS)


def edges_of(name: str) -> Tensor:
    return DAG if name == "HybridModel-dag" else GRAPH


@pytest.mark.parametrize("name", ON_GRAPHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_edge_features_with_gradients(name: str, layout: str):
    row, index = ON_GRAPHS[name], edges_of(name)
    module = row.trained().double()
    call = partial(row.call, module, torch.double)
    results = []
    for form in ("tensors", layout):
        torch.manual_seed(0)
        attr = torch.randn(index.size(1), C, dtype=torch.double, requires_grad=True)
        if form == "tensors":
            out = call(edge_index=index, edge_attr=attr)
        else:
            graph = matrix(index, attr, layout)
            out = call(edge_index=graph, edge_attr=None)
            if layout == "uncoalesced":
                assert not graph.is_coalesced()
        out.square().sum().backward()
        results.append((out, attr.grad))
    for result, expected in zip(*results, strict=True):
        assert_near(result, expected)


@on_graphs
def test_matrices_of_the_wrong_size(row: Row):
    module = row.trained()
    index = DAG[:, :2]
    for size in ((9, 9), (7, 9), (9, 7), (5, 5)):
        values = torch.ones(2, C)
        graphs = [matrix(index, values, layout, size) for layout in LAYOUTS]
        for graph in graphs:
            with pytest.raises(ValueError, match=r"'edge_index' must be .* size.*got"):
                row.call(module, edge_index=graph, edge_attr=None)


def test_features_of_models_in_the_data():
    data = Data(torch.randn(7, C), GRAPH, torch.randn(8, C))
    module = MODELS["GraphModel"].trained()
    expected = module(**module.inputs(data))
    data = ToSparseTensor(attr="edge_attr")(data)
    assert "edge_attr" not in data
    assert_near(module(**module.inputs(data)), expected, 1e-5)
    del data.adj_t
    data.adj_t = ToSparseTensor()(Data(data.x, GRAPH)).adj_t  # without features
    with pytest.raises(ValueError, match="'edge_attr' is missing"):
        module(**module.inputs(data))


def test_layers_without_edge_features_leave_the_values_to_others():
    index, attr = GRAPH, torch.randn(8, C)
    layer = nn.GPSLayer(C, nn.GatedGCNConv(C, C), nn.ChimeraConv(C, C, edge_dim=C))
    layer.eval()
    x = torch.randn(7, C)
    out = layer(x, matrix(index, attr, "csr"))
    assert_near(out, layer(x, index, edge_attr=attr), 1e-5)


@pytest.mark.parametrize("name", [*ON_GRAPHS, "GraphModel-pairs"])
def test_narrow_indices(name: str):
    """PyTorch reads bytes as masks, or refuses them."""
    row = MODELS[name]
    module = row.trained()
    given = {"edge_index": edges_of(name), "batch": BATCH}
    if name == "GraphModel-pairs":
        given["edge_label_index"] = GRAPH
    for dtype in (torch.uint8, torch.int32):
        narrow = {key: x.to(dtype) for key, x in given.items()}
        assert_near(row.call(module, **narrow), row.call(module), 1e-5)
