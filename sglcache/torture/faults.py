"""The faults. Each is a class with a name; what it does in particular it draws from a number of its own.

`do` runs in a thread, takes as long as the fault lasts, and says in words what was done to whom. While it runs, and a
little longer, it is an excuse: for runners that are held up (`stalls`) or that lose daemon or session (`ends`), of its
`rank` alone if it has one, and for the runner that it has `hit`. `possible` says why it can't be done in a setting, if
it can't.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import zmq

from sglcache.client import Client
from sglcache.client.mirror import Mirror
from sglcache.errors import Busy, NoSpace, SglcacheError, UnknownSession
from sglcache.torture import daemon as daemons
from sglcache.torture.board import Action, Common, Hook, Point
from sglcache.wire import control

if TYPE_CHECKING:
    from sglcache.torture.run import Crew, Torture

RUNNER_POINTS = (
    Point.ANYWHERE, Point.ATTACH, Point.ACQUIRE_SENT, Point.ACQUIRED, Point.LOADED, Point.HALF_WRITTEN, Point.WRITTEN,
    Point.COMMIT_SENT, Point.COMMITTED, Point.EXTENDED, Point.RELEASE_SENT, Point.LOOKING, Point.IDLE,
)  # fmt: skip
SCHEDULER_POINTS = tuple(
    point for point in RUNNER_POINTS if point not in (Point.LOADED, Point.HALF_WRITTEN, Point.WRITTEN)
)
WORKER_POINTS = (Point.ANYWHERE, Point.LOADED, Point.HALF_WRITTEN, Point.WRITTEN, Point.RECORDED)
A_WORKER = -1
FIRE_S = 2.0  # that an order has to meet its point; then it is done wherever the process is
LATER_S = 3.0  # that a failed copy may be heard of after it
KEPT = 0.5  # of the host's pages, at least, a next life has; what was under way to or from it may be missing
FEW = 16  # pages on the host, of which none may have been copied yet
COPY_S = 5.0  # for a copy to come
BACK_S = 30.0  # for a rank to serve again


class Fault:
    """One thing that goes wrong."""

    name: ClassVar[str]
    weight: ClassVar[int] = 2  # how often it comes in a round
    stalls: ClassVar[bool] = False  # excuses any runner that makes no progress
    ends: ClassVar[bool] = False  # excuses any runner that loses daemon or session
    restarts: ClassVar[bool] = False  # another life of ranks begins, of which a reader of the stream must be told
    kills: ClassVar[bool] = False  # ends a process
    alone: ClassVar[bool] = False  # not while another such one goes on

    def __init__(self, torture: Torture, seed: int) -> None:
        self.torture = torture
        self.rng = random.Random(seed)
        self.hit: Crew | None = None  # the runner that it is done to
        self.rank: int | None = None  # the rank that it is done to; None: all, or none

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        """Why it can't be; None: it can."""
        return None

    def do(self) -> str:
        raise NotImplementedError

    def draw_crew(self, wanted: Callable[[Crew], bool] = lambda crew: True) -> Crew | None:
        crews = [crew for crew in self.torture.crews if crew.living and wanted(crew)]
        return self.rng.choice(crews) if crews else None

    def draw_rank(self) -> int:
        self.rank = self.rng.randrange(len(self.torture.sockets))
        return self.rank

    def wait(self, low_s: float, high_s: float) -> float:
        """So long, or until the torture ends."""
        seconds = self.rng.uniform(low_s, high_s)
        self.torture.ending.wait(seconds)
        return seconds


class _Order(Fault):
    """A process of a runner does it to itself, at a point of its journey."""

    action: ClassVar[Action]
    number: ClassVar[int] = 0  # the process of the crew: 0 the runner or scheduler; A_WORKER

    def wanted(self, crew: Crew) -> bool:
        return True

    def do(self) -> str:
        crew = self.hit = self.draw_crew(self.wanted)
        if crew is None:
            return "nobody was there"
        number = self.number if self.number != A_WORKER else self.rng.randrange(1, len(crew.processes))
        points = WORKER_POINTS if number else SCHEDULER_POINTS if crew.has_workers else RUNNER_POINTS
        point = self.rng.choice(points)
        fired = self.torture.order(crew, number, self.action, point, FIRE_S)
        if not fired:
            self.anyway(crew, number)
        self.afterwards(crew, number)
        return f"{crew.name}{f' worker {number - 1}' if number else ''} at {point.name if fired else 'any moment'}"

    def anyway(self, crew: Crew, number: int) -> None:
        """It has not come to that point."""

    def afterwards(self, crew: Crew, number: int) -> None:
        """It is done."""


class RunnerKill(_Order):
    """SIGKILL of a runner of one process."""

    name, weight, kills, action, number = "runner-kill", 6, True, Action.DIE, 0

    def wanted(self, crew: Crew) -> bool:
        return not crew.has_workers

    def anyway(self, crew: Crew, number: int) -> None:
        crew.signal(number, signal.SIGKILL)

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return None if any(not crew.has_workers for crew in torture.crews) else "every runner has workers"


class SchedulerKill(RunnerKill):
    """SIGKILL of a runner's scheduler, and of no worker."""

    name, weight = "scheduler-kill", 3

    def wanted(self, crew: Crew) -> bool:
        return crew.has_workers

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return None if any(crew.has_workers for crew in torture.crews) else "no runner has workers"


class WorkerKill(SchedulerKill):
    """SIGKILL of one of a runner's workers."""

    name, number = "worker-kill", A_WORKER


class RunnerStop(_Order):
    """A process of a runner stands still (SIGSTOP), and goes on."""

    name, action, number = "runner-stop", Action.STOP, 0

    def anyway(self, crew: Crew, number: int) -> None:
        crew.signal(number, signal.SIGSTOP)

    def afterwards(self, crew: Crew, number: int) -> None:
        try:
            self.wait(0.05, 2.0)
        finally:
            crew.signal(number, signal.SIGCONT)


class WorkerStop(RunnerStop):
    """A worker stands still, and its scheduler does not."""

    name, number = "worker-stop", A_WORKER

    def wanted(self, crew: Crew) -> bool:
        return crew.has_workers

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return SchedulerKill.possible(torture)


class RunnerVanish(_Order):
    """A runner's connection ends without a word, and its process does not."""

    name, action, number = "runner-vanish", Action.VANISH, 0


# -- the daemon's processes ----------------------------------------------------------------------------------


def _on_host(torture: Torture, rank: int) -> int | None:
    """Pages of full KV that are cached there now; None: nobody says."""
    with contextlib.suppress(SglcacheError), torture.client(rank, "observer") as observer:
        pools = observer.status()["pools"]
        return sum(int(pool["cached"]) for pool in pools if (pool["resource"], pool["tier"]) == ("full", "HOST"))
    return None


def _is_lost(torture: Torture, before: int | None, after: int | None) -> bool:
    """Much of what was on the host is not, and nobody has cleared it. What is still being copied counts as there."""
    if before is None or after is None or any(map(torture.was_lately, (Clear, CopiesFail, CopiesStall))):
        return False
    return before >= FEW and after < before * KEPT


class RankKill(Fault):
    """SIGKILL of a rank: the supervisor starts it again."""

    name, stalls, ends, restarts, kills, alone = "rank-kill", True, True, True, True, True
    number: ClassVar[signal.Signals] = signal.SIGKILL

    def do(self) -> str:
        torture, rank = self.torture, self.draw_rank()
        pid, before = torture.rank_pid(rank), _on_host(torture, rank)
        if pid is None or not daemons.send(torture.folder, pid, self.number):
            return f"rank {rank} had no process"
        if not torture.comes_back(rank, pid, BACK_S):
            torture.fail(f"rank {rank} does not serve {BACK_S:g} s after the death of pid {pid}")
        torture.count_life()
        after = _on_host(torture, rank) if torture.config.host.keep else before
        if _is_lost(torture, before, after):
            torture.fail(f"rank {rank} had {before} pages on the host, and its next life has {after}")
        return f"rank {rank}, pid {pid}; on the host {before} pages before and {after} after"


class RankStall(Fault):
    """A rank stands still (SIGSTOP), and goes on."""

    name, weight, stalls, alone = "rank-stall", 2, True, True

    def do(self) -> str:
        torture, rank = self.torture, self.draw_rank()
        pid = torture.rank_pid(rank)
        if pid is None or not daemons.send(torture.folder, pid, signal.SIGSTOP):
            return f"rank {rank} had no process"
        try:
            seconds = self.wait(0.1, 2.0)
        finally:
            daemons.send(torture.folder, pid, signal.SIGCONT)
        return f"rank {rank} for {seconds:.2f} s"


class RankDrain(RankKill):
    """SIGTERM to a rank: it ends in good order, and is started again."""

    name, weight, number = "rank-drain", 1, signal.SIGTERM


class SupervisorKill(Fault):
    """SIGKILL of the supervisor: everything of it must be gone, and it is started again."""

    name, weight, stalls, ends, restarts, kills, alone = "supervisor-kill", 1, True, True, True, True, True
    words = "everything went, and is there again"

    def end(self) -> list[str]:
        """What is left that should not be, in words."""
        return self.torture.daemon.kill()

    def do(self) -> str:
        torture = self.torture
        ranks = range(len(torture.sockets)) if torture.config.host.keep_path is not None else ()
        before = [_on_host(torture, rank) for rank in ranks]
        for problem in self.end():
            torture.fail(problem)
        torture.daemon.start()
        torture.count_life()
        for rank in ranks:
            if _is_lost(torture, before[rank], after := _on_host(torture, rank)):
                torture.fail(f"rank {rank} had {before[rank]} pages on the host, and after a restart {after}")
        return self.words


class Restart(SupervisorKill):
    """SIGTERM to the supervisor, as for an update: all of it ends in good order, and is started again."""

    name, words = "restart", "it ended in good order, and is there again"

    def end(self) -> list[str]:
        return self.torture.daemon.stop()


class SupervisorStall(Fault):
    """The supervisor stands still; its ranks serve on."""

    name, weight, alone = "supervisor-stall", 1, True

    def do(self) -> str:
        process = self.torture.daemon.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            seconds = self.wait(0.1, 1.0)
        finally:
            process.send_signal(signal.SIGCONT)
        return f"for {seconds:.2f} s"


# -- seams in a rank -----------------------------------------------------------------------------------------


class ClockJump(Fault):
    """A rank's clock jumps, forth or back, and comes back or stays."""

    name, weight = "clock-jump", 2

    def do(self) -> str:
        rank = self.draw_rank()
        row = self.torture.rank_row(rank)
        jump_s = self.rng.choice((-1, 1)) * 10 ** self.rng.uniform(-2, 6)
        row[Hook.CLOCK_NS] = int(jump_s * 1e9)
        self.wait(0.1, 1.0)
        stays = self.rng.random() < 0.5
        if not stays:
            row[Hook.CLOCK_NS] = 0
        return f"rank {rank} by {jump_s:+,.2f} s{', to stay' if stays else ''}"


class CopiesFail(Fault):
    """Some copies between device and host fail."""

    name, weight, ends = "copies-fail", 2, True

    def do(self) -> str:
        torture, rank = self.torture, self.draw_rank()
        row = torture.rank_row(rank)
        torture.board.common[Common.COPIES_MAY_FAIL] = 1
        before = int(row[Hook.FAILED])
        row[Hook.COPIES_FAIL] = self.rng.randint(1, 6)
        try:
            self.wait(0.2, 1.0)
        finally:
            row[Hook.COPIES_FAIL] = 0
        torture.ending.wait(LATER_S)
        if not torture.goes_on(CopiesFail, besides=self):
            torture.board.common[Common.COPIES_MAY_FAIL] = 0
        return f"rank {rank}, {int(row[Hook.FAILED]) - before} pieces of copies"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        if torture.config.pool.device != "cpu":
            return "on a card a copy that fails is a card that is lost"
        return _without_copies(torture)


class CardLost(RankKill):
    """A copy's call fails, and with it the rank: what its card holds is not known."""

    name, weight = "card-lost", 1

    def do(self) -> str:
        torture, rank = self.torture, self.draw_rank()
        row, pid = torture.rank_row(rank), torture.rank_pid(rank)
        row[Hook.COPIES_FAIL] = 1
        waited = daemons.waited(lambda: row[Hook.COPIES_FAIL] and not torture.ending.is_set(), COPY_S)
        row[Hook.COPIES_FAIL] = 0
        if waited or pid is None:
            return f"rank {rank} made no copy within {COPY_S:g} s"
        if not torture.comes_back(rank, pid, BACK_S):
            torture.fail(f"rank {rank} does not serve {BACK_S:g} s after pid {pid} lost its card")
        torture.count_life()
        return f"rank {rank}, pid {pid}"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        if torture.config.pool.device == "cpu":
            return "there is no card"
        return _without_copies(torture)


class CopiesStall(Fault):
    """Copies between device and host stand still for a while."""

    name, weight, stalls = "copies-stall", 2, True

    def do(self) -> str:
        rank = self.draw_rank()
        row = self.torture.rank_row(rank)
        seconds = self.rng.uniform(0.05, 1.5)
        odd = self.rng.randrange(2)
        row[Hook.COPIES_UNTIL] = (time.monotonic_ns() + int(seconds * 1e9)) // 2 * 2 + odd
        self.torture.ending.wait(seconds)
        row[Hook.COPIES_UNTIL] = 0
        return f"rank {rank} for {seconds:.2f} s, {'after' if odd else 'before'} their bytes are moved"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return _without_copies(torture)


class DiskFull(Fault):
    """The third tier's disk takes nothing more, or fails, for a while."""

    name, weight = "disk-full", 2

    def do(self) -> str:
        rank = self.draw_rank()
        row = self.torture.rank_row(rank)
        number = self.rng.choice((errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG))
        row[Hook.DISK_ERRNO] = number
        try:
            seconds = self.wait(0.2, 1.5)
        finally:
            row[Hook.DISK_ERRNO] = 0
        return f"rank {rank}, {errno.errorcode[number]} for {seconds:.2f} s"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return None if torture.config.storage.kind == "file" else "the third tier is no folder"


class DiskDamage(Fault):
    """Files of the third tier are overwritten in part, cut short, or gone."""

    name, weight = "disk-damage", 3

    def do(self) -> str:
        for auditor in self.torture.auditors:
            auditor.spared.add("third")  # which now is not what it was, and says so
        pages = [path for path in (self.torture.folder / "store").rglob("*") if len(path.name) >= 32 and path.is_file()]
        done = {"overwritten": 0, "cut short": 0, "removed": 0}
        for path in self.rng.sample(pages, min(len(pages), self.rng.randint(1, 8))):
            how = self.rng.choice(tuple(done))
            with contextlib.suppress(FileNotFoundError):
                self._damage(path, how)
                done[how] += 1
        return ", ".join(f"{count} {how}" for how, count in done.items() if count) or "there was no file"

    def _damage(self, path: Path, how: str) -> None:
        if how == "removed":
            path.unlink()
            return
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            at = self.rng.randrange(max(1, size))
            if how == "cut short":
                file.truncate(at)
            else:
                file.seek(at)
                file.write(self.rng.randbytes(min(64, size - at)))

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return DiskFull.possible(torture)


class MasterKill(Fault):
    """Mooncake's master dies, with all that it knew, and comes back after a while."""

    name, weight, alone = "master-kill", 1, True

    def do(self) -> str:
        master = self.torture.master
        assert master is not None
        master.stop()
        seconds = self.wait(0.2, 3.0)
        master.start()
        return f"for {seconds:.1f} s"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return None if torture.master is not None else "the third tier is not Mooncake"


class MasterStop(MasterKill):
    """Mooncake's master hangs for a while."""

    name, weight = "master-stop", 2

    def do(self) -> str:
        master = self.torture.master
        assert master is not None
        master.signal(signal.SIGSTOP)
        try:
            seconds = self.wait(0.2, 4.0)
        finally:
            master.signal(signal.SIGCONT)
        return f"for {seconds:.1f} s"


class HelperKill(MasterKill):
    """The process with Mooncake's client in it, a rank's child, is killed."""

    name, alone = "helper-kill", False
    numbers: ClassVar[tuple[int, ...]] = (signal.SIGKILL,)

    def do(self) -> str:
        rank = self.draw_rank()
        pid = self.torture.rank_pid(rank)
        helpers = daemons.children(pid) if pid is not None else []
        if not helpers:
            return f"rank {rank} had none"
        helper = self.rng.choice(helpers)
        for number in self.numbers:
            if daemons.send(self.torture.folder, helper, number) and number == signal.SIGSTOP:
                self.wait(0.2, 3.0)
        return f"rank {rank}'s, pid {helper}"


class HelperStop(HelperKill):
    """The process with Mooncake's client in it hangs for a while."""

    name, numbers = "helper-stop", (signal.SIGSTOP, signal.SIGCONT)


# -- load, and bad company -----------------------------------------------------------------------------------


class Hog(Fault):
    """A session takes what room there is, and keeps it for a while."""

    name, weight, stalls, ends = "hog", 2, True, False

    def do(self) -> str:
        rank = self.draw_rank()
        taken = 0
        with self.torture.client(rank, "runner") as cache:
            geometry = cache.geometry
            pages = geometry.num_pages
            while pages and not self.torture.ending.is_set():
                tokens = [self.rng.randrange(1 << 32)] * geometry.page_size
                try:
                    # Released with the session. Windows and states are taken along.
                    cache.acquire(
                        tokens, reserve=(pages - 1) * geometry.page_size, states=int(cache.keeps_states), limit=0
                    )
                    taken += pages
                except NoSpace:
                    pages //= 2
            self.wait(0.1, 1.0)
        return f"{taken} pages of rank {rank}"


class BadFrames(Fault):
    """A flood of frames that are none on the control socket, some behind a good hello."""

    name, weight = "bad-frames", 2

    def do(self) -> str:
        rank, count = self.draw_rank(), self.rng.randint(20, 120)
        path = str(self.torture.sockets[rank])
        for _ in range(count):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(0.2)
                sock.connect(path)
                if self.rng.random() < 0.5:
                    sock.sendall(control.frame(control.Hello(control.PROTOCOL, "flood", "observer")))
                for _ in range(self.rng.randint(1, 4)):
                    sock.sendall(self._frame())
                if self.rng.random() < 0.3:
                    sock.recv(1 << 16)
        return f"{count} connections to rank {rank}"

    def _frame(self) -> bytes:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                return rng.randbytes(rng.randint(1, 4096))
            case 1:
                return struct.pack(">I", rng.getrandbits(32)) + rng.randbytes(64)
            case 2:
                return struct.pack(">I", 0)
            case 3:
                body = b"\x91" * rng.randint(1, 2000)  # arrays in arrays
                return struct.pack(">I", len(body)) + body
            case 4:
                good = bytearray(control.frame(control.Peek(1, rng.randbytes(64))))
                good[rng.randrange(4, len(good))] ^= 1 << rng.randrange(8)
                return bytes(good)
            case _:
                body = msgspec.msgpack.encode([rng.choice(("Acquire", "Commit", "Status", "Nobody")), -1, None, "x"])
                return struct.pack(">I", len(body)) + body


class Disconnects(Fault):
    """Many who attach, or begin to, and leave without a word."""

    name, weight = "disconnects", 2

    def do(self) -> str:
        rank, count = self.draw_rank(), self.rng.randint(10, 60)
        path = str(self.torture.sockets[rank])
        for _ in range(count):
            with contextlib.suppress(OSError, SglcacheError):
                how = self.rng.randrange(3)
                if how == 2:
                    role = self.rng.choice(("runner", "observer", "scheduler", "admin"))
                    client = Client(path, role=role, name="passer-by", streams=self.torture.streams)
                    twin = socket.socket(fileno=os.dup(client._connection.fileno()))
                    twin.shutdown(socket.SHUT_RDWR)
                    twin.close()
                    client.close()
                    continue
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(0.2)
                    sock.connect(path)
                    if how == 1:
                        hello = control.frame(control.Hello(control.PROTOCOL, "passer-by", "observer"))
                        sock.sendall(hello[: self.rng.randrange(len(hello))])
        return f"{count} from rank {rank}"


class EvictSession(Fault):
    """An operator ends a runner's session; the runner lives on, or is killed with it."""

    name = "evict-session"

    def do(self) -> str:
        crew = self.draw_crew()
        if crew is None:
            return "nobody was there"
        kill = self.rng.random() < 0.3
        with self.torture.client(crew.rank, "admin") as operator:
            for row in operator.status()["sessions"]:
                if row["ended"] or not any(member["name"] in crew.names for member in row["members"]):
                    continue
                self.hit = crew
                with contextlib.suppress(UnknownSession):  # it has ended by itself meanwhile
                    operator.evict_session(row["session"], kill=kill)
                return f"{crew.name}'s{', and its processes' if kill else ''}"
        return f"{crew.name} had none"


class Tenants(Fault):
    """An operator gives a tenant other limits."""

    name, weight = "tenants", 1

    def do(self) -> str:
        rank, rng = self.draw_rank(), self.rng
        tenant = rng.choice(("acme", "bulk", "default"))
        limits = {"device_floor": f"{rng.randrange(0, 30)}%", "device_ceiling": f"{rng.randrange(40, 101)}%"}
        if self.torture.config.host.enabled:
            limits |= {"host_floor": f"{rng.randrange(0, 30)}%", "host_ceiling": f"{rng.randrange(40, 101)}%"}
        for name in ("device_ceiling", "host_ceiling"):
            if name in limits and rng.random() < 0.4:
                limits[name] = "none"
        with self.torture.client(rank, "admin") as operator:
            operator.set_tenant(tenant, **limits)
        return f"{tenant} of rank {rank}: {', '.join(f'{name} {limit}' for name, limit in limits.items())}"

    @classmethod
    def possible(cls, torture: Torture) -> str | None:
        return None if torture.config.tenants else "there are no tenants"


class Clear(Fault):
    """An operator clears a tier, or all. While leases live, that is refused."""

    name, weight = "clear", 2

    def do(self) -> str:
        rank = self.draw_rank()
        tiers = [None, "device", *(["host"] if self.torture.config.host.enabled else [])]
        if self.torture.config.storage.kind == "file":
            tiers.append("disk")
        tier = self.rng.choice(tiers)
        with self.torture.client(rank, "admin") as operator:
            try:
                pages = operator.clear(tier)
            except Busy:
                return f"{tier or 'all'} of rank {rank}: it is in use"
        return f"{tier or 'all'} of rank {rank}: {sum(pages.values())} pages"


class Announce(Fault):
    """All that is cached is told anew on the stream."""

    name, weight = "announce", 1

    def do(self) -> str:
        rank = self.draw_rank()
        with self.torture.client(rank, "admin") as operator:
            operator.announce()
        return f"rank {rank}"


class ReplayStorm(Fault):
    """Many subscribers ask for everything at once, and some leave in the midst of it."""

    name, weight = "replay-storm", 2

    def do(self) -> str:
        rank, count = self.draw_rank(), self.rng.randint(4, 12)
        endpoint, replay_endpoint = self.torture.endpoints[rank]
        finished = 0
        with contextlib.ExitStack() as stack:
            mirrors = [stack.enter_context(Mirror(endpoint, replay_endpoint, rank=rank)) for _ in range(count)]
            deadline = time.monotonic() + self.rng.uniform(0.2, 2.0)
            while mirrors and time.monotonic() < deadline and not self.torture.ending.is_set():
                for mirror in list(mirrors):
                    mirror.step(0.005)
                    if mirror.synced and mirror.exact:
                        finished += 1
                        mirrors.remove(mirror)
                        mirror.close()
        return f"{count} readers of rank {rank}, {finished} to the end"


class Subscribers(Fault):
    """Subscribers that don't read, and such that come and go."""

    name, weight = "subscribers", 2

    def do(self) -> str:
        rank = self.draw_rank()
        endpoint, replay_endpoint = self.torture.endpoints[rank]
        stuck = self.rng.random() < 0.5
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            if stuck:
                sub = context.socket(zmq.SUB)
                sub.setsockopt(zmq.RCVHWM, 1)
                sub.setsockopt(zmq.RCVBUF, 4096)
                sub.connect(endpoint)
                sub.subscribe(b"")
                asks = context.socket(zmq.DEALER)  # and takes no answer
                asks.setsockopt(zmq.RCVHWM, 1)
                asks.connect(replay_endpoint)
                asks.send_multipart([b"", bytes(8)])
                seconds = self.wait(0.5, 3.0)
                return f"one of rank {rank} that does not read for {seconds:.1f} s"
            count = self.rng.randint(5, 40)
            for _ in range(count):
                with context.socket(zmq.SUB) as sub:
                    sub.connect(endpoint)
                    sub.subscribe(b"")
                    sub.poll(self.rng.randrange(20))
                    sub.setsockopt(zmq.LINGER, 0)
            return f"{count} of rank {rank}, one after the other"
        finally:
            context.destroy(linger=0)


FAULTS: tuple[type[Fault], ...] = (
    RunnerKill, WorkerKill, SchedulerKill, RunnerStop, WorkerStop, RunnerVanish, RankKill, RankDrain, RankStall,
    SupervisorKill, SupervisorStall, Restart, ClockJump, CopiesFail, CardLost, CopiesStall, DiskFull, DiskDamage,
    MasterKill, MasterStop, HelperKill, HelperStop, Hog, BadFrames,
    Disconnects, EvictSession, Tenants, Clear, Announce, ReplayStorm, Subscribers,
)  # fmt: skip
"""In the order in which they are told of. A new one is added here, and is one."""

BY_NAME = {fault.name: fault for fault in FAULTS}


def _without_copies(torture: Torture) -> str | None:
    return None if torture.config.host.enabled else "there is no host tier"
