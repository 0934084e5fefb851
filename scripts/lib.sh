# Sourced by the other scripts: one virtual environment, made again only when what it depends on has changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${RUNNER_VENV:-$root/.venv}
python=${PYTHON:-python3}
# Containers often set it. The tests start hundreds of processes, each of which would compile all modules again.
unset PYTHONDONTWRITEBYTECODE

# setup EXTRAS: make the virtual environment hold the package with these extras.
setup() {
  local extras=$1 stamp wanted
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "scripts: $python is older than 3.11; set PYTHON to a newer one" >&2
    exit 1
  }
  stamp=$venv/.installed$extras
  wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" <("$python" --version) | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return
  fi
  echo "scripts: installing into $venv (once; some minutes)" >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # pip, not uv: where only a local CPU build of torch is at hand, pip finds it.
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "$root$extras"
  # mypy takes minutes once, and seconds from its cache.
  [ ! -x "$venv/bin/mypy" ] || (cd "$root" && "$venv/bin/mypy" >/dev/null 2>&1) || true
  echo "$wanted" >"$stamp"
}

# setup_exactly FILE: make the virtual environment hold these versions, and the package.
setup_exactly() {
  local wanted stamp=$venv/.installed
  wanted=$(cat "$root/pyproject.toml" "$root/$1" <("$python" --version) | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return
  fi
  echo "scripts: installing into $venv (once; some minutes)" >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-cache-dir --requirement "$root/$1" "setuptools>=77"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable "$root"
  echo "$wanted" >"$stamp"
}

# formatting: fail within seconds on what an editor corrects, and on words that read like a translation.
formatting() {
  ruff format --check --quiet . || {
    echo "scripts: format the files with: $venv/bin/ruff format" >&2
    return 1
  }
  ruff check --quiet . && "$root/scripts/words"
}

# static_checks: types, import contracts, dead code and counted figures; scripts/check runs them while the tests run.
static_checks() {
  mypy && lint-imports && vulture && "$venv/bin/python" "$root/scripts/project_figures.py" --counted
}

# finished NAME: print how long the script took, whatever its outcome; to be set as an EXIT trap.
finished() {
  local status=$?
  [ "$status" = 0 ] && echo "$1: passed in $SECONDS s" || echo "$1: failed after $SECONDS s" >&2
}
