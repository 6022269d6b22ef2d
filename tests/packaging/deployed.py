"""What the image and the unit are told, read from their files, and daemons that are started as they would be."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from sglcache import paths, ranks
from sglcache.errors import Unavailable
from sglcache.testing.daemon import START_S, STOP_S, until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent  # where `sglcache` is, as /opt/sglcache/bin in the image and in the unit
ANY_PORT = {
    "events.endpoint": "tcp://127.0.0.1:0",
    "events.replay_endpoint": "tcp://127.0.0.1:0",
    "http.host": "127.0.0.1",
    "http.port": 0,
    "pool.num_tokens": 4096,
}


class Instruction(NamedTuple):
    """One of a Dockerfile's, without comments and continued lines."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def flags(self) -> dict[str, str]:
        return dict(re.findall(r"--([a-z-]+)=(\S+)", self.text))

    @property
    def arguments(self) -> list[str]:
        """The words that are no flags."""
        return [word for word in self.words if not word.startswith("--")]

    @property
    def command(self) -> list[str]:
        """Of ENTRYPOINT, CMD and HEALTHCHECK ... CMD: a JSON array, for there is no shell between."""
        array = json.loads(self.text[self.text.index("[") :])
        assert all(isinstance(word, str) for word in array), f"{self}: an array of words is wanted"
        return list(array)


class Stage(NamedTuple):
    base: str
    name: str | None
    instructions: list[Instruction]

    def all(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def last(self, name: str) -> Instruction:
        """The one that counts."""
        found = self.all(name)
        assert found, f"the stage {self.name or 'that is the image'} has no {name}"
        return found[-1]


class Dockerfile:
    """`arguments`: those before the first stage, with their defaults. The last stage is the image."""

    def __init__(self, text: str) -> None:
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        self.arguments: dict[str, str] = {}
        self.stages: list[Stage] = []
        for line in filter(None, map(str.strip, joined.splitlines())):
            name, _, rest = line.partition(" ")
            if name == "FROM":
                match = re.fullmatch(r"(\S+)(?: AS (\S+))?", rest)
                assert match is not None, line
                self.stages.append(Stage(match[1], match[2], []))
            elif not self.stages:
                assert name == "ARG", f"{line}: only ARG may stand before FROM"
                key, _, value = rest.partition("=")
                self.arguments[key] = value
            else:
                self.stages[-1].instructions.append(Instruction(name, rest.strip()))

    @property
    def image(self) -> Stage:
        return self.stages[-1]

    @property
    def environment(self) -> dict[str, str]:
        """What every process in the image has."""
        return dict(word.partition("=")[::2] for env in self.image.all("ENV") for word in env.words)

    def resolved(self, text: str) -> str:
        """With the image's build arguments as they are by default."""
        defaults = dict(each.text.partition("=")[::2] for each in self.image.all("ARG"))
        return re.sub(r"\$\{?(\w+)\}?", lambda match: defaults[match[1]].strip('"'), text)


class Unit:
    """A systemd unit: `section.key`, each key's values in order."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, list[str]] = {}
        section = ""
        for line in text.splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                key, _, value = line.partition("=")
                self.values.setdefault(f"{section}.{key}", []).append(value)

    def one(self, key: str) -> str:
        (value,) = self.values[f"Service.{key}"]
        return value

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.partition("=")[::2] for value in self.values["Service.Environment"] for word in value.split())


def settings(**more: object) -> list[str]:
    """`--set` for a daemon beside others: ports of the system's choice, on loopback, and a small pool."""
    return [word for key, value in {**ANY_PORT, **more}.items() for word in ("--set", f"{key}={value}")]


def environ(told: Mapping[str, str]) -> dict[str, str]:
    """This process's, without where its user's daemon would be, under `told`."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLCACHE_", "XDG_")) and name != "NOTIFY_SOCKET"
    }
    return {**own, "PATH": f"{BIN}{os.pathsep}{own['PATH']}", **told}


def run(command: Sequence[str], env: Mapping[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload, no-any-return]


class Service:
    """A daemon that runs this very command. As a context manager it is stopped by SIGTERM, and must end with 0."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.env = env
        with open(log, "ab") as file:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def await_health(self, socket: Path, status: str = "ok") -> None:
        def so() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log.read_text()}"
            try:
                return bool(ranks.ask(paths.supervisor_path(socket), "/health")["status"] == status)
            except Unavailable:
                return False

        until(so, START_S)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            code = self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(STOP_S)
        said = self.log.read_text()
        if error is not None:
            error.add_note(said)
        else:
            assert code == 0, f"it ended with {code}: {said}"
