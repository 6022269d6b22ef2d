"""One root, a stable code for each kind, the facts as attributes, the remedy in the text.

Codes travel over the control socket and into metrics: they are never renamed. `from_code` rebuilds
the type on the client's side.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, ClassVar

# Which extra of the package brings a module that is not there without it.
EXTRAS = {"torch": "runner", "transformers": "transformers", "tokenizers": "transformers", "mooncake": "mooncake"}


def with_article(noun: str) -> str:
    """A noun behind its article, for messages: a runner, an observer."""
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


def because(error: OSError, remedy: str) -> str:
    """Why the system refused, and what to do: `remedy`, unless it was for want of descriptors, whatever was tried."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit: ulimit -n, LimitNOFILE= in a unit, --ulimit nofile= of a container"
    return f"{error.strerror or error}; {remedy}"


class SglcacheError(Exception):
    """Whatever sglcache refuses or fails at. `facts` holds what a program wants to know."""

    code: ClassVar[str] = "error"
    in_general: ClassVar[str] = "`sglcache doctor` looks what is wrong, and the daemon's log may say more"
    """What to do where the message does not say it."""

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    @property
    def remedy(self) -> str:
        """What to do: what the message says behind its first semicolon, or what helps with its kind in general."""
        return self.message.partition("\n")[0].partition("; ")[2] or self.in_general

    def __getattr__(self, name: str) -> Any:
        if name != "facts" and name in self.__dict__.get("facts", ()):
            return self.facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @staticmethod
    def from_code(code: str, message: str, facts: dict[str, Any]) -> SglcacheError:
        """The error that the other side raised; an unknown code gives the root class."""
        return _BY_CODE.get(code, SglcacheError)(message, **facts)


class ConfigError(SglcacheError):
    """The configuration is wrong; `path` is the dotted key where there is one."""

    code = "config"
    in_general = "`sglcache check` says what a configuration comes to, and configs/cpu.toml has every key"


class StartError(SglcacheError):
    """A rank of the daemon ended before it served, and not for its configuration."""

    code = "start"
    in_general = "the log above says why"


class NotInstalled(SglcacheError):
    """What was asked for needs a part that is not installed: `module`, and `extra`, which brings it."""

    code = "not_installed"


class BadRequest(SglcacheError):
    """A command's arguments are out of range. The state is as it was."""

    code = "bad_request"
    in_general = "see the command's --help"


class DoubleFree(BadRequest):
    """What is freed is nobody's: it was freed before, or never handed out. `slots` has the first. Nothing was freed."""

    code = "double_free"


class ProtocolError(SglcacheError):
    """A frame that is not of the protocol: malformed, oversized, of another version. The connection ends."""

    code = "protocol"
    in_general = "have both sides be of one version: update the older one, and start it again"


class NoSpace(SglcacheError):
    """Locks leave too few slots: `resource`, `tier`, `need`, `free`, `cached`, `locked`. Nothing was changed.

    Where there are tenants, also whose request it was: `tenant`, its `floor` and `ceiling`, what it is `charged` with,
    of which `tenant_locked` are cached and in use; and what the floors of the others keep, `kept_by_floors`.

    Of one that waited: `waited_s`, its `place` among those who waited, and the `holders` of most pages."""

    code = "no_space"
    in_general = "release leases, or give the pool more room"


class UnknownLease(SglcacheError):
    """The lease was released, or is another session's."""

    code = "unknown_lease"


class UnknownSession(SglcacheError):
    """No such session, or not one that this member may join."""

    code = "unknown_session"
    in_general = "`sglcache sessions` lists those that there are"


class SessionEnded(SglcacheError):
    """A member of the session died or left. Its leases are gone; `reattach`, or close."""

    code = "session_ended"


class Forbidden(SglcacheError):
    """The member's role does not allow this command."""

    code = "forbidden"
    in_general = "do it as the user that runs the daemon"


class Busy(SglcacheError):
    """Something live holds what should be cleared (`leases`, `copies`, `pinned_pages`, ...), or a bound is reached on
    what may wait or be done at once, with the numbers. Nothing was changed."""

    code = "busy"
    in_general = "try again when that is over, or end it: `sglcache sessions` says who holds what"


class Cancelled(SglcacheError):
    """The request was withdrawn while it waited. Nothing was changed."""

    code = "cancelled"


class TooSlow(SglcacheError):
    """The peer did not read its answers: `unsent_bytes` waited for it. The connection ends."""

    code = "too_slow"


class Changed(SglcacheError):
    """What the caller counted on is no longer so; look again."""

    code = "changed"
    in_general = "try again"


class Unavailable(SglcacheError):
    """The daemon, or a rank of it, can't be reached, or the connection ended before the answer."""

    code = "unavailable"
    in_general = "start a daemon with `sglcache serve`, or see `sglcache doctor`"


class DaemonRestarted(Unavailable):
    """The daemon's life that the client attached to, `epoch`, is over: it was started again, or is gone.

    Its leases, pages and session ended with it. `Client.reattach` attaches to the next life, once that serves.
    """

    code = "daemon_restarted"


class TransferError(SglcacheError):
    """A copy failed. With `fatal` a device is lost, and the rank ends (fail stop)."""

    code = "transfer"


class CorruptPage(SglcacheError):
    """The bytes of a host page have changed by themselves (`resource`, `slot`), and it can't be let go of, for it is in
    use: the rank ends (fail stop)."""

    code = "corrupt_page"


class StorageError(SglcacheError):
    """The third tier failed at something. Pages are missed for it, and computed again."""

    code = "storage"


class ClosedError(SglcacheError):
    """The object was closed (or belongs to the parent of this forked process)."""

    code = "closed"


_BY_CODE = {
    kind.code: kind
    for kind in (
        SglcacheError, ConfigError, StartError, NotInstalled, BadRequest, DoubleFree, ProtocolError, NoSpace,
        UnknownLease, UnknownSession, SessionEnded, Forbidden, Busy, Changed, Unavailable, DaemonRestarted,
        TransferError, CorruptPage, StorageError, ClosedError, Cancelled, TooSlow,
    )
}  # fmt: skip


@contextlib.contextmanager
def extras() -> Iterator[None]:
    """An import that fails in here for want of what an extra brings raises NotInstalled."""
    try:
        yield
    except ModuleNotFoundError as exc:
        module = (exc.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise NotInstalled(
            f"this needs {module}, which is not installed; pip install 'sglcache[{EXTRAS[module]}]'",
            module=module,
            extra=EXTRAS[module],
        ) from exc
