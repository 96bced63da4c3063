"""Trains with PyTorch Lightning: checkpoints, early stopping, several devices.

A ``LightningModule`` wraps a model; the trainer does the rest::

    python examples/with_lightning.py                       # downloads MUTAG, 20 kB
    python examples/with_lightning.py --dataset PROTEINS
    python examples/with_lightning.py --resume checkpoints/last.ckpt
"""

from argparse import ArgumentParser

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch_geometric.data import Batch
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.datasets import FakeDataset, TUDataset

from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel


class Classifier(pl.LightningModule):
    """All arguments are numbers: checkpoints load with ``weights_only=True``."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        channels: int = 32,
        num_layers: int = 3,
        lr: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.curve: list[float] = []  # validation accuracy by epoch

        def layer(index: int) -> GPSLayer:
            mixer = ChimeraConv(channels, channels, heads=4)
            conv = GatedGCNConv(channels, channels)
            return GPSLayer(channels, conv, mixer)

        self.model = GraphModel(
            in_channels, channels, num_classes, layers=layer, num_layers=num_layers
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(**self.model.inputs(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.curve.append(float(self.trainer.callback_metrics["val_accuracy"]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, part: str, batch: Batch) -> None:
        out = self(batch)
        values = {
            f"{part}_loss": F.cross_entropy(out, batch.y),
            f"{part}_accuracy": (out.argmax(dim=-1) == batch.y).float().mean(),
        }
        self.log_dict(values, batch_size=batch.num_graphs, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dataset",
        default="MUTAG",
        help="of the TUDataset collection, with features of nodes",
    )
    parser.add_argument("--root", default="data")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--out", default="with_lightning.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="random graphs, one epoch")
    args = parser.parse_args(argv)

    pl.seed_everything(args.seed)
    if args.smoke:
        dataset = FakeDataset(40, 20, 3, num_channels=7, num_classes=2)
    else:
        try:
            dataset = TUDataset(args.root, args.dataset).shuffle()
        except OSError as error:
            raise SystemExit(
                f"{args.dataset} could not be downloaded to {args.root}: {error}. Copy "
                "the folder from where this has run with a network, or pass --smoke"
            ) from None
    end_train, end_val = len(dataset) * 7 // 10, len(dataset) * 17 // 20
    data = LightningDataset(
        dataset[:end_train],
        dataset[end_train:end_val],
        dataset[end_val:],
        batch_size=16,
    )

    checkpoint = ModelCheckpoint(
        "checkpoints", monitor="val_loss", save_last=True, enable_version_counter=False
    )
    trainer = pl.Trainer(
        max_epochs=1 if args.smoke else args.epochs,
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=10)],
        gradient_clip_val=1.0, log_every_n_steps=1, logger=False, accelerator="auto",
    )  # fmt: skip
    model = Classifier(dataset.num_features, dataset.num_classes)
    trainer.fit(model, data, ckpt_path=args.resume, weights_only=True)

    best = Classifier.load_from_checkpoint(
        checkpoint.best_model_path, weights_only=True
    )
    (result,) = trainer.test(best, data, verbose=False)
    print(
        f"Test accuracy of the best epoch on validation: {result['test_accuracy']:.3f}"
    )
    plt.plot(model.curve, "o-")
    plt.gca().set(xlabel="epoch", ylabel="validation accuracy")
    plt.savefig(args.out, dpi=100)
    print(f"Picture: {args.out}")
    return result["test_accuracy"]


if __name__ == "__main__":
    main()
