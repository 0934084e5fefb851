# Sourced by the other scripts: one virtual environment, made anew only when what it depends on has changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${RUNNER_VENV:-$root/.venv}
python=${PYTHON:-python3}

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
