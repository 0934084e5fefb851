"""A failure as a value: its JSON, whether it is a cause or an effect, and one cause from those of several nodes."""

from __future__ import annotations

from typing import Any

import pytest

from runner.recovery.failure import Failure, combine, is_effect, read_window
from runner.recovery.kinds import FailureKind

K = FailureKind
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
FULL = Failure(FailureKind.SPIKE, "why", 3, 7, "print", (5, 7), may_pass=True, in_fork=True)


@pytest.mark.parametrize("failure", [FULL, *(Failure(kind, "why") for kind in FailureKind)])
def test_it_survives_json(failure: Failure) -> None:
    assert Failure.from_dict(failure.to_dict()) == failure
    assert failure.to_dict()["kind"] == failure.kind.value


def test_what_an_older_version_wrote_is_read() -> None:
    """Before windows, and before `may_pass` and `in_fork`."""
    old = {"kind": "crashed", "cause": "why", "rank": None, "step": 7, "fingerprint": ""}
    assert Failure.from_dict(old) == Failure(FailureKind.CRASHED, "why", None, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "of a newer version"},
        {"cause": "\udcff"},
        {"step": None},
        {"rank": "first"},
        {"window": [7]},
        {"window": [7, 5]},
        {"step": float("inf")},
    ],
)
def test_anything_else_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        Failure.from_dict({**FULL.to_dict(), **wrong})


@pytest.mark.parametrize("window", [(0, 5), (5, 4), (1, 2**53), (True, 5), (1.0, 2), "ab", (1, 2, 3)])
def test_windows_are_of_steps(window: Any) -> None:
    assert read_window([5, 5]) == (5, 5)
    with pytest.raises((ValueError, TypeError)):
        read_window(window)


@pytest.mark.parametrize(
    ("error", "effect"),
    [
        ("RuntimeError: Connection closed by peer", True),
        ("DistBackendError: NCCL error: remote process exited", True),
        ("AgentUnavailable: the agent is gone", True),
        # NCCL's watchdog reports the rank's own fault.
        ("DistBackendError: NCCL watchdog: CUDA error: an illegal memory access was encountered", False),
        ("ValueError: bad row", False),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("gloo::EnforceNotMet: [enforce fail at listener.cc:63] false. accept: Invalid argument", True),
        ("RuntimeError: ProcessGroupNCCL.cpp:2 ncclRemoteError", True),
        ("TimeoutError: The client socket has timed out", True),
        # Words of a script's own.
        ("RuntimeError: no label igloo", False),
        # Of a type that no lost connection has, whatever it says.
        ("KeyError: 'gloo'", False),
        ("ImportError: libnccl.so.2: cannot open shared object file", False),
        ("TypeError: __init__() got an unexpected keyword argument 'timeout'", False),
        ("ValueError: timeout option should be non-negative", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/gloo.json'", False),
        ("json.decoder.JSONDecodeError: Expecting value: /data/nccl.json", False),
        ("rank 3: KeyError: 'gloo'", False),
        ("rank 3: RuntimeError: [gloo] Connection closed by peer", True),
        # Not a type of its own.
        ("MyKeyErrorLog: connection reset by peer", True),
    ],
)
def test_effects(error: str, effect: bool) -> None:
    assert is_effect(error) is effect


def test_a_crash_by_its_own_error_is_a_cause() -> None:
    crash = Failure(FailureKind.CRASHED, "rank 0: ValueError: bad row")
    cut_off = Failure(FailureKind.CRASHED, "rank 0: RuntimeError: Connection reset by peer")
    assert crash.effect_rank == 0 < Failure(FailureKind.NODE_LOST, "why").effect_rank < cut_off.effect_rank


def test_the_step_is_added_later() -> None:
    assert FULL.at_step(9) == Failure(FailureKind.SPIKE, "why", 3, 9, "print", (5, 7), may_pass=True, in_fork=True)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([K.FINISHED, K.FINISHED], K.FINISHED),
        ([K.PREEMPTED, K.PREEMPTED], K.PREEMPTED),
        ([K.FINISHED, K.PREEMPTED], K.PREEMPTED),
        ([K.FINISHED, K.NODE_LOST], K.NODE_LOST),
        ([K.ENDED, K.CRASHED], K.CRASHED),
        ([K.ENDED, K.NODE_LOST], K.NODE_LOST),
        ([K.NODE_LOST, K.OUT_OF_MEMORY], K.OUT_OF_MEMORY),
        ([K.HUNG, K.ENDED], K.HUNG),
        ([K.HUNG, K.NODE_LOST], K.NODE_LOST),
        ([K.HUNG, K.CRASHED], K.CRASHED),
        ([K.ENDED, K.BAD_NODE, K.ENDED], K.BAD_NODE),
        ([K.PREEMPTED, K.ENDED], K.ENDED),
    ],
)
def test_of_several_nodes_the_cause_takes_precedence_over_its_effects(
    kinds: list[FailureKind], expected: FailureKind
) -> None:
    failures = [Failure(kind, str(number), number, number) for number, kind in enumerate(kinds)]
    combined = combine(failures)
    assert combined.kind is expected and combined.step == len(kinds) - 1
    assert combined.cause in [str(number) for number, kind in enumerate(kinds) if kind is expected]


def test_a_lost_node_explains_a_lost_connection_and_a_rank_of_its_own_fault_both() -> None:
    effect = Failure(K.CRASHED, PEER, 0, 5)
    assert combine([effect, Failure(K.NODE_LOST, "node 1 is gone", None, 0)]).kind is K.NODE_LOST
    assert combine([effect, Failure(K.CRASHED, "rank 2: ValueError: x", 2, 5)]).rank == 2


def test_one_node_is_its_own_cause() -> None:
    failure = Failure(K.CRASHED, "rank 0: ValueError: x", 0, 5, "print", (3, 5), may_pass=True)
    assert combine([failure]) == failure
