"""Hugging Face's Trainer under Flyball: a small GPT-2 learns to count. Needs `pip install transformers accelerate`.

    python examples/hugging_face.py                                  without Flyball
    flyball run --job counts --nproc-per-node 2 --injectable examples/hugging_face.py
    flyball inject kill --job counts --rank 1                        in another shell: a second later it trains on

Everything that Flyball needs is the import and the line with `FlyballTrainerCallback`. The folder OUTPUT then has the
Trainer's checkpoints, the weights and the history of the losses, which are the same to the last bit, killed or not.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckpt_engine.frameworks.huggingface import FlyballTrainerCallback


class Counting(Dataset):
    """Rows of 64 numbers, each one more than the number before it."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(64) + index) % 100
        return {"input_ids": row, "labels": row}


def main(output: str = "counts") -> None:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        max_steps=250,
        logging_steps=3,
        save_steps=50,
        report_to=[],
        use_cpu=True,
        ddp_find_unused_parameters=True,  # keeps the order in which gradients are added: see train_gpt.py
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=FlyballTrainerCallback(trainer).resume_from())
    trainer.save_state()
    trainer.save_model()
    trainer.accelerator.end_training()  # else a rank that leaves early resets connections of the others


if __name__ == "__main__":
    main(*sys.argv[1:])
