from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_facts import descriptors, in_child, mapped

from sglcache.errors import ConfigError, ProtocolError
from sglcache.memory import mapping
from sglcache.memory.mapping import create_memfd, map_shared, map_words

SIZE = 1 << 16
MAP_FIXED_NOREPLACE = 0x100000


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd("test-mapping", SIZE)
    yield fd
    os.close(fd)


def test_creating_and_mapping_touch_no_page(fd: int) -> None:
    region = map_shared(fd, SIZE)
    assert os.fstat(fd).st_blocks == 0
    region[5] = 1
    assert os.fstat(fd).st_blocks > 0


def test_nobody_can_resize_what_was_created(fd: int) -> None:
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_two_mappings_are_one_memory(fd: int) -> None:
    one, other = map_shared(fd, SIZE), map_words(fd, SIZE // 8)
    one[8] = 7
    assert other[1] == 7
    other[1] = (1 << 64) - 1
    assert one[15] == 255


def test_a_mapping_needs_and_keeps_no_descriptor() -> None:
    fd = create_memfd("test-mapping", SIZE)
    before = descriptors()
    region = map_shared(fd, SIZE)
    assert descriptors() == before
    os.close(fd)
    region[0] = 3
    assert region[0] == 3


def test_a_region_is_unmapped_with_its_last_view_and_not_before(fd: int) -> None:
    view = map_words(fd, 16)  # the region itself is held by the view alone
    assert mapped("test-mapping") == 1
    part = view[:4]
    del view
    part[0] = 9
    assert mapped("test-mapping") == 1
    del part
    assert mapped("test-mapping") == 0


def test_what_could_shrink_or_is_no_memfd_is_not_mapped(fd: int) -> None:
    with pytest.raises(ProtocolError, match="are needed"):
        map_shared(fd, SIZE + 1)
    unsealed = os.memfd_create("test-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    read, write = os.pipe()
    os.ftruncate(unsealed, SIZE)
    try:
        with pytest.raises(ProtocolError, match="not sealed"):
            map_shared(unsealed, SIZE)
        with pytest.raises(ProtocolError, match="not a memfd"):
            map_shared(read, SIZE)
    finally:
        for each in (unsealed, read, write):
            os.close(each)
    with pytest.raises(ProtocolError):
        map_shared(unsealed, SIZE)  # not open


def test_more_than_the_machine_can_hold_or_map_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="ask for less"):
        create_memfd("test-mapping", 1 << 70)
    fd = create_memfd("test-mapping", 1 << 62)
    with pytest.raises(ConfigError, match="ask for less"):
        map_shared(fd, 1 << 62)
    os.close(fd)


def test_a_failed_madvise_leaves_nothing_mapped(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_DONTFORK", -1)
    with pytest.raises(ConfigError):
        map_shared(fd, SIZE)
    assert mapped("test-mapping") == 0


def test_a_forked_child_has_no_mapping(fd: int) -> None:
    region = map_shared(fd, SIZE)
    region[0] = 1
    assert mapped("test-mapping") == 1
    assert in_child(lambda: mapped("test-mapping") == 0) == 0
    assert in_child(lambda: region[0] == 1) == -signal.SIGSEGV
    assert region[0] == 1


def test_dropping_a_region_in_a_forked_child_unmaps_nothing_of_the_childs(fd: int) -> None:
    regions = [map_shared(fd, SIZE)]
    address = ctypes.addressof(regions[0])

    def reuse_the_addresses() -> bool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        assert mapping._libc.mmap(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        own = (ctypes.c_uint8 * SIZE).from_address(address)
        own[0] = 5
        regions.clear()
        return own[0] == 5

    assert in_child(reuse_the_addresses) == 0
    regions[0][0] = 1
    regions.clear()
    assert mapped("test-mapping") == 0


def test_pages_stay_out_of_core_dumps(fd: int) -> None:
    region = map_shared(fd, SIZE)
    assert len(region) == SIZE
    of_region = Path("/proc/self/smaps").read_text().split("/memfd:test-mapping ")[1]
    flags = next(line for line in of_region.splitlines() if line.startswith("VmFlags:")).split()
    assert {"dc", "dd"} <= set(flags)  # don't copy on fork, don't dump
