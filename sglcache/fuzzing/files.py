"""What lies on a disk, or is said by whoever starts a daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglcache import config as configs
from sglcache import paths
from sglcache.bench import trace
from sglcache.client.discovery import base_url
from sglcache.core.effects import Run
from sglcache.core.hashing import hasher, seed
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import ConfigError, ProtocolError, SglcacheError
from sglcache.net import curve, endpoints
from sglcache.server.numbers import Numbers
from sglcache.storage.catalog import Catalog
from sglcache.storage.file import FileStore
from sglcache.storage.host import HostPages
from sglcache.storage.mooncake_words import Answer, Close, Loaded, Options, State, from_process, to_process
from sglcache.storage.mooncake_words import Ask as AskLibrary
from sglcache.storage.mooncake_words import Start as StartLibrary
from sglcache.storage.page import Form, Identity, packed, unpacked
from sglcache.testing import lives
from sglcache.testing.fuzz import Decoder
from sglcache.wire import control

PAGE = 4  # tokens
PAGES = 64
BLOCK = 64  # bytes
TOKENS = struct.pack("<40I", *range(40))
encode = msgspec.msgpack.encode


class Toml(Decoder):
    """A configuration file, `--set` and what a supervisor hands to a rank."""

    name = "config"
    weight = 0.2
    words = (
        b"[pool]\n", b"[[parallel.stages]]\n", b'"', b"'''", b"[", b"]", b"{", b"}", b"=", b".", b"nan", b"inf", b"-",
        b"1_0", b"0x", b"1e999", b"1979-05-27T07:32:00Z", b"9" * 5000, b"\n", b"a.b.c = 1\n", b"size", b"num_tokens",
        b"bytes", b"\xff", b"\\u0000", b"1979-02-30",
        b"[" * 3000, b"{a=" * 3000,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "config.toml"
        lines = []
        for dotted, value in configs.keys().items():
            if isinstance(value, bool):
                lines.append(f"{dotted} = {str(value).lower()}")
            elif isinstance(value, (int, float)):
                lines.append(f"{dotted} = {value}")
            elif isinstance(value, str):
                lines.append(f'{dotted} = "{value}"')
        plain = b'model_name = "m"\n[pool]\npage_size = 16\nnum_tokens = 1024\nnum_layers = 2\nnum_kv_heads = 2\n'
        plain += b"head_dim = 8\n"
        stage = b"[[parallel.stages]]\nnum_layers = 1\n"
        self.corpus = [
            plain,
            plain + b'[host]\nsize = "2x"\n[events]\nendpoint = "tcp://127.0.0.1:0"\n[http]\nenabled = false\n',
            "\n".join(line for line in lines if line.count(".") == 1).encode(),
            plain + b"[parallel]\npp_size = 2\n" + stage + stage,
            b"pool.num_tokens=4096", b"host.size=2x", b"events.endpoint=tcp://*:5557", b"pool={page_size=1}",
        ]  # fmt: skip
        self.corpus += [f"{line}".replace(" = ", "=").encode() for line in lines]

    def feed(self, data: bytes) -> None:
        if len(data) < 200:
            configs.load(None, [data.decode("utf-8", "surrogateescape")])
        else:
            self.path.write_bytes(data)
            configs.load(self.path)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Environment(Decoder):
    """The variables and addresses that name sockets, folders and servers."""

    name = "environment"
    weight = 0.5
    words = (b"/", b"..", b"\0", b"tcp://", b"ipc://", b":", b"[::1]", b"*", b"@", b"//", b"-1", b"%", b"65536")

    def __init__(self) -> None:
        super().__init__()
        self.corpus = [
            b"/run/user/0/sglcache/rank-0.sock", b"tcp://127.0.0.1:5557", b"tcp://[::1]:5557", b"ipc:///run/e.ipc", b"ipc://@a",
            b"tcp://*:0",
            b"127.0.0.1:30080", b"http://127.0.0.1:30080/server_info",
        ]  # fmt: skip

    def feed(self, data: bytes) -> None:
        text = data[:3000].decode("utf-8", "surrogateescape")
        clean = text.replace("\0", "")  # execve takes none
        environ: Mapping[str, str] = {"SGLCACHE_SOCKET": clean, "XDG_RUNTIME_DIR": clean, "XDG_STATE_HOME": clean}
        with contextlib.suppress(ConfigError):
            paths.check_length(paths.supervisor_path(paths.socket_path(3, environ)))
        _ = paths.state_dir(environ), paths.runtime_dir(environ), paths.supervisors(None, environ)
        with contextlib.suppress(ConfigError):
            base_url(text)
        found = endpoints.parse(text)
        str(found.dialled()), endpoints.is_local(found), found.offset(1)


def identity() -> Identity:
    return Identity(model="m", dtype="float16", layout="page_first", page_size=PAGE, num_layers=2, payload_bytes=96)


def run_of(tokens: bytes, namespace: Namespace = ROOT) -> Run:
    form = Form(identity())
    digests = hasher("xxh3_128").chain(seed(namespace), tokens, form.keys.word_bytes)
    return Run(namespace, None, digests, tokens)


class PageHeaders(Decoder):
    """A page's header in the third tier, and the namespace in it."""

    name = "page_header"
    weight = 2
    words = (b"SGLCPAGE", b"\1" + (5).to_bytes(8, "little"), b"\1" + b"\xff" * 8)

    def __init__(self) -> None:
        super().__init__()
        form = self.form_of = Form(identity())
        self.payload = [memoryview(bytes(96))]
        for namespace in (ROOT, Namespace("l", "x" * 30, "s")):
            run = run_of(TOKENS, namespace)
            for page in (0, 3):
                prefix = form.prefix(run, page, packed(namespace))
                self.corpus.append(form.seal(prefix, self.payload))

    def feed(self, data: bytes) -> None:
        try:
            namespace = unpacked(data[112 : 112 + 60])
            assert packed(namespace) == data[112:172]
        except SglcacheError:
            pass
        # As a file whose hashes are right, and without: what is behind them has to stand by itself.
        import xxhash

        sealed = data[:-16] + xxhash.xxh3_128_digest(data[:-16])
        for each in (data, sealed):
            with contextlib.suppress(SglcacheError):
                found = self.form_of.read(each)
                assert self.form_of.holds(found.namespace, found.digest, found.before, found.tokens)
                assert found.header_bytes <= len(each)
        self.form_of.read(sealed)


class Folders(Decoder):
    """A file store's folder: damaged pages, strange files, a bad index, any lock. It opens, or says why.

    What it then holds are pages that prove themselves, and one that is put is found again.
    """

    name = "folder"
    weight = 0.005
    words = (b"SGLCPAGE", b"SQLite format 3\0")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.template = self.folder / "template"
        memory = memoryview(bytearray(96 * PAGES))
        self.pages = HostPages.page_first(PAGES, [memory])
        store = self.open(self.template)
        store.put(run_of(TOKENS), range(10), lambda: False)
        store.put(run_of(TOKENS, Namespace(None, None, "s")), range(10), lambda: False)
        store.close()
        self.files = sorted(path.relative_to(self.template) for path in self.template.rglob("*") if path.is_file())
        self.corpus = [bytes([number]) + (self.template / path).read_bytes() for number, path in enumerate(self.files)]

    def open(self, path: Path) -> FileStore:
        store = FileStore(path, identity(), self.pages, max_bytes=1 << 20)
        store.open()
        return store

    def feed(self, data: bytes) -> None:
        place = self.folder / "store"
        shutil.copytree(self.template, place)
        try:
            which = data[0] % len(self.files) if data else 0
            target = place / self.files[which]
            match zlib.crc32(data) % 8:
                case 0:
                    target.unlink()
                    target.mkdir()
                case 1:
                    target.unlink()
                    target.symlink_to("/dev/zero")
                case 2:
                    target.unlink()
                    os.mkfifo(target)
                case _:
                    target.write_bytes(data[1:])
            store = self.open(place)
            try:
                run = run_of(TOKENS[:32])
                store.put(run, range(2), lambda: False)
                got = store.get(run, range(2), lambda: False)
                assert got.num_pages == 2 or got.reason is not None, got
                for runs in store.listing():
                    for each in runs:
                        for page in range(store.form.num_pages(each)):
                            part = store.form.part(each, page, 1)
                            assert store.form.holds(each.namespace, part.digests, part.before, part.tokens)
            finally:
                store.close()
        finally:
            shutil.rmtree(place)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Catalogs(Decoder):
    """The file store's index, SQLite: whatever it is, opening it says what is written down, or nothing."""

    name = "catalog"
    weight = 0.02
    words = (b"SQLite format 3\0", b"CREATE TABLE pages", b"INTEGER", b"BLOB", b"TEXT", b"\x7f" + b"\xff" * 7)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "index.db"
        import sqlite3

        from sglcache.storage.catalog import Entry

        catalog = Catalog(self.path)
        catalog.open()
        run = run_of(TOKENS)
        for number in range(1, 9):
            digest = run.digests[16 * number - 16 : 16 * number]
            catalog.add(Entry(number, digest, None, packed(ROOT), TOKENS[:16], 4096, number))
        catalog.close()
        self.corpus = [self.path.read_bytes()]
        for statement in (
            "CREATE TABLE pages (number, digest)",
            "CREATE TABLE pages (number TEXT, digest, before, namespace, tokens, num_bytes, used)",
            "CREATE VIEW pages AS SELECT 'x' AS number, 1 AS digest, 2 AS before, 3 AS namespace, 4 AS tokens, 5, 6",
        ):
            self.path.unlink()
            with contextlib.closing(sqlite3.connect(self.path)) as db:
                db.execute(statement)
                db.execute("PRAGMA user_version = 1")
                with contextlib.suppress(sqlite3.Error):
                    db.execute(f"INSERT INTO pages VALUES ({', '.join(['9223372036854775807'] * 7)})")
                    db.commit()
            self.corpus.append(self.path.read_bytes())

    def feed(self, data: bytes) -> None:
        for end in ("", "-journal", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        self.path.write_bytes(data)
        catalog = Catalog(self.path)
        try:
            entries = catalog.open()
            catalog.find([entry.number for entry in entries][:64])
            catalog.remove(1)
        finally:
            catalog.close()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Journals(Decoder):
    """The journal that a dead rank left: what the next life takes of it was there, in that very slot."""

    name = "journal"
    weight = 0.03
    words = (b"sglcjrn2", b"\0" * 8, b"\xff" * 8, b"\1" + bytes(7))

    def __init__(self) -> None:
        super().__init__()
        self.dead = lives.run(7, lives=1, steps=200, kind="unified", roomy=True)
        whole = bytes(self.dead.region)
        # What is not zeros, in blocks: else most harm would be to rows that nobody wrote.
        self.places = [at for at in range(0, len(whole), BLOCK) if any(whole[at : at + BLOCK])]
        self.size = len(whole)
        self.corpus = [b"".join(whole[at : at + BLOCK] for at in self.places)]

    def feed(self, data: bytes) -> None:
        def harm(memory: memoryview) -> None:
            memory[:] = bytes(self.size)
            for number, at in enumerate(self.places):
                block = data[number * BLOCK : (number + 1) * BLOCK]
                memory[at : at + len(block)] = block

        self.dead.again(harm)


class MooncakeWords(Decoder):
    """What a rank and its Mooncake process say to each other, at both ends."""

    name = "mooncake"
    weight = 2
    form = "msgpack"
    words = (b"\xa4type", b"exists", b"put", b"missing")

    def __init__(self) -> None:
        super().__init__()
        words: list[Any] = [
            StartLibrary(Options(master="127.0.0.1:1"), identity(), 4, [3], [4096], [(0, 0, 96, 96)], 2),
            AskLibrary(1, "put", (None, "x", None), bytes(16), bytes(32), bytes(32), bytes(8)),
            Close(),
            Loaded("no", True),
            State(True),
            Answer(1, 1, b"\1", "missing", bytes(16)),
        ]
        self.corpus = [encode(word) for word in words]

    def feed(self, data: bytes) -> None:
        for decode in (to_process, from_process):
            with contextlib.suppress(ProtocolError):
                decode(data)
                return

        raise ProtocolError("neither end understands it")


class StateFiles(Decoder):
    """The file of the stream's numbers, and its lock."""

    name = "numbers"
    weight = 0.03
    form = "json"
    words = (b"reserved", b"1e999", b"9" * 5000, b"[" * 3000, b"null", b"-1", b"\xff\xfe")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "rank-0.json"
        self.corpus = [b'{"reserved": 1764486000000000}', b'{"reserved": 0, "more": [1]}']

    def feed(self, data: bytes) -> None:
        self.path.write_bytes(data)
        numbers = Numbers(self.path, lambda: 1_764_486_000_000_000)
        try:
            assert 0 < numbers.first <= numbers.reserved < 1 << 63, (numbers.first, numbers.reserved)
        finally:
            numbers.close()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Traces(Decoder):
    """A file of requests for `sglcache bench replay`."""

    name = "trace"
    weight = 0.05
    form = "json"
    words = (b"\n", b"hash_ids", b"1e999", b"NaN", b"[" * 3000, b"9" * 5000)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "trace.jsonl"
        line = b'{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
        self.corpus = [line, b'{"input_length": 1, "hash_ids": [0]}', line + b"\n" + line]

    def feed(self, data: bytes) -> None:
        self.path.write_bytes(data)
        for request in trace.requests(self.path, 20):
            assert 1 <= len(request.tokens) <= control.MAX_FRAME // 4
            assert 0 <= request.arrival_ms < float("inf")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class CurveKeys(Decoder):
    """A CURVE key file."""

    name = "curve"
    weight = 0.03
    words = (b"curve", b"public-key", b"secret-key", b"=", b'"', b"metadata", b"\xff")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        public, secret = curve.make_keys(self.folder, "pair")
        self.path = self.folder / "fuzz.key"
        self.corpus = [public.read_bytes(), secret.read_bytes()]

    def feed(self, data: bytes) -> None:
        self.path.write_bytes(data)
        public, secret = curve.load_key(self.path, "events.curve_key_file")
        for key in (public, secret):
            assert key is None or len(key) == 40, f"a key of {len(key)} characters"

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
