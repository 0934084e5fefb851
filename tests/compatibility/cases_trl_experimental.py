"""TRL's distillation trainer, and the trainers of `trl.experimental`.

They log every four steps: a resumed run has to continue figures whose interval began two steps before the kill.
"""

from __future__ import annotations

import time
from typing import Any

from compatibility import tiny
from compatibility.ranks import Run
from compatibility.table import case, differs
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMADPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer
from trl.trainer.dpo_config import DPOConfig

# A restart between two steps over the same completions, and before anything is logged.
_EARLY: dict[str, Any] = {"kills": ((0, 5),), "saved": (3,)}
_LOADER_NOT_FOLLOWED = differs(
    "its loader is no DataLoader, whose position could be followed",
    part="^after the kill: batch",
    warning="_RepeatBatchDataLoader is not a torch DataLoader",
)
_AVERAGE_NOT_SAVED = differs(
    "the averaged weights in TRL's `PEFTAdapterEMACallback` are not saved",
    part="^after the kill: parameters",
    warning="training has changed what no checkpoint holds: PEFTAdapterEMACallback",
)


def _prompts(**columns: int) -> Dataset:
    """Prompts, and further columns with texts of other numbers."""
    names = {"prompt": 0, **columns}
    return Dataset.from_list(
        [{name: tiny.text(number + offset, 2) for name, offset in names.items()} for number in range(tiny.NUM_ROWS)]
    )


def _chats() -> Dataset:
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": tiny.text(number, 2)},
                    {"role": "assistant", "content": tiny.text(number + 30, 2)},
                ]
            }
            for number in range(tiny.NUM_ROWS)
        ]
    )


def _preferences(*columns: str) -> Dataset:
    """A prompt and one answer to it in each column."""
    return Dataset.from_list(
        [
            {"prompt": tiny.text(number, 2)}
            | {name: " " + tiny.text(number + 20 * place, 2) for place, name in enumerate(columns, 1)}
            for number in range(tiny.NUM_ROWS)
        ]
    )


def _arguments(run: Run, cls: Any, **options: Any) -> Any:
    return tiny.arguments(run, cls, **{"logging_steps": 4, **options})


def _teacher(run: Run) -> Any:
    """Another model than the student, in a folder with its tokenizer."""
    folder = run.folder / "teacher"
    if run.rank == 0 and not folder.exists():
        unfinished = run.folder / "unfinished-teacher"
        tiny.llama(num_hidden_layers=2).save_pretrained(unfinished)
        tiny.tokenizer().save_pretrained(unfinished)
        unfinished.rename(folder)
    while not folder.exists():
        time.sleep(0.01)
    return type(tiny.llama()).from_pretrained(folder)


def _made(run: Run, trainer: Any, config: Any, given: dict[str, Any], **options: Any) -> Any:
    """A trainer of a small model over prompts, which is `given` the rest; most options are its configuration's."""
    own = {name: options.pop(name) for name in ("peft_config", "train_dataset") if name in options}
    model = tiny.saved(run, tiny.llama())
    common = {"model": model, "train_dataset": _prompts(), "processing_class": tiny.tokenizer()}
    return trainer(**(common | given | own), args=_arguments(run, config, **options))


def _variety(completions: list[str], **kwargs: Any) -> list[float]:
    """Of few tokens the number of different characters."""
    return [float(len(set(completion))) for completion in completions]


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)


# -- distillation from a teacher -------------------------------------------------------------------------------------


def _distillation(run: Run, **options: Any) -> Any:
    given = {"teacher_model": _teacher(run)}
    return _made(run, DistillationTrainer, DistillationConfig, given, max_completion_length=4, **options)


@case("trl/Distillation", stock=True)
def _distillation_default(run: Run) -> None:
    run.train(_distillation(run))


@case("trl/Distillation accumulation", stock=True)
def _distillation_accumulation(run: Run) -> None:
    run.train(_distillation(run, gradient_accumulation_steps=2))


@case("trl/Distillation LoRA", stock=True)
def _distillation_lora(run: Run) -> None:
    run.train(_distillation(run, peft_config=_lora(exclude_modules=["lm_head"])))


@case("trl/Distillation streaming, accumulation", stock=True)
def _distillation_streaming(run: Run) -> None:
    stream = _prompts().to_iterable_dataset(num_shards=2)
    run.train(_distillation(run, train_dataset=stream, gradient_accumulation_steps=2))


@case("trl/GKD", stock=True)
def _gkd(run: Run) -> None:
    given = {"teacher_model": _teacher(run), "train_dataset": _chats()}
    run.train(_made(run, GKDTrainer, GKDConfig, given, lmbda=0.5, max_length=32, max_new_tokens=4))


def _gold(run: Run, **options: Any) -> Any:
    given = {"teacher_model": _teacher(run), "train_dataset": tiny.stored(run, _chats())}
    return _made(run, GOLDTrainer, GOLDConfig, given, lmbda=0.5, max_length=32, max_completion_length=4, **options)


@case("trl/GOLD", stock=True)
def _gold_default(run: Run) -> None:
    run.train(_gold(run))


@case("trl/GOLD accumulation", stock=True)
def _gold_accumulation(run: Run) -> None:
    run.train(_gold(run, gradient_accumulation_steps=2))


def _iw_opd(run: Run, **options: Any) -> Any:
    given = {"teacher_model": _teacher(run), "train_dataset": _chats()}
    lengths = {"max_length": 32, "max_prompt_length": 24, "max_completion_length": 4}
    return _made(run, IWOPDTrainer, IWOPDConfig, given, **lengths, **options)


@case(
    "trl/IW-OPD",
    verdict=_LOADER_NOT_FOLLOWED,
    stock=True,
    **_EARLY,
)
def _iw_opd_default(run: Run) -> None:
    run.train(_iw_opd(run))


@case(
    "trl/IW-OPD accumulation",
    verdict=_LOADER_NOT_FOLLOWED,
    stock=True,
    **_EARLY,
)
def _iw_opd_accumulation(run: Run) -> None:
    run.train(_iw_opd(run, gradient_accumulation_steps=2))


@case("trl/GOLD ULD loss", stock=True)
def _gold_uld(run: Run) -> None:
    run.train(_gold(run, use_uld_loss=True))


# -- distillation from itself ----------------------------------------------------------------------------------------


def _sdft(run: Run, **options: Any) -> Any:
    given = {"train_dataset": _prompts(privileged_context=20)}
    return _made(run, SDFTTrainer, SDFTConfig, given, num_generations=2, max_completion_length=4, **options)


@case("trl/SDFT", stock=True)
def _sdft_default(run: Run) -> None:
    run.train(_sdft(run))


@case("trl/SDFT several iterations", stock=True, **_EARLY)
def _sdft_iterations(run: Run) -> None:
    run.train(_sdft(run, num_iterations=2))


@case("trl/SDFT averaged teacher", stock=True)
def _sdft_average(run: Run) -> None:
    trainer = _sdft(run, teacher_model_kind="ema", teacher_update_rate=0.5)
    run.train(trainer)
    run.finish(teacher=trainer.teacher_model.state_dict())


@case(
    "trl/SDFT averaged teacher, LoRA",
    verdict=_AVERAGE_NOT_SAVED,
    stock=True,
)
def _sdft_average_lora(run: Run) -> None:
    run.train(_sdft(run, teacher_model_kind="ema", teacher_update_rate=0.5, peft_config=_lora()))


def _sdpo(run: Run, **options: Any) -> Any:
    # Some of the completions count as successful; the others are taught by them.
    options = {"num_generations": 4, "max_completion_length": 4, "success_reward_threshold": 4.0, **options}
    return _made(run, SDPOTrainer, SDPOConfig, {"reward_funcs": _variety}, **options)


@case("trl/SDPO", stock=True)
def _sdpo_default(run: Run) -> None:
    trainer = _sdpo(run, teacher_update_rate=0.5)
    run.train(trainer)
    run.finish(teacher=trainer.teacher_model.state_dict())


@case("trl/SDPO steps_per_generation", stock=True)
def _sdpo_buffer(run: Run) -> None:
    # All completions succeed: TRL waits for ever where a micro-batch of one rank has none (trl 1.16, no gather there).
    options = {"steps_per_generation": 4, "teacher_model_kind": "base", "success_reward_threshold": 0.0}
    run.train(_sdpo(run, **options))


@case(
    "trl/SDPO averaged teacher, LoRA",
    verdict=_AVERAGE_NOT_SAVED,
    stock=True,
)
def _sdpo_lora(run: Run) -> None:
    run.train(_sdpo(run, teacher_update_rate=0.5, peft_config=_lora()))


# -- preferences and rewards -----------------------------------------------------------------------------------------


def _some_correct(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """1 or 0; never 1 for some of the prompts, which the trainer then leaves out."""
    return [
        float("bird" not in prompt and len(completion) % 2 == 0)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _a2po(run: Run, **options: Any) -> Any:
    given = {"reward_funcs": _some_correct}
    return _made(run, A2POTrainer, A2POConfig, given, max_completion_length=4, num_value_samples=4, **options)


# This and IW-OPD log what their own rank has seen, and the saved history is rank 0's: the log is to begin after the
# restart.
@case("trl/A2PO", stock=True, **_EARLY)
def _a2po_default(run: Run) -> None:
    run.train(_a2po(run))


@case("trl/A2PO all prompts", stock=True, **_EARLY)
def _a2po_all(run: Run) -> None:
    run.train(_a2po(run, filter_all_incorrect=False))


@case("trl/GMPO", stock=True)
def _gmpo(run: Run) -> None:
    given = {"reward_funcs": _variety}
    run.train(_made(run, GMPOTrainer, GMPOConfig, given, num_generations=4, max_completion_length=4))


def _online_dpo(run: Run, **options: Any) -> Any:
    given = {"reward_funcs": _variety}
    return _made(run, OnlineDPOTrainer, OnlineDPOConfig, given, max_new_tokens=4, max_length=32, **options)


@case("trl/Online DPO", stock=True, **_EARLY)
def _online_dpo_default(run: Run) -> None:
    run.train(_online_dpo(run))


@case("trl/Online DPO LoRA", stock=True, **_EARLY)
def _online_dpo_lora(run: Run) -> None:
    run.train(_online_dpo(run, peft_config=_lora()))


@case("trl/TPO", stock=True)
def _tpo(run: Run) -> None:
    rows = tiny.stored(run, _preferences("chosen", "rejected", "reference"))
    run.train(_made(run, TPOTrainer, TPOConfig, {"model": tiny.llama(), "train_dataset": rows}, max_length=32))


@case(
    "trl/DPO BEMA for the reference model",
    verdict=differs(
        "the averages in TRL's `BEMACallback`, and the reference model that follows them, are not saved",
        part="^after the kill: parameters",
        warning="training has changed what no checkpoint holds: BEMACallback",
    ),
    stock=True,
)
def _bema(run: Run) -> None:
    average = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=2, lag=1)
    rows = tiny.stored(run, _preferences("chosen", "rejected"))
    given = {"ref_model": tiny.llama(), "train_dataset": rows, "callbacks": [average]}
    trainer = _made(run, BEMADPOTrainer, DPOConfig, given, max_length=32)
    run.train(trainer)
    run.finish(reference=trainer.ref_model.state_dict(), average=average.running_model.state_dict())
