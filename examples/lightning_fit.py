"""Lightning under Flyball: a regression that survives a kill. Needs `pip install lightning`.

    python examples/lightning_fit.py                                 without Flyball
    flyball run --job sums --nproc-per-node 2 --injectable examples/lightning_fit.py
    flyball inject kill --job sums --rank 1                          in another shell: a second later it trains on

Everything that Flyball needs is the import and `FlyballCallback()`. `FlyballCheckpointIO()` is for the checkpoints of
ModelCheckpoint. The file OUTPUT/last.ckpt then has the weights, which are the same to the last bit, killed or not.
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine.frameworks.lightning import FlyballCallback, FlyballCheckpointIO


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def loader(rows: int, *, shuffle: bool) -> DataLoader:
    x = torch.randn(rows, 128)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=shuffle)


def main(output: str = "sums") -> None:
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=4,
        default_root_dir=output,
        logger=False,
        enable_progress_bar=False,
        plugins=[FlyballCheckpointIO()],
        callbacks=[FlyballCallback(), ModelCheckpoint(output, monitor="val_loss", enable_version_counter=False)],
    )
    trainer.fit(Regression(), loader(4000, shuffle=True), loader(1000, shuffle=False))
    trainer.save_checkpoint(f"{output}/last.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
