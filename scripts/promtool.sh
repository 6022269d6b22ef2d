#!/usr/bin/env bash
# Prometheus and its promtool, for the tests of deploy/: prints the folder that both are in. Where this system has none,
# Debian's package is unpacked into .venv/prometheus: nothing is installed, and no service is started.
#   $(scripts/promtool.sh)/promtool check rules deploy/alerts.yml
set -euo pipefail
cd "$(dirname "$0")/.."
here=.venv/prometheus

if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
    dirname "$(command -v promtool)"
    exit
fi
if [ ! -x "$here/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null || {
        echo "promtool: it is missing; put promtool and prometheus on the PATH (https://prometheus.io/download)" >&2
        exit 1
    }
    echo "promtool: unpacking Debian's prometheus into $here" >&2
    rm -rf "$here"
    mkdir -p "$here/deb"
    # As who may not update the lists, with those that there are.
    fetch() { (cd "$here/deb" && apt-get download -qq -o APT::Sandbox::User=root prometheus) >&2; }
    fetch || { apt-get update -qq >&2 && fetch; }
    dpkg-deb -x "$here"/deb/prometheus_*.deb "$here"
    rm -r "$here/deb"
fi
echo "$PWD/$here/usr/bin"
