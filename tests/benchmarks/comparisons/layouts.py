"""Raw files of small made-up data sets, as downloads of the real ones leave them."""

from pathlib import Path

import torch

SPLITS = (("train", 12), ("val", 5), ("test", 7))


def lrgb_graph(name: str, generator: torch.Generator) -> tuple:
    """One graph as in the files that LRGBDataset downloads."""

    def integers(high: int, *shape: int):
        return torch.randint(0, high, shape, generator=generator)

    n = int(integers(5, 1)) + 4
    one_way = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    x, edge_attr = integers(2, n, 9), integers(2, edge_index.size(1), 3)
    if name == "peptides-func":
        return x, edge_attr, edge_index, integers(2, 1, 10).float()
    return x, edge_attr, edge_index, torch.randn(1, 11, generator=generator)


def write_lrgb(root: Path, name: str) -> None:
    """The files of an ``LRGBDataset``."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for seed, (split, size) in enumerate(SPLITS):
        generator = torch.Generator().manual_seed(seed)
        graphs = [lrgb_graph(name, generator) for _ in range(size)]
        torch.save(graphs, raw / f"{split}.pt")


def write_tudataset(root: Path, name: str, labelled: bool, size: int = 36) -> None:
    """The files of a ``TUDataset`` of paths (class 1) and stars (class 2)."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    edges, nodes, labels, first = [], [], [], 1
    for i in range(size):
        n, is_star = 4 + i % 3, i >= size // 2
        for v in range(1, n):
            u = 0 if is_star else v - 1
            edges += [(first + u, first + v), (first + v, first + u)]
        nodes += [i + 1] * n
        labels.append(1 + is_star)
        first += n

    def write(kind: str, rows: list) -> None:
        (raw / f"{name}_{kind}.txt").write_text("".join(f"{row}\n" for row in rows))

    write("A", [f"{u}, {v}" for u, v in edges])
    write("graph_indicator", nodes)
    write("graph_labels", labels)
    if labelled:
        write("node_labels", [v % 3 for v in range(len(nodes))])
        write("edge_labels", [(u + v) % 2 for u, v in edges])
