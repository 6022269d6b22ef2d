"""What a page holds and how big things are. No torch here: a process without it may want to know.

A page_first page is `[2 (k, v), num_layers, page_size, shard_heads, head_dim]`, contiguous: all that a page has of
one shard is one run of `page_bytes`, and one copy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sglcache.errors import ConfigError
from sglcache.wire import control

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
LAYOUTS = ("page_first",)
MAX_INT32 = (1 << 31) - 1  # a slot is one, and so is the size of a page in numpy's eyes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The form of a rank's pools. ConfigError, with the dotted key as `path`, for one that can't be."""

    page_size: int  # tokens
    num_pages: int  # of the device pool; each shard has them all
    num_layers: int
    num_kv_heads: int  # of all shards together
    head_dim: int
    dtype: str = "float16"  # torch's name
    layout: str = "page_first"
    num_shards: int = 1
    host_pages: int = 0  # 0: no host pool

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "num_layers", "num_kv_heads", "head_dim", "num_shards", "host_pages"):
            value, least = getattr(self, name), 0 if name == "host_pages" else 1
            if not least <= value <= MAX_INT32:
                raise _wrong(name, f"= {value} is not in {least}..{MAX_INT32}")
        if self.dtype not in ITEM_BYTES:
            raise _wrong("dtype", f"= {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        if self.layout not in LAYOUTS:
            raise _wrong("layout", f"= {self.layout!r} is none of {', '.join(LAYOUTS)}")
        if self.num_kv_heads % self.num_shards:
            raise _wrong("num_shards", f"= {self.num_shards} does not divide num_kv_heads = {self.num_kv_heads}")
        if self.page_bytes > MAX_INT32:
            raise _wrong("page_size", f"= {self.page_size} makes pages of {self.page_bytes} bytes; at most {MAX_INT32}")

    @property
    def shard_heads(self) -> int:
        return self.num_kv_heads // self.num_shards

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """[2 (k, v), num_layers, page_size, shard_heads, head_dim]"""
        return (2, self.num_layers, self.page_size, self.shard_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Of one page in one shard."""
        return 2 * self.num_layers * self.page_size * self.shard_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def pool_bytes(self) -> int:
        """Of one shard's device pool."""
        return self.num_pages * self.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        """Of one shard's host pool."""
        return self.host_pages * self.page_bytes

    def to_wire(self) -> control.Geometry:
        return control.Geometry(**asdict(self))

    @classmethod
    def from_wire(cls, wire: control.Geometry) -> Geometry:
        return cls(**{name: getattr(wire, name) for name in wire.__struct_fields__})


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"pool.{name} {what}", path=f"pool.{name}")
