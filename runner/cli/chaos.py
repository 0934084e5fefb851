"""The command `runner chaos`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from runner.cli.options import Number, config_options, load_program, program_arguments
from runner.errors import UsageError

# Of a program: long enough for a fault between two saves, short enough for dozens of runs.
_DEFAULT_STEPS = 100
_SAVES = 10


@click.command(context_settings={"allow_interspersed_args": False})
@config_options
@click.option(
    "--kills",
    default=20,
    show_default=True,
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of faults to inject.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=2, max=200),
    metavar="N",
    help="Run the job on N nodes, network namespaces where possible, and let them come and go (default: one node).",
)
@click.option("--minutes", type=Number(min=0), metavar="N", help="Minimum minutes of injection (default: 0).")
@click.option("--seed", type=int, metavar="N", help="Seed of the faults and their moments (default: random).")
@click.option(
    "--fault", "faults", multiple=True, metavar="NAME", help="Kind of fault to inject; repeatable (default: all)."
)
@click.option("--list", "list_faults", is_flag=True, help="List the kinds of faults.")
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=20),
    help="Steps of each run of PROGRAM, the first ones of its training (default: 100).",
)
@click.option("--deterministic", is_flag=True, help="Enable deterministic algorithms (trainer.full_determinism).")
@click.option(
    "--tolerance",
    type=Number(min=0),
    metavar="SHARE",
    help="Allowed difference of a tensor, as a share of its norm (default: 0, bit-identical, if fault-free runs are).",
)
@click.option("--keep", is_flag=True, help="Keep the folders of successful runs, too.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file to write the verdict to.",
)
@program_arguments
def chaos(
    kills: int,
    nodes: int | None,
    minutes: float | None,
    seed: int | None,
    faults: tuple[str, ...],
    list_faults: bool,
    steps: int | None,
    deterministic: bool,
    tolerance: float | None,
    keep: bool,
    json_file: Path | None,
    **job: Any,
) -> None:
    """Inject faults into a job and verify recovery.

    The job (PROGRAM, that of --config, or the bundled one) runs fault-free first, then again while processes are killed
    and stopped, the run is preempted and its storage is damaged. The last checkpoints are compared bit for bit. The
    exit code is 1 if anything was lost or differs.

    Of PROGRAM only the first steps are run, as by `runner rehearse`: nothing of yours is touched.

    With --nodes, machines lose power, are preempted, replaced and cut off, and dropout is off: its masks depend on the
    ranks. A run whose number of nodes has changed must take the same steps on the same samples, with losses that are
    close. With --nnodes MIN:MAX as well, fewer than MIN of them do not train: if that is all of them, every run must
    end with the same bits.
    """
    from runner.chaos.campaign import Campaign
    from runner.chaos.faults import FAULTS
    from runner.chaos.node_campaign import NodeCampaign, without_dropout
    from runner.chaos.node_faults import NODE_FAULTS
    from runner.chaos.run_under_test import JobUnderTest
    from runner.chaos.scene import Locations
    from runner.chaos.verdict import render, to_json

    names = [fault.name for fault in (FAULTS if nodes is None else NODE_FAULTS)]
    if list_faults:
        click.echo("\n".join(names))
        return
    if unknown := set(faults) - set(names):
        raise UsageError(f"--fault {min(unknown)!r} is unknown; use one that `runner chaos --list` shows")
    _check_options(job["program"], steps, deterministic=deterministic)
    if deterministic:
        job["settings"] = (*job["settings"], "trainer.full_determinism=true")
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    fewest = _fewest_nodes(nodes, job)
    # The folder is the campaign's: each run in it has one of its own.
    output_dir, job["output_dir"] = job["output_dir"], None
    program, config = load_program(job)
    config.make_absolute()
    is_exact = config.elastic.mode == "exact"
    if nodes is not None and not is_exact:
        config = without_dropout(config)
    folder = _new_folder(output_dir or f"runs/chaos/{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}")
    (folder / "job.yaml").write_text(config.to_yaml())
    click.echo(f"runner chaos: seed {seed}, in {folder}")
    options, locations = ["--config", str(folder / "job.yaml")], Locations(config, folder.name)
    under_test = JobUnderTest(options)
    if program is not None:
        under_test = JobUnderTest(options, program.from_anywhere().as_typed, _length(steps or _DEFAULT_STEPS))
    campaign: Campaign | NodeCampaign
    if nodes is None:
        campaign = Campaign(
            folder,
            under_test,
            locations=locations,
            seed=seed,
            faults=[fault for fault in FAULTS if not faults or fault.name in faults],
            tolerance=tolerance,
            report=click.echo,
        )
    else:
        campaign = NodeCampaign(
            folder,
            under_test,
            locations=locations,
            num_nodes=nodes,
            seed=seed,
            faults=[fault for fault in NODE_FAULTS if not faults or fault.name in faults],
            tolerance=tolerance,
            exact=is_exact,
            fewest=fewest,
            report=click.echo,
        )
    result = campaign.run(kills, seconds=None if minutes is None else 60 * minutes, keep=keep)
    click.echo(render(result, seed))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result, seed), indent=2) + "\n")
    if not result.passed:
        click.echo(
            f"runner chaos: FAILED: see the folders of the runs in {folder}; --seed {seed} draws the same faults again"
        )
        sys.exit(1)


def _check_options(program: str | None, steps: int | None, *, deterministic: bool) -> None:
    if program is None and steps is not None:
        raise UsageError("--steps is for a PROGRAM; a configured job takes --set trainer.max_steps=N")
    if program is not None and deterministic:
        raise UsageError("--deterministic is for a configured job; remove it, since a PROGRAM sets its own algorithms")


def _length(steps: int) -> tuple[int, int]:
    return steps, max(steps // _SAVES, 1)


def _new_folder(name: str) -> Path:
    folder = Path(name).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--output-dir {folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fewest_nodes(nodes: int | None, job: dict[str, Any]) -> int:
    """Take --nnodes from the options, and return the smallest number of nodes with which a campaign's runs train."""
    from runner.config.schema import split_nnodes

    if nodes is None or job["nnodes"] is None:
        return 1
    # The nodes under test are no nodes of this command.
    given, job["nnodes"] = job["nnodes"], None
    limits = split_nnodes(given)
    if limits is None or limits[1] != nodes:
        raise UsageError(f"--nnodes {given} is not of --nodes {nodes}; pass {nodes}, or MIN:{nodes}")
    return limits[0]
