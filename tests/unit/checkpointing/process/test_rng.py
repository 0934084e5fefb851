from __future__ import annotations

import numpy as np
import pytest

from checkpointing.process import rng


def test_a_numpy_state_from_which_no_normal_can_be_drawn_is_refused() -> None:
    """A Mersenne Twister of zeros returns zeros forever, and `randn` draws until a point is inside the unit circle."""
    right = rng.state(1)
    name, key, position, *rest = right["numpy"]
    for first in (0, 0x7FFFFFFF):
        zeros = np.zeros_like(key)
        zeros[0] = first
        with pytest.raises(ValueError, match="all zeros"):
            rng.set_state({**right, "numpy": (name, zeros, position, *rest)})
    zeros[0] = 0x80000000
    rng.set_state({**right, "numpy": (name, zeros, 624, *rest)})
    np.random.randn(3)
    rng.set_state(right)
