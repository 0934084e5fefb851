"""What it costs that a node is lost, and that one joins: `runner start --nnodes 2:3` against torchrun's own elasticity.

Three nodes of one rank each, in network namespaces of this machine (as processes over loopback where these are not
available); a node is killed with all its processes, at the end the one that leads or hosts torchrun's store. The
bundled job under `runner start`, and the same model, data and batches in a plain `SFTTrainer` script under `torchrun
--nnodes 2:3 --max-restarts`, in turn within each round, once with torchrun's default waits and once with the shortest
sensible ones. torchrun admits a node by a restart from the newest checkpoint, as it does for a loss. Both save every
20 steps; ours also keeps a snapshot of every step in memory. Bytes from storage are those of the checkpoints that the
journals say were read. `docs/benchmarks/elastic.md` has the latest result.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from elastic.nodes import LIMIT_S, METHODS, OURS, Nodes, NoProgressError
from library.benchmark import Benchmark
from library.figures import Samples, figure_table, spread, table
from library.measuring import scratch_folder

from runner.chaos.network import Network, NoNetwork

# Steps before a node is killed, and after it has come back.
STEPS_BEFORE = 25


def enter_network(stack: contextlib.ExitStack, say: Callable[[str], None]) -> bool:
    """Make a network of three hosts, if this machine lets us; return whether there is one."""
    try:
        stack.enter_context(Network(3))
    except NoNetwork as error:
        say(f"over loopback, without namespaces: {error}")
        return False
    return True


def measure(name: str, folder: Path, measured: Samples, say: Callable[[str], None], *, in_namespaces: bool) -> None:
    """Kill a node, have it come back with an empty disk, then kill the leader for good."""
    with Nodes(name, folder, in_namespaces=in_namespaces) as nodes:
        for number in range(3):
            nodes.start(number)
        nodes.wait_for_step(STEPS_BEFORE, world_size=3)
        killed_at, before = time.time(), nodes.last_step
        nodes.kill(2)
        first = nodes.wait_for_progress(killed_at, world_size=2)
        loss_s = first.time - killed_at
        measured["loss_s", name].append(loss_s)
        measured["lost_steps", name].append(max(before - first.step + 1, 0))
        say(f"{name}: a node was killed after step {before}; step {first.step} ended {loss_s:.2f} s later")

        nodes.wait_for_step(first.step + 10, world_size=2)
        joined_at = time.time()
        nodes.start(2)
        first = nodes.wait_for_progress(joined_at, world_size=3)
        join_s, pause_s = first.time - joined_at, nodes.longest_pause(joined_at, first.time)
        measured["join_s", name].append(join_s)
        measured["pause_s", name].append(pause_s)
        text = f"{name}: it trains again {join_s:.2f} s after its start; the others paused {pause_s:.2f} s"
        if name == OURS:
            nbytes = nodes.bytes_from_storage(joined_at)
            measured["storage_bytes", name].append(nbytes)
            text += f", {nbytes} bytes were read from storage"
        say(text)

        nodes.wait_for_step(first.step + 10, world_size=3)
        killed_at = time.time()
        nodes.kill(0)
        try:
            leader_s = nodes.wait_for_progress(killed_at, world_size=2).time - killed_at
        except NoProgressError:
            if name == OURS:
                raise
            say(f"{name}: no step after its first node was lost")
            return
        measured["leader_s", name].append(leader_s)
        say(f"{name}: the next step ended {leader_s:.2f} s after its first node was lost for good")


def figures_of(measured: Samples) -> dict[str, float]:
    ours = statistics.median(measured["loss_s", OURS])
    peers = [statistics.median(values) for name in METHODS if name != OURS and (values := measured["loss_s", name])]
    return {
        "node_loss_s": ours,
        "node_loss_vs_best_peer": ours / min(peers),
        "lost_steps": float(max(measured["lost_steps", OURS])),
        "join_pause_s": statistics.median(measured["pause_s", OURS]),
        "storage_bytes_read": float(max(measured["storage_bytes", OURS])),
        "leader_loss_s": statistics.median(measured["leader_s", OURS]),
    }


def table_of(measured: Samples, methods: list[str]) -> str:
    return table(
        "method | node killed → next step, s | steps computed twice | node started → first step with it, s "
        "| longest pause of the others meanwhile, s | first node lost for good → next step, s",
        (
            [
                METHODS[name],
                spread(measured["loss_s", name]),
                spread(measured["lost_steps", name], 0),
                spread(measured["join_s", name]),
                spread(measured["pause_s", name]),
                spread(measured["leader_s", name]) if measured["leader_s", name] else f"none in {LIMIT_S:.0f}",
            ]
            for name in methods
        ),
    )


def main() -> None:
    bench = Benchmark("elastic", __doc__, quick="2 rounds", smoke="1 round, without torchrun's default waits")
    bench.add_count("--rounds", 7)
    bench.add_scratch()
    options = bench.parse()
    rounds = bench.scale(options.rounds, 2, 1)
    methods = [name for name in METHODS if not (options.smoke and name == "torchrun")]
    measured, problems = Samples(list), list[str]()
    with contextlib.ExitStack() as stack:
        in_namespaces = enter_network(stack, bench.say)
        for turn in range(rounds):
            # In turn, and not always in the same order.
            for name in methods if turn % 2 == 0 else reversed(methods):
                with scratch_folder(options.scratch) as folder:
                    try:
                        measure(name, folder, measured, bench.say, in_namespaces=in_namespaces)
                    except NoProgressError as error:
                        bench.say(str(error))
                        problems.append(str(error))
    figures = figures_of(measured)
    where = "network namespaces" if in_namespaces else "processes over loopback"
    ends = "\n".join(f"- {problem}" for problem in problems) or "All rounds came to their end."
    bench.publish(
        "Nodes that come and go",
        f"{rounds} round(s), in {where}; median and quartiles.",
        figures,
        f"{table_of(measured, methods)}\n\n{figure_table(figures)}\n\n{ends}",
    )
    sys.exit(1 if any(METHODS[OURS] in problem for problem in problems) else 0)


if __name__ == "__main__":
    main()
