"""What a rank learns from its environment: the supervisor's settings, and the variables that users may set.

A supervisor passes everything about an attempt to its ranks as one JSON object in one variable. Without a supervisor,
users may override what a script asks its `CheckpointManager` for by variables of their own. No torch.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from checkpointing.errors import CheckpointError

# Set by a supervisor only: `RankSettings` as JSON.
SETTINGS_ENV = "CHECKPOINT_RANK_SETTINGS"
# For users. A supervisor's settings take precedence where they say something.
LOCATION_ENV = "CHECKPOINT_LOCATION"
LOCAL_TIER_ENV = "CHECKPOINT_LOCAL_TIER"
RESUME_ENV = "CHECKPOINT_RESUME"
RESUME_FROM_ENV = "CHECKPOINT_RESUME_FROM"
# Set by `runner start --init-from`, or by the user.
INIT_FROM_ENV = "CHECKPOINT_INIT_FROM"
ALLOW_CHANGES_ENV = "CHECKPOINT_ALLOW_CHANGES"
# Set by `runner rehearse` only: the steps, the steps between two saves, and a folder for outputs, as 12:4:/tmp/x.
REHEARSAL_ENV = "CHECKPOINT_REHEARSAL"
VERIFY_ENV = "CHECKPOINT_RESUME_VERIFY"
READ_PATIENCE_ENV = "CHECKPOINT_READ_PATIENCE_S"
_READ_PATIENCE_S = 330.0


# Of the manager's `Cadence`, and of the configuration's section `checkpoint`.
CADENCE = ("snapshot_steps", "save_steps", "save_minutes", "overhead_cap")


@dataclass(frozen=True)
class RankSettings:
    """The settings of one attempt, equal on all ranks of a node.

    Attributes:
        agent_socket: Path of the node's checkpoint agent; empty where the ranks start an agent of their own.
        attempt: Number of the attempt, from 1; 0 without a supervisor.
        node_rank: Rank of this node in the run.
        location: Path or URL of the run's checkpoints; empty where the script's own choice counts.
        local_tier: Directory of the machine's fast tier; empty for none. Only meaningful with a location.
        resume: `auto`, `never` or a step; empty where the script's own choice counts.
        verify: What a resume does with the step record: `auto`, `strict` or `off`; empty for `auto`.
        resume_from: Checkpoint to start from while the run has none of its own.
        allow_changes: Whether to resume from the checkpoints of a job that differs from this one.
        lineage: Name of the run, the same on every machine and in every attempt.
        num_failures: Failures of the run so far.
        observed_s: Seconds of training in which these failures occurred.
        lost_steps: Steps that the run has recomputed so far.
        reached_step: Last step that the previous attempt finished.
        micro_batch_divisor: Parts into which each micro-batch is cut, because whole ones ran out of memory.
        planned_ranks: Number of ranks that the configured batch and learning rate are meant for; 0 for those there are.
        skipped_steps: First and last step of each window whose samples are skipped.
        cadence: Fields of the manager's `Cadence` that the user has set for the run, before what the script says.
        is_exact: Whether the run counts on virtual ranks (`elastic.mode=exact`).
        virtual_ranks: Number of them that was asked for; 0 to leave it to the script.
    """

    agent_socket: str = ""
    attempt: int = 0
    node_rank: int = 0
    location: str = ""
    local_tier: str = ""
    resume: str = ""
    verify: str = ""
    resume_from: str = ""
    allow_changes: bool = False
    lineage: str = ""
    num_failures: int = 0
    observed_s: float = 0.0
    lost_steps: int = 0
    reached_step: int = 0
    micro_batch_divisor: int = 1
    planned_ranks: int = 0
    skipped_steps: tuple[tuple[int, int], ...] = ()
    cadence: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = False
    virtual_ranks: int = 0

    def virtual_ranks_of(self, script: int | Literal["auto"] | None) -> int | Literal["auto"] | None:
        """Return the number of virtual ranks of a training: what was asked for where the script says "auto".

        Raises:
            CheckpointError: The run counts on virtual ranks, and the script has none, or another number.
        """
        if not self.is_exact:
            return script
        if script is None:
            raise CheckpointError(
                "elastic.mode=exact, and this training has no virtual ranks: it would end in other bits on another "
                "number of ranks. Pass virtual_ranks to resilient(), or to CheckpointManager() and iterate over "
                "shares(); or start without elastic.mode=exact"
            )
        if self.virtual_ranks and script not in ("auto", self.virtual_ranks):
            raise CheckpointError(
                f"elastic.virtual_ranks is {self.virtual_ranks}, and the script's virtual_ranks {script}: use the same "
                "number, or one of them only"
            )
        return self.virtual_ranks or script

    def to_json(self) -> str:
        """Return the value for `SETTINGS_ENV`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Parse what `to_json` returned; raises ValueError for anything else."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            names = {one.name for one in fields(cls)}
            if values.keys() != names:
                raise ValueError(f"missing or unknown fields: {', '.join(sorted(values.keys() ^ names))}")
            return cls(**{one.name: _CHECKS[one.type](one.name, values[one.name]) for one in fields(cls)})
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{SETTINGS_ENV} cannot be read: {error}; `runner start` sets this variable for its ranks: unset it, "
                "and use one version of the package for runner and ranks"
            ) from None


def rank_settings(environment: Mapping[str, str] = os.environ) -> RankSettings:
    """Return the settings of this process: the supervisor's and, where it says nothing, the user's variables.

    Raises ValueError where the supervisor's variable cannot be parsed.
    """
    settings = _parse(environment.get(SETTINGS_ENV, ""))
    if not settings.location:
        location = environment.get(LOCATION_ENV, "")
        settings = replace(settings, location=location, local_tier=environment.get(LOCAL_TIER_ENV, ""))
    return replace(
        settings,
        resume=settings.resume or environment.get(RESUME_ENV, ""),
        verify=settings.verify or environment.get(VERIFY_ENV, ""),
        resume_from=settings.resume_from or environment.get(RESUME_FROM_ENV, ""),
        allow_changes=settings.allow_changes or environment.get(ALLOW_CHANGES_ENV) == "1",
    )


def initial_weights_folder(environment: Mapping[str, str] = os.environ) -> str:
    """Return the folder with whose weights a new run begins; empty for none."""
    return environment.get(INIT_FROM_ENV, "")


def read_patience_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return for how many seconds a checkpoint in remote storage must be read wrongly before it counts as damaged.

    Raises:
        CheckpointError: The user's variable is not a number of seconds.
    """
    text = environment.get(READ_PATIENCE_ENV, "")
    try:
        return _seconds(READ_PATIENCE_ENV, float(text)) if text else _READ_PATIENCE_S
    except ValueError:
        raise CheckpointError(f"{READ_PATIENCE_ENV}={text!r} is not a number of seconds; unset it, or set it") from None


# The value does not change while a process lives.
@functools.lru_cache(maxsize=1)
def _parse(text: str) -> RankSettings:
    return RankSettings.from_json(text) if text else RankSettings()


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is not true or false")
    return value


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is not a number from 0")
    return value


def _seconds(name: str, value: object) -> float:
    # Comparisons with NaN are false.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} is not a number of seconds")
    return float(value)


def _windows(name: str, value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(isinstance(window, list) and len(window) == 2 for window in value):
        raise ValueError(f"{name} is not a list of pairs of steps")
    return tuple((_count(name, first), _count(name, last)) for first, last in value)


def _cadence(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() <= set(CADENCE):
        raise ValueError(f"{name} is not an object with keys of {', '.join(CADENCE)}")
    for key, one in value.items():
        if one is not None and one != "auto" and (isinstance(one, bool) or not isinstance(one, (int, float))):
            raise ValueError(f"{name}.{key} is not a number")
    return value


# By a field's annotation, which is text under `from __future__ import annotations`.
_CHECKS: dict[Any, Callable[[str, object], Any]] = {
    "str": _text,
    "bool": _flag,
    "int": _count,
    "float": _seconds,
    "tuple[tuple[int, int], ...]": _windows,
    "Mapping[str, Any]": _cadence,
}


DISTRIBUTION = "resilient-training"


def not_installed(package: str | None, extra: str) -> str:
    """Return the message for a `package` of the extra `extra` that cannot be imported."""
    return f"{package} is not installed: pip install '{DISTRIBUTION}[{extra}]'"
