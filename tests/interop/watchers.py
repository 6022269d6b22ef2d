"""Each kind of consumer as the tests of situations see it: it joins a scene, and can be asked what it believes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from consumers import Indexer, RadixView
from scene import TIERS, Scene, askable, peek, stored

from sglcache.client.mirror import Mirror
from sglcache.units import Tier

QUERIES = 10  # prompts, and some of each one's prefixes


class Watcher(Protocol):
    def join(self, scene: Scene) -> None:
        """Follow the scene from now on, over its links."""

    def leave(self) -> None:
        """Follow it no more, and forget what was believed."""

    def wrong(self, scene: Scene) -> str:
        """How what it believes differs from what the index holds now; empty if it does not."""

    def close(self) -> None: ...


def differences(believed: dict[Tier, set[int]], truth: dict[Tier, set[int]]) -> str:
    found = []
    for tier in sorted({*believed, *truth}):
        has, is_there = believed.get(tier, set()), truth.get(tier, set())
        if has != is_there:
            found.append(f"{tier.name}: lacks {len(is_there - has)} of {len(is_there)}, {len(has - is_there)} too many")
    return "; ".join(found)


class MirrorWatcher:
    """Our own reference consumer, in this process."""

    def __init__(self) -> None:
        self.mirror: Mirror | None = None

    def join(self, scene: Scene) -> None:
        self.mirror = Mirror(scene.live.endpoint, scene.replay.endpoint, replay_timeout_s=0.5)

    def wrong(self, scene: Scene) -> str:
        assert self.mirror is not None
        self.mirror.step(0)
        return differences({tier: self.mirror.hashes(tier) for tier in TIERS}, scene.blocks())

    def leave(self) -> None:
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    close = leave


class IndexerWatcher:
    """Dynamo's indexer: a model and an instance of its own for each watcher, so that one process serves several."""

    def __init__(self, indexer: Indexer, model: str, instance: int, *, with_replay: bool) -> None:
        self.indexer = indexer
        self.model = model
        self.instance = instance
        self.with_replay = with_replay

    def join(self, scene: Scene) -> None:
        replay = scene.replay.endpoint if self.with_replay else None
        self.indexer.register(
            self.model, scene.live.endpoint, replay, instance=self.instance, block_size=scene.page_size
        )

    def leave(self) -> None:
        self.indexer.unregister(self.model, instance=self.instance)

    def wrong(self, scene: Scene) -> str:
        believed = {Tier[tier]: hashes for (_, tier), hashes in self.indexer.blocks(self.model).items()}
        return differences(believed, scene.blocks()) or self._wrong_answers(scene)

    def _wrong_answers(self, scene: Scene) -> str:
        assert scene.daemon is not None
        rng = random.Random(1)
        asked = rng.sample(scene.prompts, min(QUERIES, len(scene.prompts)))
        on_disk = stored(scene.store) if scene.store is not None else set()
        with scene.daemon.observer() as observer:
            for prompt in askable(asked, scene.page_size, rng):
                want = peek(observer, prompt, scene.page_size, on_disk)
                got, _ = self.indexer.query(self.model, prompt.tokens, instance=self.instance, **prompt.names)
                if got != want:
                    return f"asked for {len(prompt.tokens)} tokens of {dict(prompt.names)} it says {got}, not {want}"
        return ""

    def close(self) -> None:
        pass  # the process is ended by whoever started it


class RadixViewWatcher:
    """RadixView, which finds the stream by `/server_info`; here that is the daemon's, with the link's port in it."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.folder = folder
        self.shim = shim
        self.view: RadixView | None = None

    def join(self, scene: Scene) -> None:
        assert scene.daemon is not None
        info = dict(scene.daemon.info)
        info["kv_events"] = {**info["kv_events"], "endpoint_port_base": scene.live.port}
        with directory(info) as url:  # it asks once
            self.view = RadixView(self.folder, self.shim, url)

    def wrong(self, scene: Scene) -> str:
        """It has one entry for a hash, whatever the media: so only whether each hash is there can be asked."""
        assert self.view is not None
        truth = scene.blocks()
        return differences({Tier.DEVICE: set(self.view.drawn())}, {Tier.DEVICE: set().union(*truth.values())})

    def leave(self) -> None:
        if self.view is not None:
            self.view.__exit__(None, None, None)
            self.view = None

    close = leave


@contextmanager
def directory(server_info: dict[str, Any]) -> Iterator[str]:
    """An HTTP server that has one page, `/server_info`; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/server_info":
                self.send_error(404)
                return
            body = json.dumps(server_info).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
