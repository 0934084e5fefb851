"""Objects that a script has given to accelerate's `register_for_checkpointing`, which `save_state` would save.

Neither the prepared model nor the prepared optimizer knows its `Accelerator`, so that is looked for once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.host.private_names import PrivateAttribute, Seam

REGISTERED = Seam(
    "accelerate",
    "1.11.0",
    "1.15.0",
    (
        PrivateAttribute("accelerate:Accelerator", "_custom_objects"),
        PrivateAttribute("accelerate:Accelerator", "_optimizers"),
    ),
    "give the optimizer without accelerate's wrapper, and registered objects in `states`",
)


class RegisteredObjects:
    """Those of the accelerators that have prepared an optimizer.

    Args:
        optimizer: The optimizer, as `prepare` has returned it.

    Raises:
        CheckpointError: accelerate has changed what is needed to find them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._objects: list[list[Any]] = []
        module = sys.modules.get("accelerate.accelerator")
        if module is not None and any(base.__name__ == "AcceleratedOptimizer" for base in type(optimizer).__mro__):
            REGISTERED.check()
            # Not `isinstance`, which may run code of the objects.
            found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), module.Accelerator)]
            self._objects = [
                one._custom_objects for one in found if any(optimizer is other for other in one._optimizers)
            ]
        self._num_first = self._num

    def states(self, others: Iterable[Any]) -> dict[str, Any]:
        """Return the objects, by the names that they are saved under.

        Args:
            others: What is saved anyway.
        """
        known = set(map(id, others))
        found = [one for objects in self._objects for one in objects]
        return {f"registered_{number}": one for number, one in enumerate(found, 1) if id(one) not in known}

    def check(self) -> None:
        """Check that none was registered since.

        Raises:
            CheckpointError: One was: at a resume, it would come too late to be restored.
        """
        if self._num != self._num_first:
            raise CheckpointError(
                f"{self._num - self._num_first} objects were given to accelerate's register_for_checkpointing after "
                "training began: a resumed run would not restore them. Register them before CheckpointManager.resume, "
                "or give them in `states`"
            )

    @property
    def _num(self) -> int:
        return sum(map(len, self._objects))
