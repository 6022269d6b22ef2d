"""The trace reader: its rule for tokens, what it refuses, and that it keeps little."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sglcache.bench import trace
from sglcache.errors import ConfigError


def line(input_length: int, hash_ids: list[int], **more: object) -> str:
    return json.dumps({"timestamp": 7, "input_length": input_length, "output_length": 3, "hash_ids": hash_ids, **more})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_a_block_id_seeds_its_tokens(tmp_path: Path) -> None:
    request = next(trace.requests(write(tmp_path, line(700, [5, 9]))))
    first, second = (np.random.default_rng(i).integers(0, 128_000, 512, dtype=np.uint32) for i in (5, 9))
    assert request.tokens.dtype == np.uint32
    assert request.tokens.tolist() == [*first.tolist(), *second[:188].tolist()]
    assert (request.arrival_ms, request.output_tokens) == (7, 3)


def test_requests_share_a_prefix_exactly_where_their_ids_do(tmp_path: Path) -> None:
    one, two = trace.requests(write(tmp_path, line(1536, [1, 2, 3]), line(1536, [1, 2, 4])))
    assert (one.tokens[:1024] == two.tokens[:1024]).all()
    assert one.tokens[1024] != two.tokens[1024]


def test_limit_and_unknown_keys(tmp_path: Path) -> None:
    path = write(tmp_path, line(1, [0], tenant="a"), line(2, [0]), "never read")
    assert [len(request.tokens) for request in trace.requests(path, 2)] == [1, 2]
    assert list(trace.requests(path, 0)) == []


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"input_length": 5}', "hash_ids"),
        (line(0, [1]), "input_length"),
        (line(513, [1]), "512 tokens"),
        (line(5, []), "0 tokens"),
        (line(5, [-1]), "hash_ids"),
        (line(5, [1])[:-1] + ', "output_length": "x"}', "output_length"),
        ('{"input_length": 1e3, "hash_ids": ["a"]}', "hash_ids"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, bad: str, word: str) -> None:
    path = write(tmp_path, line(1, [0]), bad)
    reader = trace.requests(path)
    assert len(next(reader).tokens) == 1
    with pytest.raises(ConfigError) as caught:
        next(reader)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert word in caught.value.message
    assert caught.value.line == 2


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": \xff1, "hash_ids": [0]}\n')
    with pytest.raises(ConfigError, match=":1: "):
        list(trace.requests(path))


def test_a_file_that_is_one_endless_line_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_LINE", 100)
    path = tmp_path / "trace.jsonl"
    path.write_text("x" * 1000)
    with pytest.raises(ConfigError, match="longer than 100 bytes"):
        list(trace.requests(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        list(trace.requests(tmp_path / "none.jsonl"))


def test_forgotten_blocks_come_back_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *[line(512 * 8, list(range(i, i + 8))) for i in range(20)], line(512 * 8, list(range(8))))
    plenty = [request.tokens.tolist() for request in trace.requests(path)]
    monkeypatch.setattr(trace, "KEPT_BLOCKS", 3)
    assert [request.tokens.tolist() for request in islice(trace.requests(path), 100)] == plenty
