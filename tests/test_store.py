"""Models by name: what a reference means, and downloads that are cut, wrong, or not allowed."""

import hashlib
import json

import ggufs
import pytest
from command_line import GREEDY, Terminal, minfer, names, one_error_line, process
from hub import DATA, ELSEWHERE, silent

from cli.store import complete_model
from minfer_cuda import download, hubs, store
from minfer_cuda.errors import StoreError, UsageError

SHA256 = hashlib.sha256(DATA).hexdigest()
OTHER = b"other" * 100

# what is fetched


def test_a_model_is_fetched_verified_listed_used_and_removed(hub, tmp_path):
    path = ggufs.write_gguf(tmp_path / "x.gguf", **ggufs.ONE_LAYER)
    hub.publish("some/repo-GGUF", tiny_q4_k_m=path.read_bytes(), tiny_q8_0=DATA)
    pulled = minfer("pull", "hf:some/repo-GGUF:Q4-K-M")
    assert pulled.exit_code == 0, pulled.stderr
    expected = tmp_path / "models/hf/some/repo-GGUF/tiny-q4-k-m.gguf"
    assert pulled.stdout == f"{expected}\n"
    listed = minfer("list")
    assert "hf:some/repo-GGUF:tiny-q4-k-m.gguf" in listed.stdout
    n_asked = len(hub.asked)
    for reference in (expected, "tiny-q4-k-m", "tiny", "TINY-q4-k-m.gguf",
                      "hf:some/repo-GGUF", "hf:some/repo-GGUF:q4-k-m"):  # fmt: skip
        assert minfer("generate", reference, "hello", *GREEDY).exit_code == 0, reference
    assert len(hub.asked) == n_asked
    assert json.loads(minfer("list", "--json").stdout)["paths"] == [str(expected)]
    assert minfer("rm", "tiny").exit_code == 0
    assert names(tmp_path / "models") == []
    assert minfer("rm", "tiny").exit_code == 1


def test_a_connection_that_is_cut_is_resumed_where_it_was(hub, tmp_path):
    hub.publish("a/b", m=DATA)
    hub.cut = 100_000
    model = hubs.pull("hf:a/b", silent)
    assert model.paths[0].read_bytes() == DATA
    assert hub.ranges_asked == [None, "bytes=100000-"]
    assert names(tmp_path / "models") == ["hf/a/b/m.gguf"]


def test_a_later_command_goes_on_where_an_earlier_one_gave_up(hub, tmp_path, monkeypatch):
    hub.publish("a/b", m=DATA)
    hub.cut = 50_000
    monkeypatch.setattr(download, "MOST_FAILURES", 0)
    real = download._Transfer._receive

    def once(self):
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(download._Transfer, "_receive", once)
    with pytest.raises(KeyboardInterrupt):
        hubs.pull("hf:a/b", silent)
    (unfinished,) = store.unfinished()
    assert unfinished.stat().st_size == 50_000
    assert "unfinished" in minfer("list").stderr
    monkeypatch.undo()
    monkeypatch.setenv("MINFER_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("no_proxy", "*")
    assert hubs.pull("hf:a/b", silent).paths[0].read_bytes() == DATA
    assert hub.ranges_asked[:2] == [None, "bytes=50000-"]
    assert store.unfinished() == []


def test_a_server_that_cannot_resume_is_asked_for_all_of_it(hub):
    hub.publish("a/b", m=DATA)
    hub.ranges = False
    unfinished = store.folder() / "hf" / "a" / "b" / f"m.gguf.{SHA256[:12]}.part"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"wrong")
    assert hubs.pull("hf:a/b", silent).paths[0].read_bytes() == DATA


def test_wrong_bytes_are_removed_and_named(hub, tmp_path):
    hub.publish("a/b", m=DATA)
    hub.broken = DATA[:-1] + b"?"
    result = minfer("pull", "hf:a/b")
    assert result.exit_code == 1
    assert SHA256 in one_error_line(result)
    assert names(tmp_path / "models") == []


def test_a_wrong_size_is_refused_with_both_numbers(hub):
    hub.publish("a/b", m=DATA)
    hub.broken = OTHER
    line = one_error_line(minfer("pull", "hf:a/b"))
    assert str(len(OTHER)) in line and str(len(DATA)) in line


def test_a_busy_server_is_asked_again_and_a_dead_one_not_forever(hub):
    hub.publish("a/b", m=DATA)
    hub.failures = download.MOST_FAILURES - 1
    assert hubs.pull("hf:a/b", silent).size == len(DATA)
    hub.publish("a/c", m=DATA)
    hub.failures = 1000
    with pytest.raises(StoreError, match="503"):
        hubs.pull("hf:a/c", silent)
    assert hub.failures == 1000 - download.MOST_FAILURES


def test_the_token_goes_to_the_hub_and_to_no_other_host(hub):
    hub.publish("a/b", m=DATA)
    hub.moved = True
    assert hubs.pull("hf:a/b", silent).size == len(DATA)
    tokens = [authorization for path, _, authorization in hub.asked if "resolve" in path]
    assert tokens == ["Bearer secret", None]


def test_the_proxy_of_the_environment_is_asked(hub):
    """In a process of its own: libraries read the environment once."""
    hub.publish("a/b", m=DATA)
    hub.publish_ollama("library/qwen", "latest", OTHER)
    proxied = {"http_proxy": hub.url, "no_proxy": "", "NO_PROXY": "", "HF_ENDPOINT": ELSEWHERE}
    proxied["MINFER_OLLAMA_REGISTRY"] = ELSEWHERE
    for reference in ("hf:a/b", "ollama:qwen"):
        with process("pull", reference, env=proxied) as running:
            _, err = running.communicate()
        assert running.returncode == 0, err
    assert sorted(model.size for model in store.models()) == [len(OTHER), len(DATA)]


def test_a_terminal_sees_a_bar_and_a_log_one_line_a_file(hub, tmp_path):
    hub.publish("a/b", m=DATA)
    terminal = Terminal(tmp_path, "pull", "hf:a/b")
    assert terminal.exit_code() == 0
    assert f"[{'#' * 20}] " in terminal.seen and "fetching" not in terminal.seen
    hub.publish("a/c", n=DATA)
    logged = minfer("pull", "hf:a/c").stderr.splitlines()
    assert [line for line in logged if "n.gguf" in line] == [logged[0]]
    assert logged[0].startswith("fetching n.gguf, ") and "[#" not in "".join(logged)


def test_a_full_disk_is_found_out_before_anything_is_fetched(hub, monkeypatch):
    hub.publish("a/b", m=DATA)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    result = minfer("pull", "hf:a/b")
    assert "GB free" in one_error_line(result)
    assert hub.ranges_asked == []


def test_what_is_here_already_is_not_fetched_again(hub):
    hub.publish("a/b", m=DATA)
    hubs.pull("hf:a/b", silent)
    hubs.pull("hf:a/b", silent)
    assert len(hub.ranges_asked) == 1


def test_all_parts_of_a_split_model_are_fetched(hub):
    hub.publish("a/b", m_00001_of_00002=DATA, m_00002_of_00002=OTHER, n=DATA)
    model = hubs.pull("hf:a/b:m", silent)
    assert [path.name for path in model.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert store.resolve("m", silent) == model.paths[0]
    assert model.size == len(DATA) + len(OTHER)


def test_an_ollama_model_is_fetched_by_its_tag(hub):
    hub.publish_ollama("library/qwen", "latest", DATA)
    hub.publish_ollama("me/own", "0.5b", OTHER)
    assert hubs.pull("ollama:qwen", silent).paths[0].read_bytes() == DATA
    assert store.resolve("ollama:me/own:0.5b", silent).read_bytes() == OTHER
    assert [m.source for m in store.models()] == ["ollama:me/own:0.5b", "ollama:qwen:latest"]
    n_asked = len(hub.asked)
    store.resolve("ollama:qwen", silent)
    assert len(hub.asked) == n_asked
    with pytest.raises(StoreError, match="404"):
        hubs.pull("ollama:nobody", silent)


# what is refused


def test_offline_only_what_is_here_is_used(hub, monkeypatch):
    hub.publish("a/b", m=DATA)
    hubs.pull("hf:a/b", silent)
    n_asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert store.resolve("hf:a/b:m", silent).read_bytes() == DATA
    for reference in ("hf:a/b:other", "hf:a/c", "ollama:x"):
        with pytest.raises(StoreError, match="HF_HUB_OFFLINE"):
            store.resolve(reference, silent)
    assert len(hub.asked) == n_asked


def test_several_models_are_listed_and_none_is_guessed(hub):
    hub.publish("a/b", m_q4=DATA, m_q8=DATA)
    line = one_error_line(minfer("pull", "hf:a/b"))
    assert "m-q4" in line and "m-q8" in line
    assert "m-q8" in one_error_line(minfer("pull", "hf:a/b:q5"))
    for quant in ("q4", "Q8"):
        hubs.pull(f"hf:a/b:{quant}", silent)
    ambiguous = one_error_line(minfer("info", "m"))
    assert "ambiguous" in ambiguous and "hf:a/b:m-q4.gguf" in ambiguous


def test_a_name_that_stands_for_nothing_ends_in_one_line(hub):
    for command in (("info", "nothing"), ("rm", "nothing")):
        result = minfer(*command)
        assert result.exit_code == 1
        assert "minfer list" in one_error_line(result)
    assert minfer("rm").exit_code == 2


def test_the_shell_completes_the_names_of_models(hub):
    hub.publish("a/b", m_q4=DATA)
    hubs.pull("hf:a/b", silent)
    assert (complete_model("m"), complete_model("n")) == (["m-q4"], [])


def test_a_repository_that_is_not_there_ends_in_one_line(hub):
    result = minfer("pull", "hf:a/nothing")
    assert result.exit_code == 1
    assert "a/nothing" in one_error_line(result)


@pytest.mark.parametrize(
    "reference", ["hf:", "hf:a", "hf:../x", "hf:a/b/c", "ollama:", "ollama:a b"]
)
def test_a_malformed_reference_is_a_usage_error(hub, reference):
    result = minfer("info", reference)
    assert result.exit_code == 2
    assert "hf:OWNER/REPO" in one_error_line(result)
    with pytest.raises(UsageError):
        hubs.pull(reference, silent)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("q4_k_m", "x-q4_k_m"), ("Q4_0", "x.Q4_0"), ("x-q4_k_m.gguf", "x-q4_k_m"),
     ("big", "big"), ("big-00002-of-00002.gguf", "big"), ("x.Q4_0", "x.Q4_0")],
)  # fmt: skip
def test_a_choice_is_a_file_or_the_quantisation_at_the_end_of_its_name(choice, expected):
    files = ["README.md", "x-q4_k_m.gguf", "x.Q4_0.gguf", "sub/big-00001-of-00002.gguf",
             "sub/big-00002-of-00002.gguf", "half-00001-of-00002.gguf"]  # fmt: skip
    assert store.title(store.choose(files, choice, "it")) == expected
    with pytest.raises(StoreError, match="has no such model"):
        store.choose(files, "half", "it")
