"""Print what the package needs to be built and to run, for `pip install -r`: a layer of its own in an image.

It reads pyproject.toml beside the current directory's code, so that the layer holds no code and stays cached until a
dependency changes. Versions come from constraints.txt, by pip's --constraint.
Usage: python requirements.py [EXTRA …]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Of the build, of the package, and of these of its extras.

    Raises:
        SystemExit: there is no such extra.
    """
    document = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = document["project"]
    optional = project["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"requirements.py: there is no extra {extra!r}; choose from {', '.join(sorted(optional))}")
    # An extra may be made of others: "this-package[one,two]".
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
