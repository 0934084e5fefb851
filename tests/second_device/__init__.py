"""A second kind of device that runs on any machine: torch's PrivateUse1 slot, in `device.cpp`.

`load()` compiles it (a C++ compiler and ninja, one minute, once) and names it `sim`.
"""

from __future__ import annotations

import fcntl
import functools
import types
from pathlib import Path
from typing import Any

import torch

NAME = "sim"
NUM_DEVICES = 2


@functools.cache
def load() -> Any:
    """Compile and register the device; returns its module, which is `torch.sim`, too."""
    from torch.utils.cpp_extension import _get_build_directory
    from torch.utils.cpp_extension import load as build

    folder = Path(_get_build_directory("second_device", verbose=False))
    # torch's own lock outlives a test that is killed, and those that wait for it would wait forever.
    with (folder / "flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        extension = build(
            "second_device",
            [str(Path(__file__).with_name("device.cpp"))],
            extra_cflags=["-O1", "-Wno-unused"],
            verbose=False,
        )
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")

    def number(device: Any = None) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return extension.current_device() if index is None else int(index)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: NUM_DEVICES
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(number(device))
    module.get_device_name = lambda device=None: "Second Device"
    module.set_delay_us = extension.set_delay_us
    module._is_in_bad_fork = lambda: False
    module.manual_seed = lambda seed: extension.manual_seed(number(), seed)
    module.manual_seed_all = lambda seed: [extension.manual_seed(index, seed) for index in range(NUM_DEVICES)]
    module.get_rng_state = lambda device=None: extension.get_rng_state(number(device))
    module.get_rng_state_all = lambda: [extension.get_rng_state(index) for index in range(NUM_DEVICES)]
    module.set_rng_state = lambda state, device=None: extension.set_rng_state(number(device), state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    register: Any = torch._register_device_module
    register(NAME, module)
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
