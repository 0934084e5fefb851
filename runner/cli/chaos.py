"""runner chaos."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from runner.cli.options import Number, config_options, load
from runner.errors import UsageError


@click.command(context_settings={"allow_interspersed_args": True})
@click.argument("config_file", required=False, metavar="[CONFIG]", type=click.Path())
@config_options
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Faults to strike with.")
@click.option("--minutes", type=Number(min=0), help="And go on for so long.")
@click.option("--seed", type=int, help="Of faults and moments; a new one by default.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this kind; may be given again.")
@click.option("--list", "list_faults", is_flag=True, help="List the kinds of faults.")
@click.option("--deterministic", is_flag=True, help="Switch deterministic algorithms on (trainer.full_determinism).")
@click.option("--tolerance", type=Number(min=0), help="Tensors may differ by this share of their norm.")
@click.option("--keep", is_flag=True, help="Keep the folders of runs that ended well, too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the verdict there.")
def chaos(
    config_file: str | None,
    config_path: str | None,
    output_dir: str | None,
    settings: tuple[str, ...],
    kills: int,
    minutes: float | None,
    seed: int | None,
    faults: tuple[str, ...],
    list_faults: bool,
    deterministic: bool,
    tolerance: float | None,
    keep: bool,
    json_file: Path | None,
    **launch: Any,
) -> None:
    """Break a job on purpose, and see that nothing is lost.

    Runs the job of CONFIG (default: the bundled one) in peace, then again while it is killed, stopped, preempted and
    its storage damaged, and compares the last checkpoints bit for bit. Exits with 1 if anything was lost or differs.
    """
    from runner.chaos.campaign import Campaign
    from runner.chaos.faults import FAULTS
    from runner.chaos.locations import Places
    from runner.chaos.verdict import render, to_json

    names = [fault.name for fault in FAULTS]
    if list_faults:
        click.echo("\n".join(names))
        return
    for name in faults:
        if name not in names:
            raise UsageError(f"--fault {name!r} is not known; `runner chaos --list` lists them")
    if config_file is not None and config_path is not None:
        raise UsageError(f"CONFIG {config_file!r} and --config {config_path!r}: give one of them")
    if deterministic:
        settings = (*settings, "trainer.full_determinism=true")
    seed = int.from_bytes(os.urandom(3), "big") if seed is None else seed
    config = load(config_file or config_path, None, settings, launch)
    config.make_absolute()
    folder = Path(output_dir or f"runs/chaos/{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--output-dir {folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.yaml"
    job.write_text(config.to_yaml())
    click.echo(f"runner chaos: seed {seed}, in {folder}")
    campaign = Campaign(
        folder,
        ["--config", str(job)],
        places=Places(config, folder.name),
        seed=seed,
        faults=[fault for fault in FAULTS if not faults or fault.name in faults],
        tolerance=tolerance,
        tell=click.echo,
    )
    result = campaign.run(kills, seconds=None if minutes is None else 60 * minutes, keep=keep)
    click.echo(render(result, seed))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result, seed), indent=2) + "\n")
    if not result.well:
        click.echo(
            f"runner chaos: NOT WELL; the folders are kept in {folder}; --seed {seed} draws the same faults again"
        )
        sys.exit(1)
