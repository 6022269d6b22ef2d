"""When Python's cycle collector runs: never by itself, and never over what is old.

A full collection walks every container there is. With 200,000 nodes cached that took 180 ms, in the middle of
whatever command made one object too many. A young collection costs about 0.03 µs for each container made since the
last one, and `gc.freeze()` after it takes what survived out of every later one in 0.5 to 3 µs, however much there is
(it splices lists). So: no automatic collection; between turns, once there are `EVERY` new containers, a young
collection (0.3 ms, up to 2 where the new ones lie cold) and a freeze.

How many new ones there are Python does not say: its count falls with each container that dies, old ones too, so where
as many old ones go as new ones come (a full cache; a clear) it stays near 0, and what was to be 8,000 was 200,000 and
took 12 ms. So it is also time after `TICKS` looks, whatever the count, and after `SLICES` slices of long work. Of
nothing new a collection takes 0.1 µs.

The price: a cycle that lives longer than that and then becomes garbage is never freed. The index breaks its own
(a removed node has no parent and no children); what is left is a traceback or a closed connection now and then.
"""

from __future__ import annotations

import gc

EVERY = 8_000  # containers, made less freed
TICKS = 4
SLICES = 2


class Collector:
    """Owns the policy for the process from `start` to `stop`."""

    def __init__(self, every: int = EVERY) -> None:
        self.every = every
        self.num_collections = 0
        self._ticks = self._slices = 0  # since the last

    def start(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def tick(self) -> None:
        """Collect if it is time. Cheap (0.1 µs) when it isn't; call it between turns."""
        self._ticks += 1
        if self._ticks >= TICKS or gc.get_count()[0] >= self.every:
            self._collect()

    def sliced(self) -> None:
        """As `tick`, after a slice of long work, which may have made some thousands and dropped as many."""
        self._slices += 1
        if self._slices >= SLICES:
            self._collect()

    def _collect(self) -> None:
        gc.collect(0)
        gc.freeze()
        self.num_collections += 1
        self._ticks = self._slices = 0

    def stop(self) -> None:
        gc.unfreeze()
        gc.enable()
