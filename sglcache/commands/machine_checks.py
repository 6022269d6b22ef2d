"""What `sglcache doctor` makes of what it knows: a small function for each thing, over `Facts` and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglcache.client.doctor.finding import Finding, failed, ok, skipped, warning
from sglcache.commands.machine_facts import Facts
from sglcache.errors import ConfigError, ProtocolError
from sglcache.server import room
from sglcache.server.watch import in_words
from sglcache.units import Tier

Check = Callable[[Facts], Iterator[Finding]]

PYTHON = (3, 11)
PIDFD_KERNEL, PEER_KERNEL = (5, 3), (6, 5)
LEAST_FDS = 4096
BEHIND_S = 60.0


def python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < PYTHON:
        yield failed("python", f"{facts.executable} is {version}", "make the environment from Python 3.11 or later")
    else:
        yield ok("python", f"{version}, sglcache {facts.version}, protocol {facts.protocol}")


def core(facts: Facts) -> Iterator[Finding]:
    """Which form of it runs; a wish for the slow one is no fault."""
    form = facts.core
    reason, _, remedy = form.why.partition("; ")
    if form.compiled or not remedy:
        yield ok("core", str(form))
    else:
        yield warning("core", f"pure Python, which takes up to twice the time: {reason}", remedy)


def kernel(facts: Facts) -> Iterator[Finding]:
    version = tuple(int(part) for part in facts.kernel.split("-")[0].split(".")[:2] if part.isdigit())
    if version < PIDFD_KERNEL:
        yield failed("kernel", f"Linux {facts.kernel}", "the death of a runner is seen from Linux 5.3 on: update it")
    elif version < PEER_KERNEL:
        yield warning(
            "kernel",
            f"Linux {facts.kernel}: runners must share the daemon's PID namespace",
            "run containers with --pid shared, or Linux 6.5 or later",
        )
    else:
        yield ok("kernel", f"Linux {facts.kernel}")


def torch(facts: Facts) -> Iterator[Finding]:
    """What a runner needs, and whether there is a card for it."""
    version = facts.packages.get("torch")
    if version is None:
        yield skipped("torch", "not installed: the daemon needs none; a runner does, pip install 'sglcache[runner]'")
    else:
        yield ok("torch", f"{version}, built for {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'CPUs'}")
    pool = facts.config.pool if facts.config is not None else None
    if pool is not None and pool.device != "cpu":
        what = f'pool.device = "{pool.device}", and this version\'s code for cards has not run on one'
        if not pool.untried:
            yield failed("device", what, 'write pool.device = "cpu", or try it out with pool.untried = true')
        elif not facts.cards or facts.driver is None:
            yield failed("device", f'pool.device = "{pool.device}", and there is no card', 'write pool.device = "cpu"')
        else:
            yield warning("device", what, "scripts/gpu_probe.py finds out what this one does")
    if not facts.cards:
        yield skipped("cards", "no NVIDIA card here; none is needed on a CPU")
    elif facts.driver is None:
        yield warning(
            "cards", f"{len(facts.cards)} cards, and no driver is loaded", "install NVIDIA's driver, then load it"
        )
    elif version is not None and facts.torch_cuda is None:
        yield warning(
            "cards",
            f"{len(facts.cards)} cards, and torch is built for CPUs: runners would not see them",
            "make install TORCH=cuda, or pip install a CUDA build of torch",
        )
    else:
        yield ok("cards", f"{len(facts.cards)} cards; {facts.driver}")


def configuration(facts: Facts) -> Iterator[Finding]:
    where = facts.file or "the defaults"
    if (error := facts.config_error) is not None:
        what, _, _ = error.message.partition("; ")
        yield failed("config", what, error.remedy)
    else:
        yield ok("config", f"{where}: {_ranks(len(facts.seats))}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def memory(facts: Facts) -> Iterator[Finding]:
    """Whether the pools fit: the host's RAM, its cgroup, and what else is there already."""
    weighed, machine = facts.weighed, facts.machine
    if weighed is None:
        return
    try:
        weighed.refuse(machine)
    except ConfigError as exc:
        what, _, remedy = exc.message.partition("; ")
        yield failed("memory", what, remedy)
        return
    need = weighed.ram_bytes + weighed.daemon_bytes
    limits = [machine.ram, *([machine.cgroup] if machine.cgroup is not None else [])]
    told = ", ".join(f"{limit.name} {room.told(limit.num_bytes)}" for limit in limits)
    warnings = weighed.warnings(machine)
    if not facts.daemons and facts.available is not None and need > facts.available:
        warnings.append(
            f"the pools take {room.told(need)} when they are full, and {room.told(facts.available)} are available now; "
            "end what uses the rest, or lower pool.num_tokens and host.num_tokens"
        )
    for words in warnings:
        what, _, remedy = words.partition("; ")
        yield warning("memory", what, remedy or "`sglcache check` has the arithmetic")
    if not warnings:
        yield ok("memory", f"the pools and the daemon take {room.told(need)} when they are full; {told}")
    if facts.swapped > 1 << 30:
        yield warning(
            "swap",
            f"{room.told(facts.swapped)} are swapped out",
            "pools that are swapped are slower than to compute anew: swapoff, or MemorySwapMax=0 in a unit",
        )


def kept(facts: Facts) -> Iterator[Finding]:
    """/dev/shm, or wherever the host tier outlives the daemon."""
    if facts.config is None or facts.weighed is None or (folder := facts.config.host.keep_path) is None:
        return
    need = sum(rank.num_bytes(Tier.HOST) + rank.journal_bytes for rank in facts.weighed.ranks)
    if facts.kept_free is not None and need > facts.kept_free:
        yield failed(
            "keep_path",
            f"{folder} has room for {room.told(facts.kept_free)}, and the host tier takes {room.told(need)}",
            "mount it larger (mount -o remount,size=...; --shm-size of a container), or lower host.size",
        )
    elif facts.kept_kind is not None:
        yield warning(
            "keep_path",
            f"{folder} is on {facts.kept_kind}, so the system writes its pages to a disk all along",
            "set host.keep_path to a folder on a tmpfs, such as /dev/shm/sglcache",
        )
    else:
        yield ok("keep_path", f"{folder} has room for the {room.told(need)} of the host tier")


def limits(facts: Facts) -> Iterator[Finding]:
    most = facts.machine.max_fds
    if most is not None and most < LEAST_FDS:
        yield warning(
            "descriptors",
            f"this user may have {most} file descriptors, and a runner takes four",
            "raise it: ulimit -Hn, LimitNOFILE= in a unit, --ulimit nofile= of a container",
        )
    else:
        yield ok("descriptors", "as many as are asked for" if most is None else f"up to {most:,}")
    num_ranks = max(1, len(facts.seats))
    if facts.cpus <= num_ranks:
        yield warning(
            "processors",
            f"{facts.cpus} for {num_ranks} ranks, their copies, the supervisor and the runners",
            "give it one for each rank and two more, or configure fewer ranks on this host",
        )
    else:
        yield ok("processors", f"{facts.cpus}")
    if facts.nodes > 1:
        yield ok("numa", f"{facts.nodes} nodes; copies are fastest from the one at the card: numactl --cpunodebind")
    if facts.huge_pages in ("never", "deny"):
        yield skipped("huge pages", f"{facts.huge_pages} for shared memory: pools are mapped in pages of 4 KiB")
    elif facts.huge_pages:
        yield ok("huge pages", f"{facts.huge_pages} for shared memory")


def ports(facts: Facts) -> Iterator[Finding]:
    ours = {each.get("pid") for each in facts.daemons}
    ours |= {row.get("pid") for each in facts.daemons for row in each["ranks"]}
    free = []
    for port in facts.ports:
        if port.pid is None:
            free.append(f"{port.number}")
        elif port.pid in ours:
            yield ok("ports", f"{port.number} ({port.key}) is the daemon's, pid {port.pid}")
        else:
            who = f"{port.name} (pid {port.pid})" if port.pid else "a process of another user"
            section = port.key.partition(".")[0]
            yield (warning if facts.daemons else failed)(
                "ports",
                f"{port.number} ({port.key}) is taken by {who}",
                f"end that, or choose another: {port.key}"
                + (f" = {port.number + 1000}" if section == "http" else f' = "tcp://{port.host}:{port.number + 1000}"'),
            )
    if free:
        yield ok("ports", f"free: {', '.join(free)}")


def folder(facts: Facts) -> Iterator[Finding]:
    """Of the sockets."""
    if facts.folder_uid is None:
        yield skipped("sockets", f"{facts.folder} is not there yet; a daemon makes it")
        return
    if facts.folder_uid != facts.uid:
        yield failed(
            "sockets",
            f"{facts.folder} belongs to uid {facts.folder_uid}, and we are {facts.uid}",
            "ask as the user that runs the daemon, or name its socket: --socket, SGLCACHE_SOCKET",
        )
    elif facts.folder_mode & 0o077:
        yield failed(
            "sockets",
            f"{facts.folder} has mode {facts.folder_mode:04o}: others may enter it",
            f"chmod 700 {facts.folder}",
        )
    else:
        yield ok("sockets", f"{facts.folder} is this user's alone")
    for each in facts.sockets:
        if each.uid != facts.uid:
            yield failed(
                "sockets",
                f"{each.path} is of uid {each.uid}, and we are {facts.uid}: a daemon serves its own user alone",
                "run runners and commands as that user",
            )
        elif not each.answers and not each.held:
            yield warning(
                "sockets",
                f"{each.path} is left of a daemon that is dead",
                "the next one replaces it; nothing needs to be done",
            )


def clock(facts: Facts) -> Iterator[Finding]:
    if facts.reserved is not None and (behind := facts.reserved - facts.now) > BEHIND_S:
        yield warning(
            "clock",
            f"it is {behind:,.0f} s behind the numbers that the stream has used",
            "numbers go on above them all the same; set the clock (timedatectl), for times in batches and logs",
        )
    else:
        yield ok("clock", "not behind the stream's numbers")


def disk(facts: Facts) -> Iterator[Finding]:
    if (error := facts.disk_error) is not None:
        what, _, _ = error.message.partition("; ")
        yield failed("third tier", what, error.remedy)
    elif (there := facts.disk) is not None:
        for words in there.warnings:
            what, _, remedy = words.partition("; ")
            yield warning("third tier", what, remedy)
        if not there.warnings:
            yield ok("third tier", f"{there.path}: {room.told(there.free)} free for {room.told(there.want)}")


def routers(facts: Facts) -> Iterator[Finding]:
    for url, why in facts.indexers.items():
        if why is None:
            yield ok("indexer", f"{url} answers")
        else:
            yield failed(
                "indexer",
                f"{url} does not answer as Dynamo's indexer does: {why}",
                "start it (python -m dynamo.indexer), or mend events.dynamo_indexers; the daemon serves without it, "
                "and tries again",
            )


def daemon(facts: Facts) -> Iterator[Finding]:
    """Whether one runs, and is well, and of our version."""
    for error in facts.silent:
        what, _, _ = error.message.partition("; ")
        yield failed("daemon", what, error.remedy)
    if not facts.daemons:
        if not facts.silent:
            yield skipped("daemon", "none runs; start one with `sglcache serve`")
        return
    for told, health in zip(facts.daemons, facts.health, strict=False):
        name = f"sglcache {told['version']}, pid {told['pid']}, {_ranks(len(told['ranks']))}"
        if not health["serving"]:
            yield failed(
                "daemon",
                f"{name}: {health['status']}: {health.get('reason', 'it does not serve')}",
                "`sglcache sessions` names the process of one that is stuck; the log has the rest",
            )
        elif health["status"] != "ok":
            yield warning("daemon", f"{name}: {health['status']}", "docs/operate.md, When something is stuck")
        else:
            yield ok("daemon", f"{name}: ok")
        if told["protocol"] != facts.protocol:
            older = "this command" if told["protocol"] > facts.protocol else "the daemon"
            yield failed(
                "protocol",
                f"the daemon speaks {told['protocol']}, and this sglcache {facts.protocol}",
                f"{older} is the older one: update it"
                + (", and start the daemon again" if older == "the daemon" else ""),
            )
        elif told["version"] != facts.version:
            yield warning(
                "protocol",
                f"the daemon is sglcache {told['version']}, this is {facts.version}; they understand each other",
                "start the daemon again to have one version",
            )


def served(facts: Facts) -> Iterator[Finding]:
    """Of each rank: whether it lets us in, what is in trouble, and who hears its stream."""
    for each in facts.attached:
        name = f"rank {each.rank}"
        if each.error is not None:
            what, _, _ = each.error.message.partition("; ")
            if not isinstance(each.error, ProtocolError) or all(
                told["protocol"] == facts.protocol for told in facts.daemons
            ):
                yield failed(name, what, each.error.remedy)
            continue
        assert each.status is not None
        for trouble in each.status["troubles"]:
            yield warning(name, in_words(**trouble), "docs/operate.md, When something is stuck")
        if (stream := each.status["stream"]) is None:
            yield skipped(f"{name} events", "off (events.enabled = false)")
            continue
        where = f"{stream['endpoint']}, {stream['subscriptions']} subscriptions"
        if each.heard is False:
            yield failed(
                f"{name} events",
                f"nothing came from {where}",
                "look who else binds that port, or filters it; `sglcache doctor events` says more",
            )
        elif not stream["subscriptions"]:
            yield warning(
                f"{name} events",
                f"nobody follows {stream['endpoint']}",
                "`sglcache doctor events` proves that routers can",
            )
        else:
            yield ok(f"{name} events", f"{where}; `sglcache doctor events` proves the rest")


CHECKS: tuple[Check, ...] = (
    python, core, kernel, torch, configuration, memory, kept, limits, ports, folder, clock, disk, routers, daemon,
    served,
)  # fmt: skip


def examine(facts: Facts) -> Iterator[Finding]:
    for check in CHECKS:
        yield from check(facts)
