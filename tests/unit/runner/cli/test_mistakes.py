"""Mistakes of every kind, drawn over all commands: what a user reads of one is short, and says what is accepted.

`MISTAKES=N` draws more, `MISTAKES_SEED=N` others.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from helpers.command_line import run_command

from runner.cli.main import cli
from runner.config.schema import Config, Section

_DRAWS = int(os.environ.get("MISTAKES", "200"))
_SEED = int(os.environ.get("MISTAKES_SEED", "1"))
_LONGEST = 350
# What a terminal would obey, and what is no text.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# An error says what to do, or what is accepted.
_HINTS = re.compile(
    r"\b(pass|set|use|unset|give|write|choose|remove|quote|add|fix|make|start|install|check|see|try|allowed here|"
    r"accepted|needs?|one of|expected|range|is not a valid|no such option|requires an argument|missing|"
    r"unexpected extra|correct|did you mean|committed steps|is not a finite number|is a directory)\b",
    re.IGNORECASE,
)
_NASTY = ["x\x1b[31mred", "two\nlines", "bell\x07", "é", "a b", "\u202eright-to-left", "%s {0}", "-", "'", '"']
_WORDS = ["soon", "two", "1.5.2", "{", "[1, 2", "{a: 1}", "", "null null", "0x"]
_PROGRAM_COMMANDS = ("start", "rehearse", "chaos")
# Those that take a LOCATION.
_LOCATED = ("checkpoints", "status", "report", "logs", "save", "stop")


@dataclass
class Mistake:
    """What is typed, with the variables that are set."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


_COMMAND_TREE = dict(commands(cli))
_CONFIGURED = [path for path, command in _COMMAND_TREE.items() if any(p.name == "config_path" for p in command.params)]
_SCHEMA = [
    (f"{section}.{name}" if section else name)
    for section, kind in [("", Config), *((n, f.annotation) for n, f in Config.model_fields.items())]
    if isinstance(kind, type) and issubclass(kind, Section)
    for name, one in kind.model_fields.items()
    if not (isinstance(one.annotation, type) and issubclass(one.annotation, Section))
]


class Desk:
    """Draws mistakes; `folder` has what they need."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.folder = random.Random(seed), folder

    def word(self) -> str:
        return self.random.choice([*_NASTY, *_WORDS])

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def file(self, content: bytes | str, suffix: str = "") -> str:
        path = self.folder / f"file-{self.random.getrandbits(40):x}{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def sound(self, path: tuple[str, ...]) -> list[str]:
        """Return a command with all that it requires."""
        arguments = list(path)
        if path[0] in _LOCATED:
            arguments.append(str(self.folder / "checkpoints"))
        if path[-1] == "export":
            arguments += ["5", str(self.folder / "exported")]
        if path[-1] == "prune":
            arguments += ["--keep-last", "1"]
        return arguments

    def any_command(self) -> tuple[tuple[str, ...], click.Command]:
        return self.random.choice(list(_COMMAND_TREE.items()))

    def nasty_name(self) -> str:
        names = ["no-such", "no\nsuch", "no\x1b[2Jsuch", "no\u202esuch", "nö", "x" * 120, "a/b/c", "no such"]
        return self.random.choice(names)


def unknown_option(desk: Desk) -> Mistake:
    path, _ = desk.any_command()
    return Mistake([*desk.sound(path)[: len(path)], f"--no-{desk.word() or 'such'}", "1"])


def unknown_command(desk: Desk) -> Mistake:
    return Mistake(desk.of(["strat"], ["checkpoints", "lst"], [desk.nasty_name()], ["--verbose", "start"]))


def _typed(command: click.Command) -> list[click.Option]:
    kinds = (click.types.IntParamType, click.types.FloatParamType, click.Choice)
    return [p for p in command.params if isinstance(p, click.Option) and isinstance(p.type, kinds) and not p.hidden]


def wrong_type(desk: Desk) -> Mistake:
    path, command = desk.of(*((p, c) for p, c in _COMMAND_TREE.items() if _typed(c)))
    option = desk.of(*_typed(command))
    values = [desk.word() or "soon", "one"]
    lowest = getattr(option.type, "min", None)
    if lowest is not None:
        values += [str(lowest - 1), "-inf", "nan"]
    # The last of two counts.
    return Mistake([*desk.sound(path), desk.of(*option.opts), desk.of(*values)])


def missing_value(desk: Desk) -> Mistake:
    path, command = desk.any_command()
    takes = [p for p in command.params if isinstance(p, click.Option) and not p.is_flag]
    if not takes:
        return Mistake([*path, "--no-such"])
    return Mistake([*desk.sound(path)[: len(path)], desk.of(*takes).opts[-1]])


def too_many(desk: Desk) -> Mistake:
    path, _ = desk.of(*(item for item in _COMMAND_TREE.items() if item[0][-1] not in _PROGRAM_COMMANDS))
    return Mistake([*desk.sound(path), *(desk.word() or "more" for _ in range(3)), "more"])


def too_few(desk: Desk) -> Mistake:
    path = desk.of(*(path for path in _COMMAND_TREE if path[0] == "checkpoints"))
    return Mistake([*path, *desk.sound(path)[len(path) : len(path) + (path[-1] == "export")]])


CONFIG_FILES = r"""
a: [1, 2
- 1\n- 2
text
a: b: c
\tmodel: 1
a\x1b[2J: 1
'a\\e[2J': 1
x: !!python/object:os.x {}
a: &a [*a]
? {a: 1}\n: 2
{}\n--- {}
1: 2
model: []
trainer: 5
learning_rate: 1
checkpoint: {locaton: /x}
trainer: {lerning_rate: 1}
trainer: {learning_rate: fast}
trainer: {report_to: nonesuch}
trainer: {report_to: [wandb, clearml]}
trainer: {optim: nonesuch}
trainer: {optim: galore_adamw}
trainer: {lr_scheduler_type: straight}
trainer: {use_liger_kernel: true}
trainer: {deepspeed: none.json}
data: {path: /no/such.jsonl}
strategy: zero
strategy: {tp: 0}
strategy: {pp: 2}
strategy: [ddp]
checkpoint: {save_steps: soon}
checkpoint: {memory_limit: much}
checkpoint: {location: x://y}
model: {name_or_path: /no/such}
model: {name_or_path: org/model, config: {hidden_size: 8}}
model: {config: {vocab_size: 5}}
model: {name_or_path: org/model, attn_implementation: flash_attention_2}
launch: {nnodes: 1:x}
launch: {nnodes: 3:2}
output_dir: ''
output_dir: 5
restart: {metadata_endpoint: nowhere}
method: {type: qlora}
elastic: {virtual_ranks: 3}
""".strip().splitlines()


def config_file(desk: Desk) -> Mistake:
    texts = [text.encode().decode("unicode_escape").encode() for text in CONFIG_FILES]
    content = desk.of(b"\xff\xfe\x00", b"\x1f\x8b\x08\x00", *texts)
    name = desk.of(*[desk.file(content, ".yaml")] * 4, str(desk.folder), desk.nasty_name())
    return Mistake([*desk.of(*_CONFIGURED), "--config", name])


def wrong_key(desk: Desk) -> Mistake:
    path, key = desk.of(*_CONFIGURED), desk.of(*_SCHEMA)
    value = desk.of("[[{a: 1}]]", "{a: {b: 1}}") if not key.endswith(("config", "trainer")) else "[1, 2]"
    return Mistake([*path, "--set", f"{key}={value}"])


SETTINGS = [
    "=",
    "=1",
    "nonsense",
    "model=",
    "model.=1",
    ".=1",
    "model..x=1",
    "trainer.lr=1",
    "trainer.learning_rate=fast",
    "trainer.output_dir=x",
    "trainer.fsdp=full_shard",
    "launch.nnodes=0",
    "launch.nnodes=two",
    "launch.nproc_per_node=two",
    "checkpoint.save_steps=soon",
    "checkpoint.snapshot_steps=0",
    "output_dir.x=1",
    "model.name_or_path.x=1",
    "a\x1b[2J=1",
    "trainer.max_steps=1e400",
    "strategy={tp:1}",
    "data.validation_share=2",
    "data.validation_split=x",
    "data.streaming=true",
    "data.path=/no/such",
    "data.path=a://b.csv",
    "checkpoint.location=nosuch://x",
    "checkpoint.local_tier=s3://x",
    "monitoring.port=70000",
    "trainer.x.y=1",
    "cost.price_per_hour=-1",
    "trainer.deepspeed=x",
    "trainer.fsdp_config={}a",
]


def bad_setting(desk: Desk) -> Mistake:
    further = ["", desk.word() + "=1", f"model.{desk.word()}=1", f"model.name_or_path=/{desk.nasty_name()}"]
    return Mistake([*desk.of(*_CONFIGURED), "--set", desk.of(*SETTINGS, *further)])


VARIABLES = [
    "EPOCHS=many",
    "BATCH_SIZE=x",
    "LEARNING_RATE=fast",
    "WORLD_SIZE=0",
    "RANK=-1",
    "MASTER_PORT=http",
    "PET_NNODES=a:b",
    "PET_NPROC_PER_NODE=many",
    "MODEL_NAME=/no/such",
    "PET_RDZV_BACKEND=etcd",
    "AWS_BATCH_JOB_NUM_NODES=two",
    "BATCH_SIZE=\x1b[31m",
    "PET_NODE_RANK=first",
]


def variable(desk: Desk) -> Mistake:
    name, _, value = desk.of(*VARIABLES).partition("=")
    return Mistake(list(desk.of(*_CONFIGURED)), {name: value})


def location(desk: Desk) -> Mistake:
    path = desk.of(*(path for path in _COMMAND_TREE if path[0] in _LOCATED))
    broken = desk.folder / f"broken-{desk.random.getrandbits(30):x}"
    broken.mkdir()
    journal = desk.of(b"", b"{", b"\x00" * 100, b'{"a": 1}\n', b"null\n[]\n", b'{"event": "run_started"}\n')
    (broken / "journal.jsonl").write_bytes(journal)
    (broken / "config.yaml").write_bytes(desk.of(b"", b"{", b"a: 1\n", b"\xff"))
    where = desk.of(
        str(desk.folder / desk.nasty_name()), desk.file("x"), "nosuch://bucket", "s3://", "", str(broken), str(broken), "file://",
    )  # fmt: skip
    if path[-1] in ("list", "prune") and where == str(broken):
        # A folder without checkpoints is an answer there.
        where = desk.file("x")
    arguments = [*path, where]
    if path[-1] == "export":
        arguments += [desk.of("5", "-1", "0"), str(desk.folder / "exported")]
    if path[-1] == "prune":
        arguments += ["--keep-last", "1"]
    return Mistake(arguments)


COMMAND_LINES = """
init FOLDER
init FOLDER/no/such/job.yaml
init FILE/job.yaml
init FILE
start --output-dir FILE
start --output-dir FILE/run
start --output-dir ''
start --output-dir /proc/x
rehearse --output-dir FILE
rehearse --output-dir FOLDER
chaos --output-dir FILE
chaos --output-dir FOLDER
chaos --json FOLDER
report RUN --output FOLDER
report RUN --output FOLDER/no/such.html
report RUN --output FILE/x.html
simulate --vary commit_s=1,2 --plot FOLDER
simulate --vary commit_s=1,2 --plot FILE/x.html
simulate --trace FOLDER
simulate --trace FOLDER/none
simulate --trace FILE
simulate --from FOLDER
simulate --from FILE
start --set checkpoint.location=FILE
start --set checkpoint.location=FILE/x
start --set checkpoint.local_tier=FILE
start --set data.path=FOLDER/none.jsonl
checkpoints export RUN 5 FILE
start --overwrite
start --resume -5
start --resume WORD
start --resume-from NAME
start --resume-from FOLDER
start --debug --resume 5
start --debug SCRIPT
start --nnodes 2
start --nnodes two
start --nnodes 0
start --nnodes 3:2 --node-rank 0
start --nnodes 2 --node-rank 5
start --node-rank 3
start --nproc-per-node two
start --nproc-per-node gpu
start --nproc-per-node xpu
start --nproc-per-node 0
start --nproc-per-node 1.5
start --nproc-per-node ''
start torchrun --nproc-per-node gpu SCRIPT
start --rdzv-endpoint host:99999 --nnodes 2 --node-rank 0
start --resilient maybe
start --metrics-port 0
start --metrics-port 70000
start --max-restarts -1
start --grace -1
start -m
start -m no.such.module
start -m os/path
rehearse --steps 1
rehearse --limit 0
chaos --fault NAME
chaos --steps 50
chaos --nodes 1
chaos --deterministic SCRIPT
chaos --nodes 3 --nnodes 2
simulate --gpus 8 --mttf-hours 3
simulate --choices --vary commit_s=1,2
simulate --choices
simulate --plot x.html
simulate --set x=1
simulate --set commit_s=soon
simulate --set WORD
simulate --vary WORD
simulate --vary commit_s=
simulate --vary commit_s=a,b
simulate --nnodes x
simulate --nnodes 3:2
simulate --target 2
simulate --spares -1
plan --gpu-memory much
plan --gpu-memory 0
plan --copy-rate WORD
plan --gpus 0
plan --mttf-hours 0
report --price-per-hour -1
report --spot-discount 1
""".strip().splitlines()


def command_line(desk: Desk) -> Mistake:
    """Paths of the wrong kind, and options that exclude each other or a value."""
    places = {
        "FOLDER": str(desk.folder),
        "FILE": desk.file(desk.of("x", b"\xff\x00", "one\ntwo\n", "", "-1\n")),
        "RUN": str(desk.folder / "run"),
        "SCRIPT": str(desk.folder / "good.py"),
        "NAME": desk.nasty_name(),
        "WORD": desk.word() or "soon",
    }
    words = shlex.split(desk.of(*COMMAND_LINES))
    return Mistake([re.sub("|".join(places), lambda found: places[found[0]], word) for word in words])


def program(desk: Desk) -> Mistake:
    binary, shell = desk.file(b"\x7fELF\x00\x00"), desk.file("#!/bin/bash\n", ".sh")
    name = desk.nasty_name()
    one = ["python", "--no-such", "x.py"], ["python", "-m", "no.such"]
    what = desk.of(
        *one, *([word] for word in (str(desk.folder), name, f"{name}.py", binary, shell, "job.yaml", "ls", "python"))
    )
    return Mistake([desk.of(*_PROGRAM_COMMANDS), *what])


def bad_script(desk: Desk) -> Mistake:
    """A script that Python does not compile: the text is Python's own."""
    return Mistake(
        [desk.of(*_PROGRAM_COMMANDS), desk.file(desk.of("def f(:\n", b"x = '\xff'\n", "  x = 1\n y = 2\n"), ".py")]
    )


MISTAKES: list[Callable[[Desk], Mistake]] = [
    *(unknown_option, unknown_command, wrong_type, missing_value, too_many, too_few, program, bad_script, variable),
    *(config_file, config_file, config_file, wrong_key, wrong_key, bad_setting, bad_setting, location, location),
    *[command_line] * 5,
]


def complaints(result: Any) -> list[str]:
    """Return what is wrong with how a mistake was answered."""
    text, found = result.stderr, []
    if result.returncode != 2:
        found.append(f"exit code {result.returncode}")
    if "Traceback" in text:
        found.append("a traceback")
    if _COMMANDS.search(text):
        found.append("a terminal's commands")
    # click's own errors begin with the usage.
    error = re.sub(r"\AUsage: .*\n(Try .*\n)?\n?", "", text).strip()
    if not error:
        found.append("nothing is said")
    for paragraph in error.split("\n"):
        if len(paragraph) > _LONGEST:
            found.append(f"a paragraph of {len(paragraph)} characters")
    if len(re.findall(r"[.!?](?=\s+[A-Z])", error)) > 1:
        found.append("more than two sentences")
    if error and not _HINTS.search(text):
        found.append("no hint what is accepted")
    return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    for name in ("checkpoints", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "good.py").write_text("")
    # A machine without accelerators, wherever this runs.
    monkeypatch.setattr("runner.config.checks.DEVICES", tmp_path / "empty")
    monkeypatch.setattr("runner.config.packages._is_installed", lambda module: False)
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "output"))
    # What begins the work once all was checked: with a mistake it is not reached.
    for begins in (
        "boot.Boot._open_session",
        "rehearse.disturbed_runs.RehearsedJob.rehearse",
        "chaos.campaign.Campaign.run",
        "chaos.node_campaign.NodeCampaign.run",
        "plan.plan.make_plan",
        "doctor.examine",
    ):
        monkeypatch.setattr(f"runner.{begins}", _accepted)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield Desk(tmp_path, _SEED)
    for number, handler in kept.items():
        signal.signal(number, handler)


def _accepted(*_: object, **__: object) -> None:
    raise SystemExit(99)


def test_every_mistake_is_answered_in_short_and_with_what_is_accepted(desk: Desk) -> None:
    wrong = []
    for number in range(_DRAWS):
        draw = MISTAKES[number % len(MISTAKES)]
        mistake = draw(desk)
        result = run_command(*mistake.arguments, cwd=desk.folder, **mistake.environment)
        if found := complaints(result):
            wrong.append(f"{', '.join(found)}: {mistake}\n{result.stdout[-300:]}{result.stderr[:1500]}")
    assert not wrong, f"{len(wrong)} mistakes (seed {_SEED}):\n\n" + "\n\n".join(wrong)
