"""ZMQ CURVE: who may read the stream, and that nobody else does. Keys are files as `zmq.auth` writes and reads them."""

from __future__ import annotations

import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import zmq
import zmq.auth
from zmq.utils import z85

from sglcache.errors import ConfigError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


KEY_CHARACTERS, KEY_BYTES = 40, 32  # of a key in Z85, and as it is
MAX_KEY_FILE = 1 << 16  # bytes


class Curve(NamedTuple):
    """This side's keys, and the folder of the public keys (*.key) that may connect; None: every key may."""

    public: bytes
    secret: bytes
    allowed: Path | None

    @classmethod
    def load(cls, key_file: Path, allow_dir: Path | None) -> Self:
        """ConfigError: a file can't be read, or is not what it should be."""
        if not zmq.has("curve"):
            raise ConfigError("events.curve_key_file: this libzmq was built without CURVE; install pyzmq's own wheel")
        public, secret = load_key(key_file, "events.curve_key_file", secret=True)
        assert secret is not None
        if allow_dir is not None:
            if not allow_dir.is_dir():
                raise ConfigError(f"events.curve_allow_dir: {allow_dir} is no folder", path="events.curve_allow_dir")
            for path in allow_dir.glob("*.key"):
                load_key(path, "events.curve_allow_dir")
        return cls(public, secret, allow_dir)

    def serve(self, sock: zmq.Socket[bytes]) -> None:
        """Have a socket, not bound yet, speak with none but those who know the public key."""
        sock.curve_secretkey = self.secret
        sock.curve_publickey = self.public
        sock.curve_server = True

    def guard(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator | None:
        """Let in none but the allowed, on every socket of the context, until it is stopped. Keys that are added to the
        folder later count from the next start on."""
        if self.allowed is None:
            return None
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=str(self.allowed))
        return authenticator


def load_key(path: Path, name: str, secret: bool = False) -> tuple[bytes, bytes | None]:
    """The public key in a file, and the secret one where there is one. ConfigError, naming the configuration's key."""
    try:
        if not stat.S_ISREG((status := path.stat()).st_mode) or status.st_size > MAX_KEY_FILE:
            raise ValueError("it is no file, or too long for one")
        public, private = zmq.auth.load_certificate(path)
        for key in (public, private):
            if key is not None and (len(key) != KEY_CHARACTERS or len(z85.decode(key)) != KEY_BYTES):
                raise ValueError(f"a key is {KEY_CHARACTERS} characters of Z85")
        if private is not None and zmq.curve_public(private) != public:
            raise ValueError("its two keys are not of one pair")
    except (OSError, ValueError, IndexError, KeyError, struct.error, zmq.ZMQError) as exc:
        raise ConfigError(
            f"{name}: {path} holds no CURVE key ({exc}); make one with `sglcache keygen`", path=name
        ) from exc
    if secret and private is None:
        raise ConfigError(f"{name}: {path} holds a public key alone; name the .key_secret file", path=name)
    return public, private


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair: the file of the public key, and that of both. ConfigError: it is there, or is no file's name."""
    if "/" in name or not name:
        raise ConfigError(f"{name!r} is no file's name; the folder is the first argument")
    for path in (folder / f"{name}.key", folder / f"{name}.key_secret"):
        if path.exists():
            raise ConfigError(f"{path} is there; a new pair would lock out who has the old one: choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        public, secret = map(Path, zmq.auth.create_certificates(folder, name))
        secret.chmod(0o600)
    except OSError as exc:
        raise ConfigError(f"no keys can be made in {folder}: {exc}") from exc
    return public, secret
