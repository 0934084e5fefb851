"""A small Trainer that gets into trouble: the runs of docs/guides/what-happens-when.md.

`runner start faults.py TROUBLE`, with one of the names below, or `none`, which is for troubles that come from outside.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

trouble = sys.argv[1] if len(sys.argv) > 1 else "none"


class Troubled(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        time.sleep(0.1)  # There is time to watch.
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step != 42 or self.args.process_index != 1:
            return loss
        if trouble == "bug":  # It comes again, in each attempt.
            raise ValueError("sample 1337 has no label")
        if trouble == "leave":
            sys.exit(0)
        # The others come once, as this file then exists.
        happened = Path(f"{trouble}.happened")
        if trouble != "none" and not happened.exists():
            happened.touch()
            if trouble == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if trouble == "hang":
                time.sleep(3600)
            if trouble == "nan":
                loss = loss * float("nan")
        return loss


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (400, 32))]
if trouble == "typo":
    rows = [{"input_ids": row["inputs"], "labels": row["labels"]} for row in rows]
arguments = TrainingArguments(
    "out",
    max_steps=100,
    save_steps=10,
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
    use_cpu=not torch.accelerator.is_available(),  # Without it, ranks on a CPU do not train together.
)
trainer = Troubled(model=model, args=arguments, train_dataset=rows)
trainer.remove_callback(PrinterCallback)
trainer.train()
