"""The fence that keeps an older attempt from committing after a newer one has begun."""

from __future__ import annotations

import errno
import json
import reprlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from checkpointing.errors import Fenced
from checkpointing.format.manifest import Manifest

# More than any run keeps; a fence is read often.
MAX_ACCEPTED = 1000


@dataclass(frozen=True)
class Fence:
    """The newest attempt that has begun, and what counted then.

    A checkpoint counts if its attempt is the newest, or if it was there when the newest began. So what a writer from an
    older attempt publishes later is never loaded, however late it resumes.

    An attempt begins in two steps. First its number shuts out older writers: from then on none of them may report a
    commit. Then it lists what is there, and writes that down; until it has, all that counted before still does. If it
    listed first, what an older attempt publishes in between would be acknowledged, and lost.

    Attributes:
        attempt: The newest attempt.
        accepted: Step and attempt of what was published by then, damaged or not.
        writer: Tells apart two processes that begin the same attempt.
        oldest: Everything of this attempt or a newer one counts; a smaller number than `attempt` in the first step.
    """

    attempt: int = 0
    accepted: frozenset[tuple[int, int]] = frozenset()
    writer: str = ""
    oldest: int = 0

    def admits(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint counts."""
        return self.admits_step(manifest.step, manifest.attempt)

    def admits_step(self, step: int, attempt: int) -> bool:
        """Return whether a checkpoint of this step and attempt would count."""
        return attempt >= self.oldest or (step, attempt) in self.accepted

    def lets_publish(self, step: int, attempt: int) -> bool:
        """Return whether a checkpoint of this step and attempt will count, whatever the newest attempt lists."""
        return attempt >= self.attempt or (step, attempt) in self.accepted

    def to_json(self) -> bytes:
        """Return the fence as JSON."""
        accepted = sorted(self.accepted)
        body = {"attempt": self.attempt, "accepted": accepted, "writer": self.writer, "oldest": self.oldest}
        return json.dumps(body).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Fence:
        """Parse what `to_json` returned; raises ValueError for anything else."""
        try:
            body = json.loads(data)
            attempt = parse_number(body["attempt"])
            accepted = frozenset((parse_number(step), parse_number(number)) for step, number in body["accepted"])
            # Older versions wrote a fence in one step: all of theirs are complete.
            return cls(attempt, accepted, str(body["writer"]), parse_number(body.get("oldest", attempt)))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a fence: {error}") from None


class Claim:
    """The attempt that this process has begun at one location, or has tried to begin.

    Attributes:
        attempt: Its number; -1 in a process that publishes for another one's attempt.
        writer: What marks the location's fence as written by this process.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self.attempt = -1
        self.writer = ""

    def opened(self, fence: Fence, attempt: int, held: Iterable[tuple[int, int]]) -> Fence:
        """Claim an attempt, and return the fence of its first step, given the location's.

        That is `fence` itself where an earlier try has written it, and its answer was lost. `held` are step and attempt
        of what this process has yet to publish of older attempts.

        Raises:
            Fenced: This attempt or a newer one has begun already.
        """
        if self.attempt != attempt:
            self.attempt, self.writer = attempt, uuid.uuid4().hex
        if fence.attempt == attempt and fence.writer == self.writer:
            return fence
        if fence.attempt >= attempt:
            raise Fenced(fence.attempt, self._location, attempt)
        return Fence(attempt, fence.accepted | frozenset(held), self.writer, fence.oldest)

    def completed(self, counting: Iterable[tuple[int, int]]) -> Fence:
        """Return the fence of the attempt's second step: from now on only `counting` and what follows counts."""
        return Fence(self.attempt, frozenset(sorted(counting)[-MAX_ACCEPTED:]), self.writer, self.attempt)

    def check(self, fence: Fence, step: int, attempt: int) -> None:
        """Check that a checkpoint of this step and attempt will count.

        Where the location does not decide between two that begin the same attempt, the fence's last writer holds it.

        Raises:
            Fenced: It will not count, or that is not known.
            OSError: The fence that this process wrote is gone.
        """
        if self.attempt == attempt and fence.attempt < attempt:
            # This is another place than the one where the attempt began.
            raise OSError(
                errno.ESTALE,
                f"{self._location} was emptied, moved or replaced since attempt {attempt} began: its fence is gone; "
                "put it back, or start again with the location where it is now",
            )
        superseded = fence.attempt == attempt == self.attempt and fence.writer != self.writer
        if superseded or not fence.lets_publish(step, attempt):
            raise Fenced(fence.attempt, self._location, attempt)

    def outlives(self, attempt: int) -> bool:
        """Return whether the unfinished data of a writer of this attempt may be swept: not if it may outlive this."""
        return self.attempt < 0 or attempt <= self.attempt


def parse_number(value: object) -> int:
    """Return a step or an attempt that was read from JSON; raises ValueError where it is neither."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{reprlib.repr(value)} is not a step or an attempt")
    return value
