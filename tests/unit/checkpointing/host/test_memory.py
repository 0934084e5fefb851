from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest
from infra.parts import lacks

from checkpointing.host import memory
from checkpointing.host.memory import available_bytes, interleaved, parse_bytes
from checkpointing.host.shared_memory import SharedMemory


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1024", 1024), ("2GB", 2 * 10**9), ("2 GiB", 2 * 2**30), ("8Gi", 8 * 2**30), ("1.5mib", 3 * 2**19)],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "3 apples", "1e9"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        parse_bytes(text)


def test_there_is_memory() -> None:
    assert 10**7 < available_bytes() < 10**15


def policy() -> int:
    """This thread's, as the kernel has it (3: interleave)."""
    call, mode = memory._POLICY_CALLS[platform.machine()][0], ctypes.c_int()
    if ctypes.CDLL(None).syscall(call, ctypes.byref(mode), None, 0, None, 0) != 0:
        lacks("memory policy", "get_mempolicy failed")
    return mode.value


def test_arenas_lie_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there are several is all that is assumed here: the kernel's own answers do for the rest."""
    seen, fallocate = [], os.posix_fallocate

    def watched(*args: int) -> None:
        seen.append(policy())
        fallocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    for is_several in (False, True):
        monkeypatch.setattr(memory, "_has_several", lambda nodes, answer=is_several: answer)
        SharedMemory.create("test", 1 << 20).close()
    assert (seen, policy()) == ([0, 3], 0)


def test_a_policy_that_the_process_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_has_several", lambda nodes: True)
    seen = []

    def with_own_policy() -> None:
        preferred_local = 4  # numactl --localalloc
        call = memory._POLICY_CALLS[platform.machine()][1]
        assert ctypes.CDLL(None).syscall(call, preferred_local, None, 0) == 0
        with interleaved():
            seen.append(policy())
        seen.append(policy())

    policy()
    # A policy is a thread's.
    thread = threading.Thread(target=with_own_policy)
    thread.start()
    thread.join()
    assert seen == [4, 4]


@pytest.mark.parametrize(("mask", "is_several"), [([0b1], False), ([0b11], True), ([1, 1], True), ([0, 0], False)])
def test_nodes_are_counted_in_the_whole_mask(mask: list[int], is_several: bool) -> None:
    assert memory._has_several(mask) is is_several
