"""What a stranger installs: the wheel in an environment of its own, with no more than each extra brings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from integration.test_examples import EXAMPLES, kill_after_a_checkpoint, weights

from checkpointing.host.environment import DISTRIBUTION

ROOT = Path(__file__).parents[2]
# What scripts that only want `checkpointing` must not have to install.
HEAVY = {"transformers", "trl", "datasets", "peft", "pyarrow", "boto3", "s3fs", "jinja2", "pydantic", "rich", "click"}
# Two tests must not install at the same time: one would read the half-written files of the other.
pytestmark = pytest.mark.xdist_group("wheel")


class Environment:
    """A virtual environment that knows nothing of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = str(folder / "bin" / "python")
        self.runner = str(folder / "bin" / "runner")

    def install(self, wheel: Path, extras: str = "") -> None:
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        command += ["--constraint", str(ROOT / "constraints.txt"), f"{wheel}{extras}"]
        result = run(command)
        assert result.returncode == 0, result.stderr

    def packages(self) -> set[str]:
        listed = run([self.python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"])
        return {str(package["name"]).lower() for package in json.loads(listed.stdout)}


def run(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("runner", "checkpointing"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = run([*command, "--wheel-dir", str(folder), "./source"], folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.soak
def test_every_extra_is_enough_for_what_it_is_for(wheel: Path, tmp_path: Path) -> None:
    assert wheel.stat().st_size < 1_200_000
    environment = Environment(tmp_path / "environment")

    # As it is: `checkpointing`, for a loop.
    environment.install(wheel)
    assert not environment.packages() & HEAVY
    _killed_and_resumed([environment.python, str(EXAMPLES / "loop.py")], tmp_path / "loop")
    opened = "from checkpointing.storage import open_storage; open_storage('s3://bucket/run')"
    for command, extra in (
        ([environment.runner, "start"], "runner"),
        ([environment.python, "-c", opened], "s3"),
    ):
        refused = run(command, tmp_path)
        assert refused.returncode and refused.stderr.splitlines()[-1].endswith(f"pip install '{DISTRIBUTION}[{extra}]'")

    # Two lines in a Hugging Face script, and a supervisor around it.
    environment.install(wheel, "[transformers,runner]")
    assert not environment.packages() & {"trl", "datasets", "peft", "pyarrow", "boto3", "s3fs"}
    _killed_and_resumed([environment.python, str(EXAMPLES / "hf_trainer.py")], tmp_path / "trainer")
    supervised = tmp_path / "supervised"
    start = [environment.runner, "start", "--nproc-per-node=1", "--output-dir", str(tmp_path / "run")]
    done = run([*start, str(EXAMPLES / "hf_trainer.py"), str(supervised)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    _equal(tmp_path / "trainer", supervised)
    for command, package, extra in (
        ([environment.runner, "start"], "trl", "sft"),
        ([environment.runner, "start", "--set=checkpoint.location=s3://bucket/run", "job.py"], "tenacity", "s3"),
    ):
        (tmp_path / "job.py").touch()
        refused = run(command, tmp_path)
        assert refused.returncode == 2
        assert refused.stderr.endswith(f"{package} is not installed: pip install '{DISTRIBUTION}[{extra}]'\n")


# As if these packages were not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HEAVY else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        (
            {*HEAVY, "botocore", "isal", "tenacity"},
            "from checkpointing.storage import open_storage; open_storage('s3://bucket/run')",
            "s3",
        ),
        (HEAVY, "sys.argv = ['runner', 'start']; from runner.__main__ import main; main()", "runner"),
        (
            {"trl", "datasets", "peft", "pyarrow"},
            "sys.argv = ['runner', 'start']; from runner.__main__ import main; main()",
            "sft",
        ),
    ],
    ids=["s3", "runner", "sft"],
)
def test_what_is_not_installed_is_named(missing: set[str], code: str, extra: str, tmp_path: Path) -> None:
    program = WITHOUT.replace("HEAVY", repr(missing)) + "import checkpointing, checkpointing.manager.manager\n" + code
    environment = {**os.environ, "OUTPUT_DIR": str(tmp_path / "run")}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode, ended.stdout
    assert ended.stderr.splitlines()[-1].endswith(f"pip install '{DISTRIBUTION}[{extra}]'"), ended.stderr


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert {"runner", "s3", "sft", "aim", "transformers"} <= project["optional-dependencies"].keys()


def _killed_and_resumed(command: list[str], folder: Path) -> None:
    """It ends in the same bits as one that nobody touched."""
    untouched = folder.with_name(f"{folder.name}-untouched")
    assert run([*command, str(untouched)]).returncode == 0
    kill_after_a_checkpoint([*command, str(folder)], folder)
    again = run([*command, str(folder)])
    assert again.returncode == 0, again.stderr
    _equal(untouched, folder)


def _equal(one: Path, other: Path) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    assert all(value.equal(found[name]) for name, value in expected.items())
