"""Readers of the checkpoints; several training runs in one script; migration from and to the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compatibility import tiny
from compatibility.cases_optimizers import train
from compatibility.cases_trainer import trainer
from compatibility.cases_trl import preference_trainer, texts
from compatibility.ranks import Run
from compatibility.table import MAX_STEPS, SAVE_STEPS, case, refused
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, pipeline
from trl import SFTConfig, SFTTrainer


def _last(run: Run) -> Path:
    """The checkpoint of the last step, once it is complete on all ranks."""
    run.barrier()
    return Path(run.location) / f"checkpoint-{MAX_STEPS}"


def _trained(run: Run, **options: Any) -> Any:
    return run.train(trainer(run, processing_class=tiny.tokenizer(), **options)).model


@case("readers/from_pretrained", stock=True)
def _from_pretrained(run: Run) -> None:
    model = _trained(run)
    run.expect_equal("weights", AutoModelForCausalLM.from_pretrained(_last(run)).state_dict(), model.state_dict())


@case("readers/AutoTokenizer", stock=True)
def _tokenizer(run: Run) -> None:
    _trained(run)
    read = AutoTokenizer.from_pretrained(_last(run))
    run.expect_equal("tokens", read("red cat")["input_ids"], tiny.tokenizer()("red cat")["input_ids"])


@case("readers/pipeline", stock=True)
def _pipeline(run: Run) -> None:
    _trained(run)
    generate = pipeline("text-generation", model=str(_last(run)), device="cpu")
    run.expect_equal("answers", len(generate("red cat", max_new_tokens=2, do_sample=False)), 1)


@case("readers/torch.load weights_only", stock=True)
def _weights_only(run: Run) -> None:
    run.train(made := trainer(run))
    folder = _last(run)
    run.expect_equal("optimizer", torch.load(folder / "optimizer.pt", weights_only=True), made.optimizer.state_dict())
    run.expect_equal(
        "scheduler", torch.load(folder / "scheduler.pt", weights_only=True), made.lr_scheduler.state_dict()
    )


@case("readers/safe_open", stock=True)
def _safe_open(run: Run) -> None:
    model = _trained(run)
    with safe_open(_last(run) / "model.safetensors", "pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    own = model.state_dict()
    run.expect_equal("weights", read, {name: own[name] for name in read})
    run.expect_equal("names", len(own) - len(read), 1)


@case("readers/load_file of a bare loop")
def _load_file(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2), save_steps=5)
    run.expect_equal("weights", load_file(_last(run) / "model.safetensors"), model.state_dict())


def _adapted() -> Any:
    torch.manual_seed(1)
    return get_peft_model(tiny.llama(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@case("readers/PeftModel", stock=True)
def _peft(run: Run) -> None:
    model = run.train(trainer(run, model=_adapted())).model
    read = PeftModel.from_pretrained(tiny.llama(), _last(run))
    run.expect_equal("weights", read.state_dict(), model.state_dict())


@case("readers/AutoPeftModel", stock=True)
def _auto_peft(run: Run) -> None:
    base = tiny.saved(run, tiny.llama())
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = run.train(trainer(run, model=adapted)).model
    read = AutoPeftModelForCausalLM.from_pretrained(_last(run))
    run.expect_equal("weights", read.state_dict(), model.state_dict())


def _stock(run: Run, folder: str, resume_from: Any = None, stop_at: int | None = None, **options: Any) -> Any:
    """Train without `resilient`, for comparison with the case's own run."""
    made = trainer(run, Trainer, output_dir=str(run.folder / folder), **options)
    if stop_at is not None:
        made.add_callback(_Stop(stop_at))
    made.train(resume_from_checkpoint=resume_from)
    return made


class _Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def _in_the_middle(run: Run) -> str:
    """Return the checkpoint of step 6, or of 3 where the kill came before a busy machine had committed that."""
    steps = sorted(int(path.name.partition("-")[2]) for path in Path(run.output_dir).glob("checkpoint-*"))
    middle = [step for step in steps if step <= 2 * SAVE_STEPS]
    return str(Path(run.output_dir) / f"checkpoint-{middle[-1]}")


# The stock Trainer reads a save before the last one.
@case("readers/stock Trainer resumes", kills=((0, 9),))
def _stock_resumes(run: Run) -> None:
    model = run.train(trainer(run)).model
    run.barrier()
    resumed = _stock(run, "stock", resume_from=_in_the_middle(run))
    run.expect_equal("weights", resumed.model.state_dict(), model.state_dict())


@case("readers/stock SFTTrainer resumes", kills=((0, 9),))
def _stock_sft(run: Run) -> None:
    def made(folder: str) -> Any:
        arguments = tiny.arguments(run, SFTConfig, max_length=32, output_dir=folder)
        return SFTTrainer(tiny.llama(), arguments, train_dataset=texts(), processing_class=tiny.tokenizer())

    model = run.train(made(run.output_dir)).model
    run.barrier()
    stock = made(str(run.folder / "stock"))
    stock.train(resume_from_checkpoint=_in_the_middle(run))
    run.expect_equal("weights", stock.model.state_dict(), model.state_dict())


@case("migration/to stock in the same folder", kills=((0, 4),), saved=(3,))
def _to_stock(run: Run) -> None:
    run.train(trainer(run, callbacks=[_Stop(7)]))
    run.barrier()
    resumed = _stock(run, "output", resume_from=True)
    whole = _stock(run, f"whole-{run.order.attempt}")
    run.expect_equal("weights as of an uninterrupted stock run", resumed.model.state_dict(), whole.model.state_dict())


@case("migration/from a stock checkpoint by its path")
def _from_stock(run: Run) -> None:
    if not run.is_restarted:
        _stock(run, "before", stop_at=4, save_steps=4)
    model = run.train(trainer(run), resume_from=str(run.folder / "before" / "checkpoint-4")).model
    whole = _stock(run, f"whole-{run.order.attempt}")
    run.expect_equal("weights as of an uninterrupted stock run", model.state_dict(), whole.model.state_dict())


@case("migration/in a folder of a stock Trainer", verdict=refused("that this library has not written"))
def _stock_folder(run: Run) -> None:
    if not run.is_restarted:
        _stock(run, "output", stop_at=4, save_steps=4)
    run.barrier()
    run.train(trainer(run))
    run.barrier()
    names = sorted(path.name for path in Path(run.output_dir).glob("*checkpoint-4*"))
    run.expect_equal("the stock checkpoint", names, ["checkpoint-4"])


# -- several trainings in one script --------------------------------------------------------------------------------


@case("stages/two trainers", stock=True, kills=((0, 7), (1, 7)), saved=(6, 6))
def _two(run: Run) -> None:
    model = run.train(trainer(run, output_dir=str(run.folder / "first"))).model
    run.train(trainer(run, model=model, output_dir=str(run.folder / "second"), learning_rate=1e-3))


@case("stages/SFT, then DPO", stock=True, kills=((0, 7), (1, 7)), saved=(6, 6))
def _sftpreference_trainer(run: Run) -> None:
    arguments = tiny.arguments(run, SFTConfig, max_length=32, output_dir=str(run.folder / "first"))
    first = SFTTrainer(
        tiny.saved(run, tiny.llama()), arguments, train_dataset=texts(), processing_class=tiny.tokenizer()
    )
    run.train(first)
    run.train(preference_trainer(run, model=first.model, output_dir=str(run.folder / "second")))


@case("stages/killed twice in the second", stock=True, kills=((1, 4), (1, 8)), saved=(3, 6))
def _second(run: Run) -> None:
    model = run.train(trainer(run, output_dir=str(run.folder / "first"))).model
    run.train(trainer(run, model=model, output_dir=str(run.folder / "second"), learning_rate=1e-3))


@case("stages/two trainers in one folder", stock=True)
def _same_folder(run: Run) -> None:
    model = run.train(trainer(run)).model
    run.train(trainer(run, model=model, learning_rate=1e-3))


@case("stages/two loops", kills=((0, 7), (1, 7)), saved=(6, 6))
def _two_loops(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    for name, rate in (("first", 1e-2), ("second", 1e-3)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        train(run, model, optimizer, location=str(run.folder / name))


@case("stages/loop, then trainer", kills=((0, 7), (1, 7)), saved=(6, 6))
def _loop_trainer(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2), location=str(run.folder / "first"))
    made = trainer(
        run,
        model=model,
        dataset=tiny.Points(),
        data_collator=torch.utils.data.default_collate,
        output_dir=str(run.folder / "second"),
    )
    run.train(made)
