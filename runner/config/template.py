"""The commented configuration file that `runner init` writes: the bundled job, and every other key as a comment."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from runner.config.schema import DEFAULT_CONFIG, Config

_WIDTH = 100
_INDENT = "  "
_HEAD = """\
Configuration of a training run. Start it with: runner start --config {name}

As it stands, this file trains a small new model on bundled data. Replace the sections `model` and `data` by your own. \
Keys that are commented out show their default, or an example if they have none.
"""
# The options of SFTConfig that most jobs set. The schema does not describe them: they are TRL's.
_TRAINER_OPTIONS = {
    "num_train_epochs": "Number of passes over the training data.",
    "per_device_train_batch_size": "Number of samples per rank in one forward and backward pass.",
    "learning_rate": "Peak learning rate. It is multiplied by the number of ranks.",
    "lr_scheduler_type": "Learning rate schedule.",
    "warmup_steps": "Number of steps over which the learning rate rises.",
    "weight_decay": "Weight decay.",
    "max_length": "Maximum number of tokens per sample; longer samples are truncated.",
    "activation_checkpointing": "Whether activations are recomputed in the backward pass to save memory.",
    "logging_steps": "Interval, in steps, between log entries.",
    "save_steps": "Interval, in steps, between checkpoints.",
    "save_total_limit": "Number of newest checkpoints to keep.",
    "seed": "Seed of the random numbers.",
}
_MORE_TRAINER_OPTIONS = {
    "max_steps": (1000, "Number of optimizer steps, instead of num_train_epochs."),
    "gradient_accumulation_steps": (4, "Number of forward and backward passes per optimizer step."),
    "bf16": (True, "Whether to train in bfloat16 mixed precision."),
    "packing": (True, "Whether several short samples share one sequence."),
    "report_to": ("tensorboard", "Experiment trackers."),
}


def job_template(schema: str, file_name: str) -> str:
    """Return the text of a configuration file of a name; `schema` is the path of the JSON schema, for editors."""
    job = yaml.safe_load(DEFAULT_CONFIG.read_text(encoding="utf-8"))
    del job["output_dir"]
    lines = [f"# yaml-language-server: $schema={schema}", *_comment(_HEAD.format(name=file_name))]
    for key, field in Config.model_fields.items():
        lines.append("")
        if key == "trainer":
            lines += [*_comment(str(field.description)), *_trainer(job[key])]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += [*_comment(str(field.annotation.__doc__)), *_section(key, field.annotation, job.get(key, {}))]
        else:
            value = f"runs/{Path(file_name).stem}" if key == "output_dir" else _shown(field)
            lines += [*_comment(_summary(field)), *_commented(_entry(key, value))]
    return "\n".join(lines) + "\n"


def _section(name: str, model: type[BaseModel], active: dict[str, Any]) -> Iterator[str]:
    lines = [f"{name}:"]
    for key, field in model.model_fields.items():
        entry = _entry(key, active.get(key, _shown(field)))
        # Uncommenting a whole section must change nothing, so an example stays a comment inside of it.
        is_set = key in active if active else _shown(field) == _default(field)
        own = [*_comment(_summary(field)), *(entry if is_set else _commented(entry))]
        lines += [_INDENT + line for line in own]
    # A section whose keys are all comments would be empty, which is no mapping.
    yield from lines if active else _commented(lines)


def _trainer(active: dict[str, Any]) -> Iterator[str]:
    yield "trainer:"
    for key, value in active.items():
        yield from (_INDENT + line for line in [*_comment(_TRAINER_OPTIONS[key]), *_entry(key, value)])
    for key, (value, text) in _MORE_TRAINER_OPTIONS.items():
        yield from (_INDENT + line for line in [*_comment(text), *_commented(_entry(key, value))])


def _shown(field: FieldInfo) -> Any:
    default = _default(field)
    return field.examples[0] if default in (None, {}, []) and field.examples else default


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def _summary(field: FieldInfo) -> str:
    """The first sentence of a description, and the values to choose from."""
    text = " ".join(str(field.description).split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
    kinds = (field.annotation, *get_args(field.annotation))
    values = [value for kind in kinds for value in get_args(kind) if isinstance(value, str)]
    return f"{sentence} One of {', '.join(values)}." if len(values) > 1 else sentence


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [f"{key}:", *(_INDENT + line for name, child in value.items() for line in _entry(name, child))]
    return [f"{key}: {_scalar(value)}"]


def _scalar(value: Any) -> str:
    # YAML would write null, and floats such as 1e-05, in ways of its own.
    return yaml.safe_dump(value).removesuffix("\n...\n").strip() if isinstance(value, str) else json.dumps(value)


def _comment(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        wrapped = textwrap.wrap(" ".join(paragraph.split()), _WIDTH)
        lines += [*(["#"] if lines else []), *(f"# {line}" for line in wrapped)]
    return lines


def _commented(lines: list[str]) -> list[str]:
    return [f"# {line}" for line in lines]
