"""Runs of benchmarks, and their reports: tables, targets and a plot."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from json_files import write_json
from timing import machine, show, table, write_figure

__all__ = ["report", "run", "verdicts"]

#: Bounds and measured values, by description.
Figures = dict[str, tuple[float, float | None]]
VERDICTS = {None: "not measured", True: "reached", False: "MISSED"}


def run(
    args: Namespace,
    cases: dict[str, Any],
    settings: Iterable[str],
    measure: Callable[[Namespace], dict[str, Any]],
    targets: Callable[[dict[str, Any]], list[dict[str, Any]]],
    plotted: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    xlabel: str = "nodes",
) -> None:
    """Measures the requested cases, prints a report, and writes the results and a plot.

    `settings` are the arguments to write down, `plotted` selects the rows to plot.
    """
    torch.set_num_threads(args.threads)
    for name in set(cases) - set(args.cases):
        del cases[name]
    results: dict[str, Any] = {
        "machine": machine(args.device),
        "settings": {name: getattr(args, name) for name in settings},
    }
    results |= measure(args)
    results["targets"] = targets(results)
    show("")
    print(report(results))
    write_json(args.out, results)
    print(f"\nWritten: {args.out}")
    if rows := plotted(results["layers"]):
        plot(rows, args.out.with_suffix(".png"), xlabel)
        print("and a plot beside it.")


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


def plot(layers: list[dict[str, Any]], path: Path, xlabel: str) -> None:
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
    write_figure(path, figure, dpi=150)
