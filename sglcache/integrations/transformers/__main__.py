"""Run a model from a folder on a daemon's pages:

    python -m sglcache.integrations.transformers --model FOLDER --print-config > model.toml
    sglcache serve --config model.toml
    python -m sglcache.integrations.transformers --model FOLDER --prompt "Once upon a time"

Exit codes are those of `sglcache`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from transformers.utils import logging

from sglcache import config
from sglcache.client import Client
from sglcache.errors import BadRequest, ConfigError, NoSpace, SglcacheError, Unavailable
from sglcache.integrations.transformers.folder import load, load_config, load_model, load_tokenizer, stop_tokens
from sglcache.integrations.transformers.geometry import settings
from sglcache.integrations.transformers.parallel import ShardedModel
from sglcache.integrations.transformers.runner import Request, Runner

EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 69, 130  # as of `sglcache`
PROGRAM = "python -m sglcache.integrations.transformers"
positive = click.IntRange(min=1)


class Options(NamedTuple):
    """What is to be said, and how."""

    max_new_tokens: int
    temperature: float
    seed: int
    as_json: bool


def _ids(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[list[int]]:
    try:
        return [[int(each) for each in value.replace(",", " ").split()] for value in values]
    except ValueError:
        raise click.BadParameter("write token ids as numbers, such as 1,2,3") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--model", "folder", type=click.Path(path_type=Path), required=True, help="As save_pretrained wrote it.")
@click.option("--prompt", "prompts", multiple=True, help="A text to go on with; may be repeated.")
@click.option("--ids", multiple=True, callback=_ids, help="A prompt as token ids, such as 1,2,3; may be repeated.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    envvar="SGLCACHE_SOCKET",
    help="The daemon's control socket; by default where `sglcache serve` of this user puts it.",
)
@click.option("--max-new-tokens", type=positive, default=32, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: always the likeliest token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn, above temperature 0.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="By default as the weights are in the folder.",
)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each answer.")
@click.option("--print-config", is_flag=True, help="Print the daemon's configuration for this model, and leave.")
@click.option("--page-size", type=positive, default=16, show_default=True, help="For --print-config.")
@click.option("--num-tokens", type=positive, default=1 << 16, show_default=True, help="For --print-config.")
@click.option("--num-shards", type=positive, default=1, show_default=True, help="For --print-config: processes.")
def command(
    folder: Path,
    prompts: tuple[str, ...],
    ids: list[list[int]],
    socket: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str | None,
    as_json: bool,
    print_config: bool,
    page_size: int,
    num_tokens: int,
    num_shards: int,
) -> int:
    """Run a model of Hugging Face transformers on the pages of a running daemon.

    Prompts that are given together are computed together; without any, each line of standard input is one, and is
    answered before the next is read. With several shards in the daemon's pool, each is a process here.
    """
    if print_config:
        sections = settings(
            load_config(folder), page_size=page_size, num_tokens=num_tokens, dtype=dtype, num_shards=num_shards
        )
        config.parse(sections)  # what is printed can be served
        for name, section in sections.items():
            click.echo(f"[{name}]\n" + "\n".join(f"{key} = {_toml(value)}" for key, value in section.items()))
        return 0
    load_config(folder)  # before anything is asked of the daemon
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and (prompts or not ids):
        raise ConfigError(f"{folder} has no tokenizer: give prompts as --ids")
    stop = stop_tokens(folder)
    options = Options(max_new_tokens, temperature, seed, as_json)
    given = [*(_encode(tokenizer, prompt) for prompt in prompts), *ids]
    with _runner(folder, socket, dtype) as runner:
        if given:
            return _answer(runner, given, stop, tokenizer, options)
        failed = 0
        for line in sys.stdin:
            failed = _answer(runner, [_encode(tokenizer, line.rstrip("\n"))], stop, tokenizer, options) or failed
    return failed


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(each)}' for key, each in value.items())} }}"
    return json.dumps(value)


@contextlib.contextmanager
def _runner(folder: Path, socket: Path | None, dtype: str | None) -> Iterator[Runner]:
    """In this process, or with the model in one for each shard."""
    with Client(socket, role="observer", name="transformers") as observer:
        num_shards = observer.geometry.num_shards
    if num_shards == 1:
        with Client(socket, name="transformers") as client:
            yield load(folder, client, dtype=dtype)
        return
    with (
        Client(socket, role="scheduler", name="transformers") as scheduler,
        ShardedModel(partial(load_model, folder, dtype), scheduler) as executor,
    ):
        yield Runner(scheduler, executor)


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens


def _answer(runner: Runner, prompts: list[list[int]], stop: list[int], tokenizer: Any, options: Options) -> int:
    """A line for each prompt; one that can't be answered says so on stderr, and others go on. 1 if there was such."""
    started = time.perf_counter()
    requests: list[Request] = []
    failed = 0

    def fail(error: SglcacheError, length: int) -> None:
        nonlocal failed
        failed = 1
        click.echo(f"error[{error.code}]: a prompt of {length} tokens: {error.message}", err=True)

    for prompt in prompts:
        try:
            requests.append(
                runner.submit(
                    prompt,
                    max_new_tokens=options.max_new_tokens,
                    temperature=options.temperature,
                    seed=options.seed,
                    stop=stop,
                )
            )
        except BadRequest as error:
            fail(error, len(prompt))
    first_token_s: dict[Request, float] = {}
    while not runner.idle:
        try:
            runner.step()
        except NoSpace as error:
            request = runner.give_up()
            requests.remove(request)
            fail(error, len(request.prompt))
        for request in requests:
            if request.output and request not in first_token_s:
                first_token_s[request] = time.perf_counter() - started
    runner.settle()
    for request in requests:
        text = None if tokenizer is None else tokenizer.decode(request.output)
        if options.as_json:
            facts = {
                "prompt_tokens": len(request.prompt),
                "matched_tokens": request.matched_tokens,
                "host_tokens": request.host_tokens,
                "first_token_s": round(first_token_s[request], 6),
                "output": request.output,
                "text": text,
            }
            click.echo(json.dumps(facts))
            continue
        click.echo(" ".join(map(str, request.output)) if text is None else text)
        click.secho(
            f"-- {request.matched_tokens} of {len(request.prompt)} tokens were cached, {request.host_tokens} of them "
            f"on the host; first token after {first_token_s[request] * 1e3:,.0f} ms",
            dim=True,
            err=True,
        )
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and turn errors into one line and an exit code."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        return int(command.main(arguments, prog_name=PROGRAM, standalone_mode=False))
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except SglcacheError as exc:
        click.echo(f"error[{exc.code}]: {exc.message}", err=True)
        return {Unavailable: EXIT_UNAVAILABLE, ConfigError: EXIT_USAGE, BadRequest: EXIT_USAGE}.get(
            type(exc), EXIT_FAILED
        )


if __name__ == "__main__":
    sys.exit(main())
