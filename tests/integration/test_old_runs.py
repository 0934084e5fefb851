"""A run that an earlier version began is resumed by this one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from helpers.old_runs import ANSWERS, unpack
from integration.support import RUNNER


def test_an_old_run_is_resumed_to_its_end(tmp_path: Path) -> None:
    runs = unpack(tmp_path)
    options = ["--output-dir", str(runs / "preempted"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*RUNNER, "start", "--config", str(runs / "job.yaml"), *options], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr

    before = ANSWERS["preempted"]["status"]
    told = subprocess.run([*RUNNER, "status", str(runs / "preempted"), "--json"], capture_output=True, check=True)
    after = json.loads(told.stdout)
    assert (after["run_id"], after["state"], after["step"]) == (before["run_id"], "finished", 60)
    # The attempts are counted on, and so is what was lost.
    assert [attempt["kind"] for attempt in after["attempts"]] == ["crashed", "preempted", "finished"]
    assert [attempt["began"] for attempt in after["attempts"][:2]] == [a["began"] for a in before["attempts"]]
    assert (after["attempts"][2]["number"], after["attempts"][2]["start_step"]) == (3, 40)
    assert after["lost_steps"] == before["lost_steps"]
    # The new log entries are read as well.
    assert after["last_loss"] != before["last_loss"]

    # The Trainer's own log goes on where the old version left it.
    state = json.loads((runs / "preempted" / "checkpoints" / "checkpoint-60" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(2, 61, 2))
