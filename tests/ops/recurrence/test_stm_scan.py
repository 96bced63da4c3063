"""What is special to `stm_scan`: line edges, components, and errors of both."""

import pytest
import torch
from asserts import assert_near
from operators import (
    OPERATORS,
    Structure,
    assert_results,
    computed,
    expected_of,
    line_edges,
    make_case,
)

from pyg_chimera.ops import CycleError, explain, line_graph, multitree, stm_scan

OPERATOR = OPERATORS["stm_scan"]
VARIANTS = OPERATOR.variants
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
#: Two diamonds in a row, and one more way around; a duplicate edge; an isolated node.
EDGES = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (0, 6), (3, 5)]


def on(edges, num_nodes, lines=None, size=(2, 1, 3, 4)):
    """Random inputs on some edges, with all line edges by default."""
    edges = torch.tensor(edges).t()
    lines = line_edges(edges) if lines is None else lines
    graph = torch.zeros(num_nodes, dtype=torch.long)
    return make_case(OPERATOR, Structure(graph, edges, lines), size)


@variants
def test_one_component_is_a_number(options):
    case = on(EDGES, 8, size=(2, 1, 3, 4, 1))
    names = ("source", "transition", "mark")
    plain = {name: case.floats[name].flatten(1) for name in names}
    assert_near(case(**options), case(**options, **plain), 1e-12)


@variants
def test_some_line_edges(options):
    """All, those of a multitree, a single one, none, or the same one twice."""
    edges = torch.tensor(EDGES).t()
    lines = line_graph(edges, 8).edge_index
    kept = lines[:, multitree(lines, len(EDGES))]
    assert kept.size(1) < lines.size(1)
    for some in (lines, kept, lines[:, :1], lines[:, :0], lines[:, [0, 3, 0, 0]]):
        case = on(EDGES, 8, some)
        assert_results(computed(case, options), expected_of(case))


@variants
def test_dags_side_by_side(options):
    """An undirected path there and back: no line edge turns around."""
    lines = torch.tensor([[0, 1, 5, 4], [1, 2, 4, 3]])
    case = on([(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)], 4, lines)
    assert_results(computed(case, options), expected_of(case))


def test_directions_are_never_altered():
    """An edge against the order of nodes carries what its own source writes."""
    case = on([(3, 1), (1, 2), (2, 0)], 4)
    out = case(direct=torch.zeros(4, 2))
    assert out[3].abs().max() == 0  # nothing leads to it
    assert out[0].abs().max() > 0


def of_shape(*shape):
    return torch.ones(shape, dtype=torch.double)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source": of_shape(10, 2, 3)}, r"'mark' must be .*heads, components\]"),
        ({"source": of_shape(10, 2, 3), "mark": of_shape(10, 2, 3)},
         r"'transition' must be \[line edges, heads, components, components\]"),
        ({"direct": of_shape(8, 3)}, r"'direct' must be \[nodes, heads\] = \[8, 2\]"),
        ({"transition": of_shape(11, 2) / 0}, "but line edge 0 has inf in head 0"),
        ({"batch": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])}, "of graph 0 to node 3 of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(changes, match):
    inputs = {**on(EDGES, 8).inputs, **changes}
    for call in (stm_scan, lambda **x: explain("stm_scan", **x)):
        with pytest.raises(ValueError, match=match):
            call(**inputs)


@variants
@pytest.mark.parametrize("components", [(), (2,)])
def test_cycle_is_named(options, components):
    with pytest.raises(CycleError, match=r"1 -> 2 -> 3|2 -> 3 -> 1|3 -> 1 -> 2"):
        on([(3, 1), (1, 2), (2, 3)], 4, size=(2, 1, 3, 4, *components))(**options)
    with pytest.raises(CycleError, match="self-loop at node 1"):
        on([(0, 1), (1, 1)], 2, size=(2, 1, 3, 4, *components))(**options)


@variants
def test_bad_line_edges_are_named(options):
    case = on([(0, 1), (1, 2), (2, 3)], 4)
    for lines, match in (
        ([[1, 2], [0, 1]], r"edge 1 \(1 -> 2\) to edge 0 .* against"),
        ([[0, 0], [1, 2]], r"edge 0 \(0 -> 1\) to edge 2 .* another"),
        ([[0, 1], [1, 3]], r"state indices in .* = \[0, 3\), got 3 "),
    ):
        with pytest.raises(ValueError, match=match):
            case(line_edge_index=torch.tensor(lines), **options)
    shuffled = case.structure.edge_index[:, [1, 0, 2]]
    with pytest.raises(ValueError, match="line edge 0 leads from edge 0"):
        case(edge_index=shuffled, **options)
