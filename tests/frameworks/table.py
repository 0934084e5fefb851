"""The frameworks: what a user types, how the stock command starts several ranks, and what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS, SAVE_STEPS = 20, 5


@dataclass(frozen=True)
class Framework:
    """One command of one framework. In all texts, {data}, {out}, {programs} and {ranks} are filled in.

    Attributes:
        name: For people.
        package: The distribution whose version is reported.
        command: What a user types after `runner start`.
        environment: Name of the requirements; empty for the project's own environment.
        files: Files in the working directory, by name.
        stock: What stands before the command where it is started without us.
        stock_command: The command without us, where it is another one: accelerate starts one rank on a CPU.
        variables: What is set for the stock command.
        further: Arguments of the stock command, with which it starts the ranks.
        ranks: Numbers of ranks.
        shown: What the page shows as the command.
        killed: Where ranks are killed; empty for three random steps.
    """

    name: str
    package: str
    command: tuple[str, ...]
    environment: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    stock: tuple[str, ...] = ()
    stock_command: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    further: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)
    shown: str = ""
    killed: str = ""


_TORCHRUN = ("torchrun", "--nproc-per-node", "{ranks}")
_LLAMAFACTORY = f"""
model_name_or_path: {{data}}/model
do_train: true
dataset_dir: {{data}}
template: default
cutoff_len: 64
output_dir: {{out}}
logging_steps: 1
save_steps: {SAVE_STEPS}
max_steps: {STEPS}
per_device_train_batch_size: 2
learning_rate: 1.0e-3
report_to: none
overwrite_cache: true
preprocessing_num_workers: 1
dataloader_num_workers: 0
"""
_TRL = f"""
model_name_or_path: {{data}}/model
output_dir: {{out}}
logging_steps: 1
save_steps: {SAVE_STEPS}
max_steps: {STEPS}
per_device_train_batch_size: 2
learning_rate: 1.0e-3
report_to: none
use_cpu: true
bf16: false
gradient_checkpointing: false
"""
_AXOLOTL = f"""
base_model: {{data}}/model
output_dir: {{out}}
datasets:
  - {{{{path: {{data}}/pairs.jsonl, ds_type: json, type: alpaca}}}}
dataset_prepared_path: {{out}}-prepared
val_set_size: 0
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: {STEPS}
save_steps: {SAVE_STEPS}
num_epochs: 1
learning_rate: 0.001
optimizer: adamw_torch
lr_scheduler: cosine
logging_steps: 1
bf16: false
fp16: false
tf32: false
seed: 42
special_tokens: {{{{pad_token: <pad>}}}}
"""
_SWIFT = (
    "swift sft --model {data}/model --model_type llama --template default --use_hf true --tuner_type full "
    "--dataset {data}/messages.jsonl --torch_dtype float32 --use_cpu true --ddp_backend gloo "
    f"--max_steps {STEPS} --save_steps {SAVE_STEPS} --logging_steps 1 --per_device_train_batch_size 2 "
    "--learning_rate 1e-3 --output_dir {out} --add_version false --report_to none --split_dataset_ratio 0 "
    "--dataloader_num_workers 0 --dataset_num_proc 1"
)
_TORCHTITAN = f"""
[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tokenizer"
[training]
local_batch_size = 1
seq_len = 64
steps = {STEPS}
dataset = "c4_test"
[debug]
seed = 1
[parallelism]
data_parallel_replicate_degree = {{ranks}}
data_parallel_shard_degree = 1
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = {SAVE_STEPS}
last_save_model_only = false
"""
_VARIABLES = {"NPROC_PER_NODE": "{ranks}"}


def _trl(method: str, rows: str) -> Framework:
    return Framework(
        f"TRL, {method}",
        "trl",
        ("trl", method, "--config", "job.yaml"),
        stock=_TORCHRUN,
        stock_command=("-m", f"trl.scripts.{method}", "--config", "job.yaml"),
        files={"job.yaml": _TRL + f"datasets:\n  - {{{{path: json, data_files: '{{data}}/{rows}'}}}}\n"},
    )


FRAMEWORKS = (
    Framework(
        "LLaMA-Factory, SFT",
        "llamafactory",
        ("llamafactory-cli", "train", "job.yaml"),
        "llamafactory",
        {"job.yaml": _LLAMAFACTORY + "stage: sft\nfinetuning_type: full\ndataset: sums\n"},
        variables={**_VARIABLES, "FORCE_TORCHRUN": "1"},
        ranks=(1, 2, 3),
    ),
    Framework(
        "LLaMA-Factory, DPO with LoRA",
        "llamafactory",
        ("llamafactory-cli", "train", "job.yaml"),
        "llamafactory",
        {"job.yaml": _LLAMAFACTORY + "stage: dpo\nfinetuning_type: lora\nlora_target: all\ndataset: preferences\n"},
        variables={**_VARIABLES, "FORCE_TORCHRUN": "1"},
    ),
    Framework(
        "ms-swift, SFT",
        "ms-swift",
        tuple(_SWIFT.split()),
        "swift",
        variables=_VARIABLES,
        shown="swift sft --model … --dataset …",
    ),
    Framework(
        "Axolotl, SFT",
        "axolotl",
        ("axolotl", "train", "job.yaml", "--launcher", "torchrun"),
        "axolotl",
        {"job.yaml": _AXOLOTL},
        further=("--", "--nproc_per_node={ranks}"),
    ),
    _trl("sft", "messages.jsonl"),
    _trl("dpo", "preferences.jsonl"),
    Framework(
        "accelerate launch, causal language modelling",
        "accelerate",
        ("accelerate", "launch", "{programs}/language_model.py", "--data", "{data}", "--output_dir", "{out}"),
        stock=_TORCHRUN,
        stock_command=("{programs}/language_model.py", "--data", "{data}", "--output_dir", "{out}"),
        shown="accelerate launch run_clm.py --output_dir …",
        ranks=(1, 2, 3),
    ),
    Framework(
        "Sentence Transformers",
        "sentence-transformers",
        ("{programs}/sentences.py", "{data}", "{out}"),
        stock=_TORCHRUN,
        shown="train.py",
    ),
    Framework(
        "SetFit",
        "setfit",
        ("{programs}/few_shots.py", "{data}", "{out}"),
        "setfit",
        ranks=(1,),
        shown="train.py",
    ),
    Framework(
        "Lightning",
        "lightning",
        ("{programs}/module.py", "{out}"),
        stock=_TORCHRUN,
        shown="train.py",
        ranks=(1, 2, 3),
    ),
    *(
        Framework(
            f"torchtitan, {name}",
            "torchtitan",
            ("{programs}/pretraining.py",),
            "torchtitan",
            {"job.toml": _TORCHTITAN + f'async_mode = "{mode}"\n'},
            stock=_TORCHRUN,
            shown="-m torchtitan.train --job.config_file job.toml",
            ranks=(1, 2, 3),
            # It counts no steps of ours: in a save, before its index is there, and after.
            killed="dcp.publishing=kill; dcp.published=kill; dcp.written=kill@2",
        )
        for name, mode in (("pre-training", "disabled"), ("pre-training, asynchronous saves", "async"))
    ),
)
