"""The demo's model runner, a process of its own: a line of JSON in, a line of JSON out, until stdin ends.

It first says what pool its model needs, and is told the socket of a daemon that has it. So nobody else loads torch.

The model is a Llama with random weights and a token for each byte. It says nothing sensible, and takes its time to
read like a real one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglcache.client import Client
from sglcache.integrations.transformers import PagedModel, Runner, pool_settings

VOCAB = 256
PAGE_SIZE = 16
DEVICE_TOKENS = 4096  # room for one of the two manuals, not for both


def config() -> Any:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )


def main() -> None:
    torch.set_num_threads(1)  # several wait for the slowest, which on a busy machine takes many times as long
    torch.manual_seed(0)
    tell(pool_settings(config(), page_size=PAGE_SIZE, num_tokens=DEVICE_TOKENS, dtype="float32"))
    with Client(Path(json.loads(sys.stdin.readline())), name="demo runner") as client:
        model = PagedModel(LlamaForCausalLM(config()), client)
        runner = Runner(client, model)
        tell({"ready": True})
        for line in sys.stdin:
            tell(answer(runner, **json.loads(line)))


def tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def answer(runner: Runner, text: str, max_new_tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    request = runner.submit(list(text.encode()), max_new_tokens=max_new_tokens)
    while not request.output:
        runner.step()
    first_token_s = time.perf_counter() - started
    runner.run()
    return {
        "first_token_s": first_token_s,
        "prompt_tokens": len(request.prompt),
        "matched_tokens": request.matched_tokens,
        "host_tokens": request.host_tokens,
        "output": request.output,
    }


if __name__ == "__main__":
    main()
