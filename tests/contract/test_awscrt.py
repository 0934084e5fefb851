"""With `awscrt` installed, botocore uses another signer: uploads must work with it, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.servers import Server, bucket_on
from infra.parts import lacks

ROUND_TRIP = """
import botocore.compat
assert botocore.compat.HAS_CRT
from checkpointing.storage import open_storage, s3
store = s3.S3Store(LOCATION)
data = bytes(range(256)) * (9 << 12)
assert store.upload("many", [memoryview(data)]) == len(data)
store.upload("one", [memoryview(b"small")])
store.put("plain", b"x")
assert store.get("one") == b"small" and store.get("plain") == b"x"
back = bytearray(len(data))
store.read_into("many", 0, memoryview(back))
assert back == data
"""


def test_uploads_with_awscrt(rclone_s3: Server, tmp_path: Path, monkeypatch: object) -> None:
    folder = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "awscrt==0.38.1"]
    try:
        subprocess.run(pip, check=True, timeout=240)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lacks("awscrt", error)
    location = f"s3://{bucket_on(rclone_s3, monkeypatch)}/awscrt"  # type: ignore[arg-type]
    text = "from checkpointing.storage import s3, s3_multipart\ns3_multipart._PART_BYTES = 5 << 20\n" + ROUND_TRIP
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(
        [sys.executable, "-c", text.replace("LOCATION", repr(location))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
