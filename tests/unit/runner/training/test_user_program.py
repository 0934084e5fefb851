"""A program runs in the rank as torchrun would run it; launchers that it calls start nothing, and go on in the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from runner.program.program import Program
from runner.training.user_program import ContradictoryRanks, run_program

TRAIN = """
import json, os, subprocess, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PREPARED", "NPROC_PER_NODE")
found = {
    "pid": os.getpid(), "name": __name__, "argv": sys.argv, "path": sys.path[0],
    **{name: os.environ.get(name) for name in names},
    "own": subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout.strip(),
}
open("found.json", "a").write(json.dumps(found) + "\\n")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a training, in rank 1 of 2, in this process, which is left as it was."""
    import torch.distributed.run as torchrun

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(ranks)
    os.environ.pop("NPROC_PER_NODE", None)
    (tmp_path / "train.py").write_text(TRAIN)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(TRAIN)
    before = (subprocess.Popen, os.execv, os.execvpe, torchrun.run)
    yield tmp_path
    assert before == (subprocess.Popen, os.execv, os.execvpe, torchrun.run), "everything is as it was"
    for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:
        del sys.modules[name]


def run(text: str, *args: str, name: str = "swift") -> dict[str, Any]:
    """Run a command of this name and text; returns what the training has found, which runs once."""
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("import os, subprocess, sys\n" + text)
    run_program(Program("command", str(path.absolute()), args))
    [line] = Path("found.json").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    assert (found["pid"], found["name"], found["own"]) == (os.getpid(), "__main__", "3")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    return found


PREPARED = "environment = {**os.environ, 'PREPARED': 'yes', 'RANK': '7', 'WORLD_SIZE': '9'}\n"
CALLS = {
    "run": "subprocess.run([sys.executable, 'train.py', *sys.argv[1:]], env=environment, check=True)",
    "check_call": "subprocess.check_call([sys.executable, '-u', 'train.py', *sys.argv[1:]], env=environment)",
    "popen": "p = subprocess.Popen([sys.executable, 'train.py', *sys.argv[1:]], env=environment)\n"
    "p.wait()\nassert p.returncode == 0 and p.poll() == 0 and p.communicate() == (None, None)",
    "exec": "os.execvpe('python', ['python', 'train.py', *sys.argv[1:]], environment)",
    "torchrun": "subprocess.run(['torchrun', '--nproc_per_node', '2', 'train.py', *sys.argv[1:]], env=environment)",
    "torchrun -m": "subprocess.run(['torchrun', '-m', 'pack.job', *sys.argv[1:]], env=environment)",
    "module": "subprocess.run([sys.executable, '-m', 'pack.job', *sys.argv[1:]], env=environment)",
    "its function": "os.environ['PREPARED'] = 'yes'\nfrom torch.distributed.run import main\n"
    "main(['--nproc-per-node=2', 'train.py', *sys.argv[1:]])",
    "another launcher": "subprocess.run([sys.executable, 'bin/nested.py', *sys.argv[1:]], env=environment)",
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_launcher_would_start_is_run_in_the_rank(call: str) -> None:
    Path("bin").mkdir()
    Path("bin/nested.py").write_text(Path("train.py").read_text())
    found = run(PREPARED + CALLS[call], "--lr", "1")
    assert found["argv"][1:] == ["--lr", "1"] and found["PREPARED"] == "yes"
    assert found["NPROC_PER_NODE"] == "2", "by which the launcher knows the ranks"


def test_a_launcher_within_a_launcher_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As axolotl calls accelerate, and that calls Python."""
    Path("bin").mkdir()
    inner = Path("bin/accelerate-launch")
    inner.write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]])\n")
    monkeypatch.setattr("runner.program.program.sysconfig.get_path", lambda _: "bin")
    text = "os.execvpe('accelerate-launch', ['accelerate-launch', '-m', 'pack.job', *sys.argv[1:]], os.environ)"
    assert run(text, "x", name="axolotl")["argv"][1:] == ["x"]


def test_a_command_that_trains_by_itself_is_left_alone() -> None:
    found = run(TRAIN.replace("import json, os", "import json; import os").replace("print(3)", "print(3)"), "train")
    assert found["argv"][1:] == ["train"]


def test_a_training_starts_what_it_likes() -> None:
    """Only what a known launcher starts is the training."""
    Path("other.py").write_text("open('other', 'w').close()\n")
    Path("starts.py").write_text("import os, subprocess, sys\nsubprocess.run([sys.executable, 'other.py'])\n" + TRAIN)
    run_program(Program("script", "starts.py"))
    assert Path("other").exists() and len(Path("found.json").read_text().splitlines()) == 1


@pytest.mark.parametrize(("option", "text"), [("--nproc_per_node", "nproc-per-node 4"), ("--nnodes", "nnodes 4")])
def test_other_ranks_than_there_are_are_refused(option: str, text: str) -> None:
    with pytest.raises(ContradictoryRanks, match=text):
        run(f"subprocess.run(['torchrun', {option!r}, '4', 'train.py'])")
    assert not Path("found.json").exists()


def test_a_module_runs_as_python_would_run_it(folder: Path) -> None:
    run_program(Program("module", "pack.job", ("x",)))
    found = json.loads(Path("found.json").read_text())
    assert found["argv"] == [str(folder / "pack/job.py"), "x"]
    assert (found["name"], found["path"]) == ("__main__", str(folder))


@pytest.mark.parametrize(("code", "raises"), [("0", False), ("", False), ("3", True), ("'no data'", True)])
def test_an_exit_code_of_the_training_is_that_of_the_program(code: str, raises: bool) -> None:
    Path("train.py").write_text(TRAIN + f"raise SystemExit({code})\n")
    if raises:
        with pytest.raises(SystemExit) as caught:
            run(CALLS["exec"].replace("environment", "os.environ"))
        assert str(caught.value.code) == code.strip("'")
    else:
        run(CALLS["exec"].replace("environment", "os.environ"))


def test_an_error_of_the_training_is_raised_where_the_launcher_stands() -> None:
    Path("train.py").write_text("raise KeyError('lost')\n")
    with pytest.raises(KeyError, match="lost"):
        run("try:\n    " + CALLS["run"].replace("environment", "None") + "\nexcept subprocess.CalledProcessError: pass")
