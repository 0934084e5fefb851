"""The exit codes, from the docstrings of `runner.errors.ExitCode`."""

from __future__ import annotations

from runner.errors import ExitCode
from scripts.reference.markdown import page, table, wrap
from scripts.reference.source import read_source


def render() -> str:
    documented = read_source("runner.errors")["ExitCode"]
    rows = []
    for code in ExitCode:
        docstring = documented.members[code.name].docstring
        assert docstring is not None, f"ExitCode.{code.name} needs a docstring"
        meaning, _, action = docstring.value.partition("\n\n")
        assert action, f"ExitCode.{code.name}: say what to do in a second paragraph"
        rows.append([str(code.value), code.name, meaning, action])
    return page(
        "Exit codes",
        "runner/errors.py",
        [
            wrap("`runner start` exits with one of these codes. They tell a scheduler whether to start the run again."),
            table(["code", "name", "meaning", "what to do"], rows),
            wrap(
                "The other commands end with 0 after success and 2 after a usage error. `doctor`, `chaos` and "
                "`checkpoints verify` end with 1 if they found a problem."
            ),
        ],
    )
