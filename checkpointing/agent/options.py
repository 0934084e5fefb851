"""What a checkpoint agent is started with: one value, which crosses the process boundary as one JSON argument."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from checkpointing.commit.retention import Retention
from checkpointing.commit.tiers import DEFAULT_LOCAL_KEEP_LAST

T = TypeVar("T")

# sysexits.h EX_TEMPFAIL: of an agent that cannot start now.
EXIT_DELAYED = 75

_DEFAULT_LOCAL_RETENTION = Retention(keep_last=DEFAULT_LOCAL_KEEP_LAST)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of the checkpoint agent of one node.

    Attributes:
        location: Path or URL of the durable tier.
        run_id: Identity of the run, written into its manifests.
        local_tier: Directory of this machine in front of the location; None for none.
        local_retention: Checkpoints that the local tier keeps. What the durable tier keeps is the ranks' choice.
        commits: Whether this node's agent writes checkpoints, unless the begin of an attempt says otherwise; one of the
            nodes does, the others hold snapshots only.
        memory_limit: Bytes that snapshots may take; None for half of the available memory.
        patience_s: Seconds for which a local directory that cannot be written at the start is tried again: more than 0
            where the run was using it a moment ago.
    """

    location: str
    run_id: str
    local_tier: str | None = None
    local_retention: Retention = _DEFAULT_LOCAL_RETENTION
    commits: bool = True
    memory_limit: int | None = None
    patience_s: float = 0.0

    def to_json(self) -> str:
        """Return the options as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentOptions:
        """Parse what `to_json` returned.

        Args:
            text: JSON object with one key per option.

        Returns:
            The options.

        Raises:
            ValueError: It is not JSON, an option is unknown or missing, or has a wrong type or value.
        """
        try:
            return _parsed(cls, json.loads(text), "")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"agent options cannot be parsed: {error}") from None


def _parsed(kind: type[T], value: object, name: str) -> T:
    """Return a dataclass made of a JSON object whose keys are its fields."""
    where = name.rstrip(".") or "the value"
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, not {value!r}")
    types = get_type_hints(kind)
    unknown = sorted(value.keys() - types.keys())
    if unknown:
        raise ValueError(f"{name}{unknown[0]} is unknown")
    parsed: dict[str, Any] = {}
    for own in dataclasses.fields(kind):  # type: ignore[arg-type]
        if own.name not in value:
            if own.default is dataclasses.MISSING:
                raise ValueError(f"{name}{own.name} is missing")
            continue
        expected, given = types[own.name], value[own.name]
        if dataclasses.is_dataclass(expected):
            parsed[own.name] = _parsed(expected, given, f"{name}{own.name}.")  # type: ignore[arg-type]
        elif not isinstance(given, expected) or (isinstance(given, bool) and expected is not bool):
            shown = getattr(expected, "__name__", None) or str(expected)
            raise ValueError(f"{name}{own.name} must be {shown}, not {given!r}")
        else:
            parsed[own.name] = given
    return kind(**parsed)
