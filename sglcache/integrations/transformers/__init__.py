"""A model runner on Hugging Face transformers whose KV lives in the daemon's pages. Needs `sglcache[transformers]`.

    client = sglcache.Client()
    runner = load(folder, client)  # or, of a model that is there already: Runner(client, PagedModel(model, client))
    request = runner.submit(prompt, max_new_tokens=32)
    runner.run()
    request.output

`settings(model.config, ...)` are the sections of the daemon's configuration for a model; `pool_settings` is its
`[pool]`, for a model that needs nothing else. `Runner` decides (leases, chunks, batches, sampling) and touches no page;
`PagedModel` computes and touches no lease. With the model's heads spread over processes, `ShardedModel` (in `parallel`)
stands in for `PagedModel`, and nothing else changes. Run as a module, the package is a command line on all that.
"""

from __future__ import annotations

from sglcache.errors import extras

with extras():
    from sglcache.integrations.transformers.folder import load, load_config, load_model, load_tokenizer
    from sglcache.integrations.transformers.geometry import check_geometry, pool_settings, settings
    from sglcache.integrations.transformers.model import Executor, PagedModel, Part, StatePart, WindowPart
    from sglcache.integrations.transformers.runner import Request, Runner

__all__ = [
    "Executor",
    "PagedModel",
    "Part",
    "Request",
    "Runner",
    "StatePart",
    "WindowPart",
    "check_geometry",
    "load",
    "load_config",
    "load_model",
    "load_tokenizer",
    "pool_settings",
    "settings",
]
