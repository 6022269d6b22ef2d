"""Models from a folder, as `save_pretrained` writes it. Nothing is fetched from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sglcache.errors import ConfigError
from sglcache.integrations.transformers.model import PagedModel
from sglcache.integrations.transformers.runner import Runner

if TYPE_CHECKING:
    import os

    from sglcache.client import Client

    Folder = str | os.PathLike[str]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load(folder: Folder, client: Client, *, dtype: str | None = None, **settings: int) -> Runner:
    """A runner of the folder's model over `client`, whose daemon has the pages for it (`load_config`, `pool_settings`).

    `dtype` (torch's name) is that of the weights in the folder where it is not said; `settings` are the runner's.
    ConfigError: there is no such model, or the daemon serves another.
    """
    return Runner(client, PagedModel(load_model(folder, dtype), client), **settings)


def load_config(folder: Folder) -> Any:
    """The transformers configuration of the folder's model. ConfigError: there is none."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} is no folder of a model: it has no config.json")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def load_model(folder: Folder, dtype: str | None = None) -> Any:
    """The folder's model, with its weights. ConfigError: it is no model that writes text, or it can't be read."""
    load_config(folder)
    wanted = "auto" if dtype is None else getattr(torch, dtype)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{folder} can't be loaded: {exc}") from exc


def load_tokenizer(folder: Folder) -> Any | None:
    """The folder's tokenizer; None if it has none."""
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def stop_tokens(folder: Folder) -> list[int]:
    """The tokens that end an answer of the folder's model."""
    if (Path(folder) / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        found = load_config(folder).eos_token_id
    return [found] if isinstance(found, int) else list(found or ())
