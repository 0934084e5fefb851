"""The table, the last line and the JSON of a campaign."""

from __future__ import annotations

from runner.chaos.verdict import Injection, Result, render, rows, to_json


def result() -> Result:
    injections = [
        Injection("rank killed", "step", 1, 10, "SIGKILL", recovered_s=1.0),
        Injection("rank killed", "save", 1, 20, "SIGKILL", recovered_s=3.0),
        Injection("disk full", "step", 2, 30, "full"),
    ]
    skipped = {"clock jumps by an hour": (2, "no C compiler")}
    return Result(injections, skipped, runs=2, identical=2, lost_steps=5, steps=50, total_s=12.3)


def test_a_row_for_each_fault() -> None:
    assert [(row["fault"], row["injected"], row["recovered_s"], row["skipped"]) for row in rows(result())] == [
        ("rank killed", 2, 2.0, 0),
        ("disk full", 1, None, 0),
        ("clock jumps by an hour", 0, None, 2),
    ]


def test_a_campaign_that_passed() -> None:
    lines = render(result(), 7).splitlines()
    assert "2 times not applicable: no C compiler" in lines[3]
    assert lines[-1] == (
        "3 faults in 2 runs of 50 steps (seed 7, 12 s): 0 violations, 2 of 2 runs bit-identical to the fault-free run, "
        "5 steps recomputed"
    )
    assert result().passed and to_json(result(), 7)["identical"]


def test_a_halved_micro_batch_is_within_its_tolerance() -> None:
    found = result()
    found.identical, found.close = 1, 1
    assert found.passed and to_json(found, 7)["identical"]
    assert "1 with a halved micro-batch and losses within 2%" in render(found, 7)


def test_a_nondeterministic_job_is_never_identical() -> None:
    found = result()
    found.nondeterministic = True
    assert found.passed and not to_json(found, 7)["identical"]
    assert "2 of 2 runs within 0.001 of the fault-free run" in render(found, 7)


def test_a_violation_or_a_difference_fails() -> None:
    found = result()
    found.injections[0].violations.append("no recovery")
    assert not found.passed
    assert "VIOLATION: run 1, rank killed at step 10: no recovery" in render(found, 7)
    found = result()
    found.identical, found.differences = 1, ["run 2: model.safetensors: other bytes"]
    assert not found.passed and "DIFFERENT: run 2: model.safetensors" in render(found, 7)
