"""Writes the table of `docs/layers.md`: what each layer takes and supports.

    python docs/layer_table.py

Columns that code can answer are read from the layers; the others are in `ROWS`, and
`tests/test_layer_table.py` tries them.
"""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

from pyg_chimera import nn

PAGE = Path(__file__).with_name("layers.md")
MARKS = "<!-- by docs/layer_table.py -->\n", "<!-- until here -->\n"


class Row(NamedTuple):
    """What cannot be read from a layer."""

    graphs: str  #: of which the words any, DAG, path, grid and order are tried
    cost: str  #: of V nodes, E edges and C channels, with N states of each
    start: str  #: the option that matters most
    gpu: str = ""  #: whether Triton kernels compute it, or for which graphs
    onnx: bool = True


_DELTA = r"$n^3$ a graph of $n$ nodes; DAG: $(V + E) N C$"
_PAIRS = "pairs within $k$ steps, times $C$"
_TWO = "DAG; any, as two DAGs"
ROWS = {
    "ChimeraConv": Row("any", "sparse factors, times $N C$", "reach=(4, 64)", "✓"),
    "ChimeraDAGConv": Row(_TWO, "$(V + E) N C$", "reach=(4, 64)", "✓"),
    "ChimeraGridConv": Row("grid, sequence", "$V N C$", "num_dags=4", "✓"),
    "ChimeraPathConv": Row("undirected path", "$V N C$", "reach=(4, 64)", "✓"),
    "PLSTMConv": Row(
        "DAG; order; any, as two DAGs", "pairs of edges, times $N C$", 'mode="P"', "✓"
    ),
    "PLSTMGridConv": Row("grid, sequence", "$V N C$", 'mode="P"', "✓"),
    "GraphMambaConv": Row("any, in an order", "$V N C$", 'order="degree"', "✓"),
    "GatedDeltaConv": Row("any, DAG", _DELTA, "state_channels=16", "DAGs"),
    "RGLRUConv": Row(_TWO, "$(V + E) C$", "reach=(1, 1000)", "paths"),
    "KHopAttentionConv": Row("any", _PAIRS, "k=4"),
    "GatedGCNConv": Row("any", "$(V + E) C$", 'norm="graph_batch_norm"'),
    "SurpriseGatedDeltaConv": Row(
        _TWO, "$(V + E) N C$, by levels", "state_channels=16", onnx=False
    ),
    "DifferentialGatedDeltaConv": Row(
        "any, DAG", "twice `GatedDeltaConv`", "depth=1", "DAGs"
    ),
    "HierarchicalMemoryConv": Row(
        _TWO, "three memories, one by levels", "state_channels=16", "in part", False
    ),
    "DifferentialAttentionConv": Row("any", _PAIRS, "depth=1"),
    "LatentAttentionConv": Row("any", _PAIRS, "k=4"),
    "WindowAttentionConv": Row("DAG; any, with `pos`", _PAIRS, "k=128"),
}
HEADER = (
    *("layer", "graphs", "edge features", "lazy sizes", "batches", "step by step"),
    *("ONNX", "GPU kernels", "cost", "start with"),
)


def convs() -> list[str]:
    """The names of all public convolutions."""
    return [name for name in nn.__all__ if name.endswith("Conv")]


def options(row: Row) -> dict[str, Any]:
    """The option to start with, as keyword arguments."""
    return eval(f"dict({row.start})")


def made(name: str, *args: Any, **kwargs: Any) -> Any:
    """A layer, or None if it has no such argument."""
    try:
        return getattr(nn, name)(*args, **kwargs)
    except (TypeError, ValueError):
        return None


def takes_edges(name: str) -> bool:
    """Whether a layer reads edge features."""
    return made(name, 8, 8, edge_dim=3) is not None


def is_lazy(name: str) -> bool:
    """Whether the number of input channels may be left open."""
    return made(name, -1, 8) is not None


def takes_batches(name: str) -> bool:
    """Whether a layer is told the graph of each node."""
    return "batch" in inspect.signature(getattr(nn, name).forward).parameters


def continued(name: str) -> str:
    """What it continues: sequences, by `step`, and DAGs, by `resume`."""
    ways = {"step": "sequences", "resume": "DAGs"}
    return ", ".join(x for way, x in ways.items() if hasattr(getattr(nn, name), way))


def table() -> str:
    """The table in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, row in ROWS.items():
        answers = takes_edges(name), is_lazy(name), takes_batches(name)
        lines.append((
            f"{{class}}`~pyg_chimera.nn.{name}`", row.graphs, *map(mark, answers),
            continued(name), mark(row.onnx), row.gpu, row.cost, f"`{row.start}`",
        ))  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mark(answer: bool) -> str:
    """A cell that is marked, or empty."""
    return "✓" if answer else ""


def page() -> str:
    """The text of the page with the table as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + "\n" + table() + "\n" + MARKS[1] + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
