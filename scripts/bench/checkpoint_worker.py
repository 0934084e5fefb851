"""One training run of one checkpointing method, in a process of its own; started by `checkpoint.py`.

Prints one line "RESULT {json}": seconds of the whole loop, blocked by each save, until each save was durable.
Needs torch and what the method itself needs, so that a peer can have its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    """A decoder; only the number of bytes of its state matters."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


class Method:
    """A way to save.

    `save` is called after a step, and `before_optimizer` before the next step changes the state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.durable: dict[int, float] = {}
        self.began: dict[int, float] = {}

    def resume(self) -> int:
        return 0

    def save(self, step: int) -> None:
        pass

    def before_optimizer(self) -> None:
        pass

    def after_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def note_durable(self, step: int) -> None:
        self.durable.setdefault(step, time.time() - self.began[step])


class HuggingFace(Method):
    """The save of Hugging Face's `Trainer`, by its own code; it does not call fsync."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            str(self.folder), use_cpu=True, report_to="none", save_total_limit=2, save_strategy="steps", save_steps=1
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.trainer = Trainer(model=self.model, args=arguments, optimizers=(self.optimizer, scheduler))

    def save(self, step: int) -> None:
        self.trainer.state.global_step = step
        self.trainer._save_checkpoint(self.model, trial=None)
        self.note_durable(step)


class Dcp(Method):
    """`torch.distributed.checkpoint.async_save`."""

    process = shared_memory = async_staging = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29533")
            dist.init_process_group("gloo", rank=0, world_size=1)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shared_memory,
                use_async_staging=self.async_staging,
                use_non_blocking_copy=False,
            )
        )
        self.upload: Any = None
        self.staging: Any = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        if self.upload is not None:
            self.upload.result()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        response = async_save(
            self.state(),
            checkpoint_id=str(self.folder / str(step)),
            async_checkpointer_type=kind,
            async_stager=self.stager,
        )
        self.upload = getattr(response, "upload_completion", response)
        self.staging = getattr(response, "staging_completion", None)
        self.upload.add_done_callback(lambda _: self.note_durable(step))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def before_optimizer(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def finish(self) -> None:
        if self.upload is not None:
            self.upload.result()
        self.stager.close()


class DcpThread(Dcp):
    pass


class DcpProcess(Dcp):
    process = True


class DcpShared(Dcp):
    process = shared_memory = True


class DcpSharedAsync(Dcp):
    process = shared_memory = async_staging = True


class DLRover(Method):
    """DLRover's Flash Checkpoint: the trainer copies into shared memory, and an agent process writes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0")
        os.environ.update(GROUP_WORLD_SIZE="1", NODE_RANK="0")
        # Its sockets in /tmp have this name; it would take those of a killed run for its own.
        os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine, start_saver_process

        # Version 0.6.1 loses its first message and gives up if the saver starts slowly, as on a single core.
        CheckpointEngine.saver_proc = start_saver_process()
        time.sleep(2)
        self.kind = StorageType.DISK
        self.checkpointer = DdpCheckpointer(str(self.folder))
        self.tracker = self.folder / "dlrover_latest.txt"
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            for step in sorted(self.began.keys() - self.durable.keys()):
                if self.tracker.exists() and self.tracker.read_text().strip() == str(step):
                    self.note_durable(step)

    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.checkpointer.save_checkpoint(step, state, str(self.folder / f"{step}.pt"), storage_type=self.kind)

    def finish(self) -> None:
        deadline = time.time() + 60
        while self.began.keys() - self.durable.keys() and time.time() < deadline:
            time.sleep(0.05)


class Ours(Method):
    """`CheckpointManager` with an agent that the driver started, as a supervisor does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from checkpointing import CheckpointManager
        from checkpointing.agent import protocol
        from checkpointing.host.environment import rank_settings

        self.manager = CheckpointManager(
            str(self.folder), model=self.model, optimizer=self.optimizer, snapshot_steps=None, keep_last=2
        )
        self.monitor = protocol.connect(rank_settings().agent_socket)
        protocol.send(self.monitor, {"do": "hello", "role": "monitor"})
        protocol.receive(self.monitor)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        from checkpointing.agent import protocol

        while True:
            try:
                event, _ = protocol.receive(self.monitor)
            except OSError:
                return
            if event["event"] == "committed":
                self.note_durable(event["step"])
            elif event["event"] not in ("snapshot", "pruned", "snapshot_cost"):
                print(event, file=sys.stderr)

    def resume(self) -> int:
        return self.manager.resume()

    def save(self, step: int) -> None:
        self.manager.save(step, step)

    def after_step(self, step: int) -> None:
        self.manager.end_of_step(step)

    def finish(self) -> None:
        self.manager.wait_for_commit()

    # The optimizer's own hook waits here; calling it measures the wait.
    def before_optimizer(self) -> None:
        self.manager._node.snapshots._copy_thread.pre_step_barrier()


METHODS: dict[str, type[Method]] = {
    "none": Method,
    "hf": HuggingFace,
    "dcp-thread": DcpThread,
    "dcp-process": DcpProcess,
    "dcp-shm": DcpShared,
    "dcp-shm-async": DcpSharedAsync,
    "dlrover": DLRover,
    "ours": Ours,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--wait", action="store_true", help="start the loop when a line arrives on standard input")
    parser.add_argument("--no-finish", dest="finish", action="store_false", help="do not wait for the last save")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary = 12288
    model = Model(options.width, options.layers, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    method = METHODS[options.method](model, optimizer, options.folder)

    blocked: dict[int, float] = {}
    step_times: list[float] = []
    last_saved = 0

    def train_step() -> None:
        tokens = torch.randint(0, vocabulary, (1, options.tokens))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        began = time.perf_counter()
        method.before_optimizer()
        if last_saved:
            blocked[last_saved] += time.perf_counter() - began
        optimizer.step()

    began = time.perf_counter()
    start = method.resume()
    resume_s = time.perf_counter() - began
    print("READY", flush=True)
    if options.wait:
        sys.stdin.readline()
    train_step()  # Allocates gradients and moments.
    began = time.perf_counter()
    for step in range(start + 1, start + options.steps + 1):
        step_began = time.perf_counter()
        train_step()
        last_saved = 0
        method.after_step(step)
        if options.save_every and step % options.save_every == 0:
            method.began[step] = time.time()
            save_began = time.perf_counter()
            method.save(step)
            blocked[step] = time.perf_counter() - save_began
            last_saved = step
        step_times.append(time.perf_counter() - step_began)
    total = time.perf_counter() - began
    if options.finish:
        method.finish()
    result = {
        "start": start,
        "resume_s": resume_s,
        "total_s": total,
        "blocked_s": list(blocked.values()),
        "durable_s": list(method.durable.values()),
        "step_s": step_times,
        "state_bytes": 3 * sum(parameter.nbytes for parameter in model.parameters()),
    }
    print("RESULT " + json.dumps(result), flush=True)
    # An orderly exit would wait for threads and processes that peers leave; the driver ends them.
    os._exit(0)


if __name__ == "__main__":
    main()
