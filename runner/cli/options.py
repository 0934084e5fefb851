"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import math
import os
from typing import Any

import click

from runner.errors import UsageError


class Number(click.FloatRange):
    """Within its bounds, and neither infinite nor NaN, which are in no order with them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r}: write a number", param, ctx)
        return number


POSITIVE = Number(min=0, min_open=True)


_CONFIG_OPTIONS = [
    click.option(
        "--config",
        "config_path",
        type=click.Path(),
        help="YAML file (default: the bundled job, unless a model, data or SCRIPT is given).",
    ),
    click.option(
        "--output-dir",
        help="Folder of the run: checkpoints, journal, logs, best_model (default: runs/ + name of the configuration or "
        "script).",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any setting, e.g. trainer.learning_rate=1e-4.",
    ),
    click.option(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="auto|N",
        help="Ranks on this machine; auto (default): one per GPU, or 2 where there is none.",
    ),
    click.option("--nnodes", type=int, help="Number of machines."),
    click.option("--node-rank", "--node_rank", type=int, help="This machine's number, from 0."),
    click.option("--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help="Where the machines meet."),
    click.option("--master-addr", "--master_addr", help="As in torchrun; with --master-port, instead of the above."),
    click.option("--master-port", "--master_port", type=int),
    click.option("--local-addr", "--local_addr", metavar="ADDRESS", help="By which the others reach this machine."),
]


def config_options(command: Any) -> Any:
    for option in reversed(_CONFIG_OPTIONS):
        command = option(command)
    return command


def load(
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    launch: dict[str, Any],
    restart: dict[str, Any] | None = None,
    script: str | None = None,
) -> Any:
    from runner.config.load import load_config, parse_setting

    overrides = [parse_setting(text) for text in settings]
    if output_dir is not None:
        overrides.append(("output_dir", output_dir, "--output-dir"))
    for name, value in launch.items():
        if value is not None:
            text = int(value) if name == "nproc_per_node" and str(value).lstrip("-").isdigit() else value
            overrides.append((f"launch.{name}", text, f"--{name.replace('_', '-')} {value}"))
    for name, value in (restart or {}).items():
        if value is not None:
            overrides.append((f"restart.{name}", value, f"--{name.removesuffix('_s').replace('_', '-')} {value}"))
    return load_config(config_path, os.environ, overrides, script=script)


def table_console() -> Any:
    """For tables: in a file or a pipe as wide as they are."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def size_of(option: str, text: str | None) -> int | None:
    from checkpointing.memory import parse_bytes

    try:
        size = parse_bytes(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if size == 0:
        raise UsageError(f"{option} {text}: write a size above 0")
    return size


def run_directory_of(config: Any) -> Any:
    from runner.journal.run_directory import RunDirectory

    return RunDirectory(config.output_dir, config.launch.node_rank)
