"""Launchers that a command line may name: what they say of ranks and nodes is taken over, as if it were said to runner.

The one place that knows their options. What they do besides, such as the environment that accelerate prepares, is done
by themselves, in each rank: see `runner.training.user_program`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.errors import UsageError
from runner.program.program import Program, find_program

_TORCHRUN = {
    "nproc_per_node": "nproc_per_node",
    "nnodes": "nnodes",
    "node_rank": "node_rank",
    "rdzv_backend": "rdzv_backend",
    "rdzv_endpoint": "rdzv_endpoint",
    "master_addr": "master_addr",
    "master_port": "master_port",
    "local_addr": "local_addr",
}
_ACCELERATE = {
    "num_processes": "world_size",
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
# What LLaMA-Factory and ms-swift read from the environment.
_VARIABLES = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
# As torchrun counts GPUs where it is given one of these.
_COUNTED = {"auto": "auto", "cpu": "auto", "gpu": "gpu", "xpu": "gpu"}


@dataclass(frozen=True)
class NestedLauncher:
    """A command that starts ranks by itself.

    Attributes:
        options: Keys of the section `launch`, by names of its options, with underscores.
        variables: The same, by names of environment variables.
        config: Its option for a YAML file with the same names, if it has one.
        starts_any: Whether it starts a program that its command line names.
        is_plain: Whether it does nothing else: then the program is run without it.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    starts_any: bool = False
    is_plain: bool = False


_TORCH = NestedLauncher(_TORCHRUN, starts_any=True, is_plain=True)
_LAUNCH = NestedLauncher(_ACCELERATE, config="config_file", starts_any=True)
_OF_VARIABLES = NestedLauncher(variables=_VARIABLES)
# By command or module, with the subcommand where only that one starts ranks.
LAUNCHERS: dict[str, NestedLauncher] = {
    "torchrun": _TORCH,
    "torch.distributed.run": _TORCH,
    "torch.distributed.launch": _TORCH,
    "accelerate launch": _LAUNCH,
    "accelerate-launch": _LAUNCH,
    "accelerate.commands.launch": _LAUNCH,
    "deepspeed": NestedLauncher(
        {"num_gpus": "nproc_per_node", "num_nodes": "nnodes", "master_addr": "master_addr"}, starts_any=True
    ),
    "tune run": NestedLauncher(_TORCHRUN),
    "trl": NestedLauncher(_ACCELERATE, config="accelerate_config"),
    "axolotl": NestedLauncher({**_TORCHRUN, **_ACCELERATE}),
    "llamafactory-cli": _OF_VARIABLES,
    "lmf": _OF_VARIABLES,
    "llamafactory.cli": _OF_VARIABLES,
    "swift": _OF_VARIABLES,
    "swift.cli.main": _OF_VARIABLES,
}


@dataclass(frozen=True)
class Nested:
    """What a command line with a launcher comes to.

    Attributes:
        program: What each rank runs.
        inner: What the launcher starts, where that is named: it is the job.
        settings: Key of the section `launch`, value and how it was said, of each of the launcher's settings.
    """

    program: Program
    inner: Program | None = None
    settings: tuple[tuple[str, Any, str], ...] = ()


def launcher_of(program: Program) -> NestedLauncher | None:
    """Return the launcher that a program is; None if it is none."""
    if program.kind == "script":
        return None
    both = " ".join([program.label, *program.args[:1]])
    return LAUNCHERS.get(program.label) or LAUNCHERS.get(both)


def unnested(program: Program, environment: Mapping[str, str]) -> Nested:
    """Return what a program comes to, if it is a launcher.

    Raises:
        UsageError: It says two things of the same, a value is not a number, or what it starts does not exist.
    """
    launcher = launcher_of(program)
    if launcher is None:
        return Nested(program)
    options, rest = _split(launcher, program)
    settings: dict[str, tuple[Any, str]] = {}

    def add(key: str, value: Any, said: str) -> None:
        value = _COUNTED.get(str(value), value)
        if key in settings and str(settings[key][0]) != str(value):
            raise UsageError(f"{settings[key][1]} and {said} contradict each other; pass one of them")
        settings[key] = (value, said)

    for name, value in options:
        if name in launcher.options:
            add(launcher.options[name], value, f"--{name} {value}")
    for variable, key in launcher.variables.items():
        if environment.get(variable):
            add(key, environment[variable], f"{variable}={environment[variable]}")
    for name, value, said in _of_file(launcher, options):
        if launcher.options[name] not in settings:
            add(launcher.options[name], value, said)
    found = tuple((f"launch.{key}", value, said) for key, (value, said) in _per_node(settings).items())
    inner = rest() if launcher.starts_any else None
    return Nested(inner if launcher.is_plain and inner is not None else program, inner, found)


def _per_node(settings: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Return settings with the ranks of a node in place of those of all nodes."""
    if "world_size" not in settings:
        return settings
    total, said = settings.pop("world_size")
    nodes = str(settings.get("nnodes", ("1", ""))[0])
    if not (str(total).isdigit() and nodes.isdigit() and int(nodes)) or int(total) % int(nodes) or not int(total):
        raise UsageError(f"{said}: must be a number of ranks, and a multiple of the {nodes} nodes")
    return {**settings, "nproc_per_node": (int(total) // int(nodes), said)}


def _split(launcher: NestedLauncher, program: Program) -> tuple[list[tuple[str, str]], Callable[[], Program | None]]:
    """Return the launcher's own options, and a function that returns the program that it starts."""
    args, own, is_module = list(program.args), list[tuple[str, str]](), False
    number = 0
    while number < len(args):
        word = args[number]
        # A value of an option that is not known here may come before it.
        follows_option = number > 0 and args[number - 1].startswith("-") and not is_module
        if (
            launcher.starts_any
            and not word.startswith("-")
            and (is_module or word.endswith(".py") or (Path(word).is_file() and not follows_option))
        ):
            return own, functools.partial(find_program, word, args[number + 1 :], module=is_module)
        number += 1
        if word in ("-m", "--module") and launcher.starts_any:
            is_module = True
            continue
        if not word.startswith("-"):
            continue
        name, separator, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in launcher.options or name == launcher.config:
            if not separator:
                if number == len(args):
                    raise UsageError(f"{program.label}: {word} needs a value")
                value = args[number]
                number += 1
            own.append((name, value))
    if launcher.starts_any:
        raise UsageError(f"{program.label}: no Python file follows; pass one, or -m MODULE")
    return own, lambda: None


def _of_file(launcher: NestedLauncher, options: list[tuple[str, str]]) -> Iterator[tuple[str, Any, str]]:
    path = next((value for name, value in options if name == launcher.config), None)
    if path is None or not Path(path).is_file():
        return  # trl has names for configurations of its own
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--{launcher.config} {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--{launcher.config} {path} is no YAML mapping")
    for name, value in found.items():
        if name in launcher.options and value is not None:
            yield name, value, f"{name}: {value} in {path}"
