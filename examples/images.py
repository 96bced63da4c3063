"""Classifies handwritten digits as grid graphs of pixels.

Each pixel is a node, and layers carry states along the rows and columns of the grid, in
all four directions::

    python examples/images.py                      # 25 seconds, no download
    python examples/images.py --mixer chimera      # or graph_mamba, attention

A batch may hold images of different sizes.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from pyg_chimera.nn import ImageClassifier
from pyg_chimera.transforms import ImageToGraph

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load() -> list[Data]:
    """The 1,797 digits of scikit-learn, 8 x 8 pixels each, as graphs."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    to_graph, graphs = ImageToGraph(patch_size=1), []
    for image, label in zip(images, labels.tolist(), strict=True):
        graph = to_graph(image)  # x [64, 1], edge_index, pos, height and width
        graph.y = torch.tensor([label])
        graphs.append(graph)
    return graphs


@torch.no_grad()
def accuracy(model: ImageClassifier, loader: DataLoader) -> float:
    model.eval()
    right = 0
    for batch in loader:
        batch = batch.to(DEVICE)
        out = model(**model.inputs(batch))
        right += int((out.argmax(dim=-1) == batch.y).sum())
    return right / len(loader.dataset)


@torch.no_grad()
def draw(model: ImageClassifier, graphs: list[Data], out: str) -> None:
    """Some digits, and what the model takes them for: in red where it is wrong."""
    batch = next(iter(DataLoader(graphs, 24))).to(DEVICE)
    found = model.eval()(**model.inputs(batch)).argmax(dim=-1).tolist()
    _, axes = plt.subplots(3, 8, figsize=(8, 3.6), layout="constrained")
    for ax, graph, digit in zip(axes.flat, graphs, found, strict=False):
        ax.imshow(graph.x.view(8, 8), cmap="gray_r")
        ax.set_title(digit, color="black" if digit == int(graph.y) else "red")
        ax.axis("off")
    plt.savefig(out, dpi=200)
    print(f"Picture: {out}")


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    mixers = ["chimera", "plstm", "graph_mamba", "attention"]
    parser.add_argument("--mixer", choices=mixers, default="plstm")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", default="images.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few images")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    graphs = load()
    order = torch.randperm(len(graphs)).tolist()
    graphs = [graphs[i] for i in (order[:200] if args.smoke else order)]
    cut = 4 * len(graphs) // 5
    train = DataLoader(graphs[:cut], 32, shuffle=True)
    test = DataLoader(graphs[cut:], 256)

    # The other mixers know the grid.
    position = "learned" if args.mixer == "attention" else None
    model = ImageClassifier(
        in_channels=1, channels=32, out_channels=10, num_layers=2, mixer=args.mixer,
        position=position, size=(8, 8) if position else None,
    ).to(DEVICE)  # fmt: skip
    epochs = 1 if args.smoke else args.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(train)
    )
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in train:
            batch = batch.to(DEVICE)
            loss = F.cross_entropy(model(**model.inputs(batch)), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        found = accuracy(model, test)
        print(f"epoch {epoch}: last loss {loss.item():.3f}, test accuracy {found:.3f}")
    draw(model, graphs[cut:], args.out)
    return found


if __name__ == "__main__":
    main()
