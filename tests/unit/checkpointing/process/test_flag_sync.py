"""Flags over a real process group: all ranks receive them at the same call, whichever rank set them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing.process.ranks import Flag, FlagSync

SCRIPT = """
import json, os, sys
import torch.distributed as dist
from checkpointing.process.ranks import FlagSync, Flag
rank, plan = int(os.environ["RANK"]), json.loads(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "group", rank=rank, world_size=2)
flag_sync, seen = FlagSync(dist.new_group(backend="gloo")), []
for call, asked in enumerate(plan["calls"]):
    flags = {Flag[name] for name in asked.get(str(rank), [])}
    agreed = flag_sync.exchange(lambda: (flags, plan["intervals"][rank]), now=call in plan["now"])
    seen.append(sorted(flag.name for flag in agreed))
seen.append(sorted(flag.name for flag in flag_sync.drain()))
open(sys.argv[2] + str(rank), "w").write(json.dumps(seen))
dist.destroy_process_group()
"""


def agree(folder: Path, calls: list[dict[str, list[str]]], intervals: list[int], now: list[int]) -> list[list[str]]:
    """What both ranks have seen at each call, and at the end."""
    plan = json.dumps({"calls": calls, "intervals": intervals, "now": now})
    command = [sys.executable, "-c", SCRIPT, plan, str(folder / "seen.")]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in (0, 1)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    seen: list[Any] = [json.loads((folder / f"seen.{rank}").read_text()) for rank in (0, 1)]
    assert seen[0] == seen[1]
    return seen[0]  # type: ignore[no-any-return]


@pytest.mark.process
@pytest.mark.parametrize("who", ["0", "1"])
def test_a_flag_of_one_rank_reaches_all_at_the_next_call(who: str, tmp_path: Path) -> None:
    calls = [{}, {who: ["STOP"]}, {}, {"0": ["SAVE"], "1": ["SNAPSHOT"]}, {}]
    assert agree(tmp_path, calls, [1, 1], []) == [[], [], ["STOP"], [], ["SAVE", "SNAPSHOT"], []]


@pytest.mark.process
def test_short_steps_are_left_out_alike_and_what_is_asked_again_is_heard(tmp_path: Path) -> None:
    # Exchanged at calls 0, 3 and 6; only rank 0 proposes, as in training.
    calls = [{}, {"1": ["STOP"]}, {"1": ["STOP"]}, {"1": ["STOP"]}, {}, {}, {}, {}]
    assert agree(tmp_path, calls, [3, 1], []) == [[], [], [], [], ["STOP"], [], [], [], []]


@pytest.mark.process
def test_now_is_now(tmp_path: Path) -> None:
    calls = [{}, {"0": ["STOP"]}, {}, {}]
    assert agree(tmp_path, calls, [10, 1], [1]) == [[], [], ["STOP"], [], []]


def test_alone() -> None:
    flag_sync = FlagSync(None)
    assert flag_sync.exchange(lambda: ({Flag.SAVE}, 2)) == set()
    assert flag_sync.exchange(lambda: ({Flag.STOP}, 1)) == {Flag.SAVE}
    assert flag_sync.exchange(lambda: ({Flag.STOP}, 1)) == set()
    assert flag_sync.drain() == {Flag.STOP} and flag_sync.drain() == set()
