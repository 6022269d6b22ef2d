"""`sglcache torture` finds what is planted in a daemon, in seconds; and a sound daemon bears all it does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglcache.compiled import VARIABLE
from sglcache.torture import daemon, faults, run
from sglcache.torture.report import Report, describe

pytestmark = [pytest.mark.survive, pytest.mark.timeout(120)]

ALL = tuple(faults.BY_NAME)
FOUND_S = 30.0  # at most: the first thing that is found ends a torture, mostly after two
HEAD = """
from sglcache.testing.planting import plant
class Here:
    setattr = staticmethod(setattr)
here = Here()
"""


class Bug(NamedTuple):
    """What is planted in each rank, the faults that bring it out, and what a torture must say of it."""

    source: str
    faults: tuple[str, ...]
    said: str
    kind: str = "hiradix"
    options: dict[str, Any] = {}  # noqa: RUF012
    host_tokens: int | None = None


BUGS = {
    "a copy that brings another page": Bug(
        """
from sglcache.memory.engine import Flight
import numpy as np
slots, calls = Flight.slots, [0]
def wrong(self):
    calls[0] += 1
    found = slots(self)
    return [(np.roll(src, 1), dst) for src, dst in found] if calls[0] % 5 == 0 else found
Flight.slots = wrong
""",
        (),
        "wrong bytes",
    ),
    "a load that is told of before it is there": Bug(
        """
from sglcache.memory import cpu_engine
move, calls = cpu_engine.move, [0]
def lazy(way, *rest):
    calls[0] += way.name == "load"
    return rest[2] if way.name == "load" and calls[0] % 10 == 0 else move(way, *rest)
cpu_engine.move = lazy
""",
        (),
        "wrong bytes",
    ),
    "pages of a session that ended are free though its process lives": Bug(
        """
from sglcache.server.sessions import Sessions
end = Sessions.end
def hasty(self, session, *why):
    end(self, session, *why)
    for shard in range(session.num_shards):
        self.owner.index.shard_gone(session.id, shard)
Sessions.end = hasty
""",
        ("runner-vanish",),
        "wrong bytes",
    ),
    "a salt that tells nobody apart": Bug(
        """
from sglcache.core.key import Namespace
of = Namespace.of
Namespace.of = staticmethod(lambda lora=None, extra_key=None, cache_salt=None: of(lora, extra_key, None))
""",
        (),
        "wrong bytes",
    ),
    "a removal that nobody is told of": Bug(
        """
from sglcache.core.eventlog import EventLog
removed, calls = EventLog.removed, [0]
def forgetful(self, *arguments, **named):
    calls[0] += 1
    if calls[0] % 20:
        removed(self, *arguments, **named)
EventLog.removed = forgetful
""",
        (),
        "the mirror",
    ),
    "a descriptor that stays open for each session": Bug(
        """
import os
from sglcache.server.sessions import Sessions
drop = Sessions.drop
def leaking(self, member):
    if not member.gone:
        os.dup(member.pidfd)
    drop(self, member)
Sessions.drop = leaking
""",
        ("runner-kill",),
        "descriptors",  # by number, or by who owns them
    ),
    "memory that stays for each lease": Bug(
        """
from sglcache.core.index import Index
acquire, kept = Index.acquire, []
def hoarding(self, *arguments, **named):
    kept.append(bytes(1 << 17))
    return acquire(self, *arguments, **named)
Index.acquire = hoarding
""",
        (),
        "may grow by",
        options={"growth_bytes": 24 << 20, "quiet_every_s": 1.0},
    ),
    "a death that nobody is told of": Bug(
        """
from sglcache.server.sessions import Sessions
died, calls = Sessions._died, [0]
def deaf(self, member):
    calls[0] += 1
    if calls[0] % 2 == 0:
        self.owner.loop.remove_reader(member.pidfd)
    else:
        died(self, member)
Sessions._died = deaf
""",
        ("runner-kill",),
        "after the last runner left there are",
    ),
    "an answer that never comes": Bug(
        """
from sglcache.server.sessions import Member, HANDLERS, EARLY
from sglcache.wire import control
extend, calls = Member.extend, [0]
def silent(self, c):
    calls[0] += 1
    if calls[0] != 100:
        extend(self, c)
for handlers in (*HANDLERS.values(), EARLY):
    if control.Extend in handlers:
        handlers[control.Extend] = silent
""",
        (),
        "has made no progress",
        options={"stuck_s": 1.5, "quiet_every_s": 60.0},
    ),
    "a page of the disk that is not looked at": Bug(
        """
from sglcache.storage.page import Form
Form.check = lambda self, prefix, header, payload: None
""",
        ("disk-damage",),
        "wrong bytes",
        options={"rate": 30.0},
        host_tokens=8 * 96,  # so that much comes from below it
    ),
    "a host tier that is forgotten with its rank": Bug(
        """
from sglcache.server.keeping import Keeper
memfd = Keeper._memfd
def forgetful(self, name, num_bytes):
    self._kept = {}
    return memfd(self, name, num_bytes)
Keeper._memfd = forgetful
""",
        ("rank-kill",),
        "and its next life has",
        options={"rate": 1.0},
    ),
    "a window that is one page short": Bug(
        """
from sglcache.core.resources import SlidingWindow
init = SlidingWindow.__init__
SlidingWindow.__init__ = lambda self, num_pages: init(self, max(1, num_pages - 1))
""",
        (),
        "wrong bytes",
        kind="swa",
    ),
}


def tortured(
    kind: str, seed: int, seconds: float, names: tuple[str, ...], host_tokens: int | None = None, **options: Any
) -> Report:
    config = {name: dict(section) for name, section in daemon.KINDS[kind].items()}
    if host_tokens is not None:
        config["host"]["num_tokens"] = host_tokens
    options = {"num_runners": 2, "rate": 8.0, **options}
    given = run.Options(seed, config, seconds, faults=names, **options)
    report = run.torture(given)
    if report.folder is not None:
        shutil.rmtree(Path(report.folder))
    return report


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")  # where the core is compiled its functions don't ask for each other by name
    bug = BUGS[name]
    storage = "file" if bug.kind == "hiradix" else None
    report = tortured(
        bug.kind,
        1,
        FOUND_S,
        bug.faults,
        host_tokens=bug.host_tokens,
        prelude=HEAD + bug.source,
        storage=storage,
        **{"quiet_every_s": 2.0, "rest_s": 2.0, **bug.options},
    )
    assert not report.ok, f"nobody has noticed {name}\n{describe(report)}"
    assert any(bug.said in problem for problem in report.problems), report.problems


@pytest.mark.parametrize("kind", ["hiradix", "unified"])
def test_a_sound_daemon_bears_it(kind: str) -> None:
    storage = "file" if kind == "hiradix" else None
    report = tortured(kind, int.from_bytes(os.urandom(4), "big"), 4.0, ALL, storage=storage)
    assert report.ok, f"seed {report.seed}: {report.problems}\n{describe(report)}"
    assert report.checked_pages
    assert report.faults
