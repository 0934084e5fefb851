from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.process import device


@pytest.mark.parametrize(
    ("module", "is_lost"),
    [
        (SimpleNamespace(_is_in_bad_fork=lambda: True), True),
        (SimpleNamespace(_is_in_bad_fork=lambda: False), False),
        (SimpleNamespace(), False),
        (None, False),
    ],
)
def test_a_fork_that_cannot_use_the_accelerator_says_so(
    module: Any, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = torch.device("xpu") if module is not None else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    if is_lost:
        with pytest.raises(RuntimeError, match="Cannot re-initialize XPU in forked subprocess"):
            device.check_fork()
    else:
        device.check_fork()
