"""Headers: what is not the page that was asked for is known, and nothing that stands in a file is believed."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from shelf import PAGE, fill, identity, memory, run

from sglcache.core.key import Namespace
from sglcache.errors import BadRequest, StorageError
from sglcache.storage.host import HostPages, Piece
from sglcache.storage.page import Form, packed, unpacked

texts = st.one_of(st.none(), st.text(max_size=8))
spaces = st.builds(Namespace, texts, texts, texts)
FORMS = {
    (name, bigram): Form(identity(hash_name=name, bigram=bigram))
    for name in ("xxh3_128", "sha256")
    for bigram in (False, True)
}


@given(spaces, spaces)
def test_no_two_namespaces_are_written_alike(a: Namespace, b: Namespace) -> None:
    assert unpacked(packed(a)) == a
    assert (packed(a) == packed(b)) == (a == b)


def header_of(form: Form, space: Namespace, page: int) -> tuple[bytes, bytes, list[memoryview]]:
    """A page's header, what it has to begin with, and its bytes."""
    it = run(range(4 * PAGE), space, hash_name=form.hasher.name, bigram=form.keys.bigram)
    pages = memory(1)
    fill(pages, 0, bytes(range(192)))
    prefix = form.prefix(it, page, packed(space))
    return form.seal(prefix, pages.views(0)), prefix, pages.views(0)


@pytest.mark.parametrize("key", FORMS)
@given(space=spaces, page=st.integers(0, 2))
@settings(max_examples=30)
def test_what_is_written_is_read(key: tuple[str, bool], space: Namespace, page: int) -> None:
    form = FORMS[key]
    it = run(range(4 * PAGE), space, hash_name=key[0], bigram=key[1])
    header, prefix, payload = header_of(form, space, page)
    assert form.check(prefix, header, payload) is None
    assert len(header) == form.header_bytes(space)
    found = form.read(header + b"anything")
    assert found == (space, form.digest(it, page), form.before(it, page), form.tokens(it, page), len(header))
    part = form.part(it, page, 1)
    assert (part.digests, part.before, part.tokens) == (found.digest, found.before, found.tokens)


@given(key=st.sampled_from(sorted(FORMS)), space=spaces, data=st.data())
@settings(max_examples=200)
def test_a_changed_header_is_neither_right_nor_read(
    key: tuple[str, bool], space: Namespace, data: st.DataObject
) -> None:
    """Also where its hash was made right again, by someone who means it: then it may be read as what it says, and no
    more: its digest is that of its tokens."""
    form = FORMS[key]
    header, prefix, payload = header_of(form, space, 1)
    changed = bytearray(header)
    at = data.draw(st.integers(0, len(header) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert form.check(prefix, bytes(changed), payload) == "corrupt"
    with pytest.raises(StorageError):
        form.read(bytes(changed))
    resealed = bytes(changed[:-16]) + xxhash.xxh3_128_digest(bytes(changed[:-16]))
    if at < len(header) - 32:
        assert form.check(prefix, resealed, payload) == "foreign"
    try:
        found = form.read(resealed)
    except StorageError:
        return
    assert form.holds(*found[:4])
    assert found[1:4] == form.read(header)[1:4]  # padding may differ, and the namespace, which is its first page's


@given(st.binary(max_size=400))
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(StorageError):
        FORMS["xxh3_128", False].read(data)


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "layout", "hash_name"])
def test_every_field_is_part_of_the_identity(field: str) -> None:
    assert identity(**{field: "sha256"}).fingerprint != identity().fingerprint


@pytest.mark.parametrize(
    "changes", [{"page_size": 8}, {"bigram": True}, {"payload_bytes": 1}, {"geometry": {"heads": 1, "dim": 2}}], ids=str
)
def test_every_number_is_part_of_the_identity(changes: dict[str, Any]) -> None:
    assert identity(**changes).fingerprint != identity().fingerprint
    assert identity(geometry={"a": 1, "b": 2}).fingerprint == identity(geometry={"b": 2, "a": 1}).fingerprint


def test_pieces_stay_within_their_region() -> None:
    region = memoryview(bytearray(100))
    HostPages(10, [region], [Piece(0, 0, 10, 10)])
    for wrong in (Piece(0, 1, 10, 10), Piece(0, 0, 11, 10), Piece(0, 0, 10, 11)):
        with pytest.raises(BadRequest):
            HostPages(10, [region], [wrong])
    with pytest.raises(BadRequest):
        HostPages(10, [region], [Piece(0, 0, 10, 10)], fds=[3, 4])
    pages = HostPages(10, [region], [Piece(0, 0, 10, 10)])
    for slot in (-1, 10):
        with pytest.raises(BadRequest):
            pages.views(slot)


def test_a_namespace_is_written_in_one_way_alone() -> None:
    """A tag that is neither 0 nor 1 was read as 1."""
    name = packed(Namespace("l", None, "s"))
    assert unpacked(name) == Namespace("l", None, "s")
    for at in (0, 10, 11):
        with pytest.raises(StorageError):
            unpacked(name[:at] + b"\2" + name[at + 1 :])
