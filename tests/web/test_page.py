"""The page in a real browser, over a real daemon: what it shows is what the index has."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sglcache.client import Client
from sglcache.core.key import Namespace
from sglcache.testing.daemon import Daemon, Served, until
from sglcache.testing.pages import Book
from sglcache.testing.rig import pack

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
Serve = Callable[..., Daemon]
HTTP = {"http": {"enabled": True, "port": 0}}
MARKUP = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>"


def url(daemon: Daemon) -> str:
    return str(daemon.info["http"])


def put(client: Client, tokens: Iterable[int], **options: Any) -> None:
    lease = client.acquire(list(tokens), **options)
    lease.commit()
    lease.release(wait=True)


def tree_of(daemon: Served) -> list[int]:
    """Some branches in two namespaces; the pages of a prompt that all of the first share."""
    shared = [*range(100, 116)]
    with daemon.client(name="filler") as client:
        for branch in range(6):
            put(client, [*shared, *(1000 * branch + i for i in range(4 * (branch + 1)))])
        put(client, range(5000, 5040), lora="adapter")
    return shared


def cached(daemon: Served) -> dict[str, int]:
    return {pool["tier"]: pool["cached"] for pool in daemon.settle()["pools"]}


def get(base: str, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Daemon]:
    """For tests that put into it and clear it."""
    with Daemon(tmp_path_factory.mktemp("page"), **HTTP) as daemon:
        yield daemon


@pytest.fixture
def empty(daemon: Daemon) -> Daemon:
    with daemon.admin() as admin:
        until(lambda: not daemon.status(prove=False)["gauges"]["num_leases"])
        daemon.settle()
        admin.clear()
    return daemon


def test_the_tree_is_what_the_index_has(empty: Daemon, visit: Visit) -> None:
    tree_of(empty)
    there = cached(empty)
    page = visit(url(empty))
    page.until("(device) => sglcache.state.picture?.pages[1] === device", there["DEVICE"])
    rows = page.rows()
    assert page.pages() == [there["DEVICE"], there["DEVICE"], there["HOST"]]
    assert sum(row[2] for row in rows) == there["DEVICE"]  # every page is in one node
    assert len([row for row in rows if row[2]]) == empty.status(prove=False)["gauges"]["num_nodes"]
    assert sum(row[8] for row in rows if row[1] == -1) == there["DEVICE"]
    page.shows("#drawn", f"{there['DEVICE']} pages: {len(rows) - 2} of {len(rows) - 2} nodes drawn")
    # In words as well, largest first.
    page.shows("#largest", "0–16")
    page.shows("#largest", "adapter")
    first = page.ask("document.querySelector('#largest tbody tr').textContent")
    assert first.startswith("0–16")
    until(lambda: page.ask("sglcache.tree.frames") > 0)


def test_a_click_shows_path_tokens_and_hashes(empty: Daemon, visit: Visit) -> None:
    shared = tree_of(empty)
    page = visit(url(empty))
    page.until("sglcache.state.picture?.rows.length === 10")
    leaf = max((row for row in page.rows() if row[7] == 0 and row[1] == 1), key=lambda row: row[2])
    page.click(leaf[0])
    page.page.wait_for_selector("#node-tokens")
    prompt = [*shared, *range(5000, 5024)]
    assert page.text("#node-tokens").split() == [str(token) for token in prompt[16:]]
    path = Book(4, "xxh3_128").path(Namespace(), pack(prompt))
    hashes = page.ask(
        "[...document.querySelectorAll('.hashes tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    assert hashes == [[str(p.depth), str(p.hash), p.digest.hex()] for p in path[4:]]
    page.shows("#detail", "16 – 40 (6 pages)")
    assert page.ask("sglcache.state.node.path.map((each) => each.pages)") == [0, 4]
    assert page.ask("sglcache.state.node.tiers") == ["DEVICE", "HOST"]
    # Who holds it is named.
    with empty.client(name="holder") as client:
        lease = client.acquire([*prompt, 1])
        page.shows("#detail", "lease")
        page.until("(name) => sglcache.tree.byName.get(name).row[5] > 0", leaf[0])
        page.shows("#sessions", "holder")
        lease.release(wait=True)


def test_what_comes_and_goes_is_seen_without_a_reload(empty: Daemon, visit: Visit) -> None:
    page = visit(url(empty))
    page.page.wait_for_selector("#empty", state="visible")
    tree_of(empty)
    page.shows("#drawn", "nodes drawn")
    page.until("sglcache.state.picture.pages[0] > 0")
    page.page.wait_for_selector("#empty", state="hidden")
    with empty.client() as client:  # more than the device has: what was there first is evicted
        for round_ in range(8):
            put(client, range(10_000 * (round_ + 1), 10_000 * (round_ + 1) + 4 * 60))
    page.until("sglcache.state.live.counters.evicted_device_pages + sglcache.state.live.counters.demoted_pages > 0")
    page.until("sglcache.state.picture.rows.some((row) => row[3] === 2)")  # on the host alone
    page.press("1", "ArrowRight", "ArrowRight")
    empty.settle()
    with empty.admin() as admin:
        admin.clear()
    page.page.wait_for_selector("#empty", state="visible")
    until(lambda: page.rows() == [])


def test_a_replay_is_seen_live(serve: Serve, visit: Visit) -> None:
    daemon = serve(pool={"page_size": 16, "num_tokens": 65536}, host={"num_tokens": 131072}, **HTTP)
    page = visit(url(daemon))
    page.until("sglcache.state.live !== null")
    frames = page.ask("sglcache.tree.frames")
    command = [sys.executable, "-m", "sglcache", "replay", "--socket", str(daemon.socket), "--limit", "300"]
    replay = subprocess.Popen(
        [*command, "--max-output", "32", "--rate", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = set()
    while replay.poll() is None:
        seen.add(page.ask("sglcache.state.picture?.pages[0]"))
        page.page.wait_for_timeout(100)
    said, _ = replay.communicate()
    assert replay.returncode == 0, said
    assert len(seen) > 3
    assert page.ask("sglcache.tree.frames") > frames + 3
    there = cached(daemon)
    page.until(
        "(sums) => sglcache.state.picture.pages[1] === sums[0] && sglcache.state.picture.pages[2] === sums[1]",
        [there["DEVICE"], there["HOST"]],
    )
    page.until("sglcache.state.live.stream.subscriptions === 0")
    page.shows("#hit-rate", "% hit")
    asked = "sglcache.ring.samples.at(-1).values.counters"
    assert page.ask(f"{asked}.matched_tokens") == daemon.status(prove=False)["counters"]["matched_tokens"]
    label = page.page.get_attribute("#hits canvas", "aria-label")
    assert "device" in label


def test_all_of_it_works_without_a_mouse(empty: Daemon, visit: Visit) -> None:
    shared = tree_of(empty)
    page = visit(url(empty))
    page.until("sglcache.state.picture?.rows.length === 10")
    page.press("1")
    assert page.ask("document.activeElement.id") == "tree"
    page.press("ArrowRight", "ArrowRight")  # the largest namespace, the shared prefix
    page.shows("#node-tokens", str(shared[0]))
    page.press("ArrowRight")
    largest = page.ask("sglcache.tree.byName.get(sglcache.tree.selected).size")
    page.press("ArrowDown")
    assert page.ask("sglcache.tree.byName.get(sglcache.tree.selected).size") < largest
    page.press("ArrowUp")
    assert page.ask("sglcache.tree.byName.get(sglcache.tree.selected).size") == largest
    page.press("ArrowLeft")
    page.shows("#said", "16 tokens in 4 pages, from token 0")
    chosen = page.ask("sglcache.tree.selected")
    page.press("Enter")
    page.until("(name) => sglcache.state.picture.root === name", chosen)
    assert page.pages()[0] == 4 + sum(range(1, 7))
    page.shows("#crumbs", "branch from token 0")
    page.press("Backspace", "Backspace")
    page.until("sglcache.state.root === null && sglcache.state.picture.root === null")
    assert page.ask("sglcache.tree.selected") is not None
    page.press("Escape")
    assert page.ask("sglcache.tree.selected") is None
    page.press("+", "+", "ArrowDown")
    assert page.ask("sglcache.tree.view.y1 - sglcache.tree.view.y0") < 0.6
    page.press("0")
    assert page.ask("sglcache.tree.view.y1") == 1
    page.press("?")
    assert page.ask("document.getElementById('help').open")
    page.press("Escape")
    assert not page.ask("document.getElementById('help').open")
    for key, place in (
        ("2", "largest"),
        ("3", "pools"),
        ("4", "hits"),
        ("5", "stream"),
        ("6", "copies"),
        ("7", "sessions"),
        ("8", "tenants"),
    ):
        page.press(key)
        assert page.ask("document.activeElement.id") in (place, "detail"), key
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.ask(outline) == "solid"  # it is seen where the focus is
    page.press("/")
    assert page.ask("document.activeElement.id") == "tokens"
    page.page.keyboard.type(" ".join(map(str, [*shared, *range(2000, 2008)])))
    page.press("Enter")
    page.shows("#said", "tokens")
    page.until("sglcache.state.node?.before === 16 && sglcache.state.node.tokens[0] === 2000")
    page.press("p")
    page.shows("#pause", "Paused")
    before = page.ask("sglcache.ring.samples.length")
    page.press("s")
    page.shows("#scale", "linear")
    page.press("p")
    page.until("(before) => sglcache.ring.samples.length > before", before)


def test_it_is_dark_where_the_system_is_and_when_told_to(empty: Daemon, visit: Visit) -> None:
    def ground(page: Any) -> int:
        return sum(
            map(int, page.ask("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(")[:-1].split(","))
        )

    light, dark = visit(url(empty)), visit(url(empty), color_scheme="dark")
    assert ground(dark) < 100 < 600 < ground(light)
    light.press("t")
    assert ground(light) < 100
    light.page.reload()
    light.page.wait_for_load_state()
    until(lambda: ground(light) < 100)  # it is remembered
    light.press("t", "t")
    assert ground(light) > 600
    light.page.emulate_media(color_scheme="dark")
    until(lambda: ground(light) < 100)


def test_several_ranks_are_chosen_from(serve: Serve, visit: Visit) -> None:
    daemon = serve(dp_size=2, **HTTP)
    with daemon.rank(1).client() as client:
        put(client, range(40))
    page = visit(url(daemon))
    page.page.wait_for_selector("#ranks button >> nth=1")
    page.page.wait_for_selector("#empty", state="visible")
    page.press("]")
    page.until("sglcache.state.picture?.pages[0] === 10")
    assert page.ask("document.querySelector('#ranks [aria-selected=true]').textContent") == "rank 1"
    page.press("[")
    page.until("sglcache.state.picture?.pages[0] === 0")


def test_a_restart_is_told_and_recovered_from(tmp_path: Path, serve: Serve, visit: Visit) -> None:
    daemon = serve(host={"keep": True}, **HTTP)
    shared = tree_of(daemon)
    page = visit(url(daemon))
    page.expected = ["503", "ERR_CONNECTION"]
    page.until("sglcache.state.picture?.rows.length === 10")
    page.press("1", "ArrowRight", "ArrowRight", "Enter")
    page.until("sglcache.state.picture.root !== null")
    epoch = page.ask("sglcache.state.epoch")
    daemon.settle()
    pid = daemon.kill_rank()
    daemon.next_life(pid)
    page.until("(epoch) => sglcache.state.epoch > epoch", epoch)
    page.until("sglcache.state.away === null && sglcache.state.picture?.root === null")
    page.until("sglcache.state.picture.pages[2] === sglcache.state.live.pools[1].cached")
    assert page.pages()[0] >= len(shared) // 4
    base = url(daemon)
    assert daemon.stop() == 0
    page.page.wait_for_selector("#away", state="visible")
    assert page.text("#state") == "away"
    serve(http={"enabled": True, "port": int(base.rsplit(":", 1)[1])})
    page.until("sglcache.state.away === null")
    page.page.wait_for_selector("#away", state="hidden")
    page.until("sglcache.state.picture?.pages[0] === 0")


def test_nothing_from_outside_and_no_script_but_its_own(empty: Daemon, visit: Visit) -> None:
    page = visit(url(empty))
    page.until("sglcache.state.live !== null")
    page.expected = ["Content Security Policy", "Content-Security-Policy"]
    page.ask("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hurt = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<p onclick='window.hurt = 2'></p><img src='http://127.0.0.1:9/x'>");
        document.body.lastElementChild.previousElementSibling.click();
    }""")
    assert page.ask("window.hurt") is None
    with pytest.raises(Exception, match=r"[Cc]ontent.[Ss]ecurity|Failed to fetch|unsafe-eval"):
        page.ask("new Function('return 1')()") if page.ask(
            "(() => { try { return !new Function('return 1') } catch { return true } })()"
        ) else page.ask("fetch('http://127.0.0.1:9/')")
    headers = page.page.request.get(url(empty), headers={"Accept": "text/html"}).headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    page.requests = [each for each in page.requests if "127.0.0.1:9/" not in each]


def test_names_are_text_whatever_they_look_like(tmp_path: Path, serve: Serve, visit: Visit) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<script>alert(3)</script>": 0, MARKUP.replace(" ", ""): 1, "[UNK]": 2}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    http = {**HTTP["http"], "tokenizer": str(tmp_path / "tokenizer.json")}
    daemon = serve(model_name=MARKUP, http=http, tenants={"a": {"device_floor": 16}})
    with daemon.client(name=MARKUP[:60]) as client:
        put(client, [0, 1, 0, 1, 0, 1, 0, 1], lora=MARKUP)
        page = visit(url(daemon))
        page.until("sglcache.state.picture?.rows.length === 2")
        page.shows("#model", MARKUP)
        page.shows("#sessions", MARKUP[:60])
        page.shows("#tenants", "default")
        page.press("1", "ArrowRight", "ArrowRight")
        page.shows("#detail", MARKUP)
        page.shows("#node-text", "<script>alert(3)</script>")
        assert page.ask("document.querySelectorAll('img').length") == 1  # its own icon
        assert page.ask("document.querySelectorAll('script').length") == 1
        assert MARKUP in page.ask("document.title")


def test_tokens_stay_where_they_are_not_to_be_shown(serve: Serve, visit: Visit) -> None:
    daemon = serve(http={**HTTP["http"], "show_tokens": "never"})
    tree_of(daemon)
    page = visit(url(daemon))
    page.expected = ["409"]
    page.until("sglcache.state.picture?.rows.length === 10")
    page.press("1", "ArrowRight", "ArrowRight")
    page.shows("#detail", "Not shown")
    name = page.ask("sglcache.tree.selected")
    assert get(url(daemon), f"/api/node?name={name}")[1]["tokens"] is None
    page.press("/")
    page.page.keyboard.type("100 101 102 103")
    page.press("Enter")
    page.shows("#said", "http.show_tokens")


def test_a_hidden_page_asks_nothing(empty: Daemon, visit: Visit) -> None:
    page = visit(url(empty))
    page.until("sglcache.ring.samples.length > 0")
    page.ask("""() => {
        Object.defineProperty(document, "hidden", { get: () => window.away, configurable: true });
        window.away = true;
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    page.page.wait_for_timeout(1500)  # what was under way ends
    before = len(page.requests)
    page.page.wait_for_timeout(2500)
    assert len(page.requests) == before
    page.ask("() => { window.away = false; document.dispatchEvent(new Event('visibilitychange')); }")
    until(lambda: len(page.requests) > before)


def test_why_and_what_would_help_are_told(empty: Daemon, visit: Visit) -> None:
    shared = tree_of(empty)
    assert {"explain", "reuse"} <= set(get(url(empty), "/api")[1]["names"])
    page = visit(url(empty))
    page.page.wait_for_selector("#s-reuse", state="visible")
    page.shows("#reuse", "hit rate now")
    page.press("/")
    page.page.keyboard.type(" ".join(map(str, [*shared, 1, 2, 3, 4])))
    page.press("Enter")
    page.shows("#explain", "matched 16 of 20 tokens")
    page.press("9")
    assert page.ask("document.activeElement.id") == "explain"


def test_it_can_be_read_aloud(empty: Daemon, visit: Visit) -> None:
    tree_of(empty)
    page = visit(url(empty))
    page.until("sglcache.state.picture?.rows.length === 10")
    page.until("document.getElementById('tree').getAttribute('aria-label').includes('pages')")
    unnamed = page.ask("""[...document.querySelectorAll("button, input, [role=region], [role=group], canvas[role]")]
        .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
        .map((each) => each.outerHTML)""")
    assert unnamed == []
    assert page.ask("document.documentElement.lang") == "en"
    assert page.ask("[...document.querySelectorAll('table')].every((each) => each.caption)")
    ids = page.ask("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    for width in (1440, 1000, 500):
        page.page.set_viewport_size({"width": width, "height": 1000})
        page.until("document.getElementById('tree').getBoundingClientRect().height > 250")
    page.page.set_viewport_size({"width": 390, "height": 844})  # a telephone
    page.until("document.documentElement.scrollWidth <= innerWidth + 1")


def test_a_million_pages_are_drawn_as_what_fits(serve: Serve, visit: Visit) -> None:
    tiny = {"page_size": 1, "num_tokens": 1 << 21, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
    daemon = serve(pool=tiny, host={"num_tokens": 0}, events={"enabled": False}, **HTTP)
    with daemon.client() as client:
        begun = []
        for branch in range(1100):
            head = [*range(branch % 17), 100 + branch % 50]
            lease = client.acquire([*head, *range(1000 * branch, 1000 * branch + 1000)])
            begun.append(lease.commit_begin())
            lease.release()
        for each in begun:
            each.wait()
        for branch in range(3000):
            lease = client.acquire([7, branch + 10, branch])
            lease.commit_begin()
            lease.release()
        client.acquire([1]).release(wait=True)
    there = daemon.status()["pools"][0]["cached"]
    assert there > 1_000_000
    page = visit(url(daemon))
    page.until("(there) => sglcache.state.picture?.pages[0] === there", there)
    rows = page.rows()
    assert 200 <= len(rows) <= 1500
    assert sum(row[8] for row in rows if row[1] == -1) == there
    largest = max(row[8] for row in rows if row[2])
    assert any(row[8] < largest for row in rows)
    with urllib.request.urlopen(f"{url(daemon)}/api/tree?budget=1500", timeout=10) as answer:
        assert len(answer.read()) < 200_000
    frames = page.ask("sglcache.tree.frames")
    page.press("1", "+", "+", "ArrowRight", "ArrowRight", "ArrowDown", "-", "0")
    page.until("(frames) => sglcache.tree.frames >= frames + 5", frames)
    page.press("ArrowRight", "Enter")
    page.until("sglcache.state.picture.root !== null")
    assert len(page.rows()) <= 1500
    assert daemon.status(prove=False)["loop"]["longest_s"] < 5  # it answered all the while
