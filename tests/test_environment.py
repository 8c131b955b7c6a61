"""The table says what is missing and how to mend it."""

from __future__ import annotations

import json
from collections import namedtuple
from importlib import metadata

import pandas as pd
import pytest

from minispec import environment, fetch
from minispec.environment import check, package


def line(frame: pd.DataFrame, what: str) -> pd.Series:
    return frame.set_index("what").loc[what]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache directory that does not exist yet, and no copy from the hub."""
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(environment, "hub_copy", lambda: None)
    return tmp_path / "deep" / "cache"


def test_packages_of_this_environment_are_all_right():
    frame = check()
    assert list(frame.columns) == ["what", "found", "needed", "ok", "mend"]
    names = set(frame["what"])
    assert {"Python", "torch", "transformers", "pandas", "jupyterlab", "free disk"} <= names
    assert "ruff" not in names  # a reader needs no developer's tools
    assert frame.set_index("what").loc[["Python", "torch", "transformers", "pandas"], "ok"].all()


def test_ok_exactly_where_there_is_nothing_to_mend(empty_cache):
    frame = check()
    assert (frame["ok"] == (frame["mend"] == "")).all()
    assert not frame["ok"].all()  # the model is not there


def test_a_missing_package():
    name, found, needed, ok, mend = package("no-such-package-at-all>=1.5")
    assert (name, found, needed, ok) == ("no-such-package-at-all", "missing", ">=1.5", False)
    assert mend == 'python -m pip install "no-such-package-at-all>=1.5"'


@pytest.mark.parametrize(
    ("version", "right"),
    [("2.5.1", False), ("2.6.0", True), ("2.13.0+cpu", True), ("2.15.0", False)],
)
def test_a_version_is_held_against_the_range(monkeypatch, version, right):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    _, found, _, ok, mend = package("torch>=2.6,<2.15")
    assert (found, ok) == (version, right)
    assert mend == ("" if right else 'python -m pip install "torch>=2.6,<2.15"')


def test_the_ranges_are_the_package_s_own(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "0.1" if n == "scipy" else real(n))
    frame = check()
    assert not line(frame, "scipy")["ok"]
    assert line(frame, "scipy")["mend"].startswith('python -m pip install "scipy>=')
    assert line(frame, "torch")["ok"]


def test_an_old_python(monkeypatch):
    old = namedtuple("version_info", "major minor micro")(3, 10, 2)
    monkeypatch.setattr(environment.sys, "version_info", old)
    python = line(check(), "Python")
    assert (python["found"], python["ok"]) == ("3.10.2", False)
    assert python["mend"]


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(environment.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(environment, "_cores", lambda: 2)
    threads = line(check(), "CPU threads")
    assert (threads["ok"], threads["mend"]) == (False, "export OMP_NUM_THREADS=2")


def test_the_model_absent_half_there_and_there(empty_cache):
    model = line(check(), "SmolLM2-135M-Instruct")
    assert (model["found"], model["mend"]) == ("not fetched yet", "minispec fetch")

    folder = empty_cache / fetch.FOLDER
    folder.mkdir(parents=True)
    model = line(check(), "SmolLM2-135M-Instruct")
    assert (model["found"], model["mend"]) == ("damaged", "minispec fetch --force")

    (folder / "model.safetensors").write_bytes(b"1234")
    (folder / fetch.MANIFEST).write_text(json.dumps({"sizes": {"model.safetensors": 4}}))
    assert line(check(), "SmolLM2-135M-Instruct")["ok"]


def test_a_full_disk_matters_until_the_model_is_there(empty_cache, monkeypatch):
    full = namedtuple("usage", "total used free")(10**12, 10**12, 10**8)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: full)
    disk = line(check(), "free disk")
    assert not disk["ok"]
    assert "MINISPEC_CACHE" in disk["mend"]
    monkeypatch.setattr(environment, "_model", lambda: ("fetched", ""))
    assert line(check(), "free disk")["ok"]


def test_minispec_itself_not_installed(monkeypatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    own = line(check(), "minispec")
    assert (own["ok"], own["mend"]) == (False, 'python -m pip install -e ".[notebooks]"')
