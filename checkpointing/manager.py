"""`CheckpointManager`: what a rank uses to save, to resume, and to stop together with the other ranks.

manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, save_steps=100)
for step in range(manager.resume(), total_steps):
    ...                                   # forward, backward, optimizer.step()
    manager.step(step + 1)
manager.close()
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from checkpointing import rng, snapshot
from checkpointing.agreement import Agreement, Flag
from checkpointing.arena import Heartbeat, Phase
from checkpointing.catalog import Catalog
from checkpointing.client import ATTEMPT_ENV, SOCKET_ENV, AgentClient, AgentProcess
from checkpointing.errors import CheckpointError, CommitFailed, Preempted
from checkpointing.manager_environment import LOCATION_ENV, RESUME_ENV
from checkpointing.restore import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    RestorePoint,
    choose,
)
from checkpointing.snapshot import FileImage, TorchFileLayout, blob_image, safetensors_image, torch_bytes
from checkpointing.storage import open_storage

logger = logging.getLogger("checkpointing")


def resume_policy(text: str) -> str | int:
    """`auto`, `never`, or a step.

    Raises:
        ValueError: it is none of them.
    """
    if text in ("auto", "never"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise ValueError(f"resume {text!r} is not allowed; use auto, never, or the number of a committed step")


class CheckpointManager:
    """One per rank. All methods are called by every rank, at the same step, from the thread that trains."""

    def __init__(
        self,
        location: str | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        save_steps: int | None = None,
        keep_last: int | None = None,
        resume: str | int | None = None,
    ) -> None:
        """Connect to the node's checkpoint agent, or start one where there is no supervisor.

        Args:
            location: a directory, or `file://` URL. A supervisor's choice (`CHECKPOINT_LOCATION`) goes first.
            model, optimizer, scheduler, scaler: what is saved and restored; may be given later by `track`.
            save_steps: `step` saves at every multiple of it.
            keep_last: newest checkpoints to keep; None keeps all.
            resume: "auto" (default), "never", or a step. A supervisor's choice (`CHECKPOINT_RESUME`) goes first.

        Raises:
            AgentUnavailable: the agent cannot be reached or started.
            ValueError: location or resume is not usable.
        """
        location = os.environ.get(LOCATION_ENV) or location
        if not location:
            raise ValueError("CheckpointManager needs a location: a directory for the checkpoints")
        self._storage = open_storage(location)
        self._resume = resume_policy(os.environ.get(RESUME_ENV) or str(resume if resume is not None else "auto"))
        self.save_steps = save_steps
        self.keep_last = keep_last
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if distributed else 0
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) if distributed else 1
        # Groups of our own: collectives here must never interleave with the gradients'.
        self._group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self._agreement = Agreement(dist.new_group(backend="gloo") if self.world_size > 1 else None)
        self._own_agent: AgentProcess | None = None
        self._client = self._connect(location)
        self._optimizer_layout = TorchFileLayout(OPTIMIZER_NAME)
        # Configuration and tokenizer: rank 0's are part of every checkpoint.
        self.static_files: dict[str, bytes] = {}
        self._last_saved = -1
        self._start = (0, 0.0)
        self._stop_signalled = False
        self._closed = False
        self.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        self._install_signal_handlers()

    def track(self, *, model: Any, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> None:
        """Set what is saved and restored. A DDP wrapper is looked through."""
        self._model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler

    # -- resuming ------------------------------------------------------------------------------------------------

    def choose(self) -> RestorePoint | None:
        """Agree with all ranks on the checkpoint to go on from; None starts afresh. Changes no training state.

        Raises:
            NoValidCheckpoint: there are checkpoints, but none can be loaded.
        """
        self._beat(Phase.RESTORING, 0)
        return choose(self._storage, self._resume, self._group, self.rank, self.world_size, self._client.announce)

    def resume(self) -> int:
        """Restore everything tracked and the generators; returns the step to go on from, 0 for a fresh start."""
        point = self.choose()
        if point is not None:
            self.restore_model(point)
            self.restore_optimizer(point)
            self.restore_rng(point)
        step = point.step if point is not None else 0
        self.begin(step)
        return step

    def restore_model(self, point: RestorePoint) -> None:
        """Load the weights.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        try:
            self._model.load_state_dict(point.model_state(), strict=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{point.path} does not fit this model: {error}. Use the model that wrote it, or another output_dir."
            ) from None

    def restore_optimizer(self, point: RestorePoint) -> None:
        """Load optimizer, scheduler and scaler state."""
        self._optimizer.load_state_dict(point.torch_object(OPTIMIZER_NAME))
        if self._scheduler is not None and point.has(SCHEDULER_NAME):
            self._scheduler.load_state_dict(point.torch_object(SCHEDULER_NAME))
        if self._scaler is not None and point.has(SCALER_NAME):
            self._scaler.load_state_dict(point.torch_object(SCALER_NAME))

    def restore_rng(self, point: RestorePoint) -> None:
        """Set this rank's generators; call it before the first batch is drawn."""
        name = rng.file_name(self.rank, self.world_size)
        if point.has(name):
            rng.set_state(point.torch_object(name))
        else:
            logger.warning(
                "%s was written by %d ranks: rank %d has no generator state in it and goes on with a fresh one",
                point.path,
                point.manifest.world_size,
                self.rank,
            )

    # -- training ------------------------------------------------------------------------------------------------

    def begin(self, start_step: int) -> None:
        """Say that the training loop starts, at this step."""
        self._last_saved = start_step if start_step else -1
        self._start = (start_step, time.time())
        self._beat(Phase.TRAINING, start_step)

    def end_of_step(self, step: int) -> bool:
        """Heartbeat, and the agreement with all ranks: True where all of them are to save now and stop."""
        self._beat(Phase.TRAINING, step)
        wanted = {Flag.STOP} if self._stop_signalled or self._client.control.stop_requested else set()
        return Flag.STOP in self._agreement.exchange(wanted)

    def step(self, step: int, samples_consumed: int | None = None) -> None:
        """End of a global step in a bare loop: save where one is due, stop where it is agreed.

        Raises:
            Preempted: all ranks have stopped; the state of this step is committed.
        """
        stop = self.end_of_step(step)
        if stop or (self.save_steps is not None and step % self.save_steps == 0):
            self.save(step, step if samples_consumed is None else samples_consumed, wait=stop)
        if stop:
            self.stop(step)

    def save(
        self, step: int, samples_consumed: int, files: dict[str, bytes] | None = None, *, wait: bool = False
    ) -> bool:
        """Snapshot the state of a step and have it committed in the background.

        Args:
            samples_consumed: the data cursor, in samples drawn by all ranks.
            files: this rank's own small files, by name.
            wait: take it even if that means waiting for an arena; without, it is skipped when all are busy.

        Returns:
            False if it was skipped.
        """
        if step == self._last_saved:
            return True
        self._beat(Phase.SAVING, step)
        small = dict(files or {})
        small[rng.file_name(self.rank, self.world_size)] = torch_bytes(rng.state(self.world_size))
        if self.rank == 0:
            if self._scheduler is not None:
                small[SCHEDULER_NAME] = torch_bytes(self._scheduler.state_dict())
            if self._scaler is not None:
                small[SCALER_NAME] = torch_bytes(self._scaler.state_dict())
        images: list[FileImage] = [
            safetensors_image(MODEL_NAME, self._model.state_dict()),
            self._optimizer_layout.image(self._optimizer.state_dict()),
        ]
        images += [blob_image(name, data) for name, data in self._gather(small).items()]
        placed, nbytes = snapshot.place(images)
        arena = self._client.acquire(step, nbytes, wait=wait)
        if arena is not None:
            number, buffer = arena
            snapshot.copy_tensors(placed, buffer, self.local_rank, self.local_world_size)
            if self.local_rank == 0:
                snapshot.copy_literals(placed, buffer)
            extents = [(file.image.name, file.offset, file.image.nbytes) for file in placed]
            self._client.staged(number, extents, self.world_size, samples_consumed, self.keep_last)
            self._last_saved = step
        self._beat(Phase.TRAINING, step)
        return arena is not None

    def wait_for_commit(self) -> None:
        """Block until the last snapshot is committed.

        Raises:
            CommitFailed: storage refused it.
        """
        if self._last_saved > self._start[0]:
            error = self._client.wait(self._last_saved)
            if error is not None:
                raise CommitFailed(error)

    def stop(self, step: int) -> None:
        """End this rank together with all others, once the snapshot of `step` is committed.

        Raises:
            Preempted: always, after success.
            CommitFailed: storage refused the snapshot.
        """
        self.close()
        raise Preempted(step)

    def close(self) -> None:
        """End of training: wait for the last commit; leave nothing in flight."""
        if self._closed:
            return
        self._closed = True
        step = self._client.control.read(self.local_rank).step
        self._agreement.drain()
        self.wait_for_commit()
        if self._group is not None:
            # Nobody leaves before everybody's commit is known: an early exit would look like a failure to the launcher.
            dist.barrier(group=self._group)
        self._beat(Phase.DONE, step)
        self._client.close()
        if self._own_agent is not None:
            self._own_agent.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _connect(self, location: str) -> AgentClient:
        socket_path = os.environ.get(SOCKET_ENV)
        attempt = int(os.environ.get(ATTEMPT_ENV, "0"))
        if socket_path is None:
            socket_path, attempt = self._start_own_agent(location)
        return AgentClient(socket_path, attempt, self.rank, self.local_rank, self.local_world_size)

    def _start_own_agent(self, location: str) -> tuple[str, int]:
        """Local rank 0 starts the node's agent; its peers learn the address from it."""
        mine: tuple[str, int] | str | None = None
        if self.local_rank == 0:
            try:
                manifests = [entry.manifest for entry in Catalog(self._storage).entries() if entry.manifest]
                run_id = manifests[0].run_id if manifests else uuid.uuid4().hex
                attempt = max((manifest.attempt for manifest in manifests), default=0) + 1
                self._own_agent = AgentProcess.start(location, run_id, commits=self.rank == 0)
                mine = (self._own_agent.socket_path, attempt)
            except CheckpointError as error:
                mine = str(error)
        everyone: list[Any] = [mine]
        if self._group is not None:
            everyone = [None] * self.world_size
            dist.all_gather_object(everyone, mine, group=self._group)
        leader = everyone[self.rank - self.local_rank]
        if isinstance(leader, str):
            raise CheckpointError(leader)
        return leader[0], leader[1]

    def _gather(self, small: dict[str, bytes]) -> dict[str, bytes]:
        """All ranks' small files on rank 0, with the static ones; the others keep their own."""
        if self._group is not None:
            # Rank 0's own stay where they are: a long log history must not travel.
            everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
            dist.gather_object(None if self.rank == 0 else small, everyone, dst=0, group=self._group)
            for other in everyone or []:
                small |= other or {}
        return {**self.static_files, **small} if self.rank == 0 else small

    def _beat(self, phase: Phase, step: int) -> None:
        start_step, start_time = self._start
        self._client.control.write(self.local_rank, Heartbeat(phase, step, time.time(), start_step, start_time))

    def _install_signal_handlers(self) -> None:
        """Preemption notices set a flag and nothing else; the step boundary acts on it."""
        if threading.current_thread() is not threading.main_thread():
            return

        def request_stop(*_: object) -> None:
            self._stop_signalled = True

        for number in (signal.SIGTERM, signal.SIGUSR1):
            with contextlib.suppress(OSError):
                signal.signal(number, request_stop)
