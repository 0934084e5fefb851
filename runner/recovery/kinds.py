"""The table of failure classes: how each is recognised, what is done about it, and what it costs.

To add a class, add a member to `FailureKind`. Classification, policy, ledger and documentation read the table; run
``scripts/render-reference`` afterwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from runner.errors import ExitCode

# Of these types it is a fault of the script or of the installation, whatever its text names.
_OWN_FAULTS = {
    "ArithmeticError",
    "AssertionError",
    "AttributeError",
    "FileExistsError",
    "FileNotFoundError",
    "ImportError",
    "IndentationError",
    "IndexError",
    "IsADirectoryError",
    "JSONDecodeError",
    "KeyError",
    "LookupError",
    "ModuleNotFoundError",
    "NameError",
    "NotADirectoryError",
    "NotImplementedError",
    "OverflowError",
    "PermissionError",
    "RecursionError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
    "UnicodeDecodeError",
    "UnicodeEncodeError",
    "ValueError",
    "ZeroDivisionError",
}
_TYPE = re.compile(r"(?:rank \d+: )?(?:\w+\.)*(\w+):")


class Action(Enum):
    """What the policy does about an ended attempt."""

    FINISH = auto()  # End the run: nothing is left to do.
    STOP = auto()  # End the run: it was asked to stop.
    END = auto()  # End the run with the class's exit code, also while a stop is requested.
    GIVE_UP = auto()  # End the run with the class's exit code, unless a stop was requested.
    RESTART = auto()  # Start the next attempt; the second time with the same signature, end the run as deterministic.
    SKIP = auto()  # As RESTART; the second time with the same signature, skip the steps that lead to it.
    HALVE = auto()  # Start the next attempt with half the micro-batch.
    RETRY = auto()  # Start the next attempt after a delay, up to the class's own number of times.
    CONTINUE = auto()  # Start the next attempt: nothing has failed.


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str  # Of the class, in journals.
    known_by: str  # How the class is recognised, for the documentation.
    response: str  # What is done about it, for the documentation.
    action: Action = Action.RESTART  # What the policy does.
    # Exit code of a run that this class ends, at once or when its own bound is spent; None if such a run ends
    # with the budget's exit codes.
    exit_code: ExitCode | None = None
    # Whether it counts against `restart.max_restarts`, also when the run is started again later.
    costs_budget: bool = True
    is_failure: bool = True  # Whether something went wrong; False for an end that was wanted.
    # Matches the text of a rank's exception, or of its last words, that means this class.
    error: re.Pattern[str] | None = None
    examples: tuple[str, ...] = ()  # Errors that `error` matches, in the words of the systems that raise them.
    advice: str = ""  # Appended to the cause of a failure that `error` matched.
    reason: str = "{cause}"  # Why the run ends; `{cause}` is replaced.
    # 0 for a class that is always a cause. Of several nodes' failures the lowest one is the cause.
    effect_rank: int = 0


def _orderly(name: str, known_by: str, response: str, action: Action, **fields: Any) -> Rule:
    """Return the rule of an end that is no failure, and costs nothing."""
    return Rule(name, known_by, response, action, costs_budget=False, is_failure=False, **fields)


class FailureKind(Enum):
    """How an attempt can end; the first class whose `error` matches is the one that a rank's exception belongs to."""

    rule: Rule

    def __new__(cls, rule: str | Rule) -> FailureKind:
        """Create a member whose value is its name in journals."""
        assert isinstance(rule, Rule)
        member = object.__new__(cls)
        member._value_ = rule.name
        member.rule = rule
        return member

    FINISHED = _orderly(
        "finished",
        known_by="all ranks exited with status 0; after a stop request, only once their last step is done",
        response="end the run",
        action=Action.FINISH,
        exit_code=ExitCode.DONE,
    )
    PREEMPTED = _orderly(
        "preempted",
        known_by="all ranks agreed on a stop request and exited with status 75 after the commit; or with 0 before "
        "their last step, after a stop request",
        response="end the run; the same command continues it",
        action=Action.STOP,
        exit_code=ExitCode.PREEMPTED,
    )
    ENDED = _orderly(
        "ended at once",
        known_by="a second stop request, the end of `--grace`, or a stop request with nothing to save yet",
        response="end the run; the same command continues it",
        action=Action.STOP,
        exit_code=ExitCode.PREEMPTED,
        effect_rank=4,
    )
    NODES_CHANGED = _orderly(
        "nodes changed",
        known_by="the leader of an elastic run paused the ranks, as a node is about to leave or has come",
        response="continue at once on the nodes that there are",
        action=Action.CONTINUE,
    )
    OUTPACED = _orderly(
        "outpaced",
        known_by="the agent may no longer write, but this node leads: a leader that was only slow has begun an "
        "attempt of the same number since",
        response="continue at once with the next number",
        action=Action.CONTINUE,
    )
    NO_VALID_CHECKPOINT = Rule(
        "no valid checkpoint",
        known_by="checkpoints exist and none of them is valid",
        response="end the run",
        action=Action.END,
        exit_code=ExitCode.NO_VALID_CHECKPOINT,
        error=re.compile(r"^NoValidCheckpoint"),
        examples=("NoValidCheckpoint: none of 3 checkpoints is valid",),
    )
    FENCED = Rule(
        "fenced",
        known_by="the agent may no longer write: a newer attempt of this run has begun elsewhere",
        response="end this runner at once",
        action=Action.END,
        exit_code=ExitCode.DETERMINISTIC,
    )
    SHARED_MEMORY_FULL = Rule(
        "shared memory full",
        known_by="the error's text: no space in /dev/shm, through which workers and GPUs exchange data",
        response="restart; exit 78 for the same error at the same step twice in a row",
        error=re.compile(
            r"(?s)out of shared memory|(/dev/shm|shared memory|</?torch_\d).*No space left on device"
            r"|No space left on device.*(/dev/shm|shared memory|/torch_\d)"
        ),
        advice="; make /dev/shm larger (docker run --shm-size=16g; a volume of medium Memory on Kubernetes)",
        examples=(
            "RuntimeError: unable to write to file </torch_123_456_0>: No space left on device (28)",
            "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
            "DistBackendError: NCCL error: Error while creating shared memory segment /dev/shm/nccl-x (size 9), "
            "error: No space left on device (28)",
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit",
        ),
    )
    STORAGE_FAILED = Rule(
        "storage failed",
        known_by="`checkpoint.max_failed_saves` failed saves in a row, or a rank that met a full disk",
        response="end at an agreed step; make room or repair the storage, then start the run again",
        action=Action.END,
        exit_code=ExitCode.STORAGE_FAILED,
        # Python's words, and Rust's (tokenizers, safetensors).
        error=re.compile(r"No space left on device|Disk quota exceeded|\(os error (28|122)\)|\[Errno (28|122)\]"),
        advice="; make room, then start again",
        examples=(
            "OSError: [Errno 28] No space left on device: '/out/logs'",
            "OSError: [Errno 122] Disk quota exceeded: '/out/logs'",
            "SafetensorError: I/O error (os error 28)",
        ),
    )
    OUT_OF_MEMORY = Rule(
        "out of memory",
        known_by="the error's text; or SIGKILL while the cgroup's count of the kernel's OOM kills grew",
        response="restart with half the micro-batch and twice the accumulation, on all nodes; exit 78 when nothing "
        "is left to halve. Before an attempt's first step it is retried once unchanged",
        action=Action.HALVE,
        exit_code=ExitCode.DETERMINISTIC,
        # Halving is bounded by itself.
        costs_budget=False,
        # Of the device, of the host, and of a process that has reached its limit.
        error=re.compile(
            r"OutOfMemoryError|out of memory|^MemoryError|bad_alloc|can.t allocate memory|Cannot allocate memory"
            r"|CUBLAS_STATUS_ALLOC_FAILED",
            re.IGNORECASE,
        ),
        examples=(
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "MemoryError: ",
            "std::bad_alloc: std::bad_alloc",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory",
            "OSError: [Errno 12] Cannot allocate memory",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        ),
    )
    MEMORY_OUTSIDE_STEPS = Rule(
        "out of memory outside steps",
        known_by="as out of memory, but no training step ran: an evaluation, a callback between steps",
        response="restart as it is, since smaller micro-batches would not help; exit 78 for the second time at the "
        "same step. Choose a smaller `per_device_eval_batch_size`, or fewer `eval_accumulation_steps`",
        advice=", in an evaluation, or something else between training steps: the micro-batch is not at fault. Choose "
        "a smaller per_device_eval_batch_size, fewer eval_accumulation_steps, or prediction_loss_only",
    )
    BAD_NODE = Rule(
        "bad node",
        known_by="the error's text: ECC errors, a lost GPU, a driver that does not work; memory that changed twice "
        "under a snapshot; ranks that survive SIGKILL; in an elastic run, ranks that stay slow",
        response="end the run here; start it on another node",
        action=Action.GIVE_UP,
        exit_code=ExitCode.BAD_NODE,
        error=re.compile(
            r"uncorrectable (ECC|NVLink) error|ECC error|GPU (has )?fallen off the bus|device is lost"
            r"|hardware error|CUDA driver version is insufficient|Unable to determine the device handle"
            r"|system not yet initialized|nvmlInit.*fail|devices?(\(s\))? (is/)?are busy or unavailable|GPU is lost"
            r"|No CUDA GPUs are available|CUDA unknown error",
            re.IGNORECASE,
        ),
        reason="this node is at fault; start the run on another one: {cause}",
        examples=(
            "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            "AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
            "RuntimeError: GPU has fallen off the bus",
            "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "RuntimeError: Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error",
            "RuntimeError: GPU is lost. Reboot the system to recover this GPU",
            "RuntimeError: CUDA error: an ECC error was encountered",
            "RuntimeError: No CUDA GPUs are available",
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
            "RuntimeError: CUDA error: system not yet initialized",
            "RuntimeError: nvmlInit_v2() failed: Driver Not Loaded",
            "RuntimeError: CUDA error: the device is lost",
            "RuntimeError: CUDA error: hardware error",
        ),
    )
    NON_FINITE = Rule(
        "non-finite gradients",
        known_by="the norm of a step's gradients, or a number of its parameters or optimizer state, is NaN or "
        "infinite; nothing of that step is kept",
        response="restart from the snapshot before it; the second time at the same step, skip the steps from the "
        "snapshot to it, `guards.max_skipped_windows` times at most, then exit 78",
        action=Action.SKIP,
        exit_code=ExitCode.DETERMINISTIC,
    )
    SPIKE = Rule(
        "loss spike",
        known_by="modified z-score of the step's mean loss against the last 64 (`guards.spike_zscore`; off by default)",
        response="as for non-finite gradients",
        action=Action.SKIP,
        exit_code=ExitCode.DETERMINISTIC,
    )
    HUNG = Rule(
        "hung",
        known_by="no heartbeat within the deadline of the rank's phase, or a process that was stopped (SIGSTOP)",
        response="write the stacks of all ranks to `logs/attempt-N/`, then restart",
        effect_rank=2,
    )
    NETWORK = Rule(
        "network failure",
        known_by="a rank's exception, or one that it follows from: a connection, time-out or name look-up that "
        "failed, HTTP 408, 425, 429 or 5xx, or a volume that does not work (a stale handle, an I/O error)",
        response="restart after a delay, also before the first step, `restart.max_network_retries` times at most "
        "without a new checkpoint",
        action=Action.RETRY,
        exit_code=ExitCode.BUDGET_SPENT,
        costs_budget=False,
    )
    LIMITED = Rule(
        "machine limit",
        known_by="a rank, or a process of the runner's, that cannot start a thread or a process, or open a file",
        response="restart after a delay, also before the first step, `restart.max_network_retries` times at most "
        "without a new checkpoint; the cause names the limit, and what it is",
        action=Action.RETRY,
        exit_code=ExitCode.BUDGET_SPENT,
        costs_budget=False,
        error=re.compile(
            r"^RuntimeError: can't start new thread|^BlockingIOError: \[Errno 11\]"
            r"|(\[Errno (23|24)\]|RuntimeError:) Too many open files|Failed to init uv loop|pthread_create"
        ),
        examples=(
            "RuntimeError: can't start new thread",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            "OSError: [Errno 24] Too many open files: '/data/train.parquet'",
            "DistStoreError: Failed to init uv loop. Error code: -24",
            "terminate called after throwing: pthread_create failed: Resource temporarily unavailable",
        ),
    )
    BOOT = Rule(
        "boot failure",
        known_by="any other Python error before the first step",
        response="end the run: it would fail again",
        action=Action.GIVE_UP,
        exit_code=ExitCode.DETERMINISTIC,
        reason="{cause}; failed before the first step, not retried",
    )
    CRASHED = Rule(
        "crashed",
        known_by="the first failing rank: a signal, an error in mid-training; lost connections are its effects",
        response="restart: at once after a first failure, then with backoff; exit 78 for the same error at the "
        "same step twice in a row",
        effect_rank=3,
    )
    AGENT_LOST = Rule(
        "checkpoint agent lost",
        known_by="the agent died, was stopped, or did not answer for 2 minutes",
        response="start it again, then the next attempt",
    )
    LAUNCHER_LOST = Rule(
        "launcher lost",
        known_by="the launcher died, was stopped, or did not end with its ranks",
        response="start it again, then the next attempt",
    )
    NODE_LOST = Rule(
        "node lost",
        known_by="the connection to a node ended, or it was silent for 10 s",
        response="end the attempt on all nodes; continue at once if `launch.min_nodes` are left, else when the "
        "node is back; exit 76 if it does not come within `launch.rendezvous_timeout_s`",
        effect_rank=1,
    )
    RUNNER_LOST = Rule(
        "runner lost",
        known_by="the restart state says that an attempt was running when this runner started",
        response="count a failure, so that a pod that is always killed does not restart without end",
    )

    @property
    def is_orderly(self) -> bool:
        """Whether training ended as it should: finished, or stopped with everything saved."""
        return self in (FailureKind.FINISHED, FailureKind.PREEMPTED)


def is_own_fault(error: str) -> bool:
    """Return whether an error, `Type: text`, is by its type a fault of the script or of the installation."""
    found = _TYPE.match(error)
    return found is not None and found[1] in _OWN_FAULTS


def kind_of_error(error: str) -> FailureKind | None:
    """Return the class that an error alone identifies; None if there is none.

    The text of a script's own fault says nothing: a `KeyError` may name any key.
    """
    if is_own_fault(error) or error.startswith("SystemExit:"):
        return None
    return next((kind for kind in FailureKind if kind.rule.error is not None and kind.rule.error.search(error)), None)


def is_failure(kind: str) -> bool:
    """Return whether the end of an attempt, as journals name it, is a failure.

    The name may be of another version, or of an attempt whose end was not recorded.
    """
    known = FailureKind._value2member_map_.get(kind)
    return known.rule.is_failure if isinstance(known, FailureKind) else True
