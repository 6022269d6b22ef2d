"""Who asks a rank why: the acquires that it remembers, and answers of `core.explain`, made a slice a turn."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from sglcache.core.asked import Acquires
from sglcache.core.explain import Question, explain
from sglcache.core.key import Namespace
from sglcache.errors import BadRequest, SglcacheError
from sglcache.server.owner import Owner
from sglcache.units import printable

MAX_LISTED = 1000
NONE = "no acquires are remembered; set observe.requests, such as 4096, and start the daemon anew"

Steps = Generator[None, None, dict[str, Any]]


class Explaining:
    """Of one rank."""

    def __init__(self, owner: Owner, requests: int, num_bytes: int, host_page_bytes: int = 0) -> None:
        """So many requests are remembered, of tokens so many bytes. `host_page_bytes`: of a page there, all parts."""
        self.owner = owner
        self.index = owner.index
        self._host_page_bytes = host_page_bytes
        self.acquires: Acquires | None = Acquires(requests, num_bytes, owner.index.departures) if requests else None

    def steps(
        self,
        tokens: bytes = b"",
        namespace: Namespace = Namespace(),  # noqa: B008
        limit: int | None = None,
        request: str | None = None,
        last: int = 0,
        elsewhere: bool = True,
    ) -> Steps:
        """Of tokens, of a `request` by its name or "#number", or a list of the `last` ones. BadRequest: none or several
        of these, or there is no such request any more. `elsewhere`: see `Question`."""
        if bool(tokens) + (request is not None) + (last > 0) != 1:
            raise BadRequest("ask of tokens, of a request, or for the last ones: of one of these")
        self.owner.begin_turn()
        if tokens:
            return explain(self.index, Question(tokens, namespace, limit, self._host_page_bytes, None, elsewhere))
        if (acquires := self.acquires) is None:
            raise BadRequest(NONE)
        if request is None:
            return self._listed(min(last, MAX_LISTED))
        asked = acquires.find(request)
        if asked is None:
            raise BadRequest(
                f"there is no request {request!r} among the last {len(acquires):,} acquires; `sglcache explain "
                "--last 20` lists them, and a larger observe.requests has more remembered",
                request=request,
                remembered=len(acquires),
            )
        return explain(
            self.index, Question(asked.tokens, asked.namespace, asked.limit, self._host_page_bytes, asked, elsewhere)
        )

    def _listed(self, last: int) -> Steps:
        yield
        acquires, now = self.acquires, self.index.now
        assert acquires is not None
        rows = [
            {
                "number": asked.number,
                "id": printable(asked.name) if asked.name is not None else None,
                "ago_s": round(now - asked.at, 3),
                "session": asked.session,
                "tenant": asked.tenant,
                "tokens": len(asked.tokens) // 4,
                "device_tokens": asked.device_tokens,
                "host_tokens": asked.host_tokens,
                "outcome": asked.outcome,
                "waited_s": round((now if (at := asked.answered_at) is None else at) - asked.at, 3),
                "waited_for": asked.waits_for,
            }
            for asked in acquires.last(last)
        ]
        return {"requests": rows, "remembered": len(acquires)}

    def drive(
        self, steps: Steps, done: Callable[[dict[str, Any] | SglcacheError], None], alive: Callable[[], bool]
    ) -> None:
        """A slice now, and one in each turn that follows; then `done`, unless nobody waits for it any more."""
        if not alive():
            return
        self.owner.begin_turn()
        try:
            next(steps)
        except StopIteration as end:
            done(end.value)
        except SglcacheError as error:
            done(error)
        else:
            self.owner.loop.call_soon(self.drive, steps, done, alive)
