"""Text for people: numbers with units, and nothing that a terminal would obey."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

# What terminals take for commands (C0 but for tab and newline, DEL, C1), and what reverses the order of a line.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Characters of a list that is read.
_SHORT = 180


def visible(text: str) -> str:
    """Return a text of others with a terminal's commands spelled out, so that it does not obey them.

    An error, a file's name or a record may contain what moves the cursor, hides lines or types for the user.
    """
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, most: int = 80) -> str:
    """Return a text of others with its middle left out if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - most // 3]}…{text[-(most // 3) :]}"


def choice_of(names: Collection[str], given: str, otherwise: str) -> str:
    """Return which of the accepted names may have been meant: all if they are few, those alike, or `otherwise`."""
    listed = ", ".join(names)
    if names and len(listed) <= _SHORT:
        return f"use one of {listed}"
    import difflib

    alike = difflib.get_close_matches(given, names, n=3)
    return f"did you mean {' or '.join(alike)}?" if alike else otherwise


def all_visible(values: Any) -> Any:
    """Return parsed JSON with all its texts, and names, as `visible` returns them."""
    if isinstance(values, str):
        return visible(values)
    if isinstance(values, dict):
        return {visible(name): all_visible(value) for name, value in values.items()}
    return [all_visible(value) for value in values] if isinstance(values, list) else values


def gb(nbytes: int) -> str:
    """Format a number of bytes: 24.18 GB, 3.20 MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    """Format a duration: 9.5 s, 42 s, 3 min 20 s, 5 h 12 min, 2 d 4 h."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    # Rounding once avoids "1 min 60 s" for 119.7 s.
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 60:
        return f"{minutes:.0f} min {seconds % 60:.0f} s"
    if hours < 24:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{days:.0f} d {hours % 24:.0f} h"
