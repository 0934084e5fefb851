"""A report of a run that five different faults struck, in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from integration.support import RUNNER, SHORT_JOB, Run, wait_until

EPOCHS = 3
# One run, and one browser, for all of them.
pytestmark = pytest.mark.xdist_group("report")


def at_work(run: Run, attempt: int) -> None:
    wait_until(run, lambda: any(event["attempt"] == attempt for event in run.events("log")))


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Killed rank, stopped rank, killed agent, preemption, killed supervisor; then it ends."""
    folder = tmp_path_factory.mktemp("report") / "run"
    options = ["--set", f"trainer.num_train_epochs={EPOCHS}", "--set", "cost.price_per_hour=36"]
    run = Run(folder, *SHORT_JOB, *options, "--set", "cost.spot_discount=0.5").start()
    at_work(run, 1)
    os.kill(run.rank_pid(1), signal.SIGKILL)
    at_work(run, 2)
    os.kill(run.rank_pid(0), signal.SIGSTOP)
    at_work(run, 3)
    os.kill(run.agent_pid(), signal.SIGKILL)
    at_work(run, 4)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    run.start()
    at_work(run, 5)
    run.signal(signal.SIGKILL)
    run.finish()
    assert run.start().finish() == 0, run.output
    return run


@pytest.fixture(scope="module")
def report(struck: Run) -> Path:
    done = subprocess.run([*RUNNER, "report", str(struck.folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    path = struck.folder / "report.html"
    assert str(path) in done.stdout
    return path


@pytest.fixture
def opened(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, as it is seen with a device's options; it asked the network for nothing, and nothing went wrong."""
    context = browser.new_context(**getattr(request, "param", {}))
    page = context.new_page()
    troubles: list[str] = []
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(("file:", "data:", "blob:")) else troubles.append(asked.url),
    )
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(report.as_uri())
    yield page
    assert not troubles
    context.close()


def by_hand(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by group, another way than the ledger's: each stretch between two events, by what was going on then."""
    groups = {"steps": 0.0, "before steps": 0.0, "after steps": 0.0, "nobody": 0.0}
    ends = {event["attempt"]: event for event in events if event["event"] == "attempt_ended"}
    # The ranks' own times, finer than the messages'.
    training = {e["attempt"]: e["time"] for e in events if e["event"] == "training_started"}
    last = {e["attempt"]: e["time"] for e in events if e["event"] == "log"}
    for number, end in ends.items():
        training[number], last[number] = end["training_began"], end["last_step_at"]
    lives = [i for i, event in enumerate(events) if event["event"] == "run_started"][1:]
    moments = sorted([e["time"] for e in events] + list(training.values()) + list(last.values()))
    gaps = [(events[i - 1]["time"], events[i]["time"]) for i in lives]
    begins = {e["attempt"]: e["time"] for e in events if e["event"] == "attempt_started"}
    for begin, end in pairwise(moments):
        middle = (begin + end) / 2
        current = max((n for n, at in begins.items() if at < middle), default=0)
        life = max(e["time"] for e in events if e["event"] == "run_started" and e["time"] < middle)
        if any(since < middle < until for since, until in gaps):
            group = "nobody"
        elif current == 0 or begins[current] < life or middle < training[current]:
            group = "before steps"
        elif middle < last[current]:
            group = "steps"
        else:
            group = "after steps"
        groups[group] += end - begin
    return groups


def test_the_numbers_on_the_page_are_the_journals(opened: Any, struck: Run) -> None:
    events = struck.events()
    rows = {
        row.locator("td,th").nth(0).inner_text(): row.locator("td").last
        for row in opened.locator("#causes tr").all()[1:]
    }
    seconds = {
        name: float(opened.locator("#causes tr", has_text=name).first.locator("td.number").first.inner_text())
        for name in rows
    }
    wall = events[-1]["time"] - events[0]["time"]
    assert seconds.pop("wall time") == pytest.approx(wall, rel=0.001)
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.001)
    expected = by_hand(events)
    groups = {
        "steps": ("training", "checkpoint stall", "data wait", "evaluation", "lost work"),
        "before steps": ("start-up", "launch", "restore"),
        "after steps": ("detection", "hang wait", "teardown", "backoff"),
        "nobody": ("not running",),
    }
    assert set(seconds) <= {name for names in groups.values() for name in names}
    for group, names in groups.items():
        assert sum(seconds.get(name, 0.0) for name in names) == pytest.approx(expected[group], abs=0.01), group
    assert seconds["hang wait"] > 4 and seconds["not running"] > 0 and seconds["restore"] > 0
    assert opened.locator("#goodput").inner_text() == f"{100 * seconds['training'] / wall:.1f} %"

    ends = [event for event in events if event["event"] == "attempt_ended"]
    kinds = [cell.inner_text() for cell in opened.locator("#attempts-table tbody tr td:nth-child(7)").all()]
    assert kinds == ["crashed", "hung", "checkpoint agent lost", "preempted", "cut off", "finished"]
    assert [kind for kind in kinds if kind != "cut off"] == [event["kind"] for event in ends]
    assert opened.locator("#failures").inner_text() == "4"
    starts = [event["step"] for event in events if event["event"] == "training_started"]
    reached = [
        max(e["step"] for e in events if e["attempt"] == n and e["event"] in ("log", "attempt_ended"))
        for n in range(1, 7)
    ]
    lost = [max(end - begin, 0) for end, begin in zip(reached, starts[1:], strict=False)] + [0]
    cells = opened.locator("#attempts-table tbody tr td:nth-child(4)").all()
    assert [int(cell.inner_text()) for cell in cells] == lost
    assert opened.locator("#lost-steps").inner_text() == str(sum(lost))
    committed = {event["step"] for event in events if event["event"] == "committed"}
    assert opened.locator("#committed").inner_text() == str(len(committed))
    total = events[-1]["time"] and max(e["step"] for e in events if e["event"] == "log")
    assert opened.locator("#steps").inner_text() == f"{total} of {total}"
    # 36 an hour, half of it off: half a cent a second, of all seconds in which there was a runner.
    paid = float(opened.locator("#cost tr", has_text="paid").first.locator("td").inner_text().split()[0])
    assert paid == pytest.approx((wall - seconds["not running"]) * 0.005, abs=0.0002)
    blocked = {(e["attempt"], e["step"]): e["blocked_s"] for e in events if e["event"] == "snapshot_cost"}
    opened.locator("summary").click()
    for row in opened.locator("#saves-table tbody tr").all():
        step, attempt, _, waited, written = [cell.inner_text() for cell in row.locator("td").all()]
        told = next(
            e for e in events if e["event"] == "committed" and (e["attempt"], e["step"]) == (int(attempt), int(step))
        )
        assert written == f"{told['duration_s']:.3f} (local)"
        if waited:
            assert float(waited) == pytest.approx(1000 * blocked[int(attempt), int(step)], abs=0.006)


def test_its_charts_show_what_the_journal_tells(opened: Any, struck: Run) -> None:
    charts = opened.evaluate("[...document.querySelectorAll('.chart')].map(one => one.id)")
    assert charts == ["chart-" + name for name in ("time-line", "loss", "saves", "throughput", "memory")]
    series = json.loads(opened.locator("#chart-loss .plot").get_attribute("data-series"))
    shown = [
        (step, value)
        for line in series
        if line["name"] in ("training", "lost, recomputed")
        for piece in line["pieces"]
        for step, value in zip(piece["x"], piece["y"], strict=True)
    ]
    assert sorted(shown) == sorted((event["step"], float(f"{event['loss']:.6g}")) for event in struck.events("log"))
    steps = [step for piece in series[0]["pieces"] for step in piece["x"]]
    assert len(steps) == len(set(steps)), "a step that counts is there once"
    signs = opened.locator("#chart-time-line .sign")
    places = [
        (one.get_attribute("title").partition(":")[0], one.evaluate("one => parseFloat(one.style.top)"))
        for one in signs.all()
    ]
    # Of seven rows, the first one is of the time outside of attempts.
    failed = [round(top * 7 / 100 - 0.5) for kind, top in places if kind == "failure"]
    assert sorted(failed) == [1, 2, 3, 5]
    assert sum(kind == "committed" for kind, _ in places) == len(struck.events("committed"))


def test_a_pointer_shows_the_values_of_a_step(opened: Any, struck: Run) -> None:
    drawing = opened.locator("#chart-loss svg")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    drawing.hover(position={"x": box["width"] - 1, "y": 20})
    last = struck.events("log")[-1]
    assert (
        opened.locator("#chart-loss .readout")
        .inner_text()
        .startswith(f"step {last['step']}: training {last['loss']:.6g}".rstrip("0"))
    )
    opened.locator("#chart-time-line .sign").last.hover()
    assert opened.locator(".readout").inner_text().startswith("failure: crashed")
    opened.locator("h1").hover()
    assert opened.locator(".readout").count() == 0


DEVICES = {
    "phone": {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1200, "height": 900}},
}


@pytest.mark.parametrize("opened", DEVICES.values(), ids=DEVICES.keys(), indirect=True)
def test_it_is_readable_everywhere(opened: Any) -> None:
    """No sideways scrolling of the page, nothing drawn outside of it, text that stands out from its ground."""
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.evaluate(
        "[...document.querySelectorAll('.chart svg')].every(one =>"
        " one.getBoundingClientRect().right <= innerWidth + 1 && one.getBoundingClientRect().width > 200)"
    )
    luminance = """colour => {
      const part = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2]; }"""
    contrasts = opened.evaluate(
        f"""() => {{
          const luminance = {luminance};
          const ground = luminance(getComputedStyle(document.body).backgroundColor);
          const colours = [...document.querySelectorAll('p, td, th, h1, h2, summary, .tile')]
            .map(one => getComputedStyle(one).color);
          for (const one of document.querySelectorAll('.x-axis span, .y-axis span'))
            colours.push(getComputedStyle(one).color);
          return [...new Set(colours)].map(colour => {{
            const [low, high] = [luminance(colour), ground].sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05); }});
        }}"""
    )
    # WCAG 2.2, 1.4.3.
    assert len(contrasts) >= 2 and min(contrasts) >= 4.5


def test_keyboard_and_paper(opened: Any, tmp_path: Path) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.getAttribute('href')") == "#attempts"
    reached = set()
    for _ in range(12):
        opened.keyboard.press("Tab")
        reached.add(
            opened.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName")
        )
    assert {"Seconds by cause", "Attempts", "SUMMARY", "Cost"} <= reached
    opened.locator("summary").focus()
    opened.keyboard.press("Enter")
    assert opened.locator("#saves-table").is_visible()
    printed = tmp_path / "report.pdf"
    opened.pdf(path=printed, format="A4")
    assert printed.read_bytes().startswith(b"%PDF") and printed.stat().st_size > 20_000


def test_where_the_file_goes(struck: Run, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*RUNNER, "report", *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert run(str(struck.folder), "--output", "mine.html").returncode == 0 and (tmp_path / "mine.html").exists()
    failed = run(str(struck.folder), "--output", "no/where.html")
    assert failed.returncode == 2 and "no/where.html" in failed.stderr and "Traceback" not in failed.stderr
    failed = run(str(tmp_path))
    assert failed.returncode == 2 and "holds no run" in failed.stderr
    assert json.loads((struck.folder / "run.json").read_text())["run_id"] in (tmp_path / "mine.html").read_text()
