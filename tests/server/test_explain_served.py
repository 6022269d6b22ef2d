"""`explain` of a real daemon: over its socket, HTTP and the command line, of tokens and of requests of before."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client
from sglcache.commands.explain import read, tokens_of
from sglcache.core.asked import Acquires
from sglcache.core.effects import Grant
from sglcache.core.key import ROOT
from sglcache.errors import BadRequest, NoSpace
from sglcache.testing.daemon import Daemon
from sglcache.units import LeaseId
from sglcache.wire import control

pytestmark = pytest.mark.daemons

P = 4
PAGES = 64
SECTIONS: dict[str, Any] = {
    "pool": {"num_tokens": PAGES * P},
    "host": {"num_tokens": 0},
    "http": {"enabled": True, "port": 0},
    "observe": {"departures": 100, "requests": 20},
    "tenants": {"a": {}, "b": {}},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("explain"), **SECTIONS) as daemon:
        yield daemon


def prompt(number: int, num_pages: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + num_pages * P))


def serve(client: Client, tokens: list[int], **options: Any) -> int:
    with client.acquire(tokens, **options) as lease:
        lease.commit()
        return lease.matched_tokens


def post(daemon: Daemon, **fields: Any) -> tuple[int, dict[str, Any]]:
    return _told(urllib.request.Request(f"{daemon.info['http']}/api/explain", json.dumps(fields).encode()))


def get(daemon: Daemon, query: str) -> tuple[int, dict[str, Any]]:
    return _told(urllib.request.Request(f"{daemon.info['http']}/api/explain?{query}"))


def _told(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


def run(daemon: Daemon, *words: str, text: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sglcache", "explain", *words, "--socket", str(daemon.socket)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def still(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what is older each time it is asked for."""
    if isinstance(facts, dict):
        times = ("ago_s", "words", "known_s")
        return {key: still(value) for key, value in facts.items() if key not in times}
    return [still(each) for each in facts] if isinstance(facts, list) else facts


def test_it_is_the_same_everywhere(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client, client.acquire(prompt(1, 8)) as held:
        held.commit()
        serve(client, prompt(1, 8) + prompt(2, 30), tenant="a")
        serve(client, prompt(3, 50), tenant="b")
        tokens = [*prompt(1, 8), *prompt(2, 30), 7]
        facts = client.explain(tokens)
        status, told = post(daemon, tokens=tokens)
        assert status == 200
        assert still(told) == still(facts)
        code, out = run(daemon, ",".join(map(str, tokens)))
    assert (facts["tokens"], facts["matched"]["tokens"], facts["missing"]["page"]) == (153, 32, 9)
    [entry] = facts["missing"]["left"]
    assert (entry["tenant"], entry["for"]["tenant"], entry["policy"]) == ("a", "b", "lru")
    assert code == 1
    first, second, *_ = out.splitlines()
    assert first == "matched 32 of 153 tokens: 32 on the device"
    assert second.startswith("page 9 (tokens 32 to 35) was evicted from the device ")
    assert "for an acquire of tenant b (session " in second
    assert "never backed up: there is no host tier" in out
    assert "would help: a device_floor for tenant a: it has none, and b took the page" in out
    (tmp_path / "prompt.json").write_text(json.dumps(tokens))
    code, told_by_file = run(daemon, f"@{tmp_path / 'prompt.json'}", "--json")
    assert code == 1
    assert json.loads(told_by_file)["missing"]["page"] == 9
    code, out = run(daemon, "-", "--cache-salt", "s", text=" ".join(map(str, prompt(3, 50))))
    assert (code, "another namespace has 200 of these tokens: its cache_salt is different" in out) == (1, True)
    assert run(daemon, ",".join(map(str, prompt(3, 50)))) == (
        0,
        "matched 200 of 200 tokens: 200 on the device\nthat is all of it\n",
    )
    whole = json.dumps({"rank": 0, "tokens": prompt(3, 50)})
    assert run(daemon, "-", text=whole)[0] == 0
    code, out = run(daemon, "-", "--limit", "199", text=whole)
    assert (code, "was not to be matched: limit 199" in out) == (0, True), "who asked for no more has all of it"
    code, out = run(daemon, "-", text='{"tokens": [1, "x"]}')
    assert (code, 'write {"tokens": [1, 15043]}' in out) == (2, True)


def test_what_peers_call_themselves_moves_no_cursor(daemon: Daemon) -> None:
    forged = "\x1b]0;title\x07\n#9999 0.1 s ago  granted"
    with daemon.client(name="evil\x1b[31m\nrow") as client:
        serve(client, prompt(21, 2), request_id=forged)
        said = [run(daemon, "--last", "1")[1], run(daemon, "--request", forged)[1]]
        done = subprocess.run(
            [sys.executable, "-m", "sglcache", "sessions", "--socket", str(daemon.socket)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert "\\x1b]0;title\\x07\\n#9999" in said[0]
    assert "evil\\x1b[31m\\nrow" in done.stdout
    assert all(c.isprintable() or c == "\n" for c in "".join([*said, done.stdout]))
    assert not any(line.startswith(("#9999", "row")) for line in "\n".join([*said, done.stdout]).splitlines())


def test_a_request_is_explained_as_of_then(daemon: Daemon) -> None:
    with daemon.client() as client:
        serve(client, prompt(11, 20), request_id="first")
        serve(client, prompt(12, 60), request_id="second")
        assert serve(client, prompt(11, 20), request_id="third", tenant="a") == 0
        with client.acquire(prompt(13, 60)), pytest.raises(NoSpace):
            client.acquire(prompt(14, 60), request_id="refused")
        with client.acquire(prompt(13, 60), request_id="held"):
            waits = client.acquire_begin(prompt(14, 60), request_id="waits", wait_s=30)
            client.ping()
            assert [row["outcome"] for row in client.last_requests(2)] == ["waiting", "granted"]
        waits.wait().release()
        rows = client.last_requests(20)
        known = {row["id"]: row for row in rows}
        assert known["third"]["outcome"] == "granted"
        assert (known["refused"]["outcome"], known["waits"]["waited_for"]) == ("no_space", "room")
        assert known["waits"]["outcome"] == "granted"
        facts = client.explain_request("third")
        first = client.explain_request("first")
    assert facts["request"]["id"] == "third"
    assert facts["missing"]["why"] == "left"
    [entry] = facts["missing"]["left"]
    assert entry["for"]["session"] == known["second"]["session"]
    assert first["missing"]["why"] == "never"
    assert first["words"][0].startswith("request first (#")
    status, told = get(daemon, "request=third&rank=0")
    assert (status, still(told)) == (200, still(facts))
    code, out = run(daemon, "--request", "#" + str(known["waits"]["number"]))
    assert code == 1
    assert ", waited " in out
    assert " for room" in out
    code, out = run(daemon, "--last", "3")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "  granted  matched 0 of 240  waited " in out.splitlines()[0]
    status, told = get(daemon, "request=nobody")
    assert (status, told["error"]["code"]) == (400, "bad_request")
    assert "explain --last 20" in told["error"]["message"]
    with daemon.client() as client:
        for _ in range(30):
            serve(client, prompt(1, 1))
        assert len(client.last_requests(1000)) == 20
        with pytest.raises(BadRequest, match="there is no request 'first' among the last 20"):
            client.explain_request("first")


@pytest.mark.parametrize("fields", [{}, {"tokens": [1], "request": "x"}, {"tokens": [-1]}, {"tokens": [1 << 32]}])
def test_what_can_not_be_asked_is_refused(daemon: Daemon, fields: dict[str, Any]) -> None:
    status, told = post(daemon, **fields)
    assert (status, told["error"]["code"]) == (400, "bad_request")


def test_the_command_line_says_what_is_wrong(daemon: Daemon) -> None:
    for words, says in (
        (("1,2", "--last", "3"), "one of these"),
        (("1,x",), "'x' is no token id"),
    ):
        code, out = run(daemon, *words)
        assert (code, says in out) == (2, True), out


def test_tokens_are_read_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[1, 2,\n 3]\n")
    assert read(f"@{tmp_path / 'ids'}") == tokens_of("1 2 3", "x") == read("1,2,3") == [1, 2, 3]
    with pytest.raises(BadRequest, match="can't be read"):
        read("@/nothing/there")
    for text in ("", "1,-2", "1.5", "[]"):
        with pytest.raises(BadRequest):
            tokens_of(text, "x")


def test_acquires_are_bounded_in_number_and_bytes() -> None:
    ring = Acquires(3, 100)
    for n in range(5):
        ring.waits(control.Acquire(n, bytes(40), request_id=f"r{n}"), 1, ROOT, float(n), "room")
    assert (len(ring), ring.num_bytes) == (2, 80)
    assert ring.find("r2") is None
    assert ring.find("#5") is ring.find("r4")
    assert ring.find("#") is ring.find("5") is ring.find("#3") is ring.find("#6") is ring.find("#" + "9" * 99) is None
    grant = Grant(LeaseId(1), 8, 4, b"", None)
    ring.answered(1, 4, 7.0, grant)
    ring.answered(1, 4, 8.0, None, "no_space")  # nobody waits for it
    ring.answered(2, 3, 8.0, None, "no_space")
    ring.session_ended(1)
    assert [(asked.outcome, asked.answered_at) for asked in ring.last(9)] == [("granted", 7.0), ("session_ended", None)]
    ring.granted(control.Acquire(9, bytes(40), limit=8, exact=4, request_id="r9"), 1, ROOT, 9.0, grant)
    asked = ring.find("r9")
    assert asked is not None
    told = (asked.number, asked.limit, asked.outcome, asked.device_tokens, asked.host_tokens)
    assert told == (6, 4, "granted", 4, 4)
    assert (len(ring), ring.num_bytes) == (2, 80)
    small = Acquires(3, 1 << 20)
    for n in range(5):
        small.granted(control.Acquire(n, bytes(4)), 1, ROOT, 9.0, grant)
    assert (len(small), small.num_bytes, [each.number for each in small.last(5)]) == (3, 12, [5, 4, 3])
