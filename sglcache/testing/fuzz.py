"""Bad input, made from good: a seeded mutator over valid inputs, and the law that every decoder is held to.

The law: whatever the bytes, a decoder takes them or refuses with an `SglcacheError`; it raises nothing else, ends in
time, takes no more memory than `MAX_GROWTH`, keeps no descriptor, and what stands beside it is as it was (`check`).

Most of what is made is *nearly right*, since what is all wrong is refused at the first byte: a valid message of which
one field is missing, twice there, of another type, negative, huge, not a number or nested deep; or its bytes with bits
flipped, parts cut out, repeated or put in from another message, and lengths that lie. Input `number` of a seed is the
same in every process, and can be had without those before it.

What is fuzzed, and `python -m sglcache.fuzzing`, is in `sglcache.fuzzing`, which may import the server.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

import msgspec

from sglcache.errors import SglcacheError

LIMIT_S = 10.0  # of one input
MAX_GROWTH = 192 << 20  # bytes that the process's peak may grow by with one input
CHECK_EVERY = 256  # inputs
SHOWN = 512  # bytes of an input that broke something

Form = Literal["bytes", "msgpack", "json", "frames"]
"""How the corpus's inputs are made: of bytes; one msgpack message; one of JSON; msgpack messages, which are put behind
their lengths (4 bytes, big-endian), one or several."""

NUMBERS: Sequence[Any] = (
    0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63), 0.5, -0.0, 1e308, -1e308, 1e-320,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
TEXTS: Sequence[str] = (
    "", "\0", "x" * 257, "x" * 4097, "\n\r\t\x1b[2J", "é" * 300, "\U0001f600", "message", "self", "code", "../../etc",
    "%s%d",
    "-1", "1e999", "NaN", "tcp://*:0", "tcp://127.0.0.1:99999999", "ipc://" + "y" * 200,
)  # fmt: skip
BLOBS: Sequence[bytes] = (b"", b"\0", b"\xff" * 3, b"\0" * 16, b"\xff" * 8, b"a" * 4096, b"\0" * 65537)
DEPTHS = (2, 64, 1100, 100_000)
HEADS: Sequence[bytes] = (  # of msgpack: what claims to be long, and what is none
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xc9\x7f\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xc1", b"\xd9\x02\xc3\x28", b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
)  # fmt: skip
LENGTHS: Sequence[bytes] = (b"\0\0\0\0", b"\0\0\0\1", b"\1\0\0\0", b"\1\0\0\1", b"\0\xff\xff\xff", b"\xff\xff\xff\xff")


class Mutator:
    """Inputs made from `corpus`; `words` are what this decoder gives a meaning to, and are put in here and there."""

    def __init__(self, seed: int, corpus: Sequence[bytes], form: Form = "bytes", words: Sequence[bytes] = ()) -> None:
        self.seed = seed
        self.corpus = corpus
        self.form = form
        self.words = words

    def input(self, number: int) -> bytes:
        """The input of this number."""
        rng = random.Random(f"{self.seed}:{number}")
        if self.form == "frames":
            frames = []
            bad = rng.randrange(count := rng.choice((1, 1, 2, 3)))
            for place in range(count):
                message = rng.choice(self.corpus)
                if place == bad:
                    message = self._message(rng, message, "msgpack")
                frames.append(len(message).to_bytes(4, "big") + message)
            data = b"".join(frames)
            return self._bytes(rng, data) if rng.random() < 0.25 else data
        return self._message(rng, rng.choice(self.corpus), self.form)

    def _message(self, rng: random.Random, data: bytes, form: Form) -> bytes:
        dice = rng.random()
        if dice < 0.03:
            return data  # as it is: what comes after bad input must be served
        if form == "bytes" or dice < 0.3:
            return self._bytes(rng, data)
        if dice < 0.33:
            depth = rng.choice(DEPTHS)
            return b"\x91" * depth + data if form == "msgpack" else b"[" * depth + data
        try:
            tree = msgspec.msgpack.decode(data) if form == "msgpack" else json.loads(data)
        except (ValueError, msgspec.DecodeError):
            return self._bytes(rng, data)
        for count in range(rng.choice((1, 1, 1, 2, 3))):
            tree = self._tree(rng, tree, 2 if count else 3000)
        try:
            return msgspec.msgpack.encode(tree) if form == "msgpack" else json.dumps(tree, default=repr).encode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            return self._bytes(rng, data)

    def _tree(self, rng: random.Random, tree: Any, most: int) -> Any:
        """A value of it replaced, removed, repeated `most` times at most, or moved; or one put in."""
        places: list[tuple[Any, Any]] = []
        left = [tree] if isinstance(tree, (list, dict)) else []
        while left and len(places) < 2000:
            value = left.pop()
            for key, inner in enumerate(value) if isinstance(value, list) else value.items():
                places.append((value, key))
                if isinstance(inner, (list, dict)):
                    left.append(inner)
        if not places:
            return self._value(rng, tree, most)
        inside, key = rng.choice(places)
        what = rng.randrange(8)
        if what < 4:
            inside[key] = self._value(rng, inside[key], most)
        elif what == 4:
            del inside[key]
        elif what == 5 and isinstance(inside, list):
            inside[key:key] = [inside[key]] * min(most, rng.choice((1, 2, 300, 3000)))
        elif what == 6 and isinstance(inside, list):
            inside.append(self._value(rng, None, most))
        elif what == 6:
            inside[rng.choice(TEXTS)] = self._value(rng, None, most)
        else:
            other = rng.choice([other for there, other in places if there is inside])
            inside[key], inside[other] = inside[other], inside[key]
        return tree

    def _value(self, rng: random.Random, old: Any, most: int) -> Any:
        if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
            return old + rng.choice((-1, 1, 1 << 31, -(1 << 31), 1 << 62)) if rng.random() < 0.5 else -old
        if isinstance(old, (bytes, str)) and old and rng.random() < 0.5:
            at = rng.randrange(len(old))
            rest: Any = old[at + 1 :] * rng.choice((1, 2, 40))
            return old[:at] if rng.random() < 0.5 else old[:at] + rest
        match rng.randrange(8):
            case 0 | 1 | 2:
                return rng.choice(NUMBERS)
            case 3:
                return rng.choice(TEXTS)
            case 4:
                return rng.choice(BLOBS)
            case 5:
                return rng.choice((None, True, False, [], {}, [None], {"": None}))
            case 6:
                return [old] * min(most, rng.choice((1, 2, 9, 1025)))
            case _:
                nested: Any = old
                for _ in range(rng.choice((1, 30, 200))):
                    nested = [nested] if rng.random() < 0.5 else {"a": nested}
                return nested

    def _bytes(self, rng: random.Random, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(10):
                case 0 | 1:
                    if at < len(out):
                        out[at] ^= 1 << rng.randrange(8)
                case 2:
                    if at < len(out):
                        out[at] = rng.randrange(256)
                case 3:
                    del out[at : at + rng.choice((1, 1, 2, 4, 8, 64))]
                case 4:
                    del out[at:]
                case 5:
                    out[at:at] = out[at : at + rng.choice((1, 4, 32))] * rng.choice((1, 2, 100))
                case 6:
                    other = rng.choice(self.corpus)
                    start = rng.randrange(len(other) + 1)
                    out[at:at] = other[start : start + rng.choice((1, 4, 16, 256))]
                case 7:
                    out[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
                case 8:
                    size = rng.choice((1, 2, 4, 8))
                    number = rng.choice((0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1, rng.randrange(1 << 8 * size)))
                    out[at : at + size] = number.to_bytes(size, rng.choice(("big", "little")))
                case _:
                    word = rng.choice((*self.words, *HEADS) if rng.random() < 0.8 else LENGTHS)
                    out[at : at + rng.choice((0, len(word)))] = word
        return bytes(out)


class Decoder(ABC):
    """What is fuzzed. Made, fed, and closed; `check` is what must hold whatever it was fed."""

    name: ClassVar[str]
    form: ClassVar[Form] = "bytes"
    words: Sequence[bytes] = ()
    weight: ClassVar[float] = 1.0  # of the inputs of a run over all decoders; what is slow has less

    def __init__(self) -> None:
        self.corpus: list[bytes] = []

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Decode it. SglcacheError: it is refused."""

    def check(self) -> None:  # noqa: B027
        """AssertionError: something is not as it should be. By default there is nothing beside the decoder."""

    def close(self) -> None:  # noqa: B027
        """Idempotent. By default there is nothing to let go of."""


class Broken(Exception):
    """A decoder broke the law; the message says with what input, and how to have it again."""

    def __init__(self, decoder: str, seed: int, number: int, data: bytes, why: str) -> None:
        shown = data.hex() if len(data) <= SHOWN else f"{data[:SHOWN].hex()}... ({len(data)} bytes)"
        super().__init__(
            f"{decoder}: {why}\n"
            f"again: python -m sglcache.fuzzing --decoder {decoder} --seed {seed} --first {number} --count 1\n"
            f"input: {shown}"
        )
        self.data = data


@dataclass
class Report:
    """What a run came to."""

    decoder: str
    seed: int
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.decoder:<16}{self.inputs:>9} inputs, {self.refused} refused, {self.inputs - self.refused} taken, "
            f"in {self.seconds:.1f} s, the longest {1000 * self.longest_s:.1f} ms"
        )


class _Hung(BaseException):
    """Not an Exception: whoever catches all would go on."""


@contextmanager
def _alarm() -> Iterator[Callable[[], None]]:
    """Call what is given before each input: one that takes longer than `LIMIT_S` is interrupted."""

    def rang(_: int, frame: FrameType | None) -> None:
        raise _Hung(f"still at it after {LIMIT_S:g} s" + (f", at {frame.f_code.co_qualname}" if frame else ""))

    before = signal.signal(signal.SIGALRM, rang)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, LIMIT_S) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _watchdog(decoder: str, seed: int, first: int) -> Iterator[Callable[[int], None]]:
    """Call what is given with the number of each input: a system call that no signal ends is the process's end."""
    now = [first, first]  # the input, and the one when last looked at
    over = threading.Event()

    def watch() -> None:
        while not over.wait(3 * LIMIT_S):
            if now[0] == now[1] != first:
                print(Broken(decoder, seed, now[0], b"", "the kernel waits for ever"), file=sys.stderr, flush=True)
                os._exit(1)
            now[1] = now[0]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda number: now.__setitem__(0, number)
    finally:
        over.set()
        thread.join()


def run(make: Callable[[], Decoder], count: int, seed: int, first: int = 0) -> Report:
    """Feed a decoder inputs first..first+count-1 of the seed. Broken: the law does not hold. On the main thread."""
    open_before = _descriptors()
    decoder = make()
    report = Report(decoder.name, seed)
    _forget_peak()  # or what the process once had would hide what an input takes
    mutator = Mutator(seed, decoder.corpus, decoder.form, decoder.words)
    number, data = first, b""
    try:
        with _alarm() as wind, _watchdog(decoder.name, seed, first) as tell:
            for number in range(first, first + count):
                data = mutator.input(number)
                tell(number)
                wind()
                peak, began = _peak(), time.perf_counter()
                try:
                    decoder.feed(data)
                except SglcacheError:
                    report.refused += 1
                took = time.perf_counter() - began
                report.inputs += 1
                report.seconds += took
                report.longest_s = max(report.longest_s, took)
                if report.inputs > 1 and _peak() - peak > MAX_GROWTH:
                    raise AssertionError(f"{_peak() - peak} bytes were taken for {len(data)}")
                if number % CHECK_EVERY == CHECK_EVERY - 1:
                    decoder.check()
            decoder.check()
    except (Exception, _Hung) as exc:
        raise Broken(decoder.name, seed, number, data, f"{type(exc).__name__}: {exc}") from exc
    finally:
        decoder.close()
    if (left := _descriptors() - open_before) > 0:
        raise Broken(decoder.name, seed, number, data, f"{left} descriptors more are open than before")
    return report


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
