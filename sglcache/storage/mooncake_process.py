"""The process that has Mooncake's client library in it: `python -m sglcache.storage.mooncake_process FD`.

It is a process because the library can hang: while its master does not answer, setting it up and taking it down hold
the interpreter's lock for a minute and more, and a call under way takes half a minute to give up. Here that stops
nobody, and what hangs can be killed, after which it surely writes into no page. It maps the host pages and registers
them, so that bytes go between them and the store without a copy in between.

It ends with its parent: by the kernel's signal, and by the socket's end.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import msgspec

from sglcache.core.effects import Run
from sglcache.core.key import Namespace
from sglcache.errors import ProtocolError
from sglcache.storage.host import HostPages, Piece
from sglcache.storage.mooncake_words import (
    MAX_WORD,
    Answer,
    Ask,
    Close,
    FromProcess,
    Loaded,
    Options,
    Start,
    State,
    to_process,
)
from sglcache.storage.page import MAX_HEADER_BYTES, Form, Reason, packed

log = logging.getLogger("sglcache.mooncake")

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # for a master that is not there, doubling
HEALTH_S = 1.0
STALE_S = 20.0  # a master answers, and the library has not found to it: begin anew
MISSING = -704
TOO_LONG = -600
NO_ROOM = (-200,)
RESTART = 75  # exit code: begin anew


class Client:
    """The library, set up, and host pages. Calls come from several threads."""

    def __init__(self, library: Any, start: Start) -> None:
        self._store = library.MooncakeDistributedStore()
        self._form = Form(start.identity)
        self._prefix = f"{start.options.prefix}-{self._form.fingerprint.hex()}-"
        maps = [mmap.mmap(fd, size) for fd, size in zip(start.fds, start.region_bytes, strict=True)]
        self._maps = maps
        self._bases = [_address(each) for each in maps]
        self._pages = HostPages(
            start.num_pages, [memoryview(each) for each in maps], [Piece(*piece) for piece in start.pieces]
        )
        self._options = start.options
        self._headers: SimpleQueue[mmap.mmap] = SimpleQueue()  # registered memory for the headers of a batch
        self._num_headers = start.num_threads

    def connect(self) -> bool:
        """Wait for a master, then set the library up. False: it would not be."""
        options = self._options
        _await_master(options.master)
        code = self._store.setup(
            options.local_hostname, options.metadata_server, options.segment_bytes, options.buffer_bytes,
            options.protocol, options.rdma_devices, options.master,
        )  # fmt: skip
        if code:
            log.error("setup failed: %d", code)
            return False
        for base, each in zip(self._bases, self._maps, strict=True):
            if code := self._store.register_buffer(base, len(each)):
                log.error("the host pages could not be registered: %d", code)
                return False
        for _ in range(self._num_headers):
            self._headers.put(self._registered(1 << 18))
        return True

    def healthy(self) -> bool:
        return bool(self._store.health_check() == 0)

    def close(self) -> None:
        self._store.close()

    def answer(self, ask: Ask) -> Answer:
        """What became of it. Whatever the library says that is no success is a reason."""
        if ask.what == "clear":
            code = self._store.remove_by_regex(f"^{self._prefix}", True)
            return Answer(ask.number, reason="failed" if code < 0 else None)
        run = Run(Namespace(*ask.namespace), ask.before, ask.digests, ask.tokens)
        if ask.what == "discard":
            codes = self._store.batch_remove([self._prefix + ask.digests.hex()], True)
            return Answer(ask.number, num_pages=codes.count(0))
        keys = [self._prefix + self._form.digest(run, page).hex() for page in range(self._form.num_pages(run))]
        if ask.what == "exists":
            found = self._store.batch_is_exist(keys)
            leading = next((page for page, code in enumerate(found) if code != 1), len(keys))
            failed = leading < len(keys) and found[leading] < 0
            return Answer(ask.number, num_pages=leading, reason="failed" if failed else None)
        slots = array("i", ask.slots)
        return self._put(ask.number, run, keys, slots) if ask.what == "put" else self._get(ask.number, run, keys, slots)

    def _put(self, number: int, run: Run, keys: list[str], slots: Sequence[int]) -> Answer:
        mask = bytearray(code == 1 for code in self._store.batch_is_exist(keys))
        absent = [page for page, there in enumerate(mask) if not there]
        size, name = self._form.header_bytes(run.namespace), packed(run.namespace)
        if not absent or size > MAX_HEADER_BYTES:
            return Answer(number, mask=bytes(mask), reason="full" if absent else None)
        reason: Reason | None = None
        headers = self._take(size * len(absent))
        try:
            for at, page in enumerate(absent):
                payload = self._pages.views(slots[page])
                headers[at * size : (at + 1) * size] = self._form.seal(self._form.prefix(run, page, name), payload)
            codes = self._store.batch_put_from_multi_buffers(
                [keys[page] for page in absent], *self._where(headers, size, [slots[page] for page in absent])
            )
        finally:
            self._headers.put(headers)
        new = 0
        for page, code in zip(absent, codes, strict=True):
            if code == 0:
                mask[page] = 1
                new += 1
            elif reason is None:
                log.warning("put: %d", code)
                reason = "full" if code in NO_ROOM else "failed"
        return Answer(number, num_pages=new, mask=bytes(mask), reason=reason)

    def _get(self, number: int, run: Run, keys: list[str], slots: Sequence[int]) -> Answer:
        size, name = self._form.header_bytes(run.namespace), packed(run.namespace)
        headers = self._take(size * len(keys))
        try:
            codes = self._store.batch_get_into_multi_buffers(keys, *self._where(headers, size, slots))
            for page, code in enumerate(codes):
                if code != size + self._form.payload_bytes:
                    missing = self._why(code, keys[page], size + self._form.payload_bytes)
                    bad = self._form.digest(run, page) if missing == "short" else b""
                    return Answer(number, num_pages=page, reason=missing, bad=bad)
                header = headers[page * size : (page + 1) * size]
                reason = self._form.check(self._form.prefix(run, page, name), header, self._pages.views(slots[page]))
                if reason is not None:
                    # A foreign page is another's by the same digest, and stays; a damaged one makes room.
                    bad = self._form.digest(run, page) if reason == "corrupt" else b""
                    return Answer(number, num_pages=page, reason=reason, bad=bad)
        finally:
            self._headers.put(headers)
        return Answer(number, num_pages=len(keys))

    def _why(self, code: int, key: str, num_bytes: int) -> Reason:
        """Of a get that gave something other than the object."""
        if code == MISSING:
            return "missing"
        # To read more than there is fails like any transfer.
        return "short" if code >= 0 or code == TOO_LONG or 0 <= self._store.get_size(key) != num_bytes else "failed"

    def _where(self, headers: mmap.mmap, size: int, slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of the parts of each object: its header, then its pieces."""
        base = _address(headers)
        bases, pieces = self._bases, self._pages.pieces
        addresses = [
            [base + at * size, *(bases[piece.region] + piece.offset + slot * piece.stride for piece in pieces)]
            for at, slot in enumerate(slots)
        ]
        return addresses, [[size, *(piece.num_bytes for piece in pieces)]] * len(addresses)

    def _take(self, num_bytes: int) -> mmap.mmap:
        headers = self._headers.get()
        if len(headers) >= num_bytes:
            return headers
        self._store.unregister_buffer(_address(headers))
        return self._registered(num_bytes)

    def _registered(self, num_bytes: int) -> mmap.mmap:
        memory = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if code := self._store.register_buffer(_address(memory), len(memory)):
            log.error("memory for headers could not be registered: %d", code)
        return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _await_master(master: str) -> None:
    """Return once its port takes a connection: to set the library up without one holds everything for 90 s."""
    host, colon, port = master.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # an address that only the library understands
    wait = FIRST_WAIT_S
    while not _reachable(host.strip("[]"), int(port)):
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def serve(connection: Connection, load: Callable[[], Any]) -> int:
    """Until the parent says Close, or is gone; the exit code."""
    sending = threading.Lock()

    def say(word: FromProcess) -> None:
        data = msgspec.msgpack.encode(word)
        with sending:
            connection.send_bytes(data)

    start = to_process(connection.recv_bytes(MAX_WORD))
    if not isinstance(start, Start):
        raise ProtocolError(f"a rank says Start first, not {type(start).__name__}")
    try:
        library = load()
    except ImportError as exc:
        say(Loaded(str(exc), missing=isinstance(exc, ModuleNotFoundError)))
        return 1
    say(Loaded())
    client = Client(library, start)
    if not client.connect():
        return RESTART
    threading.Thread(target=_watch, args=(client, start.options, say), name="health", daemon=True).start()

    def work(ask: Ask) -> None:
        try:
            answer = client.answer(ask)
        except Exception:
            log.exception("%s failed", ask.what)
            answer = Answer(ask.number, reason="failed")
        try:
            say(answer)
        except OSError:
            os._exit(0)  # the parent is gone

    with ThreadPoolExecutor(start.num_threads) as threads:
        while True:
            word = to_process(connection.recv_bytes(MAX_WORD))
            if isinstance(word, Close):
                break
            assert isinstance(word, Ask), word
            threads.submit(work, word)
    client.close()
    return 0


def _watch(client: Client, options: Options, say: Callable[[FromProcess], None]) -> None:
    """Tell the parent whether the master can be asked. The library finds it again by itself; if not, end."""
    said: bool | None = None
    since = time.monotonic()
    while True:
        healthy = client.healthy()
        if healthy or not _reachable_or_unknown(options.master):
            since = time.monotonic()
        elif time.monotonic() - since > STALE_S:
            os._exit(RESTART)
        if healthy != said:
            said = healthy
            try:
                say(State(healthy))
            except OSError:
                os._exit(0)
        time.sleep(HEALTH_S)


def _reachable_or_unknown(master: str) -> bool:
    host, colon, port = master.rpartition(":")
    return not colon or not port.isdigit() or "/" in host or _reachable(host.strip("[]"), int(port))


def main(words: Sequence[str]) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(PR_SET_NAME, b"sglcache-moonck", 0, 0, 0)
    if os.getppid() != int(words[1]):
        return 0  # the parent was gone before the kernel was told
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the rank's: it drains first, and then says Close
    logging.basicConfig(format="%(levelname).1s %(name)s: %(message)s")

    def load() -> Any:
        import mooncake.store

        return mooncake.store

    try:
        return serve(Connection(int(words[0])), load)
    except (EOFError, OSError):
        return 0  # the parent is gone


if __name__ == "__main__":
    # Not sys.exit: the library's destructors hang where its close would.
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
