"""What it costs to prove snapshots: samples against torn copies, and the look for NaN and infinity.

One process trains a decoder with AdamW, with a snapshot every ten steps. From one snapshot to the next the checks are
on and off in turns, so that pairs of ten steps are compared. The samples are taken where the state is handed over and
read again where the optimizer steps, both in the training thread. Numbers are looked at in the copy thread alone,
whose processor time is compared with and without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from checkpoint_worker import Model
from common import command_line, machine, make_parser, spread, today, write_figures

from checkpointing import CheckpointManager
from checkpointing.snapshot.request import PendingSnapshot
from checkpointing.snapshot.snapshot_copy import SnapshotCopy
from checkpointing.state.samples import Sampler

PAGE = "snapshot_checks.md"
INTERVAL = 10


@dataclass(frozen=True)
class Scale:
    """How much is measured: pairs of intervals, and the decoder's size in layers and tokens per step."""

    pairs: int
    width: int
    layers: int
    tokens: int
    vocabulary: int = 32_000


QUICK, SMOKE = Scale(4, 768, 12, 64), Scale(2, 64, 1, 8, 100)


@dataclass
class Measured:
    """Milliseconds, each a list with an entry for every interval.

    Attributes:
        steps: Of a step, without checks and with them.
        samples: That the training thread spends on samples, for one snapshot.
        copies: Processor time of the copy thread for one snapshot, without checks and with the look at numbers.
    """

    steps: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    samples: list[float] = field(default_factory=list)
    copies: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


class Switch:
    """Turns the checks on and off, and keeps the time that they take."""

    def __init__(self) -> None:
        self.on, self.samples_s, self.copy_s = True, 0.0, list[float]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        hand_over, look, make = Sampler.hand_over, PendingSnapshot.look_again, SnapshotCopy.make

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                if not self.on:
                    return None
                began = time.perf_counter()
                try:
                    return call(*arguments)
                finally:
                    self.samples_s += time.perf_counter() - began

            return run

        def made(maker: Any, *arguments: Any) -> None:
            maker._check_finite = self.on
            began = time.thread_time()
            make(maker, *arguments)
            self.copy_s.append(time.thread_time() - began)

        classes: Any = Sampler, PendingSnapshot, SnapshotCopy
        sampler, pending, maker = classes
        sampler.hand_over, pending.look_again, maker.make = timed(hand_over), timed(look), made
        try:
            yield
        finally:
            sampler.hand_over, pending.look_again, maker.make = hand_over, look, make


def measure(scale: Scale, folder: str, device: str) -> tuple[Measured, int, int]:
    """Train; return what was measured, the number of tensors of the state, and their bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(scale.width, scale.layers, scale.vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu")
    tokens = torch.randint(0, scale.vocabulary, (1, scale.tokens), device=device)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=INTERVAL, overlap=True)
    measured, switch = Measured(), Switch()

    with switch.installed():
        step, interval, began = manager.resume(), -1, 0.0
        # The first two make memory ready; of the others, the second of a pair is the first of the next.
        order = [True, False, *(number % 4 in (0, 3) for number in range(2 * scale.pairs))]
        while True:
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % INTERVAL == 0:
                # With `manager.step` begins an interval: the snapshot is taken there.
                if device != "cpu":
                    torch.accelerator.synchronize()
                now = time.perf_counter()
                if interval >= 2:
                    is_on = switch.on
                    measured.steps[is_on].append(1000 * (now - began) / INTERVAL)
                    measured.copies[is_on].extend(1000 * one for one in switch.copy_s)
                    measured.samples.extend([1000 * switch.samples_s] if is_on else [])
                interval += 1
                if interval == len(order):
                    manager.step(step)
                    break
                switch.on, switch.samples_s, switch.copy_s, began = order[interval], 0.0, [], now
            manager.step(step)
    manager.close()
    state = [*model.parameters(), *(t for one in optimizer.state.values() for t in one.values() if torch.is_tensor(t))]
    return measured, len(state), sum(tensor.nbytes for tensor in state)


def figures_of(measured: Measured, num_tensors: int, nbytes: int) -> tuple[dict[str, float], str]:
    """Return the figures by name, and a Markdown table of them."""
    step_ms, samples_ms = statistics.median(measured.steps[False]), statistics.median(measured.samples)
    pairs = [with_it / without for without, with_it in zip(*measured.steps, strict=True)]
    share = samples_ms / (INTERVAL * step_ms)
    copy_ms, looked_ms = map(statistics.median, measured.copies)
    figures = {
        "samples_ms": samples_ms,
        "samples_share_of_steps": share,
        "step_with_checks_vs_without": statistics.median(pairs),
        "finiteness_share_of_copy_thread": (looked_ms - copy_ms) / looked_ms,
    }
    lines = [
        "| figure | value | bar |",
        "|---|---|---|",
        f"| state | {num_tensors} tensors, {nbytes / 1e9:.2f} GB | |",
        f"| a step without checks, ms | {spread(measured.steps[False], 1)} | |",
        f"| samples, for one snapshot, ms | {spread(measured.samples)} | |",
        f"| their share of ten steps | {share:.2%} | 0.2 % |",
        f"| ten steps with all checks, of those without | {spread(pairs, 3)} | |",
        f"| processor time of the copy thread, for one snapshot, ms | {spread(measured.copies[True], 0)} | |",
        f"| share of the look for NaN and infinity in that | {figures['finiteness_share_of_copy_thread']:.1%} | 10 % |",
    ]
    return {name: round(value, 5) for name, value in figures.items()}, "\n".join(lines)


def main() -> None:
    parser: argparse.ArgumentParser = make_parser(
        __doc__, PAGE, quick="4 pairs", smoke="2 pairs of a tiny model's steps"
    )
    parser.add_argument("--pairs", type=int, default=12, help="pairs of ten steps (default: 12)")
    parser.add_argument("--device", default="cpu", help="where the model is (default: cpu)")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    scale = SMOKE if options.smoke else QUICK if options.quick else Scale(options.pairs, 768, 12, 64)
    with tempfile.TemporaryDirectory(prefix="sb-") as folder:
        measured, num_tensors, nbytes = measure(scale, folder, options.device)
    figures, table = figures_of(measured, num_tensors, nbytes)
    print(f"\n{machine()}\n\n{table}")
    write_figures(options.json, figures)
    if options.docs:
        method = " ".join((__doc__ or "").split())
        circumstances = f"`{command_line('snapshot_checks.py')}`, {today()}, on {machine()}."
        (options.docs / PAGE).write_text(f"# Checks of snapshots\n\n{circumstances}\n\n{table}\n\n{method}\n")


if __name__ == "__main__":
    main()
