"""`sglcache config`: what a daemon would run with, every key; or the reference that docs/configure.md is.

The reference is made of the configuration's models: a key cannot be there without its words, its kind and its bounds.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from sglcache import config as configs
from sglcache.console import Command, emit, json_option, set_option

HEAD = """# Configure

Every key, made of the models in `sglcache/config.py` by `sglcache config --reference`. Write those that you change into
a TOML file, `sglcache serve --config my.toml`; one value at a time goes with `--set pool.page_size=64`, of which the
last one wins. What is not known is refused, with the key that was probably meant; and of the environment only
SGLCACHE_CONFIG is read, which names the file.
[configs/cpu.toml](../configs/cpu.toml) has all of it as one file; `sglcache config my.toml` prints what a daemon would
run with, and `sglcache check my.toml` what that takes.

A size in bytes is text with a unit: B, kB, MB, GB, TB (10³ each) or KiB, MiB, GiB, TiB (2¹⁰ each). Numbers count what
their names say; `_s` is seconds, `_ms` milliseconds.
"""


@click.command(
    cls=Command,
    examples=(
        "sglcache config my.toml --changed",
        "sglcache config -s pool.page_size=64 --json",
        "sglcache config --reference",
    ),
    exits={2: "the configuration is wrong"},
)
@click.argument("file", type=click.Path(path_type=Path), required=False, envvar="SGLCACHE_CONFIG")
@set_option()
@click.option("--changed", is_flag=True, help="Only what is not the default.")
@click.option("--reference", is_flag=True, help="Every key there is, with its kind, bounds and words, as Markdown.")
@json_option
def config(file: Path | None, overrides: tuple[str, ...], changed: bool, reference: bool, as_json: bool) -> int:
    """Print what a daemon would run with, given FILE (else the defaults), as TOML, defaults as comments; or what can be
    configured.
    """
    if reference:
        facts = [_facts(f"{section}.{key}" if section else key, schema) for section, key, schema in _keys()]
        if as_json:
            emit(facts)
        else:
            click.echo(text(), nl=False)
        return 0
    whole = configs.load(file, overrides)
    written = whole.model_dump(mode="json", exclude_unset=True)
    told = written if changed else whole.model_dump(mode="json")
    if as_json:
        emit(told)
    else:
        click.echo("\n".join(_toml(told, written)))
    return 0


def text() -> str:
    """docs/configure.md."""
    lines = [HEAD]
    last: str | None = None
    for section, key, schema in _keys():
        if section != last:
            lines += _heading(section)
            last = section
        default = _default(schema)
        lines.append(f"| `{key}` | {_kind(schema)} | {default} | {_cell(schema['description'])} |")
    return "\n".join(lines) + "\n"


def _heading(section: str) -> list[str]:
    model = _models()[section]
    words = inspect.cleandoc(model.__doc__ or "")
    title = f"[{section}]" if section else "Of all"
    if section == "tenants":
        title = "[tenants.NAME]"
    elif section in ("mamba.states", "parallel.stages"):
        title = f"[[{section}]]"
    words = words.partition(": ")[2] or words if words.startswith("`[") else words
    words = "" if not section else words[:1].upper() + words[1:]
    return [f"\n## {title}\n", *([words + "\n"] if words else []), "| key | is | default | |", "|---|---|---|---|"]


def _models() -> dict[str, type[configs.Section]]:
    """By section, the models; "" is the whole's own keys."""
    found: dict[str, type[configs.Section]] = {"": configs.Config}
    for name, field in configs.Config.model_fields.items():
        if (section := configs.section_of(field.annotation)) is not None:
            found[name] = section
            for key, inner in section.model_fields.items():
                if (table := configs.section_of(inner.annotation)) is not None:
                    found[f"{name}.{key}"] = table
    return found


def _keys() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(section, key, its JSON schema), in the file's order."""
    for section, model in _models().items():
        properties = model.model_json_schema()["properties"]
        for key, field in model.model_fields.items():
            if configs.section_of(field.annotation) is None:
                schema = properties[key]
                if _is_size([field.annotation, *field.metadata]):
                    schema["type"] = "size"  # a number here, and text with a unit in a file
                    schema.pop("anyOf", None)
                if "default" not in schema and not field.is_required():
                    schema["default"] = field.default
                yield section, key, schema


def _facts(dotted: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    told = {"key": dotted, "is": _kind(schema).replace("`", ""), "description": schema["description"]}
    return {**told, **({"default": schema["default"]} if "default" in schema else {"required": True})}


def _is_size(parts: Iterable[Any]) -> bool:
    """Whether an annotation has bytes in it that a file has as text with a unit."""
    return any(
        getattr(part, "func", None) is configs.parse_size
        or _is_size([*getattr(part, "__metadata__", ()), *get_args(part)])
        for part in parts
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """In words: what a value is, and its bounds."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(map(_kind, kinds)))
    if "enum" in schema:
        return ", ".join(f"`{_value(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_value(schema['const'])}`"
    kind = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "array": "list"}
    kind["size"] = "size"
    word = "path" if schema.get("format") == "path" else kind.get(schema.get("type", ""), "table")
    if word == "list":
        return f"list of: {_kind(schema['items'])}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and high is not None:
        return f"{word}, {low:,} to {high:,}".replace("inf", "any")
    if low is not None:
        return f"{word}, {'above ' if 'exclusiveMinimum' in schema else ''}{low:,}" + (
            "" if "exclusiveMinimum" in schema else " or more"
        )
    return word


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return "must be written"
    return "–" if schema["default"] is None else f"`{_value(schema['default'])}`"


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def _value(value: Any) -> str:
    """As TOML has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items() if each is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _toml(told: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
    """One key a line, in the file's order; defaults as comments, for not all of them may be written beside the rest."""
    for name, value in told.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{'' if name in written else '# '}{name} = {_value(value)}"
    for name, section in told.items():
        if isinstance(section, Mapping):
            yield f"\n[{name}]"
            own = written.get(name, {})
            for key, value in section.items():
                if value is not None:
                    yield f"{'' if key in own else '# '}{_name(key)} = {_value(own.get(key, value))}"


def _name(key: str) -> str:
    return key if key.replace("-", "_").isidentifier() and key.isascii() else json.dumps(key)
