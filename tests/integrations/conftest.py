from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOADED = [
    "sglcache.integrations.transformers.parallel",
    "transformers.generation",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.models)


@pytest.fixture(scope="session")
def warm() -> ForkServerContext:
    """Makes processes that have torch and transformers loaded: to import these takes each of them five seconds.

    They are forked from one that has done nothing else, so they share nothing that a new one would not have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
