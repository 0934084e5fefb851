"""Which job a run's folder and checkpoints are of: another one is refused, more of the same is done."""

from __future__ import annotations

import json
from pathlib import Path

from integration.support import PLAIN_HF_SCRIPT, SHORT_JOB, Run, wait_until


def training_script(folder: Path) -> Path:
    """`train.py --steps N`, a commit every 4."""
    text = PLAIN_HF_SCRIPT.replace('and sys.argv[1:] == ["--steps", "60"]', "").replace(
        "trainer.add_callback(SLOW)", ""
    )
    text = text.replace("save_steps=10", "save_steps=4").replace("NUM_WORKERS", "0")
    path = folder / "train.py"
    path.write_text(text.replace("FOLDER", repr(str(folder / "hf"))))
    return path


def test_more_steps_extend_a_run_and_another_job_is_refused(tmp_path: Path) -> None:
    path, folder = training_script(tmp_path), tmp_path / "run"

    def run(*arguments: str, options: tuple[str, ...] = (), code: int) -> Run:
        one = Run(folder, *options, script=[str(path), *arguments]).start()
        assert one.finish() == code and "Traceback" not in one.output, one.output
        return one

    first = run("--steps", "8", code=0)
    recorded = json.loads((folder / "job.json").read_text())
    assert recorded == json.loads((folder / "checkpoints" / ".records" / "job.json").read_text())
    assert recorded["job"]["job"] == "script train.py" and recorded["settings"] == {"--steps": "8"}
    again = run("--steps", "8", code=0)
    assert "finished; nothing to do" in again.output and len(again.events("attempt_started")) == 1

    more = run("--steps", "12", code=0)
    assert [event["step"] for event in more.events("resumed")] == [8]
    assert max(event["step"] for event in more.events("committed")) == 12 and first.checkpoint(12).is_dir()

    count = len(more.events())
    other = Run(folder, *SHORT_JOB).start()
    assert other.finish() == 2 and "(job: script train.py -> the configured job)" in other.output, other.output
    path.write_text(path.read_text() + "print('edited')\n")
    edited = run("--steps", "12", code=2)
    assert "(train.py: content changed)" in edited.output and "--allow-changes" in edited.output
    assert len(edited.events()) == count and json.loads((folder / "job.json").read_text())["job"] == recorded["job"]

    # The volume is not mounted, or another one is.
    (folder / "checkpoints").rename(tmp_path / "away")
    path.write_text(path.read_text().replace("print('edited')\n", ""))
    missing = run("--steps", "16", code=81)
    assert "holds no checkpoint, but this run's journal says that step 12 was committed" in missing.output
    assert len(missing.events()) == count


def test_a_second_run_on_the_location_of_a_live_one_is_refused(tmp_path: Path) -> None:
    place = ("--set", f"checkpoint.location={tmp_path / 'place'}")
    run = Run(tmp_path / "run", *SHORT_JOB, *place).start_held(5)
    wait_until(run, (tmp_path / "place" / ".runner.json").exists)
    wait_until(run, lambda: run.events("attempt_started"))
    note = (tmp_path / "place" / ".runner.json").read_bytes()
    assert json.loads(note)["running"] == 1
    assert run.process is not None and json.loads(note)["runner"]["pid"] == run.process.pid
    second = Run(tmp_path / "second", *SHORT_JOB, *place).start()
    assert second.finish() == 2, second.output
    assert f"another runner (pid {run.process.pid} on " in second.output
    assert f"keeps its checkpoints at {tmp_path / 'place'}" in second.output and "Traceback" not in second.output
    assert (tmp_path / "place" / ".runner.json").read_bytes() == note
    assert not second.events() and not (tmp_path / "second" / "job.json").exists()
    run.end()
