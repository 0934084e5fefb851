from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.command_line import run_command
from helpers.journals import event

from runner.cli import main as main_module
from runner.config.schema import Config
from runner.journal.journal import Journal

RUNNER = str(Path(sys.executable).with_name("runner"))


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["init", "--help"],
        ["start", "--help"],
        ["config", "--help"],
        ["status", "-h"],
        ["checkpoints", "list", "-h"],
    ],
)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    loaded, shown = packages_loaded_by(command)
    assert "Usage:" in shown
    assert loaded <= {"checkpointing", "runner", "click", "xxhash"}, loaded


def test_status_loads_what_it_shows_and_reads(tmp_path: Path) -> None:
    """It loaded the whole configuration of a run, which took longer than all else."""
    journal = Journal(tmp_path / "journal.jsonl", time.time)
    journal.append(event("run_started", run_id="one", committed_step=-1), 0)
    (tmp_path / "config.yaml").write_text(Config(output_dir=str(tmp_path)).to_yaml())
    loaded, shown = packages_loaded_by(["status", str(tmp_path)], "runner.config.load", "runner.config.schema")
    assert "starting" in shown
    # Of pydantic what the events are checked by.
    needed = {
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
        "psutil",
        "rich",
    }
    assert loaded <= {"checkpointing", "runner", "click", "xxhash", *needed}, loaded


def packages_loaded_by(command: list[str], *modules: str) -> tuple[set[str], str]:
    """Return the packages that a command loads besides Python's own, and these modules if it does; and its output."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import runner.cli.main\n"
        f"sys.argv = ['runner', *{command!r}]\n"
        "try: runner.cli.main.main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "names = {name for name in names if not name.startswith('_')}\n"
        "names = {name for name in names if getattr(sys.modules[name], '__file__', None)}\n"
        f"print(*names, *({{*{modules!r}}} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split()), result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["start", "--set", "trainer.lr=1"], "trainer.lr=1 is not an SFTConfig option"),
        (["start", "--set", "nonsense"], "write for example --set"),
        (["start", "--config", "missing.yaml"], "missing.yaml"),
        (["plan", "--set", "data.path=org/set"], "no model is configured; set model.name_or_path"),
        (["doctor", "--set", "data.path=org/set"], "no model is configured; set model.name_or_path"),
        (["chaos", "--set", "data.path=org/set"], "no model is configured; set model.name_or_path"),
        (["start", "missing.py"], "script 'missing.py' does not exist"),
        (["start", "--resume-from", "nowhere"], "--resume-from 'nowhere': no such folder"),
        (["start", "--resume", "sometimes"], "use auto, never, or the number"),
        (["start", "--overwrite"], "--overwrite needs --resume never"),
        (["start", "--nproc-per-node", "0"], "launch.nproc_per_node=0"),
        (["start", "--node-rank", "1"], "node rank 1 needs more than one node"),
        (["start", "--output-dir", "/proc/nowhere"], "output_dir='/proc/nowhere' cannot be used"),
        (["start", "--no-such-option"], "No such option"),
        (["status", "/nonexistent"], "holds no run"),
        (["checkpoints", "verify", "/nonexistent"], "is not a folder"),
        (["config", "--set", "restart.max_restarts=-1"], "restart.max_restarts=-1"),
        (["plan", "--work-hours", "inf"], "'inf' is not a finite number"),
        (["simulate", "--mttf-hours", "nan"], "'nan' is not a finite number"),
        (["start", "--grace", "inf"], "'inf' is not a finite number"),
        (["config", "--set", "restart.hang_timeout_s=inf"], "use a finite number above 0 or null"),
        (["simulate", "--plot", "page.html"], "--plot needs --vary"),
        (["simulate", "--vary", "commit_s=1,2", "--plot", "/no/such/page.html"], "/no/such does not exist"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments: list[str], part: str, tmp_path: Path) -> None:
    result = run_command(*arguments, OUTPUT_DIR=str(tmp_path / "run"))
    assert result.returncode == 2, result
    assert part in result.stderr and "Traceback" not in result.stderr
    if "Usage:" not in result.stderr:
        assert len(result.stderr.strip().splitlines()) == 1


def test_config_prints_what_start_would_use() -> None:
    result = run_command("config", "--nproc-per-node", "4", "--set", "trainer.max_length=64", EPOCHS="9")
    assert result.returncode == 0
    assert "num_train_epochs: 9.0" in result.stdout
    assert "nproc_per_node: 4" in result.stdout and "max_length: 64" in result.stdout


def test_resume_never_refuses_an_existing_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    result = run_command("start", "--resume", "never", "--output-dir", str(tmp_path / "run"))
    assert result.returncode == 2
    assert "already contains a run; add --overwrite" in result.stderr


@pytest.mark.process
def test_the_newest_run_is_shown_where_none_is_named(tmp_path: Path) -> None:
    def status(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [RUNNER, "status", "--json"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OUTPUT_DIR": "", **environment},
        )

    refused = status()
    assert refused.returncode == 2 and "there is no run in ./runs; pass the output_dir" in refused.stderr
    for number, name in enumerate(("old", "new", "empty")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "empty":
            journal = Journal(tmp_path / "runs" / name / "journal.jsonl", time.time)
            journal.append(event("run_started", run_id=name, committed_step=-1), 0)
            os.utime(tmp_path / "runs" / name / "journal.jsonl", (number, number))
    assert json.loads(status().stdout)["run_id"] == "new"
    assert json.loads(status(OUTPUT_DIR="runs/old").stdout)["run_id"] == "old"


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 74), (errno.EISDIR, 2)])
def test_a_file_system_that_does_not_work_is_no_mistake(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> None:
        raise OSError(number, os.strerror(number), "/volume/run/config.yaml")

    monkeypatch.setattr(main_module, "cli", refused)
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == code
    hint = "; start again when that works" if code == 74 else "; choose another path, or correct this one"
    assert capsys.readouterr().err == f"runner: error: /volume/run/config.yaml: {os.strerror(number)}{hint}\n"


@pytest.mark.process
def test_watching_outlasts_storage_that_is_away(tmp_path: Path) -> None:
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    journal = Journal(folder / "journal.jsonl", time.time)
    journal.append(event("run_started", run_id="life", committed_step=-1), 0)
    terminal, its_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([RUNNER, "status", str(folder), "--watch"], stdout=its_end, env=environment)
    os.close(its_end)
    shown = b""

    def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            # Ends with an OSError when the command has ended.
            shown += os.read(terminal, 4096)

    try:
        wait_for(b"starting")
        folder.rename(away)
        wait_for(b"out of date")
        away.rename(folder)
        journal.append(event("run_ended", state="finished", exit_code=0, reason="all is done"), 0)
        wait_for(b"all is done")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_leads_nowhere(closed: str, tmp_path: Path) -> None:
    """What was opened next got its number: ranks had a socket of the runner's for their output, and failed."""
    program = (
        "import os, sys; from pathlib import Path; from runner.cli.main import open_closed_streams; "
        "open_closed_streams(); print('out'); print('err', file=sys.stderr); sys.stdin.read(); "
        "Path('seen').write_text('\\n'.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], check=True, cwd=tmp_path, input=b"")
    streams = (tmp_path / "seen").read_text().splitlines()
    assert [streams[n] for n, text in enumerate(("<&-", " >&-", "2>&-")) if text.strip() in closed.split()] == [
        "/dev/null"
    ] * len(closed.split())


def test_a_command_that_is_terminated_ends_what_it_has_started() -> None:
    """Runs under test went on after a rehearsal, and temporary folders stayed."""
    program = (
        "import signal, runner.__main__ as program, runner.cli.main as command\n"
        "def work():\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    finally: print('ended')\n"
        "command.main = work\n"
        "program.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (143, "ended\n"), ended.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str) -> None:
    environment = {**os.environ, "_RUNNER_COMPLETE": f"{shell}_source"}
    script = subprocess.run([RUNNER], capture_output=True, text=True, env=environment)
    assert script.returncode == 0 and f"_RUNNER_COMPLETE={shell}_complete" in script.stdout


def test_what_a_shell_completes() -> None:
    def completed(*words: str) -> list[str]:
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_RUNNER_COMPLETE": "bash_complete"}
        return subprocess.run([RUNNER], capture_output=True, text=True, env={**os.environ, **asked}).stdout.split()

    assert completed("runner", "che") == ["plain,checkpoints"]
    assert "plain,prune" in completed("runner", "checkpoints", "")
    assert "plain,--nproc-per-node" in completed("runner", "start", "--np")
