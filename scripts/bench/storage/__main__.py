"""What S3 costs: our uploads and resumes against AWS's and rclone's tools and boto3, and training over a slow link.

Against Ceph's radosgw on loopback, in rounds in which all take turns; the results are medians over the rounds of ratios
within each. `docs/benchmarks/storage.md` has the latest result. The driver itself does not need torch.
"""

from __future__ import annotations

import functools
import os
import sys
import uuid
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from library.benchmark import Benchmark
from library.figures import Samples, spread
from library.gateway import FAR_CORE, gateway, missing
from library.measuring import scratch_folder, undisturbed
from library.workers import make_venv
from storage.figures import FAR, NEAR, UPLOADS, figures_of, step_ratios, table_of
from storage.runs import AWS_VENV, BUCKET, FILES, Scale, StorageRuns

AWS_PACKAGES = ["awscli==1.46.3"]
AGENT_CORES = {FAR: FAR_CORE, NEAR: 0}
QUICK = Scale(rounds=2)
# AWS's tool needs an environment of its own.
SMOKE = Scale(
    rounds=1,
    saves=1,
    uploads=tuple(name for name in UPLOADS if name != "aws"),
    files={name: min(nbytes, 1 << 20) for name, nbytes in FILES.items()},
    touched_bytes=0,
    shape={"vocabulary": 1024, "width": 128, "layers": 2, "tokens": 64},
    large_shape={"width": 256, "layers": 2},
)


def measure(bench: Benchmark, runs: StorageRuns, scale: Scale) -> Samples:
    """Measure everything, in rounds."""
    measured = Samples(list)
    uploaded = sum(scale.files.values())
    measured["bytes", "uploaded"] = [uploaded]
    calm = functools.partial(undisturbed, tries=scale.tries, say=bench.say, touch_bytes=scale.touched_bytes)
    quiet = functools.partial(undisturbed, tries=scale.tries, say=bench.say)
    if scale.uploads:
        runs.upload("best")  # The server's first upload takes longer, by any method.
    for number in range(scale.rounds):
        for method in scale.uploads:
            result = calm(functools.partial(runs.upload, method), method)
            measured["upload_s", method].append(result["seconds"])
            measured["bytes", "extra"] += [result["extra_bytes"]] if method == "ours" else []
            rate = uploaded / result["seconds"] / 1e6
            bench.say(f"round {number + 1}/{scale.rounds}, upload, {UPLOADS[method]}: {rate:.0f} MB/s")

    prefix = uuid.uuid4().hex
    location = f"s3://{BUCKET}/{prefix}"
    runs.ranks("save", location)
    for number in range(scale.rounds):
        # These touch the memory themselves: a virtual machine gives back to its host what is free for seconds.
        for kind in ("resume", "download") if number % 2 == 0 else ("download", "resume"):
            if kind == "resume":
                measured["resume_s", "ours"].append(quiet(functools.partial(runs.resume, location), kind))
            else:
                result = quiet(functools.partial(runs.download, f"{prefix}/checkpoint-1/"), kind)
                measured["resume_s", "download"].append(result["seconds"])
                measured["bytes", "checkpoint"] = [result["nbytes"]]
        bench.say(
            f"round {number + 1}/{scale.rounds}, resume {measured['resume_s', 'ours'][-1]:.2f} s, "
            f"plain download {measured['resume_s', 'download'][-1]:.2f} s"
        )
    runs.clear()

    if scale.agent_cores and (os.cpu_count() or 1) <= FAR_CORE:
        bench.say("slow link: left out, it needs a core of its own")
        return measured
    for where in scale.agent_cores:
        core = AGENT_CORES[where]
        steps = runs.steps(agent_core=core, num_saves=scale.saves)
        measured["saving_step_s", where], measured["plain_step_s", where] = map(list, zip(*steps["pairs"], strict=True))
        measured["save_s", where] = steps["save_s"]
        ratios = spread(step_ratios(measured, where), 3)
        bench.say(f"slow link, agent on core {core}: step with a save under way / without: {ratios}")
    return measured


def main() -> None:
    bench = Benchmark(
        "storage", __doc__, quick="two rounds, nothing repeated", smoke="a few megabytes, without AWS's tool"
    )
    bench.add_count("--rounds", 6)
    bench.add_count("--resumes", what="measure only N resumes and N plain downloads, in turns", metavar="N")
    bench.add_scratch("in memory", Path("/dev/shm"))
    options = bench.parse()
    if options.resumes and options.docs:
        bench.parser.error("--docs writes the page of the whole benchmark, and --resumes leaves most of it out")
    scale = bench.scale(Scale(options.rounds, tries=3, agent_cores=(FAR, NEAR), saves=30), QUICK, SMOKE)
    if options.resumes:
        scale = replace(scale, rounds=options.resumes, uploads=(), agent_cores=())
    if why := missing("radosgw") or ("rclone" in scale.uploads and missing("rclone")):
        sys.exit(why)
    if "aws" in scale.uploads:
        make_venv(AWS_VENV, AWS_PACKAGES, "awscli")

    with scratch_folder() as folder, scratch_folder(options.scratch) as scratch, gateway(folder / "radosgw") as server:
        measured = measure(bench, StorageRuns(server, scratch, scale), scale)
    figures = figures_of(measured)
    bench.publish(
        "Storage: what S3 costs",
        f"Ceph's radosgw on loopback, its data in memory, on the same cores; {scale.rounds} rounds.",
        figures,
        table_of(measured, figures),
    )


if __name__ == "__main__":
    main()
