"""A training by Hugging Face's Trainer that survives: `strata run --job rows --slots 2 -- python train.py`.

A small Llama learns arithmetic rows such as `7 14 21 28 …`. The lines of Strata are the import and the last argument of
the Trainer.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from strata.integrations.transformers import StrataTrainer as Trainer

TOKENS, WORDS = 16, 251


def rows(count: int, seed: int) -> Dataset:
    """Return rows of multiples of a number, modulo `WORDS`."""
    numbers = torch.randint(1, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = [[number * k % WORDS for k in range(1, TOKENS + 1)] for number in numbers]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--storage", help="a folder that all hosts share")
    parser.add_argument("--output", default="out", help="the folder of the Trainer")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=4, **shape))
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=options.output,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=options.epochs,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=20,
            report_to="none",
        ),
        train_dataset=rows(2000, 1),
        eval_dataset=rows(200, 2),
        strata={"global_batch": 64, "storage_path": options.storage, "save_every_steps": 20},
    )
    trainer.train()


if __name__ == "__main__":
    main()
