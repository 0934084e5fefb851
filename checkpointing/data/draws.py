"""What a script draws from a loader: the position behind the batches that its steps have used.

A prefetcher around the loader has drawn more than that: batches are in flight, which a resumed run draws again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from checkpointing.data.cursor import LoaderCursor
from checkpointing.errors import CheckpointError

logger = logging.getLogger("checkpointing")


class Draws:
    """The draws of one loader in this process.

    Args:
        cursor: Of the loader.
        ahead: Number of batches in flight whenever a step ends; None where the script does not say.
        restored: The position that the first draw continues from.
        warns: Whether this rank reports what all ranks find.
    """

    def __init__(
        self,
        cursor: LoaderCursor,
        ahead: int | None = 0,
        restored: Mapping[str, Any] | None = None,
        *,
        warns: bool = False,
    ) -> None:
        self.cursor = cursor
        self._ahead, self._warns = ahead or 0, warns
        self._lead = Lead() if ahead is None else None
        # The script vouches for threads only where it says that all is used.
        self._needs_same_thread, self._thread = ahead != 0, 0
        self._count = self._count_at_step = 0
        self._beginning = restored
        # Positions behind the batches before the newest one, and at the beginnings of the epochs that they reach into.
        self._trail: deque[Mapping[str, Any]] = deque(maxlen=self._ahead)
        self._starts: list[Mapping[str, Any]] = list(restored.get("later", ())) if restored is not None else []
        self._step: int | None = None
        self._at_step: Mapping[str, Any] | None = None

    def will_draw(self) -> None:
        """Keep the present position, if it will be asked for after the next draw."""
        if self._ahead and self._count:
            self._trail.append(self.cursor.state())
        elif self._count and self._step is not None and self._at_step is None:
            self._at_step = self.cursor.state()

    def drawn(self, *, begins_epoch: bool) -> None:
        """Count a draw."""
        self._count += 1
        self._thread = threading.get_ident()
        if begins_epoch and self._ahead:
            start = {**self.cursor.state(), "consumed": 0, "order": None, "loader": None}
            self._starts = [*(one for one in self._starts if one["epoch"] != start["epoch"]), start]
            self._beginning = self._beginning or start

    def end_of_step(self, step: int) -> None:
        """Note that a step has ended.

        Raises:
            CheckpointError: How many batches are in flight cannot be known, or is not what the script says.
        """
        name = self.cursor.name
        if self._needs_same_thread and self._count and self._thread != threading.get_ident():
            raise CheckpointError(
                f"the batches of {name} are drawn in another thread than the one that trains: how many are in flight "
                "when a step ends depends on timing, and a resumed run would skip or repeat some. Have the DataLoader "
                "prefetch (num_workers, prefetch_factor, pin_memory), whose position is exact; or, if no batch is "
                "in flight when manager.step is called, say so: manager.batches(loader, ahead=0)"
            )
        if 0 < self._count < self._ahead:
            raise CheckpointError(
                f"batches(loader, ahead={self._ahead}): only {self._count} of {name} were drawn when step {step} "
                "ended. Give the number of batches that are drawn, and not used yet, whenever manager.step is called"
            )
        self._step, self._at_step = step, self._used() if self._ahead else None
        if self._lead is not None and (excess := self._lead.add(self._count - self._count_at_step)) is not None:
            self._lead = None
            if excess and self._warns:
                logger.warning(
                    "%d more of the batches of %s were drawn before the first step than for each later one: they seem "
                    "to be in flight when a step ends, as those of a prefetcher are, and each resume will skip as "
                    "many. Say so: manager.batches(loader, ahead=%d); or ahead=0, if the first step has used them",
                    excess,
                    name,
                    excess,
                )
        self._count_at_step = self._count

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the position behind the batches that this step and those before have used."""
        if step == self._step and self._at_step is not None:
            return self._at_step
        return self._used()

    def _used(self) -> Mapping[str, Any]:
        if self._count <= self._ahead and self._beginning is not None:
            used = self._beginning
        elif self._ahead and self._count:
            used = self._trail[0]
        else:
            return self.cursor.state()
        self._starts = [start for start in self._starts if start["epoch"] > used["epoch"]]
        return {**used, "later": self._starts}


class Lead:
    """Finds out how many more batches are drawn before the first step than for each later one."""

    def __init__(self) -> None:
        self._first = self._usual = 0

    def add(self, count: int) -> int | None:
        """Add how many were drawn for one more step; returns the difference once it is known."""
        if not count:
            return None
        if not self._first:
            self._first = count
        elif not self._usual:
            self._usual = count
            return None if count < self._first else 0
        else:
            return self._first - count if count == self._usual else 0
        return None
