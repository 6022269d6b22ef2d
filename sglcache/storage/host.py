"""Where the bytes of a host page lie. The storage part moves them and knows no pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglcache.errors import BadRequest


class Piece(NamedTuple):
    """One run of bytes in every page: of page `slot`, `num_bytes` from `offset + slot * stride` of a region on."""

    region: int
    offset: int
    stride: int
    num_bytes: int


class HostPages:
    """Every page's bytes as pieces of a few regions of memory, in a fixed order, which is that of the payload.

    page_first: a region for each shard and one piece of it. layer_first: a piece for each shard, layer, and K or V.
    Regions are writable, contiguous, and stay where they are while a store uses them. Where each is all of a memfd,
    `fds` has these, and a store may give them to a process of its own. That one has to inherit `holds` as well: as long
    as these are open somewhere, nobody else begins to use the memory.
    """

    def __init__(
        self,
        num_pages: int,
        regions: Sequence[memoryview],
        pieces: Sequence[Piece],
        fds: Sequence[int] = (),
        holds: Sequence[int] = (),
    ) -> None:
        self.num_pages = num_pages
        self.fds = tuple(fds)
        self.holds = tuple(holds)
        self.regions = tuple(region.cast("B") for region in regions)
        self.pieces = tuple(pieces)
        self.payload_bytes = sum(piece.num_bytes for piece in pieces)
        if fds and len(self.fds) != len(self.regions):
            raise BadRequest(f"{len(self.fds)} descriptors for {len(self.regions)} regions")
        for piece in pieces:
            end = piece.offset + (num_pages - 1) * piece.stride + piece.num_bytes
            if num_pages and end > self.regions[piece.region].nbytes:
                raise BadRequest(f"{piece} of {num_pages} pages ends at {end}, behind its region's end")

    @classmethod
    def page_first(cls, num_pages: int, shards: Sequence[memoryview], fds: Sequence[int] = ()) -> HostPages:
        """Each shard's region is its pages, one behind the other."""
        pieces = []
        for shard, region in enumerate(shards):
            page_bytes = region.nbytes // num_pages if num_pages else 0
            pieces.append(Piece(shard, 0, page_bytes, page_bytes))
        return cls(num_pages, shards, pieces, fds)

    def views(self, slot: int) -> list[memoryview]:
        """The page's bytes, piece by piece. BadRequest for a slot that is none."""
        if not 0 <= slot < self.num_pages:
            raise BadRequest(f"slot {slot} is not in 0..{self.num_pages - 1}", slot=slot)
        regions = self.regions
        return [
            regions[region][offset + slot * stride : offset + slot * stride + num_bytes]
            for region, offset, stride, num_bytes in self.pieces
        ]
