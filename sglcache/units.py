"""The numbers that must not be mixed up, as types, and the words for the tiers."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

LeaseId = NewType("LeaseId", int)  # never used twice in one life of a rank
SessionId = NewType("SessionId", int)  # likewise
TicketId = NewType("TicketId", int)  # a copy of ours on its way; likewise
Seq = NewType("Seq", int)  # a batch's number on the event stream


def printable(text: str) -> str:
    """A text of a peer's for people's eyes: what would move a terminal's cursor, or begin a line, is written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Tier(IntEnum):
    """Where bytes lie, nearest to the model first. The index holds cells for the first two."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3

    @property
    def medium(self) -> str:
        """The tier's word on the wire (REFERENCE: SGLang's StorageMedium)."""
        return MEDIA[self]


MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")
