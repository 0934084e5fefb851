"""Handles what the ranks of an attempt report, and their deaths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runner.journal.events import BestModel, RankStarted, Record
from runner.node.graceful_stop import GracefulStop
from runner.ranks import messages as rank_messages
from runner.ranks.messages import RankMessage
from runner.ranks.output import OutputRelay
from runner.ranks.watch import RankWatch
from runner.system.event_loop import EventLoop


class RankReports:
    """Keeps a `RankWatch` up to date."""

    def __init__(
        self,
        ranks: RankWatch,
        graceful: GracefulStop,
        *,
        relay: OutputRelay | None,
        record: Record,
        loop: EventLoop,
        read_rank_messages: Callable[[], None],
    ) -> None:
        """Begin with no rank.

        Args:
            ranks: The ranks of this node.
            graceful: Learns of stop signals to ranks.
            relay: Shows the ranks' output; None to show nothing.
            record: Appends an event to the journal.
            loop: Watches for deaths.
            read_rank_messages: Has everything handled that ranks have sent so far.
        """
        self._ranks, self._graceful, self._relay = ranks, graceful, relay
        self._record, self._loop, self._read_rank_messages = record, loop, read_rank_messages

    def handle(self, message: RankMessage) -> None:
        """Handle a message of a rank of this attempt."""
        match message:
            case rank_messages.Started():
                self._record(RankStarted(rank=message.rank, pid=message.pid))
                if self._relay is not None and message.error_file:
                    self._relay.follow(Path(message.error_file).parent)
                pidfd = self._ranks.started(message)
                if pidfd is not None:
                    self._loop.register(pidfd, self._on_death)
            case rank_messages.Done(rank=rank):
                self._ranks.done.add(rank)
            case rank_messages.PreemptedRank(rank=rank):
                self._ranks.preempted.add(rank)
            case rank_messages.Failed(rank=rank):
                self._ranks.errors[rank] = (message.error, message.frame, message.transient)
            case rank_messages.StopSignal(rank=rank):
                self._graceful.on_signal(rank)
            case rank_messages.BestModelWritten(step=step):
                self._record(BestModel(step=step))

    def _on_death(self, pidfd: int) -> None:
        # What the rank reported before it died comes first.
        self._read_rank_messages()
        if pidfd in self._ranks.pidfds:
            self._loop.unregister(pidfd)
            self._ranks.died(pidfd)

    def stop_watching(self) -> None:
        """Close the descriptors of the ranks."""
        for pidfd in list(self._ranks.pidfds):
            self._loop.unregister(pidfd)
        self._ranks.close()

    def close(self) -> None:
        """Show the rest of the ranks' output."""
        if self._relay is not None:
            self._relay.finish()
