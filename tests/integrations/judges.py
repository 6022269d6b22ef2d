"""What a request said, held against what the model says without any cache."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import Tensor

from sglcache.integrations.transformers import Request, Runner

BOUND = 2e-5  # of float32 logits whose largest are about 10
NUM_NEW = 6


def say(runner: Runner, prompt: list[int], **arguments: Any) -> Request:
    request = runner.submit(prompt, max_new_tokens=NUM_NEW, keep_logits=True, **arguments)
    runner.run()
    return request


def logits(request: Request) -> Tensor:
    assert request.logits is not None
    return torch.stack(request.logits)


def judge(model: Any, request: Request) -> None:
    """Its words are the model's own, and its logits are within BOUND of the model's without a cache."""
    want = tiny.without_cache(model, request.tokens.tolist(), len(request.prompt))
    assert request.output == want.argmax(-1).tolist()
    torch.testing.assert_close(logits(request), want, atol=BOUND, rtol=0)
