"""Which tier a test belongs to, and the table of what was not run.

| tier | what |
|---|---|
| `fast` | `tests/unit` and `tests/contract`, on local disks and in memory |
| `process` | real launches of process groups, and models of the commit protocol |
| `system` | whatever needs a part of the machine: an S3 server, Slurm, namespaces, a browser, ... |
| `soak` | campaigns and explorations that find more the longer they run; never by default |

A test has exactly one tier: that of its marker, else `system` if it needs such a part, else that of its folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from infra.parts import PARTS, part_of, require

TIERS = ("fast", "process", "system", "soak")
_ROOT = Path(__file__).parents[1]
_FOLDERS = {"unit": "fast", "contract": "fast"}
# Fixtures that start a part. A parameter of that name may ask for one, too.
_FIXTURES = {
    "radosgw_s3": "radosgw",
    "radosgw": "radosgw",
    "rclone_s3": "rclone",
    "rclone": "rclone",
    "wire": "network namespaces",
    "browser": "chromium",
    "small_memory": "memory cgroup",
    "little_memory": "memory cgroup",
}


def parts_of(item: pytest.Item) -> list[str]:
    """The parts that a test needs, as far as that is known before it runs."""
    named = [str(marker.args[0]) for marker in item.iter_markers("needs")]
    parameters = getattr(item, "callspec", None)
    values = [value for value in (parameters.params.values() if parameters else ()) if isinstance(value, str)]
    fixtures = [_FIXTURES[name] for name in (*getattr(item, "fixturenames", ()), *values) if name in _FIXTURES]
    return list(dict.fromkeys([*named, *fixtures]))


def tier_of(item: pytest.Item) -> str:
    """The tier of a test; see the module's table."""
    marked = [name for name in TIERS if item.get_closest_marker(name)]
    if len(marked) > 1:
        raise pytest.UsageError(f"{item.nodeid}: a test has one tier, not {' and '.join(marked)}")
    if marked:
        return marked[0]
    if any(PARTS[part].system for part in parts_of(item)):
        return "system"
    path = item.path.relative_to(_ROOT) if item.path.is_relative_to(_ROOT) else item.path
    return _FOLDERS.get(path.parts[0], "process")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier, before `-m` selects."""
    for item in items:
        tier = tier_of(item)
        if not item.get_closest_marker(tier):
            item.add_marker(tier)
        # One worker of `pytest -n` has the cluster: a second one would cost more than it brings.
        if "radosgw" in parts_of(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("radosgw"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a missing part before any of its fixtures is made."""
    for part in parts_of(item):
        require(part)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was not run, and how to get it."""
    reports = terminalreporter.stats.get("skipped", [])
    rows = table([str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)])
    if rows:
        terminalreporter.section("not run here")
        terminalreporter.write_line("\n".join(rows))


def table(reasons: Iterable[str]) -> list[str]:
    """Return the lines of a table: missing part, number of tests that were skipped without it, how to get it."""
    parts: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for reason in reasons:
        part = part_of(reason)
        if part is None:
            others[reason.removeprefix("Skipped: ")] += 1
        else:
            parts[part] += 1
    rows = [("missing", "tests", "how to get it")]
    rows += [(name, str(number), PARTS[name].remedy()) for name, number in sorted(parts.items())]
    rows += [("-", str(number), reason) for reason, number in sorted(others.items())]
    if len(rows) == 1:
        return []
    name_width, number_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{name_width}}  {number:>{number_width}}  {remedy}" for name, number, remedy in rows]
