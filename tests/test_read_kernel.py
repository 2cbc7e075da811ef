"""read_xor: every byte is read, once."""

import numpy as np
import pytest

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels.read import read_bandwidth, read_xor, threads


@pytest.mark.parametrize("rounds", [0, 1, 8, 9])  # of the loop of eight loads and of its rest
def test_every_word_is_read_exactly_once(device, rounds):
    n = rounds * threads(device) + 77
    words = np.random.default_rng(n).integers(0, 2**32, (n, 4), np.uint32)
    out = device.upload(np.full(threads(device), 0xDEADBEEF, np.uint32))
    read_xor(device, device.upload(words), out)
    found = device.download(out)
    mine = np.zeros(threads(device), np.uint32)
    np.bitwise_xor.at(mine, np.arange(n) % threads(device), np.bitwise_xor.reduce(words, axis=1))
    np.testing.assert_array_equal(found, mine)


def test_wrong_buffers_are_refused(device):
    words = device.zeros((4, 4), np.uint32)
    with pytest.raises(KernelError, match="out is"):
        read_xor(device, words, device.zeros(5, np.uint32))
    with pytest.raises(KernelError, match="x is empty"):
        read_xor(device, words[:0], device.zeros(threads(device), np.uint32))


def test_a_rate_is_bytes_per_second(device, monkeypatch):
    times = iter(np.arange(100) * 0.5)  # each pair of readings half a second apart
    monkeypatch.setattr("minfer_cuda.kernels.read.time.perf_counter", lambda: next(times))
    assert read_bandwidth(device, 1024) == 4 * 1024 / 0.5
