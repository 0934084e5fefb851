"""Which processes convert an exported model, and what is missing for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner.cli.options import echo, size_of
from runner.errors import UsageError
from runner.system.text import visible

_GGUF_CONVERTER = "convert_hf_to_gguf.py"
GGUF_NAME = "model.gguf"
# Of its parameter `--outtype`.
_GGUF_TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
_LAST_LINES = 5


def converter(
    *,
    model_only: bool,
    merge: bool,
    base_model: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    gguf: bool,
    gguf_converter: str | None,
) -> Callable[[Path, Path], None] | None:
    """Return what fills a directory with the model of another one; None where all files are to be copied as they are.

    Raises:
        UsageError: The options contradict each other, or the converter to GGUF cannot be found.
    """
    if base_model is not None and not merge:
        raise UsageError("--base-model is for --merge; add it, or leave both out")
    script = _gguf_script(gguf_converter) if gguf or gguf_converter is not None else None
    size = size_of("--max-shard-size", max_shard_size)
    if not (model_only or merge or dtype or size or script):
        return None
    options = [f"--dtype={dtype}"] if dtype else []
    options += [f"--max-shard-bytes={size}"] if size else []
    options += [f"--base-model={base_model}"] if base_model else []
    module = "runner.training.merged_model" if merge else "checkpointing.files.model_conversion"

    def convert(source: Path, target: Path) -> None:
        in_a_process(module, str(source), str(target), *options)
        if script is not None:
            _to_gguf(script, target, _GGUF_TYPES.get(dtype or "", "auto"))

    return convert


def _gguf_script(given: str | None) -> str:
    found = given if given is not None else shutil.which(_GGUF_CONVERTER)
    if found is None or not Path(found).is_file():
        where = "PATH" if given is None else given
        raise UsageError(
            f"--gguf needs llama.cpp's {_GGUF_CONVERTER}, which is not in {where}; clone "
            "https://github.com/ggml-org/llama.cpp, pip install its gguf-py, and pass the script's path as "
            "--gguf-converter"
        )
    return found


def _to_gguf(script: str, model: Path, kind: str) -> None:
    command = [sys.executable, script, str(model), "--outfile", str(model / GGUF_NAME), "--outtype", kind]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode or not (model / GGUF_NAME).is_file():
        last = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise UsageError(
            f"{script} failed with {done.returncode}; leave --gguf out, or use another release of it:\n{last}"
        )


def in_a_process(module: str, *arguments: str) -> bool:
    """Run a module that imports torch, print what it prints, and return whether its exit code was 0, not 3.

    Raises:
        UsageError: It ended with 2; the text is what it has written to standard error.
    """
    command = [sys.executable, "-m", module, *arguments]
    # In a file: a pipe that nobody reads until the end would fill up, and the process would wait.
    with (
        tempfile.TemporaryFile("w+") as file,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            echo(line.rstrip("\n"))
        process.wait()
        file.seek(0)
        errors = file.read()
    if process.returncode == 2:
        raise UsageError(errors.strip().splitlines()[-1])
    if process.returncode not in (0, 3):
        raise RuntimeError(f"{module} ended with {process.returncode}:\n{visible(errors)}")
    return process.returncode == 0
