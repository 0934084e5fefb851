"""Which snapshot gets which arena, and which snapshots are committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.agent.arenas import Arena, ArenaPool, ArenaState
from checkpointing.agent.events import (
    CommitFailedEvent,
    Committed,
    Event,
    Fetched,
    FetchFailed,
    SnapshotDropped,
    SnapshotSkipped,
    SnapshotTaken,
)
from checkpointing.agent.protocol import Guest, Refusal
from checkpointing.agent.reporting import Clock, Result, SharesWritten, stamped
from checkpointing.agent.writers import Writers
from checkpointing.commit.replicated_save import ReplicatedSave
from checkpointing.commit.sharded_save import ShardedSave
from checkpointing.format.manifest import SnapshotInfo


@dataclass(frozen=True)
class ArenaRequest:
    """A rank's request for the arena of a step.

    Attributes:
        step: Step of the snapshot.
        number: How many arenas the rank has asked for: a step may be asked for again.
        nbytes: Size of the snapshot, as the node's leader knows it.
        wait: Whether to wait until an arena is free.
        is_urgent: Not to wait for copies on other nodes of the newest snapshot: this one is to be committed.
    """

    step: int
    number: int
    nbytes: int
    wait: bool
    is_urgent: bool = False


@dataclass(frozen=True)
class SnapshotContent:
    """What the node's leader says of a snapshot.

    Attributes:
        info: Step, attempt, world size and data cursor.
        files: Name, offset and size in bytes of each file image.
        commit: Whether it is to be committed.
        save: The save, where several nodes write the checkpoint.
    """

    info: SnapshotInfo
    files: list[tuple[str, int, int]]
    commit: bool
    save: ShardedSave | ReplicatedSave | None = None


class Scheduler:
    """Used by the agent's main thread alone.

    Attributes:
        is_ending: The agent ends as soon as what it holds is committed.
        gave_up: The last snapshot could not be committed, or not uploaded.
        outcomes: By step, why its commit failed; None where it is committed.
    """

    def __init__(
        self,
        pool: ArenaPool,
        workers: Writers,
        publish: Callable[[Event], None],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create a scheduler.

        Args:
            pool: The arenas.
            workers: Write what is to be committed.
            publish: Takes events for monitors.
            clock: Seconds.
        """
        self._pool, self._workers, self._publish, self._clock = pool, workers, publish, clock
        # The leader's latest decision: which request it answers, and the arena, or None where the step is skipped.
        self._decided: tuple[tuple[int, int], Arena | None] | None = None
        self.outcomes: dict[int, str | None] = {}
        self.is_ending = False
        self.gave_up = False

    def begin_stage(self) -> list[tuple[int, int]]:
        """Forget what was decided for the stage before, or for an earlier attempt.

        Returns:
            Step and attempt of snapshots of the current stage that are held, and may yet be committed.
        """
        self._decided = None
        self.outcomes.clear()
        for arena in self._pool.arenas:
            if arena.share is not None and arena.state is ArenaState.WHOLE:
                arena.is_old = True
        # Of a share, this agent must be the one that publishes: that of another one, which led before, is to be fenced.
        return [
            (arena.step, arena.info.attempt)
            for arena in self.whole()
            if arena.info and (arena.share is None or (arena.publishes and not arena.is_saved))
        ]

    def of_stage(self) -> list[Arena]:
        """Return the arenas whose snapshot is of the current stage."""
        return [arena for arena in self._pool.arenas if arena.stage == self._workers.stage.name]

    def whole(self) -> list[Arena]:
        """Return the arenas that hold a whole snapshot of the current stage, damaged or not."""
        return [arena for arena in self.of_stage() if arena.state is ArenaState.WHOLE]

    @property
    def is_busy(self) -> bool:
        """Whether a thread works on an arena, or uploads."""
        return self._workers.are_uploading or any(arena.num_tasks > 0 for arena in self._pool.arenas)

    def acquire(self, request: ArenaRequest, *, is_leader: bool) -> Arena | Refusal | None:
        """Decide on the arena of a step. The node's leader knows the size and so decides; its peers follow.

        Args:
            request: The request.
            is_leader: Whether it is the leader's.

        Returns:
            The arena; why there is none; or None while the answer has to wait.
        """
        key = (request.step, request.number)
        if is_leader:
            self._spend_ahead_of(request.step)
            arena = self._pool.take(request.nbytes, is_urgent=request.is_urgent)
            if arena is None and self._pool.arenas and request.wait:
                return None
            self._decided = (key, arena)
            if arena is not None:
                arena.begin(request.step, self._workers.stage.name)
            elif self._pool.arenas:
                reason = "all arenas are being written, or copied to another node"
                self._publish_step(SnapshotSkipped(step=request.step, reason=reason))
        elif self._decided is None or self._decided[0] != key:
            return None
        decided = self._decided[1]
        if decided is not None:
            return decided
        return Refusal.BUSY if self._pool.arenas else Refusal.NO_MEMORY

    def copied(
        self,
        number: int,
        step: int,
        local_rank: int,
        local_world_size: int,
        content: SnapshotContent | None,
        *,
        receives: bool = False,
        words: tuple[int, int] | None = None,
        not_finite: tuple[str, ...] = (),
    ) -> None:
        """Note that a rank has copied its share; once all have, the snapshot is whole.

        Args:
            number: Number of the arena.
            step: Step of the snapshot.
            local_rank: The rank.
            local_world_size: Ranks of this node.
            content: What the snapshot is; from the node's leader alone.
            receives: The rank is about to receive a copy of another node's shard, see `received`.
            words: Sum of the words that the rank has copied, of their source, and their size; None if not known.
            not_finite: Names of tensors that hold NaN or infinity: nothing resumes from the snapshot.
        """
        arena = self._filling(number, step)
        if arena is None:
            return
        arena.copied_by.add(local_rank)
        arena.words[local_rank] = words
        arena.not_finite = tuple(dict.fromkeys(arena.not_finite + not_finite))
        if receives:
            arena.receiving.add(local_rank)
        if content is not None:
            arena.files, arena.info, arena.commit_wanted = content.files, content.info, content.commit
            arena.save = content.save
        if len(arena.copied_by) == local_world_size:
            arena.state = ArenaState.WHOLE
            arena.whole_since = self._clock()
            arena.num_tasks += 1
            self._spend_abandoned(arena)
            self._workers.of(arena.stage).digest(arena)
            if arena.not_finite:
                self._keep_not_finite(arena)
                return
            self._publish_step(SnapshotTaken(step=arena.step, to_be_committed=arena.commit_wanted))
            if arena.commit_wanted:
                self._commit(arena)

    def _keep_not_finite(self, arena: Arena) -> None:
        """Keep a snapshot for a post-mortem, from which nobody resumes.

        Ranks that wait for its commit get no answer: the rank that has found it says so, and ends the attempt.
        """
        reason = f"it is not finite: {', '.join(arena.not_finite[:3])}"
        self._publish_step(SnapshotDropped(step=arena.step, reason=reason))
        arena.is_spent = True
        # Otherwise a commit is another node's, and over at once.
        if self._workers.commits:
            arena.num_tasks += 1
            self._workers.of(arena.stage).keep_not_finite(arena)

    def received(self, number: int, step: int, local_rank: int | None, guest: Guest | None) -> None:
        """Note that a rank has put a copy of another node's shard into an arena, or has not got one."""
        for arena in self._pool.arenas:
            if arena.number == number and arena.step == step and local_rank in arena.receiving:
                arena.receiving.discard(local_rank)
                if guest is not None:
                    arena.guests[guest.name] = (guest.offset, guest.nbytes, guest.digest)

    def abandon(self, number: int, step: int, reason: str) -> None:
        """Drop a snapshot of which a rank found that it is not the state of one step."""
        arena = self._filling(number, step)
        if arena is not None:
            arena.state = ArenaState.FREE
            self._publish_step(SnapshotDropped(step=step, reason=reason))

    def drop_unfinished(self) -> None:
        """Drop the snapshots that some rank will never finish."""
        for arena in self._pool.arenas:
            arena.receiving.clear()
            if arena.state is ArenaState.FILLING:
                self._publish_step(SnapshotDropped(step=arena.step, reason="a rank ended in mid-copy"))
                arena.state = ArenaState.FREE

    def commit_newest(self, *, ranks_go_on: bool = False) -> None:
        """Commit the newest snapshot that ranks have left, whether or not they asked for it.

        Those of earlier stages were committed before their stage ended.

        Args:
            ranks_go_on: The ranks may yet make another one.
        """
        newest = self._pool.newest(self._workers.stage.name)
        if ranks_go_on and newest is not None and newest.save is not None:
            # Other nodes, which write a part, may have another one by now.
            return
        # What all nodes write is tried once: when the attempt ends that made it.
        if newest is not None and not (newest.commit_wanted or newest.is_saved or newest.is_old):
            self._commit(newest)

    def take_result(self, result: Result, arena: Arena | None, *, is_last: bool = False) -> None:
        """Take in that a thread has finished with an arena, and what has become of its task.

        Args:
            result: What has become of it.
            arena: The arena; None for an upload from the local tier.
            is_last: Uploads are not tried again.
        """
        if arena is None:
            # What only the local tier holds is gone with this machine.
            self.gave_up |= is_last and isinstance(result, CommitFailedEvent)
            return
        arena.num_tasks -= 1
        is_current = arena.stage == self._workers.stage.name and not arena.is_old
        if arena.share is not None and isinstance(result, (Committed, SharesWritten, CommitFailedEvent)):
            # It can be resumed from, whether or not its save has failed.
            arena.is_saved = True
            self.gave_up = False
        match result:
            case Committed() | SharesWritten() if is_current:
                self.outcomes[arena.step] = None
            case CommitFailedEvent(error=error):
                if is_current:
                    self.outcomes[arena.step] = error
                # Tried again when its ranks are gone, and, if it is still the newest, a last time at the end. What
                # several nodes write is tried once: the others do not write theirs again.
                arena.commit_wanted = self.is_ending
                self.gave_up = self.is_ending or arena.share is not None
            case Fetched():
                arena.state, arena.whole_since = ArenaState.WHOLE, self._clock()
            case FetchFailed():
                arena.state = ArenaState.FREE
        self._free_if_idle(arena)

    def _spend_abandoned(self, newest: Arena) -> None:
        """Free the shares of earlier attempts that are ahead of a new snapshot: it was not computed from them."""
        for other in self.of_stage():
            is_share = other.share is not None and other.state is ArenaState.WHOLE and other is not newest
            if is_share and (other.step > newest.step or (other.step == newest.step and other.is_old)):
                self.spend(other)

    def _spend_ahead_of(self, step: int) -> None:
        """Free the shares of earlier attempts that are ahead of what trains: they would be kept as the newest."""
        for arena in self.of_stage():
            if arena.is_old and arena.share is not None and arena.step >= step and arena.state is ArenaState.WHOLE:
                self.spend(arena)

    def spend(self, arena: Arena) -> None:
        """Free a share, once nothing works on it."""
        arena.is_spent = True
        self._free_if_idle(arena)

    @staticmethod
    def _free_if_idle(arena: Arena) -> None:
        if (arena.damaged or arena.is_spent) and arena.num_tasks == 0:
            arena.state = ArenaState.FREE

    def _filling(self, number: int, step: int) -> Arena | None:
        """Return an arena, if it is still being filled for that step."""
        for arena in self._pool.arenas:
            if arena.number == number and arena.step == step and arena.state is ArenaState.FILLING:
                return arena
        return None

    def _commit(self, arena: Arena) -> None:
        # What another node commits is not wanted here, should this one take over.
        arena.publishes = self._workers.commits
        arena.commit_wanted = self._workers.commits or arena.share is not None
        # Once: when a commit is tried again, the other nodes do not write their parts again.
        save, arena.save = arena.save, arena.share
        if arena.commit_wanted:
            self.outcomes.pop(arena.step, None)
        else:
            self.outcomes[arena.step] = None
        if arena.commit_wanted or save is not None:
            arena.num_tasks += 1
            self._workers.of(arena.stage).commit(arena, save)

    def _publish_step(self, event: Event) -> None:
        self._publish(stamped(event, self._workers.stage))
