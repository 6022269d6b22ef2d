"""Whatever reads bytes that another made, each the real part, in this process. docs/security.md has a row for each."""

from __future__ import annotations

from collections.abc import Sequence

from sglcache.fuzzing.control import Answers, Channels, Commands, Hellos, Welcomes
from sglcache.fuzzing.files import (
    Catalogs,
    CurveKeys,
    Environment,
    Folders,
    Journals,
    MooncakeWords,
    PageHeaders,
    StateFiles,
    Toml,
    Traces,
)
from sglcache.fuzzing.stream import Events, Replays, ServerInfo, SubscribeScript
from sglcache.testing.fuzz import Decoder

DECODERS: Sequence[type[Decoder]] = (
    Commands, Hellos, Welcomes, Answers, Events, SubscribeScript, Replays, Toml, Environment, ServerInfo, PageHeaders,
    Folders, Catalogs, Journals, MooncakeWords, Channels, StateFiles, Traces, CurveKeys,
)  # fmt: skip
