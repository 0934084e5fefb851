"""docs/guides/what-happens-when.md shows what the console shows: its commands, run again.

`WHAT_HAPPENS_RECORD=1` writes what they print into the page, in place of what it shows.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.servers import small_disk
from integration.support import RUNNER, Run, wait_for_commit

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guides" / "what-happens-when.md"
RECORD = "WHAT_HAPPENS_RECORD" in os.environ

# What the page leaves out, as it says at its beginning: the account's table of seconds and its paths, inner frames of
# Python's tracebacks in training, what libraries say of themselves, and where checkpoints are kept.
LEFT_OUT = re.compile(
    r"    [a-z][a-z -]+ +\d[\d.]* s +[\d.]+ %$|  (checkpoints|journal|logs) +/|\[rank\d\]:   |\[rank\d\]:\[[WE]"
    r"|Failed to load |W\d{4} \d\d:|\[transformers\] |\t|checkpointing: checkpoints are kept at"
)
# Progress, which depends on how fast the machine is: the step, what is committed or skipped, what a start is busy with.
OF_THE_MOMENT = re.compile(
    r"\[ *[\d.]+s\] (.* · .*|committed \d+|.* …|.* repeated bit for bit)$| +\d+ skipped, 0 failed$|  repeated "
)
# A slow machine has not made the snapshot of the very last step.
RECOMPUTED = re.compile(r"; recomputing \d+ steps$")
# Names of runs, digests, which of two ranks is heard first, and figures other than exit codes and numbers of attempts.
VARIABLE = re.compile(
    r"(?<=run )[0-9a-f]{12}\b|\b[0-9a-f]{32}\b|rank ?\d+|(?<!code )(?<!attempt )(?<!attempt-)\b\d+(\.\d+)?"
)
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ runner (.*)\n", re.MULTILINE)


class Scene:
    """One section of the page, played in a folder of its own, which is the current one."""

    def __init__(self, title: str) -> None:
        text = PAGE.read_text()
        self.text = text[text.index(f"\n## {title}\n") :].partition("\n\n## ")[0]
        self.commands = [command for block in BLOCK.findall(self.text) for command in COMMAND.findall(block)]
        self.printed: dict[int, str] = {}
        self.codes: list[int] = []
        self.run = Run(Path("runs/faults").absolute())

    def begin(self, index: int = 0, held_at: int | None = None) -> Run:
        self.run.command = [*RUNNER, *shlex.split(self.commands[index])]
        if held_at is None:
            return self.run.start()
        self.run.start_held(held_at)
        self.run.wait_until_held()
        return self.run

    def end(self, index: int = 0) -> None:
        code = self.run.finish()
        # As a shell counts.
        self.codes.append(code if code >= 0 else 128 - code)
        self.printed[index] = self.run.output

    def type(self, index: int) -> None:
        """Run a command that returns, to its end, while the run goes on."""
        command = [*RUNNER, *shlex.split(self.commands[index])]
        typed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        assert typed.returncode == 0, typed.stdout
        self.printed[index] = typed.stdout

    def as_shown(self) -> list[str]:
        """What the page shows of each command's output."""
        outputs = []
        for block in BLOCK.findall(self.text):
            outputs += COMMAND.split(block)[2::2]
        return outputs

    def record(self) -> None:
        text = PAGE.read_text()
        blocks, index = [], 0
        for block in BLOCK.findall(self.text):
            new = ""
            for command in COMMAND.findall(block):
                new += f"$ runner {command}\n" + "".join(f"{line}\n" for line in kept(self.printed[index]))
                index += 1
            blocks.append(new)
        before, self.text = self.text, BLOCK.sub(lambda _: blocks.pop(0), self.text)
        PAGE.write_text(text.replace(before, self.text))


def kept(output: str) -> list[str]:
    shown = output.replace(str(Path.cwd()), "/home/me/job")
    return [line.rstrip() for line in shown.splitlines() if line.strip() and not LEFT_OUT.match(line)]


def compared(lines: list[str]) -> list[str]:
    """The lines without what varies. What several ranks say at once is sorted, behind what the runner says."""
    lines = [RECOMPUTED.sub("", line) for line in lines if not OF_THE_MOMENT.match(line)]
    same = [re.sub(r" +", " ", VARIABLE.sub("N", line)) for line in lines]
    ranks = [line for line in same if not re.match(r"\[ N| |run", line)]
    return [line for line in same if line not in ranks] + sorted(ranks)


def a_rank_is_killed(scene: Scene) -> None:
    run = scene.begin(held_at=45)
    os.kill(run.rank_pid(1), signal.SIGKILL)
    scene.end()


def stopped_and_started(scene: Scene, meanwhile: Callable[[], None] = lambda: None) -> None:
    run = scene.begin()
    wait_for_commit(run, 40)
    run.signal(signal.SIGINT)
    scene.end()
    meanwhile()
    scene.begin(1)
    scene.end(1)


def asked(scene: Scene) -> None:
    wait_for_commit(scene.begin(), 40)
    scene.type(1)
    scene.end()


def by_itself(scene: Scene) -> None:
    scene.begin()
    scene.end()


def on_a_small_disk(scene: Scene) -> None:
    with small_disk(Path("volume").absolute(), "2500k"):
        by_itself(scene)


def damaged(scene: Scene) -> None:
    stopped_and_started(scene, flip_a_bit_of_the_newest)


def flip_a_bit_of_the_newest() -> None:
    newest = max(Path("runs/faults/checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    model = newest / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[5000] ^= 1
    model.write_bytes(content)


def killed_itself(scene: Scene) -> None:
    scene.begin(held_at=45).signal(signal.SIGKILL)
    scene.end()
    scene.begin(1)
    scene.end(1)


SCENES: dict[str, Callable[[Scene], None]] = {
    "A rank is killed": a_rank_is_killed,
    "Ctrl-C or SIGTERM": stopped_and_started,
    "`runner stop`": asked,
    "`runner save`": asked,
    "A bug before the first step": by_itself,
    "A bug in the middle of training": by_itself,
    "Out of memory": by_itself,
    "Gradients are NaN": by_itself,
    "A rank hangs": by_itself,
    "A rank ends early": by_itself,
    "The disk is full": on_a_small_disk,
    "The newest checkpoint is damaged": damaged,
    "The runner itself is killed": killed_itself,
}
# By themselves, from outside, on request. tests/unit/test_what_happens.py compares the messages of all with the code.
PLAYED = ("A rank is killed", "`runner stop`", "A bug before the first step", "A bug in the middle of training")


def test_every_section_is_played() -> None:
    assert re.findall(r"^## (.+)", PAGE.read_text(), re.MULTILINE) == list(SCENES)


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[] if title in PLAYED else [pytest.mark.soak]) for title in SCENES]
)
def test_the_page_shows_what_the_console_shows(title: str, tmp_path: Path) -> None:
    shutil.copy(DOCS / "examples" / "faults.py", tmp_path)
    with contextlib.chdir(tmp_path):
        scene = Scene(title)
        SCENES[title](scene)
        if RECORD:
            scene.record()
        shown = [compared(text.splitlines()) for text in scene.as_shown()]
        found = [compared(kept(scene.printed[index])) for index in range(len(shown))]
    assert found == shown
    assert re.findall(r"xit code (\d+)\b", BLOCK.sub("", scene.text)) == [str(code) for code in scene.codes]
