"""What it costs to prove snapshots: samples against torn copies, and the look for NaN and infinity.

One process trains a decoder with AdamW, with a snapshot every ten steps. From one snapshot to the next the checks are
on and off in turns, so that pairs of ten steps are compared. The samples are taken where the state is handed over and
read again where the optimizer steps, both in the training thread. Numbers are looked at in the copy thread alone,
whose processor time is compared with and without.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from library.benchmark import Benchmark
from library.figures import Samples, ratios, spread, table
from library.measuring import scratch_folder
from library.methods import Decoder

from checkpointing import CheckpointManager
from checkpointing.snapshot.request import PendingSnapshot
from checkpointing.snapshot.snapshot_copy import SnapshotCopy
from checkpointing.state.samples import Sampler

INTERVAL = 10
WITH, WITHOUT = "with checks", "without"


@dataclass(frozen=True)
class Scale:
    """How much is measured: pairs of intervals, and the decoder's size in layers and tokens per step."""

    pairs: int
    width: int = 768
    layers: int = 12
    tokens: int = 64
    vocabulary: int = 32_000


QUICK, SMOKE = Scale(4), Scale(2, 64, 1, 8, 100)


class Switch:
    """Turns the checks on and off, and keeps the time that they take."""

    def __init__(self) -> None:
        self.on, self.samples_s, self.copy_s = True, 0.0, list[float]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        make = SnapshotCopy.make

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

        with (
            mock.patch.object(Sampler, "hand_over", timed(Sampler.hand_over)),
            mock.patch.object(PendingSnapshot, "look_again", timed(PendingSnapshot.look_again)),
            mock.patch.object(SnapshotCopy, "make", made),
        ):
            yield


def measure(scale: Scale, folder: Path, device: str) -> tuple[Samples, int, int]:
    """Train; return what was measured in milliseconds, the number of tensors of the state, and their bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(scale.width, scale.layers, scale.vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu")
    tokens = torch.randint(0, scale.vocabulary, (1, scale.tokens), device=device)
    manager = CheckpointManager(str(folder), model=model, optimizer=optimizer, snapshot_steps=INTERVAL, overlap=True)
    measured, switch = Samples(list), Switch()

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
                    checks = WITH if switch.on else WITHOUT
                    measured["step", checks].append(1000 * (now - began) / INTERVAL)
                    measured["copy", checks].extend(1000 * one for one in switch.copy_s)
                    measured["samples", checks].append(1000 * switch.samples_s)
                interval += 1
                if interval == len(order):
                    manager.step(step)
                    break
                switch.on, switch.samples_s, switch.copy_s, began = order[interval], 0.0, [], now
            manager.step(step)
    manager.close()
    state = [*model.parameters(), *(t for one in optimizer.state.values() for t in one.values() if torch.is_tensor(t))]
    return measured, len(state), sum(tensor.nbytes for tensor in state)


def figures_of(measured: Samples, num_tensors: int, nbytes: int) -> tuple[dict[str, float], str]:
    """Return the figures by name, and a Markdown table of them."""
    step_ms, samples_ms = statistics.median(measured["step", WITHOUT]), statistics.median(measured["samples", WITH])
    pairs = ratios(measured["step", WITH], measured["step", WITHOUT])
    share = samples_ms / (INTERVAL * step_ms)
    copy_ms, looked_ms = (statistics.median(measured["copy", checks]) for checks in (WITHOUT, WITH))
    looked = (looked_ms - copy_ms) / looked_ms
    figures = {
        "samples_ms": samples_ms,
        "samples_share_of_steps": share,
        "step_with_checks_vs_without": statistics.median(pairs),
        "finiteness_share_of_copy_thread": looked,
    }
    copies = spread(measured["copy", WITH], 0)
    rows = [
        ("state", f"{num_tensors} tensors, {nbytes / 1e9:.2f} GB", ""),
        ("a step without checks, ms", spread(measured["step", WITHOUT], 1), ""),
        ("samples, for one snapshot, ms", spread(measured["samples", WITH]), ""),
        ("their share of ten steps", f"{share:.2%}", "0.2 %"),
        ("ten steps with all checks, of those without", spread(pairs, 3), ""),
        ("processor time of the copy thread, for one snapshot, ms", copies, ""),
        ("share of the look for NaN and infinity in that", f"{looked:.1%}", "10 %"),
    ]
    return {name: round(value, 5) for name, value in figures.items()}, table("figure | value | bar", rows)


def main() -> None:
    bench = Benchmark("snapshot_checks", __doc__, quick="4 pairs", smoke="2 pairs of a tiny model's steps")
    bench.add_count("--pairs", 12, "pairs of ten steps")
    bench.parser.add_argument("--device", default="cpu", help="where the model is (default: cpu)")
    options = bench.parse()
    with scratch_folder() as folder:
        measured = measure(bench.scale(Scale(options.pairs), QUICK, SMOKE), folder, options.device)
    figures, rows = figures_of(*measured)
    device = "on the processor" if options.device == "cpu" else f"on {options.device}"
    bench.publish("Checks of snapshots", f"{device}.", figures, rows)


if __name__ == "__main__":
    main()
