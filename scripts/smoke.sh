#!/usr/bin/env bash
# Once through, with real processes: a daemon of two replicas on free ports, a subscriber that wants to see every kind of
# event, a replay of a made-up trace from two processes with every byte checked, a clear of each tier, a replica that is
# killed and comes back, and a clean stop.
# Exits 0 if all of it went as it should. Arguments go to `sglcache replay`, such as --limit 500.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
work=$(mktemp -d "${TMPDIR:-/tmp}/sglcache-smoke.XXXXXX")
daemon= subscriber=

finish() {
    code=$?
    trap - EXIT
    for pid in $subscriber $daemon; do # what is still there is ours, and should not be
        if kill -0 "$pid" 2>/dev/null; then kill -TERM "$pid" && wait "$pid" || true; fi
    done
    if [ "$code" -ne 0 ]; then
        echo "smoke: failed with $code; the daemon's and the subscriber's last words:" >&2
        tail -n 30 "$work"/*.log >&2 || true
    fi
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT

until_true() { # until_true SECONDS WHAT COMMAND...: try every 50 ms
    local tries=$(($1 * 20)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ "$((tries -= 1))" -le 0 ]; then echo "smoke: $what did not happen" >&2 && return 1; fi
        sleep 0.05
    done
}

export SGLCACHE_SOCKET=$work/control.sock
"$bin/sglcache" serve --set events.endpoint=tcp://127.0.0.1:0 --set events.replay_endpoint=tcp://127.0.0.1:0 \
    --set http.port=0 --set parallel.dp_size=2 --set "control.socket=$SGLCACHE_SOCKET" --set "state.dir=$work/state" \
    >"$work/daemon.log" 2>&1 &
daemon=$!
until_true 30 "a ping" "$bin/sglcache" ping
read -r events replay < <("$bin/sglcache" status --rank 1 --json | "$bin/python" -c '
import json, sys
stream = json.load(sys.stdin)["stream"]
print(stream["endpoint"], stream["replay_endpoint"])')
echo "smoke: a daemon of two ranks, rank 1 publishing on $events, replaying on $replay"

"$bin/python" scripts/subscribe.py --endpoint "$events" --replay-endpoint "$replay" --check --timeout 120 >"$work/subscriber.log" 2>&1 &
subscriber=$!
"$bin/sglcache" replay --rank 1 --verify "$@"
victim=$("$bin/sglcache" status --rank 0 --json | "$bin/python" -c 'import json, sys; print(json.load(sys.stdin)["pid"])')
kill -KILL "$victim"
"$bin/sglcache" clear --rank 1 --tier host
"$bin/sglcache" clear --rank 1 --tier device
"$bin/sglcache" clear --rank 1
wait "$subscriber" || { echo "smoke: the subscriber did not see all that it should" >&2 && exit 1; }
subscriber=
echo "smoke: the subscriber saw a multi-block Stored, its Removed, and a Cleared"
until_true 30 "another life of rank 0" "$bin/sglcache" ping --rank 0
"$bin/sglcache" status >"$work/status.log"
grep -q "rank 0: pid $victim was killed by SIGKILL" "$work/status.log"
echo "smoke: rank 0 was killed and is back; rank 1 went on"
kill -TERM "$daemon"
wait "$daemon" || { echo "smoke: the daemon did not stop with 0" >&2 && exit 1; }
daemon=
echo "smoke: passed"
