"""Where a rank's device pools are, and what copies between them and the host: shared memory, or cards.

`pool.device` decides, here and nowhere else in a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from sglcache.config import Config
from sglcache.errors import ConfigError
from sglcache.memory.cpu_engine import CpuEngine, default_threads
from sglcache.memory.cuda_driver import LibCuda
from sglcache.memory.cuda_engine import CudaEngine, CudaMemory
from sglcache.memory.cuda_pools import CudaPool, check_card
from sglcache.memory.engine import CopyEngine, Done, Loaded, ways_of
from sglcache.memory.filling import pinned_pages
from sglcache.memory.geometry import Placement
from sglcache.memory.pools import DevicePool, Pool, ResourcePools, make_memfd_pool


class MakeEngine(Protocol):
    """What makes a rank's copy engine. `lost(error)`, from any thread: a device is lost, and nothing makes sense."""

    def __call__(
        self,
        config: Config,
        resources: Sequence[ResourcePools],
        done: Done,
        loaded: Loaded,
        lost: Callable[[BaseException], None],
    ) -> CopyEngine: ...


class Devices(Protocol):
    """Makes a rank's pools, then its engine."""

    streams: bool
    """Whether events of runners are words that streams write, behind which nobody rings a doorbell."""

    def pool(self, shard: int, name: str, placement: Placement) -> DevicePool: ...

    @property
    def engine(self) -> MakeEngine: ...

    def pin(self, address: int, num_bytes: int) -> bool:
        """Have host memory pinned, once there is an engine; False: the machine won't. On any thread; blocks."""
        ...

    @property
    def pins(self) -> bool:
        """Whether host memory is to be pinned."""
        ...


class Cpu:
    """Shared memory, and threads that copy: what is lost with a copy is its pages."""

    streams = False
    pins = False

    def __init__(self, make_engine: MakeEngine | None = None) -> None:
        """`make_engine`: another engine for the same memory."""
        self._make_engine = make_engine

    def pool(self, shard: int, name: str, placement: Placement) -> Pool:
        return make_memfd_pool(shard, name, placement)

    def engine(
        self,
        config: Config,
        resources: Sequence[ResourcePools],
        done: Done,
        loaded: Loaded,
        lost: Callable[[BaseException], None],
    ) -> CopyEngine:
        if self._make_engine is not None:
            return self._make_engine(config, resources, done, loaded, lost)
        return CpuEngine(
            [
                way
                for it in resources
                for way in ways_of(it.form, cast("Sequence[Pool]", it.device.shards), it.host.shards, it.name)
            ],
            done,
            loaded,
            num_threads=config.host.copy_threads or default_threads(),
        )

    def pin(self, address: int, num_bytes: int) -> bool:
        return True


class Cuda:
    """Cards: a shard's pool on the one that `pool.gpus` says. ConfigError: there is no driver, or no such card."""

    streams = True
    pins = True

    def __init__(self, config: Config, dp_rank: int, pp_rank: int) -> None:
        self._driver = LibCuda()
        self._export = config.pool.export
        self._gpus = config.gpus_of(dp_rank, pp_rank)
        if (most := max(self._gpus)) >= (count := self._driver.num_devices()):
            raise ConfigError(
                f"pool.gpus: card {most} is wanted, and this process sees {count}, from 0 on; give it more by "
                "CUDA_VISIBLE_DEVICES, or write pool.gpus",
                path="pool.gpus",
                value=self._gpus,
                devices=count,
            )
        for device in sorted(set(self._gpus)):
            check_card(self._driver, device, self._export)
        self._engine: CudaEngine | None = None

    def pool(self, shard: int, name: str, placement: Placement) -> CudaPool:
        return CudaPool(placement, self._driver, self._gpus[shard], self._export)

    def engine(
        self,
        config: Config,
        resources: Sequence[ResourcePools],
        done: Done,
        loaded: Loaded,
        lost: Callable[[BaseException], None],
    ) -> CopyEngine:
        ways = []
        for it in resources:
            pools = cast("Sequence[CudaPool]", it.device.shards)
            device = [CudaMemory(pool.placement, pool.address, pool.device) for pool in pools]
            span = pinned_pages(it.host.shards)
            host = [CudaMemory(pool.placement, pool.address, None, span) for pool in it.host.shards]
            ways += ways_of(it.form, device, host, it.name)
        self._engine = CudaEngine(ways, done, loaded, driver=self._driver, lost=lost)
        return self._engine

    def pin(self, address: int, num_bytes: int) -> bool:
        assert self._engine is not None, "there is no engine yet"
        return self._engine.pin(address, num_bytes)


def devices_of(config: Config, dp_rank: int, pp_rank: int, make_engine: MakeEngine | None = None) -> Devices:
    """For the rank at this place. ConfigError: this machine has not what is configured."""
    if config.pool.device == "cuda" and make_engine is None:
        return Cuda(config, dp_rank, pp_rank)
    return Cpu(make_engine)
