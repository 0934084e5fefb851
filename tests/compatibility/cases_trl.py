"""TRL's trainers."""

from __future__ import annotations

from typing import Any

import torch
from compatibility import tiny
from compatibility.ranks import Run
from compatibility.table import case
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)


def texts(count: int = tiny.NUM_ROWS) -> Dataset:
    return Dataset.from_list([{"text": tiny.text(number, 2 + number % 3)} for number in range(count)])


def _chats(count: int = tiny.NUM_ROWS) -> Dataset:
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": tiny.text(number, 2)},
                    {"role": "assistant", "content": tiny.text(number + 30, 2)},
                ]
            }
            for number in range(count)
        ]
    )


def _preferences(count: int = tiny.NUM_ROWS) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": tiny.text(number, 2),
                "chosen": " " + tiny.text(number + 20, 2),
                "rejected": " " + tiny.text(number + 40, 2),
            }
            for number in range(count)
        ]
    )


def _sft(run: Run, dataset: Any, **options: Any) -> Any:
    own: dict[str, Any] = {
        name: options.pop(name) for name in ("peft_config", "eval_dataset", "model") if name in options
    }
    given: dict[str, Any] = {
        "model": tiny.llama(),
        "args": tiny.arguments(run, SFTConfig, **{"max_length": 32, **options}),
        "train_dataset": dataset,
        "processing_class": tiny.tokenizer(),
    }
    return SFTTrainer(**(given | own))


@case("trl/SFT text", stock=True)
def _text(run: Run) -> None:
    run.train(_sft(run, texts()))


@case("trl/SFT prompt and completion", stock=True)
def _completion(run: Run) -> None:
    rows = [{"prompt": tiny.text(number, 2), "completion": " " + tiny.text(number + 9, 2)} for number in range(14)]
    run.train(_sft(run, Dataset.from_list(rows)))


@case("trl/SFT packing", stock=True)
def _packing(run: Run) -> None:
    run.train(_sft(run, texts(28), packing=True, packing_strategy="wrapped"))


@case("trl/SFT assistant-only", stock=True)
def _assistant(run: Run) -> None:
    run.train(_sft(run, _chats(), assistant_only_loss=True))


@case("trl/SFT padding-free", stock=True)
def _padding_free(run: Run) -> None:
    run.train(_sft(run, texts(), padding_free=True, max_length=None))


@case("trl/SFT streaming", stock=True)
def _streaming(run: Run) -> None:
    run.train(_sft(run, texts(60).to_iterable_dataset(num_shards=2)))


@case("trl/SFT streaming, packing", stock=True)
def _streaming_packed(run: Run) -> None:
    run.train(_sft(run, texts(90).to_iterable_dataset(), packing=True, packing_strategy="wrapped"))


@case("trl/SFT evaluation", stock=True)
def _evaluation(run: Run) -> None:
    run.train(_sft(run, texts(), eval_dataset=texts(4), eval_strategy="steps", eval_steps=2))


@case("trl/SFT LoRA", stock=True)
def _lora(run: Run) -> None:
    from peft import LoraConfig

    run.train(_sft(run, texts(), peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear")))


@case("trl/SFT dft loss", stock=True)
def _dft(run: Run) -> None:
    run.train(_sft(run, texts(), loss_type="dft"))


def preference_trainer(run: Run, ref_model: Any = None, **options: Any) -> Any:
    own: dict[str, Any] = {name: options.pop(name) for name in ("peft_config", "model") if name in options}
    return DPOTrainer(
        model=own.pop("model", None) or tiny.saved(run, tiny.llama()),
        ref_model=ref_model,
        args=tiny.arguments(run, DPOConfig, **{"max_length": 32, **options}),
        train_dataset=tiny.stored(run, _preferences()),
        processing_class=tiny.tokenizer(),
        **own,
    )


@case("trl/DPO", stock=True)
def _dpo_default(run: Run) -> None:
    run.train(preference_trainer(run))


@case("trl/DPO reference model", stock=True)
def _dpo_reference(run: Run) -> None:
    run.train(preference_trainer(run, ref_model=tiny.llama()))


@case("trl/DPO synchronised reference model", stock=True)
def _dpo_sync(run: Run) -> None:
    trainer = preference_trainer(
        run, ref_model=tiny.llama(), sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5
    )
    run.train(trainer)
    run.finish(reference=trainer.ref_model.state_dict())


@case("trl/DPO precomputed reference", stock=True)
def _dpo_precomputed(run: Run) -> None:
    run.train(preference_trainer(run, precompute_ref_log_probs=True))


@case("trl/DPO LoRA", stock=True)
def _dpo_lora(run: Run) -> None:
    from peft import LoraConfig

    run.train(preference_trainer(run, peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")))


@case("trl/Reward", stock=True)
def _reward(run: Run) -> None:
    config = tiny.llama().config
    config.num_labels = 1
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    rows = [{"chosen": tiny.text(number, 3), "rejected": tiny.text(number + 40, 3)} for number in range(14)]
    run.train(
        RewardTrainer(
            model=model,
            args=tiny.arguments(run, RewardConfig, max_length=32),
            train_dataset=Dataset.from_list(rows),
            processing_class=tiny.tokenizer(),
        )
    )


def _kto_rows() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": tiny.text(number, 2), "completion": " " + tiny.text(number + 20, 2), "label": number % 2 == 0}
            for number in range(tiny.NUM_ROWS)
        ]
    )


@case("trl/KTO", stock=True)
def _kto(run: Run) -> None:
    run.train(
        KTOTrainer(
            model=tiny.llama(),
            ref_model=tiny.llama(),
            args=tiny.arguments(run, KTOConfig, max_length=32),
            train_dataset=_kto_rows(),
            processing_class=tiny.tokenizer(),
        )
    )


@case("trl/ORPO", stock=True)
def _orpo(run: Run) -> None:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    run.train(
        ORPOTrainer(
            model=tiny.llama(),
            args=tiny.arguments(run, ORPOConfig, max_length=32),
            train_dataset=_preferences(),
            processing_class=tiny.tokenizer(),
        )
    )


@case("trl/CPO", stock=True)
def _cpo(run: Run) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    run.train(
        CPOTrainer(
            model=tiny.llama(),
            args=tiny.arguments(run, CPOConfig, max_length=32),
            train_dataset=_preferences(),
            processing_class=tiny.tokenizer(),
        )
    )


def _length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Of few tokens the number of different characters."""
    return [float(len(set(completion))) for completion in completions]


def _prompts(count: int = tiny.NUM_ROWS) -> Dataset:
    return Dataset.from_list([{"prompt": tiny.text(number, 2)} for number in range(count)])


def _grpo(run: Run, **options: Any) -> Any:
    own: dict[str, Any] = {name: options.pop(name) for name in ("peft_config", "reward_funcs") if name in options}
    options = {"num_generations": 4, "max_completion_length": 4, "beta": 0.0, **options}
    given: dict[str, Any] = {
        "model": tiny.saved(run, tiny.llama()),
        "reward_funcs": _length_reward,
        "args": tiny.arguments(run, GRPOConfig, **options),
        "train_dataset": _prompts(),
        "processing_class": tiny.tokenizer(),
    }
    return GRPOTrainer(**(given | own))


@case("trl/GRPO", stock=True)
def _grpo_default(run: Run) -> None:
    run.train(_grpo(run))


@case("trl/GRPO accumulation", stock=True)
def _grpo_accumulation(run: Run) -> None:
    run.train(_grpo(run, gradient_accumulation_steps=2))


@case("trl/GRPO several iterations", stock=True, kills=((0, 5),), saved=(3,))
def _grpo_iterations(run: Run) -> None:
    run.train(_grpo(run, num_iterations=2))


@case("trl/GRPO steps_per_generation", stock=True)
def _grpo_buffer(run: Run) -> None:
    # A batch of completions lasts for four steps; the kill at the seventh falls between two of them.
    run.train(_grpo(run, steps_per_generation=4))


@case("trl/GRPO reference model", stock=True)
def _grpo_reference(run: Run) -> None:
    run.train(_grpo(run, beta=0.1))


@case("trl/GRPO synchronised reference model", stock=True)
def _grpo_sync(run: Run) -> None:
    trainer = _grpo(run, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    run.train(trainer)
    run.finish(reference=trainer.ref_model.state_dict())


@case("trl/GRPO LoRA", stock=True)
def _grpo_lora(run: Run) -> None:
    from peft import LoraConfig

    run.train(_grpo(run, peft_config=LoraConfig(r=2, target_modules="all-linear")))


@case("trl/RLOO", stock=True)
def _rloo(run: Run) -> None:
    run.train(
        RLOOTrainer(
            model=tiny.saved(run, tiny.llama()),
            reward_funcs=_length_reward,
            args=tiny.arguments(run, RLOOConfig, num_generations=4, max_completion_length=4, beta=0.05),
            train_dataset=_prompts(),
            processing_class=tiny.tokenizer(),
        )
    )


@case("trl/RLOO several iterations", stock=True, kills=((0, 5),), saved=(3,))
def _rloo_iterations(run: Run) -> None:
    options = {"num_generations": 4, "max_completion_length": 4, "beta": 0.05, "num_iterations": 2}
    run.train(
        RLOOTrainer(
            model=tiny.saved(run, tiny.llama()),
            reward_funcs=_length_reward,
            args=tiny.arguments(run, RLOOConfig, **options),
            train_dataset=_prompts(),
            processing_class=tiny.tokenizer(),
        )
    )
