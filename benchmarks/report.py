"""Reports of benchmarks: tables, targets and a plot."""

import os
from pathlib import Path
from typing import Any

from timing import table

__all__ = ["plot", "report", "targets", "verdicts"]

INVERSES = (
    "float64 inverse by graph",
    "float64 inverse, padded",
    "float64 inverse of all",
    "float64 reference",
)
#: Bounds and measured values, by description.
Figures = dict[str, tuple[float, float | None]]
VERDICTS = {None: "not measured", True: "reached", False: "MISSED"}


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for mixing layers, with measured values."""
    at_most: Figures = {}
    at_least: Figures = {}
    rows = [row for row in results["layers"] if row["workload"].endswith("batch of 64")]
    by_auto = {row["case"]: row.get("by_auto") for row in rows}
    medians = {row["case"]: row["total"]["median"] for row in rows if "total" in row}
    attention = by_auto.get("GPSConv multihead")
    by_attention = None if attention is None else 1 / attention
    at_most["batch of 64: auto / GPSConv multihead"] = 0.6, by_attention
    both = [medians.get(name) for name in ("GatedDeltaConv", "GPSConv multihead")]
    delta = both[0] / both[1] if all(both) else None  # "auto" may not have been run
    at_most["batch of 64: GatedDeltaConv / GPSConv multihead"] = 1, delta
    for name in INVERSES:
        at_least[f"batch of 64: {name} / auto"] = 100, by_auto.get(name)
    steps = {row["from"]: row for row in results["growth"] if row["case"] == "auto"}
    for nodes in (1024, 4096):
        step = steps.get(nodes, {"time": None, "memory": None})
        text = f"planar, {nodes:,} -> {4 * nodes:,} nodes: auto, growth of"
        at_most[f"{text} time"] = 6, step["time"]
        at_most[f"{text} memory"] = 5, step["memory"]
    errors = [row["worst"] for row in results["errors"]]
    at_most["largest relative error"] = 1e-5, max(errors, default=None)
    calls = [row["total"] for row in results["first_call"]]
    at_most["first call, forward and backward, s"] = 2, max(calls, default=None)
    dataset = results["dataset"] or {"graphs": 0}
    whole = dataset["seconds"] if dataset["graphs"] == 15_535 else None
    at_most["structure of all 15,535 Peptides-func graphs, s"] = 30, whole
    return verdicts(at_most, at_least)


def verdicts(at_most: Figures, at_least: Figures) -> list[dict[str, Any]]:
    """Bounds next to values, which are None if they were not measured."""
    rows = []
    for sign, figures in (("<=", at_most), (">=", at_least)):
        for what, (bound, value) in figures.items():
            reached = None
            if value is not None:
                reached = value <= bound if sign == "<=" else value >= bound
            row = {"what": what, "target": f"{sign} {bound:g}", "value": value}
            rows.append(row | {"reached": reached})
    return rows


def report(results: dict[str, Any]) -> str:
    """A text with everything that was measured."""
    host = results["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in host["versions"].items())
    blocks = [
        f"{host['gpu'] or host['cpu']}, {host['cores']} cores, "
        f"{host['threads']} threads, load {host['load_at_start']:.1f} before\n"
        f"Python {host['python']}, {versions}"
    ]
    if host["load_at_start"] > 0.5:
        blocks.append("The machine was busy: times are too long, ratios are rough.")
    if results["errors"]:
        row = max(results["errors"], key=lambda row: row["worst"])
        where = max(row["errors"], key=row["errors"].get)
        blocks.append(
            f"Exactness: {len(results['errors'])} comparisons of an output and all "
            f"gradients with float64.\n  Largest relative error {row['worst']:.1e} "
            f"({row['case']}, {row['workload']}, {where})"
        )
    for name in dict.fromkeys(row["workload"] for row in results["layers"]):
        blocks.append(_layers([x for x in results["layers"] if x["workload"] == name]))
    for part in dict.fromkeys(row["part"] for row in results["growth"]):
        blocks.append(_growth([x for x in results["growth"] if x["part"] == part]))
    if results.get("rates"):
        head = ["", "graphs", "edges", "graphs a second", "ms a graph"]
        body = [
            [row["name"], f"{row['graphs']:,}", f"{row['edges']:,}",
             f"{row['rate']:,.0f}", f"{1e3 / row['rate']:.3g}"]
            for row in results["rates"]
        ]  # fmt: skip
        blocks.append(f"Structure, one graph after the other\n{table([head, *body])}")
    if results.get("structure"):
        head = ["", "new graphs", "with stored rank", "seen before", "entries of L"]
        body = [
            [
                row["workload"],
                *(f"{1e3 * row[key]:.2f}" for key in ("cold", "with rank", "warm")),
                f"{row['fill']:,}",
            ]
            for row in results["structure"]
        ]
        blocks.append(f"Order and pattern of the factors, ms\n{table([head, *body])}")
    if results.get("dataset"):
        row = results["dataset"]
        blocks.append(
            f"AddEliminationOrder on {row['graphs']:,} graphs of {row['name']}: "
            f"{row['seconds']:.2f} s"
        )
    if results.get("first_call"):
        keys = ["import torch", "import", "forward", "total"]
        head = ["form", "import torch, PyG", "and pyg_chimera", "forward", "+ backward"]
        rows = results["first_call"]
        body = [[row["form"], *(f"{row[key]:.2f}" for key in keys)] for row in rows]
        title = "First call in a fresh process, compiled code on disk, s"
        blocks.append(f"{title}\n{table([head, *body])}")
    body = [
        [row["what"], row["target"], _number(row["value"]), VERDICTS[row["reached"]]]
        for row in results["targets"]
    ]
    blocks.append(f"Figures to reach\n{table(body)}")
    return "\n\n".join(blocks)


def _layers(rows: list[dict[str, Any]]) -> str:
    head = [
        "",
        "forward",
        "+ backward",
        "fastest",
        f"x {rows[0]['base']}",
        "peak memory",
        "runs",
    ]
    body = []
    for row in rows:
        cells = ["-"] * 5 + [row["problem"]]
        if row["problem"] is None:
            forward, total, memory = row["forward"], row["total"], row["memory"]
            times = forward["median"], total["median"], total["min"]
            cells = [f"{1e3 * seconds:.1f}" for seconds in times]
            cells.append(_number(row["by_auto"]))
            cells.append("-" if memory is None else f"{memory / 2**20:.1f}")
            cells.append(str(len(total["all"])))
        body.append([row["case"], *cells])
    name, nodes, edges = (rows[0][key] for key in ("workload", "nodes", "edges"))
    title = f"{name}: {nodes:,} nodes, {edges:,} edges; medians in ms, peaks in MiB"
    return f"{title}\n{table([head, *body])}"


def _growth(rows: list[dict[str, Any]]) -> str:
    steps = list(dict.fromkeys((row["from"], row["to"]) for row in rows))
    cells = {
        (row["case"], row["from"]): f"{_number(row['time'])} ({_number(row['memory'])})"
        for row in rows
    }
    body = [
        [case, *(cells.get((case, first), "-") for first, _ in steps)]
        for case in dict.fromkeys(row["case"] for row in rows)
    ]
    head = ["", *(f"{first:,} -> {last:,}" for first, last in steps)]
    title = f"Growth of time (and memory) with four times the nodes: {rows[0]['part']}"
    return f"{title}\n{table([head, *body])}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def plot(layers: list[dict[str, Any]], path: Path, xlabel: str = "nodes") -> None:
    """Time and memory over the number of nodes, with logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = list(dict.fromkeys(row["part"] for row in layers))
    figure, axes = plt.subplots(
        len(parts), 2, figsize=(12, 4.5 * len(parts)), squeeze=False
    )
    for (time_axis, memory_axis), part in zip(axes, parts, strict=True):
        fine = [row for row in layers if row["part"] == part and not row["problem"]]
        for i, name in enumerate(dict.fromkeys(row["case"] for row in fine)):
            rows = [row for row in fine if row["case"] == name]
            nodes = [row["nodes"] for row in rows]
            style = {"marker": "o^s"[i % 3], "markersize": 4, "color": f"C{i % 10}"}
            style |= {"label": name, "linewidth": 2.5 if name == rows[0]["base"] else 1}
            time_axis.loglog(nodes, [row["total"]["median"] for row in rows], **style)
            memory = [(row["memory"] or float("nan")) / 2**20 for row in rows]
            memory_axis.loglog(nodes, memory, **style)
        time_axis.set(title=part, xlabel=xlabel, ylabel="forward and backward, s")
        memory_axis.set(title=part, xlabel=xlabel, ylabel="peak memory, MiB")
        for axis in (time_axis, memory_axis):
            axis.grid(which="both", alpha=0.2)
        if fine:
            memory_axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    part_file = path.with_name(path.name + ".part")
    figure.savefig(part_file, format="png", dpi=150)
    os.replace(part_file, path)
