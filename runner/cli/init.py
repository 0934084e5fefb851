"""runner init."""

from __future__ import annotations

from pathlib import Path

import click

from runner.errors import UsageError


@click.command()
@click.argument("path", default="job.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
def init(path: Path, force: bool) -> None:
    """Write a commented configuration file.

    PATH (default: job.yaml) gets the configuration of the bundled example job, with every other key as a comment.
    """
    from runner.config.schema import JOB_SCHEMA
    from runner.config.template import job_template

    folder = path.absolute().parent
    # A path inside the project is the same on other machines.
    schema = JOB_SCHEMA.relative_to(folder) if JOB_SCHEMA.is_relative_to(folder) else JOB_SCHEMA
    text = job_template(str(schema), path.name)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; pass --force to overwrite it, or choose another PATH") from None
    click.echo(f"runner: wrote {path}; start the run with: runner start --config {path}")
