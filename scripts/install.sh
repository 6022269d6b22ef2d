#!/usr/bin/env bash
# Makes .venv with everything in it: torch (pinned), sglcache (editable), the development tools. Run again, it mends.
#   TORCH=cpu|cuda    which build of torch; without it: CUDA where an NVIDIA driver is present, else CPU
#   TORCH_INDEX=URL   where the CPU build is, if pip's own sources don't have it: PyTorch's CPU wheel index, whose
#                     address pytorch.org gives under "Get started". Without it pip's sources decide, and on
#                     x86-64 the plain package of the default one is the CUDA build: it works, and is some gigabytes
#   PYTHON=...        the Python to build the environment from (3.11 or later)
#   SGLCACHE_PURE=1   leave the core as it is written: pure Python
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=$(sed -n "s/^torch==//p" deploy/constraints.txt)
venv=.venv
python=${PYTHON:-python3}

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "install: $python is $("$python" -V 2>&1); Python 3.11 or later is needed (set PYTHON=...)" >&2
        exit 1
    }
    "$python" -m venv --clear "$venv" || {
        echo "install: $python can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

has_driver() { [ -r /proc/driver/nvidia/version ] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; }
want=${TORCH:-}
if [ -z "$want" ]; then
    if has_driver; then want=cuda; else want=cpu; fi
fi

# What is there already: "X.Y.Z+cpu" is the CPU build; a plain "X.Y.Z" is a CUDA build if it names a CUDA version.
have=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
case "$want" in
cpu)
    if grep -qs "^cuda.*= '" "$venv"/lib/python*/site-packages/torch/version.py && [ "${TORCH:-}" = cpu ]; then
        "${pip[@]}" uninstall -qq --yes torch
        have=
    fi
    if [ "${have%%+*}" != "$torch_version" ]; then
        echo "install: torch $torch_version, CPU build"
        sources=()
        if [ -n "${TORCH_INDEX:-}" ]; then sources=(--extra-index-url "$TORCH_INDEX"); fi
        # The CPU build names itself "+cpu" where there is a choice; where there is none, the plain one is what there is.
        "${pip[@]}" install -qq "${sources[@]}" "torch==$torch_version+cpu" 2>/dev/null ||
            "${pip[@]}" install -qq "${sources[@]}" "torch==$torch_version"
    fi
    ;;
cuda)
    # === compares the text, so that a "+cpu" build won't do.
    if [ "$have" != "$torch_version" ]; then
        echo "install: torch $torch_version, CUDA build (some gigabytes)"
        "${pip[@]}" install -qq "torch===$torch_version"
    fi
    ;;
*)
    echo "install: TORCH=$want; write TORCH=cpu or TORCH=cuda" >&2
    exit 1
    ;;
esac
echo "install: sglcache and its tools; the core is compiled where there is a C compiler, which takes a minute"
# What it is built with is among its tools: an environment of the build's own would install it once more.
"$venv/bin/python" -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))' |
    "${pip[@]}" install -qq -r /dev/stdin
"${pip[@]}" install -qq --no-build-isolation --editable '.[dev]'

have=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
echo "install: the core is $("$venv/bin/python" -c 'from sglcache.compiled import FORM; print(FORM)')"
echo "install: $venv is ready: $("$venv/bin/python" -V), torch $have ($want wanted)"
