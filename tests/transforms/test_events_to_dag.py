"""Streams of events as DAGs: by hand, beside a loop over events, and under layers."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

from pyg_chimera.nn import ChimeraDAGConv, GatedDeltaConv, PLSTMConv, RGLRUConv
from pyg_chimera.transforms import EventsToDAG

LAYERS = {
    "chimera": lambda: ChimeraDAGConv(6, heads=2, state_channels=4, edge_dim=4),
    # By "column", the edges that leave a state share it, those of later events, too.
    "plstm": lambda: PLSTMConv(6, heads=2, edge_dim=4, normalization="row"),
    "delta": lambda: GatedDeltaConv(6, heads=2, acyclic=True, edge_dim=4),
    "rg_lru": lambda: RGLRUConv(6, heads=2, edge_dim=4),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def stream(*rows: tuple, **more: Any) -> TemporalData:
    """Events from their sources, destinations and times."""
    src, dst, t = torch.tensor(rows, dtype=torch.long).view(-1, 3).unbind(1)
    return TemporalData(src=src, dst=dst, t=t, **more)


def edges_of(dag: Data) -> set[tuple[int, int, int, float]]:
    """(from, to, kind, time that has passed) of each edge."""
    assert dag.edge_attr.size(1) == 4
    assert bool((dag.edge_attr[:, :3].sum(1) == 1).all())
    kind, gap = dag.edge_attr[:, :3].argmax(1), dag.edge_attr[:, 3].double().expm1()
    rows = zip(*dag.edge_index.tolist(), kind.tolist(), gap.tolist(), strict=True)
    found = [(*row[:3], round(row[3], 3)) for row in rows]
    assert len(set(found)) == len(found)
    return set(found)


def test_by_hand():
    events = stream((5, 7, 10), (7, 9, 13), (7, 5, 20))
    dag = EventsToDAG()(events, stream((5, 9, 20), (8, 5, 21)))
    assert dag.num_nodes == 8
    assert dag.event_index.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert dag.query_index.tolist() == [6, 7]
    own = {(1, 2, 0, 3), (2, 4, 0, 7), (0, 5, 0, 10)}
    partner = {(1, 3, 1, 3), (0, 4, 1, 10), (2, 5, 1, 7)}
    pair = {(1, 4, 2, 10), (0, 5, 2, 10)}
    first = {(0, 6, 0, 10), (3, 6, 1, 7)}
    second = {(5, 7, 1, 1)}  # nobody has met node 8
    assert edges_of(dag) == own | partner | pair | first | second
    log = [math.log1p(x) for x in range(11)]
    for state, expected in {
        1: [0, 1, 0, 0, 0, 0, 0, 0],
        4: [1, 0, log[2], log[1], log[1], log[7], log[10], log[10]],
        7: [1, 0, 0, log[2], 0, 0, log[1], 0],
    }.items():
        torch.testing.assert_close(dag.x[state], torch.tensor(expected).float())


def test_ties_are_in_order_and_not_seen_by_queries():
    events = stream((0, 1, 3), (1, 2, 3), (2, 0, 3))
    dag = EventsToDAG()(events, stream((0, 1, 3), (0, 1, 4)))
    assert {(1, 2, 0, 0), (3, 4, 0, 0), (0, 5, 0, 0)} < edges_of(dag)
    assert {(5, 7, 0, 1), (2, 7, 1, 1), (0, 7, 2, 1)} < edges_of(dag)
    assert not dag.x[6, 2:].any()
    assert not (dag.edge_index == 6).any()


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.double])
def test_an_empty_stream(dtype):
    empty = TemporalData(
        src=torch.zeros(0, dtype=torch.long), dst=torch.zeros(0, dtype=torch.long),
        t=torch.zeros(0, dtype=dtype), msg=torch.zeros(0, 2),
    )  # fmt: skip
    for dag in (EventsToDAG()(empty), EventsToDAG()(empty, empty)):
        assert dag.x.shape == (0, 10)
        assert dag.edge_index.shape == dag.event_index.shape == (2, 0)
        assert dag.query_index.shape == (0,)
        assert dag.edge_attr.shape == (0, 4)
    query = TemporalData(
        src=torch.tensor([4]), dst=torch.tensor([2]), t=torch.tensor([1], dtype=dtype)
    )
    dag = EventsToDAG()(empty, query)
    assert dag.x.tolist() == [[1] + [0] * 9]
    assert dag.edge_index.shape == (2, 0)


def test_messages_and_other_attributes():
    rows = [(0, 1, 1), (1, 2, 2)]
    msg, y = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([7, 8])
    dag = EventsToDAG()(stream(*rows, msg=msg, y=y), stream((0, 2, 9)))
    assert dag.x[:, 8:].tolist() == [[3, 4], [3, 4], [5, 6], [5, 6], [0, 0]]
    assert dag.y.equal(y)
    assert set(dag.keys()) == {
        *("x", "y", "edge_index", "edge_attr", "event_index", "query_index"),
    }
    assert EventsToDAG()(stream(*rows, msg=y)).x[:, 8].tolist() == [7, 7, 8, 8]
    assert EventsToDAG()(stream(*rows, msg=msg.double())).x.dtype == torch.double


def test_units_of_time():
    hours = stream((0, 1, 0), (0, 1, 7200))
    hours.t = hours.t / 3600
    assert {gap for *_, gap in edges_of(EventsToDAG()(hours))} == {2}
    later = stream((0, 1, 1_700_000_000), (0, 1, 1_700_000_001))  # no float32 has these
    assert {gap for *_, gap in edges_of(EventsToDAG()(later))} == {1}


rows = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 12))


@given(st.lists(rows, max_size=12), st.lists(rows, max_size=6))
def test_beside_a_loop_over_events(events, queries):
    events.sort(key=lambda row: row[2])
    dag = EventsToDAG()(stream(*events), stream(*queries))
    edges, counts = set(), []
    for place, (src, dst, t) in enumerate(events + queries):
        ends = ((src, dst), (dst, src))
        for own, partner in ends if place < len(events) else ends[:1]:
            history: tuple[list, ...] = ([], [], [])
            for e, (u, v, when) in enumerate(events):
                if e < place if place < len(events) else when < t:
                    for state, node, other in ((2 * e, u, v), (2 * e + 1, v, u)):
                        history[0].extend([(state, t - when)] * (node == own))
                        history[1].extend([(state, t - when)] * (node == partner))
                        both = (node, other) == (own, partner)
                        history[2].extend([(state, t - when)] * both)
            for kind, past in enumerate(history):
                edges |= (
                    {(past[-1][0], len(counts), kind, past[-1][1])} if past else set()
                )
            gaps = [past[-1][1] if past else 0 for past in history]
            counts.append([*map(len, history), *gaps])
    assert edges_of(dag) == edges
    expected = torch.tensor(counts).view(-1, 6).float().log1p()
    torch.testing.assert_close(dag.x[:, 2:], expected)
    roles = [[1, 0], [0, 1]] * len(events) + [[1, 0]] * len(queries)
    assert dag.x[:, :2].tolist() == roles


@each_layer
def test_layers_take_it_also_in_batches(name):
    conv = LAYERS[name]().double()
    both = []
    for size in (5, 9):
        events = stream(*torch.randint(4, (size, 3)).cumsum(0).remainder(5).tolist())
        events.t, events.msg = torch.arange(size), torch.randn(size, 1).double()
        both.append(EventsToDAG()(events, stream((0, 1, 3), (1, 4, size))))
    lin = torch.nn.Linear(9, 6).double()

    def out(dag: Data) -> Tensor:
        z = conv(lin(dag.x), dag.edge_index, dag.edge_attr.double())
        return z[dag.query_index]

    batch = Batch.from_data_list(both)
    torch.testing.assert_close(out(batch), torch.cat([out(dag) for dag in both]))


@each_layer
def test_layers_forget_by_the_time_that_has_passed(name):
    """Only edges say how much time has passed: features of states are replaced."""
    conv, x = LAYERS[name](), torch.randn(6, 6)
    if name == "plstm":  # whose gates start closed to features
        for parameter in conv.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    def out(*times: int) -> Tensor:
        dag = EventsToDAG()(stream(*((0, 1, t) for t in times)))
        return conv(x, dag.edge_index, dag.edge_attr)

    short, long = out(0, 1, 2), out(0, 1, 10_000)
    torch.testing.assert_close(short[:4], long[:4])
    assert (short[4:] - long[4:]).abs().amax() > 1e-3
    torch.testing.assert_close(out(5, 6, 7), short)  # no time is absolute


@each_layer
def test_nothing_comes_from_the_future(name):
    conv = LAYERS[name]()
    events = stream((0, 1, 1), (1, 2, 2), (2, 0, 4), (0, 1, 4), (1, 2, 6))
    dag = EventsToDAG()(events, stream((0, 1, 4), (1, 2, 5), (3, 0, 9)))
    x = torch.randn(dag.num_nodes, 6, requires_grad=True)
    out = conv(x, dag.edge_index, dag.edge_attr)
    for states, seen in (([10], 4), ([11], 8), ([12], 10), ([4, 5], 4)):
        (grad,) = torch.autograd.grad(out[states].sum(), x, retain_graph=True)
        others = torch.ones(len(x), dtype=torch.bool).index_fill(
            0, torch.tensor(states), False
        )
        others[:seen] = False
        assert not grad[others].any()
        assert grad[:seen].abs().sum() > 0
    part = EventsToDAG()(events[:3])
    again = conv(x[:6], part.edge_index, part.edge_attr)
    torch.testing.assert_close(again, out[:6])


@given(st.lists(rows, max_size=12), st.lists(rows, max_size=3), st.integers(0, 13))
def test_a_part_is_that_of_the_whole(events, queries, start):
    events = stream(*sorted(events, key=lambda row: row[2]))
    transform, queries = EventsToDAG(), stream(*queries)
    whole, part = transform(events, queries), transform(events, queries, start)
    start = min(start, len(events))
    states = [*part.carried.tolist(), *range(2 * start, whole.num_nodes)]
    assert part.x.equal(whole.x[states])
    assert part.event_index.size(1) == len(events) - start
    assert whole.event_index[:, start:].equal(torch.tensor(states)[part.event_index])
    assert whole.query_index.equal(torch.tensor(states)[part.query_index])
    first = len(part.carried)
    assert set(part.edge_index[0].tolist()) >= set(range(first))
    assert (part.edge_index[1] >= first).all()
    back = {(states[a], states[b], *more) for a, b, *more in edges_of(part)}
    assert back == {edge for edge in edges_of(whole) if edge[1] >= 2 * start}


def test_attributes_of_a_part():
    """Those of events are cut, others kept."""
    events = stream((0, 1, 1), (1, 2, 2), (0, 2, 3))
    events.y, events.name, events.size_of_all = torch.arange(3), "name", torch.tensor(9)
    part = EventsToDAG()(events, None, 2)
    assert (part.y.tolist(), part.name, part.size_of_all) == ([2], "name", 9)


@pytest.mark.parametrize("edge_dim", [4, None])
def test_parts_of_a_stream_give_what_the_whole_gives(edge_dim):
    """A model of two layers, each of which keeps its states of all events."""
    size, bounds = 300, [0, 1, 2, 150, 150, 299, 300]
    src, dst = torch.randint(12, (2, size))
    events = TemporalData(src=src, dst=dst, t=torch.arange(size) // 2)
    queries = events[torch.randint(size, (40,))]
    queries.t = torch.full_like(queries.t, size)
    lin, transform = torch.nn.Linear(8, 6), EventsToDAG()
    convs = [RGLRUConv(6, heads=2, conv_kernel=1, edge_dim=edge_dim) for _ in range(2)]
    memory = [torch.zeros(2 * size, 7) for _ in convs]

    def out(dag: Data, carried: Tensor) -> tuple[Tensor, list[Tensor]]:
        z, states = lin(dag.x), []
        for conv, past in zip(convs, memory, strict=True):
            attr = None if edge_dim is None else dag.edge_attr
            y, state = conv.resume(z, dag.edge_index, attr, past[carried])
            z = z + y
            states.append(state)
        return z, states

    def layers(dag: Data) -> Tensor:
        z = lin(dag.x)
        for conv in convs:
            attr = None if edge_dim is None else dag.edge_attr
            z = z + conv(z, dag.edge_index, attr)
        return z

    with torch.no_grad():
        whole = transform(events, queries)
        expected = layers(whole)
        torch.testing.assert_close(out(whole, torch.zeros(0).long())[0], expected)
        for start, end in pairwise(bounds):
            asked = queries if end == size else None
            dag = transform(events[:end], asked, start)
            z, states = out(dag, dag.carried)
            for past, state in zip(memory, states, strict=True):
                past[2 * start : 2 * end] = state[dag.event_index.t().flatten()]
            at = whole.event_index[:, start:end]
            torch.testing.assert_close(z[dag.event_index], expected[at])
    torch.testing.assert_close(z[dag.query_index], expected[whole.query_index])


def bad(**changes: Any) -> TemporalData:
    """Two events with some attributes replaced."""
    attributes = {"src": [0, 1], "dst": [1, 2], "t": [3, 4], "msg": [[0.0], [1.0]]}
    return TemporalData(**{
        key: torch.tensor(value) if isinstance(value, list) else value
        for key, value in (attributes | changes).items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"t": [4, 3]}, ValueError, "'events.t' must be sorted, got 4 before 3 at .*1"),
        ({"t": None}, ValueError, "'events.t' must be a tensor.*got None"),
        ({"t": [[3, 4]]}, ValueError, r"'events.t' must be.*\[num_events\]"),
        (
            {"t": [3, 4, 5]},
            ValueError,
            "as many 'src' as 'dst' and 't', got 2, 2 and 3",
        ),
        ({"t": [3.0, float("nan")]}, ValueError, "'events.t' must be finite"),
        ({"t": [3.0, float("inf")]}, ValueError, "'events.t' must be finite"),
        (
            {"src": [0.0, 1.0]},
            TypeError,
            "'events.src' must be integers.*torch.float32",
        ),
        (
            {"dst": [True, False]},
            TypeError,
            "'events.dst' must be integers.*torch.bool",
        ),
        ({"dst": [1j, 2]}, ValueError, "'events.dst' must be a tensor of real"),
        ({"src": [0, -1]}, ValueError, "'events.src' and 'dst' must be .*got -1"),
        ({"msg": [[0.0]]}, ValueError, r"'events.msg'.*each of 2 events, .*\[1, 1\]"),
        ({"msg": [1j, 2]}, TypeError, "'events.msg' must be.*complex"),
    ],
)
def test_bad_events(changes, error, match):
    with pytest.raises(error, match=match):
        EventsToDAG()(bad(**changes))


def test_other_bad_input():
    with pytest.raises(
        TypeError, match=r"'events' must be .*TemporalData.*'HeteroData'"
    ):
        EventsToDAG()(HeteroData())
    with pytest.raises(TypeError, match=r"'queries' must be .*TemporalData.*'Tensor'"):
        EventsToDAG()(bad(), torch.zeros(2))
    with pytest.raises(
        TypeError, match=r"'queries.t' and 'events.t' must both be integers"
    ):
        EventsToDAG()(bad(), bad(t=[3.0, 4.0]))
    with pytest.raises(ValueError, match=r"'queries.t' must be finite"):
        EventsToDAG()(bad(t=[3.0, 4.0]), bad(t=[float("nan"), 4.0]))
    with pytest.raises(ValueError, match=r"'start' must be an integer >= 0.*got -1"):
        EventsToDAG()(bad(), start=-1)


@pytest.mark.parametrize(
    "t",
    [
        torch.tensor([-100, 100], dtype=torch.int8),
        torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
        torch.tensor([-6e4, 6e4], dtype=torch.half),
        torch.tensor([-3e38, 3e38]),
    ],
)
def test_gaps_that_the_type_of_times_cannot_hold(t):
    one = torch.ones(2, dtype=torch.long)
    dag = EventsToDAG()(TemporalData(src=0 * one, dst=one, t=t))
    gap = (float(t[1]) - float(t[0])) or 1.0
    assert dag.edge_attr[:, -1].max().item() == pytest.approx(math.log1p(gap), rel=1e-3)
    assert dag.x.isfinite().all()


def test_many_events_with_messages_of_half_precision():
    zero = torch.zeros(70_000, dtype=torch.long)
    msg = torch.zeros(70_000, 1, dtype=torch.half)
    events = TemporalData(src=zero, dst=zero + 1, t=torch.arange(70_000), msg=msg)
    dag = EventsToDAG()(events)
    assert dag.x.dtype == torch.half
    assert dag.x.isfinite().all()


def test_what_is_refused_of_attributes():
    one = torch.ones(1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"'events' must not have .*'x'"):
        EventsToDAG()(TemporalData(src=one, dst=one, t=one, x=one))
    with pytest.raises(TypeError, match=r"'events.msg' must be a tensor"):
        EventsToDAG()(TemporalData(src=one, dst=one, t=one, msg="a"))
    with pytest.raises(TypeError, match=r"'events.t' must be real numbers"):
        EventsToDAG()(TemporalData(src=one, dst=one, t=one > 0))
