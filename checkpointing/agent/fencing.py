"""The begin of an attempt: writers of older attempts are shut out, then the newest checkpoint is looked up."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from checkpointing.agent.events import FencedEvent, TierUnreachable
from checkpointing.agent.reporting import Report, text_of
from checkpointing.commit.catalog import Catalog, CatalogEntry
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import Fenced
from checkpointing.host.threads import in_background

# With checkpoints in a local tier, an attempt waits no longer than this for a durable tier that does not answer.
PATIENCE_S = 10.0


@dataclass
class Fencing:
    """The begin of one attempt at its storage.

    Attributes:
        attempt: Number of the attempt.
        held: Step and attempt of snapshots of older attempts that are yet to be committed.
        answered: Set when it is over; what follows is to be read only then.
        error: Why it failed.
        fenced: It failed because a newer attempt has begun.
        durable_begun: The durable tier has the attempt's fence; without it nothing is published there.
        unreachable: Why the attempt begins without the durable tier.
        newest: The checkpoint that the attempt could resume from.
    """

    attempt: int
    held: frozenset[tuple[int, int]] = frozenset()
    answered: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    fenced: bool = False
    durable_begun: bool = False
    unreachable: str | None = None
    newest: CatalogEntry | None = None


class Fencer:
    """Begins attempts at the tiers of one stage.

    Attributes:
        current: The newest attempt's begin.
        commits: Whether this node is the one that commits; otherwise it only looks up the newest checkpoint. The nodes
            of a run may take turns in that, when an attempt begins.
    """

    def __init__(self, tiers: Tiers, report: Report, *, commits: bool, patience_s: float = PATIENCE_S) -> None:
        """Create a fencer.

        Args:
            tiers: Where.
            report: Takes its events.
            commits: Whether this node writes first.
            patience_s: Seconds to wait for a durable tier where there is a local one.
        """
        self._tiers, self._report, self.commits, self._patience_s = tiers, report, commits, patience_s
        self.current = Fencing(-1, durable_begun=True)
        self.current.answered.set()
        # Attempts may follow each other faster than storage answers.
        self._lock, self._durable_lock = threading.Lock(), threading.Lock()
        self._swept = False

    def begin(self, attempt: int, held: Iterable[tuple[int, int]]) -> Fencing:
        """Make this attempt the current one; `run` is to be called with what is returned."""
        self.current = Fencing(attempt, frozenset(held))
        return self.current

    def run(self, fencing: Fencing) -> None:
        """Fence older attempts, remove what they left half written, and look up the newest checkpoint.

        An attempt that is not the current one any more is left alone. Failures are attributes of `fencing`.
        """
        with self._lock:
            if fencing is not self.current:
                return
            try:
                if self.commits:
                    self._fence(fencing)
                catalog = self._tiers.catalog if fencing.unreachable is None else Catalog(self._tiers.first)
                fencing.newest = next((entry for entry in catalog.scan() if entry.manifest), None)
            except Fenced as error:
                fencing.error, fencing.fenced = str(error), True
                self._report(FencedEvent(reason=str(error)), None)
            except Exception as error:
                # Ranks wait for the answer: whatever went wrong, they must get one.
                text, place = text_of(error), self._tiers.durable.location
                fencing.error = text if place in text else f"{place}: {text}"

    def wait_until_answered(self) -> None:
        """Block until the newest attempt has begun: the sweep must not meet what this process writes."""
        while not self.current.answered.is_set():
            self.current.answered.wait()

    def begin_at_durable_tier(self) -> None:
        """Make up for a begin that the durable tier did not answer; nothing may be published there before.

        Raises:
            Fenced: A newer attempt has begun.
            OSError: Storage refused.
        """
        if self.commits:
            self._fence_durable(self.current)

    def _fence(self, fencing: Fencing) -> None:
        local = self._tiers.local
        if local is None:
            self._fence_durable(fencing)
        else:
            local.begin_attempt(fencing.attempt, fencing.held)
            local.watch_location()
            outcome = in_background(lambda: self._fence_durable(fencing), "checkpoint-fence-durable")
            try:
                outcome.result(self._patience_s)
            except OSError as error:
                # Ranks resume from the local tier; `begin_at_durable_tier` makes up for this before an upload.
                reason = "no answer yet" if isinstance(error, TimeoutError) else error.strerror or str(error)
                fencing.unreachable = reason
                tier = self._tiers.name(self._tiers.durable)
                self._report(TierUnreachable(tier=tier, reason=reason), None)
        if not self._swept:
            # Once, while this process writes nothing yet.
            for storage in self._tiers.nearest_first:
                if storage is local or fencing.durable_begun:
                    storage.sweep()
            self._swept = True

    def _fence_durable(self, fencing: Fencing) -> None:
        with self._durable_lock:
            if fencing.durable_begun:
                return
            local, durable = self._tiers.local, self._tiers.durable
            held = fencing.held
            if local is not None:
                # What this machine committed for itself after other machines had continued the run does not count;
                # the local tier's own fence, which only this machine reads, still accepts it.
                fence = durable.fence()
                held |= {known for known in local.counting() if fence.admits_step(*known)}
            durable.begin_attempt(fencing.attempt, held)
            durable.watch_location()
            fencing.durable_begun = True
