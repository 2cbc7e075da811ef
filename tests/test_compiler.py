"""From sources to cubins on disk; with NVRTC where it is installed."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_fakes import HEADER, KERNEL

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import compiler
from minfer_cuda.kernels.compiler import compile_cubin, expand_source

# ---- sources


def test_includes_are_expanded_once_and_every_line_keeps_its_number(sources: Path) -> None:
    (sources / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    (sources / "x.cu").write_text(
        '#include "two.cuh"\n#include "one.cuh"\n#include <math.h>\nint x;\n'
    )
    text = expand_source("x")
    assert text.count("int one()") == 1
    assert "#pragma once" not in text and "#include <math.h>" in text
    place, at = "", 0
    places = {}
    for line in text.splitlines():
        if line.startswith("#line"):
            _, number, place = line.split()
            at = int(number)
        else:
            places[line] = (place, at)
            at += 1
    assert places["int x;"] == ('"cuda/x.cu"', 4)
    assert places["int two;"] == ('"cuda/two.cuh"', 2)
    assert places["__device__ inline int one() { return 1; }"] == ('"cuda/one.cuh"', 3)


def test_a_missing_include_is_named(sources: Path) -> None:
    (sources / "x.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(KernelError, match="gone.cuh"):
        expand_source("x")


def test_the_engines_own_sources_are_found() -> None:
    assert (compiler.source_folder() / "common.cuh").is_file()


def test_the_parameters_of_every_kernel_are_counted_by_its_declaration() -> None:
    found = {}
    for path in compiler.source_folder().glob("*.cu"):
        source = expand_source(path.stem)
        for name in re.findall(r"__launch_bounds__\([^()]*\)\s*(\w+)\(", path.read_text()):
            found[name] = compiler.parameter_count(source, path.stem, f"{name}<int, 2>")
    assert len(found) > 20 and min(found.values()) == 1
    assert (found["read_xor"], found["matmul"], found["attention_decode"]) == (3, 1, 12)
    with pytest.raises(KernelError, match="cuda/norm.cu declares no kernel rms<int>"):
        compiler.parameter_count(expand_source("norm"), "norm", "rms<int>")


# ---- NVRTC


def test_a_kernel_compiles_to_an_elf_file_with_its_lowered_name(nvrtc: None) -> None:
    cubin = compile_cubin("fill", "fill<3>", 90)
    assert cubin.data.startswith(b"\x7fELF")
    assert cubin.lowered_name.encode() in cubin.data
    assert "registers" in cubin.log


def test_an_error_in_a_header_shows_kernel_file_and_line(nvrtc: None, sources: Path) -> None:
    (sources / "one.cuh").write_text(HEADER + "\nint wrong() { return nothing; }\n")
    with pytest.raises(KernelError, match=r"(?s)fill<3>.*sm_90.*cuda/one\.cuh\(5\): error"):
        compile_cubin("fill", "fill<3>", 90)


def test_architecture_specific_code_is_compiled_only_where_a_source_asks(
    nvrtc: None, sources: Path
) -> None:
    asks = "#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#error plain\n#endif\n"
    (sources / "fill.cu").write_text(KERNEL + asks)
    with pytest.raises(KernelError, match="plain"):
        compile_cubin("fill", "fill<3>", 90)
    (sources / "fill.cu").write_text("// arch-specific: sm_90a\n" + KERNEL + asks)
    assert compile_cubin("fill", "fill<3>", 90).data


def test_missing_headers_are_told_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvrtc: None
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    compiler.header_folder.cache_clear()
    with pytest.raises(KernelError, match=r"cuda_fp16\.h.*pip install nvidia-cuda-runtime"):
        compiler.header_folder()


# ---- disk cache


def test_a_second_start_compiles_nothing(compiles: list[str]) -> None:
    first = compile_cubin("fill", "fill<3>", 90)
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert compiles == ["fill<3>"]


def test_another_name_architecture_compiler_or_header_compiles_again(
    compiles: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cubin("fill", "fill<3>", 90)
    compile_cubin("fill", "fill<4>", 90)
    compile_cubin("fill", "fill<3>", 80)
    (sources / "one.cuh").write_text(HEADER.replace("return 1", "return 2"))
    compile_cubin("fill", "fill<3>", 90)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    compile_cubin("fill", "fill<3>", 90)
    assert len(compiles) == 5


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40] + b"x" + b[41:], lambda b: b""]
)
def test_a_damaged_entry_is_compiled_again(
    compiles: list[str], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = compile_cubin("fill", "fill<3>", 90)
    (entry,) = (tmp_path / "cache").rglob("*.cubin")
    entry.write_bytes(damage(entry.read_bytes()))
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert len(compiles) == 2
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert len(compiles) == 2


def test_an_unusable_cache_folder_is_told_once_and_kernels_still_compile(
    compiles: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compile_cubin("fill", "fill<3>", 90).data
    assert len(compiles) == 3
    assert sum("MINFER_CACHE_DIR" in r.message for r in caplog.records) == 1


def test_a_full_disk_leaves_no_partial_entry(
    compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    assert compile_cubin("fill", "fill<3>", 90).data
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_two_writers_of_one_entry_leave_a_whole_one(compiles: list[str], tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=compile_cubin, args=("fill", "fill<3>", 90)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".cubin"]
    before = len(compiles)
    compile_cubin("fill", "fill<3>", 90)
    assert len(compiles) == before
