"""Which samples each step has seen: the same whatever happens, on however many ranks, each once per epoch."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from integration.support import TOTAL_STEPS, Run, finished_once, shared_folder, troubled, wait_for_commit, wait_until

END, ROWS, GLOBAL_BATCH = 40, 96, 8
# Every rank writes down what it trains on: step and row, as the first two tokens tell it.
LISTED = """
    def at_step(step, args):
        time.sleep(0.15)
    training_step = Trainer.training_step
    def listed(self, model, inputs, *args, **kwargs):
        rows = (inputs["input_ids"][:, 0] - 3) * 32 + inputs["input_ids"][:, 1] - 3
        with open(f"{args_folder}.{ATTEMPT}.{RANK}.rows", "a") as file:
            for row in rows.tolist():
                file.write(f"{self.state.global_step + 1} {row}\\n")
        return training_step(self, model, inputs, *args, **kwargs)
    Trainer.training_step = listed
"""


def listing_script(folder: Path, options: str = "", crawl: int = TOTAL_STEPS) -> list[str]:
    script = troubled(folder, LISTED, options, crawl)
    text = Path(script[0]).read_text().replace("{args_folder}", str(folder / "seen"))
    numbered = "[[3 + i // 32, 3 + i % 32, *row['input_ids']] for i, row in enumerate(rows)]"
    text = text.replace("rows = rows.map(", f"rows = Dataset.from_dict({{'input_ids': {numbered}}})\nrows = rows.map(")
    Path(script[0]).write_text(text)
    return script


def seen(folder: Path) -> dict[int, list[int]]:
    """The rows of each step, in the attempt that did it last."""
    found: dict[int, tuple[int, list[int]]] = {}
    for path in folder.glob("seen.*.rows"):
        attempt = int(path.name.split(".")[1])
        for line in path.read_text().splitlines():
            step, row = map(int, line.split())
            known = found.get(step, (0, []))
            if attempt >= known[0]:
                found[step] = (attempt, [*(known[1] if attempt == known[0] else []), row])
    return {step: sorted(rows) for step, (_, rows) in sorted(found.items())}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Two ranks, undisturbed."""
    folder = shared_folder(tmp_path_factory) / "listed"
    finished_once(folder / "run", script=lambda: listing_script(folder))
    return seen(folder)


def test_each_row_once_per_epoch(calm: dict[int, list[int]]) -> None:
    assert sorted(calm) == list(range(1, END + 1))
    assert all(len(rows) == GLOBAL_BATCH for rows in calm.values())
    steps = ROWS // GLOBAL_BATCH
    epochs = [[row for step in range(first, first + steps) for row in calm[step]] for first in (1, 13, 25)]
    assert all(Counter(epoch) == Counter(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="", marks=pytest.mark.soak),
        pytest.param("dataloader_num_workers=1, gradient_accumulation_steps=2, ", id="workers"),
    ],
)
def test_two_ranks_then_one_then_two(options: str, calm: dict[int, list[int]], tmp_path: Path) -> None:
    """With a kill in each life, after a snapshot of that life's own number of ranks; with half the micro-batch, too."""
    text = listing_script(tmp_path, options)
    path = Path(text[0])
    path.write_text(path.read_text().replace("resilient(", "resilient(snapshot_steps=2, trainer="))
    if options:
        path.write_text(path.read_text().replace("per_device_train_batch_size=4", "per_device_train_batch_size=2"))
    for life, ranks in ((1, 2), (2, 1), (3, 2)):
        run = Run(tmp_path / "run", "--nproc-per-node", str(ranks), script=text)
        fired = tmp_path / f"fired-{life}"
        fired.mkdir()
        run.start(CHECKPOINT_FAILPOINTS="training.step=kill@4", CHECKPOINT_FAILPOINTS_ONCE=str(fired))
        if life < 3:
            wait_for_commit_in(run, attempt=2 * life)
            run.signal(signal.SIGTERM)
        assert run.finish() == (75 if life < 3 else 0), run.output
    assert len(run.events("attempt_started")) == 6
    assert seen(tmp_path) == calm


def wait_for_commit_in(run: Run, attempt: int) -> None:
    wait_until(run, lambda: any(event["attempt"] == attempt for event in run.events("committed")))


@pytest.mark.soak
def test_ranks_that_cannot_share_a_step_are_told(tmp_path: Path) -> None:
    script = listing_script(tmp_path, crawl=8)
    run = Run(tmp_path / "run", script=script).start()
    wait_for_commit(run, 10)
    run.signal(signal.SIGTERM)
    assert run.finish() == 75, run.output
    three = Run(tmp_path / "run", "--nproc-per-node", "3", script=script).start()
    assert three.finish() == 2, three.output
    assert "a step of this run has 8 samples, which 3 ranks cannot share equally; start 1, 2, 4, 8" in three.output
    assert len(three.output.splitlines()) == 1 and len(three.events("attempt_started")) == 1
