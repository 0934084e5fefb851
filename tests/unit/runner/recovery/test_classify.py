"""Why an attempt ended, and what is read from the files that ended ranks leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.recovery import classify as classify_module
from runner.recovery.classify import RankEnd, classify, raised_by_program, read_error_file, read_last_words
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind

K = FailureKind
THROWN = "terminate called after throwing an instance of '{name}'\n  what():  {text}\n"
BUSY = "CUDA-capable device(s) is/are busy or unavailable"
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: CUDA error: "
    "an illegal memory access was encountered"
)
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("ends", "step", "kind", "rank", "text"),
    [
        ([RankEnd(1, 0, -9)], 30, K.CRASHED, 1, "rank 1 was killed by SIGKILL"),
        ([RankEnd(1, 0), RankEnd(0, 1, 1, PEER)], 30, K.CRASHED, 1, "died without an error message"),
        # The loudest is not the cause: the peer's reset may be reported first.
        ([RankEnd(0, 0, 1, PEER), RankEnd(1, 1, -9)], 30, K.CRASHED, 1, "SIGKILL"),
        ([RankEnd(0, 0, 1, PEER), RankEnd(1, 1, 1, "ValueError: bad row")], 30, K.CRASHED, 1, "ValueError: bad row"),
        ([RankEnd(0, 0, 1, "ImportError: no module x")], 0, K.BOOT, 0, "ImportError"),
        (
            [RankEnd(0, 0, 1, "ImportError: no module x")],
            20,
            K.CRASHED,
            0,
            "ImportError",
        ),  # resumed at 20: it has worked
        ([RankEnd(0, 0, 1, PEER)], 0, K.CRASHED, 0, "Connection closed"),
        ([RankEnd(0, 0, -11)], 0, K.CRASHED, 0, "SIGSEGV"),
        ([RankEnd(0, 0, 75), RankEnd(1, 1)], 30, K.PREEMPTED, None, "stopped on request"),
        ([RankEnd(0, 0, 1, "NoValidCheckpoint: none is valid")], 0, K.NO_VALID_CHECKPOINT, 0, "none is valid"),
        ([RankEnd(0, 0, 1, "StorageUnreachable: no answer")], 0, K.CRASHED, 0, "no answer"),
        # A fence that cannot be written: it will be as full by the next attempt.
        ([RankEnd(0, 0, 1, "StorageUnreachable: No space left on device")], 30, K.STORAGE_FAILED, 0, "make room"),
        ([RankEnd(0, 0, 1, "ConnectionError: the Hub (503)", transient=True)], 0, K.NETWORK, 0, "the Hub (503)"),
        ([RankEnd(0, 0, 1, "HTTPError: 502", transient=True)], 30, K.NETWORK, 0, "502"),
        # Its text is that of a lost peer, too; its type is not.
        (
            [RankEnd(0, 0, 1, "ReadTimeout: huggingface.co: Read timed out.", transient=True)],
            0,
            K.NETWORK,
            0,
            "timed out",
        ),
        # Of a server; not of a GPU, whose node would be excluded.
        (
            [RankEnd(0, 0, 1, "HTTPError: 503 Server Error: Service busy or unavailable", transient=True)],
            30,
            K.NETWORK,
            0,
            "503",
        ),
        # What a lost peer leads to is no word about a server.
        ([RankEnd(0, 0, 1, PEER, transient=True), RankEnd(1, 1, -9)], 30, K.CRASHED, 1, "SIGKILL"),
        ([RankEnd(0, 0, 1, "SystemExit: no rows in /data")], 0, K.BOOT, 0, "rank 0: no rows in /data"),
        ([RankEnd(0, 0, 1, "Exception: No space left on device (os error 28)")], 0, K.STORAGE_FAILED, 0, "make room"),
        ([RankEnd(0, 0, 1, "OSError: [Errno 122] Disk quota exceeded: 'x'")], 9, K.STORAGE_FAILED, 0, "quota"),
        ([RankEnd(0, 0, 1, "ValueError: first\n  second")], 0, K.BOOT, 0, "rank 0: ValueError: first second"),
        ([RankEnd(0, 0, 1, "ValueError: ")], 0, K.BOOT, 0, "rank 0: ValueError"),
        ([RankEnd(0, 0, 1, f"ValueError: {'x' * 20_000}")], 0, K.BOOT, 0, "x …"),
        ([RankEnd(0, 0, 3)], 30, K.CRASHED, 0, "exited with status 3"),
        ([], 0, K.LAUNCHER_LOST, None, "without a report"),
        (
            [RankEnd(0, 0, 1, "OutOfMemoryError: CUDA out of memory. Tried")],
            30,
            K.OUT_OF_MEMORY,
            0,
            "CUDA out of memory",
        ),
        # Also before the first step: smaller batches may fit.
        (
            [RankEnd(0, 0, 1, "RuntimeError: ...Allocator: can't allocate memory")],
            0,
            K.OUT_OF_MEMORY,
            0,
            "alloc",
        ),
        ([RankEnd(1, 0, 1, "MemoryError: ")], 30, K.OUT_OF_MEMORY, 1, "MemoryError"),
        # Also in the first step after a start; and seen a step later, it is the same failure.
        ([RankEnd(0, 0, 1, "NonFinite: the gradients of step 1 …")], 0, K.NON_FINITE, 0, "step 1"),
        ([RankEnd(0, 0, 1, "LossSpike: the loss of step 33 is a spike: 9")], 30, K.SPIKE, 0, "step 33"),
        ([RankEnd(0, 0, 1, "AcceleratorError: CUDA error: uncorrectable ECC error")], 30, K.BAD_NODE, 0, "ECC"),
        ([RankEnd(0, 0, 1, "RuntimeError: CUDA error: GPU has fallen off the bus")], 0, K.BAD_NODE, 0, "bus"),
        # As torch words them (pytorch issues 100691, 2704, and nvidia-smi).
        ([RankEnd(0, 0, 1, f"RuntimeError: CUDA error: {BUSY}")], 0, K.BAD_NODE, 0, "busy"),
        (
            [RankEnd(0, 0, 1, "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable")],
            0,
            K.BAD_NODE,
            0,
            "busy",
        ),
        ([RankEnd(0, 0, 1, "RuntimeError: No CUDA GPUs are available")], 0, K.BAD_NODE, 0, "No CUDA GPUs"),
        (
            [
                RankEnd(
                    0, 0, 1, "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment"
                )
            ],
            0,
            K.BAD_NODE,
            0,
            "unknown",
        ),
        (
            [RankEnd(0, 0, 1, "RuntimeError: Unable to determine: GPU is lost. Reboot the system")],
            0,
            K.BAD_NODE,
            0,
            "lost",
        ),
        # NCCL's watchdog tells of the rank's own error; the other rank only of the connection.
        (
            [
                RankEnd(1, 0, 1, "DistBackendError: NCCL error: remote process exited or there was a network error"),
                RankEnd(0, 1, 1, f"DistBackendError: {WATCHDOG}"),
            ],
            30,
            K.CRASHED,
            0,
            "illegal memory access",
        ),
    ],
)
def test_cause(ends: list[RankEnd], step: int, kind: FailureKind, rank: int | None, text: str) -> None:
    started = 20 if step == 20 else 0
    failure = classify(ends, finished=False, started_step=started, step=step)
    assert (failure.kind, failure.rank) == (kind, rank)
    assert text in failure.cause


def test_finished() -> None:
    assert classify([], finished=True, started_step=0, step=9).kind is K.FINISHED


def test_fingerprints_tell_steps_and_errors_apart() -> None:
    def signature(error: str, step: int) -> str:
        return classify([RankEnd(0, 0, 1, error, "f.py:3")], finished=False, started_step=0, step=step).signature

    assert signature("ValueError: a", 3) == signature("ValueError: b", 3)
    assert signature("ValueError: a", 3) != signature("ValueError: a", 4)
    assert signature("ValueError: a", 3) != signature("KeyError: a", 3)


def test_an_error_that_names_a_network_library_is_told_from_a_lost_peer() -> None:
    """It was restarted ten times, as each time another rank might have been to blame."""
    end = RankEnd(0, 0, 1, "KeyError: 'gloo'", "f.py:3")
    assert classify([end], finished=False, started_step=0, step=23).signature != ""
    assert classify([end], finished=False, started_step=0, step=0).kind is K.BOOT


def test_what_would_be_passed_over_begins_after_the_snapshot() -> None:
    spike = RankEnd(0, 0, 1, "LossSpike: the loss of step 33 is a spike: 9")
    assert classify([spike], finished=False, started_step=30, step=33).window == (31, 33)
    assert classify([spike], finished=False, started_step=33, step=33).window == (33, 33)


def test_a_broken_connection_may_break_again_at_the_same_step() -> None:
    assert classify([RankEnd(0, 0, 1, PEER, "f.py:3")], finished=False, started_step=0, step=9).signature == ""
    abort = RankEnd(0, 0, -6, last_words="c10::DistBackendError: NCCL error: remote process exited")
    assert classify([abort], finished=False, started_step=0, step=9).signature == ""


ABORTED = """Map: 100%
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at listener.cc:63] false. accept: Invalid argument
Fatal Python error: Aborted

Thread 0x00007fac7a7fc6c0 (most recent call first):
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ABORTED, "gloo::EnforceNotMet: [enforce fail at listener.cc:63] false. accept: Invalid argument"),
        (
            ABORTED[: ABORTED.index("terminate")] + "Fatal Python error: Segmentation fault\n",
            "Fatal Python error: Segm",
        ),
        ("Map: 100%\n", None),
        ("x" * 400_000 + "\n" + ABORTED, "gloo::EnforceNotMet: [enforce"),
    ],
)
def test_what_an_aborted_process_leaves_is_the_cause(text: str, words: str | None, tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    assert read_last_words(log) is None
    log.write_text(text)
    found = read_last_words(log)
    assert found is None if words is None else found is not None and found.startswith(words)
    # torchrun tells one rank's exit status only.
    failure = classify([RankEnd(1, 0, last_words=found)], finished=False, started_step=0, step=9)
    assert (words or "died without an error message") in failure.cause and failure.kind is K.CRASHED


def test_an_abort_over_a_lost_connection_is_no_cause_where_there_is_one() -> None:
    abort = RankEnd(0, 0, last_words="c10::DistBackendError: NCCL error: remote process exited")
    failure = classify([abort, RankEnd(1, 1, 1, "ValueError: bad row")], finished=False, started_step=0, step=9)
    assert failure.rank == 1 and "bad row" in failure.cause


@pytest.mark.parametrize(
    "end", [RankEnd(1, 0, 1, "OutOfMemoryError: CUDA out of memory.", "model.py:7"), RankEnd(1, 0, -9)]
)
def test_memory_that_an_evaluation_lacks_is_not_the_micro_batchs(end: RankEnd) -> None:
    known: dict[str, Any] = {"finished": False, "started_step": 20, "step": 20, "kernel_oom_kills": 1}
    idle = classify([end], idle={1}, **known)
    assert idle.kind is K.MEMORY_OUTSIDE_STEPS and not idle.may_pass
    assert "per_device_eval_batch_size" in idle.cause and idle.signature.endswith("|20")
    # Another rank that waits in an evaluation says nothing.
    assert classify([end], idle={0}, **known).kind is K.OUT_OF_MEMORY
    other = RankEnd(1, 0, 1, "ValueError: bad row", "f.py:1")
    assert classify([other], idle={1}, **known).kind is K.CRASHED


def test_memory_that_runs_out_in_native_code_is_out_of_memory() -> None:
    end = RankEnd(1, 0, -6, last_words="std::bad_alloc: std::bad_alloc")
    assert classify([end], finished=False, started_step=0, step=9).kind is K.OUT_OF_MEMORY


def test_a_bad_step_that_is_seen_later_is_the_same_failure() -> None:
    first, second = (
        classify(
            [RankEnd(0, 0, 1, "NonFinite: the gradients of step 12 …", "a.py:1")],
            finished=False,
            started_step=0,
            step=step,
        )
        for step in (12, 13)
    )
    assert first.signature == second.signature != ""


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ((75, 75), K.PREEMPTED),
        ((None, 75), K.PREEMPTED),
        ((75, -15), K.PREEMPTED),
        ((-11, 75), K.CRASHED),
        ((1, 75), K.CRASHED),
    ],
)
def test_a_stop_unless_the_first_one_crashed(codes: tuple[int | None, int], kind: FailureKind) -> None:
    ends = [RankEnd(rank, rank, code) for rank, code in enumerate(codes)]
    assert classify(ends, finished=False, started_step=0, step=9).kind is kind


@pytest.mark.parametrize(("exit_code", "repeats"), [(-9, False), (-15, False), (None, False), (-11, True), (3, True)])
def test_only_the_programs_own_crash_has_a_fingerprint(exit_code: int | None, repeats: bool) -> None:
    failure = classify([RankEnd(0, 0, exit_code)], finished=False, started_step=0, step=7)
    assert bool(failure.signature) is repeats


@pytest.mark.parametrize(
    ("exit_code", "kills", "kind"), [(-9, 1, K.OUT_OF_MEMORY), (-9, 0, K.CRASHED), (-11, 1, K.CRASHED)]
)
def test_a_kill_by_the_kernel_for_want_of_memory(exit_code: int, kills: int, kind: FailureKind) -> None:
    failure = classify([RankEnd(1, 0, exit_code)], finished=False, started_step=0, step=7, kernel_oom_kills=kills)
    assert failure.kind is kind and not (failure.kind is K.OUT_OF_MEMORY and failure.signature)


@pytest.mark.parametrize(
    ("error", "started", "step", "may_pass"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried", 20, 20, True),
        ("OutOfMemoryError: CUDA out of memory. Tried", 20, 21, False),
        (f"RuntimeError: CUDA error: {BUSY}", 20, 25, True),
        ("RuntimeError: No CUDA GPUs are available", 0, 0, False),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use", 0, 0, True),
        ("AcceleratorError: CUDA error: initialization error", 20, 20, True),
        ("ValueError: no", 20, 20, False),
    ],
)
def test_what_may_pass_by_itself(error: str, started: int, step: int, may_pass: bool) -> None:
    failure = classify([RankEnd(0, 0, 1, error)], finished=False, started_step=started, step=step)
    assert failure.may_pass is may_pass
    assert failure.in_fork is (may_pass and ("fork" in error or "initialization" in error))
    assert Failure.from_dict(failure.to_dict()) == failure


SAID = [
    "hardware error",
    "No space left on device",
    "CUDA out of memory",
    "uncorrectable ECC error",
    "out of shared memory",
    "NoValidCheckpoint",
    "devices are busy or unavailable",
]


@pytest.mark.parametrize("text", SAID)
@pytest.mark.parametrize("name", ["KeyError", "ValueError", "AssertionError", "IndexError", "SystemExit", "TypeError"])
def test_what_a_scripts_own_fault_says_does_not_decide(name: str, text: str) -> None:
    """`KeyError('hardware error')` ended with 80 and kept the node out for a day; `ValueError` halved the batch."""
    end = RankEnd(0, 0, 1, f"{name}: '{text}'", "train.py:3")
    assert classify([end], finished=False, started_step=10, step=20).kind is K.CRASHED
    assert classify([end], finished=False, started_step=0, step=0).kind is K.BOOT


@pytest.mark.parametrize("text", SAID)
def test_a_text_of_the_programs_own_does_not_decide_whatever_its_type(text: str) -> None:
    error = f"RuntimeError: {text}"
    own, of_library = (RankEnd(0, 0, 1, error, "x.py:3", raised_by_program=said) for said in (True, False))
    assert classify([own], finished=False, started_step=10, step=20).kind is K.CRASHED
    if text != "NoValidCheckpoint":
        assert classify([of_library], finished=False, started_step=10, step=20).kind is not K.CRASHED


def test_whose_words_an_error_has(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text("def f(x):\n    raise RuntimeError(x)\ny = big @ big  # raise\n")
    file.write_text("{}")
    said = {line: raised_by_program("RuntimeError: x", f"{script}:{line}", file) for line in range(1, 6)}
    assert [line for line, own in said.items() if own] == [2]
    for error in (
        "OutOfMemoryError: x",
        "torch.OutOfMemoryError: x",
        "OSError: [Errno 28] No space left",
        "MemoryError:",
    ):
        assert not raised_by_program(error, f"{script}:2", file)
    for frame in (None, "<string>:1", "x"):
        assert not raised_by_program("RuntimeError: x", frame, file)
    # A library's, this project's, and one that is nowhere.
    library, ours = Path(pytest.__file__), Path(classify_module.__file__)
    (tmp_path / "site-packages").mkdir()
    users = tmp_path / "site-packages" / "x.py"
    users.write_text("raise RuntimeError\n")
    for place in (library.parent.parent / "_pytest/outcomes.py", ours.with_name("failure.py"), users):
        lines = place.read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith("raise"))
        assert not raised_by_program("RuntimeError: x", f"{place}:{number}", file)
    assert not raised_by_program("RuntimeError: x", f"{script}:2", tmp_path / "none")
    # What answers another exception may repeat its words.
    file.write_text("The above exception was the direct cause of the following exception")
    assert not raised_by_program("RuntimeError: x", f"{script}:2", file)


def test_error_files(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error_file(path) is None
    for damaged in ("", "[]", "{}", '{"message": 3}', '{"message": {"message": "x"}}'):
        path.write_text(damaged)
        assert read_error_file(path) is None
    callstack = 'Traceback\n  File "/a/b.py", line 3, in f\n  File "/c.py", line 44, in g\nValueError: x\n'
    path.write_text(
        json.dumps(
            {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": callstack, "timestamp": "12"}}}
        )
    )
    assert read_error_file(path) == ("ValueError: x", "/c.py:44", 12.0)


def test_a_text_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    """Such as the name of a file, from `os.listdir`. The restart state with it could not be read back, and another
    node took the message for damaged and its sender for lost.
    """
    path, name = tmp_path / "error.json", "caf\udce9.json"
    callstack = f'  File "/{name}", line 3, in f\n'
    extra = {"py_callstack": callstack, "timestamp": "12"}
    path.write_text(json.dumps({"message": {"message": f"RuntimeError: {name}", "extraInfo": extra}}))
    found = read_error_file(path)
    assert found == ("RuntimeError: caf\\udce9.json", "/caf\\udce9.json:3", 12.0)
    path.write_text(json.dumps({"message": name}))
    assert read_error_file(path) == ("caf\\udce9.json", None, None)


def test_an_error_file_without_a_traceback_has_its_text_alone(tmp_path: Path) -> None:
    """torchrun writes it for a rank that has left none itself."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "SignalException: killed"}))
    assert read_error_file(path) == ("SignalException: killed", None, None)
    extra = {"py_callstack": "no frames", "timestamp": "12"}
    path.write_text(json.dumps({"message": {"message": "E", "extraInfo": extra}}))
    assert read_error_file(path) == ("E", None, 12.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (THROWN.format(name="A", text="one") + THROWN.format(name="B", text="two"), "B: two"),
        ("Fatal Python error: Aborted\n" + THROWN.format(name="A", text="one"), "A: one"),
        ("Fatal Python error: Bus error\nmore\n", "Fatal Python error: Bus error"),
        ("said: Fatal Python error: not at the begin of a line\n", None),
        (THROWN.format(name="A", text="x" * 1000), "A: " + "x" * 297),
        ("", None),
    ],
)
def test_last_words(tmp_path: Path, text: str, words: str | None) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(text)
    assert read_last_words(log) == words


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A rank that prints for days leaves gigabytes."""
    log = tmp_path / "stderr.log"
    log.write_bytes(THROWN.format(name="A", text="one").encode() + b"\xff" * 300_000)
    assert read_last_words(log) is None


FRAMES = (
    '  File "/torch/worker.py", line 374, in _worker_loop\n    data = fetch(index)\n           ^^^^^\n'
    '  File "/job/train.py", line 14, in collate\n    raise ValueError("row is broken: 137")\n'
)


@pytest.mark.parametrize(
    ("name", "traceback", "error"),
    [
        ("ValueError", "ValueError: broken: 137\nin two lines\n", "ValueError: broken: 137\nin two lines"),
        ("AssertionError", "AssertionError\n", "AssertionError:"),
        ("ParserError", 'yaml.ParserError: bad\n  File "a", line 3\n\n', 'yaml.ParserError: bad\n  File "a", line 3'),
        ("RecursionError", "  [Previous line repeated 9 more times]\nRecursionError: deep\n", "RecursionError: deep"),
    ],
)  # fmt: skip
def test_the_error_of_a_data_loaders_worker_is_its_own(name: str, traceback: str, error: str, tmp_path: Path) -> None:
    """The last line of the console is cut long before the end of its traceback."""
    message = (
        f"{name}: Caught {name} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{FRAMES}"
    )
    extra = {"py_callstack": '  File "/torch/dataloader.py", line 1, in next', "timestamp": "7"}
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": message + traceback, "extraInfo": extra}}))
    assert read_error_file(path) == (f"{error} (in DataLoader worker process 0)", "/job/train.py:14", 7.0)
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    assert read_error_file(path) == (message, "/torch/dataloader.py:1", 7.0), "cut"


def test_a_program_that_has_trained_without_heartbeats_has_not_failed_at_its_start() -> None:
    end = RankEnd(0, 0, 1, "ValueError: a", "f.py:3")
    assert classify([end], finished=False, started_step=0, step=0, has_stepped=True).kind is K.CRASHED


def test_a_damaged_checkpoint_of_a_program_is_retried_each_time() -> None:
    """It was quarantined: the next attempt finds another one, damaged or not."""
    end = RankEnd(0, 0, 1, "DamagedCheckpoint: /ck/step-15: a was altered", "f.py:3")
    found = classify([end], finished=False, started_step=0, step=0)
    assert (found.kind, found.signature) == (K.CRASHED, "")
