"""One real failure for each row of the failure table, and its effect on the run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from helpers.metadata import AzureMetadata, Ec2Metadata, GoogleMetadata, serve
from infra.parts import lacks, needs
from integration.support import (
    SAVE_STEPS,
    SHORT_JOB,
    Run,
    finished_once,
    history,
    loss_curve,
    shared_folder,
    state_hash,
    troubled,
    wait_for_commit,
    wait_until,
)

from runner.system.processes import is_fork_server

END = 40
EVALUATING = "eval_strategy='steps', eval_steps=15, per_device_eval_batch_size=2"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The troubled script without its trouble; with evaluations."""
    folder = shared_folder(tmp_path_factory) / "calm-evaluating"
    return finished_once(folder / "run", script=lambda: troubled(folder, options=EVALUATING))


def kinds(run: Run) -> list[str]:
    return [event["kind"] for event in run.events("attempt_ended")]


def wait_for_rank(run: Run, attempt: int) -> None:
    wait_until(run, lambda: any(event["attempt"] == attempt for event in run.events("rank_started")))


def last_line(run: Run) -> str:
    line: str = run.events("run_ended")[-1]["reason"]
    return line


def assert_as_if_nothing_had_happened(run: Run, calm: Run) -> None:
    assert state_hash(run.checkpoint(END)) == state_hash(calm.checkpoint(END))
    assert history(run.checkpoint(END)) == history(calm.checkpoint(END))
    assert not run.leftovers()


# -- out of memory -------------------------------------------------------------------------------------------------


def test_out_of_memory_halves_the_micro_batch_on_all_ranks(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            with open(FOLDER + f".{RANK}", "a") as file:
                print(step, args.per_device_train_batch_size, args.gradient_accumulation_steps, file=file)
            if step == 12 and RANK == 1 and args.per_device_train_batch_size > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["out of memory", "out of memory", "finished"]
    assert "CUDA out of memory" in run.output
    assert "step 12" in run.output and "rank 1" in run.output
    assert "retrying with micro-batch 2 x accumulation 2" in run.output
    assert "retrying with micro-batch 1 x accumulation 4" in run.output
    for rank in range(2):
        lines = [tuple(map(int, line.split())) for line in (tmp_path / f"hf.{rank}").read_text().splitlines()]
        assert {line[1:] for line in lines} == {(4, 1), (2, 2), (1, 4)}
        assert lines[-1] == (END, 1, 4)
    # The same samples in every step: losses agree to rounding with a run that never had to.
    plain = Run(tmp_path / "plain" / "run", script=troubled(tmp_path / "plain", options="")).start()
    assert plain.finish() == 0, plain.output
    ours, theirs = loss_curve(run.checkpoint(END)), loss_curve(plain.checkpoint(END))
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert ours[0][1] == theirs[0][1]


@pytest.mark.soak
def test_out_of_memory_with_nothing_left_to_halve(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            if step == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    """
    script = troubled(tmp_path, trouble, "gradient_accumulation_steps=2")
    Path(script[0]).write_text(Path(script[0]).read_text().replace("train_batch_size=4", "train_batch_size=1"))
    run = Run(tmp_path / "run", script=script).start()
    assert run.finish() == 78, run.output
    assert kinds(run) == ["out of memory"] and "nothing left to halve" in last_line(run)


def test_out_of_memory_in_an_evaluation_leaves_the_micro_batch_alone(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            assert args.per_device_train_batch_size == 4
        def at_evaluation(step):
            if RANK == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING)).start()
    assert run.finish() == 78, run.output
    assert set(kinds(run)) == {"out of memory outside steps"} and len(kinds(run)) == 2
    assert "per_device_eval_batch_size" in last_line(run) and "step 15 twice" in last_line(run)


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A real cgroup whose processes may have 3 GB."""
    folder = CGROUP / f"runner-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(3 * 10**9))
    except OSError as error:
        lacks("memory cgroup", error)
    yield folder
    deadline = time.monotonic() + 20
    while (folder / "cgroup.procs").read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory(small_memory: Path, tmp_path: Path) -> None:
    trouble = """
        held = []
        def at_step(step, args):
            while step == 12 and RANK == 1 and args.per_device_train_batch_size > 2:
                held.append(torch.ones(25_000_000))
    """
    # Allocating that much memory takes a while.
    run = Run(tmp_path / "run", "--set", "restart.hang_timeout_s=120", script=troubled(tmp_path, trouble))
    join = f'echo $$ > {small_memory}/cgroup.procs && exec "$@"'
    run.command = ["sh", "-c", join, "sh", *run.command]
    run.start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["out of memory", "finished"]
    assert "killed by the kernel" in run.output and "retrying with micro-batch 2 x accumulation 2" in run.output
    assert not run.leftovers()


@pytest.mark.soak
def test_out_of_memory_before_the_first_step_is_bounded(tmp_path: Path) -> None:
    """As if another process held the memory: no batch size is known yet."""
    trouble = """
        if ATTEMPT == 1:
            def at_step(step, args):
                raise torch.OutOfMemoryError("CUDA out of memory.")
        else:
            raise torch.OutOfMemoryError("CUDA out of memory.")
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 78, run.output
    assert 2 < len(kinds(run)) < 9 and set(kinds(run)) == {"out of memory"}


@pytest.mark.soak
def test_a_connection_that_breaks_between_two_ranks_is_a_crash(calm: Run, tmp_path: Path) -> None:
    """The cause is gloo's message, from whichever rank reports it first."""
    trouble = """
        import socket
        def at_step(step, args):
            if step == 15 and RANK == 1 and ATTEMPT == 1:
                for name in os.listdir("/proc/self/fd"):
                    try:
                        sock = socket.socket(fileno=os.dup(int(name)))
                        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername():
                            sock.shutdown(socket.SHUT_RDWR)
                        sock.close()
                    except OSError:
                        pass
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING)).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["crashed", "finished"]
    cause = run.events("attempt_ended")[0]["cause"]
    assert "onnection" in cause and "gloo" in cause, cause
    assert_as_if_nothing_had_happened(run, calm)


@pytest.mark.soak
def test_an_agent_lost_when_all_is_committed_costs_nothing(tmp_path: Path) -> None:
    """The agent was removing older checkpoints after the last commit."""
    script = troubled(tmp_path, options="save_total_limit=1")
    Path(script[0]).write_text(Path(script[0]).read_text().replace("save_steps=10", "save_steps=20"))
    run = Run(tmp_path / "run", script=script).start(CHECKPOINT_FAILPOINTS="local.removing=hang")
    wait_until(run, lambda: run.events("attempt_ended"))
    os.kill(run.agent_pid(), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert run.checkpoint(END).exists() and run.events("run_ended")[-1]["state"] == "finished"


# -- hangs ---------------------------------------------------------------------------------------------------------


def test_a_stopped_rank_is_found_its_stacks_are_kept_and_the_run_goes_on(calm: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=troubled(tmp_path, options=EVALUATING, crawl=20)).start()
    wait_for_commit(run, 20)
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    stopped_at = time.time()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["hung", "finished"]
    hang = run.events("hang")[0]
    # The limit of steps applies, not the longer one of other work.
    assert hang["time"] - stopped_at < 120
    assert 1 in hang["ranks"]
    stacks = {Path(path).name: Path(path).read_text() for path in hang["stacks"]}
    assert set(stacks) == {"stacks-rank0.txt", "stacks-rank1.txt"}
    assert "state T" in stacks["stacks-rank1.txt"] and "troubled.py" in stacks["stacks-rank1.txt"]
    assert "troubled.py" in stacks["stacks-rank0.txt"]
    assert_as_if_nothing_had_happened(run, calm)


@pytest.mark.soak
def test_a_rank_stopped_while_it_starts_is_found_as_soon(tmp_path: Path) -> None:
    """No step has told yet how long one takes; and what is no step may take half an hour."""
    trouble = """
        if ATTEMPT == 1:
            time.sleep(600)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    wait_until(run, lambda: len(run.events("rank_started")) == 2)
    os.kill(run.rank_pid(1), signal.SIGSTOP)
    stopped_at = time.time()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["hung", "finished"]
    (hang,) = run.events("hang")
    assert hang["ranks"] == [1] and "SIGSTOP" in hang["reason"] and hang["time"] - stopped_at < 120


@pytest.mark.soak
def test_the_ranks_do_not_wait_for_the_build_of_a_killed_one(tmp_path: Path) -> None:
    """`FileBaton` is the lock of torch's extension builder."""
    trouble = """
        from torch.utils.file_baton import FileBaton
        if RANK == 0:
            baton = FileBaton(os.environ["TORCH_EXTENSIONS_DIR"] + "/fused_adam/lock")
            if not baton.try_acquire():
                baton.wait()
            if ATTEMPT == 1:
                os.kill(os.getpid(), 9)
            baton.release()
    """
    (tmp_path / "extensions" / "fused_adam").mkdir(parents=True)
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble))
    run.start(TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert run.finish() == 0, run.output
    assert kinds(run) == ["crashed", "finished"]
    assert "fused_adam/lock: the build of a torch extension that held it was killed" in run.output


@pytest.mark.soak
def test_a_deadlock_shows_where_it_is(tmp_path: Path) -> None:
    trouble = """
        import threading
        lock = threading.Lock()
        def never_to_return():
            lock.acquire()
            lock.acquire()
        def at_step(step, args):
            if step == 15 and RANK == 0 and ATTEMPT == 1:
                never_to_return()
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["hung", "finished"]
    stacks = run.folder / "logs" / "attempt-1" / "stacks-rank0.txt"
    assert "never_to_return" in stacks.read_text() and str(stacks.parent) in run.output


@pytest.mark.soak
def test_a_hang_in_what_is_no_step_is_found_by_its_own_limit(tmp_path: Path) -> None:
    trouble = """
        def at_evaluation(step):
            if step == 15 and RANK == 0 and ATTEMPT == 1:
                time.sleep(600)
    """
    script = troubled(tmp_path, trouble, EVALUATING)
    # The launcher has the same time until the first rank starts.
    run = Run(tmp_path / "run", "--set", "restart.quiet_timeout_s=60", script=script).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["hung", "finished"]
    assert 0 in run.events("hang")[0]["ranks"] and "in an evaluation" in run.events("hang")[0]["reason"]


@pytest.mark.soak
def test_slow_evaluation_saving_and_compiling_are_no_hangs(tmp_path: Path) -> None:
    trouble = """
        from torch._dynamo.callback import callback_handler, CallbackArgs, CallbackTrigger
        slow = [7.0]
        def at_evaluation(step):
            time.sleep(slow.pop() if step == 15 and slow else 0)
        def at_step(step, args):
            if step == 20:
                args_ = CallbackArgs(CallbackTrigger.DYNAMO, "0")
                callback_handler.run_start_callbacks(args_)
                time.sleep(7)
                callback_handler.run_end_callbacks(args_)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING)).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["finished"], run.output


@pytest.mark.soak
@pytest.mark.parametrize("name", ["agent", "launcher"])
def test_a_stopped_agent_or_launcher_costs_an_attempt(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--set", "restart.quiet_timeout_s=60", script=troubled(tmp_path, crawl=20)).start()
    wait_for_commit(run, 20)
    stopped_at = time.time()
    os.kill({"agent": run.agent_pid, "launcher": run.launcher_pid}[name](), signal.SIGSTOP)
    if name == "launcher":
        os.kill(run.rank_pid(0), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert kinds(run)[-1] == "finished" and len(kinds(run)) == 2
    assert not run.leftovers()
    if name == "agent":
        # Within seconds, and by its name: the ranks that wait for it were blamed, or two minutes passed.
        ended = run.events("attempt_ended")[0]
        assert ended["cause"].startswith("the checkpoint agent was stopped (SIGSTOP to pid ")
        assert ended["failed_at"] - stopped_at < 8


def test_a_fork_server_that_dies_is_named_and_not_one_of_the_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=troubled(tmp_path, crawl=20)).start()
    wait_for_commit(run, 5)
    launcher = psutil.Process(run.launcher_pid())
    (server,) = [child for child in launcher.children() if is_fork_server(child)]
    # It and the ranks are distinct for people, too.
    titles = [process.cmdline()[0] for process in (server, psutil.Process(run.rank_pid(1)))]
    assert titles[0] == "resilient: fork server" and titles[1].startswith("resilient: rank 1 of 2, step "), titles
    server.kill()
    assert run.finish() == 0, run.output
    first, *_ = run.events("attempt_ended")
    assert first["cause"] == "the launcher's fork server died, and all ranks with it"
    assert not run.leftovers()


@pytest.mark.soak
def test_a_launcher_or_agent_that_is_killed_while_it_starts_is_tried_again(tmp_path: Path) -> None:
    for name in ("runner.launcher.launcher", "checkpointing.agent"):
        run = Run(tmp_path / name, *SHORT_JOB, "--set", "trainer.max_steps=6").start()
        assert run.process is not None
        parent = psutil.Process(run.process.pid)
        victims: list[psutil.Process] = []
        while not victims:
            assert run.process.poll() is None
            victims = [child for child in parent.children() if name in " ".join(child.cmdline())]
        victims[0].kill()
        assert run.finish() == 0, run.output
        assert "restarting" in run.output and kinds(run)[-1] == "finished"
        assert not run.leftovers()


# -- non-finite gradients ------------------------------------------------------------------------------------------


def test_a_nan_on_one_rank_costs_an_attempt_and_leaves_no_trace(calm: Run, tmp_path: Path) -> None:
    (tmp_path / "fired").mkdir()
    run = Run(tmp_path / "run", script=troubled(tmp_path, options=EVALUATING))
    run.start(CHECKPOINT_FAILPOINTS="training.loss=nan@15", CHECKPOINT_FAILPOINTS_ONCE=str(tmp_path / "fired"))
    assert run.finish() == 0, run.output
    assert kinds(run) == ["non-finite gradients", "finished"]
    assert "step 15 are not finite" in run.output
    (resumed,) = run.events("resumed")
    assert 0 < resumed["step"] < 15
    assert_as_if_nothing_had_happened(run, calm)


# The loss is NaN at step 12 in every attempt.
SPOILED = """
    compute_loss = Trainer.compute_loss
    def spoiled(self, *args, **kwargs):
        loss = compute_loss(self, *args, **kwargs)
        return loss * float("nan") if self.model.training and self.state.global_step == 11 else loss
    Trainer.compute_loss = spoiled
"""


@pytest.mark.soak
@pytest.mark.parametrize("options", ["", "max_grad_norm=0"])
def test_a_nan_that_comes_again_is_passed_over(options: str, tmp_path: Path) -> None:
    """A later attempt skips them, too: its result does not depend on whether a rank was killed."""
    states = []
    for name, failpoints in (("calm", ""), ("killed", "training.step=kill@18")):
        folder = tmp_path / name
        script = troubled(folder, SPOILED, f"{options}{',' if options else ''}lr_scheduler_type='constant'")
        (folder / "fired").mkdir()
        # From the same snapshot each time, so that the same window is passed over.
        (folder / "troubled.py").write_text(
            (folder / "troubled.py").read_text().replace("resilient(", "resilient(snapshot_steps=5, trainer=")
        )
        run = Run(folder / "run", script=script)
        run.start(CHECKPOINT_FAILPOINTS=failpoints, CHECKPOINT_FAILPOINTS_ONCE=str(folder / "fired"))
        assert run.finish() == 0, run.output
        assert kinds(run)[:2] == ["non-finite gradients"] * 2 and kinds(run)[-1] == "finished"
        assert len(kinds(run)) == 3 + bool(failpoints)
        assert "twice, so steps 11 to 12 are skipped" in run.output
        (skipped,) = run.events("steps_skipped")
        assert (skipped["first"], skipped["last"]) == (11, 12)
        states.append(state_hash(run.checkpoint(END)))
        # Two of its steps were skipped and changed nothing.
        optimizer = torch.load(run.checkpoint(END) / "optimizer.pt", weights_only=True)
        assert {int(state["step"]) for state in optimizer["state"].values()} == {END - 2}
        assert all(math.isfinite(loss) and loss > 1 for _, loss in loss_curve(run.checkpoint(END)))
    assert states[0] == states[1]


@pytest.mark.soak
def test_a_nan_that_comes_again_ends_a_run_that_may_skip_no_more(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--set", "guards.max_skipped_windows=0", script=troubled(tmp_path, SPOILED)).start()
    assert run.finish() == 78, run.output
    assert kinds(run) == ["non-finite gradients"] * 2
    assert "step 12 are not finite" in last_line(run) and "learning rate" in last_line(run)
    assert max(event["step"] for event in run.events("committed")) < 12


@pytest.mark.soak
def test_a_spike_that_comes_again_is_passed_over(tmp_path: Path) -> None:
    """On one rank alone; the other sees it in the mean of all. What comes once only leaves no trace."""
    trouble = """
        compute_loss = Trainer.compute_loss
        def spoiled(self, *args, **kwargs):
            loss = compute_loss(self, *args, **kwargs)
            step = self.state.global_step + 1
            spike = RANK == 1 and self.model.training and (step == 30 or step == 22 and ATTEMPT == 1)
            return loss * (9.0 if spike else 1.0)
        Trainer.compute_loss = spoiled
    """
    script = troubled(tmp_path, trouble)
    text = Path(script[0]).read_text()
    Path(script[0]).write_text(text.replace("resilient(", "resilient(spike_zscore=8, trainer="))
    run = Run(tmp_path / "run", script=script).start()
    assert run.finish() == 0, run.output
    assert kinds(run) == ["loss spike", "loss spike", "loss spike", "finished"]
    assert "the loss of step 22 is a spike" in run.events("attempt_ended")[0]["cause"]
    (skipped,) = run.events("steps_skipped")
    assert 22 <= skipped["first"] <= skipped["last"] == 30
    assert not run.leftovers()


# -- what would happen again ---------------------------------------------------------------------------------------


def test_the_same_error_at_the_same_step_twice(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            if step == 12:
                raise ValueError("row 17 is damaged")
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 78, run.output
    assert kinds(run) == ["crashed", "crashed"]
    assert "step 12 twice" in last_line(run) and "row 17 is damaged" in last_line(run)


@pytest.mark.soak
def test_an_error_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=troubled(tmp_path, "import no_such_module")).start()
    assert run.finish() == 78, run.output
    assert kinds(run) == ["boot failure"] and "no_such_module" in last_line(run) and "; log: " in run.output


@pytest.mark.soak
def test_a_scripts_own_status_75_is_no_stop_request(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            if step == 12:
                # Once at nearly the same moment; once torchrun's SIGTERM to the other one comes first.
                time.sleep(RANK if ATTEMPT == 2 else 0)
                sys.exit(75)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 78, run.output
    assert kinds(run) == ["crashed", "crashed"] and "status 75" in last_line(run)
    assert f"{last_line(run)} (exit code 78)" in run.output.splitlines()[-1]


@pytest.mark.soak
def test_a_machine_at_fault(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            if step == 12:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble)).start()
    assert run.finish() == 80, run.output
    assert kinds(run) == ["bad node"] and "another" in last_line(run)


@pytest.mark.soak
@pytest.mark.parametrize(("step", "exit_code"), [(5, 79), (12, 76)])
def test_a_budget_spent_without_or_with_a_checkpoint(step: int, exit_code: int, tmp_path: Path) -> None:
    trouble = f"""
        def at_step(step, args):
            if step == {step} and RANK == 1:
                while step > 10 and '"committed"' not in open({str(tmp_path / "run" / "journal.jsonl")!r}).read():
                    time.sleep(0.02)
                os.kill(os.getpid(), 9)
    """
    # Nothing newer is left in memory than what was there before.
    options = ["--max-restarts", "1", "--set", "restart.backoff_initial_s=0", "--set", "restart.backoff_jitter_s=0"]
    options += ["--set", "restart.hang_timeout_s=600"]
    script = troubled(tmp_path, trouble)
    text = Path(script[0]).read_text().replace("eval_dataset=rows))", "eval_dataset=rows), snapshot_steps=None)")
    Path(script[0]).write_text(text)
    run = Run(tmp_path / "run", *options, script=script).start()
    assert run.finish() == exit_code, run.output
    assert len(kinds(run)) == 2
    assert "without a new checkpoint" in last_line(run) or "failures and no checkpoint" in last_line(run)


@pytest.mark.soak
def test_runners_that_are_killed_again_and_again_spend_the_budget(tmp_path: Path) -> None:
    trouble = """
        if ATTEMPT < 3:
            time.sleep(600)
    """
    run = Run(tmp_path / "run", "--max-restarts", "1", script=troubled(tmp_path, trouble))
    for attempt in (1, 2):
        run.start()
        wait_for_rank(run, attempt)
        run.signal(signal.SIGKILL)
        run.finish()
    assert run.start().finish() == 79, run.output
    assert "ended together with its runner" in last_line(run)
    # The budget is refused only once: a user who then starts the run again wants it to be tried.
    assert run.start().finish() == 0, run.output


# -- preemption ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_notice_to_one_rank_alone_stops_all(number: signal.Signals, calm: Run, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=troubled(tmp_path, options=EVALUATING, crawl=8)).start()
    wait_for_commit(run, 10)
    os.kill(run.rank_pid(1), number)
    assert run.finish() == 75, run.output
    assert kinds(run) == ["preempted"]
    stopped = run.events("attempt_ended")[-1]["step"]
    assert run.events("committed")[-1]["step"] == stopped < END
    assert run.start().finish() == 0, run.output
    assert "lost work    0 steps" in run.output
    assert_as_if_nothing_had_happened(run, calm)


def test_a_notice_that_the_script_answers_by_ending_stops_all(calm: Run, tmp_path: Path) -> None:
    trouble = """
        import signal
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING, crawl=12)).start()
    wait_for_commit(run, 10)
    os.kill(run.rank_pid(0), signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert kinds(run) == ["preempted"] and run.events("committed")[-1]["step"] < 40
    assert run.start().finish() == 0, run.output
    assert_as_if_nothing_had_happened(run, calm)


def test_training_that_a_scripts_handler_ends_goes_on_with_the_next_start(tmp_path: Path) -> None:
    trouble = """
        import signal
        def own(number, frame):
            trainer.control.should_training_stop = True
        signal.signal(signal.SIGTERM, own)
    """
    script = troubled(tmp_path, trouble, crawl=12)
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=script).start()
    wait_for_commit(run, 10)
    os.kill(run.rank_pid(0), signal.SIGTERM)
    assert run.finish() == 75, run.output
    stopped = run.events("committed")[-1]["step"]
    assert kinds(run) == ["preempted"] and 10 < stopped < 40
    assert run.start().finish() == 0, run.output
    assert run.events("training_started")[-1]["step"] == stopped
    assert run.events("committed")[-1]["step"] == 40


@pytest.mark.soak
def test_a_notice_to_every_process_is_one_notice(calm: Run, tmp_path: Path) -> None:
    """As a scheduler sends it: to all processes of the job, and not to the runner first."""
    run = Run(tmp_path / "run", script=troubled(tmp_path, options=EVALUATING, crawl=8)).start()
    wait_for_commit(run, 10)
    assert run.process is not None
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    wait_until(run, lambda: run.events("stop_requested"))
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert kinds(run) == ["preempted"]
    assert run.start().finish() == 0, run.output
    assert "lost work    0 steps" in run.output
    assert_as_if_nothing_had_happened(run, calm)


@pytest.mark.soak
def test_a_rank_killed_when_it_was_done_is_no_notice_to_the_others(calm: Run, tmp_path: Path) -> None:
    """torchrun then ends them with SIGTERM, the signal of a notice."""
    trouble = """
        from multiprocessing.util import Finalize
        def in_the_last_moment():
            if RANK == 1:
                os.kill(os.getpid(), 9)
            time.sleep(2)
        if ATTEMPT == 1:
            Finalize(None, in_the_last_moment, exitpriority=0)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING)).start()
    assert run.finish() == 0, run.output
    assert not run.events("stop_requested") and kinds(run)[-1] == "finished" and len(kinds(run)) == 2
    assert_as_if_nothing_had_happened(run, calm)


def test_a_stop_in_an_evaluation_cuts_it_short_and_it_is_done_anew(calm: Run, tmp_path: Path) -> None:
    trouble = """
        def at_evaluation(step):
            if step == 15 and ATTEMPT == 1:
                with open(FOLDER + f".evaluated.{RANK}", "a") as file:
                    print("a batch", file=file)
                time.sleep(0.5)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, EVALUATING)).start()
    batches = [tmp_path / f"hf.evaluated.{rank}" for rank in (0, 1)]
    wait_until(run, batches[0].exists)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert all(len(path.read_text().splitlines()) < 24 for path in batches)
    assert run.events("committed")[-1]["step"] == 15
    assert run.start().finish() == 0, run.output
    assert run.events("training_started")[-1]["step"] == 15
    assert_as_if_nothing_had_happened(run, calm)


def test_an_evaluation_that_outlasts_the_grace_loses_no_snapshot(calm: Run, tmp_path: Path) -> None:
    trouble = """
        def at_evaluation(step):
            if step == 15 and ATTEMPT == 1:
                open(FOLDER + ".evaluates", "w").close()
                time.sleep(60)
    """
    script = troubled(tmp_path, trouble, EVALUATING)
    Path(script[0]).write_text(Path(script[0]).read_text().replace("save_steps=10", "save_steps=40"))
    run = Run(tmp_path / "run", "--grace", "6", script=script).start()
    wait_until(run, (tmp_path / "hf.evaluates").exists)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    newest, end = run.events("committed")[-1], run.events("attempt_ended")[-1]
    assert newest["step"] == run.events("snapshot")[-1]["step"] > 0 and newest["time"] < end["time"]
    assert last_line(run) == "stopped on request; the same command continues from the last checkpoint"
    assert run.start().finish() == 0, run.output
    assert run.events("training_started")[-1]["step"] == newest["step"]
    assert_as_if_nothing_had_happened(run, calm)


@pytest.mark.soak
def test_a_stop_in_a_restore_is_honoured(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB, "--set", "restart.hang_timeout_s=600")
    run.start(CHECKPOINT_FAILPOINTS=f"training.step=hang@{SAVE_STEPS + 2}; restore.read=hang")
    wait_for_commit(run, SAVE_STEPS)
    os.kill(run.rank_pid(0), signal.SIGKILL)
    wait_until(run, lambda: len(run.events("rank_started")) > 2)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert not run.leftovers()
    assert run.start().finish() == 0, run.output


@pytest.mark.soak
def test_a_stop_in_a_save_is_honoured(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", script=troubled(tmp_path, crawl=8)).start()
    wait_until(run, lambda: [event for event in run.events("snapshot") if event["to_be_committed"]])
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert run.events("committed")[-1]["step"] == run.events("attempt_ended")[-1]["step"]
    assert not run.leftovers()


def test_signals_while_it_ends_do_not_take_the_exit_codes_place(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *SHORT_JOB, "--set", "trainer.max_steps=6").start()
    wait_until(run, lambda: run.events("run_ended"))
    assert run.process is not None
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    assert run.finish() == 0, run.output


def test_a_stop_in_the_first_moment_is_not_lost(tmp_path: Path) -> None:
    """A signal before anything is loaded, and before the journal exists."""
    for delay in (0.25, 0.5, 1.0):
        run = Run(tmp_path / f"run-{delay}", *SHORT_JOB).start()
        assert run.process is not None
        # Its own handlers are there as soon as Python has started: its code is mapped by then.
        status = Path(f"/proc/{run.process.pid}/status")
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & (1 << (signal.SIGTERM - 1)):
            assert run.process.poll() is None
        time.sleep(delay)
        run.signal(signal.SIGTERM)
        assert run.finish() == 75, run.output
        assert not run.leftovers()


@pytest.mark.soak
def test_a_rank_that_has_stopped_leaves_the_others_time_to_end_in_order(tmp_path: Path) -> None:
    script = troubled(tmp_path, crawl=8)
    text = (
        Path(script[0])
        .read_text()
        .replace(
            "trainer.train()",
            "try:\n    trainer.train()\nfinally:\n    time.sleep(3 * (1 - RANK))\n"
            "    open(trainer.args.output_dir + f'.closed.{RANK}', 'w')",
        )
    )
    Path(script[0]).write_text(text)
    run = Run(tmp_path / "run", script=script).start()
    wait_for_commit(run, 10)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert kinds(run) == ["preempted"]
    assert [(tmp_path / f"hf.closed.{rank}").exists() for rank in (0, 1)] == [True, True]


@pytest.mark.soak
def test_what_outlasts_the_grace_is_ended(tmp_path: Path) -> None:
    trouble = """
        def at_step(step, args):
            if step == 15:
                open(FOLDER + f".asleep.{RANK}", "w").close()
                time.sleep(600)
    """
    options = ["--grace", "2", "--set", "restart.hang_timeout_s=600"]
    run = Run(tmp_path / "run", *options, script=troubled(tmp_path, trouble)).start()
    wait_until(run, lambda: all((tmp_path / f"hf.asleep.{rank}").exists() for rank in (0, 1)))
    began = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert 2 <= time.monotonic() - began < 120
    assert kinds(run) == ["ended at once"] and not run.leftovers()


@pytest.mark.soak
def test_a_commit_that_hangs_does_not_outlast_the_grace_for_long(tmp_path: Path) -> None:
    """However often the agent is waited for, at the attempt's end and at the run's."""
    run = Run(tmp_path / "run", "--grace", "5", script=troubled(tmp_path, crawl=8))
    run.start(CHECKPOINT_FAILPOINTS="local.write=hang@1")
    wait_until(run, lambda: [event for event in run.events("snapshot") if event["to_be_committed"]])
    began = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert 5 <= time.monotonic() - began < 120
    (early,) = run.events("agent_ended_early")
    assert early["waited_s"] < 5 + 5 + 5 and "is not committed" in run.output
    assert not run.leftovers() and not run.events("committed")


# What each cloud says is in tests/unit/runner/preemption/test_watcher.py.
@pytest.mark.parametrize("cloud", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("aws", "gcp")), "azure"])
def test_a_clouds_notice_is_a_stop_request(cloud: str, tmp_path: Path) -> None:
    kind = {"aws": Ec2Metadata, "gcp": GoogleMetadata, "azure": AzureMetadata}[cloud]()
    with serve(kind) as service:
        options = ["--set", f"restart.preemption_notices={cloud}"]
        options += ["--set", f"restart.metadata_endpoint={service.endpoint}"]
        # The AWS endpoint is polled every five seconds.
        slow = """
            def at_step(step, args):
                time.sleep(1.0 if step > 10 else 0)
        """
        run = Run(tmp_path / "run", *options, script=troubled(tmp_path, slow)).start()
        wait_for_commit(run, 10)
        match service:
            case Ec2Metadata():
                service.interrupt("terminate", 120)
            case GoogleMetadata():
                service.preempt()
            case AzureMetadata():
                service.schedule("Preempt", 30)
        assert run.finish() == 75, run.output
    assert run.events("preemption_notice")[0]["source"] == cloud
    assert kinds(run) == ["preempted"] and f"stop requested ({cloud}" in run.output
    assert run.events("committed")[-1]["step"] == run.events("attempt_ended")[-1]["step"]


# -- nobody is left ------------------------------------------------------------------------------------------------


def test_what_ranks_have_started_goes_with_them(tmp_path: Path) -> None:
    trouble = """
        import subprocess
        def at_step(step, args):
            if step == 3:
                # In a session of its own, and forgotten by its parent.
                subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)
            if step == 12 and ATTEMPT == 1 and RANK == 0:
                os.kill(os.getpid(), 9)
    """
    options = "dataloader_num_workers=2"
    run = Run(tmp_path / "run", script=troubled(tmp_path, trouble, options)).start()
    wait_until(run, lambda: len(run.events("attempt_started")) == 2)
    started = run.events("attempt_started")[1]["time"]
    old = [process for process in run.processes() if process.create_time() < started - 1]
    names = {event["pid"] for event in run.events("rank_started")}
    assert not [process for process in old if process.pid in names and process.create_time() < started - 1]
    assert not [process for process in old if "sleep" in process.name()]
    assert run.finish() == 0, run.output
    assert not run.leftovers()


@needs("process namespaces")
def test_as_process_1_it_restarts_stops_and_leaves_nobody(tmp_path: Path) -> None:
    """As in a container: no parent process reaps children or forwards signals."""
    slow = """
        def at_step(step, args):
            time.sleep(0.5 if step > 8 else 0)
    """
    run = Run(tmp_path / "run", script=troubled(tmp_path, slow))
    run.command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *run.command]
    run.start()
    assert run.process is not None
    wait_for_commit(run, 10)
    runner = next(p for p in psutil.Process(run.process.pid).children() if "runner" in " ".join(p.cmdline()))

    sizes = {}
    for process in runner.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # By the numbers that they have out here.
            if process.name().startswith("rank "):
                sizes[process] = process.memory_info().rss
    max(sizes, key=lambda process: sizes[process]).send_signal(signal.SIGKILL)
    wait_until(run, lambda: len(run.events("training_started")) == 2)
    runner.send_signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    assert run.events("committed")[-1]["step"] == run.events("attempt_ended")[-1]["step"]
    assert not runner.is_running() and not run.processes()


@pytest.mark.soak
def test_a_runner_that_was_stopped_blames_nobody(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT of the supervisor: Ctrl-Z and fg."""
    run = Run(tmp_path / "run", script=troubled(tmp_path)).start()
    wait_for_commit(run, 10)
    run.signal(signal.SIGSTOP)
    time.sleep(8)
    run.signal(signal.SIGCONT)
    assert run.finish() == 0, run.output
    assert kinds(run) == ["finished"]
