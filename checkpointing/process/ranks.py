"""This process among the ranks of a training: the collectives that checkpointing needs, and flags that all agree on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError
from checkpointing.host.environment import rank_settings
from checkpointing.process.trees import replaced, tensors_in

T = TypeVar("T")
Part = tuple[memoryview, int, int]
# Each rank copies smaller tensors itself: a collective would take longer.
_SMALL_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Ranks:
    """A rank, and a process group that exactly one of its threads uses.

    Attributes:
        rank: Number of this rank among all.
        world_size: Number of all ranks.
        local_rank: Number of this rank among those of its node, which follow each other.
        local_world_size: Number of ranks on this node.
        group: A gloo group of all ranks; None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_this_process(cls) -> Ranks:
        """Ask torch.distributed, and create a group; all ranks must call this together.

        Raises:
            CheckpointError: This is one of several processes, but torch.distributed is not initialized; the script has
                made ranks of its own under a supervisor; or ranks of one machine do not follow each other.
        """
        if not dist.is_available() or not dist.is_initialized():
            if "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1:
                # Each of them would act as rank 0 of one, and write the same checkpoints.
                raise CheckpointError(
                    f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE), but torch.distributed is not "
                    "initialized: call torch.distributed.init_process_group() before the CheckpointManager is made, or "
                    "start one process (--nproc-per-node 1)"
                )
            return cls()
        ranks = cls(dist.get_rank(), dist.get_world_size()).with_new_group()
        places = ranks.gather((launched_place(ranks.rank, ranks.world_size, os.environ), _machine()))
        own = places[ranks.rank][0]
        if any(place is None for place, _ in places):
            # Such as those of torch.multiprocessing.spawn.
            if rank_settings().agent_socket:
                raise CheckpointError(
                    f"the script has made {ranks.world_size} ranks itself (torch.multiprocessing.spawn, say), which "
                    "`runner start` does not know: leave that out, have each rank take its number from LOCAL_RANK, and "
                    f"start them by `runner start --nproc-per-node {ranks.world_size}`; or start the script without "
                    "the runner"
                )
            own = place_on_machine([machine for _, machine in places], ranks.rank)
        assert own is not None
        return dataclasses.replace(ranks, local_rank=own[0], local_world_size=own[1])

    def with_new_group(self) -> Ranks:
        """Return the same ranks with a group for another thread; all ranks must call this together.

        The groups are separate because collectives of two threads, or those of the gradients, must not interleave.
        """
        return dataclasses.replace(self, group=dist.new_group(backend="gloo") if self.world_size > 1 else None)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self.group is None:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def gather_later(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Send as many numbers from each rank to all, without waiting; return what waits for every rank's, by rank."""
        if self.group is None:
            return lambda: [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        work: Any = dist.all_gather(everyone, own, group=self.group, async_op=True)

        def wait() -> list[list[float]]:
            work.wait()
            return [other.tolist() for other in everyone]

        return wait

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def transfer(self, outgoing: Sequence[Part], incoming: Sequence[Part]) -> None:
        """Send bytes to single ranks, and receive them; all ranks call this together.

        Args:
            outgoing: Bytes, the rank that they are for, and a number that tells them from others to that rank.
            incoming: Memory for bytes, the rank that they come from, and the number.
        """
        works = [dist.irecv(_tensor(data), rank, self.group, tag) for data, rank, tag in incoming]
        works += [dist.isend(_tensor(data), rank, self.group, tag) for data, rank, tag in outgoing]
        for work in works:
            assert work is not None
            work.wait()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send a tensor to one rank, and return when it is on its way; raises RuntimeError if that one is gone."""
        dist.send(tensor, rank, self.group, tag)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> int:
        """Receive a tensor from one rank, or from any; return from which. Raises RuntimeError if that one is gone."""
        return dist.recv(tensor, rank, self.group, tag)

    def close_group(self) -> None:
        """Give the group up; all ranks call this together."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks; `values` is overwritten."""
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def can_share_copies(self, device: torch.device) -> bool:
        """Return whether `to_device` is worthwhile: one machine has all ranks, and a back end for its accelerators.

        Gloo would copy tensors back to the host first; with several machines, each rank copies what its machine has.
        """
        if device.type == "cpu" or self.world_size == 1 or self.world_size != self.local_world_size:
            return False
        return backend_of(device) not in ("gloo", "mpi")

    def to_device(
        self, state: Any, device: torch.device, broadcast: Callable[[torch.Tensor, int], object] = dist.broadcast
    ) -> Any:
        """Return a nested state with its large tensors on the device; all ranks of a node call this with equal states.

        Each rank copies a share, and the default process group broadcasts it. Host memory that is not pinned crosses
        the
        bus through the driver's own buffers, at a few GB/s and the cost of a processor; between accelerators the
        process
        group is many times as fast. Small tensors, and views of others, stay where they are.
        """
        large: dict[int, torch.Tensor] = {}
        for tensor in tensors_in(state):
            # Tensors that share their memory must share it afterwards, too.
            is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            if tensor.device.type == "cpu" and tensor.nbytes >= _SMALL_BYTES and is_alone:
                large.setdefault(id(tensor), tensor)
        moved: dict[int, torch.Tensor] = {}
        copiers = owners([tensor.nbytes for tensor in large.values()], self.world_size)
        for (key, tensor), owner in zip(large.items(), copiers, strict=True):
            moved[key] = tensor.to(device) if owner == self.rank else torch.empty_like(tensor, device=device)
            # As bytes: not every back end supports every type.
            broadcast(moved[key].view(-1).view(torch.uint8), owner)
        return replaced(state, lambda value: moved.get(id(value), value))


def launched_place(rank: int, world_size: int, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the number of a rank on its node, and how many are there, as its launcher says.

    None where no launcher says it, or where it has launched other ranks than these.

    Args:
        rank: Number of the rank among all.
        world_size: Number of all ranks.
        environment: Variables of this process.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    said = [int(environment[name]) if environment.get(name, "").isdecimal() else None for name in names]
    if said[:2] != [rank, world_size] or said[2] is None or said[3] is None:
        return None
    if environment.get("GROUP_WORLD_SIZE") == "1" and said[3] != world_size:
        # The script has set some of them, for ranks of its own.
        return None
    return said[2], said[3]


def place_on_machine(machines: Sequence[str], rank: int) -> tuple[int, int]:
    """Return the number of a rank on its machine, and how many are there.

    Args:
        machines: Of all ranks, by rank.
        rank: Number of the rank among all.

    Raises:
        CheckpointError: Ranks of one machine do not follow each other.
    """
    if len(list(itertools.groupby(machines))) > len(set(machines)):
        raise CheckpointError(
            "ranks of one machine do not follow each other: number them machine by machine, as torchrun does"
        )
    first = machines.index(machines[rank])
    return rank - first, machines.count(machines[rank])


def _machine() -> str:
    """Return what tells this machine, or container, from others."""
    # Containers share the kernel, and machines made from one image their name.
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    return socket.gethostname()


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend by which a process group moves tensors of a device; "gloo" if it names none."""
    config = str(dist.get_backend_config(group))
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    return backends.get(device.type, "gloo")


def owners(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return the rank that copies each tensor of so many bytes, so that all copy about as much; equal on all ranks."""
    copied = [0] * world_size
    found = []
    for size in sizes:
        owner = min(range(world_size), key=copied.__getitem__)
        copied[owner] += size
        found.append(owner)
    return found


class Flag(IntEnum):
    """What a rank may ask all ranks to do; the value is the position in the reduced vector."""

    STOP = 0
    SAVE = 1
    SNAPSHOT = 2
    # About the oldest save that callbacks wait for: it is committed, or will not be.
    COMMITTED = 3
    NOT_COMMITTED = 4
    # A step that is recomputed is not what it was before.
    DIFFERS = 5


class FlagSync:
    """A tiny all-reduce by which all ranks act at the same step number, called in lock-step by the threads that train.

    No rank alone decides anything that changes the course of training. At the end of a step, an asynchronous maximum
    over every rank's flags is started on a gloo group of its own (never the gradients' group); it is read at the end of
    the next step. By then it has arrived, so no rank waits for it. Where steps are short, it is not started at each
    step: rank 0 proposes how many calls to leave out, and the proposal is agreed together with the flags, so that all
    ranks leave out the same ones. A single process has no group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._vector = torch.zeros(len(Flag) + 1, dtype=torch.int32)
        self._values = self._vector.numpy()
        self._work: Any = None
        self._in_flight = False
        # Calls to leave out, as all ranks have agreed.
        self._num_left_out = 0

    def exchange(self, ask: Callable[[], tuple[set[Flag], int]], *, now: bool = False) -> set[Flag]:
        """Send this rank's flags, where that is due; return the flags agreed on since the last call.

        A rank must ask for a flag again until it is agreed on.

        Args:
            ask: Called only where an exchange is due. Returns this rank's flags, and the number of calls that it
                proposes from this exchange to the next; the largest proposal counts.
            now: Exchange at this call, whatever was agreed; all ranks must pass the same value.
        """
        agreed = self.drain()
        if self._num_left_out > 0 and not now:
            self._num_left_out -= 1
            return agreed
        flags, interval = ask()
        self._values[:] = [*(int(flag in flags) for flag in Flag), interval]
        if self._group is not None:
            # Not `dist.all_reduce`: its checks take longer than the exchange.
            self._work = self._group.allreduce([self._vector], self._options)
        self._in_flight = True
        return agreed

    def drain(self) -> set[Flag]:
        """Wait for the last exchange and return what was agreed in it; nothing is in flight afterwards."""
        if not self._in_flight:
            return set()
        self._in_flight = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        *asked, interval = self._values.tolist()
        self._num_left_out = interval - 1
        return {flag for flag, count in zip(Flag, asked, strict=True) if count}
