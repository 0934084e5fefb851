"""Print the requirements to build and run the package, for `pip install -r` in an image layer of its own.

It reads pyproject.toml of the current directory, so that the layer holds no code and stays cached until a dependency
changes. Versions come from constraints.txt, by pip's --constraint.

Usage: python requirements.py [EXTRA …]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the requirements of the build, of the package, and of these extras.

    Raises:
        SystemExit: An extra does not exist.
    """
    document = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = document["project"]
    optional = project["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"requirements.py: there is no extra {extra!r}; choose from {', '.join(sorted(optional))}")
    # An extra may consist of others: "this-package[one,two]".
    ours = re.compile(re.escape(project["name"]) + r"\[([\w,-]+)\]")
    wanted, left, seen = [*document["build-system"]["requires"], *project["dependencies"]], list(extras), set(extras)
    while left:
        for line in optional[left.pop(0)]:
            if match := ours.fullmatch(line):
                more = [extra for extra in match[1].split(",") if extra not in seen]
                left += more
                seen.update(more)
            else:
                wanted.append(line)
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
