"""The fence that keeps an older attempt from committing after a newer one has begun."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass

from checkpointing.manifest import Manifest

# More than anybody keeps; a fence is read often.
MAX_ACCEPTED = 1000


@dataclass(frozen=True)
class Fence:
    """The newest attempt that has begun, and what counted then.

    A checkpoint counts if its attempt is the newest, or if it was there when the newest began. So what a writer from an
    older attempt publishes later is never loaded, however late it wakes up.

    An attempt begins in two steps. First its number shuts out older writers: from then on none is told that it has
    committed. Then it looks what is there, and writes that down; until it has, all that counted before still does. If
    it looked first, what an older one publishes in between would be acknowledged, and lost.

    Attributes:
        accepted: step and attempt of what was published by then, damaged or not.
        writer: tells apart two that claim the same attempt.
        oldest: everything of this attempt or a newer one counts; an older number than `attempt` in the first step.
    """

    attempt: int = 0
    accepted: frozenset[tuple[int, int]] = frozenset()
    writer: str = ""
    oldest: int = 0

    def admits(self, manifest: Manifest) -> bool:
        """Whether a checkpoint counts."""
        return self.admits_step(manifest.step, manifest.attempt)

    def admits_step(self, step: int, attempt: int) -> bool:
        """Whether a checkpoint of this step and attempt would count."""
        return attempt >= self.oldest or (step, attempt) in self.accepted

    def lets_publish(self, step: int, attempt: int) -> bool:
        """Whether a checkpoint of this step and attempt will count, whatever the newest attempt is about to see."""
        return attempt >= self.attempt or (step, attempt) in self.accepted

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "attempt": self.attempt,
                "accepted": sorted(self.accepted),
                "writer": self.writer,
                "oldest": self.oldest,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Fence:
        """Parse what `to_json` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            body = json.loads(data)
            attempt = _number(body["attempt"])
            accepted = frozenset((_number(step), _number(number)) for step, number in body["accepted"])
            # Fences of before there were two steps were complete.
            return cls(attempt, accepted, str(body["writer"]), _number(body.get("oldest", attempt)))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a fence: {error}") from None


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{reprlib.repr(value)} is not a step or an attempt")
    return value


def attempt_of(note: bytes | None) -> int:
    """-1 where it says none that could be: the next note must be able to take a damaged one's place."""
    try:
        return _number(json.loads(note or b"{}")["attempt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
