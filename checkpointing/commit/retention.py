"""Which checkpoints a tier keeps, and which the durable tier should get. Pure: manifests in, steps out.

To add an option, add it to `FurtherRetention` and to `Retention` here, and to `CheckpointConfig` of
`runner.config.schema`: `CheckpointManager`, `resilient` and `runner checkpoints prune` accept every option of these.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from checkpointing.format.manifest import Manifest

# Of a loop that does not say it; a Trainer's arguments do. A disk that is full ends a run.
DEFAULT_KEEP_LAST = 3


class FurtherRetention(TypedDict, total=False):
    """Options of `Retention` that a Trainer's arguments do not have."""

    keep_every: int | None
    keep_best: int


class RetentionOptions(FurtherRetention, total=False):
    """The options of `Retention` as keyword arguments."""

    keep_last: int | None
    best_metric: str | None
    greater_is_better: bool


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept; the newest committed one always is.

    Attributes:
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_every: Also keep every checkpoint whose step is a multiple of this.
        keep_best: Number of best checkpoints to keep besides, where there is a `best_metric`.
        best_metric: Name of the metric that says which is the best, among those that have it.
        greater_is_better: Whether a greater value of the metric is better.
    """

    keep_last: int | None = None
    keep_every: int | None = field(
        default=None, metadata={"help": "Interval, in steps, of checkpoints to keep besides", "metavar": "STEPS"}
    )
    keep_best: int = field(
        default=1,
        metadata={"help": "Number of best checkpoints to keep besides, by `metric_for_best_model`", "metavar": "N"},
    )
    best_metric: str | None = None
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every={self.keep_every} is not allowed; use a number of steps from 1, or None")
        if self.keep_best < 1:
            raise ValueError(f"keep_best={self.keep_best} is not allowed; use a number of checkpoints from 1")


def retention_of(options: Mapping[str, Any], function: Callable[..., Any]) -> Retention:
    """Return the retention that keyword arguments choose.

    Args:
        options: The arguments that are not parameters of the function.
        function: The function, or the class.

    Raises:
        TypeError: One of them is unknown; the message names what may have been meant.
    """
    known = [field.name for field in fields(Retention)]
    for name in options:
        if name not in known:
            parameters = inspect.signature(function).parameters.values()
            named = [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
            meant = difflib.get_close_matches(name, [*named, *known], 1)
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise TypeError(f"{function.__name__}() has no option {name!r}{hint}")
    return Retention(**options)


def best_by(metric: str | None, greater_is_better: bool | None) -> tuple[str | None, bool]:
    """Complete a Trainer's `metric_for_best_model` and `greater_is_better` as the Trainer does.

    Args:
        metric: Name of the metric, with or without `eval_`; None for none.
        greater_is_better: How it compares; None for the Trainer's default.

    Returns:
        The metric's name in a manifest, and whether a greater value is better.
    """
    if greater_is_better is None:
        greater_is_better = metric is not None and not metric.endswith("loss")
    return (metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"), greater_is_better


def best_first(manifests: Iterable[Manifest], retention: Retention) -> list[int]:
    """Return the steps that have the metric, best first; of equal ones the oldest first, as the Trainer ranks them."""
    metric, sign = retention.best_metric, -1 if retention.greater_is_better else 1
    rated = {(sign * m.metrics[metric], m.step) for m in manifests if metric is not None and metric in m.metrics}
    return [step for _, step in sorted(rated)]


def steps_to_remove(
    committed: Iterable[Manifest], retention: Retention, kept: Callable[[], Collection[int]] = tuple
) -> list[int]:
    """Return the steps that retention does not keep, oldest first.

    Args:
        committed: Committed checkpoints only: a torn one must not count towards those that are kept.
        retention: What to keep.
        kept: Returns steps that a user has said to keep; asked only if something is to be removed.

    Returns:
        Their steps.
    """
    manifests = {manifest.step: manifest for manifest in committed}
    if retention.keep_last is None:
        return []
    ordered = sorted(manifests)
    staying = {*ordered[-max(retention.keep_last, 1) :], *_milestones(manifests.values(), retention)}
    superfluous = [step for step in ordered if step not in staying]
    pinned = set(kept()) if superfluous else set()
    return [step for step in superfluous if step not in pinned]


def steps_to_upload(
    local: Iterable[Manifest], durable: Iterable[Manifest], retention: Retention, kept: Collection[int] = ()
) -> list[int]:
    """Return the steps that the durable tier should get from the local one.

    Where uploads are slower than saves, the checkpoints in between are skipped.

    Args:
        local: Checkpoints of the local tier.
        durable: Checkpoints of the durable tier.
        retention: What the durable tier keeps.
        kept: Steps that a user has said to keep.

    Returns:
        The newest step first, then those that are kept besides the newest.
    """
    here, there = {m.step: m for m in local}, {m.step: m for m in durable}
    newest = [step for step in [max(here, default=-1)] if step > max(there, default=-1)]
    lasting = _milestones([*here.values(), *there.values()], retention) | set(kept)
    return newest + sorted((step for step in lasting if step in here and step not in [*there, *newest]), reverse=True)


def _milestones(manifests: Iterable[Manifest], retention: Retention) -> set[int]:
    manifests = list(manifests)
    steps = {m.step for m in manifests if retention.keep_every and m.step % retention.keep_every == 0}
    return {*steps, *best_first(manifests, retention)[: retention.keep_best]}
