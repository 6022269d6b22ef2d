"""Why a prompt is a hit as far as it is, and no farther. Looks, changes nothing, and does so in slices.

The tree says what is there. What is not there any more is among the departures, compared token by token (`Trace`); what
never came, and what left before the oldest of them, can't be told apart beyond that, and the answer says since when it
knows. Of other prompts it tells nothing but that there is one: no tokens, no salts, no names of namespaces.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sglcache.core import hashing
from sglcache.core.asked import Asked
from sglcache.core.departures import Departure, Note, Trace, backwards
from sglcache.core.key import TOKEN_BYTES, Namespace
from sglcache.errors import BadRequest
from sglcache.units import Tier, printable

if TYPE_CHECKING:
    from sglcache.core.index import Index
    from sglcache.core.tree import Node

DEVICE, HOST = 0, 1
SLICE = 500  # entries or spaces that are looked at at once: about a millisecond
HASHED = 1 << 20  # bytes of tokens hashed at once
MAX_LEASES = 4096  # that are looked at, for who computes the page just now
FIELDS = Namespace._fields


class Question(NamedTuple):
    """What is asked. `asked`: an acquire of before, whose match is to be explained as of then."""

    tokens: bytes
    namespace: Namespace
    limit: int | None = None
    page_bytes: int = 0  # of a page of the host's pool, all shards together; 0: nobody said
    asked: Asked | None = None
    elsewhere: bool = True  # whether to tell that another namespace has the same tokens


@dataclass
class _Found:
    """What the departures know of the first missing page, the newest of each cell."""

    left: dict[int, Departure] = field(default_factory=dict)  # by cell
    notes: list[Note] = field(default_factory=list)
    companions: dict[int, Departure] = field(default_factory=dict)


def explain(index: Index, q: Question) -> Generator[None, None, dict[str, Any]]:
    """The facts, as msgpack and JSON take them; `words` of `in_words` are made of them. BadRequest: no whole uint32s.

    To be resumed until it returns; the tree may change meanwhile, and the answer is of some moment of it.
    """
    if len(q.tokens) % TOKEN_BYTES or not q.tokens:
        raise BadRequest(f"explain needs at least one token, whole uint32s; got {len(q.tokens)} bytes")
    answer = yield from _Explaining(index, q).run()
    return answer


class _Explaining:
    def __init__(self, index: Index, q: Question) -> None:
        self.index, self.q = index, q
        self.page_bytes = index.page_bytes
        self.page_size = index.config.page_size
        self.end = index.keys.whole(len(q.tokens))
        self.limit = self.end
        if q.limit is not None:
            self.limit = min(self.end, q.limit * TOKEN_BYTES // self.page_bytes * self.page_bytes)
        self.now = self.then = index.now
        self.upto = index.departures.total if index.departures is not None else 0
        self.granted = q.asked if q.asked is not None and q.asked.outcome == "granted" else None
        if self.granted is not None:
            self.upto, self.then = self.granted.departures, self.granted.at

    # -- looking ------------------------------------------------------------------------------------------------------

    def run(self) -> Generator[None, None, dict[str, Any]]:
        q, index, config, granted = self.q, self.index, self.index.config, self.granted
        path, partial, at = self._match()
        device, matched = self._reach(path, partial, at)
        reaches: tuple[int, ...] = ()
        why: str | None = None  # of what is cached and is no hit
        if granted is not None:
            device = granted.device_tokens * TOKEN_BYTES
            matched = device + granted.host_tokens * TOKEN_BYTES
        elif index.companions is not None:
            full, (matched, device, reaches) = matched, index.companions.agree(path, partial, at)
            why = "companion" if matched < full else None
        there = matched
        if granted is None and 0 < (matched - device) // TOKEN_BYTES < config.load_back_threshold:
            matched, why = device, "load_back_threshold"
        device, matched = min(device, self.limit), min(matched, self.limit)
        facts: dict[str, Any] = {
            "tokens": len(q.tokens) // TOKEN_BYTES,
            "page_size": self.page_size,
            "whole_pages": self.end // self.page_bytes,
            "rest_tokens": (len(q.tokens) - self.end) // TOKEN_BYTES,
            "bigram": index.keys.bigram,
            "limit": q.limit,
            "matched": {
                "tokens": matched // TOKEN_BYTES,
                "device": device // TOKEN_BYTES,
                "host": (matched - device) // TOKEN_BYTES,
            },
            "policies": {
                "device": config.eviction.name,
                "host": config.host_eviction.name if index.T > HOST else None,
                "write": config.write_policy.name if index.T > HOST else None,
            },
            "missing": None,
        }
        if (departures := index.departures) is not None:
            facts["remembered"] = {
                "departures": len(departures.entries),
                "all": departures.forgot_at is None,
                "known_s": round(self.then - departures.known_since, 3),
                "cleared_s": None if (at_ := departures.cleared_at) is None else round(self.now - at_, 3),
            }
        if matched > device:
            num_pages = (matched - device) // self.page_bytes
            facts["load_back"] = {"pages": num_pages, "bytes": num_pages * q.page_bytes}
            if granted is None:
                found = yield from self._look(device, device + self.page_bytes)
                if (entry := found.left.get(DEVICE)) is not None:
                    facts["device_missing"] = {**self._page(device), "left": self._entry(entry)}
        if matched == self.limit < self.end:
            facts["missing"] = {**self._page(matched), "why": "limit"}
        elif matched < self.end:
            facts["missing"] = yield from self._missing(matched, why, reaches, (there - device) // TOKEN_BYTES)
        if q.asked is not None:
            facts["request"] = self._request(q.asked)
        facts["advice"] = self._advice(facts)
        facts["words"] = in_words(facts)
        return facts

    def _match(self) -> tuple[list[Node], Node | None, int]:
        space = self.index.tree.spaces.get(self.q.namespace)
        if space is None or not self.end:
            return [], None, 0
        return self.index._match(space.root, self.q.tokens, self.end)

    def _reach(self, path: Sequence[Node], partial: Node | None, at: int) -> tuple[int, int]:
        """Bytes on the device, and in either tier: what is being written there is not counted."""
        device = everywhere = 0
        for node in [*path, partial]:
            if node is None:
                break
            num_bytes = at if node is partial else node.num_bytes
            if node.cells[DEVICE] is not None and device == everywhere:
                device += num_bytes
            everywhere += num_bytes
        return device, everywhere

    def _page(self, start: int) -> dict[str, Any]:
        first = start // TOKEN_BYTES
        return {"page": start // self.page_bytes + 1, "first_token": first, "last_token": first + self.page_size - 1}

    def _missing(
        self, start: int, why: str | None, reaches: tuple[int, ...], on_host: int
    ) -> Generator[None, None, dict[str, Any]]:
        """The first page that is no hit, and why: it is not there, or for what reason else."""
        facts = self._page(start)
        if why == "load_back_threshold":
            return {**facts, "why": why, "host_tokens": on_host}
        found = yield from self._look(start, start + self.page_bytes)
        if why is not None or (found.companions and not found.left and self.granted is not None):
            return {**facts, **self._companion(reaches, found)}
        under_way = self._under_way(start) if self.granted is None else None
        if under_way is not None:
            facts |= {"why": "under_way", "under_way": under_way}
        else:
            facts |= self._left(found)
        if facts["why"] != "not_loaded":
            elsewhere = (yield from self._elsewhere(start)) if self.q.elsewhere else None
            if elsewhere is not None:
                facts["elsewhere"] = elsewhere
            third = yield from self._third(start)
            if third is not None:
                facts["third"] = third
        return facts

    def _look(self, start: int, stop: int) -> Generator[None, None, _Found]:
        """The newest departures of the page from `start` to `stop`, of each cell."""
        index, departures = self.index, self.index.departures
        found = _Found()
        if departures is None:
            return found
        trace = Trace(index, self.q.namespace, self.q.tokens, self.end)
        trace.live(*self._match())
        joined = index.tree.num_merges
        entries, notes = list(departures.entries), list(departures.notes)
        for slice in backwards(entries, SLICE):
            if index.tree.num_merges != joined:
                joined = index.tree.num_merges
                trace.live(*self._match())  # what is known of it holds still; others are its nodes now
            for entry in slice:
                lies = trace.range_of(entry.node, entry.num_pages)
                if lies is None or not lies[0] <= start < stop <= lies[1] or entry.number > self.upto:
                    continue
                (found.left if entry.cell < index.T else found.companions).setdefault(entry.cell, entry)
            yield
        trace.live(*self._match())
        for note in reversed(notes):
            lies = trace.range_of(note.node, note.num_pages)
            if lies is not None and lies[0] <= start < stop <= lies[1] and note.number <= self.upto:
                found.notes.append(note)
        return found

    def _left(self, found: _Found) -> dict[str, Any]:
        departures = self.index.departures
        if departures is None:
            return {"why": "unknown"}
        entries = sorted(found.left.values(), key=lambda entry: entry.number)
        if not entries:
            known = departures.forgot_at is None and departures.cleared_at is None
            return {"why": "never" if known else "never_or_forgotten"}
        facts: dict[str, Any] = {"why": "left", "left": [self._entry(entry) for entry in entries]}
        if entries[-1].reason == "pruned":
            facts["companions"] = self._companions(found)
        device, host = found.left.get(DEVICE), found.left.get(HOST)
        if entries[-1].kept and self.granted is not None:
            return {**facts, "why": "not_loaded"}  # the other tier had it then, and it was no hit
        if device is not None and not device.kept and (host is None or device.number > host.number):
            facts["not_on_host"] = self._not_on_host(device, host, found.notes)
        return facts

    def _entry(self, entry: Departure) -> dict[str, Any]:
        index = self.index
        tenants = None if index.tenants is None else index.tenants.names
        policy = None
        if entry.reason == "evicted" and entry.cell < index.T:
            policy = (index.config.eviction, index.config.host_eviction)[entry.cell].name
        return {
            "tier": Tier(entry.cell % index.T).name,
            "reason": entry.reason,
            "ago_s": round(self.now - entry.at, 3),
            "pages": entry.num_pages,
            "age_s": round(entry.at - entry.born, 3),
            "idle_s": round(entry.at - entry.used, 3),
            "hits": entry.hits,
            "kept": entry.kept,
            "policy": policy,
            "tenant": None if tenants is None else tenants[entry.payer],
            "for": {
                "what": entry.cause.what,
                "session": entry.cause.session,
                "tenant": None if tenants is None else tenants[entry.cause.tenant],
            }
            if entry.cause.what
            else None,
        }

    def _not_on_host(self, device: Departure, host: Departure | None, notes: Sequence[Note]) -> dict[str, Any]:
        """Why what left the device was not on the host."""
        index = self.index
        policy = index.config.write_policy
        if index.T <= HOST:
            return {"why": "no_host_tier"}
        if host is not None:
            return {"why": "left_the_host_before", "ago_s": round(self.now - host.at, 3)}
        for note in notes:
            if note.at >= device.born and note.number <= device.number:
                return {"why": note.why, "ago_s": round(self.now - note.at, 3)}
        if policy.selective and device.hits is not None and device.hits < policy.threshold:
            return {"why": "too_few_hits", "hits": device.hits, "threshold": policy.threshold}
        if device.reason != "evicted":
            return {"why": device.reason}
        return {"why": "unknown"}

    def _companion(self, reaches: tuple[int, ...], found: _Found) -> dict[str, Any]:
        """Full is there; which other resource is not."""
        index = self.index
        assert index.companions is not None
        names = [kind.resource.name for kind in index.companions.kinds]
        full, *others = reaches or (0,)
        behind = {name: reach for name, reach in zip(names, others, strict=False) if reach < full}
        return {
            "why": "companion",
            "full_tokens": full,
            "reaches": behind,
            "companions": self._companions(found),
        }

    def _companions(self, found: _Found) -> list[dict[str, Any]]:
        """What of the page left of other resources, the last of each cell."""
        resources = self.index.resources
        return [{"resource": resources[each.cell].name, **self._entry(each)} for each in found.companions.values()]

    def _under_way(self, start: int) -> dict[str, Any] | None:
        """Somebody computes or fetches it just now."""
        index, q = self.index, self.q
        trace = Trace(index, q.namespace, q.tokens, self.end)
        trace.live(*self._match())
        span = index.keys.span
        looked = 0
        for lease in index.leases.values():
            looked += 1
            if looked > MAX_LEASES:
                break
            have = lease.committed * self.page_bytes
            if lease.namespace != q.namespace or have > start or index.keys.whole(lease.num_bytes) <= start:
                continue
            if (0 if lease.node is None else trace.at(lease.node, 0)) != have:
                continue
            text, skipped = lease.text(have)
            if text[skipped : skipped + start - have + span] == q.tokens[have : start + span]:
                what = "loaded" if lease.load is not None else "computed"
                return {"what": what, "session": lease.session.id}
        for prefetch in index.l3.prefetches if index.l3 is not None else ():
            place = 0 if prefetch.anchor is None else trace.at(prefetch.anchor, 0)
            if prefetch.namespace != q.namespace or place is None or place > start:
                continue
            if prefetch.tokens[: start - place + span] == q.tokens[place : start + span]:
                return {"what": "fetched", "session": None}
        return None

    def _elsewhere(self, start: int) -> Generator[None, None, dict[str, Any] | None]:
        """The same tokens of another namespace are cached farther than these. Which differs, not how."""
        index, q = self.index, self.q
        best, differs = start, list[str]()
        for i, space in enumerate(list(index.tree.spaces.values())):
            if i % SLICE == SLICE - 1:
                yield
            if space.namespace == q.namespace or index.tree.child(space.root, q.tokens, 0) is None:
                continue
            path, partial, at = index._match(space.root, q.tokens, self.end)
            reach = self._reach(path, partial, at)[1]
            if reach > best:
                best = reach
                differs = [
                    name for name, one, other in zip(FIELDS, q.namespace, space.namespace, strict=True) if one != other
                ]
        return {"tokens": best // TOKEN_BYTES, "differs": differs} if differs else None

    def _third(self, start: int) -> Generator[None, None, dict[str, Any] | None]:
        """What the third tier has of the rest."""
        index, q = self.index, self.q
        l3 = index.l3
        if l3 is None:
            return None
        if not l3.config.exact:
            return {"tier": l3.tier.name, "tokens": None}
        size, last = index.hasher.size, hashing.seed(q.namespace)
        num_pages = 0
        step = max(1, HASHED // self.page_bytes) * self.page_bytes
        for at in range(0, self.end, step):
            stop = min(self.end, at + step)
            words = index.keys.words(q.tokens[at : stop + index.keys.over])
            digests = index.hasher.chain(last, words, index.keys.word_bytes)
            last = digests[-size:]
            for i in range(max(0, start - at) // self.page_bytes, len(digests) // size):
                if digests[i * size : (i + 1) * size] not in l3.shelf:
                    return {"tier": l3.tier.name, "tokens": num_pages * self.page_size}
                num_pages += 1
            yield
        return {"tier": l3.tier.name, "tokens": num_pages * self.page_size}

    # -- telling ------------------------------------------------------------------------------------------------------

    def _request(self, asked: Asked) -> dict[str, Any]:
        done = asked.answered_at
        return {
            "number": asked.number,
            "id": asked.name,
            "ago_s": round(self.now - asked.at, 3),
            "session": asked.session,
            "tenant": asked.tenant,
            "outcome": asked.outcome,
            "waited_s": round((self.now if done is None else done) - asked.at, 3) if asked.waits_for else 0.0,
            "waited_for": asked.waits_for,
        }

    def _advice(self, facts: dict[str, Any]) -> list[str]:
        """What would have helped."""
        index, missing = self.index, facts["missing"]
        if missing is None:
            return []
        advice: list[str] = []
        not_there = missing.get("not_on_host", {}).get("why")
        if missing.get("left", [{"reason": ""}])[-1]["reason"] != "evicted":
            pass
        elif not_there == "no_host_tier":
            advice.append("a host tier would have kept it: set host.pool_ratio")
        elif not_there == "too_few_hits":
            advice.append('host.write_policy = "write_through" copies pages with their first use')
        elif not_there in ("no_room", "left_the_host_before"):
            advice.append("a larger host tier: raise host.pool_ratio")
        last = missing["left"][-1] if missing["why"] == "left" else {}
        if last.get("tier") == "HOST" and last["reason"] == "evicted":
            advice.append("a larger host tier: raise host.pool_ratio")
        by, whose = last.get("for"), last.get("tenant")
        if by is not None and whose is not None and by["tenant"] != whose:
            assert index.tenants is not None
            tier = last["tier"].lower()
            if not index.tenants.limits[whose].of(Tier[last["tier"]])[0]:
                advice.append(f"a {tier}_floor for tenant {whose}: it has none, and {by['tenant']} took the page")
        if missing["why"] == "load_back_threshold":
            advice.append("lower host.load_back_threshold")
        if missing.get("third") and missing["third"]["tokens"] != 0:
            advice.append("an acquire that waits for the third tier (prefetch) brings it")
        return list(dict.fromkeys(advice))


# -- in words ---------------------------------------------------------------------------------------------------------


def in_words(facts: dict[str, Any]) -> list[str]:
    """A dozen lines at most, for people."""
    lines: list[str] = []
    if (request := facts.get("request")) is not None:
        lines.append(_of_request(request))
    matched = facts["matched"]
    parts = [f"{matched[tier]:,} on the {tier}" for tier in ("device", "host") if matched[tier]]
    line = f"matched {matched['tokens']:,} of {facts['tokens']:,} tokens"
    lines.append(line + (f": {', '.join(parts)}" if parts else ""))
    if (load := facts.get("load_back")) is not None:
        size = f", {_size(load['bytes'])}" if load["bytes"] else ""
        lines.append(f"the part on the host is loaded with the acquire: {load['pages']:,} pages{size}")
    missing = facts["missing"]
    if missing is None:
        end = facts["whole_pages"] * facts["page_size"]
        if facts["rest_tokens"]:
            name = " and the token behind them" if facts["bigram"] else ""
            lines.append(
                f"that is all there can be: pages are {facts['page_size']} tokens{name}, and the last "
                f"{facts['rest_tokens']} of {facts['tokens']:,} tokens fill none (whole pages end at {end:,})"
            )
        else:
            lines.append("that is all of it")
    else:
        lines += _of_missing(facts, missing)
    if (other := facts.get("device_missing")) is not None:
        lines.append(f"page {other['page']:,} {_of_entry(other['left'])}")
    lines += [f"would help: {each}" for each in facts["advice"]]
    return [printable(line) for line in lines[:12]]


def _of_request(request: dict[str, Any]) -> str:
    name = f"request {request['id']} (#{request['number']})" if request["id"] else f"request #{request['number']}"
    tenant = f", tenant {request['tenant']}" if request["tenant"] else ""
    what = {"granted": "granted", "waiting": "waiting still"}.get(request["outcome"], f"refused: {request['outcome']}")
    waited = ""
    if request["waited_for"]:
        for_what = {"room": "room", "making_room": "pages to go", "third_tier": "the third tier"}
        waited = f", waited {_span(request['waited_s'])} for {for_what[request['waited_for']]}"
    return f"{name}: {_span(request['ago_s'])} ago, session {request['session']}{tenant}: {what}{waited}"


def _of_missing(facts: dict[str, Any], missing: dict[str, Any]) -> list[str]:
    page = f"page {missing['page']:,} (tokens {missing['first_token']:,} to {missing['last_token']:,})"
    why = missing["why"]
    lines: list[str] = []
    known = facts.get("remembered", {})
    if why == "limit":
        lines.append(f"{page} and what is behind it was not to be matched: limit {facts['limit']:,}")
    elif why == "load_back_threshold":
        lines.append(
            f"{page} is on the host, and is computed again: {missing['host_tokens']:,} tokens are fewer than "
            "host.load_back_threshold"
        )
    elif why == "under_way":
        how = missing["under_way"]
        by = f" by session {how['session']}" if how["session"] is not None else ""
        lines.append(f"{page} is being {how['what']}{by} just now")
    elif why == "companion":
        behind = "".join(f", {name} {reach:,}" for name, reach in missing["reaches"].items())
        reach = f": full KV reaches {missing['full_tokens']:,} tokens{behind}" if behind else ""
        lines.append(f"{page} is cached, and no match can end there{reach}")
        lines += [f"  {entry['resource']} {_of_entry(entry)}" for entry in missing["companions"]]
    elif why == "unknown":
        lines.append(f"{page} is not cached; why is not known: observe.departures is 0")
    elif why == "never":
        lines.append(
            f"{page} was never committed: nothing is forgotten since this rank started, "
            f"{_span(known['known_s'])} before"
        )
    elif why == "never_or_forgotten":
        since = _span(known["known_s"]) if known["known_s"] > 0 else "0 s"
        lines.append(
            f"{page} has not left in the {since} before that are remembered: it was never committed, or longer ago"
        )
        if known["cleared_s"] is not None:
            lines.append(f"  the whole cache was cleared {_span(known['cleared_s'])} ago")
    else:
        *earlier, last = missing["left"]
        lines += [f"{page} {_of_entry(last)}", f"  {_of_run(last)}"]
        lines += [f"  before that it {_of_entry(entry)}" for entry in earlier]
        if why == "not_loaded":
            lines.append("  the host had it, and it was not loaded: host.load_back_threshold or load_back_quota")
        lines += [f"  {entry['resource']} {_of_entry(entry)}" for entry in missing.get("companions", ())]
        if (never := missing.get("not_on_host")) is not None:
            lines.append(f"  {_of_never(never)}")
    if (third := missing.get("third")) is not None:
        if third["tokens"] is None:
            lines.append(f"the third tier ({third['tier'].lower()}) may have it: it is asked by an acquire")
        elif third["tokens"]:
            lines.append(
                f"the third tier ({third['tier'].lower()}) has it, and {third['tokens']:,} tokens from there on"
            )
        else:
            lines.append(f"the third tier ({third['tier'].lower()}) does not have it")
    if (other := missing.get("elsewhere")) is not None:
        lines.append(
            f"another namespace has {other['tokens']:,} of these tokens: its {' and '.join(other['differs'])} "
            f"{'is' if len(other['differs']) == 1 else 'are'} different"
        )
    return lines


def _of_entry(entry: dict[str, Any]) -> str:
    tier, ago = entry["tier"].lower(), _span(entry["ago_s"])
    if entry["reason"] == "cleared":
        return f"was cleared from the {tier} {ago} ago"
    if entry["reason"] == "corrupt":
        return f"was let go of on the {tier} {ago} ago: its bytes, or those before it, had changed by themselves"
    if entry["reason"] == "pruned":
        return f"left the {tier} {ago} ago: no match could end there any more"
    by = ""
    if (whom := entry["for"]) is not None:
        what = {
            "acquire": "an acquire",
            "extend": "an extend",
            "backup": "a copy to the host",
            "prefetch": "a fetch from the third tier",
            "ceiling": "its tenant's lowered ceiling",
        }[whom["what"]]
        by = f" for {what}"
        if whom["tenant"] is not None:
            by += f" of tenant {whom['tenant']}"
        if whom["session"] is not None:
            by += f" (session {whom['session']})"
    other = ""
    if entry["kept"]:
        other = " (the host kept it)" if tier == "device" else " (the device kept it)"
    policy = f", policy {entry['policy']}" if entry["policy"] else ""
    return f"was evicted from the {tier} {ago} ago{by}{policy}{other}"


def _of_run(entry: dict[str, Any]) -> str:
    pages, hits = entry["pages"], entry["hits"]
    words = f"{pages:,} pages went at once" if pages > 1 else "it went alone"
    words += f", {_span(entry['idle_s'])} after the last use, {_span(entry['age_s'])} after it came"
    return words if hits is None else f"{words}, with {hits} {'hits' if hits != 1 else 'hit'}"


def _of_never(never: dict[str, Any]) -> str:
    why = never["why"]
    if why == "no_host_tier":
        return "never backed up: there is no host tier"
    if why == "left_the_host_before":
        return f"its copy on the host had left {_span(never['ago_s'])} ago"
    if why == "no_room":
        return f"never backed up: {_span(never['ago_s'])} ago there was no room for it on the host"
    if why == "failed":
        return f"never backed up: the copy failed {_span(never['ago_s'])} ago"
    if why == "too_few_hits":
        return (
            f"never backed up: write_through_selective copies at {never['threshold']} hits, and it had {never['hits']}"
        )
    if why in ("cleared", "pruned", "corrupt"):
        return "it was not on the host"
    return "it was not on the host; why is not remembered"


def _span(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
