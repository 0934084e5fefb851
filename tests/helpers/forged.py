"""Messages that nobody of ours has sent, for hypothesis."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


def forged(names: Sequence[str], words: Sequence[object]) -> st.SearchStrategy[bytes]:
    """Garbage, JSON, and JSON objects whose fields and values are half right."""
    half_right = st.dictionaries(st.sampled_from(names), JSON | st.sampled_from(words), max_size=len(names))
    return st.binary(max_size=200) | (JSON | half_right).map(lambda value: json.dumps(value).encode())
