"""Every kernel compiles for every architecture, without spills: no GPU is needed for that."""

from __future__ import annotations

import re

import pytest
from kernel_resources import FULL, instances, load, measure, stale, stems

from minfer_cuda.kernels.compiler import nvrtc_version

MOST_SHARED = 48 << 10  # static
SAMPLED = (75, 90, 120)


@pytest.fixture(scope="module")
def table():
    return load()


@pytest.mark.parametrize("stem", stems())
def test_the_table_of_resources_is_current(stem, table):
    missing = stale(stem, table)
    assert not missing, (
        f"{len(missing)} instances of cuda/{stem}.cu are not in kernel-resources.json, or changed "
        f"since (first: {missing[0]}): make resources"
    )
    wanted = {name for arch in FULL for name in instances(stem, arch)}
    assert set(table[stem]["instances"]) == wanted, "instances that are no more: make resources"


@pytest.mark.parametrize("stem", stems())
def test_no_instance_spills_or_exceeds_a_limit(stem, table):
    for name, by_arch in table.get(stem, {"instances": {}})["instances"].items():
        for arch, (registers, shared, spilled, stack) in by_arch.items():
            assert spilled == 0, f"{name} spills {spilled} bytes on sm_{arch}"
            if stem.startswith(("matmul", "matvec", "attention")):
                assert stack == 0, f"{name} has a stack of {stack} bytes on sm_{arch}"
            assert 0 < registers <= 255, f"{name} on sm_{arch}"
            assert shared <= MOST_SHARED, f"{name} has {shared} static shared bytes on sm_{arch}"


def sample() -> list[tuple[str, str, int]]:
    """The first instance of each kernel, for the oldest, the main and the newest architecture."""
    found = []
    for stem in stems():
        kernels = {re.split("<", name)[0]: name for name in reversed(instances(stem, FULL[0]))}
        found += [(stem, name, arch) for name in kernels.values() for arch in SAMPLED]
    return found


@pytest.mark.parametrize("stem, name, arch", sample())
def test_a_sample_compiles_to_what_the_table_says(stem, name, arch, table):
    row = measure(stem, name, arch)
    entry = table.get(stem, {"nvrtc": ""})
    if entry["nvrtc"] == "{}.{}".format(*nvrtc_version()) and not stale(stem, table):
        assert row == entry["instances"][name][str(arch)]
    else:
        assert row[2] == 0, f"{name} spills {row[2]} bytes on sm_{arch}"
