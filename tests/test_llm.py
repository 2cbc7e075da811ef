"""The Python interface: text in, text out, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
import threading
from enum import IntEnum
from types import SimpleNamespace

import pytest
from ggufs import write_gguf

import minfer_cuda
from minfer_cuda import LLM, SamplingParams
from minfer_cuda.config import MAX_LOGPROBS
from minfer_cuda.errors import ContextFullError, DeviceError, TemplateError, UsageError
from minfer_cuda.runners import numpy_runner


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, n_ctx=128, device="cpu", kv_type="f32") as llm:
        yield llm


GREEDY = {"temperature": 0.0, "max_tokens": 24}


def test_pieces_join_to_the_text_of_the_ids(llm):
    completion = llm.generate("hello world", **GREEDY)
    assert "".join(completion) == completion.text == llm.tokenizer.decode(completion.ids)
    assert completion.stats.generated_tokens == len(completion.ids)
    assert completion.finish_reason in ("length", "stop")


def test_the_cpu_keeps_its_cache_in_f32_unless_told_otherwise(path):
    for given, kept in ((None, "f32"), ("f16", "f16")):
        with LLM(path, n_ctx=16, device="cpu", kv_type=given) as llm:
            assert llm.engine.runner.kv_type == kept


def test_a_prompt_is_a_users_message_unless_it_is_raw(llm):
    ids = llm.encode("hello", system="be kind")
    text = "".join(map(llm.tokenizer.token_text, ids))
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert llm.encode("a<|im_end|>", raw=True)[-1] == llm.tokenizer.id_of("<|im_end|>")
    assert llm.encode("a<|im_end|>").count(llm.tokenizer.id_of("<|im_end|>")) == 1
    with pytest.raises(UsageError, match="raw"):
        llm.encode("hello", system="be kind", raw=True)


def test_chat_continues_messages_and_reuses_what_the_cache_holds(llm):
    messages = [{"role": "user", "content": "hello"}]
    first = llm.chat(messages, **GREEDY)
    assert list(first)
    second = llm.chat([*messages, {"role": "assistant", "content": "x"}, *messages], **GREEDY)
    next(second)
    assert second.stats.reused_tokens >= len(llm.encode("hello")) - 1


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = "".join(llm.generate("hello", raw=True, **GREEDY))
    cut = whole[len(whole) // 2 :][:3]
    completion = llm.generate("hello", raw=True, stop=cut, **GREEDY)
    assert "".join(completion) == whole[: whole.index(cut)]
    assert completion.finish_reason == "stop string"
    assert len(completion.ids) < 24


def test_ending_early_gives_out_what_was_held_back(llm):
    whole = "".join(llm.generate("hello", raw=True, **GREEDY))
    completion = llm.generate("hello", raw=True, stop=whole[:6] + "never", **GREEDY)
    seen = next(completion) + completion.end()
    assert whole.startswith(seen)
    assert seen == completion.text == llm.tokenizer.decode(completion.ids)
    assert list(completion) == []
    assert llm.engine.tokens[-1] == completion.ids[-1]


def test_an_end_token_is_not_printed(llm):
    end = min(llm.tokenizer.end_ids)
    completion = llm.generate("hello", logit_bias={end: 1e9}, **GREEDY)
    assert list(completion) == []
    assert (completion.ids, completion.finish_reason) == ([end], "stop")


def test_sampling_options_are_checked_at_the_call(llm):
    with pytest.raises(UsageError, match="temprature"):
        llm.generate("hello", temprature=1.0)
    with pytest.raises(UsageError, match="top_p"):
        llm.generate("hello", top_p=-1.0)
    with pytest.raises(UsageError, match="top_k"):
        llm.generate("hello", params=SamplingParams(), top_k=3)
    for n in (-1, MAX_LOGPROBS + 1):
        with pytest.raises(UsageError, match="n_logprobs"):
            llm.generate("hello", n_logprobs=n)
    with pytest.raises(ContextFullError, match="128"):
        llm.generate("hello " * 200)


@pytest.mark.parametrize(
    "wrong",
    [{"stop": None}, {"stop": 3}, {"stop": ["a", None]}, {"max_tokens": 2.5}, {"max_tokens": "8"},
     {"n_logprobs": None}, {"n_logprobs": 1.5}, {"params": {"top_k": 3}}, {"system": 3},
     {"prompt": None}, {"prompt": b"hello"}, {"temperature": "hot"}, {"top_k": 2.5}],
    ids=str,
)  # fmt: skip
def test_a_value_of_another_type_is_a_usage_error_at_the_call(llm, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        llm.generate(**{"prompt": "hello", **wrong})


@pytest.mark.parametrize(
    "wrong", [{"n_ctx": "12"}, {"n_ctx": 12.0}, {"n_batch": None}, {"device": None}], ids=str
)
def test_a_size_of_another_type_is_a_usage_error(path, wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        LLM(path, **{"device": "cpu", **wrong})


def test_options_of_the_model_that_do_not_exist_are_refused(path):
    with pytest.raises(TypeError, match="n_context"):
        LLM(path, n_context=10)


def test_the_files_sampling_defaults_hold_until_overridden(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata={"general.sampling.temp": 0.25})
    with LLM(path, device="cpu", n_ctx=16) as llm:
        assert llm.sampling().temperature == 0.25
        assert llm.sampling(temperature=1.0).temperature == 1.0


def test_a_context_of_zero_is_the_models_and_a_longer_one_is_said_aloud(path):
    with LLM(path, n_ctx=0, device="cpu") as llm:
        assert llm.n_ctx == 512
        llm.close()  # and once more at the end of the block: no error
    heard: list[str] = []
    with LLM(path, n_ctx=600, device="cpu", notify=heard.append) as llm:
        assert heard == llm.notices
        assert any("600" in notice and "512" in notice for notice in heard)
    for n_ctx in (-1, 2**31, 2**63):
        with pytest.raises(UsageError, match="n_ctx"):
            LLM(path, n_ctx=n_ctx, device="cpu")


def no_device(ordinal: int) -> None:
    raise DeviceError(f"no device {ordinal} here")


def test_auto_takes_the_cpu_aloud_and_cuda_without_a_device_is_an_error(path, monkeypatch):
    monkeypatch.setattr("minfer_cuda.runners.CudaDevice", no_device)
    with LLM(path, n_ctx=16) as llm:
        assert any("CPU" in n and "no device 0 here" in n for n in llm.notices)
    for device, ordinal in (("cuda", 0), ("cuda:3", 3)):
        with pytest.raises(DeviceError, match=f"no device {ordinal}"):
            LLM(path, n_ctx=16, device=device)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", ""])
def test_other_devices_are_refused_with_those_that_exist(path, device):
    with pytest.raises(UsageError, match="auto, cpu, cuda"):
        LLM(path, n_ctx=16, device=device)


def test_a_template_that_cannot_be_used_gives_way_to_chatml_and_says_so_once(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", chat_template="{{ raise_exception('no') ")
    with LLM(path, n_ctx=64, device="cpu") as llm:
        assert llm.notices == []
        for _ in range(2):
            assert llm.tokenizer.id_of("<|im_start|>") in llm.encode("hi")
        assert sum("ChatML" in notice for notice in llm.notices) == 1


def test_without_any_template_only_raw_prompts_work(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", chat_template=None)
    with LLM(path, n_ctx=64, device="cpu") as llm:
        llm._template._tokens = ()  # as for a vocabulary without <|im_start|>
        with pytest.raises(TemplateError, match="--chat-template"):
            llm.generate("hi")
        assert llm.generate("hi", raw=True).stats.prompt_tokens >= 1


def bind(monkeypatch, **calls):
    """Put `calls` in the place of the driver's bindings."""
    bindings = SimpleNamespace(driver=SimpleNamespace(**calls))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_the_driver_starts_while_the_file_is_read(path, monkeypatch):
    kept, ready, opened = [], threading.Event(), minfer_cuda.llm.GGUFFile.open

    def retain(ordinal):
        kept.append(ordinal)
        ready.set()

    def opened_later(path):
        assert ready.wait(60)
        return opened(path)

    bind(monkeypatch, cuInit=lambda flags: (0,), cuDevicePrimaryCtxRetain=retain)
    monkeypatch.setattr(minfer_cuda.llm.GGUFFile, "open", opened_later)
    monkeypatch.setattr(minfer_cuda.runners, "CudaDevice", no_device)
    with pytest.raises(DeviceError, match="no device 1 here"):
        LLM(path, device="cuda:1")
    assert kept == [1]


def no_driver(flags):
    raise RuntimeError("Failed to dlopen libcuda.so.1")


def no_card(flags):
    return (IntEnum("CUresult", {"CUDA_ERROR_NO_DEVICE": 100}).CUDA_ERROR_NO_DEVICE,)


@pytest.mark.parametrize("init, words", [(no_driver, "no NVIDIA driver"), (no_card, "cuInit.*100")])
def test_a_driver_that_does_not_start_is_told_once_where_the_device_is_opened(
    init, words, path, monkeypatch
):
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    bind(monkeypatch, cuInit=init)
    with pytest.raises(DeviceError, match=words):
        LLM(path, n_ctx=16, device="cuda")
    with LLM(path, n_ctx=16, device="auto") as llm:
        (notice,) = [n for n in llm.notices if "CPU" in n]
    for thread in threading.enumerate():
        if thread.name == "minfer-driver":
            thread.join()
    assert notice.startswith("running on the CPU: no ") and unhandled == []


def test_the_cpu_wakes_no_driver(path, monkeypatch):
    started = []
    bind(monkeypatch, cuInit=started.append)
    monkeypatch.setattr(minfer_cuda.runners, "wake", started.append)
    LLM(path, n_ctx=16, device="cpu").close()
    with pytest.raises(UsageError, match="tpu"):
        LLM(path, device="tpu")
    assert started == []


def test_a_failure_while_loading_closes_the_file(path, monkeypatch):
    closed = []
    monkeypatch.setattr(minfer_cuda.llm.GGUFFile, "close", lambda self: closed.append(self.path))
    monkeypatch.setattr(numpy_runner, "load_weights", no_device)
    with pytest.raises(TypeError):
        LLM(path, n_ctx=16, device="cpu")
    assert closed == [path]


def test_a_closed_model_says_so_to_old_and_new_answers(path):
    with LLM(path, n_ctx=64, device="cpu") as llm:
        unused, begun = llm.generate("a", **GREEDY), llm.generate("hello", **GREEDY)
        next(begun)
    for ask in (lambda: next(begun), lambda: next(unused), lambda: llm.generate("b")):
        with pytest.raises(UsageError, match="closed"):
            ask()
    assert begun.text + begun.end() == llm.tokenizer.decode(begun.ids)


def test_a_second_thread_is_refused_while_the_first_computes(llm, monkeypatch):
    """Two at once would mix their tokens in one cache."""
    computes, go_on, errors = threading.Event(), threading.Event(), []
    read = llm.engine.runner.read

    def slow_read():
        computes.set()
        assert go_on.wait(60)
        return read()

    def second():
        computes.wait(60)
        for ask in (lambda: next(first), lambda: llm.generate("b")):
            try:
                ask()
            except UsageError as error:
                errors.append(str(error))
        go_on.set()

    first = llm.generate("hello", raw=True, **GREEDY)
    monkeypatch.setattr(llm.engine.runner, "read", slow_read)
    thread = threading.Thread(target=second)
    thread.start()
    text = "".join(first)
    thread.join()
    assert [("another thread" in error) for error in errors] == [True, True]
    assert text == llm.tokenizer.decode(first.ids)
    assert first.finish_reason in ("length", "stop")


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, minfer_cuda; from minfer_cuda.errors import MinferError;"
        "print([m for m in ('numpy', 'cupy', 'tokenizers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
