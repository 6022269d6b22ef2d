#!/usr/bin/env bash
# The page's tests, in headless Chromium: Debian's, since a browser of Playwright's own would be fetched from elsewhere.
# Playwright gets a virtual environment of its own, .venv-browser, which sees what .venv has. Arguments go to pytest.
#   PYTHON=...        the Python to build it from (3.11 or later), that of .venv
#   CHROMIUM=...      the browser (default: chromium, installed with apt-get where it is missing)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-browser
python=${PYTHON:-python3}

if ! command -v "${CHROMIUM:=chromium}" >/dev/null; then
    command -v apt-get >/dev/null || {
        echo "browser: there is no $CHROMIUM; install it, or say where it is with CHROMIUM=" >&2
        exit 1
    }
    echo "browser: installing chromium"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
CHROMIUM=$(command -v "$CHROMIUM")
export CHROMIUM
wanted=$(.venv/bin/python -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["browser"]))
')
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
    "$python" -m venv --clear "$venv"
    echo "browser: $(paste -sd ' ' <<<"$wanted")"
    "$venv/bin/python" -m pip --disable-pip-version-check install -qq -r /dev/stdin <<<"$wanted"
    # Behind its own packages, those of .venv.
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
    echo "$wanted" >"$venv/installed"
fi
# Lines of .pth files are not followed in a folder that a .pth names: the checkout itself is named here.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$venv/bin/python" -m pytest -m browser tests/web -n 0 -rs "$@"
