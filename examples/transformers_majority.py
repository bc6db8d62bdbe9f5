"""Trains a tiny BERT to tell whether a row of bits has more ones than zeros.

A model of random weights and data made here: nothing is downloaded.

python examples/transformers_majority.py
psworker run --coordinator HOST:PORT --nproc 2 -- examples/transformers_majority.py
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import psworker
from psworker.integrations.transformers import PSTrainer

BIT_COUNT = 7


class Majority(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """All rows of bits, several times."""

    def __init__(self, copies):
        self.rows = torch.cartesian_prod(*[torch.arange(2)] * BIT_COUNT).repeat(
            copies, 1
        )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "labels": (row.sum() > BIT_COUNT // 2).long()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--out", default="majority-model", help="folder for the model")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=2,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=BIT_COUNT,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    with psworker.connect() as ps:
        trainer = PSTrainer(
            connection=ps,
            model=model,
            args=TrainingArguments(
                output_dir=options.out,
                per_device_train_batch_size=options.batch_size,
                num_train_epochs=options.epochs,
                learning_rate=3e-3,
                train_sampling_strategy="sequential" if options.in_order else "random",
                logging_steps=20,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Majority(copies=4),
        )
        trainer.train()
        trainer.save_model()
    with torch.no_grad():
        rows = Majority(copies=1)
        found = model(input_ids=rows.rows).logits.argmax(1)
    accuracy = (found == (rows.rows.sum(1) > BIT_COUNT // 2)).float().mean()
    print(f"{trainer.state.global_step} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
