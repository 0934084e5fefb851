"""Options that several commands share, and their conversion."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import click

from runner.errors import UsageError
from runner.system.text import visible


class Number(click.FloatRange):
    """A finite number within bounds; click's own range accepts infinity and NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert the text of an option, or fail with a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


POSITIVE = Number(min=0, min_open=True)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_CONFIG_OPTIONS = [
    click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=click.Path(),
        help="YAML configuration file (default: the bundled job, unless a model, data or PROGRAM is given).",
    ),
    click.option(
        "--output-dir",
        metavar="DIR",
        help="Folder of the run: checkpoints, journal, logs and best_model (default: runs/ + the name of the "
        "configuration file or program).",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Configuration key to override, e.g. trainer.learning_rate=1e-4; repeatable.",
    ),
    click.option(
        "--nproc-per-node",
        metavar="auto|gpu|N",
        help="Number of ranks on this node (default: auto, one per GPU, or 2 without GPUs; gpu refuses such a node).",
    ),
    click.option(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="Number of nodes, or the smallest and the largest number with which to train (default: 1).",
    ),
    click.option(
        "--node-rank", type=int, metavar="N", help="Rank of this node, from 0; each of several nodes needs its own."
    ),
    click.option(
        "--rdzv-backend",
        type=click.Choice(["c10d", "static"]),
        help="Accepted as in torchrun, without effect: the runners know the nodes; see launch.rdzv_backend.",
    ),
    click.option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Rendezvous endpoint, required on several nodes (default: MASTER_ADDR:MASTER_PORT).",
    ),
    click.option(
        "--master-addr", metavar="HOST", help="Host of the rendezvous, instead of --rdzv-endpoint, as in torchrun."
    ),
    click.option("--master-port", type=int, metavar="PORT", help="Port of the rendezvous (default: 29500)."),
    click.option(
        "--local-addr", metavar="ADDRESS", help="Address under which other nodes reach this one (default: host name)."
    ),
]

_PROGRAM_ARGUMENTS = [
    click.option("-m", "--module", is_flag=True, help="PROGRAM is the name of a module, as for python -m."),
    click.option("--no-python", is_flag=True, help="PROGRAM is a command, also where a file has its name."),
    click.argument("program", required=False),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
]

_OF_PROGRAM = ("program", "args", "module", "no_python")


def config_options(command: Any) -> Any:
    """Decorate a command with the options that describe a run."""
    for option in reversed(_CONFIG_OPTIONS):
        command = option(command)
    return command


def program_arguments(command: Any) -> Any:
    """Decorate a command with the options and arguments that name a program, as torchrun has them."""
    for option in reversed(_PROGRAM_ARGUMENTS):
        command = option(command)
    return command


def named_program(options: dict[str, Any]) -> Any:
    """Return the `Nested` of the values of `program_arguments`; None for the bundled job.

    Raises:
        UsageError: There is no such program, Python cannot compile it, or its launcher contradicts itself.
    """
    from runner.program.nested_launchers import unnested
    from runner.program.program import check_syntax, find_program

    word, args, module, command = (options[name] for name in _OF_PROGRAM)
    program = find_program(word, args, module=module, command=command)
    if program is None:
        return None
    nested = unnested(program, os.environ)
    check_syntax(nested.inner or nested.program)
    return nested


def load_program(options: dict[str, Any], restart: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Return the `Program` of a command line, None for the bundled job, and its `Config`.

    Args:
        options: Values of `config_options` and `program_arguments`, and of further keys of the section `launch`.
        restart: Options of the section `restart`.

    Raises:
        UsageError: The command line or the configuration is invalid.
    """
    nested = named_program(options)
    rest = {name: value for name, value in options.items() if name not in _OF_PROGRAM}
    if nested is None:
        return None, _loaded_to_start(rest, restart)
    own = {f"launch.{name}": value for name, value in rest.items() if value is not None}
    for key, value, said in nested.settings:
        if key in own and str(own[key]) != str(value):
            name = key.removeprefix("launch.").replace("_", "-")
            raise UsageError(f"--{name} {own[key]} and {said} contradict each other; pass one of them")
    return nested.program, _loaded_to_start(rest, restart, nested.program, nested.settings)


def _loaded_to_start(options: dict[str, Any], *more: Any) -> Any:
    from runner.config.checks import check_has_device

    config = load(options, *more)
    check_has_device(config)
    return config


def load(
    options: dict[str, Any],
    restart: dict[str, Any] | None = None,
    program: Any = None,
    further: Sequence[tuple[str, Any, str]] = (),
) -> Any:
    """Return the `Config` of a command line; raises UsageError if it is invalid.

    Args:
        options: Values of `config_options`, and of further keys of the section `launch`; None for one not given.
        restart: Options of the section `restart`, likewise.
        program: The user's own `Program`.
        further: Further settings: key, value and how it was said.
    """
    from runner.config.load import load_config, parse_setting

    overrides = [*further, *(parse_setting(text) for text in options["settings"])]
    if options["output_dir"] is not None:
        overrides.append(("output_dir", options["output_dir"], "--output-dir"))
    for name, value in options.items():
        if value is not None and name not in ("config_path", "output_dir", "settings"):
            text = int(value) if name == "nproc_per_node" and str(value).lstrip("-").isdigit() else value
            overrides.append((f"launch.{name}", text, f"--{name.replace('_', '-')} {value}"))
    for name, value in (restart or {}).items():
        if value is not None:
            overrides.append((f"restart.{name}", value, f"--{name.removesuffix('_s').replace('_', '-')} {value}"))
    return load_config(options["config_path"], os.environ, overrides, program=program)


def echo(text: str) -> None:
    """Print a line in which names and errors of others are; see `visible`."""
    click.echo(visible(text))


def table_console() -> Any:
    """Return a console for tables, which are not squeezed in a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def size_of(option: str, text: str | None) -> int | None:
    """Return the bytes of a size such as 80GiB; None if the option is not given."""
    from checkpointing.host.memory import parse_bytes

    try:
        size = parse_bytes(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if size == 0:
        raise UsageError(f"{option} {text}: must be above 0; write for example 80GiB")
    return size
