"""`runner doctor`: preflight checks with suggested fixes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from runner.config.checks import shape_of
from runner.doctor.collectives import check_collectives
from runner.doctor.file_arguments import check_arguments, kept_checkpoints
from runner.doctor.findings import Finding, Level, fail, warn
from runner.doctor.gpu_checks import check_devices, check_mesh, links_between_gpus
from runner.doctor.machine_checks import check_folder, check_locations, check_node, newest_bytes
from runner.doctor.program_imports import check_imports, try_imports_of
from runner.doctor.settings import check_settings, has_rdma
from runner.doctor.start_checks import check_processes, check_start, describe
from runner.errors import UsageError
from runner.plan.memory_need import PlannedJob, estimate, examine_model
from runner.program.nested_launchers import Nested
from runner.session.preflight import StartRequest
from runner.system.gpus import Gpu, find_gpus

__all__ = ["Finding", "Level", "examine"]


def examine(asked: StartRequest, nested: Nested | None = None, *, try_imports: bool = False) -> Iterator[Finding]:
    """Run all checks of this node for a run.

    With several nodes, every node calls it at about the same time, with the options that `runner start` gets there. It
    yields each finding as soon as its check is done. No code of a program is run.

    Args:
        asked: What is to be started.
        nested: What its program comes to; None for the configured job.
        try_imports: Whether to import the packages that the program imports, in a process of their own.
    """
    config, gpus = asked.config, find_gpus()
    try:
        nnodes, nproc = shape_of(config, len(gpus))
    except UsageError as error:
        yield fail("launch", str(error), "set --nnodes, --nproc-per-node or WORLD_SIZE so that they agree")
        return
    yield from describe(asked, nested, nnodes, nproc)
    if nested is None:
        yield from _examine_configured(asked, gpus, nnodes, nproc)
        return
    program = nested.inner or nested.program
    yield from check_imports(program)
    if try_imports:
        yield from try_imports_of(program)
    yield from check_arguments(program)
    yield from check_devices(nproc, links_between_gpus() if len(gpus) > 1 else Counter())
    yield from check_settings(config, os.environ, nproc, nnodes, on_gpu=bool(gpus))
    is_usable = True
    for finding in _check_places(asked, nproc, None, kept_checkpoints(program)):
        is_usable = is_usable and finding.level is not Level.FAIL
        yield finding
    # A location that does not answer is asked once.
    yield from check_node(config, nproc, bool(gpus), 0, newest_bytes(config.tiers.durable) if is_usable else 0)


def _examine_configured(asked: StartRequest, gpus: list[Gpu], nnodes: int, nproc: int) -> Iterator[Finding]:
    config = asked.config
    links = links_between_gpus() if len(gpus) > 1 else Counter()
    yield from check_devices(nproc, links)
    settings = list(check_settings(config, os.environ, nproc, nnodes, on_gpu=bool(gpus)))
    yield from settings
    job = PlannedJob.of(config, nnodes * nproc, nproc, on_gpu=bool(gpus))
    try:
        model = examine_model(config)
        need = estimate(model, job)
    except UsageError as error:
        yield fail("model", str(error), "set model.name_or_path to a hub name or a local folder")
        return
    yield from check_mesh(job, model.parameters, links, has_rdma=has_rdma())
    yield from check_node(config, nproc, bool(gpus), need.host_bytes, need.checkpoint_bytes)
    yield from _check_places(asked, nproc, need.checkpoint_bytes, config.trainer.get("save_total_limit"))
    if any(finding.level is Level.FAIL for finding in settings):
        yield warn("all-reduce", "not tried: the settings above would make it fail", "fix those first")
    else:
        yield from check_collectives(config, nnodes, nproc)


def _check_places(asked: StartRequest, nproc: int, state_bytes: int | None, kept: int | None) -> Iterator[Finding]:
    """Check the places that the run writes to, and then what a start decides by what is there."""
    yield from check_processes(nproc)
    places = [*check_folder(asked.directory.root), *check_locations(asked.config, state_bytes, kept)]
    yield from places
    # A place that cannot be used would be named again.
    if not any(finding.level is Level.FAIL for finding in places):
        yield from check_start(asked)
