"""Raw files of small made-up data sets, as downloads of the real ones leave them."""

import pickle
from pathlib import Path

import pandas as pd
import torch
from torch_geometric.datasets import GNNBenchmarkDataset

SPLITS = (("train", 12), ("val", 5), ("test", 7))
#: The data sets of the Long Range Graph Benchmark.
LRGB = ("peptides-func", "peptides-struct", "pascalvoc-sp", "coco-sp", "pcqm-contact")
#: The labels of COCO that LRGBDataset renumbers, as the raw files have them.
COCO_LABELS = [0, 1, 13, 27, 90]


def lrgb_graph(name: str, generator: torch.Generator) -> tuple:
    """One graph as in the files that LRGBDataset downloads."""

    def integers(high: int, *shape: int):
        return torch.randint(0, high, shape, generator=generator)

    n = int(integers(5, 1)) + 4
    one_way = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    num_edges = edge_index.size(1)
    if name.endswith("-sp"):
        x = torch.rand(n, 14, generator=generator, dtype=torch.double) * 300
        edge_attr = torch.rand(num_edges, 2, generator=generator, dtype=torch.double)
        classes = COCO_LABELS if name == "coco-sp" else range(21)
        y = [classes[i] for i in integers(len(classes), n)]
        return x, edge_attr, edge_index, y
    x, edge_attr = integers(2, n, 9), integers(2, num_edges, 3)
    if name == "pcqm-contact":
        edge_label_index = integers(n, 2, 6)
        return x, edge_attr, edge_index, edge_label_index, torch.arange(6) % 2
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
        if name.endswith("-sp"):
            (raw / f"{split}.pickle").write_bytes(pickle.dumps(graphs))
        else:
            torch.save(graphs, raw / f"{split}.pt")


def gnn_benchmark_graph(name: str, generator: torch.Generator) -> dict:
    """One graph as in the file that ``GNNBenchmarkDataset`` downloads."""
    n = int(torch.randint(4, 9, (1,), generator=generator))
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    if name in ("MNIST", "CIFAR10"):  # nearest neighbours, which is not mutual
        second = torch.stack([ring[0], (ring[1] + 1) % n])
        graph = {"edge_index": torch.cat([ring, second], dim=1)}
        colours = 1 if name == "MNIST" else 3
        graph["x"] = torch.rand(n, colours, generator=generator)
        graph["pos"] = torch.rand(n, 2, generator=generator)
        graph["edge_attr"] = torch.rand(2 * n, generator=generator)
        graph["y"] = torch.randint(10, (1,), generator=generator)
        return graph
    graph = {"edge_index": torch.cat([ring, ring.flip(0)], dim=1)}
    columns, classes = (3, 2) if name == "PATTERN" else (7, 6)
    kind = torch.randint(columns, (n,), generator=generator)
    graph["x"] = torch.nn.functional.one_hot(kind, columns).float()
    graph["y"] = torch.randint(classes, (n,), generator=generator)
    return graph


def write_gnn_benchmark(root: Path, name: str) -> None:
    """The file of a ``GNNBenchmarkDataset``."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    graphs = [
        [gnn_benchmark_graph(name, generator) for _ in range(size)]
        for _, size in SPLITS
    ]
    file = GNNBenchmarkDataset.urls[name].rpartition("/")[2]
    torch.save(graphs, raw / file.replace(".zip", ".pt"))


def write_malnet_tiny(root: Path) -> None:
    """The files of ``MalNetTiny``: stars of calls, with one that calls itself."""
    kinds = ("addisplay", "adware", "benign", "downloader", "trojan")
    raw = root / "raw"
    (raw / "split_info_tiny" / "type").mkdir(parents=True)
    for split, size in SPLITS:
        names = [f"{kinds[i % 5]}/family/{split}{i}" for i in range(size)]
        for i, name in enumerate(names):
            path = raw / "malnet-graphs-tiny" / f"{name}.edgelist"
            path.parent.mkdir(parents=True, exist_ok=True)
            edges = [f"0\t{j}" for j in range(i + 2)]
            path.write_text("\n".join(["# a header"] * 5 + edges) + "\n")
        lines = "".join(f"{name}\n" for name in names)
        (raw / "split_info_tiny" / "type" / f"{split}.txt").write_text(lines)


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


def write_code2(root: Path, size: int = 20) -> None:
    """The files of ``ogbg-code2``, of paths and stars; some names are alike."""
    nodes = [4 + i % 3 for i in range(size)]
    edges, features, depths, names = [], [], [], []
    for i, n in enumerate(nodes):
        is_star = i % 2 == 1
        edges += [(0 if is_star else v - 1, v) for v in range(1, n)]
        features += [(v % 5, 7 * i % 11) for v in range(n)]
        depths += [min(v, 1) if is_star else 10 * v for v in range(n)]
        names.append("get star" if is_star else f"walk path {i}")
    order = [v for n in nodes for v in range(n)]
    rows = list(range(size))
    splits = {"train": rows[:-8], "valid": rows[-8:-4], "test": rows[-4:]}
    tables = {
        "raw/edge": edges,
        "raw/node-feat": features,
        "raw/node_is_attributed": [v % 2 for v in order],
        "raw/node_dfs_order": order,
        "raw/node_depth": depths,
        "raw/num-node-list": nodes,
        "raw/num-edge-list": [n - 1 for n in nodes],
        "raw/graph-label": names,
        **{f"split/project/{name}": part for name, part in splits.items()},
    }
    folder = root / "ogbg_code2"
    for name in ("raw", "split/project", "mapping"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        path = folder / f"{name}.csv.gz"
        pd.DataFrame(table).to_csv(path, index=False, header=False)
    for name, number in (("type", 5), ("attr", 11)):
        table = pd.DataFrame({f"{name} idx": range(number), name: range(number)})
        table.to_csv(folder / "mapping" / f"{name}idx2{name}.csv.gz", index=False)
    (folder / "RELEASE_v1.txt").touch()


#: The headers of GLUE's files (of MNLI's, those of its dev files); CoLA's have none.
GLUE = {
    "cola": "source label mark sentence",
    "sst2": "sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 "
    "score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse "
    "sentence1_parse sentence2_parse sentence1 sentence2 label1 label2 gold_label",
    "qnli": "index question sentence label",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
}


def write_glue(
    root: Path, task: str, texts: tuple[str, ...], label: str, labels: list[str]
) -> None:
    """The files of one of GLUE's tasks, with numbered sentences, and marks in them."""
    header = GLUE[task].split("|" if "|" in GLUE[task] else " ")
    dev = ["dev_matched", "dev_mismatched"] if task == "mnli" else ["dev"]
    for name in ("train", *dev, "test"):
        columns = [x for x in header if name != "test" or x != label]
        lines = [] if task == "cola" and name != "test" else ["\t".join(columns)]
        for i in range(12):
            row = {column: f"{column} {i}" for column in columns}
            row |= {text: f"\"It's {text} {i}, NA" for text in texts}
            row[label] = labels[i % len(labels)]
            lines.append("\t".join(row[column] for column in columns))
        mark = "\ufeff" if task == "mrpc" else ""  # as Windows writes it
        end = "\r\n" if task == "qnli" else "\n"
        raw = mark + end.join(lines) + end
        (root / f"{name}.tsv").write_bytes(raw.encode())
