"""Trains a small network on handwritten digits with Lightning, alone or as a worker.

python examples/lightning_digits.py
psworker run --coordinator HOST:PORT --nproc 2 -- examples/lightning_digits.py
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.integrations.lightning import PSStrategy


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_index):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_index):
        images, labels = batch
        correct = self.layers(images).argmax(1) == labels
        self.log("accuracy", correct.float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


def load_data():
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=293, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.tensor, split)
    return TensorDataset(train_x.float(), train_y), TensorDataset(
        test_x.float(), test_y
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--out", help="folder for the final checkpoint")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train_set, test_set = load_data()
    trainer = pl.Trainer(
        strategy=PSStrategy(),
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(
        model,
        DataLoader(train_set, options.batch_size, shuffle=not options.in_order),
        DataLoader(test_set, batch_size=300),
    )
    accuracy = trainer.callback_metrics["accuracy"]
    print(f"{trainer.global_step} steps, test accuracy {accuracy:.3f}")
    if options.out:
        trainer.save_checkpoint(f"{options.out}/digits.ckpt")


if __name__ == "__main__":
    main()
