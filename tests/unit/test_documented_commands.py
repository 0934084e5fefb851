"""Each `runner` command line of the documentation is one that the command line accepts, with settings that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from runner.cli.main import cli
from runner.config.load import load_config, parse_setting
from runner.recovery.kinds import FailureKind

ROOT = Path(__file__).parents[2]
# cli.md is written from the commands themselves.
PAGES = [
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("deploy/**/*.md"), *ROOT.glob("docs/**/*.md"))
    if page.name not in ("CHANGELOG.md", "cli.md")
]
FENCED = re.compile(r"^( *)(```+)(\w*)\n(.*?)^ *\2$", re.MULTILINE | re.DOTALL)
# Behind a prompt or variables; one line may have several commands.
TYPED = re.compile(r"(?:[$#] )?(?:[A-Z_]+=\S+ )*(runner [a-z-].*)")
SEPARATORS = re.compile(r"\s*(?:;|&&| \| )\s*")
INLINE = re.compile(r"`(runner [a-z][^`]*)`")
# Optional parts of a synopsis, one of them at a time: [--watch|--json].
OPTIONAL = re.compile(r" \[([^\]]+)\]")


def typed(page: str) -> Iterator[str]:
    """The command lines of a page: those in blocks, and those in running text."""
    for block in FENCED.finditer(page):
        for line in block[4].replace("\\\n", " ").splitlines():
            commands = SEPARATORS.split(re.sub(r"\s+# .*", "", line.strip()))
            yield from (match[1] for command in commands if (match := TYPED.fullmatch(command)))
    for line in INLINE.findall(FENCED.sub("", page)):
        if line not in {kind.value for kind in FailureKind}:
            yield re.sub(r"\s+", " ", line).removesuffix(" ...").removesuffix(" …")


def variants(line: str) -> list[list[str]]:
    """The command without the optional parts of a synopsis, and with each of them; capitals stand for numbers."""
    words = [OPTIONAL.sub("", line)]
    words += [f"{words[0]} {one}" for group in OPTIONAL.findall(line) for one in group.split("|")]
    return [[re.sub(r"^[A-Z]+$", "1", word) for word in shlex.split(text)] for text in words]


def parsed(words: list[str]) -> click.Context:
    """Parse the words behind `runner`, without running anything; raises click's UsageError."""
    command: click.Command = cli
    context = click.Context(cli, info_name="runner", **cli.context_settings)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        if isinstance(command, click.Group):
            context = click.Context(command, context, name)
    try:
        return command.make_context(command.name, words, context)
    except click.exceptions.Exit:  # --help
        return context


FOUND = [(str(page.relative_to(ROOT)), line) for page in PAGES for line in dict.fromkeys(typed(page.read_text()))]


def test_commands_are_found() -> None:
    assert len(FOUND) > 100
    assert ("README.md", "runner start --nproc-per-node 8 train.py --my-option 3") in FOUND


@pytest.mark.parametrize(("page", "line"), FOUND)
def test_a_command_of_the_documentation_is_accepted(page: str, line: str) -> None:
    for words in variants(line):
        try:
            context = parsed(words[1:])
        except click.MissingParameter:
            # The text names a command, and types none.
            assert f"`{line}`" in (ROOT / page).read_text()
            continue
        if "config_path" in context.params:
            load_config(None, {}, [parse_setting(text) for text in context.params["settings"]])


@pytest.mark.parametrize(
    "line",
    ["runner strat train.py", "runner start --nproc 2", "runner status --wathc", "runner checkpoints lst runs/a"],
)
def test_what_is_not_accepted_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(variants(line)[0][1:])
