"""Tokens as text, for people, where `http.tokenizer` names a tokenizer.json. In a thread, once it is asked for.

The library, `tokenizers`, is the optional extra `tokenizer`. What goes wrong with it costs the text and nothing else,
and is told in its place.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

logger = logging.getLogger("sglcache.texts")


class Texts:
    """What one tokenizer makes of tokens."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._decode: Any = None
        self._why: str | None = None  # there is none
        self._thread = ThreadPoolExecutor(1, "sglcache-texts") if path is not None else None  # starts with the first

    async def add(self, told: dict[str, Any]) -> dict[str, Any]:
        """A node as a rank tells of it, with `text`, or with `no_text`: why there is none."""
        if self._thread is None or not told.get("tokens"):
            return told
        loop = asyncio.get_running_loop()
        return {**told, **await loop.run_in_executor(self._thread, self._of, told["tokens"])}

    def _of(self, tokens: list[int]) -> dict[str, str]:
        if self._decode is None and self._why is None:
            try:
                from tokenizers import Tokenizer

                self._decode = Tokenizer.from_file(str(self._path)).decode
            except ImportError:
                self._why = "the tokenizers library is not installed: pip install 'sglcache[tokenizer]'"
            except Exception as exc:  # whatever the library raises of a file that it can't read
                self._why = f"http.tokenizer: {self._path} can't be used: {exc}"
            if self._why is not None:
                logger.warning("%s", self._why)
        if self._why is not None:
            return {"no_text": self._why}
        try:
            return {"text": self._decode(tokens, skip_special_tokens=False)}
        except Exception as exc:  # such as an id that it does not have
            return {"no_text": f"{type(exc).__name__}: {exc}"}
