"""A hub of models on this machine, which cuts, refuses, moves and breaks what it is asked for."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minfer_cuda import download, hubs

ELSEWHERE = "http://hub.example"  # what a proxy is asked for
DATA = bytes(range(256)) * 700


class Hub(ThreadingHTTPServer):
    """A hub on this machine. `cut`: bytes after which each answer of a file ends; `broken`: these
    come in place of a file; `ranges`: whether it can resume; `moved`: files are on another host."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}  # path -> bytes
        self.asked = []  # (path, range, authorization)
        self.cut = self.broken = None
        self.ranges = True
        self.moved = False
        self.failures = 0  # answers of files still to be refused
        self.url = f"http://127.0.0.1:{self.server_port}"

    def publish(self, repo, **files):
        """Offer files under `hf`; names have _ for - and lack .gguf."""
        siblings = []
        for name, data in files.items():
            name = f"{name.replace('_', '-')}.gguf"
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "lfs": lfs})
            self.files[f"/{repo}/resolve/abc/{name}"] = data
        about = {"id": repo, "modelId": repo, "sha": "abc", "siblings": siblings, "tags": []}
        self.files[f"/api/models/{repo}"] = json.dumps(about).encode()

    def publish_ollama(self, path, tag, data):
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        layers = [
            {"mediaType": "application/vnd.ollama.image.license", "size": 1, "digest": "sha256:1"},
            {"mediaType": hubs.MODEL_LAYER, "size": len(data), "digest": digest},
        ]
        self.files[f"/v2/{path}/manifests/{tag}"] = json.dumps({"layers": layers}).encode()
        self.files[f"/v2/{path}/blobs/{digest}"] = data

    @property
    def ranges_asked(self):
        return [asked for path, asked, _ in self.asked if "resolve" in path or "blobs" in path]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        hub = self.server
        path = self.path.split("?")[0].removeprefix(ELSEWHERE)  # of a proxy all of the URL is asked
        hub.asked.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        is_model = "resolve" in path or "blobs" in path
        if path not in hub.files:
            self.send_error(404)
        elif is_model and hub.failures:
            hub.failures -= 1
            self.send_error(503)
        elif is_model and hub.moved and self.headers["Host"].startswith("127.0.0.1"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{hub.server_port}{path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.answer(hub, hub.files[path], is_model)

    def answer(self, hub, data, is_model):
        start = 0
        if is_model and hub.broken is not None:
            data = hub.broken
        if is_model and hub.ranges and (asked := self.headers.get("Range")):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = start + hub.cut if is_model and hub.cut else len(data)
        self.wfile.write(data[start:end])
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("MINFER_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", hub.url)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    monkeypatch.setattr(download, "TIMEOUT_S", 20.0)
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


def silent(*_):
    """The progress that nobody sees."""
