#!/usr/bin/env bash
# The peers that `make bench` measures beside sglcache: makes .venv-peers from packages by name, at the versions of
# scripts/peers/requirements.txt, on the CPU build of torch (some 700 MB to fetch, 2.7 GB installed). Run again, it mends.
# What can't be installed is said, and the suite goes on without it.
#   PYTHON=...        the Python to build it from (3.11 or later)
#   TORCH_INDEX=URL   where the CPU build of torch is, if pip's own sources don't have it; see scripts/install.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-peers
python=${PYTHON:-python3}
list=scripts/peers/requirements.txt
torch_version=$(sed -n "s/^torch==//p" deploy/constraints.txt)
wanted=$(echo "$torch_version"; cat "$list" tests/interop/loopback.c)
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
if [ "$free_mb" -lt 5000 ]; then
    echo "peers: $free_mb MB are free here; 5,000 are needed" >&2
    exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

complete=yes # else the next run tries again
have=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
if [ "$have" != "$torch_version+cpu" ]; then
    echo "peers: torch $torch_version, CPU build"
    sources=()
    if [ -n "${TORCH_INDEX:-}" ]; then sources=(--extra-index-url "$TORCH_INDEX"); fi
    # Only the CPU build: the plain package may be gigabytes of CUDA. Without torch two of the four peers are left.
    "${pip[@]}" install -qq "${sources[@]}" "torch==$torch_version+cpu" || {
        echo "peers: no CPU build of torch $torch_version: set TORCH_INDEX; SGLang's trees and LMCache can't run" >&2
        complete=
    }
fi
echo "peers: $(grep -E '^(sglang|lmcache|ai-dynamo|mooncake)' "$list" | paste -sd ' ')"
if ! "${pip[@]}" install -qq --no-deps -r "$list"; then
    # One by one, so that what is missing for this Python or platform takes nothing else with it.
    while read -r package; do
        "${pip[@]}" install -qq --no-deps "$package" || { echo "peers: no $package here" >&2; complete=; }
    done < <(grep -E '^[a-zA-Z]' "$list")
fi
# Mooncake binds every interface and has no option for it: this keeps it on the loopback.
cc -shared -fPIC -O2 -o "$venv/loopback.so" tests/interop/loopback.c -ldl || {
    echo "peers: a C compiler is needed to run Mooncake on the loopback (cc)" >&2
    complete=
}
if [ -n "$complete" ]; then echo "$wanted" >"$venv/installed"; fi
