"""NVIDIA Dynamo's standalone KV indexer over its HTTP API: who is registered, and what it would route by."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglcache.client.discovery import Source, ask_json, base_url
from sglcache.errors import SglcacheError, Unavailable

TIERS = {"device": "GPU", "host_pinned": "CPU_PINNED"}  # its word in a dump -> the medium on the wire
GROUP = "default"  # the routing group of who names none


class Registration(NamedTuple):
    """A worker of a model."""

    instance: int
    model: str
    block_size: int
    endpoints: dict[int, str]  # by rank
    statuses: dict[int, str]


class Indexer:
    """One indexer. Unavailable: it does not answer; SglcacheError, with its own words: it refuses."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url = base_url(url)
        self._timeout_s = timeout_s

    def check_health(self) -> None:
        """Unavailable: nothing there says that it is well."""
        status, answer = ask_json(f"{self.url}/health", timeout_s=self._timeout_s)
        if status != 200:
            raise Unavailable(f"GET {self.url}/health: status {status}: {answer}", url=self.url)

    def workers(self) -> list[Registration]:
        """All that are registered."""
        return [
            Registration(
                each["instance_id"],
                each["model_name"],
                each["block_size"],
                {int(rank): endpoint for rank, endpoint in each["endpoints"].items()},
                {int(rank): listener["status"] for rank, listener in each["listeners"].items()},
            )
            for each in self._ask("/workers")
        ]

    def register(self, model: str, instance: int, source: Source, block_size: int) -> None:
        """Have it follow a rank's stream, from all that is cached on where there is a replay endpoint."""
        body: dict[str, Any] = {
            "instance_id": instance,
            "model_name": model,
            "block_size": block_size,
            "dp_rank": source.rank,
            "endpoint": source.endpoint,
        }
        if source.replay_endpoint is not None:
            body["replay_endpoint"] = source.replay_endpoint
        self._ask("/register", body)

    def unregister(self, model: str, instance: int) -> None:
        """Every rank of the instance."""
        self._ask("/unregister", {"instance_id": instance, "model_name": model})

    def query(self, model: str, tokens: list[int], **names: str | None) -> dict[int, dict[int, int]]:
        """By instance and rank, the tokens of the prompt that are on the device. `names`: lora_name, cache_salt."""
        given = {key: name for key, name in names.items() if name is not None}
        answer = self._ask("/query", {"token_ids": tokens, "model_name": model, **given})
        return {
            int(instance): {int(rank): count for rank, count in found["dp"].items() if count}
            for instance, found in answer["instances"].items()
        }

    def blocks(self, model: str) -> dict[tuple[int, str], set[int]]:
        """Every block of the model that it believes in, by (rank, medium): hashes as the stream names them."""
        held: dict[tuple[int, str], set[int]] = {}
        for entry in self._ask(f"/dump?model_name={model}").get(f"{model}:{GROUP}", {}).get("events", ()):
            event = entry["event"]
            where = event["dp_rank"], TIERS.get(entry["storage_tier"], entry["storage_tier"])
            for block in event["data"]["stored"]["blocks"]:
                block_hash = block["block_hash"]
                held.setdefault(where, set()).add(block_hash - (1 << 64) if block_hash >> 63 else block_hash)
        return held

    def _ask(self, path: str, body: object = None) -> Any:
        status, answer = ask_json(f"{self.url}{path}", body, timeout_s=self._timeout_s)
        if status not in (200, 201):
            said = answer.get("error", answer) if isinstance(answer, dict) else answer
            raise SglcacheError(f"{self.url}{path}: {said} (status {status})", status=status)
        return answer
