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
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import Progress, command_line, end_by_signals, machine, make_parser, spread, today, write_figures
from elastic_nodes import LIMIT_S, METHODS, OURS, PEERS, Nodes, NoProgressError

from runner.chaos.network import Network, NoNetwork

PAGE = "elastic.md"
# Steps before a node is killed, and after it has come back.
STEPS_BEFORE = 25


@dataclass
class Measured:
    """What the rounds have shown, by method.

    Attributes:
        loss_s: From the kill of a node to the end of the next step.
        lost_steps: Steps that were computed twice.
        join_s: From the start of a node to the end of the first step with it.
        pause_s: The longest time between two steps meanwhile.
        leader_s: From the kill of the leader, for good, to the end of the next step.
        storage_bytes: Bytes of state that were read from storage when a node without a disk joined; ours alone.
        problems: Rounds that did not come to their end.
    """

    loss_s: dict[str, list[float]] = field(default_factory=dict)
    lost_steps: dict[str, list[int]] = field(default_factory=dict)
    join_s: dict[str, list[float]] = field(default_factory=dict)
    pause_s: dict[str, list[float]] = field(default_factory=dict)
    leader_s: dict[str, list[float]] = field(default_factory=dict)
    storage_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = make_parser(__doc__, PAGE, quick="2 rounds", smoke="1 round, without torchrun's default waits")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; default: the temporary folder")
    options = parser.parse_args()
    rounds = 1 if options.smoke else 2 if options.quick else options.rounds
    methods = [name for name in METHODS if not (options.smoke and name == "torchrun")]
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    end_by_signals()
    say, measured = Progress(sys.stderr), Measured()
    with contextlib.ExitStack() as stack:
        in_namespaces = enter_network(stack, say)
        run_rounds(rounds, methods, measured, say, options.scratch, in_namespaces=in_namespaces)
    figures = figures_of(measured)
    write_figures(options.json, figures)
    where = "network namespaces" if in_namespaces else "processes over loopback"
    page = page_of(measured, figures, methods, f"{rounds} round(s), in {where}")
    print(page)
    if options.docs is not None:
        (options.docs / PAGE).write_text(page)
    sys.exit(1 if any(METHODS[OURS] in problem for problem in measured.problems) else 0)


def enter_network(stack: contextlib.ExitStack, say: Progress) -> bool:
    """Make a network of three hosts, if this machine lets us; return whether there is one."""
    try:
        stack.enter_context(Network(3))
    except NoNetwork as error:
        say(f"over loopback, without namespaces: {error}")
        return False
    return True


def run_rounds(
    rounds: int, methods: list[str], measured: Measured, say: Progress, scratch: Path | None, *, in_namespaces: bool
) -> None:
    for turn in range(rounds):
        # In turn, and not always in the same order.
        for name in methods if turn % 2 == 0 else reversed(methods):
            with tempfile.TemporaryDirectory(prefix="eb-", dir=scratch, ignore_cleanup_errors=True) as folder:
                try:
                    measure(name, Path(folder), measured, say, in_namespaces=in_namespaces)
                except NoProgressError as error:
                    say(str(error))
                    measured.problems.append(str(error))


def measure(name: str, folder: Path, measured: Measured, say: Progress, *, in_namespaces: bool) -> None:
    """Kill a node, have it come back with an empty disk, then kill the leader for good."""
    with Nodes(name, folder, in_namespaces=in_namespaces) as nodes:
        nodes.start_all()
        nodes.wait_for_step(STEPS_BEFORE, world_size=3)
        killed_at, before = time.time(), nodes.last_step
        nodes.kill(2)
        first = nodes.wait_for_progress(killed_at, world_size=2)
        loss_s = first.time - killed_at
        lost = before - first.step + 1
        measured.loss_s.setdefault(name, []).append(loss_s)
        measured.lost_steps.setdefault(name, []).append(max(lost, 0))
        say(f"{name}: a node was killed after step {before}; step {first.step} ended {loss_s:.2f} s later")

        nodes.wait_for_step(first.step + 10, world_size=2)
        joined_at = time.time()
        nodes.start(2)
        first = nodes.wait_for_progress(joined_at, world_size=3)
        join_s = first.time - joined_at
        pause_s = nodes.longest_pause(joined_at, first.time)
        measured.join_s.setdefault(name, []).append(join_s)
        measured.pause_s.setdefault(name, []).append(pause_s)
        text = f"{name}: it trains again {join_s:.2f} s after its start; the others paused {pause_s:.2f} s"
        if name == OURS:
            nbytes = nodes.bytes_from_storage(joined_at)
            measured.storage_bytes.append(nbytes)
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
        measured.leader_s.setdefault(name, []).append(leader_s)
        say(f"{name}: the next step ended {leader_s:.2f} s after its first node was lost for good")


def figures_of(measured: Measured) -> dict[str, float]:
    """Return the figures of the JSON file."""
    ours = statistics.median(measured.loss_s[OURS])
    peers = [statistics.median(measured.loss_s[name]) for name in PEERS if name in measured.loss_s]
    return {
        "node_loss_s": ours,
        "node_loss_vs_best_peer": ours / min(peers),
        "lost_steps": float(max(measured.lost_steps[OURS])),
        "join_pause_s": statistics.median(measured.pause_s[OURS]),
        "storage_bytes_read": float(max(measured.storage_bytes)),
        "leader_loss_s": statistics.median(measured.leader_s[OURS]),
    }


def page_of(measured: Measured, figures: dict[str, float], methods: list[str], how: str) -> str:
    """Return the page."""
    rows = [
        f"| {METHODS[name]} | {spread(measured.loss_s.get(name, []))} | {spread(measured.lost_steps.get(name, []), 0)} "
        f"| {spread(measured.join_s.get(name, []))} | {spread(measured.pause_s.get(name, []))} "
        f"| {spread(measured.leader_s[name]) if name in measured.leader_s else f'none in {LIMIT_S:.0f}'} |"
        for name in methods
    ]
    notes = [f"- {problem}" for problem in measured.problems] or ["All rounds came to their end."]
    lines = [
        "# Nodes that come and go",
        "",
        f"`{command_line('elastic.py')}`, {today()}, on {machine()}. {how}; median and quartiles.",
        "",
        " ".join((__doc__ or "").split()),
        "",
        "| method | node killed → next step, s | steps computed twice | node started → first step with it, s "
        "| longest pause of the others meanwhile, s | first node lost for good → next step, s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *(f"`{name}`: {value:.4g}  " for name, value in figures.items()),
        "",
        *notes,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
