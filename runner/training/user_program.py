"""Runs a user's program in a rank, as torchrun would; launchers that it calls start nothing, they go on in the rank.

A command such as `llamafactory-cli train` prepares a training, and then has torchrun, accelerate or another Python
start its ranks. The rank is there already: what they would be is run in it, in place of the call, with the environment
that the launcher has prepared. So launchers do by themselves whatever they do, and each framework that ends in one of
these calls is understood.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from runner.config.load import TORCHRUN_VARIABLES
from runner.errors import UsageError
from runner.program.nested_launchers import LAUNCHERS, launcher_of
from runner.program.program import Program, find_program

_AGENT_STORE_ENV = "TORCHELASTIC_USE_AGENT_STORE"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Of an environment that a launcher has prepared, what says which rank this is.
_OF_RANKS = (*TORCHRUN_VARIABLES, "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", _AGENT_STORE_ENV)
# Modules that start ranks with torchrun's options.
_TORCHRUN = {"torch.distributed.run", "torch.distributed.launch"}
_DEEPSPEED = "deepspeed.launcher.launch"


class ContradictoryRanks(UsageError):
    """A launcher within the program wants other ranks than there are."""


def run_program(program: Program) -> None:
    """Run a program as `__main__`, with its arguments in `sys.argv`."""
    _let_children_meet_by_themselves()
    try:
        with _answered_launchers(program):
            _run(program)
    except SystemExit as error:
        if error.code not in (0, None):
            raise
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _run(program: Program) -> None:
    """Run it with the first entry of the path that Python gives it."""
    sys.argv = [program.name, *program.args]
    if program.kind == "module":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program.name)))  # noqa: PTH100, PTH120
        runpy.run_path(program.name, run_name="__main__")


def _let_children_meet_by_themselves() -> None:
    """Have ranks that a script makes itself, by multiprocessing, meet at the address that the script says.

    torchrun's variable would have them wait for half an hour for a store there that is the launcher's.
    """
    start = BaseProcess.start

    def start_without(self: BaseProcess) -> None:
        said = os.environ.pop(_AGENT_STORE_ENV, None)
        try:
            start(self)
        finally:
            if said is not None:
                os.environ[_AGENT_STORE_ENV] = said

    BaseProcess.start = start_without  # type: ignore[method-assign]


# -- launchers within the program ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _answered_launchers(program: Program) -> Iterator[None]:
    """Answer the calls that start ranks, if the program is a command or a module; the first one ends that."""
    if program.kind == "script":
        yield
        return
    import torch.distributed.run as torchrun

    answers = _Answers(program)
    _say_ranks(program)
    # In place of these, which are called by names in their modules.
    stand_ins: list[tuple[Any, str, Any]] = [
        (torchrun, "run", answers.torchrun),
        (subprocess, "Popen", _popen_class(answers)),
        *((os, name, lambda _, argv: answers.replace(argv, os.environ)) for name in ("execv", "execvp")),
        *(
            (os, name, lambda _, argv, environment: answers.replace(argv, environment))
            for name in ("execve", "execvpe")
        ),
    ]
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]

    def put(functions: list[tuple[Any, str, Any]]) -> None:
        for owner, name, function in functions:
            setattr(owner, name, function)

    answers.end = lambda: put(own)
    put(stand_ins)
    try:
        yield
    finally:
        answers.end()


def _say_ranks(program: Program) -> None:
    """Set the variables by which a launcher knows the ranks, where nobody has."""
    launcher, environment = launcher_of(program), os.environ
    if launcher is None:
        return
    nodes = int(environment["WORLD_SIZE"]) // int(environment["LOCAL_WORLD_SIZE"])
    known = {
        "nproc_per_node": environment["LOCAL_WORLD_SIZE"],
        "nnodes": str(nodes),
        "node_rank": environment.get("GROUP_RANK", "0"),
    }
    for variable, key in launcher.variables.items():
        if key in known:
            environment.setdefault(variable, known[key])


class _Answers:
    """Runs what a launcher would start, once.

    Args:
        program: The launcher, or what may call one.

    Attributes:
        end: Called before it is run: from then on the program's own calls are done.
    """

    def __init__(self, program: Program) -> None:
        # Only these start a Python that is the training itself.
        self._takes_python = launcher_of(program) is not None
        self.end: Callable[[], None] = lambda: None

    def torchrun(self, args: Any) -> None:
        """Stand in for `torch.distributed.run.run`; `args` are its parsed arguments."""
        self._check(args.nproc_per_node, args.nnodes)
        found = find_program(args.training_script, args.training_script_args, module=args.module)
        assert found is not None
        self._go_on(found)

    def started(self, argv: Any) -> Callable[[], None] | None:
        """Return what runs the ranks that a command would start; None if it starts none."""
        words = [os.fspath(word) for word in argv] if isinstance(argv, Sequence) and not isinstance(argv, str) else []
        if not words or not all(isinstance(word, str) for word in words):
            return None
        name, rest, is_module = Path(words[0]).name, words[1:], False
        if is_python := _PYTHON.fullmatch(name) is not None:
            while rest[:1] == ["-u"]:
                rest = rest[1:]
            if is_module := rest[:1] == ["-m"] and len(rest) > 1:
                name, rest = rest[1], rest[2:]
        if name == "torchrun" or name in _TORCHRUN:
            return lambda: self._nested_torchrun(rest)
        if name == _DEEPSPEED:
            return lambda: self._nested_deepspeed(rest)
        if name in LAUNCHERS or " ".join([name, *rest[:1]]) in LAUNCHERS:
            return lambda: _run(_found(name, rest, module=is_module))
        if not self._takes_python or not is_python:
            return None
        if is_module:
            return lambda: self._go_on(_found(name, rest, module=True))
        return (lambda: self._go_on(_found(rest[0], rest[1:]))) if rest and rest[0].endswith(".py") else None

    def replace(self, argv: Any, environment: Any) -> NoReturn:
        """Stand in for the functions of `os` that replace the process."""
        run = self.started(argv)
        if run is None:
            self.end()
            os.execvpe(os.fspath(argv[0]), argv, environment)
        _take_variables(environment)
        run()
        raise SystemExit(0)

    def _nested_torchrun(self, args: list[str]) -> None:
        from torch.distributed.run import parse_args

        self.torchrun(parse_args(args))

    def _nested_deepspeed(self, args: list[str]) -> None:
        from deepspeed.launcher.launch import parse_args

        was, sys.argv = sys.argv, [_DEEPSPEED, *args]
        try:
            parsed = parse_args()
        finally:
            sys.argv = was
        own = [] if parsed.no_local_rank else [f"--local_rank={os.environ['LOCAL_RANK']}"]
        self._go_on(_found(parsed.training_script, [*own, *parsed.training_script_args], module=parsed.module))

    def _go_on(self, program: Program) -> None:
        self.end()
        _run(program)

    def _check(self, ranks: object, nodes: object) -> None:
        """Check that a launcher wants the ranks that there are; one is what torchrun has where nobody says a number."""
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        there_are = {"nproc_per_node": local, "nnodes": int(os.environ["WORLD_SIZE"]) // local}
        for name, wanted in (("nproc_per_node", ranks), ("nnodes", nodes)):
            if str(wanted).isdigit() and int(str(wanted)) not in (1, there_are[name]):
                option = f"--{name.replace('_', '-')}"
                raise ContradictoryRanks(
                    f"the program wants to start torchrun {option} {wanted}, and runner has started {there_are[name]}: "
                    f"pass the same number to both (runner start {option} {wanted} …)"
                )


def _found(word: str, args: Sequence[str], *, module: bool = False) -> Program:
    found = find_program(word, args, module=module)
    assert found is not None
    return found


def _take_variables(prepared: Mapping[str, str] | None) -> None:
    """Set the variables that a launcher has prepared, but those of ranks; None is the environment as it is."""
    if prepared is not None and prepared is not os.environ:
        os.environ.update({name: value for name, value in prepared.items() if name not in _OF_RANKS})


def _popen_class(answers: _Answers) -> type[subprocess.Popen[Any]]:
    """Return a class in place of `subprocess.Popen`, on which all of `subprocess` rests."""

    class Popen(subprocess.Popen[Any]):
        """Runs in this process what would start the ranks; everything else as ever."""

        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            run = answers.started(args)
            if run is None:
                super().__init__(args, *rest, **options)
                return
            self.args, self.pid, self.returncode = args, os.getpid(), None
            self.stdin = self.stdout = self.stderr = None
            self._child_created = self._communication_started = False
            if options.get("cwd") is not None:
                os.chdir(options["cwd"])
            _take_variables(options.get("env"))
            run()
            self.returncode = 0

    return Popen
