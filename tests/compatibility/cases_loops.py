"""Bare loops: what people write around `CheckpointManager`."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from compatibility import tiny
from compatibility.cases_optimizers import batch, train, wrapped
from compatibility.ranks import Run
from compatibility.table import MAX_STEPS, case, differs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def _fit(run: Run, net: Any, optimizer: Any, *, after: Callable[[], object] = lambda: None, **options: Any) -> None:
    """Train `net`; `after` is called where a step ends, and `options` are the manager's."""
    manager = run.manager(model=net, optimizer=optimizer, **options)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        net(x, y)["loss"].backward()
        optimizer.step()
        after()
        manager.step(step + 1)
    manager.close()


@case("loops/one process", ranks=1)
def _one(run: Run) -> None:
    model = tiny.Perceptron()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@case("loops/killed twice", kills=((0, 4), (0, 8)), saved=(3, 6))
def _twice(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@case("loops/last step is committed", kills=())
def _last(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-2), save_steps=1)
    folder = run.location / f"checkpoint-{MAX_STEPS}"
    run.expect_equal("the last step's checkpoint is there", folder.is_dir(), True)


@case("loops/moving average")
def _average(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    net = wrapped(run, model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    _fit(run, net, optimizer, after=lambda: average.update_parameters(model), states={"average": average})
    run.finish(model=[model, average], optimizer=optimizer)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator, self.critic = nn.Linear(4, 12), nn.Linear(12, 1)


class _Optimizers:
    """Two as one, as `CheckpointManager` takes them."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        return [group for one in self.optimizers for group in one.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.optimizers):
            one.load_state_dict(state[str(number)])


def _adversarial(run: Run, *, in_states: bool) -> None:
    model = _Pair()
    makers = torch.optim.Adam(model.generator.parameters(), lr=1e-2)
    critics = torch.optim.RMSprop(model.critic.parameters(), lr=1e-2)
    if in_states:
        manager = run.manager(model=model, optimizer=makers, states={"critic_optimizer": critics})
    else:
        manager = run.manager(model=model, optimizer=_Optimizers(makers, critics))
    for step, _ in run.steps(manager):
        real, _ = batch(run, step)
        noise = torch.randn(4, 4)
        run.saw(step, "noise", noise)
        critics.zero_grad()
        loss = model.critic(model.generator(noise).detach()).mean() - model.critic(real).mean()
        loss.backward()
        critics.step()
        makers.zero_grad()
        (-model.critic(model.generator(noise)).mean()).backward()
        makers.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=[makers, critics])


@case("loops/GAN, one optimizer in states", ranks=1)
def _gan_states(run: Run) -> None:
    _adversarial(run, in_states=True)


@case("loops/GAN, two optimizers in a class of one's own", ranks=1)
def _gan(run: Run) -> None:
    _adversarial(run, in_states=False)


@case("loops/GradScaler")
def _scaler(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    net = wrapped(run, model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    manager = run.manager(model=net, optimizer=optimizer, scaler=scaler)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(x, y)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer, scaler=scaler.state_dict())


@case("loops/torch.compile")
def _compile(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = run.manager(model=compiled, optimizer=optimizer)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        optimizer.zero_grad()
        compiled(x, y)["loss"].backward()
        for value in model.parameters():
            torch.distributed.all_reduce(value.grad)
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


@case("loops/torch.compile of DDP")
def _compile_ddp(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _fit(run, torch.compile(DistributedDataParallel(model), backend="aot_eager"), optimizer)
    run.finish(model=model, optimizer=optimizer)


@case("loops/no_sync")
def _no_sync(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    net = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = run.manager(model=net, optimizer=optimizer)
    for step, _ in run.steps(manager):
        optimizer.zero_grad()
        with net.no_sync():
            x, y = batch(run, 2 * step)
            net(x, y)["loss"].backward()
        x, y = batch(run, 2 * step + 1)
        net(x, y)["loss"].backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


@case("loops/zero_grad after the save")
def _zero_late(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    net = wrapped(run, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = run.manager(model=net, optimizer=optimizer)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        net(x, y)["loss"].backward()
        optimizer.step()
        manager.step(step + 1)
        optimizer.zero_grad()
    manager.close()
    run.finish(model=model, optimizer=optimizer)


@case("loops/weights reset on the way")
def _reset(run: Run) -> None:
    """Something other than an optimizer changes the weights, at the end of a step."""
    run.initialize()
    model = tiny.Perceptron()
    net = wrapped(run, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    _fit(run, net, optimizer, after=lambda: model.last.weight.data.clamp_(-0.2, 0.2))
    run.finish(model=model, optimizer=optimizer)


@case("loops/Accelerator")
def _accelerator(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MAX_STEPS)
    net, prepared, scheduler = accelerator.prepare(model, optimizer, schedule)
    manager = run.manager(model=net, optimizer=prepared, scheduler=scheduler)
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        prepared.zero_grad()
        accelerator.backward(net(x, y)["loss"])
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        prepared.step()
        scheduler.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=prepared, scheduler=scheduler)


@case("loops/Accelerator, gradient accumulation and loader")
def _accelerator_loader(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tiny.Points(), batch_size=2, shuffle=True)
    net, prepared, loader = accelerator.prepare(model, optimizer, loader)
    manager = run.manager(model=net, optimizer=prepared)
    for step, data in run.steps(manager, lambda: manager.batches(loader)):
        prepared.zero_grad()
        accelerator.backward(net(**data)["loss"])
        prepared.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=prepared)


@case("loops/Accelerator, DeepSpeed ZeRO-2")
def _accelerator_zero(run: Run) -> None:
    import deepspeed
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin

    # A transport through shared memory that it would compile first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # With this set, accelerate ignores the plugin.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    PartialState(cpu=True)
    deepspeed.init_distributed("gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tiny.Points(), batch_size=2, shuffle=True)
    engine, prepared, loader = accelerator.prepare(model, optimizer, loader)
    manager = run.manager(model=engine, optimizer=prepared)
    for _, data in run.steps(manager, lambda: manager.batches(loader)):
        accelerator.backward(engine(**data)["loss"])
        prepared.step()
        prepared.zero_grad()
        manager.step(engine.global_steps)
    manager.close()
    run.finish(model=model)


@case("loops/Accelerator, FSDP2")
def _accelerator_fsdp(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.tensor import DTensor

    accelerator = Accelerator(cpu=True)
    # Without a GPU, accelerate ignores the plugin.
    state = AcceleratorState._shared_state
    state["distributed_type"] = DistributedType.FSDP
    state["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    model = tiny.Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tiny.Points(), batch_size=2, shuffle=True)
    net, prepared, loader = accelerator.prepare(model, optimizer, loader)
    run.expect_equal("sharded", all(isinstance(one, DTensor) for one in net.parameters()), True)
    manager = run.manager(model=net, optimizer=prepared)
    for step, data in run.steps(manager, lambda: manager.batches(loader)):
        prepared.zero_grad()
        accelerator.backward(net(**data)["loss"])
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        prepared.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=net, optimizer=prepared)


def _sharded(run: Run, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    run.initialize()
    model = tiny.Perceptron()
    fully_shard(model.first, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _fit(run, model, optimizer)
    run.finish(model=model, optimizer=optimizer)


@case("loops/FSDP2")
def _fsdp2(run: Run) -> None:
    _sharded(run)


@case("loops/FSDP2, mixed precision")
def _fsdp2_mixed(run: Run) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    _sharded(run, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@case("loops/Muon and AdamW, one in states")
def _muon(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    net = wrapped(run, model)
    muon = torch.optim.Muon([value for value in model.parameters() if value.ndim == 2], lr=1e-2)
    adamw = torch.optim.AdamW([value for value in model.parameters() if value.ndim != 2], lr=1e-2)
    manager = run.manager(model=net, optimizer=muon, states={"adamw": adamw})
    for step, _ in run.steps(manager):
        x, y = batch(run, step)
        for one in (muon, adamw):
            one.zero_grad()
        net(x, y)["loss"].backward()
        for one in (muon, adamw):
            one.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=[muon, adamw])


class _HookState:
    """What PowerSGD keeps on each rank."""

    _NAMES = ("error_dict", "p_memory_dict", "q_memory_dict", "iter", "next_stats_report")

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def state_dict(self) -> dict[str, Any]:
        position = {"rng": self._hook.rng.get_state()[1:3]}
        words, at = position["rng"]
        own = {name: getattr(self._hook, name) for name in self._NAMES}
        return {**own, "words": torch.from_numpy(words.astype("int64")), "at": at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._NAMES:
            setattr(self._hook, name, state[name])
        words = state["words"].numpy().astype("uint32")
        self._hook.rng.set_state(("MT19937", words, state["at"], 0, 0.0))


def _power(run: Run, *, saved: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    run.initialize()
    model = tiny.Perceptron()
    net = DistributedDataParallel(model)
    hook = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    net.register_comm_hook(hook, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    _fit(run, net, optimizer, states={"hook": _HookState(hook)} if saved else {})
    run.finish(model=model, optimizer=optimizer)


@case("loops/PowerSGD communication hook in states")
def _power_saved(run: Run) -> None:
    _power(run, saved=True)


@case(
    "loops/PowerSGD communication hook",
    verdict=differs(
        "what a communication hook remembers is saved only where it is given in `states`",
        part="^after the kill: parameters",
    ),
)
def _power_lost(run: Run) -> None:
    _power(run, saved=False)


@case("loops/teacher copied from the student")
def _teacher(run: Run) -> None:
    run.initialize()
    model = tiny.Perceptron()
    teacher = copy.deepcopy(model)
    net = wrapped(run, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = run.manager(model=net, optimizer=optimizer, states={"teacher": teacher})
    for step, _ in run.steps(manager):
        x, _ = batch(run, step)
        with torch.no_grad():
            wanted = teacher.eval()(x)["logits"]
        optimizer.zero_grad()
        net(x, wanted)["loss"].backward()
        optimizer.step()
        if step % 4 == 3:
            teacher.load_state_dict(model.state_dict())
        manager.step(step + 1)
    manager.close()
    run.finish(model=[model, teacher], optimizer=optimizer)


# -- loaders ----------------------------------------------------------------------------------------------------------


def _with_loader(run: Run, loader: Any, *, by_itself: bool = False, **options: Any) -> None:
    """The loop of the README with `manager.batches`, or with a loader that is drawn from `by_itself`."""
    model = tiny.Perceptron()
    net = wrapped(run, model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = run.manager(model=net, optimizer=optimizer, **options)
    for step, data in run.steps(manager, lambda: iter(loader) if by_itself else manager.batches(loader)):
        optimizer.zero_grad()
        net(data["x"], data["labels"])["loss"].backward()
        optimizer.step()
        manager.step(step + 1)
    manager.close()
    run.finish(model=model, optimizer=optimizer)


class _NoisyPoints(tiny.Points):
    """Draws noise for each sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = super().__getitem__(index)
        return {**point, "x": point["x"] + 0.1 * torch.randn(12)}


class _Flow(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from tiny.points(40)


def _split(run: Run, dataset: Any, **options: Any) -> Any:
    sampler: Any = DistributedSampler(dataset, run.world_size, run.rank, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=2, sampler=sampler, **options)


@case("loaders/DataLoader, shuffled", ranks=1)
def _shuffled(run: Run) -> None:
    _with_loader(run, DataLoader(tiny.Points(), batch_size=3, shuffle=True))


@case("loaders/DataLoader, generator of its own", ranks=1)
def _generator(run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    _with_loader(run, DataLoader(tiny.Points(), batch_size=3, shuffle=True, generator=generator))


@case("loaders/DataLoader, in order", ranks=1)
def _in_order(run: Run) -> None:
    _with_loader(run, DataLoader(tiny.Points(), batch_size=3, drop_last=True))


@case("loaders/DistributedSampler")
def _distributed(run: Run) -> None:
    run.initialize()
    _with_loader(run, _split(run, tiny.Points()))


@case("loaders/DistributedSampler, workers")
def _distributed_workers(run: Run) -> None:
    run.initialize()
    _with_loader(run, _split(run, tiny.Points(), num_workers=2))


@case("loaders/DistributedSampler, persistent workers")
def _persistent(run: Run) -> None:
    run.initialize()
    _with_loader(run, _split(run, tiny.Points(), num_workers=1, persistent_workers=True))


@case("loaders/noise for each sample")
def _noise(run: Run) -> None:
    run.initialize()
    _with_loader(run, _split(run, _NoisyPoints()))


@case("loaders/noise for each sample, workers")
def _noise_workers(run: Run) -> None:
    run.initialize()
    _with_loader(run, _split(run, _NoisyPoints(), num_workers=2))


@case("loaders/IterableDataset", ranks=1)
def _flow(run: Run) -> None:
    _with_loader(run, DataLoader(_Flow(), batch_size=3))


@case("loaders/StatefulDataLoader", needs=("torchdata",))
def _stateful(run: Run) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    run.initialize()
    sampler: Any = DistributedSampler(tiny.Points(), run.world_size, run.rank, seed=3)
    _with_loader(run, StatefulDataLoader(tiny.Points(), batch_size=2, sampler=sampler))


@case("loaders/StatefulDataLoader, shuffled, workers", needs=("torchdata",), ranks=1)
def _stateful_workers(run: Run) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    _with_loader(run, StatefulDataLoader(tiny.Points(), batch_size=3, shuffle=True, num_workers=2))


@case(
    "loaders/StatefulDataLoader in states",
    needs=("torchdata",),
    ranks=1,
    verdict=differs(
        "`iter(loader)` draws a seed from the restored generator: same batches, other dropout; use `manager.batches`",
        part="^after the kill: parameters",
    ),
)
def _stateful_in_states(run: Run) -> None:
    """As its own documentation has it: the user saves its state and draws from it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(tiny.Points(60), batch_size=3, shuffle=True)
    _with_loader(run, loader, by_itself=True, states={"loader": loader})


# -- accelerate launch ------------------------------------------------------------------------------------------------


@case("loops/accelerate launch", ranks=1, timeout_s=180)
def _launch(run: Run) -> None:
    """The case of the Accelerator, in processes that `accelerate launch` starts."""
    order = dataclasses.asdict(dataclasses.replace(run.order, case="loops/Accelerator"))
    options = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    # With --cpu it would start one process, and those of several GPUs are torchrun's.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *options.split()]
    command = [*launch, "--num_cpu_threads_per_process", "1", "--module", "compatibility.launched", json.dumps(order)]
    status = subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
    if run.order.kill is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [json.loads((run.folder / f"result-{rank}.json").read_text()) for rank in range(2)]
    run.expect_equal("exit status", status, 0)
    run.result = {f"{key}, process {rank}": value for rank in range(2) for key, value in found[rank]["result"].items()}
