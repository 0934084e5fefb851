"""Numbers with units, for people."""

from __future__ import annotations


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
