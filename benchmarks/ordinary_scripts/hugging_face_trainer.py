"""Hugging Face's Trainer with evaluation and saves, on a tiny model with random weights. Does not use Flyball."""
# corpus: ranks=2 needs=transformers,accelerate

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Digits(Dataset):
    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(100, (rows, 64), generator=torch.Generator().manual_seed(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=16,
            max_steps=300,
            eval_strategy="steps",
            eval_steps=100,
            save_steps=100,
            logging_steps=20,
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Digits(4000), eval_dataset=Digits(2000))
        trainer.train()
        print(trainer.evaluate(), flush=True)
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
