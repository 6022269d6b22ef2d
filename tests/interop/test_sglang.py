"""The daemon's bytes are those that SGLang's own event classes encode to, of the versions that `make interop` fetched.

Its `kv_events.py` is taken from the wheel alone, and what that module imports of SGLang is put in its place by empty
stand-ins: the classes need none of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from consumers import PYTHON

from sglcache.testing.daemon import Daemon

pytestmark = pytest.mark.interop

FOLDER = PYTHON.parents[1] / "sglang"  # kv_events-VERSION.py, as scripts/interop.sh lays them out
STAND_INS = {"sglang.srt.utils.network": "NetworkAddress", "sglang.srt.runtime_context": "get_parallel"}
HEARD_MS = 10_000


@pytest.fixture
def sglang(version: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's module of that version."""
    source = FOLDER / f"kv_events-{version}.py"
    if not source.exists():
        pytest.skip(f"SGLang {version} was not to be had when {FOLDER.parent} was made")
    for name, attribute in STAND_INS.items():
        parents = name.split(".")
        for depth in range(1, len(parents) + 1):
            module = ".".join(parents[:depth])
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[name], attribute, None)
    spec = importlib.util.spec_from_file_location(f"sglang_kv_events_{version.replace('.', '_')}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def published(folder: Path, events: dict[str, Any], *names: dict[str, str]) -> list[bytes]:
    """What a daemon publishes of commits with each of `names`, copies to the host, evictions and clears."""
    with Daemon(folder, events={"heartbeat_s": 60, **events}) as daemon, daemon.client() as client:
        for number in range(60):
            tokens = [*range(number, number + 24), 127_000, 65_536, 255]
            with client.acquire(tokens, **names[number % len(names)]) as lease:
                lease.wait_loaded()
                lease.commit()
        daemon.settle()
        client.clear()
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(daemon.info["stream"]["replay_endpoint"])
            dealer.send_multipart([b"", daemon.info["epoch"].to_bytes(8, "big")])
            payloads = []
            while True:
                assert dealer.poll(HEARD_MS)
                *_, payload = dealer.recv_multipart()
                if not payload:
                    return payloads
                payloads.append(payload)


def rebuilt(sglang: ModuleType, event: Any) -> Any:
    """The event as an object of SGLang's own class."""
    if isinstance(event, dict):
        kind = event.pop("type")
        return getattr(sglang, kind)(**event)
    kind, *values = event
    if isinstance(values[-1] if values else None, dict):
        metadata = sglang.BlockStoredMetadata(**values.pop())
        return sglang.BlockStoredWithMetadata(*values, metadata=metadata)
    return getattr(sglang, kind)(*values)


@pytest.mark.parametrize("version", ["0.5.23"])
def test_maps_are_sglangs_to_the_byte(sglang: ModuleType, tmp_path: Path) -> None:
    options = {"cache_salt": "tenant"}, {"session_id": "chat"}, {"lora": "a"}
    together = {"cache_salt": "tenant", "session_id": "chat", "lora": "a"}
    check(sglang, published(tmp_path, {}, {}, *options, together))


@pytest.mark.parametrize("version", ["0.5.19"])
def test_arrays_are_sglangs_to_the_byte(sglang: ModuleType, tmp_path: Path) -> None:
    check(sglang, published(tmp_path, {"encoding": "array"}, {}, {"cache_salt": "tenant"}, {"session_id": "chat"}))


def check(sglang: ModuleType, payloads: list[bytes]) -> None:
    """Encoded again by SGLang's classes each batch is the same bytes; and its typed decoder reads it."""
    kinds: Counter[str] = Counter()
    for payload in payloads:
        ts, events, rank = msgspec.msgpack.decode(payload)
        batch = sglang.KVEventBatch(ts, [rebuilt(sglang, event) for event in events], rank)
        assert msgspec.msgpack.encode(batch) == payload
        read = msgspec.msgpack.decode(payload, type=sglang.KVEventBatch)
        assert [type(event).__name__ for event in read.events] == [
            type(event).__name__.removesuffix("WithMetadata") for event in batch.events
        ]
        kinds += Counter(type(event).__name__ for event in batch.events)
        kinds += Counter(event.medium for event in batch.events if hasattr(event, "medium"))
    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU_PINNED"):
        assert kinds[kind], f"{kind} did not occur: {kinds}"
