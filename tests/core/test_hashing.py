"""Page digests against vectors made with SGLang's own C++ (`hash_binding.cpp`), and what must not matter to them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from sglcache.core.hashing import HASHERS, block_hash, hasher, seed
from sglcache.core.key import ROOT, Namespace
from sglcache.errors import ConfigError
from sglcache.testing.pages import Book, seed_of
from sglcache.testing.rig import pack

NAMESPACE = Namespace(extra_key="lora-1", cache_salt="tenant-a")

VECTORS = {
    "V1": (
        [1, 2, 3, 4], 4, ROOT,
        ["cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"],
        [-3488128144981237669],
    ),
    "V2": (
        [1, 2, 3, 4, 5, 6, 7, 8], 4, ROOT,
        [
            "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
            "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
        ],
        [-3488128144981237669, 5674439469042975057],
    ),
    "V3": (
        [1, 2, 3, 4], 1, ROOT,
        [
            "67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450",
            "e95092c4b38d42d1363b9e9b06bc5d6377af1cd06651a9fedac8b36dc9e56114",
            "65a83b157c6cfe60e7f2b2dbc81912f32c87b62f180abb0b8b40bf4b5259ae86",
            "c6c57967c409c4a7922608584bb063c57e0785f766cb8dae3f2a77edb186150c",
        ],
        [7470307888890966271, -1634645291211865391, 7325169757385981536, -4123756397210254169],
    ),
    "V5": (
        [151644, 872, 198, 2610], 2, ROOT,
        [
            "c7b4e62bec0adf66b5cd6c78f7cdd0db735d7c78fbc0f5d612f3fab2ae575dd1",
            "46ed27f6b60e6de95c224af8de9562b01724c4e2248a4d01a7c18ccc4a8165bf",
        ],
        [-4056364288035856538, 5110785092705218025],
    ),
    "V7": (
        [1, 2, 3, 4], 2, NAMESPACE,
        [
            "f4ffb48a2e9647ca50140be4820cc1fa6b84e6eb4fe10bc1269bff2590894d64",
            "0fbdf8470972ce532a5367d0f420698fdc0967713306fcec6751dd6bfa282c02",
        ],
        [-792716503813830710, 1134335665152118355],
    ),
    "V7b": (
        [1, 2], 2, Namespace(extra_key="lora-1"),
        ["fc928a5297284aebba0e484f3bad2ba6a60f528aa60b88c04ec560765de4a16b"],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_sha256_is_sglangs(name: str) -> None:
    tokens, page_size, namespace, digests, hashes = VECTORS[name]
    chain = hasher("sha256").chain(seed(namespace), pack(tokens), 4 * page_size)
    parts = [chain[i : i + 32] for i in range(0, len(chain), 32)]
    assert [part.hex() for part in parts] == digests
    if hashes is not None:
        assert [block_hash(part) for part in parts] == hashes


def test_a_short_last_page_is_hashed_as_it_is() -> None:  # V11
    chain = hasher("sha256").chain(b"", pack([1, 2, 3]), 8)
    assert chain[32:].hex() == "3ac5d352be720e428633fe34fc74591b2b80060a7764e195d8f34068203ae98f"


def test_seeds_are_sglangs_storage_seeds() -> None:
    assert seed(NAMESPACE).hex() == "f0b3cb914ac096e548f62bd0afddd91b3d0013e436b850b1d1674f0cb60b03eb"
    plain = Namespace(extra_key="lora-1")
    assert seed(plain).hex() == "502757a4b3684cc558b10cfebee955436e393e760c90c2adf970429f6f25cd50"
    assert seed(ROOT) == b""


def test_no_two_namespaces_share_a_seed() -> None:
    """The same string as salt, key and lora, a moved boundary, a NUL inside: never the same name (law 10)."""
    words = (None, "a", "ab", "b", "a\0b", "\0", "")
    spaces = {Namespace(x, y, z) for x in words for y in words for z in words}
    assert len({seed(space) for space in spaces}) == len(spaces)
    for space in spaces:
        assert seed(space) == seed_of(tuple(space)), space


def test_an_empty_salt_is_none_and_an_empty_key_is_one() -> None:
    assert Namespace.of(cache_salt="") == Namespace.of(lora="") == ROOT
    assert Namespace.of(extra_key="") != ROOT


@pytest.mark.parametrize("name", HASHERS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_chain_is_one_hash_after_the_other(name: str, page_size: int) -> None:
    """Token 0 and zero bytes at a page's end count like any other; a chain taken up half-way goes on alike."""
    tokens = pack([0, 1, 0, 0, 256, 0, 1 << 24, 0xFFFFFFFF, 0, 0, 0, 0] * 8)
    page = page_size * 4
    book = Book(page_size, name)
    want = b"".join(each.digest for each in book.path(ROOT, tokens))
    made = hasher(name)
    assert made.chain(b"", tokens, page) == want
    head = made.chain(b"", tokens[: 2 * page], page)
    assert head + made.chain(head[-made.size :], tokens[2 * page :], page) == want
    assert made.size == len(want) // (len(tokens) // page)


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(ConfigError, match="md5"):
        hasher("md5")


def test_digests_do_not_depend_on_the_process() -> None:  # A14
    """The same in every process and for every PYTHONHASHSEED, with no setting needed."""
    program = (
        "from sglcache.core.hashing import HASHERS, seed\n"
        "from sglcache.core.key import Namespace, pack\n"
        "key = pack(range(1, 17))\n"
        "for made in HASHERS.values():\n"
        "    for space in (Namespace(), Namespace(cache_salt='a'), Namespace('l', 'k', 's')):\n"
        "        print(made.name, made.chain(seed(space), key, 16).hex())\n"
    )
    told = set()
    for value in (None, "0", "12345"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if value is not None:
            env["PYTHONHASHSEED"] = value
        told.add(subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True).stdout)
    assert len(told) == 1
    (lines,) = told
    assert len(set(lines.splitlines())) == 6


def test_vector_v4_a_bigram_page_hashes_its_pairs_flattened() -> None:
    """Raw tokens 1..5, page size 2: units (1,2),(2,3) and (3,4),(4,5); two words a unit."""
    words = np.array([1, 2, 2, 3, 3, 4, 4, 5], "<u4").tobytes()
    chain = hasher("sha256").chain(b"", words, 16)
    assert chain[:32].hex() == "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269"
    assert chain[32:].hex() == "678c5307f2a02a2aaf8edbeb80ebac13663f70e14a4fc8d5d62b77e702841e4b"
    assert [block_hash(chain[:32]), block_hash(chain[32:])] == [-1303529142941650691, 7461429976246528554]
