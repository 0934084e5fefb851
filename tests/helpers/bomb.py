"""A pickle that runs code, for tests which show that nothing unpickles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Bomb:
    """What unpickles it appends a line to a file: its process, and which functions were reading."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        code = (
            "import os, traceback\n"
            "names = [f'{f.filename.rpartition(\"site-packages/\")[2]}:{f.name}' for f in traceback.extract_stack()]\n"
            f"open({str(self._marker)!r}, 'a').write(f'{{os.getpid()}} {{\" < \".join(reversed(names[-6:]))}}\\n')"
        )
        return exec, (code,)
