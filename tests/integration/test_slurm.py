"""`deploy/slurm/train.sbatch` on a real Slurm: preemption, the time limit, and a node that is given up but lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from infra.parts import needs, require
from infra.ports import free_port
from infra.slurm import Slurm, slurm_cluster
from integration.support import RUNNER, Run, loss_curve, script, state_hash

from checkpointing.commit.catalog import Catalog
from checkpointing.storage import open_storage

# There is one munge socket.
pytestmark = [pytest.mark.xdist_group("slurm"), needs("slurm")]

# Steps of `script`.
END = 60
SBATCH_SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
# For those that wait for it: a node whose daemon merely pauses for so long is given up as well.
SOON_LOST = {"node_timeout_s": 4}
# The second machine: its own name and processes; locks do not reach it, as on many a network file system.
ELSEWHERE = """#!/bin/bash
if [ "$SLURMD_NODENAME" = n1 ]; then exec RUNNER "$@"; fi
exec unshare --mount --uts --pid --fork --mount-proc --kill-child bash -c '
    hostname n2
    touch "$OUTPUT_DIR/own.1" "$OUTPUT_DIR/own.2" "$OUTPUT_DIR/own.3"
    mount --bind "$OUTPUT_DIR/own.1" "$OUTPUT_DIR/.runner.lock"
    mount --bind "$OUTPUT_DIR/own.2" "$OUTPUT_DIR/checkpoints/.agent.lock"
    mount --bind "$OUTPUT_DIR/own.3" "$OUTPUT_DIR/checkpoints/.supervisor.lock"
    exec RUNNER "$@"' runner "$@"
"""


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """With settings of the test's own, if it has any."""
    require("slurm")
    # munged is another user, who must be let in.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        with slurm_cluster(folder, **getattr(request, "param", {})) as slurm:
            yield slurm
    finally:
        shutil.rmtree(folder)


def submit(slurm: Slurm, output_dir: Path, *arguments: str, nodes: int = 1, path: str = "", **environment: str) -> str:
    """Queue a job of `train.sbatch`, for n1 if that is there and enough; returns its number."""
    programs = f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ["--parsable", f"--output={slurm.log}", "--export=ALL", f"--nodes={nodes}"]
    return slurm.command(
        "sbatch", *options, str(SBATCH_SCRIPT), *arguments, OUTPUT_DIR=str(output_dir), PATH=programs, **environment
    )


def committed(run: Run) -> int:
    return max((event["step"] for event in run.events("committed")), default=0)


def assert_equal_end(run: Run, untouched: Run) -> None:
    assert state_hash(run.checkpoint(END)) == state_hash(untouched.checkpoint(END))
    assert loss_curve(run.checkpoint(END)) == loss_curve(untouched.checkpoint(END))


def preempt(slurm: Slurm, job: str) -> None:
    """A job of the higher partition wants the machine: TERM to all processes, 20 s, then the end."""
    slurm.command("sbatch", "--partition=high", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=true")


def near_the_limit(slurm: Slurm, job: str) -> None:
    """What Slurm does so long before the time limit as `--signal` says; a limit has at least a minute."""
    slurm.command("scancel", "--batch", "--signal=USR1", job)


# A job of one node is stopped and queued again as one of two, below.
@pytest.mark.soak
@pytest.mark.parametrize("stop", [preempt, near_the_limit])
def test_a_stopped_job_is_queued_again_and_ends_as_if_nothing_had_happened(
    stop: Callable[[Slurm, str], None], slurm: Slurm, untouched_script: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    job = submit(slurm, run.folder, *script(tmp_path, crawl=18))
    slurm.wait_for(lambda: committed(run) >= 20, "first checkpoints")
    stop(slurm, job)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log.read_text()

    assert (slurm.show(job, "Restarts"), slurm.show(job, "ExitCode")) == ("1", "0:0")
    assert [event["exit_code"] for event in run.events("run_ended")] == [75, 0], slurm.log.read_text()
    first = run.events("attempt_ended")[0]
    assert first["kind"] == "preempted" and 20 <= first["step"] < END
    # In order: nothing was lost, and one life's processes saved for the next.
    assert first["committed_step"] == first["step"] == run.events("training_started")[1]["step"]
    assert_equal_end(run, untouched_script)
    assert not run.leftovers()
    assert "requeued" in slurm.log.read_text() and "finished" in slurm.log.read_text(), "one log for both lives"


def ends(tmp_path: Path, *lines: str) -> str:
    """A folder with a `runner` whose starts end as the lines say, one after the other; the last one again and again."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    program = folder / "runner"
    program.write_text(
        f"""#!/bin/bash
        # Two nodes start at the same time: counted one by one, or both take the second line.
        exec 9>>{folder}/starts
        flock 9
        echo "$SLURMD_NODENAME $*" >&9
        number=$(wc -l <{folder}/starts)
        exec 9>&-
        eval "$(sed -n "$((number < {len(lines)} ? number : {len(lines)}))p" {folder}/lines)"
        """
    )
    program.chmod(0o755)
    return str(folder)


def test_a_job_is_queued_again_after_what_may_pass(slurm: Slurm, tmp_path: Path) -> None:
    """After all but 75 it had ended: a runner that the kernel had killed for memory, storage that was away."""
    folder = ends(tmp_path, "kill -KILL $$", "exit 76", "exit 0")
    job = submit(slurm, tmp_path / "run", "two words", path=folder)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log.read_text()
    assert slurm.show(job, "Restarts") == "2"
    failures = (tmp_path / "run" / "slurm-failures").read_text().split()
    assert failures == [f"{job}.0", "137", f"{job}.1", "76"]
    assert all(line.endswith("start two words") for line in (tmp_path / "bin" / "starts").read_text().splitlines())


def test_a_job_that_fails_for_good_is_not_queued_again_for_ever(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", path=ends(tmp_path, "exit 76"), MAX_FAILURES="1")
    assert slurm.wait_for_end(job) == "FAILED", slurm.log.read_text()
    assert (slurm.show(job, "Restarts"), slurm.show(job, "ExitCode")) == ("1", "76:0")
    assert "not requeued" in slurm.log.read_text()


def test_a_bad_node_is_kept_out(slurm: Slurm, tmp_path: Path) -> None:
    """Of two: the job is submitted again without it, with the same arguments and the same folder.

    Both jobs are queued again once: the new one must not take the old one's lives for its own.
    """
    folder = ends(tmp_path, "exit 75", "exit 80", "exit 75", "exit 0")
    job = submit(slurm, tmp_path / "run", "--config", "job.yaml", path=folder)
    slurm.wait_for(lambda: "resubmitted" in (slurm.log.read_text() if slurm.log.exists() else ""), "a new job")
    starts = tmp_path / "bin" / "starts"
    slurm.wait_for(lambda: len(starts.read_text().splitlines()) == 4, "its starts")
    other = str(int(job) + 1)
    assert slurm.wait_for_end(other) == "COMPLETED"
    lines = [line.partition(" ") for line in starts.read_text().splitlines()]
    assert [line[0] for line in lines] == ["n1", "n1", "n2", "n2"]
    assert {line[2] for line in lines} == {"start --config job.yaml"}
    assert (slurm.show(job, "Restarts"), slurm.show(other, "Restarts")) == ("1", "1")
    assert slurm.show(other, "ExcNodeList") == "n1"


def test_a_job_is_complete_when_the_nodes_that_are_left_have_finished(slurm: Slurm, tmp_path: Path) -> None:
    """One of two nodes was preempted: srun ends with its code, 75, which would queue the finished run again."""
    # Long, as of a run with many attempts: who stops reading it early ends `runner` with an error.
    told = """echo '{"state": "finished",'; head -c 500000 /dev/zero | tr '\\0' x || exit 1"""
    folder = ends(tmp_path, "exit 75", "exit 0", told)
    limits = {"MIN_NODES": "1", "MAX_NODES": "2"}
    job = submit(slurm, tmp_path / "run", nodes=2, path=folder, **limits)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log.read_text()
    assert slurm.show(job, "Restarts") == "0"
    *starts, asked = (tmp_path / "bin" / "starts").read_text().splitlines()
    assert len(starts) == 2 and all(" --nnodes 1:2 --rdzv-endpoint " in start for start in starts)
    assert asked.endswith(f"status --json {tmp_path / 'run'}")


@pytest.mark.soak
def test_a_full_disk_is_no_endless_loop(slurm: Slurm, tmp_path: Path) -> None:
    """The count could not be written: the job was queued again for ever."""
    blocked = tmp_path / "run"
    blocked.mkdir()
    (blocked / "slurm-failures").mkdir()  # nothing can be appended to it
    job = submit(slurm, blocked, path=ends(tmp_path, "exit 74"), MAX_FAILURES="1")
    assert slurm.wait_for_end(job) == "FAILED", slurm.log.read_text()
    assert slurm.show(job, "Restarts") == "1"


def test_any_other_exit_code_is_the_end_of_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", "--set", "trainer.learning_rat=1")
    assert slurm.wait_for_end(job) == "FAILED"
    assert (slurm.show(job, "Restarts"), slurm.show(job, "ExitCode")) == ("0", "2:0")
    assert "learning_rat" in slurm.log.read_text()


def test_two_nodes_stop_together_and_go_on_together(
    slurm: Slurm, untouched_script: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    nodes = [run, Run(run.folder / "node-1")]
    # Two ranks of one machine share its cores; the sums of more threads would differ in the last bit.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The virtual nodes' names resolve nowhere; the last of two equal options counts.
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--set", f"launch.peer_port={free_port()}"]
    job = submit(slurm, run.folder, "--nproc-per-node=1", *meeting, *script(tmp_path, crawl=18), nodes=2)
    slurm.wait_for(lambda: committed(run) >= 20, "first checkpoints")
    near_the_limit(slurm, job)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log.read_text()
    assert (slurm.show(job, "Restarts"), slurm.show(job, "NodeList")) == ("1", "n[1-2]")
    for node in nodes:
        assert [event["exit_code"] for event in node.events("run_ended")] == [75, 0], slurm.log.read_text()
    stopped_at = {node.events("attempt_ended")[0]["step"] for node in nodes}
    assert stopped_at == {event["step"] for node in nodes for event in node.events("resumed")}
    assert 20 <= stopped_at.pop() < END
    assert_equal_end(run, untouched_script)


@pytest.mark.parametrize("slurm", [SOON_LOST], indirect=True, ids=[""])
@pytest.mark.soak
def test_a_node_that_was_given_up_but_lives_publishes_nothing_more(
    slurm: Slurm, untouched_script: Run, tmp_path: Path
) -> None:
    """Split brain: n1 seems lost, the job starts again on n2 in the same folder, and n1 is still running it."""
    wrapper = tmp_path / "bin" / "runner"
    wrapper.parent.mkdir()
    wrapper.write_text(ELSEWHERE.replace("RUNNER", RUNNER[0]))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    run = Run(tmp_path / "run")
    job = submit(slurm, run.folder, *script(tmp_path, crawl=18), path=str(wrapper.parent))
    slurm.wait_for(lambda: committed(run) >= 20, "first checkpoints")
    assert slurm.show(job, "NodeList") == "n1"

    runner = psutil.Process(run.events("run_started")[0]["pid"])
    old, parent = [runner, *runner.children(recursive=True)], runner.ppid()
    for daemon in [p for p in slurm.processes() if p.name() == "slurmstepd"] + [psutil.Process(slurm.pid("slurmd-n1"))]:
        daemon.kill()
    # It stands still until the job has begun elsewhere, so that it has something left to do; then both go on. Not
    # before its parent is gone: the kernel sends SIGHUP to stopped processes that are orphaned.
    slurm.wait_for(lambda: runner.ppid() != parent, "the end of slurmstepd")
    for process in old:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    slurm.wait_for(lambda: len(run.events("resumed")) == 1, "the job on n2")
    assert slurm.show(job, "NodeList") == "n2"
    assert {process.status() for process in old if process.is_running()} == {psutil.STATUS_STOPPED}
    went_on = time.time()
    for process in old:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log.read_text()
    slurm.wait_for(lambda: len(run.events("run_ended")) == 2, "the end of the old one")

    ends = {event["attempt"]: event for event in run.events("run_ended")}
    assert (ends[1]["exit_code"], ends[2]["exit_code"]) == (78, 0)
    assert "attempt 2 of this run has begun" in ends[1]["reason"]
    assert ends[1]["time"] > went_on
    # The job is Slurm's on n2 alone: what is left of it on n1 did not queue it again.
    assert (slurm.show(job, "Restarts"), slurm.show(job, "ExitCode")) == ("1", "0:0")

    assert all(event["time"] < went_on for event in run.events("committed") if event["attempt"] == 1)
    resumed_at = run.events("resumed")[0]["step"]
    catalog = Catalog(open_storage(str(run.folder / "checkpoints")))
    for step in catalog.committed_steps():
        assert catalog.verify(step).attempt == (1 if step <= resumed_at else 2)
    assert catalog.committed_steps()[-1] == END
    assert_equal_end(run, untouched_script)
    slurm.wait_for(lambda: not any(process.is_running() for process in old), "no process of the old one", 60)
