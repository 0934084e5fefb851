"""A real memory cgroup, whose limit is lowered under a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from infra.parts import lacks

from runner.chaos.memory_group import MemoryGroup

# Takes 64 MiB more with each line.
PROCESS = """
import sys
taken = []
print("ready", flush=True)
for line in sys.stdin:
    taken.append(bytearray(b"x") * (64 << 20))
    print("taken", flush=True)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        group = MemoryGroup()
    except OSError as error:
        lacks("memory cgroup", error)
    yield group
    group.close()


def test_who_needs_more_is_ended_and_only_while_the_limit_stands(group: MemoryGroup) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        keys, words = process.stdin, process.stdout
        assert keys is not None and words is not None
        group.enter(process.pid)

        def take() -> str:
            keys.write("\n")
            keys.flush()
            return words.readline().strip()

        assert words.readline().strip() == "ready"
        with group.limited(256 << 20):
            assert take() == "taken"
        with group.limited(256 << 20):
            assert [take() for _ in range(2)] == ["taken", "taken"]
        assert take() == "taken" and group.num_kills == 0
        with group.limited(0):
            assert take() == ""
        assert group.num_kills == 1 and process.wait(120) == -9
