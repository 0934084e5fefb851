"""Registers with the GPU's driver the memory that this rank copies into, during training.

A copy into pinned memory runs at the full rate of the link and needs no processor. But registering memory takes about
0.1 s per GB (0.03 on an H200, 2026-11-26), under a lock of the driver that kernel launches wait for. So memory is
registered in small chunks, by a thread of its own, and only the part of an arena that this rank writes: where a node
has several ranks, the first snapshot shows which. Copies made before that are unpinned. An arena that a node's only
rank restores from is registered in one piece while the snapshot is verified, when no kernel runs.

A copy must be within one registered range: registrations end at multiples of `CHUNK_BYTES` of an arena, and copies are
cut there (`checkpointing.process.device`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from checkpointing.errors import CheckpointError
from checkpointing.host.shared_memory import PAGE_BYTES, SharedMemory
from checkpointing.process.device import CHUNK_BYTES, cut

logger = logging.getLogger("checkpointing")

# Pause between two registrations, for launches that wait for the driver's lock.
_PAUSE_S = 0.005

Range = tuple[int, int]


def ranges_to_pin(extents: Sequence[Range]) -> list[Range]:
    """Return the ranges to register so that these extents are pinned: begin and end, in bytes of the arena.

    They are whole pages, merged where they touch, and cut at multiples of `CHUNK_BYTES`.
    """
    merged: list[list[int]] = []
    for begin, end in sorted(extents):
        if begin == end:
            continue
        begin, end = begin // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin + first, begin + last) for begin, end in merged for first, last in cut(begin, end - begin)]


class Pinning:
    """Pins memory for one rank. Any thread may call its methods.

    Attributes:
        device_index: The accelerator that copies; None while the state is on none: nothing is pinned ahead then.

    Args:
        register: Registers an address and a number of bytes with the driver; returns whether it did.
        unregister: Undoes this, by the address.
        report: Receives, for each arena, the bytes registered, the seconds that took, and whether it is all.
        select: Makes an accelerator the calling thread's own: registering memory makes a context on it.
    """

    def __init__(
        self,
        register: Callable[[int, int], bool],
        unregister: Callable[[int], None],
        report: Callable[[int, float, bool], None] = lambda nbytes, seconds, complete: None,
        select: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._register, self._unregister, self._report, self._select = register, unregister, report, select
        self.device_index: int | None = None
        # Held while the driver works. Training may wait for `want`, which takes only the other lock.
        self._driver = threading.Lock()
        self._changed = threading.Condition()
        # Addresses of the registered ranges, by the arena's address.
        self._registered: dict[int, list[int]] = {}
        self._work: queue.SimpleQueue[tuple[int, list[Range], list[int]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_queued = 0
        self._given_up = False

    @property
    def is_busy(self) -> bool:
        """Whether memory is being registered, so that a copy takes longer than later ones will."""
        return self._num_queued > 0

    def want(self, arena: memoryview, extents: Sequence[Range]) -> bool:
        """Have the parts of an arena registered that this rank copies into; return whether some are not yet."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        return self._enqueue(address, ranges_to_pin(extents))

    def pin(self, arena: SharedMemory) -> None:
        """Have a whole arena registered, in one range: reads from it are not cut."""
        if self.device_index is not None:
            self.settle()
            self.release(arena)
            # By several threads, where the driver would do it with one.
            arena.populate()
            self._enqueue(arena.address, [(0, arena.nbytes)])

    def want_all(self, arena: SharedMemory) -> None:
        """Have a whole arena registered for copies into it."""
        if self.device_index is not None:
            self.want(arena.buffer, [(0, arena.nbytes)])

    def settle(self) -> None:
        """Return when nothing is being registered."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)

    def _enqueue(self, address: int, ranges: list[Range]) -> bool:
        with self._changed:
            if address in self._registered or self._given_up:
                return self.is_busy
            begins = self._registered[address] = []
            self._num_queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-pin", daemon=True)
                self._thread.start()
            self._work.put((address, ranges, begins))
            return True

    def release(self, arena: SharedMemory) -> None:
        """Unregister an arena that is about to be unmapped."""
        self._release(arena.address)

    def close(self) -> None:
        """Unregister everything, and end the thread."""
        with self._changed:
            addresses = list(self._registered)
        for address in addresses:
            self._release(address)
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _release(self, address: int) -> None:
        with self._driver:
            with self._changed:
                begins = self._registered.pop(address, [])
            for begin in begins:
                self._unregister(begin)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            began, nbytes, complete = time.monotonic(), 0, False
            try:
                if self.device_index is not None:
                    self._select(self.device_index)
                nbytes, complete = self._pin(*work)
            except Exception as error:
                # The driver does not even start, say; what uses the device will raise, too.
                self._give_up(f": {error}")
            finally:
                with self._changed:
                    self._num_queued -= 1
                    self._changed.notify_all()
            with contextlib.suppress(CheckpointError):
                self._report(nbytes, time.monotonic() - began, complete)

    def _give_up(self, why: str) -> None:
        self._given_up = True
        logger.warning(
            "the driver refused to pin memory for snapshots%s: copies from the GPU will be slower; raise the limit "
            "that `ulimit -l` shows",
            why,
        )

    def _pin(self, address: int, ranges: Sequence[Range], begins: list[int]) -> tuple[int, bool]:
        nbytes = 0
        for begin, end in ranges:
            with self._driver:
                # The arena may have been released meanwhile, but not while this lock is held; another may have its
                # address by now.
                if self._given_up or self._registered.get(address) is not begins:
                    return nbytes, False
                if not self._register(address + begin, end - begin):
                    if end - begin > CHUNK_BYTES:
                        # Of so much at a time; it may be registered in pieces later.
                        self._registered.pop(address)
                    else:
                        self._give_up("")
                    return nbytes, False
                begins.append(address + begin)
            nbytes += end - begin
            time.sleep(_PAUSE_S)
        return nbytes, True
