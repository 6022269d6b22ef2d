"""How much of everything: for a card, and for a look at whether the questions themselves run."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """As for a card; `QUICK` for the rest. Bytes and seconds."""

    pool: int = GIB  # that is handed over
    timed: tuple[int, ...] = (GIB, 8 * GIB)  # pools whose handing over is timed; what does not fit is left out
    repeats: int = 3  # of these
    dirty: float = 0.8  # of the free memory: filled, left, and looked at again
    held: float = 0.6  # of the free memory: a pool that a second one of its size does not fit beside
    page: int = 2 * MIB
    pages: int = 8  # between which the stress goes round
    rounds: int = 3000  # of each kind of stress
    pings: int = 2000  # of each latency
    spin_s: float = 0.5  # of a kernel that others wait for
    still_s: float = 0.2  # for which something must not happen
    answer_s: float = 1.0  # a call that has not come back by then hangs
    streams: int = 31  # beside one that waits
    scribble_s: float = 5.0
    kill_after_s: float = 1.0
    back_s: float = 10.0  # for which memory is waited for after deaths
    copied: int = GIB  # on each side
    window_s: float = 0.4  # of each measurement of a rate
    settle_s: float = 0.1  # before it
    decode_step: int = 64 * MIB  # bytes that a step of decoding reads
    burn_s: float = 0.0002  # of a kernel that computes
    kernels: int = 16  # in a step of decoding
    registered: int = GIB
    attached: int = 64  # processes
    calls: int = 2000  # whose cost is measured
    torch: bool = True  # whether it is asked what is about torch


FULL = Sizes()
QUICK = Sizes(
    pool=4 * MIB,
    timed=(4 * MIB, 16 * MIB),
    repeats=1,
    page=MIB,
    pages=3,
    rounds=40,
    pings=40,
    spin_s=0.15,
    still_s=0.05,
    answer_s=1.0,
    streams=4,
    scribble_s=0.6,
    kill_after_s=0.15,
    back_s=2.0,
    copied=8 * MIB,
    window_s=0.015,
    settle_s=0.005,
    decode_step=MIB,
    kernels=2,
    registered=16 * MIB,
    attached=3,
    calls=50,
)
