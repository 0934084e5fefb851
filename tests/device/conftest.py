from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import second_device
from infra.parts import require


@pytest.fixture(scope="session")
def sim() -> Any:
    """A second device on this machine, as `torch.sim`; the process has an accelerator from then on."""
    require("C++ compiler")
    return second_device.load()


@pytest.fixture(params=["cpu", "sim"])
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors are."""
    if request.param == "cpu":
        yield "cpu"
        return
    module = request.getfixturevalue("sim")
    # Copies to the host run so late that reading without waiting for them fails.
    module.set_delay_us(300)
    yield "sim:0"
    module.set_delay_us(0)
