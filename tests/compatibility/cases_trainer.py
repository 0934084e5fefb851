"""transformers' own Trainer: options, samplers, loaders, overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compatibility import tiny
from compatibility.ranks import Run
from compatibility.table import case, differs
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer, TrainerCallback, default_data_collator
from transformers.trainer_callback import ExportableState


def trainer(run: Run, cls: Any = Trainer, *, model: Any = None, dataset: Any = None, **options: Any) -> Any:
    """A trainer of a tiny GPT-2; options with names of the Trainer's own go to it, the others to its arguments."""
    own: dict[str, Any] = {
        name: options.pop(name)
        for name in ("data_collator", "eval_dataset", "callbacks", "optimizers", "model_init", "processing_class")
        if name in options
    }
    if model is None and "model_init" not in own:
        model = tiny.gpt2()
    given: dict[str, Any] = {
        "model": model,
        "args": tiny.arguments(run, **options),
        "data_collator": tiny.collate,
        "train_dataset": dataset if dataset is not None else tiny.Rows(),
    }
    return cls(**(given | own))


@case("trainer/defaults", stock=True)
def _defaults(run: Run) -> None:
    run.train(trainer(run))


@case("trainer/one process", stock=True, ranks=1)
def _one(run: Run) -> None:
    run.train(trainer(run))


@case("trainer/gradient accumulation", stock=True)
def _accumulation(run: Run) -> None:
    run.train(trainer(run, gradient_accumulation_steps=2, per_device_train_batch_size=1))


def _simple(name: str, /, *, verdict: Any = None, kills: Any = None, saved: Any = None, **options: Any) -> None:
    """A case that differs from the defaults in arguments of the trainer only."""
    extra = {"verdict": verdict, "kills": kills, "saved": saved}

    @case(f"trainer/{name}", stock=True, **{key: value for key, value in extra.items() if value is not None})
    def _body(run: Run) -> None:
        run.train(trainer(run, **options))


_simple("killed where a checkpoint was just made", kills=((0, 6),))
_simple("checkpoint at the end of an epoch", save_steps=4, kills=((0, 5),), saved=(4,))
_simple("killed twice", kills=((0, 4), (0, 8)), saved=(3, 6))
_simple("killed before the first checkpoint", kills=((0, 2),), saved=(0,))
_simple("dataloader_drop_last", dataloader_drop_last=True)
_simple("data_seed", data_seed=7)
_simple("sequential", train_sampling_strategy="sequential")
_simple("workers", dataloader_num_workers=2)
_simple("persistent workers", dataloader_num_workers=2, dataloader_persistent_workers=True)
_simple("prefetch_factor", dataloader_num_workers=1, dataloader_prefetch_factor=4)
_simple("label smoothing", label_smoothing_factor=0.1)
_simple("neftune", neftune_noise_alpha=5.0)
_simple("gradient checkpointing", gradient_checkpointing=True)
_simple("bf16", bf16=True)
_simple("save_only_model", save_only_model=True)
_simple("epochs, saved at each", max_steps=-1, num_train_epochs=3, save_strategy="epoch", saved=(4,))
_simple("accumulation over epochs", max_steps=-1, num_train_epochs=5, gradient_accumulation_steps=3)
_simple(
    "ignore_data_skip",
    ignore_data_skip=True,
    verdict=differs(
        "`ignore_data_skip` asks for the epoch to begin again after a restart",
        part="^after the kill: batch of stage 0, step 0006",
    ),
)
_simple("no gradient clipping", max_grad_norm=0.0)
_simple("save_total_limit", save_total_limit=1)
_simple("logging_first_step", logging_first_step=True, logging_steps=3)
_simple("include_num_input_tokens_seen", include_num_input_tokens_seen="all")
_simple("warmup and cosine", lr_scheduler_type="cosine", warmup_steps=3)
_simple("weight decay", weight_decay=0.1)
_simple("static graph off, unused parameters looked for", ddp_find_unused_parameters=True)
_simple("torch_compile", torch_compile=True, torch_compile_backend="aot_eager")
_simple("average_tokens_across_devices off", average_tokens_across_devices=False)
_simple("full_determinism", full_determinism=True)
_simple("dispatched batches", accelerator_config={"dispatch_batches": True, "split_batches": True})
_simple("split batches", accelerator_config={"split_batches": True})
_simple("even batches off", accelerator_config={"even_batches": False}, dataset=tiny.Rows(16))
_simple("seedable sampler off", accelerator_config={"use_seedable_sampler": False})
_simple(
    "load_best_model_at_end",
    load_best_model_at_end=True,
    eval_strategy="steps",
    eval_steps=3,
    eval_dataset=tiny.Rows(6),
)
_simple(
    "load_best_model_at_end, the first is best",
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    greater_is_better=True,
    save_total_limit=1,
    eval_strategy="steps",
    eval_steps=3,
    eval_dataset=tiny.Rows(6),
)
_simple(
    "schedule-free, evaluation",
    optim="schedule_free_adamw",
    lr_scheduler_type="constant",
    eval_strategy="steps",
    eval_steps=2,
    eval_dataset=tiny.Rows(6),
)
_simple("FSDP2", fsdp="full_shard", fsdp_config={"version": 2, "reshard_after_forward": True})
_simple(
    "evaluation",
    eval_strategy="steps",
    eval_steps=2,
    eval_dataset=tiny.Rows(6),
)
_simple("evaluation on start", eval_strategy="steps", eval_steps=2, eval_on_start=True, eval_dataset=tiny.Rows(6))
_simple("evaluation at each epoch", eval_strategy="epoch", save_strategy="epoch", eval_dataset=tiny.Rows(6), saved=(4,))
_simple(
    "best checkpoint kept",
    eval_strategy="steps",
    eval_steps=3,
    eval_dataset=tiny.Rows(6),
    metric_for_best_model="eval_loss",
    save_strategy="best",
    saved=(3,),
)


@case("trainer/group_by_length", stock=True)
def _by_length(run: Run) -> None:
    dataset = tiny.Rows()
    dataset.rows = tiny.lengths()
    run.train(trainer(run, dataset=dataset, train_sampling_strategy="group_by_length"))


@case("trainer/tensorboard", stock=True, needs=("tensorboard",))
def _tensorboard(run: Run) -> None:
    run.train(trainer(run, report_to="tensorboard"))


@case("trainer/datasets.Dataset", stock=True)
def _dataset(run: Run) -> None:
    run.train(trainer(run, dataset=tiny.dataset()))


@case("trainer/model_init", stock=True)
def _model_init(run: Run) -> None:
    run.train(trainer(run, model_init=lambda: tiny.gpt2()))


@case("trainer/auto_find_batch_size", stock=True)
def _auto_find(run: Run) -> None:
    class Greedy(GPT2LMHeadModel):
        """Has memory for two samples only."""

        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **options: Any) -> Any:
            if self.training and input_ids.shape[0] > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **options)

    model = tiny.gpt2()
    model.__class__ = Greedy
    run.train(trainer(run, model=model, per_device_train_batch_size=4, auto_find_batch_size=True))


# -- optimizers, schedules and loops of the user's ---------------------------------------------------------------------


@case("trainer/passed optimizer and scheduler", stock=True)
def _passed(run: Run) -> None:
    model = tiny.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
    run.train(trainer(run, model=model, optimizers=(optimizer, schedule)))


@case("trainer/passed optimizer", stock=True)
def _passed_optimizer(run: Run) -> None:
    model = tiny.gpt2()
    run.train(trainer(run, model=model, optimizers=(torch.optim.Adam(model.parameters(), lr=1e-2), None)))


@case("trainer/early stopping", stock=True, kills=((0, 5),), saved=(4,))
def _early(run: Run) -> None:
    # The loss only rises: training stops after three evaluations without improvement, of which two precede the kill.
    made = trainer(
        run,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        eval_dataset=tiny.Rows(6),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    run.train(made)


class _Counts(TrainerCallback, ExportableState):
    """Saved by the Trainer itself, because it is an `ExportableState`."""

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.total += state.global_step

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"total": self.total}}


@case("trainer/stateful callback", stock=True)
def _callback(run: Run) -> None:
    callback = _Counts()
    run.train(trainer(run, callbacks=[callback]))
    run.finish(total=callback.total)


class _Average(TrainerCallback):
    """A moving average of the weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, value in model.named_parameters():
            self.weights.setdefault(name, value.detach().clone()).lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


@case("trainer/moving average in states", stock=True)
def _average(run: Run) -> None:
    average = _Average()
    run.train(trainer(run, callbacks=[average]), states={"average": average})
    run.finish(average=average.weights)


class _Loss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 0.1 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class _Step(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class _Optimizer(Trainer):
    optimizer: Any

    def create_optimizer(self, *args: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3, momentum=0.5)
        return self.optimizer


class _OptimizerAndScheduler(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        return self.lr_scheduler


class _Evaluate(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        # Generating samples draws from the global generator.
        noise = float(torch.rand(()))
        metrics = {"eval_noise": noise}
        self.log(metrics)
        return metrics


class _Log(Trainer):
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "doubled": 2 * logs.get("loss", 0.0)}, *args, **kwargs)


@case("trainer/overridden compute_loss", stock=True)
def _loss(run: Run) -> None:
    run.train(trainer(run, _Loss))


@case("trainer/overridden training_step", stock=True)
def _step(run: Run) -> None:
    run.train(trainer(run, _Step))


@case("trainer/overridden create_optimizer", stock=True)
def _optimizer(run: Run) -> None:
    run.train(trainer(run, _Optimizer))


@case("trainer/overridden create_scheduler", stock=True)
def _scheduler(run: Run) -> None:
    run.train(trainer(run, _OptimizerAndScheduler))


@case("trainer/overridden evaluate", stock=True)
def _evaluate(run: Run) -> None:
    run.train(trainer(run, _Evaluate, eval_strategy="steps", eval_steps=2, eval_dataset=tiny.Rows(6)))


@case("trainer/overridden log", stock=True)
def _log(run: Run) -> None:
    run.train(trainer(run, _Log))


class _WithProjector(Trainer):
    """Saves a file of its own with each checkpoint."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            torch.save({"step": self.state.global_step}, Path(output_dir or self.args.output_dir) / "projector.bin")


class _WithNotes(Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / "notes.txt").write_text(str(self.state.global_step))


class _SaveModel(Trainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            (Path(output_dir or self.args.output_dir) / "card.txt").write_text("mine")


@case("trainer/overridden _save", stock=True)
def _save(run: Run) -> None:
    run.train(trainer(run, _WithProjector))
    saved = torch.load(Path(run.output_dir) / "checkpoint-10" / "projector.bin", weights_only=True)
    run.expect_equal("projector.bin", saved, {"step": 10})


@case("trainer/overridden _save_checkpoint", stock=True)
def _save_checkpoint(run: Run) -> None:
    run.train(trainer(run, _WithNotes))
    run.barrier()
    run.expect_equal("notes.txt", (Path(run.output_dir) / "checkpoint-10" / "notes.txt").read_text(), "10")


@case("trainer/overridden save_model", stock=True)
def _save_model(run: Run) -> None:
    run.train(trainer(run, _SaveModel))
    run.expect_equal("card.txt", (Path(run.output_dir) / "checkpoint-10" / "card.txt").read_text(), "mine")


class _OnSave(TrainerCallback):
    """What is in the checkpoint's folder when `on_save` is called."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        files = {path.name for path in (Path(args.output_dir) / f"checkpoint-{state.global_step}").glob("*")}
        self.found.append(f"{state.global_step}: {sorted(files & {'model.safetensors', 'trainer_state.json'})}")


@case("trainer/on_save finds the checkpoint", stock=True, kills=())
def _on_save(run: Run) -> None:
    callback = _OnSave()
    run.train(trainer(run, callbacks=[callback], save_steps=5))
    if run.rank == 0:
        files = ["model.safetensors", "trainer_state.json"]
        run.expect_equal("on_save", callback.found, [f"{step}: {files}" for step in (5, 10)])


@case("trainer/torch module without a config", stock=True)
def _module(run: Run) -> None:
    run.train(
        trainer(run, model=tiny.Perceptron(norm=True), dataset=tiny.Points(), data_collator=default_data_collator)
    )


@case("trainer/several parameter groups", stock=True)
def _groups(run: Run) -> None:
    model = tiny.gpt2()
    groups = [
        {"params": [value for value in model.parameters() if value.ndim > 1], "lr": 1e-2, "name": "matrices"},
        {"params": [value for value in model.parameters() if value.ndim <= 1], "lr": 1e-3, "betas": (0.8, 0.9)},
    ]
    run.train(trainer(run, model=model, optimizers=(torch.optim.AdamW(groups), None)))


@case("trainer/layer-wise rates", stock=True)
def _layers(run: Run) -> None:
    model = tiny.gpt2(n_layer=2)
    groups = [{"params": [value], "lr": 1e-2 * 0.9**number} for number, value in enumerate(model.parameters())]
    run.train(trainer(run, model=model, optimizers=(torch.optim.AdamW(groups), None)))


@case("trainer/frozen parameters", stock=True)
def _frozen(run: Run) -> None:
    model = tiny.gpt2()
    model.transformer.wpe.requires_grad_(False)
    run.train(trainer(run, model=model))


class _Thaw(TrainerCallback):
    """Lets further parameters be trained from the sixth step on; called from the first one after a restart, too."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for value in model.transformer.h.parameters():
            value.requires_grad_(state.global_step >= 5)


@case("trainer/parameters thawed on the way", stock=True)
def _thawed(run: Run) -> None:
    run.train(trainer(run, callbacks=[_Thaw()], ddp_find_unused_parameters=True))


for _name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt"):
    _simple(f"schedule {_name}", lr_scheduler_type=_name, warmup_steps=2)
_simple(
    "schedule warmup_stable_decay",
    lr_scheduler_type="warmup_stable_decay",
    warmup_steps=2,
    lr_scheduler_kwargs={"num_decay_steps": 3},
)
_simple("schedule cosine_with_min_lr", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-3})
_simple(
    "schedule reduce_lr_on_plateau",
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0},
    eval_strategy="steps",
    eval_steps=2,
    eval_dataset=tiny.Rows(6),
)
for _name in ("adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad"):
    _simple(f"optim {_name}", optim=_name)
