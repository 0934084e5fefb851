"""Has every resume prove itself: each step is recorded, and what is recomputed is compared with the record."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checkpointing.agent.events import StepsRepeated
from checkpointing.commit.catalog import read_file
from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.format.layout import step_record_name
from checkpointing.format.step_record import RING_BYTES, StepRecord, StepRing, history_of, parse_records
from checkpointing.manager.node_services import NodeServices
from checkpointing.manager.options import Options
from checkpointing.manager.tracked import Tracked
from checkpointing.process import device
from checkpointing.process.ranks import Ranks
from checkpointing.proof.digests import generator_digests
from checkpointing.proof.recorder import StepRecorder
from checkpointing.proof.repetition import ResumeProof
from checkpointing.snapshot.request import SmallFile

logger = logging.getLogger("checkpointing")

# By their names in a record, what scripts and the Trainer call a step's figures.
FIGURES = {"loss": "loss", "gradient_norm": "grad_norm"}


class Proving:
    """The recording and comparing part of a manager; every rank calls all methods at the same step.

    Args:
        options: The manager's options.
        ranks: This rank.
        node: What is used of the node's agent.
        tracked: Whose optimizer's parameters are recorded.
        candidates: Names, at a step, what was probably not restored, where something differs.
    """

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        node: NodeServices,
        tracked: Tracked,
        candidates: Callable[[int], list[str]],
    ) -> None:
        self._options, self._ranks, self._node, self._tracked = options, ranks, node, tracked
        self._proof = ResumeProof(ranks, options.verify, self._report, candidates)
        self._recorder: StepRecorder | None = None
        self._history = 0
        self._restored = b""
        self._earlier: dict[int, StepRecord] = {}
        self._is_fresh = True
        self._pass = _ForwardPass(self.batch)
        # Where the model's own passes are not seen, what was drawn for it counts.
        self._takes_draws = self._has_warned = False

    def newest_comparable(self) -> int | None:
        """Return with `strict` the newest step that any rank has a record of, which is to be recomputed.

        All ranks call this together. Where no process is left that has seen later steps, the record is that in the
        newest checkpoint.
        """
        if self._options.verify != "strict":
            return None
        own = self._ring().records() or parse_records(self._kept(), self._history)
        if not own:
            own = parse_records(self._beside_newest(), self._history)
        self._earlier = own
        return max(self._ranks.gather(max(own, default=0))) or None

    def _ring(self) -> StepRing:
        settings = self._options.settings
        # Other micro-batches, or steps that are left out, are another computation.
        how = f"{self._node.connection.stage.name}/{settings.micro_batch_divisor}/{settings.skipped_steps}"
        self._history = history_of(how, self._ranks.rank, self._ranks.world_size)
        return StepRing(self._node.connection.client.step_ring.buffer[:RING_BYTES], self._history)

    def _beside_newest(self) -> bytes:
        """Return the record in the newest checkpoint; nothing where it cannot be read, as the checkpoint then is."""
        name = step_record_name(self._ranks.rank)
        try:
            entry = next((entry for entry in self._node.connection.tiers.catalog.scan() if entry.manifest), None)
            return read_file(entry.storage, entry.manifest, name) if entry is not None and entry.manifest else b""
        except (OSError, CheckpointError) as error:
            logger.warning("the step record in the newest checkpoint cannot be read: %s", error)
            return b""

    def restored(self, point: LoadedCheckpoint | None) -> None:
        """Note what training resumes from; None where it starts from the beginning."""
        name = step_record_name(self._ranks.rank)
        self._is_fresh = point is None
        self._restored = point.bytes_of(name) if point is not None and point.has(name) else b""

    def begin(self, start_step: int) -> None:
        """Begin to record after a step, and to compare with what was recorded before; all ranks call this together."""
        if self._options.verify == "off" or not self._tracked.has_training:
            return
        ring = self._ring()
        earlier = self._earlier or ring.records()
        if not self._is_fresh and max(earlier, default=0) <= start_step:
            earlier = parse_records(self._kept(), self._history) or earlier
        self._recorder = StepRecorder(ring, self._proof.differs)
        self._recorder.restore(parse_records(self._restored, self._history).values())
        self._restored = b""
        self._proof.begin(start_step, earlier)

    def _kept(self) -> bytes:
        """Return the record that an agent has kept next to the checkpoints when its ranks were gone."""
        try:
            return self._node.connection.tiers.durable.sidecars.read(step_record_name(self._ranks.rank))
        except OSError as error:
            logger.warning("the step record cannot be read (%s): what is recomputed is not compared", error)
            return b""

    def watch(self, model: Any) -> None:
        """Record what enters a model from now on; for loops that do not call `batch`."""
        if self._recorder is not None and isinstance(model, torch.nn.Module):
            self._pass.watch(model)

    def look_at_start(self) -> None:
        """Compare the generators, once they are restored and before anything draws from them; the first call counts."""
        self._proof.look_at_start(generator_digests)

    def batch(self, batch: object) -> None:
        """Record a micro-batch as it enters the model."""
        if self._recorder is not None:
            with self._harmless():
                self._recorder.batch(batch)

    def drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over batches that a loop draws; they are recorded where the model's passes are not seen."""
        for batch in batches:
            if self._takes_draws:
                self.batch(batch)
            yield batch

    def loss(self, loss: torch.Tensor) -> None:
        """Record the loss of a micro-batch."""
        if self._recorder is not None:
            with self._harmless():
                self._recorder.loss(loss)

    def end_step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Record the step that has ended.

        Args:
            step: Its number.
            figures: `loss` and `grad_norm`, numbers or tensors of one, where they are known; others do not count.
        """
        if self._recorder is None:
            return
        if not self._pass.was_seen:
            self._takes_draws = True
        with self._harmless():
            self._record(self._recorder, step, figures)

    def _record(self, recorder: StepRecorder, step: int, figures: Mapping[str, Any]) -> None:
        scaler = getattr(self._tracked.state.scaler, "_scale", None)
        known = {name: value for name, theirs in FIGURES.items() if _is_number(value := _own(figures.get(theirs)))}
        recorder.end(step, self._tracked.state.torch_optimizer, figures={**known, "loss_scale": scaler})

    def conclude(self, step: int, *, agreed: bool) -> None:
        """Compare with all ranks, where that is due.

        Args:
            step: The step that has been recorded.
            agreed: Whether any rank has found a difference.

        Raises:
            RepetitionDiffers: With `resume.verify=strict`: the step differs.
        """
        if self._recorder is not None:
            self._proof.end_of_step(step, self._settle, agreed=agreed)

    @property
    def has_found_difference(self) -> bool:
        """Whether this rank has found one that the others have not heard of."""
        return self._proof.wants_to_tell

    def files(self, step: int) -> dict[str, SmallFile]:
        """Return this rank's file of a checkpoint."""
        recorder = self._recorder
        return {step_record_name(self._ranks.rank): lambda: recorder.file(step)} if recorder is not None else {}

    def close(self) -> None:
        """Report what has been compared so far; all ranks call this together."""
        self._pass.close()
        if self._recorder is not None:
            self._proof.close(self._settle)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Continue where something cannot be recorded: batches and optimizers are of any kind."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("a step cannot be recorded, and is not compared after a resume: %r", error)

    def _settle(self) -> None:
        assert self._recorder is not None
        self._recorder.settle(wait=True)

    def _report(self, event: StepsRepeated) -> None:
        self._node.reporter.steps_repeated(event)
        if self._ranks.is_first and not self._options.settings.agent_socket:
            print(f"checkpointing: {event.describe()}", file=sys.stderr, flush=True)


def _own(value: Any) -> Any:
    """Return this rank's part of a figure that may be a sharded tensor."""
    return value._local_tensor if sharding.is_dtensor(value) else value


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _ForwardPass:
    """Sees what enters a model while it trains.

    Args:
        batch: Takes the arguments of each pass.
    """

    def __init__(self, batch: Callable[[object], None]) -> None:
        self._batch = batch
        self._hook: Any = None
        self.was_seen = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks are copied, and pickled, with their model. A copy of it is not watched.
        return _ForwardPass, (_ignore,)

    def watch(self, model: torch.nn.Module) -> None:
        """Watch a model from now on."""
        self.close()
        self._hook = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def close(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook.remove()

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()) or device.is_capturing():
            return
        self.was_seen = True
        self._batch((args, kwargs))


def _ignore(batch: object) -> None:
    """Take no notice."""
