"""A browser, and pages in it that fail their test for an error, or a request, that should not be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sglcache.testing.daemon import Daemon, until

WITHIN_S = 30.0  # a browser on a busy machine


class Page:
    """The daemon's page in a browser, as a test looks at it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.expected: list[str] = []  # parts of errors that the test is about
        self.context = browser.new_context(viewport={"width": 1440, "height": 1000}, **options)
        self.page = page = self.context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)

    def ask(self, expression: str, *arguments: Any) -> Any:
        return self.page.evaluate(expression, *arguments)

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def shows(self, selector: str, words: str) -> None:
        """Wait until its text has these words."""
        until(lambda: words in self.text(selector), WITHIN_S)

    def until(self, expression: str, *arguments: Any) -> None:
        until(lambda: bool(self.ask(expression, *arguments)), WITHIN_S)

    def rows(self) -> list[list[float]]:
        """Of the picture that is shown."""
        return list(self.ask("sglcache.state.picture ? sglcache.state.picture.rows : []"))

    def pages(self) -> list[int]:
        """Cached pages, on the device, on the host, as the tree adds them up."""
        return list(self.ask("sglcache.state.picture ? sglcache.state.picture.pages : [-1]"))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def click(self, name: int) -> None:
        """On the node of that name, where it is drawn."""
        where = """(name) => {
            const { tree } = sglcache, item = tree.byName.get(name);
            if (!item?.box || performance.now() - tree.started < 300) return null; // it moves
            const { x0, x1, y0, y1 } = item.box;
            return [(x0 + Math.min(x1, tree.width)) / 2, (y0 + y1) / 2];
        }"""
        found: list[list[float]] = []
        until(lambda: bool((place := self.ask(where, name)) and (found.append(place) or True)), WITHIN_S)
        x, y = found[-1]
        self.page.click("#tree", position={"x": x, "y": y})

    def close(self) -> None:
        self.context.close()
        bad = [error for error in self.errors if not any(part in error for part in self.expected)]
        assert not bad, bad
        origin = urlsplit(self.url)[:2]
        away = [url for url in self.requests if urlsplit(url)[:2] != origin and not url.startswith("data:")]
        assert not away, f"it asked {away}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="make browser installs it")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium; make browser installs it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`serve(**sections)`: a daemon of the test's own, which is stopped once its pages are closed."""
    daemons: list[Daemon] = []

    def serve(**sections: Any) -> Daemon:
        daemons.append(Daemon(tmp_path / f"daemon-{len(daemons)}", **sections))
        return daemons[-1]

    yield serve
    codes = [daemon.stop() for daemon in daemons]
    assert not any(codes), [daemon.said() for daemon in daemons]


@pytest.fixture
def visit(browser: Any, serve: object) -> Iterator[Callable[..., Page]]:
    """`visit(url)`: the page there. It is closed at the end, and then nothing may have gone wrong in it."""
    pages: list[Page] = []

    def visit(url: str, **options: Any) -> Page:
        pages.append(Page(browser, url, **options))
        return pages[-1]

    yield visit
    for page in pages:
        page.close()
