"""`sglcache explain`: why a prompt is a hit as far as it is, and no farther."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from sglcache.cli import Target, each_of, observer_of, rank_option, socket_option, targets_of
from sglcache.console import EXIT_FAILED, EXITS, Command, emit, json_option
from sglcache.errors import BadRequest


class Prompt(msgspec.Struct):
    """What else is there is not read: the namespace is told by options."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


NUMBER = re.compile(r"[^\s,\[\]]+")


def tokens_of(text: str, whence: str) -> list[int]:
    """Token ids with commas or blanks between, a list of JSON, or an object with one as `tokens`, as HTTP takes it.

    BadRequest: something else is there."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=Prompt).tokens
        except msgspec.DecodeError as exc:
            raise BadRequest(f'{whence}: {exc}; write {{"tokens": [1, 15043]}}, or the ids alone') from None
    words = NUMBER.findall(text)
    wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if wrong is not None or not words:
        what = f"{wrong[:40]!r} is no token id" if wrong is not None else "there is no token"
        raise BadRequest(f"{whence}: {what}; write ids with commas or blanks between, such as 1,15043,3186")
    return list(map(int, words))


def read(argument: str) -> list[int]:
    """`TOKENS` of the command line. BadRequest: no tokens, or no such file."""
    if argument == "-":
        return tokens_of(sys.stdin.read(), "stdin")
    if not argument.startswith("@"):
        return tokens_of(argument, "TOKENS")
    try:
        return tokens_of(Path(argument[1:]).read_text(), argument[1:])
    except (OSError, UnicodeDecodeError) as exc:
        raise BadRequest(f"{argument[1:]} can't be read: {exc}") from exc


@click.command(
    cls=Command,
    examples=(
        "sglcache explain 1,15043,3186,29892",
        "sglcache explain @prompt.json --cache-salt customer-7",
        "sglcache explain --last 20",
        "sglcache explain --request chatcmpl-81f0",
        "sglcache explain --request '#4711' --json | jq .missing",
    ),
    exits={0: "all that could be is a hit", 1: "some page is missing, or no hit", 69: EXITS[69]},
)
@click.argument("tokens", required=False)
@click.option("--request", metavar="ID", help="An earlier acquire: by its request_id, or as '#' and its number here.")
@click.option("--last", type=click.IntRange(1, 1000), metavar="N", help="List the last so many acquires.")
@click.option("--lora", metavar="NAME", help="The prompt's namespace, as its acquires name it; likewise:")
@click.option("--extra-key", metavar="KEY", help="")
@click.option("--cache-salt", metavar="SALT", help="")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="As an acquire that matches N tokens at most.")
@socket_option
@rank_option("all")
@json_option
def explain(
    tokens: str | None,
    request: str | None,
    last: int | None,
    lora: str | None,
    extra_key: str | None,
    cache_salt: str | None,
    limit: int | None,
    socket: Path | None,
    rank: str | None,
    as_json: bool,
) -> int:
    """Why is so much of a prompt a hit, and no more? What left, when, for whom, and where it would be found.

    TOKENS are ids with commas between, `@FILE` (a JSON list, or ids with blanks between) or `-` for stdin. With
    --request it is the acquire of that request, as of then. The daemon remembers what left in a ring
    (observe.departures, observe.requests), and says how far back that reaches.
    """
    if (tokens is not None) + (request is not None) + (last is not None) != 1:
        raise click.UsageError("give TOKENS, --request ID or --last N: one of these")
    if tokens is None and (lora, extra_key, cache_salt, limit) != (None,) * 4:
        raise click.UsageError("--lora, --extra-key, --cache-salt and --limit go with TOKENS")
    ids = read(tokens) if tokens is not None else []
    targets = targets_of(socket, rank)
    missing = []

    def work(target: Target) -> None:
        with observer_of(target.socket) as client:
            if last is not None:
                facts: dict[str, Any] = {"requests": client.last_requests(last)}
            elif request is not None:
                facts = client.explain_request(request)
            else:
                facts = client.explain(ids, limit=limit, lora=lora, extra_key=extra_key, cache_salt=cache_salt)
        first = facts.get("missing")
        missing.append(first is not None and first["why"] != "limit")  # who asked for no more has all of it
        if as_json:
            emit({"rank": target.offset or 0, **facts})
            return
        if target.is_one_of > 1 and len(targets) > 1:
            click.secho(f"rank {target.offset}", bold=True)
        if last is not None:
            click.echo("\n".join(map(_line, facts["requests"])) or "no request has been seen yet")
        else:
            click.echo("\n".join(facts["words"]))

    code = each_of(targets, work)
    return code or (EXIT_FAILED if any(missing) else 0)


def _line(row: dict[str, Any]) -> str:
    """One request of a list."""
    matched = row["device_tokens"] + row["host_tokens"]
    host = f" ({row['host_tokens']:,} on the host)" if row["host_tokens"] else ""
    words = [f"#{row['number']}", f"{row['ago_s']:.1f} s ago", row["outcome"]]
    words.append(
        f"matched {matched:,} of {row['tokens']:,}{host}"
        if row["outcome"] == "granted"
        else f"{row['tokens']:,} tokens"
    )
    if row["waited_for"]:
        words.append(f"waited {row['waited_s']:.3f} s")
    words += [f"{key} {row[key]}" for key in ("id", "tenant", "session") if row[key] is not None]
    return "  ".join(words)
