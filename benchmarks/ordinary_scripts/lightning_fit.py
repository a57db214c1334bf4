"""Lightning with validation and checkpoints, as torchrun would start it. Does not use Flyball."""
# corpus: ranks=2 needs=lightning

import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loader(rows: int, *, shuffle: bool) -> DataLoader:
    x = torch.randn(rows, 128)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=shuffle)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=3,
            default_root_dir=folder,
            logger=False,
            callbacks=[ModelCheckpoint(folder, monitor="val_loss")],
        )
        trainer.fit(Regression(), loader(8000, shuffle=True), loader(4000, shuffle=False))
