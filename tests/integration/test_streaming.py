"""Data that is read during training: after a kill, a stop or a resize, every sample is still in its place."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from integration.support import Run, bundled, history, state_hash
from integration.test_data_order import END, GLOBAL_BATCH, ROWS, listing_script, seen, wait_for_commit_in

STREAMED = [
    "data.streaming=true",
    "data.shuffle_samples=50",
    "trainer.max_steps=24",
    "trainer.save_steps=6",
    "trainer.logging_steps=4",
    "trainer.save_total_limit=9",
]


def job(folder: Path, *settings: str) -> Run:
    return Run(folder, *(part for setting in (*STREAMED, *settings) for part in ("--set", setting)))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="", marks=pytest.mark.soak),
        pytest.param(
            [
                "trainer.packing=true",
                "trainer.max_length=128",
                "trainer.gradient_accumulation_steps=2",
                "trainer.dataloader_num_workers=2",
            ],
            id="packed-workers",
        ),
    ],
)
def test_a_streamed_job_ends_as_if_nothing_had_happened(settings: list[str], tmp_path: Path) -> None:
    calm = job(tmp_path / "calm", *settings).start()
    assert calm.finish() == 0, calm.output
    run, fired = job(tmp_path / "run", *settings), tmp_path / "fired"
    fired.mkdir()
    run.start(CHECKPOINT_FAILPOINTS="training.step=kill@9; local.begun=kill@3", CHECKPOINT_FAILPOINTS_ONCE=str(fired))
    assert run.finish() == 0, run.output
    assert [event["kind"] for event in run.events("attempt_ended")] == ["crashed", "checkpoint agent lost", "finished"]
    # A slow disk passes over saves, but for the last one.
    steps = [step for step in (6, 12, 18, 24) if run.checkpoint(step).exists() and calm.checkpoint(step).exists()]
    assert steps[-1] == 24
    for step in steps:
        assert state_hash(run.checkpoint(step)) == state_hash(calm.checkpoint(step)), step
    assert history(run.checkpoint(24)) == history(calm.checkpoint(24))


def streamed(folder: Path) -> list[str]:
    """`listing_script` with its rows as a stream of several files, shuffled by blocks."""
    script = listing_script(folder)
    path = Path(script[0])
    text = path.read_text().replace("train_dataset=rows,", "train_dataset=rows.to_iterable_dataset(num_shards=3),")
    path.write_text(
        text.replace("resilient(", "resilient(seekable_stream=True, shuffle_samples=20, snapshot_steps=2, trainer=")
    )
    return script


@pytest.mark.soak
def test_each_sample_once_per_epoch_on_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    calm_folder, folder = tmp_path / "calm", tmp_path / "resized"
    calm = Run(calm_folder / "run", script=streamed(calm_folder)).start()
    assert calm.finish() == 0, calm.output
    wanted = seen(calm_folder)
    assert sorted(wanted) == list(range(1, END + 1)) and all(len(rows) == GLOBAL_BATCH for rows in wanted.values())
    per_epoch = ROWS // GLOBAL_BATCH
    for first in (1, 1 + per_epoch, 1 + 2 * per_epoch):
        epoch = [row for step in range(first, first + per_epoch) for row in wanted[step]]
        assert sorted(epoch) == list(range(ROWS))
    assert wanted[1] != wanted[1 + per_epoch] and wanted[1] != list(range(GLOBAL_BATCH))

    script = streamed(folder)
    for life, ranks in ((1, 2), (2, 1), (3, 2)):
        run = Run(folder / "run", "--nproc-per-node", str(ranks), script=script)
        fired = folder / f"fired-{life}"
        fired.mkdir()
        run.start(CHECKPOINT_FAILPOINTS="training.step=kill@4", CHECKPOINT_FAILPOINTS_ONCE=str(fired))
        if life < 3:
            wait_for_commit_in(run, attempt=2 * life)
            run.signal(signal.SIGTERM)
        assert run.finish() == (75 if life < 3 else 0), run.output
    assert len(run.events("attempt_started")) == 6
    assert seen(folder) == wanted


@pytest.mark.soak
def test_bad_streams_are_told(tmp_path: Path) -> None:
    rows = (
        [{"prompt": "a", "completion": "b"}] * 40
        + [{"prompt": "a", "completion": " "}]
        + [{"prompt": "a", "completion": "b"}] * 40
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = bundled(job(tmp_path / "row", f"data.path={path}", "data.shuffle_samples=null")).start()
    assert run.finish() == 78 and "row 41: completion is ' '" in run.output, run.output
    run = job(tmp_path / "steps", "trainer.max_steps=-1").start()
    assert run.finish() == 2 and "data.streaming needs trainer.max_steps" in run.output, run.output
    run = job(tmp_path / "share", "data.validation_share=0.1").start()
    assert run.finish() == 2 and "data.validation_share is not allowed with data.streaming" in run.output, run.output

    good = job(tmp_path / "changed", "trainer.max_steps=6").start()
    assert good.finish() == 0, good.output
    changed = job(tmp_path / "changed", "data.streaming=false", "trainer.max_steps=12")
    changed.command.append("--allow-changes")
    changed.start()
    assert changed.finish() == 78 and "its data was streamed, and now is not" in changed.output, changed.output
    assert "Traceback" not in changed.output
