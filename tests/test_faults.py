"""Whatever fails around it - disks, other processes, the model file, memory, the device - `minfer`
ends in one line with a documented exit code, and leaves no half-written file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from command_line import (
    CPU,
    GREEDY,
    MAIN,
    PATIENCE_S,
    ROOT,
    minfer,
    names,
    one_error_line,
    process,
    unfinished,
)
from devices import simt_device
from ggufs import ONE_LAYER, write_gguf
from hub import DATA, silent

import minfer_cuda.runners as runners
from minfer_cuda import download, files, hubs, store
from minfer_cuda.chat_template import ChatTemplate
from minfer_cuda.conversation import Conversation
from minfer_cuda.errors import (
    DeviceError,
    KernelError,
    MinferError,
    ModelFileError,
    OutOfMemoryError,
    SessionError,
    StoreError,
)
from minfer_cuda.kernels import compiler
from minfer_cuda.kernels.compiler import Cubin, compile_cubin
from minfer_cuda.llm import LLM
from minfer_cuda.runners import numpy_runner
from minfer_cuda.saved_logits import SavedLogits, saving_logits

SEARCHED = os.pathsep.join([str(ROOT), *sys.path])  # wherever the packages are installed

resource = pytest.importorskip("resource")  # limits, which stand in for a full disk


@contextmanager
def small_disk(n_bytes: int):
    """Inside, no file of this process grows past so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# ---- disks


@pytest.fixture
def conversation(tiny_tokenizer, tiny_metadata):
    template = ChatTemplate.from_metadata(tiny_metadata, "chatml")
    return Conversation(template, tiny_tokenizer, 64)


def test_a_session_that_the_disk_does_not_take_stays_as_it_was(conversation, tmp_path):
    path = tmp_path / "chat.json"
    conversation.set_system("hello " * 2000)
    path.write_text("[]\n")
    with small_disk(4096), pytest.raises(SessionError, match="File too large"):
        conversation.save(path)
    assert path.read_text() == "[]\n"
    assert names(tmp_path) == ["chat.json"]
    conversation.save(path)
    assert json.loads(path.read_text())[0]["role"] == "system"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_session_never_takes_the_place_of_what_is_no_file(conversation, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SessionError, match="not a regular file"):
        conversation.save(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(SessionError):
        conversation.save("/proc/chat.json")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A kernel cache of its own, and a compiler that gives 20 kB; its calls."""
    calls = []

    def compile_(stem, name, source, options):
        calls.append(name)
        return Cubin(b"\x7fELF" + bytes(20_000), "name", "log", 3)

    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_compile", compile_)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    return calls


def test_a_kernel_cache_on_a_full_disk_is_told_and_left_out(kernels, tmp_path, caplog):
    with small_disk(4096):
        assert len(compile_cubin("read", "read_xor", 90).data) == 20_004
    assert "is not usable (File too large)" in caplog.text
    assert names(tmp_path / "cache") == []
    compile_cubin("read", "read_xor", 90)
    compile_cubin("read", "read_xor", 90)
    assert len(kernels) == 2  # with room again, it is kept


def test_an_interrupt_while_a_kernel_is_kept_leaves_no_part_of_it(kernels, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_cubin("read", "read_xor", 90)
    assert names(tmp_path / "cache") == []


def test_a_download_that_the_disk_does_not_take_ends_in_one_line_and_goes_on_later(hub, tmp_path):
    hub.publish("a/b", m=DATA)
    with small_disk(100_000):
        result = minfer("pull", "hf:a/b")
    assert result.exit_code == 1
    assert "File too large" in one_error_line(result)
    assert [n.endswith(".part") for n in names(tmp_path / "models")] == [True]
    assert minfer("pull", "hf:a/b").exit_code == 0
    assert hub.ranges_asked == [None, "bytes=100000-"]
    assert names(tmp_path / "models") == ["hf/a/b/m.gguf"]


def test_a_model_folder_that_cannot_be_written_ends_in_one_line(hub, tmp_path, monkeypatch):
    hub.publish("a/b", m=DATA)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "hf").write_text("a file where a folder should be")
    result = minfer("pull", "hf:a/b")
    assert result.exit_code == 1
    assert "cannot write" in one_error_line(result)
    monkeypatch.setenv("MINFER_MODEL_DIR", "/proc/models")
    assert "/proc/models" in one_error_line(minfer("pull", "hf:a/b"))
    assert minfer("list").exit_code == 0


def test_saved_predictions_that_the_disk_does_not_take_leave_nothing(tmp_path):
    with small_disk(4096), pytest.raises(MinferError, match="File too large"):
        with saving_logits(tmp_path / "base.bin", np.zeros((64, 512), np.int32), 100):
            pass
    assert names(tmp_path) == []


def test_messages_that_the_disk_does_not_take_are_kept_for_the_chat(tmp_path, capsys):
    from cli.editor import ChatHistory

    history = ChatHistory(tmp_path / "history")
    with small_disk(100):
        for _ in range(3):
            history.append_string("hello " * 50)
    assert len(history.get_strings()) == 3
    assert capsys.readouterr().err.count("history is kept for this chat only") == 1


# ---- processes at once

WRITER = """
import sys
from minfer_cuda.kernels import compiler
compiler.nvrtc_version = lambda: (12, 9)
compiler._compile = lambda *_: compiler.Cubin(b"\\x7fELF" + bytes(300_000), "name", "log", 3)
for arch in range(100, 160):
    compiler.compile_cubin("read", "read_xor", arch)
    print(arch, flush=True)
"""


def test_processes_that_compile_at_once_or_are_killed_leave_whole_kernels_only(kernels, tmp_path):
    env = os.environ | {"PYTHONPATH": SEARCHED}
    command = [sys.executable, "-c", WRITER]
    writers = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    writers[0].stdout.readline()
    writers[0].kill()
    for writer in writers:
        writer.communicate(timeout=PATIENCE_S)
    assert [writer.returncode for writer in writers] == [-9, 0, 0]
    for arch in range(100, 160):
        assert len(compile_cubin("read", "read_xor", arch).data) == 300_004
    assert kernels == []  # each was there, and whole


def test_what_killed_processes_have_left_is_removed_after_an_hour(kernels, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    old, new = folder / ".a.cubin.1.part", folder / ".b.cubin.2.part"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    compile_cubin("read", "read_xor", 90)
    assert unfinished(folder) == [new.name]


def test_two_pulls_of_one_model_fetch_it_once(hub, tmp_path, monkeypatch):
    hub.publish("a/b", m=DATA)
    waits = threading.Event()
    real, asked = download._read, []

    def read(response, n_bytes):
        asked.append(n_bytes)
        assert waits.wait(PATIENCE_S)
        return real(response, n_bytes)

    def second_progress(name, done, size):
        waits.set()

    monkeypatch.setattr(download, "_read", read)
    found = []
    first = threading.Thread(target=lambda: found.append(hubs.pull("hf:a/b", silent)))
    first.start()
    while not asked:  # it has the lock
        first.join(0.01)
    found.append(hubs.pull("hf:a/b", second_progress))
    first.join()
    assert found[0].paths[0].read_bytes() == DATA
    assert found[0].paths == found[1].paths
    assert hub.ranges_asked == [None]
    assert names(tmp_path / "models") == ["hf/a/b/m.gguf"]


LOCKED = """
import sys, time
from pathlib import Path
from minfer_cuda.files import locked
with locked(Path(sys.argv[1]), lambda: None):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_keeps_no_lock(tmp_path):
    lock, waited = tmp_path / "lock", []
    command = [sys.executable, "-c", LOCKED, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        holder.stdout.readline()

        def waiting():
            waited.append(True)
            holder.kill()

        with files.locked(lock, waiting):
            assert waited
            assert names(tmp_path) == ["lock"]
    assert names(tmp_path) == []


def test_a_model_that_vanishes_while_it_is_listed_has_no_bytes(hub):
    hub.publish("a/b", m=DATA)
    model = hubs.pull("hf:a/b", silent)
    (listed,) = store.models()
    store.remove(model.paths)
    assert listed.size == 0
    with pytest.raises(StoreError, match="cannot remove"):
        store.remove(model.paths)


# ---- the model file


@pytest.fixture
def own_model(tmp_path):
    return write_gguf(tmp_path / "own.gguf", **ONE_LAYER)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("damage", ["cut", "overwritten", "replaced"])
def test_a_model_that_changes_while_it_answers_is_one_error_and_a_new_one_is_not_seen(
    own_model, monkeypatch, damage, resident
):
    monkeypatch.setattr(numpy_runner, "RESIDENT_SHARE", 0.6 if resident else 0.0)
    with LLM(own_model, 64, "cpu") as llm:

        def tokens():
            return llm.complete([1], temperature=0.0, max_tokens=20).ids + [
                token.id for token in llm.engine.generate([1], llm.sampling(temperature=0.0), 20)
            ]

        before = tokens()
        raw = own_model.read_bytes()
        if damage == "cut":
            os.truncate(own_model, len(raw) // 2)
        elif damage == "overwritten":
            own_model.write_bytes(raw[::-1])
            os.utime(own_model, ns=(1, 1))
        else:
            other = own_model.with_name("other.gguf")
            other.write_bytes(raw[::-1])
            os.replace(other, own_model)
        llm.engine.rollback(0)
        if damage == "replaced":
            assert tokens() == before
        else:
            with pytest.raises(ModelFileError, match="was changed while open"):
                tokens()
            assert llm.engine.tokens == []


def test_a_model_that_is_cut_while_it_loads_is_one_error(own_model):
    def cut(doing, done, total):
        os.truncate(own_model, 2000)

    with pytest.raises(ModelFileError, match="was changed while open"):
        LLM(own_model, 64, "cpu", progress=cut)


def test_a_model_that_is_cut_in_mid_answer_ends_the_process_in_one_line(own_model):
    arguments = ("generate", own_model, "hello", "--device", "cpu", "-c", "100000", "--ignore-eos")
    with process(*arguments) as running:
        running.stdout.read(1)
        os.truncate(own_model, 4096)
        err = running.stderr.read().decode()
    assert running.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "was changed while open" in errors[0]
    assert "Traceback" not in err


def test_saved_predictions_that_are_cut_while_they_are_read_are_one_error(tmp_path):
    path = tmp_path / "base.bin"
    with saving_logits(path, np.zeros((2, 8), np.int32), 10) as add:
        for _ in range(6):
            add(np.log(np.full(10, 0.1, np.float32)))
    saved = SavedLogits(path)
    assert len(list(saved.rows(1))) == 3
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(MinferError, match="cut while it was read"):
        list(saved.rows(1))


# ---- memory and the device


def test_a_machine_without_memory_for_the_weights_is_one_line(model, monkeypatch):
    def full(self):
        raise MemoryError("Unable to allocate 1.00 GiB")

    monkeypatch.setattr(numpy_runner.PackedMatrix, "dense", full)
    result = minfer("generate", model, "hello", *GREEDY)
    assert result.exit_code == 1
    assert "Unable to allocate 1.00 GiB" in one_error_line(result)
    with pytest.raises(OutOfMemoryError):
        LLM(model, 64, "cpu")


class Card:
    """A SIMT device on which something fails."""

    def __init__(self, **broken):
        self._device = simt_device()
        for name, call in broken.items():
            setattr(self, name, call)

    def __getattr__(self, name):
        return getattr(self._device, name)


@pytest.fixture
def on_card(monkeypatch, model):
    """`minfer generate` on a card with failing calls; its result."""
    monkeypatch.setenv("MINFER_NO_GRAPH", "1")

    def run(**broken):
        monkeypatch.setattr(runners, "CudaDevice", lambda ordinal: Card(**broken))
        return minfer("generate", model, "hello", "--device", "cuda", "-c", "64", "-n", "4")

    return run


def failing(kind, words, when):
    """A call that fails where `when` says so of its arguments, else the device's own."""

    def call(name):
        def made(*arguments, **options):
            if when(*arguments):
                raise kind(words)
            return getattr(simt_device(), name)(*arguments, **options)

        return made

    return call


@pytest.mark.parametrize("what", ["weights", "KV cache"])
def test_a_card_whose_memory_ends_is_one_line(on_card, what):
    def is_cache(shape, *_):
        return isinstance(shape, tuple) and len(shape) == 5

    when = is_cache if what == "KV cache" else (lambda shape, *_: isinstance(shape, int))
    fail = failing(OutOfMemoryError, f"A card: no room for the {what}", when)
    result = on_card(empty=fail("empty"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert one_error_line(result) == f"error: A card: no room for the {what}"


def test_a_kernel_that_does_not_compile_is_one_line(on_card):
    words = "embed<F32> of cuda/embed.cu does not compile:\ncuda/embed.cu(3): error: no"
    result = on_card(kernel=failing(KernelError, words, lambda *_: True)("kernel"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert one_error_line(result) == f"error: {' '.join(words.split())}"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_card_that_is_lost_in_mid_answer_is_one_line_after_what_was_said(
    model, monkeypatch, command
):
    read, n = numpy_runner.NumpyRunner.read, 0

    def lost(self):
        nonlocal n
        n += 1
        if n > 3:
            raise KernelError("an earlier kernel failed")
        return read(self)

    def close(self):
        raise DeviceError("a kernel failed, told again")

    monkeypatch.setattr(numpy_runner.NumpyRunner, "read", lost)
    monkeypatch.setattr(numpy_runner.NumpyRunner, "close", close)
    arguments = ("hello",) if command == "generate" else ()
    result = minfer(command, model, *arguments, *CPU, "--temp", "0", "--ignore-eos", stdin="hello")
    assert result.exit_code == 1
    assert one_error_line(result) == "error: an earlier kernel failed"
    assert result.stdout.endswith("\n") and result.stdout.strip()


LOST = """
from minfer_cuda.kernels.module import CudaDevice
from minfer_cuda.runners.cuda_runner import CudaRunner
import cupy
trap = cupy.RawKernel('extern "C" __global__ void trap_now() { __trap(); }', "trap_now")
read, n = CudaRunner.read, 0
def lost(self):
    global n
    n += 1
    if n == 4:
        with self._device.current():
            trap((1,), (1,), ())
    return read(self)
CudaRunner.read = lost
"""


@pytest.mark.gpu
def test_a_gpu_that_is_lost_in_mid_answer_is_one_line(model):
    arguments = ("generate", model, "hello", "--device", "cuda", "-c", "64", "--ignore-eos")
    done = subprocess.run(
        [sys.executable, "-c", LOST + MAIN, *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S, env=os.environ | {"PYTHONPATH": SEARCHED},
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("error: "), done.stderr
    assert sum("error" in line or "Traceback" in line or "ignored" in line for line in lines) == 1


@pytest.mark.gpu
def test_a_gpu_whose_memory_ends_can_still_be_used():
    from minfer_cuda.kernels.module import CudaDevice

    device = CudaDevice()
    with pytest.raises(OutOfMemoryError, match="bytes are free"):
        device.empty((device.total_bytes + 1,), np.uint8)
    assert device.download(device.zeros((4,), np.int32)).tolist() == [0, 0, 0, 0]
