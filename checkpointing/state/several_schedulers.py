"""Several schedulers as one object with a state: one for each of several optimizers, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class SeveralSchedulers:
    """Schedulers that are saved and restored together.

    Args:
        schedulers: By number, or by name.
    """

    def __init__(self, schedulers: Sequence[Any] | Mapping[Any, Any]) -> None:
        named = schedulers if isinstance(schedulers, Mapping) else dict(enumerate(schedulers))
        self._schedulers = {str(name): one for name, one in named.items() if one is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: one.state_dict() for name, one in self._schedulers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each.

        Raises:
            ValueError: They are others.
        """
        if state.keys() != self._schedulers.keys():
            raise ValueError(f"it is of the schedulers {sorted(state)}, these are {sorted(self._schedulers)}")
        for name, one in self._schedulers.items():
            one.load_state_dict(state[name])


def as_one(scheduler: Any) -> Any:
    """Return a scheduler, or several in a list, tuple or dict, as one object."""
    return SeveralSchedulers(scheduler) if isinstance(scheduler, (list, tuple, dict)) else scheduler
