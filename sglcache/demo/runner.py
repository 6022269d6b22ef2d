"""The demo's model runner, a process of its own: a line of JSON in, a line of JSON out, until stdin ends.

The model is a Llama with random weights and a token for each byte. It says nothing sensible, and takes its time to
read like a real one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglcache.client import Client
from sglcache.integrations.transformers import PagedModel, Runner

VOCAB = 256


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


def main(socket: str) -> None:
    torch.set_num_threads(1)  # several wait for the slowest, which on a busy machine takes many times as long
    torch.manual_seed(0)
    with Client(socket, name="demo runner") as client:
        model = PagedModel(LlamaForCausalLM(config()), client)
        runner = Runner(client, model)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(runner, **json.loads(line))), flush=True)


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
    main(sys.argv[1])
