"""Makes every `Trainer` of a program resilient when it begins to train, without an edit of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from checkpointing.errors import CheckpointError
from checkpointing.transformers import resilient
from checkpointing.transformers.trainer import ResilientMixin

_MARK = "_makes_resilient"


def protect_trainers(unprotected: Callable[[str], None]) -> None:
    """Have `train` of every trainer, of the classes that are there and of those that come, go through `resilient`.

    What is saved, when and where is what the program's arguments ask for. The outermost class is the one that is
    extended, whichever `train` of it is called first.

    Args:
        unprotected: Called with the reason where a trainer cannot be made resilient, which then trains as it is; may
            raise.
    """
    _wrap_all(Trainer, unprotected)
    own: Any = vars(Trainer).get("__init_subclass__")

    def define_and_wrap(cls: type[Trainer], /, **options: Any) -> None:
        if own is not None:
            own.__func__(cls, **options)
        else:
            super(Trainer, cls).__init_subclass__(**options)
        _wrap(cls, unprotected)

    Trainer.__init_subclass__ = classmethod(define_and_wrap)


def _wrap_all(kind: type[Trainer], unprotected: Callable[[str], None]) -> None:
    _wrap(kind, unprotected)
    for derived in kind.__subclasses__():
        _wrap_all(derived, unprotected)


def _wrap(kind: type[Trainer], unprotected: Callable[[str], None]) -> None:
    """Wrap a class's own `train`; one that it inherits is wrapped where it is defined."""
    plain: Any = vars(kind).get("train")
    if not callable(plain) or issubclass(kind, ResilientMixin) or hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, ResilientMixin) or getattr(self, _MARK, True) is False:
            return plain(self, *args, **kwargs)
        try:
            resilient(self)
        except (CheckpointError, ValueError) as error:
            setattr(self, _MARK, False)
            unprotected(f"{type(self).__name__} cannot be made resilient: {error}")
            return plain(self, *args, **kwargs)
        return self.train(*args, **kwargs)

    setattr(train, _MARK, True)
    kind.train = train
