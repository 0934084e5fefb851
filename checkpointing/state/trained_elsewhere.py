"""Parameters that an optimizer trains outside of the model: of a loss with weights of its own, say.

Their gradients are kept, too. A Trainer zeroes those of its model only, so that these add up from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Of the further states.
TRAINED_STATE = "trained_parameters"


class TrainedElsewhere:
    """These parameters as an object with a state; they have no names.

    Args:
        parameters: In the optimizer's order, by which its own state knows them, too.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and their gradients, by reference."""
        parameters = [parameter.detach() for parameter in self._parameters]
        gradients = [one.grad.detach() if one.grad is not None else None for one in self._parameters]
        return {"parameters": parameters, "gradients": gradients}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the parameters and their gradients.

        Raises:
            ValueError: They are others.
        """
        saved = state["parameters"]
        now, then = ([tuple(one.shape) for one in some] for some in (self._parameters, saved))
        if now != then:
            raise ValueError(f"of what the optimizer trains outside of the model the shapes were {then}, and are {now}")
        for parameter, value, gradient in zip(self._parameters, saved, state["gradients"], strict=True):
            parameter.copy_(value)
            parameter.grad = gradient.to(parameter.device, copy=True) if gradient is not None else None
