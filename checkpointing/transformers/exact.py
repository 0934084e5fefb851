"""Virtual ranks in a Trainer's loop: overrides of what depends on the number of processes there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer
from torch.utils.data import IterableDataset

from checkpointing.data.dealing import Dealing, block_of
from checkpointing.errors import CheckpointError
from checkpointing.exact.gradients import ExactGradients
from checkpointing.exact.self_test import SelfTest, gathered
from checkpointing.exact.summation import TreeNode, total
from checkpointing.transformers.exact_figures import EvaluationFigures, Figures, fill_last_batch
from checkpointing.transformers.further_states import generates_ahead
from checkpointing.transformers.job_shape import DataRanks, tensor_parallel_size
from checkpointing.transformers.train_call import ResilientOptions, Start, TrainCall

# As many virtual ranks as there were ranks when the run began.
AUTO = -1
_KEY = "virtual ranks"
# In place of an accelerator's: returns what is given instead of what all ranks give.
GatherTensors = Callable[[Any], Any]


class ExactSteps:
    """The steps of one training, computed by virtual ranks; `on_host` keeps partial sums in the host's memory."""

    def __init__(self, dealing: Dealing, seed: int, *, on_host: bool = False) -> None:
        self.dealing, self._seed, self._on_host = dealing, seed, on_host
        self._gradients: ExactGradients | None = None
        self._figures: Figures | None = None
        # What an accelerator does while a loss is computed, instead of gathering; None to gather.
        self.gather: GatherTensors | None = None
        # Of this step: virtual rank and round of each micro-batch still to come; None for one that only fills up.
        self._plan: list[tuple[int, int] | None] = []
        self._rounds = 0
        self._losses: dict[int, torch.Tensor] = {}
        # What was computed last only fills up.
        self.filled = False

    def draw(self, num_batches: int) -> int:
        """Return how many micro-batches this rank draws, of a number that is equal on all ranks."""
        return num_batches // self.dealing.largest * len(self.dealing.block)

    def arrange(self, drawn: list[Any]) -> list[Any]:
        """Return the micro-batches of a step in the order of computation; ranks with fewer begin with others."""
        dealing = self.dealing
        arranged = dealing.arranged(drawn)
        self._rounds = len(drawn) // len(dealing.block)
        fillers = self._rounds * dealing.largest - len(drawn)
        self._plan = [None] * fillers + [(virtual_rank, number) for virtual_rank, number, _ in arranged]
        self._losses.clear()
        if self._gradients is not None:
            self._gradients.forget()
        return [drawn[0]] * fillers + [batch for *_, batch in arranged]

    def compute(self, trainer: Any, model: Any, inputs: Any, compute: Any) -> torch.Tensor:
        """Compute the next micro-batch, and return a loss: the step's, of all virtual ranks, with the last one."""
        place, step = self._plan.pop(0), trainer.state.global_step
        if self._gradients is None:
            self._gradients = ExactGradients(model, self.dealing.virtual_ranks, self._seed, on_host=self._on_host)
            self._test(trainer, inputs, compute)
        gradients = self._gradients
        self.filled = place is None
        measured = contextlib.nullcontext() if self._figures is None else self._figures.of(place and place[::-1])
        if place is None:
            # The collectives must be those of the other ranks: in `compute_loss`, and in DDP's forward pass, which
            # rebuilds its buckets together with all ranks where gradients are enabled.
            model.train()
            with measured, gradients.unsummed(), gradients.drawing(self.dealing.block[0], step, 0):
                trainer.compute_loss(model, trainer._prepare_inputs(inputs))
            return torch.zeros((), device=trainer.args.device)
        virtual_rank, number = place
        was = trainer.current_gradient_accumulation_steps
        # By this, losses are divided that are means over a micro-batch.
        trainer.current_gradient_accumulation_steps = self._rounds
        try:
            # The Trainer's own context does nothing on a single rank.
            not_last = gradients.unsummed() if self._plan else contextlib.nullcontext()
            with measured, not_last, gradients.drawing(virtual_rank, step, number):
                loss: torch.Tensor = compute(inputs)
        finally:
            trainer.current_gradient_accumulation_steps = was
        self._losses[virtual_rank] = self._losses[virtual_rank] + loss if number else loss
        if number == self._rounds - 1:
            gradients.end_of_rank(virtual_rank)
        if self._figures is not None and not self._plan:
            self._figures.merge(gathered)
        return self._mean_loss() if not self._plan else torch.zeros_like(loss)

    def _test(self, trainer: Any, inputs: Any, compute: Any) -> None:
        """Find what cannot be exact, before the first step."""
        assert self._gradients is not None

        def with_others_altered(batch: Any) -> None:
            self.gather = altered
            try:
                compute(batch)
            finally:
                self.gather = None

        test = SelfTest(self._gradients, trainer.model)
        if not Figures.are_kept_by(trainer):
            test.run(inputs, compute)
            return
        figures = Figures(trainer, "train")
        with figures.of(None):
            test.run(inputs, compute, with_others_altered)
        # What is gathered goes into figures only.
        self._figures, self.gather = figures, own

    def once(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a step's loss for the first of its micro-batches, and zero for the others."""
        is_first = self._plan != []
        self._plan = []
        return loss if is_first else torch.zeros_like(loss)

    def _mean_loss(self) -> torch.Tensor:
        """Return the mean of all virtual ranks' losses of this step, in the order of the tree."""
        dealing = self.dealing
        mine = torch.stack([self._losses[virtual_rank].float() for virtual_rank in dealing.block])
        everyone = [mine]
        if dealing.world_size > 1:
            padded = torch.nn.functional.pad(mine, (0, dealing.largest - len(mine)))
            everyone = [torch.empty_like(padded) for _ in range(dealing.world_size)]
            dist.all_gather(everyone, padded)
        leaves: dict[TreeNode, torch.Tensor] = {}
        for rank, losses in enumerate(everyone):
            block = block_of(rank, dealing.world_size, dealing.virtual_ranks)
            leaves |= {TreeNode(virtual_rank): losses[place] for place, virtual_rank in enumerate(block)}
        return total(leaves, dealing.virtual_ranks, torch.add) / dealing.virtual_ranks


class ExactMixin:
    """Overrides of a Trainer whose steps may be computed by virtual ranks."""

    _exact: ExactSteps | None = None
    _evaluation: EvaluationFigures | None = None
    _options: ResilientOptions

    def _begin_exact(self, session: TrainCall, start: Start) -> None:
        """Set up the virtual ranks of a training that is about to begin, or to continue with the same number."""
        ranks, record = DataRanks.of(self), start.record
        before = int(record.job.get(_KEY) or 0) if record is not None and start.step > 0 else None
        count = self._options.virtual_ranks
        if count == AUTO:
            count = before or ranks.planned
        if before is not None and count != before:
            assert start.point is not None
            raise CheckpointError(
                f"{start.point.label} was made with {before or 'no'} virtual ranks, and now there are "
                f"{count or 'none'} (elastic.virtual_ranks): the run would end in other bits. Use the same number, "
                "or train in another output_dir"
            )
        self._exact = None
        if not count:
            return
        check_exact(self)
        dealing = Dealing(count, ranks.rank, ranks.count)
        session.data.deal(dealing)
        session.guard.expect_means()
        session.job = {**session.job, _KEY: str(count)}
        seed = self.args.seed  # type: ignore[attr-defined]
        self._exact = ExactSteps(dealing, seed, on_host=self._options.on_host)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the micro-batches of this rank's virtual ranks."""
        exact, draw = self._exact, super().get_batch_samples  # type: ignore[misc]
        if exact is None:
            return draw(*args, **kwargs)
        epoch_iterator, num_batches, *rest = args
        drawn, count = draw(epoch_iterator, exact.draw(num_batches), *rest, **kwargs)
        return exact.arrange(drawn), count

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute a micro-batch of a virtual rank."""
        exact, step = self._exact, super().training_step  # type: ignore[misc]
        if exact is None:
            plain: torch.Tensor = step(model, inputs, *args, **kwargs)
            return plain
        return exact.compute(self, model, inputs, lambda batch: step(model, batch, *args, **kwargs))

    def _share_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what a micro-batch adds of a step's loss that is known."""
        if self._exact is not None:
            return self._exact.once(loss)
        return loss / self.current_gradient_accumulation_steps  # type: ignore[attr-defined,no-any-return]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss that is scaled by the number of virtual ranks, where it would be by that of processes."""
        exact, evaluation = self._exact, self._evaluation
        if exact is None:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        gather = exact.gather if evaluation is None else own
        measured = contextlib.nullcontext() if evaluation is None else evaluation.of_next()
        accelerator = self.accelerator  # type: ignore[attr-defined]
        with measured, as_virtual_ranks(accelerator, exact.dealing.virtual_ranks, gather):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Count the operations of a micro-batch; those of one that only fills up do not count."""
        is_filled = self._exact is not None and self._exact.filled
        return 0 if is_filled else super().floating_point_ops(inputs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        counts = self.args.include_num_input_tokens_seen != "no"  # type: ignore[attr-defined]
        if counts and self._exact is not None and self._exact.filled:
            # Every rank has to call it.
            inputs = {
                name: value[:0] for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()
            }
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the figures do not depend on the number of ranks."""
        exact, loop = self._exact, super().evaluation_loop  # type: ignore[misc]
        if exact is None:
            return loop(dataloader, *args, **kwargs)
        dealing = exact.dealing
        if dealing.world_size == 1:
            fill_last_batch(dataloader)
        if not Figures.are_kept_by(self):
            return loop(dataloader, *args, **kwargs)
        evaluation = self._evaluation = EvaluationFigures(self, dataloader, dealing.rank, dealing.world_size)
        try:
            ended = loop(dataloader, *args, **kwargs)
        finally:
            self._evaluation = None
        evaluation.merge(gathered)
        return ended

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        gather = transformers.trainer.nested_gather
        if self._exact is not None:
            # All ranks have the same mean already; that of several equal numbers may be another one.
            transformers.trainer.nested_gather = lambda tensors, *_: tensors
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            transformers.trainer.nested_gather = gather


def own(value: Any) -> Any:
    """Return the value."""
    return value


def altered(value: Any) -> Any:
    """Return other tensors of the same shapes, to find out what depends on them."""
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype == torch.bool else value + 1
    if isinstance(value, dict):
        return {key: altered(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(altered(one) for one in value)
    return value


@contextlib.contextmanager
def as_virtual_ranks(accelerator: Any, count: int, gather: GatherTensors | None = None) -> Iterator[None]:
    """Have an accelerator say that there are `count` processes, and use `gather` instead of gathering, unless None."""
    cls = type(accelerator)
    members: dict[str, Any] = {"num_processes": property(lambda _: count)}
    if gather is not None:
        members["gather"] = lambda _, tensor: gather(tensor)
        members["gather_for_metrics"] = lambda _, input_data, use_gather_object=False: gather(input_data)
    accelerator.__class__ = type(cls.__name__, (cls,), members)
    try:
        yield
    finally:
        accelerator.__class__ = cls


def check_exact(trainer: Any) -> None:
    """Refuse a trainer that shards the model, or whose samples depend on the number of ranks (CheckpointError)."""
    reasons = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process": trainer.args.n_gpu > 1,
        "auto_find_batch_size": trainer.args.auto_find_batch_size,
        "torch_compile": bool(trainer.args.torch_compile),
        "average_tokens_across_devices=False": not trainer.args.average_tokens_across_devices,
        "dispatch_batches": bool(trainer.args.accelerator_config.dispatch_batches),
        "split_batches": bool(trainer.args.accelerator_config.split_batches),
        "a streamed data set": isinstance(trainer.train_dataset, IterableDataset),
        "a trainer that generates ahead of its steps": generates_ahead(trainer),
        "tensor parallelism": tensor_parallel_size(trainer) > 1,
    }
    found = next((name for name, used in reasons.items() if used), None)
    if found is not None:
        raise CheckpointError(
            f"virtual ranks are not possible with {found}. Use plain DDP and a data set with a length, or no virtual "
            "ranks (elastic.mode)"
        )
