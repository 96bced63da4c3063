"""What all transforms have in common."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import (
    Batch,
    Data,
    HeteroData,
    InMemoryDataset,
    TemporalData,
)
from torch_geometric.data.datapipes import DatasetAdapter
from torch_geometric.loader import DataLoader

from pyg_chimera import transforms
from pyg_chimera.ops.structure import ORDERS
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddKHopIndex,
    AddTopologicalOrder,
    DAGDecomposition,
    DirectedLineGraph,
    EventsToDAG,
    ImageToGraph,
    LaplacianEncoding,
    LineGraphData,
    MultitreePruning,
    NodeOrder,
    PadBatch,
    SequenceToGraph,
)


class Case(NamedTuple):
    """A transform, and what to expect of it."""

    make: Any
    args: tuple
    kwargs: dict
    name: str  # of the function that datapipes have
    text: str  # its repr
    argument: str  # by which the attributes are named
    adds: set
    acyclic: bool = False  # whether it takes DAGs only
    of_batches: bool = False  # whether it does the same for a batch as for its graphs


def case(make, *args, adds, name, text=None, argument="attr_name", **more):
    options = {key: more.pop(key) for key in ("acyclic", "of_batches") if key in more}
    text = f"{make.__name__}()" if text is None else text
    return Case(make, args, more, name, text, argument, set(adds), **options)


def height(data: Data) -> Tensor:
    return data.x[:, 0]


decomposition = partial(
    case, DAGDecomposition, name="dag_decomposition", argument="prefix",
    adds=("dag_edge_index", "dag_edge_attr", "dag_rank", "dag_checksum"),
)  # fmt: skip
CASES = {
    "elimination_order": case(
        AddEliminationOrder, name="add_elimination_order", adds=["elimination_rank"],
    ),
    "topological_order": case(
        AddTopologicalOrder, name="add_topological_order", adds=["topological_rank"],
        acyclic=True, of_batches=True,
    ),
    "k_hop": case(
        AddKHopIndex, 2, name="add_k_hop_index", text="AddKHopIndex(k=2)",
        argument="prefix", adds=["k_hop_index", "k_hop_distance"], of_batches=True,
    ),
    "diameter": case(
        AddDiameter, name="add_diameter", adds=["diameter", "diameter_checksum"],
        of_batches=True,
    ),
    "laplacian": case(
        LaplacianEncoding, 3, name="laplacian_encoding", adds=["laplacian_pe"],
        text="LaplacianEncoding(k=3)",
    ),
    "line_graph": case(
        DirectedLineGraph, name="directed_line_graph", argument="prefix",
        adds=["line_edge_index", "line_edge_checksum"], acyclic=True,
    ),
    "pruning": case(
        MultitreePruning, name="multitree_pruning", argument="prefix", acyclic=True,
        adds=["line_edge_index", "line_edge_index_pruned", "line_edge_checksum"],
    ),
    **{
        f"dags_{order}": decomposition(
            num_dags=4, method=order, seed=3,
            text=f"DAGDecomposition(num_dags=4, method='{order}', seed=3)",
        )
        for order in ("random", "bfs", "bfs_dense")
    },
    **{
        f"dags_{getattr(order, '__name__', order)}": case(
            DAGDecomposition, 2, order, name="dag_decomposition", argument="prefix",
            text="DAGDecomposition(num_dags=2" + ("" if order == "order" else
            f", method='{getattr(order, '__name__', order)}'") + ")",
            adds=("dag_edge_index", "dag_edge_attr", "dag_rank", "dag_checksum"),
            of_batches=True,
        )
        for order in ("order", "degree", "pagerank", "closeness", height)
    },
    "dags_dag": decomposition(
        method="dag", text="DAGDecomposition(num_dags=2, method='dag')", acyclic=True,
    ),
    **{
        f"score_{getattr(order, '__name__', order)}": case(
            NodeOrder, order, name="node_order", of_batches=True,
            adds=["node_score", "node_score_checksum"],
            text="NodeOrder()" if order == "degree" else
            f"NodeOrder(order='{getattr(order, '__name__', order)}')",
        )
        for order in (*ORDERS, height)
    },
    "image": case(
        ImageToGraph, (2, 3), name="image_to_graph",
        text="ImageToGraph(patch_size=(2, 3))",
        adds=("x", "edge_index", "pos", "height", "width"),
    ),
    "sequence": case(
        SequenceToGraph, name="sequence_to_graph",
        adds=("x", "edge_index", "pos", "height", "width"),
    ),
    "events": case(
        EventsToDAG, name="events_to_dag",
        adds=("x", "edge_index", "edge_attr", "event_index", "query_index"),
    ),
}  # fmt: skip
#: Of which graphs are made, and the attributes that these replace.
RAW = {
    "image": {"image"}, "sequence": {"sequence"}, "events": {"src", "dst", "t", "msg"},
}  # fmt: skip
each_case = pytest.mark.parametrize("key", CASES)
each_of_graphs = pytest.mark.parametrize(
    "key", [key for key in CASES if key not in RAW]
)
#: (nodes, pairs of nodes): without nodes, with one, without edges, with isolated nodes.
SIZES = [(12, 20), (0, 0), (1, 0), (3, 0), (9, 4), (1, 1), (20, 70)]


def transform_of(key: str):
    return CASES[key].make(*CASES[key].args, **CASES[key].kwargs)


def items_of(key: str) -> list[Data]:
    """Data with duplicate edges, self-loops and any other attributes."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for y, (n, m) in enumerate(SIZES):
        if key == "image":
            size = 2, 2 + n % 5 // 2 * 2, 3 + m % 7 // 3 * 3  # of 2 x 3 patches
            image = torch.rand(size, generator=generator)
            out.append(Data(image=image, y=torch.tensor([y])))
            continue
        if key == "sequence":
            sequence = torch.randint(9, (1 + n,), generator=generator)
            out.append(Data(sequence=sequence, y=torch.tensor([y])))
            continue
        edges = torch.randint(max(n, 1), (2, m), generator=generator)
        if key == "events":
            t, msg = torch.arange(m), torch.rand(m, 2, generator=generator)
            more = {"src": edges[0], "dst": edges[1], "t": t, "msg": msg}
            out.append(TemporalData(**more, y=torch.full((m,), y)))
            continue
        if CASES[key].acyclic:
            edges = edges.sort(dim=0).values[:, edges[0] != edges[1]]
        else:
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        edge_attr = torch.arange(2.0 * edges.size(1)).view(-1, 2)
        x = torch.rand(n, 2, generator=generator)
        out.append(Data(x, edges, edge_attr, y=torch.tensor([y])))
    return out


def as_dict(data: Data) -> dict:
    return {key: data[key] for key in data.keys()}  # noqa: SIM118


def as_list(x: Any) -> list:
    return x if isinstance(x, list) else [x]


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    torch.testing.assert_close(as_dict(a), as_dict(b), rtol=0, atol=0)


def test_all_transforms_are_here():
    public = {getattr(transforms, name) for name in transforms.__all__}
    others = {LineGraphData, PadBatch}  # the latter is one of batches
    assert {case.make for case in CASES.values()} == public - others


@each_case
def test_adds_attributes_to_a_copy(key):
    for data in items_of(key):
        before = copy.deepcopy(data)
        out = transform_of(key)(data)
        assert_same(data, before)
        replaced = RAW.get(key, set())
        assert set(out.keys()) == {*data.keys(), *CASES[key].adds} - replaced
        for name in set(data.keys()) - CASES[key].adds - replaced:
            assert out[name] is data[name]
        assert out.num_nodes == (out.x.size(0) if key in RAW else data.num_nodes)
        for name in CASES[key].adds - {"height", "width", "x"}:
            for x in as_list(out[name]):
                is_float = name in ("laplacian_pe", "pos") or "edge_attr" in name
                assert is_float or name == "node_score" or x.dtype == torch.long
                if not any(
                    word in name for word in ("edge", "diameter", "k_hop", "_index")
                ):
                    assert x.size(0) == out.num_nodes
    # What an earlier transform has left is replaced.
    assert_same(transform_of(key)(copy.copy(out)), out) if key not in RAW else None


@each_case
def test_same_result_from_copies_and_datapipes(key):
    _, args, kwargs, name, text, *_ = CASES[key]
    pickled = pickle.loads(pickle.dumps(transform_of(key)))
    assert repr(pickled) == text
    pipe = getattr(DatasetAdapter(items_of(key)), f"chimera_{name}")(*args, **kwargs)
    for data, out in zip(items_of(key), pipe, strict=True):
        expected = transform_of(key)(data)
        assert_same(out, expected)
        assert_same(pickled(data), expected)


class Pairs(torch.utils.data.Dataset):
    """All transforms of all items."""

    def __init__(self):
        self.pairs = [(transform_of(key), x) for key in CASES for x in items_of(key)]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        transform, data = self.pairs[index]
        return transform(data)


def test_workers():
    dataset = Pairs()
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    for i, out in enumerate(loader):
        assert_same(out, dataset[i])
    assert i + 1 == len(CASES) * len(SIZES)


@each_case
def test_batches_by_the_rules_of_pyg(key):
    each = [transform_of(key)(data) for data in items_of(key)]
    (batch,) = DataLoader(each, batch_size=len(each))
    sizes = torch.tensor([data.edge_index.size(1) for data in each])
    first = {"node": batch.ptr[:-1], "edge": sizes.cumsum(0) - sizes}
    for name in CASES[key].adds:
        shifts = first["edge" if name.startswith("line") else "node"]
        shifts = shifts if "index" in name else torch.zeros_like(shifts)
        parts = zip(*(as_list(data[name]) for data in each), strict=True)
        for x, values in zip(as_list(batch[name]), parts, strict=True):
            values = [torch.as_tensor(value) for value in values]
            values = [value.view(1) if value.dim() == 0 else value for value in values]
            values = [y + shift for y, shift in zip(values, shifts, strict=True)]
            assert x.equal(torch.cat(values, dim=1 if "index" in name else 0))
    for one, again in zip(each, batch.to_data_list(), strict=True):
        if "height" in CASES[key].adds:  # a batch holds tensors of such numbers
            again.height, again.width = one.height, one.width
        assert_same(one, again)
    if CASES[key].of_batches:
        whole = transform_of(key)(Batch.from_data_list(items_of(key)))
        for name in CASES[key].adds:
            torch.testing.assert_close(whole[name], batch[name], rtol=0, atol=0)


@each_case
def test_files(key, tmp_path):
    """As data sets of PyG keep them; files of data alone are read as safe ones."""
    each = [transform_of(key)(data) for data in items_of(key)]
    if key in RAW:
        each = [data for data in each if data.num_nodes]
    InMemoryDataset.save(each, tmp_path / "data.pt")
    dataset = InMemoryDataset(tmp_path)
    with warnings.catch_warnings():
        # PyG warns when it can't load with 'weights_only=True'.
        warnings.filterwarnings("error", message="Weights only load failed")
        dataset.load(tmp_path / "data.pt")
    assert len(dataset) == len(each)
    for one, again in zip(each, dataset, strict=True):
        if "height" in CASES[key].adds:
            again.height, again.width = one.height, one.width
        assert_same(one, again)
    (batch,) = DataLoader(dataset, batch_size=len(each))
    (expected,) = DataLoader(each, batch_size=len(each))
    for name in CASES[key].adds:
        torch.testing.assert_close(batch[name], expected[name], rtol=0, atol=0)
    last = dataset.copy(list(range(len(each)))[::-2])[0]
    for name in CASES[key].adds - {"height", "width"}:
        torch.testing.assert_close(last[name], each[-1][name], rtol=0, atol=0)


def assert_any_kind_of_edges(key: str, data: Data) -> None:
    expected, size = transform_of(key)(data), (data.num_nodes, data.num_nodes)
    for kind in (EdgeIndex(data.edge_index, sparse_size=size), data.edge_index.int()):
        other = copy.copy(data)
        other.edge_index = kind
        out = transform_of(key)(other)
        for name in CASES[key].adds:
            for a, b in zip(as_list(out[name]), as_list(expected[name]), strict=True):
                assert type(a) is type(b)
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@each_of_graphs
def test_edges_of_other_kinds(key):
    for data in items_of(key):
        if data.num_edges > 2:
            assert_any_kind_of_edges(key, data)


@pytest.mark.parametrize("key", ["diameter", "score_degree", "dags_order"])
@pytest.mark.parametrize("num_edges", [0, 1])
def test_few_edges_of_other_kinds(key, num_edges):
    edges = torch.zeros(2, num_edges, dtype=torch.long)
    data = Data(torch.rand(3, 1), edges, torch.rand(num_edges, 1))
    assert_any_kind_of_edges(key, data)


class MyData(Data):
    pass


@pytest.mark.parametrize("key", [x for x in CASES if x != "events"])
def test_class_of_the_data_stays(key):
    data = items_of(key)[0]
    own = MyData(**data.to_dict())
    try:
        assert type(transform_of(key)(own)) is MyData
    except TypeError as error:  # where Data has to count edges of lines
        assert "LineGraphData" in str(error)  # noqa: PT017


@each_of_graphs
def test_names_of_attributes(key):
    make, args, kwargs, argument = *CASES[key][:3], CASES[key].argument
    data = items_of(key)[0]
    if make is DAGDecomposition:
        out = make(*args, **kwargs, prefix="tree")(data)
        assert {"tree_edge_index", "tree_edge_attr", "tree_rank"} < set(out.keys())
    elif argument == "attr_name":
        assert "value" in make(*args, **kwargs, attr_name="value")(data)
    names = ("my_index", "my_batch", "face", "ptr", "", "x", "edge_attr", "num_nodes")
    for name in (
        names if argument == "attr_name" else (*names, "edge", "line", "my_line")
    ):
        with pytest.raises(ValueError, match=f"'{argument}' must not.*'{name}'"):
            make(*args, **kwargs, **{argument: name})
    with pytest.raises(TypeError, match=f"'{argument}' must be a string, got 3"):
        make(*args, **kwargs, **{argument: 3})


@each_of_graphs
@pytest.mark.parametrize(
    ("edge_index", "error", "match"),
    [
        (None, ValueError, r"'data.edge_index'.*\['x'\]"),
        ([[0], [1]], TypeError, "edge_index' must be a tensor.*'list'"),
        (np.zeros((2, 1), np.int64), TypeError, "edge_index' must be a tensor.*'ndarr"),
        (torch.zeros(2, 1), TypeError, "'edge_index' must hold integers"),
        (torch.zeros(2, 1).cfloat(), TypeError, "'edge_index' must hold integers"),
        (torch.zeros(3, 1).long(), ValueError, r"'edge_index'.*\[2, num_edges\]"),
        (torch.tensor([[0], [5]]), ValueError, "'edge_index'.*got 5 in"),
    ],
)
def test_bad_edges(key, edge_index, error, match):
    data = Data(x=torch.zeros(3, 1))
    if edge_index is not None:
        data.edge_index = edge_index
    with pytest.raises(error, match=match):
        transform_of(key)(data)


@each_case
def test_other_data(key):
    wanted = "TemporalData" if key == "events" else "homogeneous"
    with pytest.raises(TypeError, match=rf"{wanted}.*'HeteroData'"):
        transform_of(key)(HeteroData())


@each_case
def test_whatever_the_default_device(key):
    """Where neither graphs nor scores are made by others."""
    if key in RAW or "height" in key:
        pytest.skip("others make tensors")
    for data in items_of(key):
        with torch.device("meta"):
            out = transform_of(key)(data)
        assert_same(out, transform_of(key)(data))


@pytest.mark.cuda
@each_case
def test_results_are_on_the_device_of_the_data(key):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for data in items_of(key):
        out = transform_of(key)(data.clone().cuda())
        for name in CASES[key].adds - {"height", "width"}:
            assert all(x.is_cuda for x in as_list(out[name]))
        assert_same(out.cpu(), transform_of(key)(data))
