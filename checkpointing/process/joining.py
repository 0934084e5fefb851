"""Contexts in which ranks may make different numbers of steps: torch's `Join`, and what is made of it.

Importing this module wraps the class's `__enter__` and `__exit__`: torch keeps no record of the contexts that are open.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import Join

from checkpointing.errors import CheckpointError

_open: list[Any] = []
# A context manager's protocol is looked up on its class.
_class: Any = Join
_enter, _exit = _class.__enter__, _class.__exit__


def _enter_noted(self: Any) -> Any:
    _open.append(self)
    return _enter(self)


def _exit_noted(self: Any, *raised: Any) -> Any:
    # Only the body's steps count: on the way out, torch shadows those of other ranks.
    if self in _open:
        _open.remove(self)
    return _exit(self, *raised)


_class.__enter__, _class.__exit__ = _enter_noted, _exit_noted


def check_same_steps() -> None:
    """Check that all ranks make the same steps, as far as can be seen.

    Raises:
        CheckpointError: A context is open in which ranks that have no more data make no further steps.
    """
    # With `throw_on_early_termination`, all ranks end at the same step.
    if any(join._enable and not join._throw_on_early_termination for join in _open):
        raise CheckpointError(
            "manager.step is called inside torch's Join (DistributedDataParallel.join, accelerate's "
            "join_uneven_inputs): ranks that run out of data make no further steps there, for which the others would "
            "wait. Give all ranks the same number of steps, for example by DistributedSampler(drop_last=True) or "
            "manager.batches(loader), and leave Join out; or use Join(..., throw_on_early_termination=True)"
        )
