"""Where models come from: the Hugging Face hub, and registries that speak as Ollama's does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath

from minfer_cuda import download, store
from minfer_cuda.download import Remote
from minfer_cuda.errors import StoreError

OLLAMA_REGISTRY = "https://registry.ollama.ai"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
MODEL_LAYER = "application/vnd.ollama.image.model"


def pull(reference: str, progress: store.Progress) -> store.Model:
    """Fetch a model of a hub, or what is missing of it. Raises StoreError and UsageError."""
    place, files = _offered(reference)
    root = store.folder()
    todo = [(remote, root / place / name) for name, remote in files.items()]
    todo = [(r, target) for r, target in todo if not download.is_whole(target, r.size)]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise StoreError(f"cannot make {root}: {e.strerror}") from e
    download.check_space(todo, root)
    for remote, target in todo:
        download.fetch(remote, target, partial(progress, target.name))
    paths = tuple(root / place / name for name in files)
    return store.Model(store.title(list(files)), reference, paths)


def _offered(reference: str) -> tuple[PurePosixPath, Mapping[str, Remote]]:
    """Where a hub's model is kept here, and its files there, by their names here."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise StoreError(
            f"HF_HUB_OFFLINE is set, {reference} is not fetched; `minfer list` shows what is here"
        )
    match = store.HF.fullmatch(reference)
    return _of_hugging_face(match) if match else _of_ollama(reference)


def _of_hugging_face(match: re.Match[str]) -> tuple[PurePosixPath, Mapping[str, Remote]]:
    from huggingface_hub import HfApi, constants, get_token, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    repo, reference = match["repo"], match[0]
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    token = get_token()
    try:
        api = HfApi(endpoint=endpoint, token=token)
        found = api.model_info(repo, files_metadata=True, timeout=download.TIMEOUT_S)
    except GatedRepoError:
        raise StoreError(f"{repo} is gated: accept its terms there and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise StoreError(f"{endpoint} has no {repo}, or HF_TOKEN may not see it") from None
    except Exception as e:  # every transport has its own exceptions
        raise StoreError(f"{endpoint} does not answer: {type(e).__name__}: {e}") from e
    offered = {file.rfilename: file for file in found.siblings or ()}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    files = {}
    for name in store.choose(offered, match["choice"], reference):
        file = offered[name]
        if file.size is None:
            raise StoreError(f"{endpoint} does not say how large {repo}/{name} is")
        url = hf_hub_url(repo, name, revision=found.sha, endpoint=endpoint)
        sha256 = file.lfs.sha256 if file.lfs else None
        files[PurePosixPath(name).name] = Remote(url, file.size, sha256, headers)
    return PurePosixPath("hf", repo), files


def _of_ollama(reference: str) -> tuple[PurePosixPath, Mapping[str, Remote]]:
    place, file = store.ollama_file(reference)
    _, owner, name = place.parts
    tag = file.removeprefix(f"{name}-").removesuffix(".gguf")
    registry = (os.environ.get("MINFER_OLLAMA_REGISTRY") or OLLAMA_REGISTRY).rstrip("/")
    base = f"{registry}/v2/{owner}/{name}"
    manifest = download.get_json(f"{base}/manifests/{tag}", {"Accept": MANIFEST})
    try:
        layers = [x for x in manifest["layers"] if x["mediaType"] == MODEL_LAYER]
        (layer,) = layers
        size, digest = int(layer["size"]), str(layer["digest"])
    except (KeyError, TypeError, ValueError) as e:
        raise StoreError(f"{reference} is not one GGUF file: {base}/manifests/{tag}") from e
    sha256 = digest.removeprefix("sha256:")
    return place, {file: Remote(f"{base}/blobs/{digest}", size, sha256)}
