"""What all layers have in common."""

import copy
import inspect
import shutil
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch_geometric.typing
from asserts import assert_batched_equals_single, assert_near, assert_permutes
from convs import (
    CASES,
    CHANNELS,
    LAYOUTS,
    Case,
    Inputs,
    every_conv,
    matrix,
)
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import Sequential, summary
from torch_geometric.utils import grid

from pyg_chimera import nn
from pyg_chimera.nn import GatedGCNConv, GPSLayer, GraphMambaConv
from pyg_chimera.ops import CycleError
from pyg_chimera.ops.common import cache
from pyg_chimera.ops.structure import k_hop_index

ON_GRAPHS = {name: case for name, case in CASES.items() if not case.on_grids}
on_graphs = pytest.mark.parametrize("case", ON_GRAPHS.values(), ids=ON_GRAPHS)
DEFAULTS = {name: case for name, case in CASES.items() if "-" not in name}
default_convs = pytest.mark.parametrize("case", DEFAULTS.values(), ids=DEFAULTS)


def test_there_is_a_case_of_each_layer():
    assert set(DEFAULTS) == {name for name in nn.__all__ if name.endswith("Conv")}


# --------------------------------------------------------------------- graphs, batches


EQUIVARIANT = {name: case for name, case in CASES.items() if case.equivariant}


@pytest.mark.parametrize("case", EQUIVARIANT.values(), ids=EQUIVARIANT)
def test_permutations(case: Case):
    x, index, *edges, batch = case.inputs()
    assert_permutes(case.layer(case.trained()), (x,), index, tuple(edges), batch)


@every_conv
def test_a_batch_is_its_graphs(case: Case):
    """Unsorted where that is allowed, with labels that are no numbers from zero on."""
    x, index, *edges, batch = case.inputs()
    layer = case.layer(case.trained())
    edges = tuple(edges)
    assert_batched_equals_single(
        layer, (x,), index, edges, batch, needs_batch=case.needs_batch
    )


@every_conv
@pytest.mark.parametrize("training", [False, True])
def test_sparse_labels_cost_nothing(case: Case, training: bool):
    """In time and memory: these would be gigabytes of graphs without nodes."""
    inputs = case.inputs()
    conv = case.trained().train(training)
    torch.manual_seed(3)
    expected = case.call(conv, inputs)
    torch.manual_seed(3)
    assert case.call(conv, inputs._replace(batch=inputs.batch * 2**40)).equal(expected)


@every_conv
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(case: Case, num_nodes: int):
    conv = case.trained()
    inputs = case.inputs().without_edges(num_nodes)
    x = inputs.x.requires_grad_()
    for training in (False, True):
        conv.train(training).zero_grad()
        out = case.call(conv, inputs)
        assert out.shape == (num_nodes, CHANNELS)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad.isfinite().all()
        missing = [name for name, p in conv.named_parameters() if p.grad is None]
        if isinstance(conv, GatedGCNConv):  # which has no part in nodes
            missing = [name for name in missing if "norm_edge" not in name]
        assert missing == []


@every_conv
def test_a_graph_keeps_its_nan(case: Case):
    """Or it is refused; nothing of it is in other graphs, forward or backward."""
    conv, inputs = case.trained().float(), case.inputs(torch.float)
    graph = int(inputs.batch.mode().values)
    others = inputs.batch != graph

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = case.call(conv, inputs._replace(x=x))[others]
        out.square().sum().backward()
        return out, x.grad[others]

    wanted = run(inputs.x)
    for value in (torch.nan, torch.inf, 1e30):
        changed = inputs.x.clone()
        changed[int((~others).nonzero()[0]), 1] = value
        try:
            results = run(changed)
        except ValueError as error:
            assert "must be finite" in str(error) or "must not hold NaN" in str(error)  # noqa: PT017
            continue
        for result, expected in zip(results, wanted, strict=True):
            assert result.equal(expected)


@every_conv
def test_inputs_are_not_altered(case: Case):
    inputs = case.inputs()
    kept = [x.clone() for x in inputs]
    for training in (False, True):
        case.call(case.trained().train(training), inputs).sum()
    assert all(a.equal(b) for a, b in zip(inputs, kept, strict=True))


# -------------------------------------------------------------------------- parameters


@every_conv
def test_every_parameter_is_trained(case: Case):
    """From the start on, those of gates that begin at zero among them."""
    conv = case.conv().double().train()
    out = case.call(conv, case.inputs())
    out.square().sum().backward()
    for name, parameter in conv.named_parameters():
        if "norm_edge" not in name:
            assert parameter.grad.any(), name


@every_conv
def test_repr(case: Case):
    text = repr(case.conv())
    assert text.startswith(f"{type(case.conv()).__name__}({CHANNELS}, ")
    assert text.endswith(")")
    assert "\n" not in text


@every_conv
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: Case, dtype: torch.dtype):
    conv, inputs = case.conv(), case.inputs(torch.float)
    expected = case.call(conv, inputs)
    with torch.autocast("cpu", dtype=dtype):
        out = case.call(conv, inputs)
        out.float().sum().backward()
    assert_near(out, expected, 0.05)
    conv = conv.to(dtype)
    conv.zero_grad()
    x = inputs.x.to(dtype)
    if case.scores:  # sorts by rounded ones otherwise
        inputs = inputs._replace(x=x.float())
        expected = case.call(copy.deepcopy(conv).float(), inputs)
    out = case.call(conv, inputs.to(dtype))
    assert out.dtype == dtype
    assert_near(out, expected, 0.05)
    out.sum().backward()
    for parameter in conv.parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == dtype
            assert parameter.grad.isfinite().all()


# ------------------------------------------------------------------- as layers of PyG


def test_signatures_are_those_of_pyg():
    for name, case in DEFAULTS.items():
        names = list(inspect.signature(case.conv().forward).parameters)
        assert names[:3] == ["x", "edge_index", "edge_attr"], name
        assert name == "GatedGCNConv" or names[3] == "batch", name


def with_unique_edges(inputs: Inputs) -> Inputs:
    """Sorted, and without duplicates, which a sparse matrix would add up."""
    key = inputs.dag * 49 + inputs.edge_index[1] * 7 + inputs.edge_index[0]
    order = key.argsort(stable=True)
    order = order[torch.cat([key[order[:1]] >= 0, key[order].diff() > 0])]
    index, attr = inputs.edge_index[:, order], inputs.edge_attr[order]
    return inputs._replace(edge_index=index, edge_attr=attr, dag=inputs.dag[order])


@on_graphs
@pytest.mark.parametrize("form", ["EdgeIndex", "int32", "uint8", *LAYOUTS])
def test_forms_of_graphs(case: Case, form: str):
    conv, inputs = case.trained(), with_unique_edges(case.inputs())
    if form in ("uncoalesced", "csc") and getattr(conv, "edge_dim", None):
        pytest.skip("rows of edge features are in the order of the entries")
    expected = case.call(conv, inputs)

    def formed(index: Tensor) -> Tensor:
        if form == "EdgeIndex":
            return EdgeIndex(index, sparse_size=(7, 7), sort_order="col")
        if form in LAYOUTS:
            return matrix(index, torch.ones(index.size(1)), form)
        return index.to(getattr(torch, form))

    assert_near(case.call(conv, inputs, form=formed), expected)


#: By what the numbers of graphs are multiplied, up to 5, so that they only just fit.
NARROW = {torch.int8: 25, torch.uint8: 50, torch.int16: 6500, torch.int32: 4 * 10**8}


@every_conv
def test_batches_of_narrow_integers(case: Case):
    conv, inputs = case.conv(), case.inputs(torch.float)
    for dtype, factor in NARROW.items():
        batch = factor * inputs.batch
        outs = [
            case.call(conv, inputs._replace(batch=x)) for x in (batch, batch.to(dtype))
        ]
        assert outs[0].equal(outs[1])


@on_graphs
def test_matrices_of_the_wrong_size(case: Case):
    conv, inputs = case.trained(), case.inputs()

    def formed(index: Tensor, form: str, size: tuple[int, int]) -> Tensor:
        return matrix(index[:, :0], torch.ones(0), form, size)

    for size in ((9, 9), (7, 9), (9, 7), (5, 5)):
        match = rf"'edge_index' must be .* = \[7, 7\].* got \[{size[0]}, {size[1]}"
        for form in LAYOUTS:
            with pytest.raises(ValueError, match=match):
                case.call(conv, inputs, partial(formed, form=form, size=size))


VALUED = [name for name in ON_GRAPHS if name.endswith("-edges") or name.endswith("-D")]


@pytest.mark.parametrize("case", [CASES[name] for name in VALUED], ids=VALUED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_sparse_graphs_are_edge_features(case: Case, layout: str):
    """With gradients, and without a trace in the matrix."""
    conv, inputs = case.trained(), with_unique_edges(case.inputs())
    attrs = [inputs.edge_attr.clone().requires_grad_() for _ in range(2)]
    adj = matrix(inputs.edge_index, attrs[0], layout)
    out = conv(inputs.x, adj)
    out = out[0] if isinstance(out, tuple) else out
    expected = case.call(conv, inputs._replace(edge_attr=attrs[1]))
    assert_near(out, expected)
    for y in (out, expected):
        y.square().sum().backward()
    assert_near(attrs[0].grad, attrs[1].grad)
    assert layout != "uncoalesced" or not adj.is_coalesced()


def test_duplicates_in_a_matrix_are_added():
    """As in all of PyTorch; features that are given beside it are one row each."""
    conv = nn.ChimeraConv(CHANNELS, edge_dim=1).eval()
    x, index = torch.randn(3, CHANNELS), torch.tensor([[0, 0, 1], [1, 1, 2]])
    attr = torch.tensor([1.0, 2.0, 4.0])
    adj = torch.sparse_coo_tensor(index.flip(0), attr, (3, 3))
    once = conv(x, index[:, 1:], attr[1:] - torch.tensor([-1.0, 0.0]))
    assert_near(conv(x, adj), once, 1e-6)
    assert_near(conv(x, adj, attr), conv(x, index, attr), 1e-6)


needs_torch_sparse = pytest.mark.skipif(
    not torch_geometric.typing.WITH_TORCH_SPARSE,
    reason="needs torch-sparse (see 'make test-sparse')",
)


def sparse_tensor(index: Tensor, value: Tensor | None = None):
    return torch_geometric.typing.SparseTensor(
        row=index[1], col=index[0], value=value, sparse_sizes=(7, 7)
    )


@needs_torch_sparse
@on_graphs
def test_sparse_tensor(case: Case):
    conv, inputs = case.trained(), with_unique_edges(case.inputs())
    out = case.call(conv, inputs, form=sparse_tensor)
    assert_near(out, case.call(conv, inputs))


@needs_torch_sparse
@pytest.mark.parametrize("case", [CASES[name] for name in VALUED], ids=VALUED)
def test_values_of_sparse_tensors_are_edge_features(case: Case):
    conv, inputs = case.trained(), with_unique_edges(case.inputs())
    out = conv(inputs.x, sparse_tensor(inputs.edge_index, inputs.edge_attr))
    out = out[0] if isinstance(out, tuple) else out
    assert_near(out, case.call(conv, inputs))


FLOWS = {name: case for name, case in ON_GRAPHS.items() if "Mamba" not in name}


@pytest.mark.parametrize("case", FLOWS.values(), ids=FLOWS)
def test_flow(case: Case):
    conv, inputs = case.trained(), case.inputs()
    back = case.conv(flow="target_to_source").double()
    back.load_state_dict(conv.state_dict())
    flipped = inputs._replace(edge_index=inputs.edge_index.flip(0))
    assert_near(case.call(back, flipped), case.call(conv, inputs))


def test_edge_features_of_one_channel():
    for make in (nn.ChimeraConv, nn.ChimeraDAGConv, nn.PLSTMConv, GatedGCNConv):
        conv = make(CHANNELS, CHANNELS, edge_dim=1).eval()
        x, index, attr, *_ = CASES["ChimeraDAGConv"].inputs(torch.float)
        outs = [conv(x, index, y) for y in (attr[:, 0], attr[:, :1])]
        outs = [out[0] if isinstance(out, tuple) else out for out in outs]
        assert outs[0].equal(outs[1])


@on_graphs
def test_in_containers(case: Case):
    """Whatever a layer takes is taken by name."""
    conv, inputs = case.conv(), case.inputs(torch.float)
    if len(case.edges) > 1 or case.scores or isinstance(conv, GatedGCNConv):
        pytest.skip("takes lists of graphs, or is no mixer")
    x, index, attr, _, batch = inputs
    layer = GPSLayer(CHANNELS, mixer=conv, norm=None, mlp_channels=0)
    expected = x + case.call(conv, inputs)
    assert_near(layer(x, index, batch, attr), expected, 1e-6)
    read = ", edge_attr=edge_attr" if getattr(conv, "edge_dim", None) else ""
    model = Sequential("x, edge_index, batch, edge_attr", [
        (conv, f"x, edge_index, batch=batch{read} -> x"), torch.nn.ReLU(),
    ])  # fmt: skip
    assert_near(model(x, index, batch, attr), (expected - x).relu(), 1e-5)


@pytest.mark.parametrize("name", ["ChimeraGridConv", "PLSTMGridConv"])
def test_grids_in_containers(name):
    case = CASES[name]
    conv, inputs = case.conv(), case.inputs(torch.float)
    _, width = inputs.batch.unique(return_counts=True)
    sizes = {"height": torch.ones_like(width), "width": width}
    expected = inputs.x + case.call(conv, inputs)
    for role in ("conv", "mixer"):
        layer = GPSLayer(CHANNELS, **{role: conv}, norm=None, mlp_channels=0)
        out = layer(inputs.x, inputs.edge_index, inputs.batch, **sizes)
        assert_near(out, expected, 1e-6)


@default_convs
def test_summary(case: Case):
    pytest.importorskip("tabulate")
    conv = case.conv()
    table = summary(conv, **arguments(case))
    assert type(conv).__name__ in table
    assert f"[7, {CHANNELS}]" in table


@every_conv
def test_whatever_the_default_device(case: Case, monkeypatch):
    """Such as after `torch.set_default_device("cuda")`, with inputs elsewhere."""
    conv, inputs = case.trained(), case.inputs()
    x = inputs.x.clone().requires_grad_()
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=1024))
    torch.manual_seed(0)
    with torch.device("meta"):
        out = case.call(conv, inputs._replace(x=x))
        out.sum().backward()
    torch.manual_seed(0)
    assert_near(out, case.call(conv, inputs))
    assert x.grad.isfinite().all()


@every_conv
def test_inference_then_training(case: Case):
    """What is remembered in inference mode is fit for gradients."""
    conv, inputs = case.trained(), case.inputs()
    with torch.inference_mode():
        expected = case.call(conv, inputs)
    out = case.call(conv, inputs)
    out.sum().backward()
    assert out.equal(expected)


# ------------------------------------------------------------------ compiled, exported

COMPILED = {
    "ChimeraConv": (nn.ChimeraConv, "any"),
    "ChimeraDAGConv": (nn.ChimeraDAGConv, "dag"),
    "ChimeraPathConv": (nn.ChimeraPathConv, "path"),
    "GatedDeltaConv": (nn.GatedDeltaConv, "any"),
    "GatedDeltaConv-acyclic": (partial(nn.GatedDeltaConv, acyclic=True), "dag"),
    "RGLRUConv": (nn.RGLRUConv, "dag"),
    "KHopAttentionConv": (partial(nn.KHopAttentionConv, k=2, heads=2), "any"),
    "KHopAttentionConv-rotary": (
        partial(nn.KHopAttentionConv, k=3, rotary=True), "dag"),
    "PLSTMConv-D": (partial(nn.PLSTMConv, mode="D"), "dag"),
    "PLSTMConv-tracking": (partial(nn.PLSTMConv, tracking=2), "dag"),
    "PLSTMConv-order": (partial(nn.PLSTMConv, order="order"), "any"),
    "PLSTMConv-degree-D": (partial(nn.PLSTMConv, order="degree", mode="D"), "any"),
    "PLSTMConv-bfs": (partial(nn.PLSTMConv, order="bfs"), "any"),
    "GraphMambaConv": (nn.GraphMambaConv, "any"),
    "GraphMambaConv-bins": (
        partial(nn.GraphMambaConv, order="pagerank", num_bins=2), "any"),
    "GatedGCNConv": (partial(GatedGCNConv, CHANNELS), "any"),
    "SurpriseGatedDeltaConv": (nn.SurpriseGatedDeltaConv, "dag"),
    "DifferentialGatedDeltaConv": (nn.DifferentialGatedDeltaConv, "any"),
    "HierarchicalMemoryConv": (nn.HierarchicalMemoryConv, "dag"),
    "DifferentialAttentionConv": (
        partial(nn.DifferentialAttentionConv, k=2, heads=2), "any"),
    "LatentAttentionConv": (partial(nn.LatentAttentionConv, k=2), "any"),
    "WindowAttentionConv": (partial(nn.WindowAttentionConv, k=3, stretch=2), "dag"),
}  # fmt: skip
SETTINGS = [("eager", True), ("aot_eager", False), ("aot_eager", True)]
unused = count()


def new_graph(kind: str, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of 3 * rows nodes, and none that has been seen before: none is remembered."""
    generator = torch.Generator().manual_seed(next(unused))
    name = torch.randperm(3 * rows, generator=generator)
    path = torch.stack([torch.arange(3 * rows - 1), torch.arange(1, 3 * rows)])
    index = path if kind == "path" else grid(rows, 3)[0]
    index = index[:, index[0] < index[1]]
    index = name[index if kind == "dag" else torch.cat([index, index.flip(0)], 1)]
    return torch.randn(3 * rows, CHANNELS), index, torch.zeros_like(name)


def assert_compiles(make, kind: str, backend: str, dynamic: bool, in_layer: bool):
    conv = make(CHANNELS)
    with torch.no_grad():  # gates are the same everywhere at first
        for parameter in conv.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    takes_batch = in_layer or not isinstance(conv, GatedGCNConv)
    layer = GPSLayer(CHANNELS, mixer=conv) if in_layer else conv
    layer.double().eval()  # some gradients are so small that float32 rounds them away
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (2, 4, 5) if dynamic else (4,):  # compiled anew for each size
        x, index, batch = new_graph(kind, rows)
        x, kwargs = x.double(), {"batch": batch} if takes_batch else {}
        results = []
        for run in (compiled, layer):
            layer.zero_grad()
            out = run(x, index, **kwargs)
            out.square().sum().backward()
            grads = [p.grad for p in layer.parameters() if p.grad is not None]
            results.append([out.detach(), *(grad.clone() for grad in grads)])
        for a, b in zip(*results, strict=True):
            assert_near(a, b, 1e-9)


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name: str):
    """Structure that was never computed before, for several sizes if these are dynamic,
    without a break.
    """
    number = list(COMPILED).index(name)
    backend, dynamic = SETTINGS[number % len(SETTINGS)]
    assert_compiles(*COMPILED[name], backend, dynamic, in_layer=number % 2 == 1)


@pytest.mark.parametrize("layer", [nn.ChimeraDAGConv, nn.RGLRUConv])
def test_compile_several_dags(layer):
    """Forward and backward, as one graph."""
    conv = layer(CHANNELS, heads=2, num_dags=2).double()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x, index, _ = new_graph("dag", 2)
    grads = []
    for run in (compiled, conv):
        leaf = x.double().requires_grad_()
        run(leaf, [index, index.flip(0)]).square().sum().backward()
        grads.append(leaf.grad)
    assert_near(*grads)


def test_compile_what_is_checked_otherwise():
    """Compilers know no contents, nor whether they are trusted."""
    index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    pairs, distance = k_hop_index(index, 3, 2)
    given = {"x": torch.randn(3, 8), "edge_index": index}
    stored = {"k_hop_index": pairs, "k_hop_distance": distance}
    places = {"pos": torch.tensor([[0], [1], [2]])}
    sides = {"batch": torch.zeros(3, dtype=torch.long), "height": 1, "width": 3}
    for layer, own in (
        (nn.KHopAttentionConv(8, k=2), stored),
        (nn.PositionEmbedding(8, size=(5,)), places),
        (nn.ChimeraGridConv(8, state_channels=3), sides),
    ):
        compiled = torch.compile(layer.eval(), fullgraph=True, backend="eager")
        assert_near(compiled(**given, **own), layer(**given, **own), 1e-5)


@pytest.mark.slow
def test_compile_to_native_code():
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    make, kind = COMPILED["PLSTMConv-bfs"]
    assert_compiles(make, kind, "inductor", dynamic=True, in_layer=False)


def test_compile_in_a_fresh_process():
    """Where nothing has run before: not even kernels are loaded."""
    code = """
import torch
from pyg_chimera.nn import GPSLayer, PLSTMConv
layer = GPSLayer(8, mixer=PLSTMConv(8, heads=2, mode="D", order="bfs")).eval()
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for n in (4, 6):
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    x = torch.randn(n, 8)
    assert torch.allclose(compiled(x, path), layer(x, path), atol=1e-5)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("name", COMPILED)
def test_export_for_all_sizes(name: str):
    make, kind = COMPILED[name]
    conv = make(CHANNELS).eval()
    x, index, _ = new_graph(kind, 4)
    sizes = {0: torch.export.Dim("nodes")}, {1: torch.export.Dim("edges")}
    shapes = dict(zip(("x", "edge_index"), sizes, strict=True))
    exported = torch.export.export(conv, (x, index), dynamic_shapes=shapes).module()
    for rows in (2, 5):
        x, index, _ = new_graph(kind, rows)
        assert_near(exported(x, index), conv(x, index), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ChimeraDAGConv", "PLSTMGridConv"])
def test_packages_of_aot_inductor(name: str, tmp_path: Path):
    """With lists of integers that are absent, or not."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    inputs: list[tuple[Tensor, ...]] = []
    kwargs, shapes = {}, None
    if name in COMPILED:
        make, kind = COMPILED[name]
        conv = make(CHANNELS).eval()
        inputs = [new_graph(kind, rows)[:2] for rows in (4, 2, 5)]
        sizes = {0: torch.export.Dim("nodes")}, {1: torch.export.Dim("edges")}
        shapes = dict(zip(("x", "edge_index"), sizes, strict=True))
    else:
        conv, kwargs = CASES[name].conv(), {"height": 2, "width": 3}
        inputs = [(torch.randn(6, CHANNELS),)]
    exported = torch.export.export(conv, inputs[0], kwargs, dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "conv.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    compiled = torch._inductor.aoti_load_package(package)
    for args in inputs:
        assert_near(compiled(*args, **kwargs), conv(*args, **kwargs), 1e-5)


@pytest.mark.parametrize("name", ["ChimeraGridConv", "PLSTMGridConv"])
def test_grids_are_compiled_and_exported(name):
    conv = CASES[name].conv()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for height, width in ((2, 3), (4, 3)):
        sizes = {"height": height, "width": width}
        x = torch.randn(height * width, CHANNELS)
        assert_near(compiled(x, **sizes), conv(x, **sizes), 1e-5)
    exported = torch.export.export(conv, (x,), sizes).module()
    assert_near(exported(x, **sizes), conv(x, **sizes), 1e-5)


# ------------------------------------------------------------------------------ errors


def arguments(case: Case) -> dict:
    """By name, of a layer of one graph."""
    x, index, attr, _, batch = case.inputs(torch.float)
    given = {"x": x, "edge_index": index, "edge_attr": attr, "batch": batch}
    _, given["width"] = batch.unique(return_counts=True)
    given["height"] = torch.ones_like(given["width"])
    names = inspect.signature(case.conv().forward).parameters
    if getattr(case.conv(), "edge_dim", None) in (None, 0):
        given.pop("edge_attr")
    return {name: given[name] for name in names if name in given}


WRONG = {
    "x": [
        lambda x: x.numpy(), lambda x: x.tolist(), lambda x: None,
        lambda x: (x,), lambda x: x.long(), lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.float8_e4m3fn),
    ],
    "edge_index": [
        lambda x: x.numpy(), lambda x: x.tolist(), lambda x: None, lambda x: x.float(),
    ],
    "edge_attr": [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x.long()],
    "batch": [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x.float()],
}  # fmt: skip

TYPED = {
    name: case for name, case in CASES.items() if name in DEFAULTS or "-edges" in name
}


@pytest.mark.parametrize("case", TYPED.values(), ids=TYPED)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_types(case: Case, name: str):
    given, conv = arguments(case), case.conv()
    if name not in given or (name == "edge_index" and case.on_grids):
        pytest.skip(f"does not read '{name}'")
    # Propagation of PyG has an error of its own for edges.
    kind = (TypeError, ValueError) if name == "edge_index" else TypeError
    for wrong in WRONG[name]:
        with pytest.raises(kind, match=f"['`]{name}['`]"):
            conv(**given | {name: wrong(given[name])})


@default_convs
def test_wrong_shapes(case: Case):
    given, conv = arguments(case), case.conv()
    with pytest.raises(ValueError, match=r"'x' must be \[nodes, .*\], got \[8\]"):
        conv(**given | {"x": given["x"][0]})
    if not isinstance(conv, GatedGCNConv):  # whose widths may differ
        with pytest.raises(ValueError, match=r"'x' must be \[nodes, 8\], got \[7, 5\]"):
            conv(**given | {"x": given["x"][:, :5]})
    if "edge_index" in given and not case.on_grids:
        for wrong in (given["edge_index"] + 3, given["edge_index"] - 1):
            with pytest.raises((ValueError, IndexError), match="edge_index"):
                conv(**given | {"edge_index": wrong})
    if "batch" in given:
        with pytest.raises(ValueError, match="'batch'"):
            conv(**given | {"batch": given["batch"][:5]})


@on_graphs
def test_batches_and_edge_features_are_not_mixed_up(case: Case):
    """PyG's layers take (.., edge_attr, batch), GPSConv takes (.., batch)."""
    conv, inputs = case.conv(), case.inputs(torch.float)
    x, index, attr, _, batch = inputs
    index = [index] * len(case.edges) if len(case.edges) > 1 else index
    third = [batch] * len(case.edges) if len(case.edges) > 1 else batch
    with pytest.raises(TypeError, match=r"'edge_attr' must be .*batch=\.\.\."):
        conv(x, index, third)
    if not isinstance(conv, GatedGCNConv):
        with pytest.raises(TypeError, match=r"'batch' must hold integers.*edge_attr="):
            conv(x, index, None, attr)


@pytest.mark.parametrize("make", [nn.ChimeraDAGConv, nn.RGLRUConv])
def test_ranks_are_those_of_the_edges_as_given(make):
    """Also where a layer runs against them."""
    conv = make(CHANNELS, flow="target_to_source").double().eval()
    index, rank = torch.tensor([[0, 2, 2], [1, 1, 3]]), torch.tensor([1, 2, 0, 5])
    x = torch.randn(4, CHANNELS, dtype=torch.double)
    assert_near(conv(x, index, rank=rank), conv(x, index))
    with pytest.raises(ValueError, match="'rank' must grow along every edge"):
        conv(x, index, rank=rank.flip(0))


def test_means_over_many_neighbours_in_half_precision():
    """Whose number is beyond those that bfloat16 counts."""
    conv = nn.ChimeraDAGConv(CHANNELS, state_channels=3, local_conv=True).eval()
    index = torch.stack([torch.arange(1, 601), torch.zeros(600, dtype=torch.long)])
    x = torch.ones(601, CHANNELS)
    with torch.no_grad():
        expected = conv(x, index)[0]
        out = conv.bfloat16()(x.bfloat16(), index)[0]
    assert_near(out.float(), expected, 0.05)


def test_options_that_only_some_calls_would_look_at():
    with pytest.raises(ValueError, match=r"'solver' must be one of .*'neuman'"):
        nn.ChimeraConv(8, solver="neuman", num_terms=3)
    with pytest.raises(ValueError, match="'flow' must be 'source_to_target' for grids"):
        nn.ChimeraGridConv(8, flow="target_to_source")
    mixer = nn.ChimeraConv(8, edge_dim=3)
    layer = GPSLayer(8, GatedGCNConv(8, 8), mixer)
    index = torch.tensor([[0, 1], [1, 0]])
    out = layer(torch.randn(2, 8), index, edge_attr=torch.randn(2, 3))
    assert out.shape == (2, 8)
    with pytest.raises(ValueError, match=r"'edge_attr' must be \[edges, 3\].*\[2, 4\]"):
        mixer(torch.randn(2, 8), index, torch.randn(2, 4))


WITH_EDGES = {
    name: case
    for name, case in ON_GRAPHS.items()
    if getattr(case.conv(), "edge_dim", 0)
}


@pytest.mark.parametrize("case", WITH_EDGES.values(), ids=WITH_EDGES)
def test_missing_features_of_edges(case: Case):
    conv, inputs = case.conv(), case.inputs(torch.float)
    x, index, attr, _, _batch = inputs
    if len(case.edges) > 1:
        with pytest.raises((TypeError, ValueError), match="'edge_attr'"):
            conv(x, [index] * len(case.edges))
        return
    with pytest.raises(ValueError, match="'edge_attr' must be given, as 'edge_dim' is"):
        conv(x, index)
    with pytest.raises(ValueError, match=rf"of {len(attr)} edges, got \[2, 3\]"):
        conv(x, index, attr[:2])


ON_DAGS = [nn.ChimeraDAGConv, nn.PLSTMConv, nn.RGLRUConv]


@pytest.mark.parametrize(
    "make", [partial(make, order=None) for make in ON_DAGS]
    + [partial(nn.PLSTMConv, order=None, mode="D")],
)  # fmt: skip
def test_cycles(make):
    index = torch.tensor([[0, 1, 2, 4], [1, 2, 0, 1]])
    with pytest.raises(CycleError, match="has the cycle 0 -> 1 -> 2 -> 0"):
        make(CHANNELS)(torch.randn(5, CHANNELS), index)


@pytest.mark.parametrize("make", ON_DAGS)
def test_numbers_of_dags(make):
    conv, x = make(CHANNELS, num_dags=2), torch.randn(7, CHANNELS)
    index = torch.tensor([[0, 1], [1, 2]])
    match = "'edge_index' must be a list with an entry for each of 2 DAGs"
    with pytest.raises(TypeError, match=f"{match}, got one Tensor"):
        conv(x, index)
    with pytest.raises(ValueError, match=f"{match}, got 3"):
        conv(x, [index] * 3)


@pytest.mark.parametrize(
    "make",
    [
        nn.ChimeraConv, nn.ChimeraDAGConv, nn.ChimeraPathConv, nn.PLSTMConv,
        partial(nn.PLSTMConv, order="bfs", mode="D"), nn.RGLRUConv,
        partial(GatedGCNConv, CHANNELS),
    ],
)  # fmt: skip
def test_explainer(make):
    """It finds the edges that lead to a node, and no others."""
    conv = make(CHANNELS)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    index = torch.tensor([[0, 1, 4, 5], [1, 2, 5, 6]])
    both = isinstance(conv, (nn.ChimeraConv, nn.ChimeraPathConv))
    if both or getattr(conv, "order", None) == "bfs":
        index = torch.cat([index, index.flip(0)], 1)
    explainer = Explainer(
        conv,
        GNNExplainer(epochs=5),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    mask = explainer(torch.randn(7, CHANNELS), index, index=2).edge_mask
    near = (index < 3).all(dim=0) & (index[0] < index[1])
    if isinstance(conv, GatedGCNConv):
        near &= index[1] == 2
    assert (mask[near] > 0).all()
    assert (mask[(index >= 3).all(dim=0)] == 0).all()


@pytest.mark.parametrize(
    "make", [nn.RGLRUConv, partial(nn.PLSTMConv, mode="D"),
             partial(nn.GraphMambaConv, order="order")],
)  # fmt: skip
def test_learns_what_lies_far_back(make):
    """The first of 25 nodes of a path says which class the last one has."""
    torch.manual_seed(0)
    n, y = 25, torch.arange(32) % 2
    model = torch.nn.ModuleList(
        [torch.nn.Linear(2, 16), make(16), torch.nn.Linear(16, 2)]
    )
    first = n * torch.arange(32)
    x = torch.zeros(32 * n, 2)
    x[first, y] = 1
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    index = (path[:, None] + first[:, None]).flatten(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(150):
        h = model[1](model[0](x), index, batch=torch.arange(32).repeat_interleave(n))
        loss = torch.nn.functional.cross_entropy(model[2](h)[first + n - 1], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.05:
            break
    assert losses[-1] < 0.05


@default_convs
def test_unknown_options(case: Case):
    with pytest.raises(TypeError, match="num_head"):
        case.conv(num_head=3)


WITHOUT_STATES = ("GraphMambaConv", "GatedGCNConv", "KHopAttentionConv")
HEADS = [name for name in DEFAULTS if name not in WITHOUT_STATES]


@pytest.mark.parametrize("name", HEADS)
def test_sizes_of_heads(name: str):
    make = getattr(nn, name)
    with pytest.raises(ValueError, match="'out_channels' must be given if 'in_ch"):
        make(-1)
    for heads, said in ((3, "divide .*, got 3 and"), (0, "be an integer >= 1 .*got 0")):
        with pytest.raises(ValueError, match=f"'heads' must {said}"):
            make(CHANNELS, heads=heads)
    conv = make(16, heads=2)
    assert (conv.in_channels, conv.out_channels) == (16, 16)
    options = inspect.signature(make).parameters
    if "state_channels" in options:
        with pytest.raises(ValueError, match="'state_channels' must be an integer >="):
            make(CHANNELS, state_channels=0)
    for name in [x for x in ("form", "backend") if x in options]:
        case = next(c for n, c in CASES.items() if n == make.__name__)
        with pytest.raises(ValueError, match=f"'{name}' must be one of .*, got 'cuda'"):
            case.call(make(CHANNELS, **{name: "cuda"}), case.inputs(torch.float))


@pytest.mark.parametrize(
    "make",
    [
        nn.ChimeraConv, nn.ChimeraDAGConv, nn.ChimeraPathConv, nn.GatedDeltaConv,
        nn.KHopAttentionConv, nn.PLSTMConv, nn.RGLRUConv,
        partial(nn.PLSTMConv, order="bfs"),
    ],
)  # fmt: skip
def test_edge_features_that_nothing_reads_are_refused(make):
    x, path = torch.randn(3, 8), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    if not isinstance(make, partial) and make.__name__ not in (
        "ChimeraConv", "ChimeraPathConv", "GatedDeltaConv", "KHopAttentionConv"
    ):  # fmt: skip
        path = path[:, ::2]
    conv, attr = make(8, 8), torch.randn(path.size(1), 3)
    conv(x, path)
    with pytest.raises(ValueError, match=r"'edge_attr' must be None.*'edge_dim'"):
        conv(x, path, attr)


@every_conv
def test_misspelt_arguments(case: Case):
    conv = type(case.conv())
    with pytest.raises(TypeError, match=rf"{conv.__name__}.* argument 'droput'"):
        conv(*[8] * (1 if conv is GraphMambaConv else 2), droput=0.1)
