"""Causal language modelling as transformers' example `run_clm.py` does it: arguments, last checkpoint, metrics."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArguments:
    data: str = field(metadata={"help": "Folder of model and texts."})
    block_size: int = 64


def main():
    defaults = [
        "--max_steps",
        "20",
        "--save_steps",
        "5",
        "--logging_steps",
        "1",
        "--learning_rate",
        "1e-3",
        "--use_cpu",
    ]
    defaults += ["--per_device_train_batch_size", "2", "--do_train", "--report_to", "none"]
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses(
        [*defaults, *sys.argv[1:]]
    )
    last_checkpoint = None
    if Path(training_args.output_dir).is_dir() and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    model = AutoModelForCausalLM.from_pretrained(f"{data_args.data}/model")
    tokenizer = AutoTokenizer.from_pretrained(f"{data_args.data}/model")
    raw = load_dataset("json", data_files=f"{data_args.data}/texts.jsonl", split="train")
    tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group(rows):
        joined = [token for row in rows["input_ids"] for token in row]
        blocks = [
            joined[at : at + data_args.block_size]
            for at in range(0, len(joined) - data_args.block_size + 1, data_args.block_size)
        ]
        return {"input_ids": blocks, "labels": blocks}

    with training_args.main_process_first(desc="grouping texts together"):
        blocks = tokenized.map(group, batched=True, remove_columns=tokenized.column_names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    checkpoint = training_args.resume_from_checkpoint or last_checkpoint
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
