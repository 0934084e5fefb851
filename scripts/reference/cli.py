"""The command line, from the click commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from runner.cli.main import cli
from runner.cli.options import config_options
from scripts.reference.markdown import item, page, paragraphs, wrap


def render() -> str:
    return page("Command line", "the commands in runner/cli", _blocks())


def _blocks() -> Iterator[str]:
    context = cli.make_context("runner", ["start"])
    yield paragraphs(cli.help or "")
    yield wrap(
        "`runner COMMAND --help` prints the same texts. Options that are also keys of the "
        "[configuration](configuration.md) override the YAML file and the environment. Underscores in option names "
        "are accepted in place of hyphens, as in torchrun."
    )
    yield "## Shared options"
    yield wrap(
        f"These options are accepted by {_names(command for command in _commands() if _is_configured(command))}."
    )
    yield _options(_shared())
    for command in cli.commands.values():
        yield from _command(command, context)


def _commands() -> Iterator[click.Command]:
    for command in cli.commands.values():
        yield from command.commands.values() if isinstance(command, click.Group) else [command]


def _names(commands: Iterator[click.Command]) -> str:
    *names, last = [f"`{command.name}`" for command in commands]
    return f"{', '.join(names)} and {last}"


def _shared() -> list[click.Option]:
    command = click.command("shared")(config_options(lambda: None))
    return [param for param in command.params if isinstance(param, click.Option)]


def _is_configured(command: click.Command) -> bool:
    return {option.name for option in _shared()} <= {param.name for param in command.params}


def _command(command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=command.name, parent=parent)
    yield f"## {context.command_path}" if parent.parent is None else f"### {context.command_path}"
    yield f"`{' '.join([context.command_path, *command.collect_usage_pieces(context)])}`"
    yield paragraphs(command.help or "")
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from _command(child, context)
        return
    shared = {option.name for option in _shared()} if _is_configured(command) else set()
    own = [param for param in command.params if isinstance(param, click.Option) and param.name not in shared]
    yield _options(own)
    if shared:
        yield "Also the [shared options](#shared-options)."


def _options(options: list[click.Option]) -> str:
    return "\n".join(_option(option) for option in options if not option.hidden)


def _option(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    names = ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])
    text = option.help or ""
    notes = []
    if match := re.search(r" \(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)", text):
        text = text.replace(match[0], "")
        notes.append(f"Default: {match[1]}.")
    elif option.show_default:
        notes.append(f"Default: {option.default}.")
    if option.required:
        notes.append("Required.")
    return item(" ".join([f"{names}: {text}", *notes]))
