"""Copies what `async_save` is given while training continues, as `CheckpointManager` copies its snapshots.

Stock torch copies the whole state before `async_save` returns, into memory that is new each time. Here only what
something other than an optimizer may change is copied at once. Parameters and what optimizers hold are copied by a
thread, during the next forward and backward pass, and the next step of an optimizer waits for it: `CopyThread`. What
has changed meanwhile all the same makes the save fail, and is copied at once from then on.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import staging as torch_staging
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkpointing.dcp.seam import STAGING
from checkpointing.errors import CheckpointError
from checkpointing.files import sharding
from checkpointing.process import device
from checkpointing.snapshot.copy_thread import Copy, CopyThread
from checkpointing.state.samples import Sampler, Samples, listed


class Memory(StateDictStager):
    """Memory on the host for one save, and for later ones of the same tensors.

    Attributes:
        is_free: Whether no save reads from it.
        pairs: Storages that are yet to be copied, with their copies, since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_free = True
        self.pairs: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._later: set[int] = set()

    def begin(self, later: set[int]) -> None:
        """Begin a save, with the addresses of storages that are copied later."""
        self.is_free, self.pairs, self._later = False, [], later

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        known: Any = self._cached_storage_mapping
        copied: torch.UntypedStorage | None = known.get(storage)
        if copied is None or copied.nbytes() != storage.nbytes():
            pinned = storage.device.type != "cpu" and device.can_pin()
            copied = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            self._cached_storage_mapping[storage] = copied
        if storage.data_ptr() in self._later:
            self.pairs.append((storage, copied))
        else:
            copied.copy_(storage, non_blocking=non_blocking)
        return copied


class Staging:
    """The copies of one rank; `stage` is called by the thread that trains.

    Attributes:
        overlaps: Whether parameters and what optimizers hold are copied later.
    """

    def __init__(self) -> None:
        self.overlaps = True
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizers.add(optimizer))
        self._memories: list[Memory] = []
        self._thread: CopyThread | None = None
        self._sampler = Sampler()
        # By the identity of what `stage` has returned, until it is saved.
        self._copies: dict[int, tuple[Future[Any], Memory]] = {}

    def stage(self, state_dict: Any) -> Any:
        """Return a copy of a state on the host, whose tensors are complete once `when_copied` is."""
        if self._thread is None:
            self._thread = CopyThread()
        self._thread.settle()
        memory = next((one for one in self._memories if one.is_free), None)
        if memory is None:
            memory = Memory()
            self._memories.append(memory)
        held = list(self._held()) if self.overlaps else []
        memory.begin({tensor.untyped_storage().data_ptr() for _, tensor in held})
        with torch.no_grad():
            staged = memory.stage(state_dict)
        taken = {storage.data_ptr() for storage, _ in memory.pairs}
        sources = [(name, tensor) for name, tensor in held if tensor.untyped_storage().data_ptr() in taken]
        done: Future[Any] = Future()
        self._copies[id(staged)] = done, memory
        if sources:
            work = _Work(staged, memory.pairs, sources, self._sampler, done, self._give_up_overlap)
            self._thread.submit(work, device.of([sources[0][1]]))
        else:
            done.set_result(staged)
        return staged

    def _give_up_overlap(self) -> None:
        self.overlaps = False

    def when_copied(self, staged: Any) -> Any:
        """Return a future of what `stage` has returned, or what is not of it as it is."""
        found = self._copies.get(id(staged))
        return found[0] if found is not None else staged

    def saved(self, staged: Any) -> None:
        """Note that a save has ended: its memory may be used again."""
        found = self._copies.pop(id(staged), None)
        if found is not None:
            found[1].is_free = True

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that only a step of an optimizer changes, with names."""
        for number, optimizer in enumerate(list(self._optimizers)):
            parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            for place, parameter in enumerate(parameters):
                state = optimizer.state.get(parameter, {})
                values = {"": parameter, **(state if isinstance(state, dict) else {})}
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        own = value._local_tensor if sharding.is_dtensor(value) else value  # type: ignore[attr-defined]
                        yield f"parameter {place} of optimizer {number}{key and f' ({key})'}", own

    def close(self) -> None:
        """End the thread and the watch on optimizers, once nothing is saved."""
        self._hook.remove()
        if self._thread is not None:
            self._thread.settle()
            self._thread.close()


class _Work:
    """Runs in the copy thread; its outcome is that of the save, so that no error of it reaches the training.

    Args:
        staged: What the future returns.
        pairs: What is copied, and where to.
        sources: The tensors that are copied.
        sampler: Draws samples of them.
        done: Told the outcome.
        torn: Called if something has changed meanwhile.
    """

    def __init__(
        self,
        staged: Any,
        pairs: list[tuple[torch.UntypedStorage, torch.UntypedStorage]],
        sources: list[tuple[str, torch.Tensor]],
        sampler: Sampler,
        done: Future[Any],
        torn: Callable[[], None],
    ) -> None:
        self._staged, self._pairs, self._sources = staged, pairs, sources
        self._sampler, self._done, self._torn = sampler, done, torn
        self._samples: Samples = sampler.hand_over(sources)
        self._versions = [tensor._version for _, tensor in sources]

    def __call__(self, copy: Copy) -> None:
        try:
            for source, target in self._pairs:
                target.copy_(source, non_blocking=True)
            changed = self._samples.look()
            copy.copied(self._num_changed)
            names = changed.changed()
            if copy.changed:
                names = names or [name for name, _ in self._sources][: copy.changed]
            if names:
                self._torn()
                raise CheckpointError(
                    f"training has changed {listed(names)} before it was copied, without an optimizer: this save is "
                    "not complete, and was given up; the next ones are copied at once"
                )
            self._sampler.prepare_next()
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(self._staged)

    def _num_changed(self) -> int:
        return sum(
            tensor._version != version for (_, tensor), version in zip(self._sources, self._versions, strict=True)
        )


class _Executor:
    """In place of torch's: saves in a thread, once everything is copied; a process of its own would not commit.

    Args:
        staging: Copies the state.
        thread: Torch's executor with a thread.
    """

    def __init__(self, staging: Staging, thread: Callable[[], Any]) -> None:
        self._staging, self._thread = staging, thread

    def execute_save(self, staged: Any, **options: Any) -> Any:
        """Begin a save; return its future."""
        upload = self._thread().execute_save(self._staging.when_copied(staged), **options)
        # The callback keeps what was staged, whose identity it is.
        upload.add_done_callback(lambda _: self._staging.saved(staged))
        return upload


def _staged_by(staging: Staging, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stager's `stage`, through `staging` where `async_save` calls it; to others its result is complete."""

    @functools.wraps(plain)
    def stage(self: Any, state_dict: Any, **options: Any) -> Any:
        if not _is_called_by_async_save():
            return plain(self, state_dict, **options)
        staged = staging.stage(state_dict)
        options_of_stager = getattr(self, "_config", None)
        is_async = options_of_stager is not None and options_of_stager.use_async_staging
        return staging.when_copied(staged) if is_async else staged

    return stage


def _is_called_by_async_save() -> bool:
    # `stage` itself, perhaps a writer's that goes on to it, and a function within `async_save`.
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(2):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == state_dict_saver.__name__:
            return True
        frame = frame.f_back
    return False


def overlap_copies() -> Staging | None:
    """Have `async_save` copy through `Staging`; return it, or None where this torch has other names."""
    if any(name.problem() is not None for name in STAGING):
        return None
    staging = Staging()
    for stager in (torch_staging.DefaultStager, torch_staging.BlockingAsyncStager):
        stager.stage = _staged_by(staging, stager.stage)  # type: ignore[method-assign]
    saving: Any = state_dict_saver
    executor = functools.partial(_Executor, staging, saving._ThreadBasedAsyncCheckpointExecutor)
    saving._ThreadBasedAsyncCheckpointExecutor = saving._ProcessBasedAsyncCheckpointExecutor = executor
    return staging
