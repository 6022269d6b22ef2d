"""The driver in software does what CUDA's would: each law that the tests of cards stand on."""

from __future__ import annotations

import numpy as np
from softcuda import SoftCuda

from sglcache.memory.cuda_driver import LibCuda
from sglcache.testing.daemon import until

MIB = 1 << 20


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def test_bytes_go_to_a_card_and_back(soft_cuda: SoftCuda) -> None:
    cuda = LibCuda(soft_cuda.load())
    cuda.use(0)
    there = cuda.map(cuda.create(2 * MIB, 0), 2 * MIB, 0)
    stream, event = cuda.stream(), cuda.event()
    host, back = np.arange(4096, dtype=np.uint64), np.zeros(4096, np.uint64)
    for array in (host, back):
        cuda.pin(array.ctypes.data, array.nbytes)
    cuda.copy(words(there), words(host.ctypes.data), words(host.nbytes), stream)
    cuda.copy(words(back.ctypes.data), words(there), words(host.nbytes), stream)
    cuda.record(event, stream)
    until(lambda: cuda.done(event))
    assert (back == host).all()
