"""The stages, each in a process of its own: stages.py STAGE DEVICE ANSWER_FILE [--quick].

Those that start jobs of their own are in `jobs.py` and `sft.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_proof.jobs import Found, faults, ranks, recovery
from gpu_proof.sft import has, sft
from helpers.small_training import SmallTraining

from checkpointing import CheckpointManager
from checkpointing.host.shared_memory import populate_pages
from checkpointing.process import device as devices
from checkpointing.snapshot import copy_thread
from runner.launcher.launch_request import EVERYTHING
from runner.system.processes import PRELOAD_ENV

_GB = 1e9
_RING_BYTES = 32 * 1024 * 1024
_SLEEP_CYCLES = 400_000_000  # some 0.2 s of a GPU's clock


def _seconds(work: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(on: str, quick: bool) -> Found:
    """Measure the registration of host memory, and copies into it."""
    figures: dict[str, Any] = {}
    torch.zeros(1, device=on)
    for size in (1, 2) if quick else (1, 8, 32):
        nbytes = size << 30
        if nbytes > 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            figures[f"register {size} GiB"] = "not enough memory"
            continue
        with _mapped(nbytes) as address:
            whole = _seconds(functools.partial(devices.register, address, nbytes))
            devices.unregister(address)
        with _mapped(nbytes) as address:
            touch = _seconds(functools.partial(populate_pages, address, nbytes, shared=True))
            chunks = range(0, nbytes, devices.CHUNK_BYTES)
            register = functools.partial(devices.register, nbytes=devices.CHUNK_BYTES)
            each = [_seconds(functools.partial(register, address + chunk)) for chunk in chunks]
            for chunk in chunks:
                devices.unregister(address + chunk)
        figures[f"register {size} GiB, s"] = (
            f"whole {whole:.3f}; after {touch:.3f} of pre-faulting, "
            f"in chunks {sum(each):.3f}, the longest {max(each):.4f}"
        )
    nbytes = 256 << 20 if quick else 1 << 30
    source = torch.zeros(nbytes, dtype=torch.uint8, device=on)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    with _mapped(nbytes) as address:
        populate_pages(address, nbytes, shared=True)
        target = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        pageable = _rate(lambda: target.copy_(source, non_blocking=True), nbytes)
        registered_ok = devices.register(address, nbytes)
        registered = _rate(lambda: target.copy_(source, non_blocking=True), nbytes)
        devices.unregister(address)
        ring = _rate(lambda: _by_ring(source, target), nbytes)
    took = []
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
        with _mapped(nbytes, advice=advice) as address:
            populate_pages(address, nbytes)
            took.append(_seconds(functools.partial(devices.register, address, nbytes)))
            devices.unregister(address)
    ceiling = _rate(lambda: pinned.copy_(source, non_blocking=True), nbytes)
    figures["copies to the host, GB/s"] = (
        f"torch's pinned memory {ceiling:.1f}, registered {registered:.1f}, by a pinned ring {ring:.1f}, "
        f"pageable {pageable:.1f}"
    )
    figures[f"register {nbytes >> 20} MiB that is there, s"] = f"huge pages {took[0]:.4f}, pages of 4 KiB {took[1]:.4f}"
    # Memory that is not mapped cannot be registered; the next kernel must not fail because of that.
    refused = not devices.register(1 << 46, 4096)
    after = float((torch.ones(1000, device=on) * 2).sum())
    verdicts = {
        "the driver registers memory that torch did not allocate": registered_ok,
        "registered memory is as fast as torch's own (within 10 %)": registered >= 0.9 * ceiling,
        "a refused registration leaves no error behind": refused and after == 2000.0,
    }
    return figures, verdicts


def _by_ring(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy through two pinned buffers: the device fills one while the host empties the other."""
    buffers = [torch.empty(_RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    before: tuple[torch.Tensor, torch.Tensor, torch.Event] | None = None
    for start in range(0, source.numel(), _RING_BYTES):
        piece = source[start : start + _RING_BYTES]
        buffer = buffers[start // _RING_BYTES % 2][: piece.numel()]
        buffer.copy_(piece, non_blocking=True)
        event = torch.Event(device=source.device)
        event.record()
        if before is not None:
            before[2].synchronize()
            before[1].copy_(before[0])
        before = (buffer, target[start : start + _RING_BYTES], event)
    if before is not None:
        before[2].synchronize()
        before[1].copy_(before[0])


@contextlib.contextmanager
def _mapped(nbytes: int, *, advice: int | None = None) -> Iterator[int]:
    """Map shared memory, as for an arena; with `advice` (see madvise(2)), private memory."""
    if advice is None:
        memory = mmap.mmap(-1, nbytes)
    else:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
    anchor = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(anchor)
    finally:
        del anchor
        with contextlib.suppress(BufferError):
            memory.close()


def _rate(copy: Callable[[], object], nbytes: int) -> float:
    _seconds(copy)
    return nbytes / _GB / statistics.median(_seconds(copy) for _ in range(5))


# -- order -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _slow_copies(on: str) -> Iterator[None]:
    """Delay the copies of snapshots long after they were enqueued."""
    if not on.startswith("cuda"):
        module = torch.get_device_module(on.partition(":")[0])
        module.set_delay_us(3_000)
        yield
        module.set_delay_us(0)
        return
    on_own_streams = devices.Accelerator.on_own_streams

    @contextlib.contextmanager
    def slow(self: devices.Accelerator, mark: Any) -> Iterator[None]:
        with on_own_streams(self, mark):
            sleep: Any = torch.cuda._sleep
            sleep(_SLEEP_CYCLES)
            yield

    with mock.patch.object(devices.Accelerator, "on_own_streams", slow):
        yield


def _is_torn(change: str, on: str, **options: Any) -> bool:
    job = SmallTraining(on=on, **options)
    replay = _graph_of(job) if change == "replay" else None
    job.snapshot()
    if replay is not None:
        replay()
        job.snapshotter.end_of_step()
    else:
        getattr(job, change)()
    job.close()
    return bool(job.torn())


def _graph_of(job: SmallTraining) -> Callable[[], None]:
    """Capture an optimizer's step as a CUDA graph."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    with torch.cuda.stream(stream):
        job.optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    job.optimizer_step()
    return graph.replay


def _wait_until_enqueued(copy: copy_thread.Copy, *, at_barrier: bool = False) -> None:
    """Take "enqueued" for "copied"."""
    copy.enqueued.wait()


def order(on: str, quick: bool) -> Found:
    """Change the state in every way during a slow copy."""
    times = 2 if quick else 5
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "an optimizer's step, during the copy": ("optimizer_step", {"overlap": True}),
        "an optimizer's step, after a blocking snapshot": ("optimizer_step", {"overlap": False}),
        "a moving average": ("update_average", {"overlap": True}),
        "buffers": ("forward_in_training", {"overlap": True}),
        "a direct write, which drops the snapshot": ("write_directly", {"overlap": True}),
        "an optimizer that is not torch's": ("optimizer_step", {"overlap": None, "foreign": True}),
    }
    if on.startswith("cuda"):
        cases["the replay of a CUDA graph"] = ("replay", {"overlap": True, "capturable": True})
    verdicts: dict[str, bool] = {}
    with _slow_copies(on):
        for name, (change, options) in cases.items():
            verdicts[f"not torn by {name}"] = not any(_is_torn(change, on, **options) for _ in range(times))
        with mock.patch.object(copy_thread.Copy, "hold", _wait_until_enqueued):
            control = _is_torn("optimizer_step", on, overlap=False)
    verdicts["control: without the wait it is torn"] = control
    return {"snapshots of each kind": times}, verdicts


# -- fork ------------------------------------------------------------------------------------------------------------

# In the environment of the process that `runner start` forks ranks from.
_FORK = """
import os, sys
import torch
import runner.training.preload
started = torch.cuda.is_initialized() or "trl.trainer.sft_trainer" not in sys.modules
pid = os.fork()
if pid == 0:
    try:
        ok = float(torch.ones(10, device="cuda").sum()) == 10.0
    except RuntimeError as error:
        print(error, file=sys.stderr)
        ok = False
    os._exit(0 if ok else 1)
print(int(started), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def fork(on: str, quick: bool) -> Found:
    """Load what the fork server loads, and use CUDA in a fork of it."""
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", PRELOAD_ENV: " ".join(EVERYTHING)}
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=150, env=environment)
    print(done.stderr)
    started, status = (done.stdout.split() or ["1", "1"])[-2:]
    installed = [
        name for name in ("flash_attn", "triton", "kernels", "liger_kernel", "torchao", "bitsandbytes") if has(name)
    ]
    verdicts = {"preloading everything starts no CUDA": started == "0", "a forked rank can use CUDA": status == "0"}
    return {"installed": ", ".join(installed) or "none of the GPU libraries"}, verdicts


# -- engine ----------------------------------------------------------------------------------------------------------


def make_model(on: str, parameters: float) -> torch.nn.Module:
    """Build about this many parameters of linear layers in SmolLM3-3B's shape."""
    width, inner = (2048, 11008) if parameters > 1e8 else (256, 1024)
    blocks = max(round(parameters / (2 * width * inner)), 1)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    # On the device: 3 billion parameters take 10 s to initialize on the host.
    make: Any = functools.partial(
        torch.nn.Linear, bias=False, device=on, dtype=torch.bfloat16 if on.startswith("cuda") else torch.float32
    )
    for _ in range(blocks):
        layers += [make(width, inner), torch.nn.SiLU(), make(inner, width)]
    return torch.nn.Sequential(*layers)


def _steps(on: str, parameters: float, num_steps: int, tokens: int, every: int | None) -> dict[str, Any]:
    """Train, with a snapshot every `every` steps; returns seconds, GB/s and GB."""
    model = make_model(on, parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True if on.startswith("cuda") else None)
    width = next(model.parameters()).shape[1]
    data = torch.randn(tokens, width, device=on, dtype=next(model.parameters()).dtype)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(
            folder, model=model, optimizer=optimizer, snapshot_steps=every or 10**9, save_steps=None
        )
        manager.resume()
        snapshotter = manager._node.snapshots

        def train(step: int) -> None:
            began = time.perf_counter()
            model(data).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step(step)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)

        # Until memory is reserved and, with the first snapshots, pinned.
        step = 0
        while step < 10 or snapshotter.is_preparing or (every is not None and len(snapshotter.costs._copies) < 2):
            step += 1
            train(step)
        first, times, stall_s = times, [], manager.stall_s
        for _ in range(num_steps):
            step += 1
            train(step)
        stall_s = manager.stall_s - stall_s
        copies, price = list(snapshotter.costs._copies), snapshotter.costs.snapshot_s
        nbytes = manager._tracked.state.expected_bytes()
        manager.close()
    usual = statistics.median(times)
    return {
        "p50": usual,
        "p99": sorted(times)[int(0.99 * (len(times) - 1))],
        "mean": statistics.fmean(times),
        "first": first,
        "lost at first": sum(first[2:]) - usual * (len(first) - 2),
        "stall": stall_s / max(num_steps // every, 1) if every else 0.0,
        "rate": nbytes / _GB / statistics.median(copies) if copies else 0.0,
        "price": price or 0.0,
        "gigabytes": nbytes / _GB,
    }


def engine(on: str, quick: bool) -> Found:
    """Compare steps with a snapshot every tenth step and steps without."""
    on_gpu = on.startswith("cuda")
    # A step of 8 sequences of 2,048 tokens.
    parameters, num_steps, tokens = (3e9, 60, 16_384) if on_gpu and not quick else (1e6, 24, 64)
    if on_gpu:
        free, _ = torch.cuda.mem_get_info()
        parameters = min(parameters, 0.7 * free / 8)
    every = 10 if on_gpu else 4
    plain = _steps(on, parameters, num_steps, tokens, None)
    ours = _steps(on, parameters, num_steps, tokens, every)
    share = ours["mean"] / plain["mean"] - 1
    figures: dict[str, Any] = {
        "state": f"{ours['gigabytes']:.2f} GB, {parameters / 1e9:.2f} billion parameters",
        "step without snapshots, s": f"p50 {plain['p50']:.4f}, p99 {plain['p99']:.4f}",
        "step with one every tenth, s": f"p50 {ours['p50']:.4f}, p99 {ours['p99']:.4f}",
        "training is slower by": f"{100 * share:.2f} %",
        "training waits per snapshot, s": f"{ours['stall']:.4f}",
        "lost while memory is reserved and pinned, s": f"{ours['lost at first']:.2f} in {len(ours['first'])} steps",
        "copy to the host, GB/s": f"{ours['rate']:.1f}",
        "cost that `auto` learns, s": f"{ours['price']:.4f}",
    }
    print("first steps, s:", *(f"{seconds:.2f}" for seconds in ours["first"]))
    if not on_gpu:
        return figures, {"trains and snapshots": ours["p50"] > 0}
    nbytes = 1 << 30
    source = torch.zeros(nbytes, dtype=torch.uint8, device=on)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    ceiling = _rate(lambda: pinned.copy_(source, non_blocking=True), nbytes)
    cost = (ours["mean"] - plain["mean"]) * every
    figures["pinned ceiling, GB/s"] = f"{ceiling:.1f}"
    figures["cost of a snapshot by the clock, s"] = f"{cost:.4f}"
    verdicts = {
        "training is at most 1 % slower": share <= 0.01,
        "copies reach 80 % of the pinned ceiling": 0.8 * ceiling <= ours["rate"] <= 1.2 * ceiling,
        "`auto` learns the cost (within 20 ms)": abs(ours["price"] - cost) <= 0.02,
    }
    return figures, verdicts


STAGES: dict[str, Callable[[str, bool], Found]] = {
    stage.__name__: stage for stage in (memory, order, fork, engine, ranks, recovery, faults, sft)
}


def main() -> None:
    name, on, answer = sys.argv[1:4]
    if on.startswith("sim"):
        import second_device

        second_device.load()
    figures, verdicts = STAGES[name](on, "--quick" in sys.argv)
    Path(answer).write_text(json.dumps({"figures": figures, "verdicts": verdicts}))


if __name__ == "__main__":
    main()
