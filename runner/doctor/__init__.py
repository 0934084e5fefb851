"""`runner doctor`: preflight checks with suggested fixes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from runner.config.checks import shape_of
from runner.config.schema import Config
from runner.doctor.collectives import check_collectives
from runner.doctor.findings import Finding, Level, fail, warn
from runner.doctor.gpu_checks import check_devices, check_mesh, links_between_gpus
from runner.doctor.machine_checks import check_locations, check_node
from runner.doctor.settings import check_settings, has_rdma
from runner.errors import UsageError
from runner.plan.memory_need import PlannedJob, estimate, examine_model
from runner.system.gpus import find_gpus

__all__ = ["Finding", "Level", "examine"]


def examine(config: Config) -> Iterator[Finding]:
    """Run all checks of this node for a run.

    With several nodes, every node calls it at about the same time, with the options that `runner start` gets there. It
    yields each finding as soon as its check is done.
    """
    gpus = find_gpus()
    try:
        nnodes, nproc = shape_of(config, len(gpus))
    except UsageError as error:
        yield fail("launch", str(error), "set --nnodes, --nproc-per-node or WORLD_SIZE so that they agree")
        return
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
    yield from check_locations(config, need.checkpoint_bytes)
    if any(finding.level is Level.FAIL for finding in settings):
        yield warn("all-reduce", "not tried: the settings above would make it fail", "fix those first")
    else:
        yield from check_collectives(config, nnodes, nproc)
