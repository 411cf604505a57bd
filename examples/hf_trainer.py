"""A small Llama by Hugging Face's Trainer, on the source of Python's argparse: an ordinary script as a site of a run.

python examples/hf_trainer.py                                              # alone
atoll node --run RUN --name berlin -- examples/hf_trainer.py      # as a site

Needs transformers and accelerate: pip install "atoll[hf]". Lines with a mark make it a site.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.integrations.hf import SiteCallback  # <-

SEQUENCE = 64
TEXT = Path(argparse.__file__).read_bytes()


class Windows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._text) // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._text[index * SEQUENCE : (index + 1) * SEQUENCE]
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="alone; a run has a length of its own")
    parser.add_argument("--out", default="hf-trainer", help="folder of the Trainer")
    parser.add_argument("--lora", action="store_true", help="train an adapter of it alone (needs peft)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        arguments.out, max_steps=arguments.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=10, logging_steps=20,
        save_strategy="no", eval_strategy="steps", eval_steps=20,
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    data = Windows()
    held_out, training = Subset(data, range(16)), Subset(data, range(16, len(data)))
    model = LlamaForCausalLM(config)
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    trainer = Trainer(model=model, args=args, train_dataset=training, eval_dataset=held_out)
    fingerprint = hashlib.sha256(TEXT).digest()  # <-
    frozen = "own" if arguments.lora else "run"  # the same base is at every site: it is compared, and not sent
    trainer.add_callback(SiteCallback(trainer, data_fingerprint=fingerprint, frozen=frozen))  # <-
    trainer.train()


if __name__ == "__main__":
    main()
