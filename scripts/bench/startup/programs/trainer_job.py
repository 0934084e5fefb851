"""A Trainer that says when its first step has ended."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import SmolLM3Config, SmolLM3ForCausalLM, Trainer, TrainerCallback, TrainingArguments


class FirstStep(TrainerCallback):  # type: ignore[misc]
    """Writes the time of the first step's end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write it once."""
        if state.global_step == 1 and state.is_world_process_zero:
            Path(os.environ["FIRST_STEP"]).write_text(str(time.time()))


torch.manual_seed(0)
model = SmolLM3ForCausalLM(
    SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)
rows = Dataset.from_dict({"input_ids": torch.randint(3, 64, (32, 16)).tolist()})
rows = rows.map(lambda row: {"labels": row["input_ids"]})
arguments = TrainingArguments("out", max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[FirstStep()])
trainer.train()
torch.distributed.destroy_process_group()  # left to the interpreter's end, gloo's threads sometimes abort it
