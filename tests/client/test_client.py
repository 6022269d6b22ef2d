"""A runner's client against a real daemon: what it gives, what it refuses, and what is left of it after a fork."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglcache
from sglcache.client import Client
from sglcache.client.client import Event
from sglcache.client.stages import acquire_alike
from sglcache.errors import (
    BadRequest,
    Busy,
    ClosedError,
    Forbidden,
    NoSpace,
    SglcacheError,
    Unavailable,
    UnknownLease,
)
from sglcache.testing.daemon import Daemon, Puppet, until
from sglcache.units import Tier
from sglcache.wire import control

TOKENS = list(range(50))  # 12 whole pages of 4 and a half


@pytest.fixture
def daemon(lend: Callable[..., Daemon]) -> Daemon:
    return lend()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


# -- the journey --------------------------------------------------------------------------------------


def test_two_runners_share_a_prefix_and_its_bytes(daemon: Daemon, client: Client) -> None:
    with client.acquire(TOKENS) as lease:
        assert (lease.matched_tokens, lease.host_tokens, lease.load) == (0, 0, None)
        assert lease.slots.dtype == np.int32
        assert lease.slots.shape == (13,)
        for layer in range(client.geometry.num_layers):
            client.pool.k[layer][lease.slots.tolist()] = layer + 1
            client.pool.v[layer][lease.slots.tolist()] = -layer - 1
        assert lease.commit() == (48, 0)
        with Puppet(daemon.socket) as other:
            other.do("cache = Client(socket); lease = cache.acquire(range(60), limit=44)")
            assert other.ask("(lease.matched_tokens, len(lease.slots))") == [44, 15]
            assert other.ask("lease.slots[:11].tolist()") == lease.slots[:11].tolist()
            for layer in range(2):
                assert other.ask(f"float(cache.pool.k[{layer}][lease.slots[:11].tolist()].mean())") == layer + 1
                assert other.ask(f"float(cache.pool.v[{layer}][lease.slots[:11].tolist()].mean())") == -layer - 1
            other.do("lease.release(); cache.close()")


def test_a_lease_grows_with_its_tokens(client: Client) -> None:
    with client.acquire(TOKENS, reserve=10) as lease:
        assert lease.slots.shape == (15,)
        before = lease.slots.tolist()
        lease.extend(range(100, 110))
        assert lease.slots.tolist() == before
        assert lease.tokens.tolist() == [*TOKENS, *range(100, 110)]
        lease.extend([7], reserve=3)
        assert lease.slots.shape == (16,)
        lease.extend([])
        assert lease.commit(20).committed_tokens == 20
        assert lease.commit().committed_tokens == 60
    assert client.peek([*TOKENS, *range(100, 110), 7]).matched_tokens == 60


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda t: np.array(t, np.uint32), lambda t: np.array(t, "<u4").tobytes()]
)
def test_tokens_come_in_many_forms(client: Client, kind: object) -> None:
    with client.acquire(TOKENS) as lease:
        lease.commit()
    tokens = kind(TOKENS)  # type: ignore[operator]
    assert client.peek(tokens).matched_tokens == 48
    with client.acquire(tokens) as lease:
        assert lease.matched_tokens == 48
        assert lease.tokens.tolist() == TOKENS


@pytest.mark.parametrize(
    "tokens",
    [[], [-1], [True], [*range(20), 1 << 32], [2**70], [1 << 32], [1.5], ["a"], [[1]], b"\0\0\0", [None]],
)
def test_what_is_no_tokens_is_refused(client: Client, tokens: object) -> None:
    with pytest.raises(BadRequest):
        client.acquire(tokens)  # type: ignore[arg-type]
    client.ping()


def test_namespaces_share_nothing(client: Client) -> None:
    names = [{}, {"lora": "a"}, {"extra_key": "a"}, {"cache_salt": "a"}, {"lora": "a", "cache_salt": "a"}]
    for name in names:
        assert client.peek(TOKENS, **name).matched_tokens == 0
        with client.acquire(TOKENS, **name) as lease:  # type: ignore[arg-type]
            assert lease.matched_tokens == 0
            lease.commit()
    for name in names:
        assert client.peek(TOKENS, **name).matched_tokens == 48


def test_a_lease_is_released_once_and_dropped_work_is_not_cached(client: Client) -> None:
    lease = client.acquire(TOKENS)
    lease.abort()
    lease.release()
    lease.abort()
    with pytest.raises(UnknownLease):
        lease.commit()
    with pytest.raises(ZeroDivisionError), client.acquire(TOKENS) as lease:
        _ = 1 // 0
    assert lease.ended
    assert client.peek(TOKENS).matched_tokens == 0


def test_an_error_in_the_block_is_what_is_raised_even_if_the_daemon_is_gone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)

    def work(client: Client) -> None:
        with client.acquire(TOKENS):
            daemon.kill()
            _ = 1 // 0

    with daemon.client() as client, pytest.raises(ZeroDivisionError):
        work(client)


def test_no_space_says_how_much_there_is_and_takes_nothing(daemon: Daemon, client: Client) -> None:
    with client.acquire(range(4 * 200)):
        with pytest.raises(NoSpace) as caught:
            client.acquire(range(1000, 1000 + 4 * 100))
        assert (caught.value.need, caught.value.free, caught.value.total) == (100, 56, 256)
        assert daemon.pool()["leased"] == 200


def test_what_is_cached_makes_room(client: Client) -> None:
    """What is being written through can't be evicted yet, and is waited for."""
    refused = client.status()["counters"]["refused"]
    for start in range(0, 100_000, 5_000):
        with client.acquire(range(start, start + 4 * 200)) as lease:
            lease.commit()
    counters = client.status()["counters"]
    assert counters["demoted_pages"] > 0
    assert counters["refused"] == refused


def test_commands_can_be_begun_and_waited_for_in_any_order(client: Client) -> None:
    leases = [client.acquire([start, *TOKENS]) for start in range(5)]
    begun = [*(lease.commit_begin() for lease in leases), *(lease.release_begin() for lease in leases)]
    tickets = [pending.ticket or 0 for pending in begun]
    assert tickets == sorted(set(tickets))
    for pending in reversed(begun):
        assert pending.wait() == pending.wait(), "again it says the same"
    assert all(client.peek([start, *TOKENS]).matched_tokens == 48 for start in range(5))


def test_far_more_can_be_begun_than_sockets_hold(client: Client) -> None:
    """Both sides write more than the other reads: neither may wait for the other."""
    lease = client.acquire(range(4 * 200))
    for pending in [lease.commit_begin() for _ in range(20_000)]:
        pending.wait()
    lease.release()


def test_a_long_prompt_is_one_frame_in_many_pieces(client: Client) -> None:
    tokens = np.arange(1_000_000, dtype=np.uint32)
    assert client.peek(tokens).matched_tokens == 0
    with pytest.raises(NoSpace):
        client.acquire(tokens)


def test_several_threads_may_use_one_client(client: Client) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(4):
                with client.acquire([number, turn, *TOKENS]) as lease:
                    assert lease.commit().committed_tokens == 52
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# -- pins, clear, status, dump ----------------------------------------------------------------------------


def test_a_pin_keeps_pages_until_it_is_let_go(daemon: Daemon, client: Client) -> None:
    with client.acquire(TOKENS) as lease:
        lease.commit()
    assert client.pin(TOKENS, "me", 60) == 48
    assert client.pin([9, 9, 9, 9], "me", 60) == 0
    daemon.settle()
    with pytest.raises(Busy) as caught:
        client.clear()
    assert caught.value.pinned_pages == 12
    assert client.unpin("you") == 0
    assert client.unpin("me") == 12
    assert client.unpin("me") == 0
    client.clear()


def test_a_pin_runs_out(daemon: Daemon, client: Client) -> None:
    with client.acquire(TOKENS) as lease:
        lease.commit()
    client.pin(TOKENS, "long", 60)
    client.pin(TOKENS, "short", 0.05)
    assert daemon.settle()["gauges"]["pinned_pages"] == 24
    took = until(lambda: client.status()["gauges"]["pinned_pages"] == 12)
    assert took < 5
    client.unpin("long")


def test_clear_takes_one_tier_or_all(daemon: Daemon, client: Client) -> None:
    with client.acquire(TOKENS) as lease:
        lease.commit()
    daemon.settle()
    assert client.clear("device") == {"DEVICE": 12}
    assert client.peek(TOKENS)[:2] == (0, 48)
    assert client.clear(Tier.HOST) == {"HOST": 12}
    assert client.clear() == {"DEVICE": 0, "HOST": 0}
    with pytest.raises(BadRequest):
        client.clear("disk")


def test_a_dump_is_what_the_stream_told(daemon: Daemon, client: Client) -> None:
    for salt in (None, "a"):
        with client.acquire(TOKENS, cache_salt=salt) as lease:
            lease.commit()
    daemon.settle()
    dumps = [client.dump(tier) for tier in (Tier.DEVICE, "host", "DEVICE")]
    assert len(set(dumps[0].hashes)) == len(dumps[0].hashes) == 24
    assert set(dumps[0].hashes) == set(dumps[1].hashes)
    assert dumps[0].tier is Tier.DEVICE
    assert dumps[0].seq <= client.status()["stream"]["last_seq"]


def test_a_status_proves_the_books_on_request(client: Client) -> None:
    assert "violations" not in client.status()
    assert client.status(prove=True)["violations"] == []


# -- attaching and leaving --------------------------------------------------------------------------------


def test_without_a_daemon_it_says_what_to_do(tmp_path: Path) -> None:
    for path in (tmp_path / "none", str(tmp_path / "none")):
        with pytest.raises(Unavailable, match="sglcache serve"):
            Client(path)


def test_what_is_no_daemon_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "socket"))
        other.listen(1)

        def serve() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((SglcacheError,)):
            Client(tmp_path / "socket")
        thread.join()


def test_a_closed_client_says_so(daemon: Daemon) -> None:
    client = daemon.client()
    lease = client.acquire(TOKENS)
    pool = client.pool
    client.close()
    client.close()
    for use in (client.ping, lease.commit, lambda: client.pool, lambda: pool.k, lambda: client.acquire(TOKENS)):
        with pytest.raises(ClosedError):
            use()
    until(lambda: daemon.pool()["leased"] == 0)


def test_only_a_runner_has_a_pool_and_roles_are_checked(daemon: Daemon) -> None:
    with daemon.client(role="observer") as observer:
        assert observer.pools == []
        with pytest.raises(BadRequest):
            _ = observer.pool
        with pytest.raises(Forbidden):
            observer.acquire(TOKENS)
        with pytest.raises(BadRequest):
            observer.wait_loaded((0, 1))
    with pytest.raises(BadRequest, match="Worker"):
        daemon.client(role="worker")
    with pytest.raises(BadRequest):
        daemon.client(role="king")


def test_attaching_and_leaving_leaks_no_descriptor(daemon: Daemon) -> None:
    def count(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    with daemon.client() as client:
        assert client.pool.pages is not None
    ours, theirs = count(os.getpid()), count(daemon.pid)
    for role in itertools.islice(itertools.cycle(["runner", "observer", "scheduler"]), 12):
        with daemon.client(role=role) as client:
            client.ping()
            if role == "runner":
                assert client.pool.pages is not None
    assert count(os.getpid()) <= ours
    until(lambda: count(daemon.pid) <= theirs)


def test_in_a_forked_child_the_client_is_closed_and_the_parents_goes_on(daemon: Daemon) -> None:
    with Puppet(daemon.socket) as puppet:
        puppet.do("cache = Client(socket); lease = cache.acquire(range(50)); pool = cache.pool")
        puppet.do("begun = cache.peek_begin(range(50))")
        puppet.do(
            """
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    said = []
    uses = (begun.wait, cache.ping, lease.release, lambda: cache.pool, lambda: pool.k, cache.close, lease.wait_loaded)
    for use in uses:
        try:
            use()
            said.append("nothing")
        except SglcacheError as error:
            said.append(error.code)
    names = []
    for fd in range(64):
        try:
            names.append(os.readlink(f'/proc/self/fd/{fd}').split(':[')[0])
        except FileNotFoundError:
            pass
    said.append(names)
    said.append('memfd:' in open('/proc/self/maps').read())
    os.write(writer, json.dumps(said).encode())
    os._exit(0)
os.waitpid(child, 0)
said = json.loads(os.read(reader, 65536))
"""
        )
        *codes, held, mapped = puppet.ask("said")
        assert codes == ["closed", "closed", "closed", "closed", "closed", "nothing", "nothing"]
        assert "socket" not in held
        assert not [name for name in held if "memfd" in name or "eventfd" in name]
        assert not mapped
        puppet.do("begun.wait(); cache.ping(); lease.commit(); lease.release(); cache.close()")


def test_no_torch_is_loaded_before_the_pool_is_asked_for(daemon: Daemon) -> None:
    program = (
        "import sys, sglcache\n"
        f"with sglcache.Client({str(daemon.socket)!r}) as cache, cache.acquire(range(50)) as lease:\n"
        "    lease.wait_loaded(); lease.commit()\n"
        "    assert 'torch' not in sys.modules\n"
        "    cache.pool.k\n"
        "    assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_package_shows_the_clients() -> None:
    assert sglcache.Client is Client
    assert sglcache.Worker.__name__ == "Worker"
    with pytest.raises(AttributeError):
        _ = sglcache.Nothing
    with pytest.raises(AttributeError):
        _ = sglcache.client.Nothing  # type: ignore[attr-defined]


def test_the_socket_is_found_by_the_rule(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLCACHE_SOCKET", str(daemon.socket))
    with Client() as client:
        assert client.socket == daemon.socket
    monkeypatch.delenv("SGLCACHE_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    with pytest.raises(Unavailable, match=r"/nowhere/sglcache/rank-3\.sock"):
        Client(rank=(1, 1), dp_size=2)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("limit", -1),
        ("reserve", 1 << 31),
        ("exact", -4),
        ("room", 1.5),
        ("priority", 1 << 70),
        ("lora", "x" * 257),
        ("cache_salt", "x" * 5000),
        ("lora", 3),
        ("cache_salt", 5),
        ("session_id", b"s"),
        ("tenant", ["t"]),
        ("priority", None),
        ("reserve", None),
        ("limit", True),
        ("limit", "5"),
        ("states", -1),
        ("states", None),
        ("states", 1 << 31),
        ("states", 1),
        ("lora", "\ud800"),
        ("extra_key", "a\udfffb"),
        ("cache_salt", "\ud800"),
        ("session_id", "\ud800"),
        ("tenant", "\ud800"),
        ("prefetch", "\ud800"),
        ("prefetch", "wait_complet"),
        ("prefetch", ""),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_costs_nothing(client: Client, argument: str, value: object) -> None:
    with pytest.raises(BadRequest, match=argument):
        client.acquire([1, 2, 3], **{argument: value})  # type: ignore[arg-type]
    client.ping()


def test_an_option_that_there_is_not_is_refused_by_name_with_the_nearest_or_all(client: Client) -> None:
    for wrong, said in (
        (lambda: client.acquire([1], prefech="none"), "acquire has no option 'prefech'; did you mean prefetch"),  # type: ignore[call-arg]
        (lambda: client.acquire([1], bogus=1), "acquire has no option 'bogus'; it has lora, extra_key, .*priority"),  # type: ignore[call-arg]
        (lambda: client.peek([1], salt="a"), "peek has no option 'salt'; did you mean cache_salt"),  # type: ignore[call-arg]
        (lambda: client.peek([1], limit=1), "peek has no option 'limit'; it has lora, extra_key, cache_salt$"),  # type: ignore[call-arg]
        (
            lambda: client.prefetch([1], bogus=1),
            "prefetch has no option 'bogus'; it has lora, .*timeout_s, tenant$",
        ),  # type: ignore[call-arg]
        (lambda: client.prefetch([1], timeout=1), "prefetch has no option 'timeout'; did you mean timeout_s"),  # type: ignore[call-arg]
        (lambda: acquire_alike([client], [1], prefech="none"), "did you mean prefetch"),  # type: ignore[call-arg]
    ):
        with pytest.raises(BadRequest, match=said) as caught:
            wrong()
        assert caught.value.facts["argument"] in str(caught.value)
    client.ping()


@pytest.mark.parametrize("wrong", ["", "soon", "\ud800", 1, True, b"none", ["none"], "x" * 1000], ids=ascii)
def test_a_policy_that_is_none_is_refused_with_those_that_there_are(client: Client, wrong: Any) -> None:
    for begin in (lambda: client.acquire([1], prefetch=wrong), lambda: client.prefetch([1], policy=wrong)):
        with pytest.raises(BadRequest, match=r"none, best_effort, timeout, wait_complete, or None$") as caught:
            begin()
        assert len(str(caught.value)) < 250
    client.ping()


@pytest.mark.parametrize("policy", ["none", "best_effort", "wait_complete"])
def test_a_timeout_of_a_policy_that_has_none_is_refused_by_acquire_and_prefetch_alike(
    client: Client, policy: str
) -> None:
    for argument, wrong in (
        ("prefetch_timeout_s", lambda: client.acquire([1], prefetch=policy, prefetch_timeout_s=1)),
        ("timeout_s", lambda: client.prefetch([1], policy=policy, timeout_s=1)),
        ("prefetch_timeout_s", lambda: acquire_alike([client], [1], prefetch=policy, prefetch_timeout_s=1)),
    ):
        with pytest.raises(BadRequest, match=f"^{argument}=1.*{policy}.*timeout") as caught:
            wrong()
        assert caught.value.facts["argument"] == argument
    for prefetch in ("timeout", None):
        client.acquire([1], prefetch=prefetch, prefetch_timeout_s=1).release()
        assert client.prefetch([1], policy=prefetch, timeout_s=1) == (0, 0)


@pytest.mark.parametrize(
    "long",
    [10**400, -(10**5000), [10**5000], "9" * 5000, [[1] * 100] * 100],
    ids=["400", "-5000", "in a list", "text", "lists"],
)
def test_what_is_wrong_is_shown_short_however_long_it_is(client: Client, long: Any) -> None:
    for wrong in (
        lambda: client.acquire([1], limit=long),
        lambda: client.acquire([1], prefetch="timeout", prefetch_timeout_s=long),
        lambda: client.prefetch([1], policy="timeout", timeout_s=long),
        lambda: client.pin([1], "me", long),
        lambda: client.clear(long),
        lambda: client.extend([long]),
        lambda: Client(client.socket, rank=(long, 0)),
    ):
        with pytest.raises(BadRequest) as caught:
            wrong()
        assert len(str(caught.value)) < 400
    client.ping()


def test_wrong_arguments_of_a_lease_cost_nothing_and_numpys_integers_are_integers(client: Client) -> None:
    lease = client.acquire([1, 2, 3], limit=np.int64(2), reserve=np.uint8(1))
    for wrong in (
        lambda: lease.commit("x"),  # type: ignore[arg-type]
        lambda: lease.commit(-1),
        lambda: lease.extend(upto="3"),  # type: ignore[arg-type]
        lambda: lease.extend(reserve=None),  # type: ignore[arg-type]
        lambda: lease.extend(states=None),  # type: ignore[arg-type]
        lambda: lease.commit(floor=-1),
        lambda: lease.commit(floor="3"),  # type: ignore[arg-type]
        lambda: lease.commit(states=5),  # type: ignore[arg-type]
        lambda: lease.commit(states=[5]),  # type: ignore[list-item]
        lambda: lease.commit(states=[(5,)]),  # type: ignore[list-item]
        lambda: lease.commit(states=[(5, 6, 7)]),  # type: ignore[list-item]
        lambda: lease.commit(states=[(5, 6)] * (control.MAX_ENDS + 1)),
        lambda: lease.commit_begin(event=Event(-3, -1, 0)),
        lambda: lease.release_begin(event=Event(-3, -1, 0)),
    ):
        with pytest.raises(BadRequest):
            wrong()
    assert lease.commit(np.int32(3)).committed_tokens == 0
    lease.release()


def test_a_daemon_without_companions_says_so_and_a_lease_has_none(client: Client) -> None:
    with client.acquire(TOKENS, states=0) as lease:
        assert (lease.window, lease.mamba, lease.reaches) == (None, None, (0,))
        for wrong in (
            lambda: client.acquire([1], states=1),
            lambda: lease.extend(states=1),
            lambda: lease.commit(states=[(4, 0)]),
        ):
            with pytest.raises(BadRequest, match=r"^states: this daemon keeps none.*\[mamba\]") as caught:
                wrong()
            assert caught.value.facts["argument"] == "states"
        lease.commit(states=[])
        with pytest.raises(BadRequest, match="floor"):
            lease.commit(floor=len(TOKENS))
    with client.acquire(TOKENS) as lease:
        assert lease.reaches == (lease.matched_tokens,) == client.peek(TOKENS).reaches


def test_texts_of_all_commands_are_checked_by_name_and_any_text_is_taken(daemon: Daemon, client: Client) -> None:
    for argument, wrong in (
        ("owner", lambda: client.pin([1, 2, 3], "\ud800", 1.0)),
        ("owner", lambda: client.unpin("\ud800")),
        ("owner", lambda: client.unpin(None)),  # type: ignore[arg-type]
        ("lora", lambda: client.peek([1], lora="\ud800")),
        ("tier", lambda: client.clear("\ud800")),
        ("tier", lambda: client.dump(5)),  # type: ignore[arg-type]
        ("policy", lambda: client.prefetch([1], policy="wait_complet")),
        ("name", lambda: daemon.client(name="\ud800")),
        ("name", lambda: daemon.client(name="x" * 257)),
        ("name", lambda: daemon.worker(b"", 0, name="\ud800")),
    ):
        with pytest.raises(BadRequest, match=argument):
            wrong()
    client.acquire([1, 2, 3], lora="größe", extra_key="\U0001f600", cache_salt="\x00").release()
    client.ping()


def test_a_program_whose_name_is_no_text_attaches(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/\udcff" + "x" * 300])
    with daemon.client() as client:
        client.ping()


def test_what_is_no_lease_of_this_client_is_extended_by_nobody(daemon: Daemon, client: Client) -> None:
    mine = client.acquire([1, 2, 3])
    with daemon.client() as other:
        theirs = other.acquire([1, 2, 3])
        for batch in (
            [(None,)],
            [(mine, [4]), (theirs, [4])],
            [()],
            [None],
            [(mine, [4], 0, None, 0, 5)],
            [(mine.id, [4])],
        ):
            with pytest.raises(BadRequest) as caught:
                client.extend(batch)  # type: ignore[arg-type]
            assert caught.value.facts["argument"] == "batch"
        theirs.release()
    assert mine.tokens.tolist() == [1, 2, 3]
    assert client.extend([(mine, [4])]) == [None]
    mine.release()


def test_what_is_too_much_for_a_frame_says_how_many_tokens_fit(client: Client) -> None:
    tokens = bytes(4 * 4_200_000)
    lease = client.acquire([1])
    for begin, remedy in (
        (lambda count: client.acquire_begin(tokens[: 4 * count], lora="x" * 100), "extend the lease by the others"),
        (lambda count: client.peek_begin(tokens[: 4 * count]), "send fewer"),
        (lambda count: client.extend_begin([(lease, tokens[: 4 * count])]), "several commands"),
    ):
        with pytest.raises(BadRequest, match=f"of 4200000 tokens: at most [0-9]+ fit.*{remedy}") as caught:
            begin(4_200_000)
        most = caught.value.facts["max_tokens"]
        with pytest.raises(BadRequest, match=f"of {most + 1} tokens: at most {most} fit"):
            begin(most + 1)
    assert client.peek(tokens[: 4 * most]).matched_tokens == 0
    lease.release()


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 86401.0, True, "1", None])
def test_a_wrong_ttl_is_refused(client: Client, ttl_s: object) -> None:
    with pytest.raises(BadRequest, match="ttl_s"):
        client.pin([1, 2, 3], "me", ttl_s)  # type: ignore[arg-type]
    client.ping()


@pytest.mark.parametrize("spin_us", [0, 20, 5000.0])
def test_a_client_that_spins_hears_the_same(daemon: Daemon, spin_us: float) -> None:
    with Client(daemon.socket, spin_us=spin_us) as client:
        with client.acquire(range(64)) as lease:
            lease.commit()
        for _ in range(20):
            with client.acquire(range(64)) as lease:
                assert lease.matched_tokens == 64
            client.ping()


@pytest.mark.parametrize("spin_us", [-1, True, "1", float("nan"), 1e9])
def test_a_spin_that_is_none_is_refused(daemon: Daemon, spin_us: Any) -> None:
    with pytest.raises(BadRequest, match="spin_us"):
        Client(daemon.socket, spin_us=spin_us)
