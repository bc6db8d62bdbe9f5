"""What `test_integrations` has `PSTrainer` refuse, in a job of two workers."""

import signal
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import psworker
from psworker.integrations.transformers import PSTrainer


def main(folder: str) -> None:
    """Tries one after the other, and waits."""
    config = BertConfig(
        vocab_size=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=3,
    )
    torch.manual_seed(0)
    with psworker.connect() as ps:
        trainer = PSTrainer(
            connection=ps,
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                folder,
                train_sampling_strategy="group_by_length",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=[
                {"input_ids": torch.zeros(3).long(), "labels": torch.tensor(0)}
            ]
            * 8,
        )
        for name in ("fp16", "_n_gpu", ""):
            if name:
                setattr(trainer.args, name, 2)
            try:
                trainer.train()
            except psworker.ConfigurationError as error:
                print("refused:", error, flush=True)
            if name:
                setattr(trainer.args, name, 0)
        signal.pause()  # Until it is killed: the other one shall not be alone.


if __name__ == "__main__":
    main(sys.argv[1])
