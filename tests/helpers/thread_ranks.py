"""Ranks that are threads of one process: collectives without a process group."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from checkpointing.process.ranks import Part, Ranks

T = TypeVar("T")


class Meeting:
    """Where the threads exchange values."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)
        # What is sent to single ranks, by receiver and tag: who sends it, and the bytes.
        self.mail: dict[tuple[int, int], queue.Queue[tuple[int, torch.Tensor]]] = {}

    def box(self, rank: int, tag: int) -> queue.Queue[tuple[int, torch.Tensor]]:
        # Atomic, unlike a defaultdict: of two threads that come first, each would get a queue of its own.
        return self.mail.setdefault((rank, tag), queue.Queue())

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, value: T) -> list[T]:
        return self.meeting.exchange(self.rank, value)

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]

    def transfer(self, outgoing: Sequence[Part], incoming: Sequence[Part]) -> None:
        everyone = self.gather([(bytes(data), self.rank, rank, tag) for data, rank, tag in outgoing])
        sent = {(sender, tag): data for parts in everyone for data, sender, to, tag in parts if to == self.rank}
        assert sent.keys() == {(rank, tag) for _, rank, tag in incoming}
        for data, rank, tag in incoming:
            data[:] = sent[rank, tag]
        self.barrier()

    def with_new_group(self) -> ThreadRanks:
        return replace(self, meeting=self.broadcast(Meeting(self.world_size)))

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self.meeting.box(rank, tag).put((self.rank, tensor.clone()))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> int:
        sender, data = self.meeting.box(self.rank, tag).get(timeout=30)
        assert rank in (None, sender)
        tensor.copy_(data)
        return sender

    def close_group(self) -> None:
        self.meeting.mail.clear()

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(torch.stack(self.gather(values.clone())).amax(0))

    def barrier(self) -> None:
        self.gather(None)


def run_ranks(function: Callable[[Ranks], T], size: int = 2, per_node: int | None = None) -> list[T | BaseException]:
    """Call a function as every rank at the same time; return what each has returned or raised.

    Args:
        function: Receives its rank.
        size: Number of ranks.
        per_node: Ranks of one node; default: all.
    """
    meeting, per_node = Meeting(size), per_node or size
    group: Any = object()

    def call(rank: int) -> T | BaseException:
        try:
            return function(ThreadRanks(rank, size, rank % per_node, per_node, group, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
