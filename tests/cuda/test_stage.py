"""The processes that questions are asked in: no answer is waited for without end, and none has what is another's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# In a process of its own, since actors are forked. What it prints is what was found.
PROGRAM = """
import os, signal, time
from sglcache.testing.probe.stage import Failed, Gone, Here, Hung, staged

def never(here): time.sleep(1000)
def ends(here): os._exit(0)
def fails(here): raise ValueError("as it must")
def adds(here, a, b): return a + b
def open_now(here): return sorted(int(name) for name in os.listdir("/proc/self/fd"))
def reads(here): return os.read(here.got[0], 5)
def gives(here):
    reader, writer = os.pipe()
    os.write(writer, b"given")
    os.close(writer)
    here.give.append(reader)

def told(kind, ask, *args):
    try:
        ask(*args)
    except kind as exc:
        print(kind.__name__, exc)

began, before = time.monotonic(), open_now(None)
with staged(0, 20) as stage:
    a = stage.actor("A")
    print(a.ask(adds, 1, b=2))
    told(Failed, a.ask, fails)
    a.ask(gives)
    (fd,) = a.take()
    b = stage.actor("B")
    print("got", b.hand([fd], reads))
    print("open", len(b.ask(open_now)), len(a.ask(open_now)))
    os.close(fd)
    a.ask(gives)  # and nobody takes it
    told(Gone, b.ask, ends)
    a.begin(never)
    print("answered", a.has_answered(0.01))
    killed, dead = a.kill()
    print("dead", killed < dead)
with staged(0, 0.2) as stage:
    c = stage.actor("C")
    told(Hung, c.ask, never)
    pid = c.pid
print("left behind", stage.left_behind)
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("gone")
assert open_now(None) == before, "the asker kept descriptors"
assert time.monotonic() - began < 15
"""


def test_stage(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert not ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "3"
    assert lines[1].startswith("Failed A (fails): ValueError: as it must (program.py:")
    assert lines[2] == "got b'given'"
    word, *fds = lines[3].split()
    # stdin, stdout, stderr, the link, the folder that is listed; and the descriptor that is listed first
    assert (word, fds) == ("open", ["5", "5"]), "an actor has descriptors of others"
    assert lines[4] == "Gone B (ends) ended before it answered"
    assert lines[5:7] == ["answered False", "dead True"]
    assert lines[7].startswith("Hung C (never) did not answer within 0.")
    assert lines[8:] == ["left behind []", "gone"]
