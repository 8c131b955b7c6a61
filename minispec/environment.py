"""Is everything here? One table for the first minute of the first meeting."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

import pandas as pd
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .fetch import FOLDER, FetchError, cache_dir, check_folder, hub_copy
from .models import computes_in_bf16, pick_device

ROOM = 1.0  # GB that the fetch needs while it unpacks

Row = tuple[str, str, str, bool, str]


def check() -> pd.DataFrame:
    """What minispec needs and what this machine has, one line each.

    Columns: what, found, needed, ok, and mend, the command that puts it right ("" where all is
    well). What is only good to know (accelerator, bfloat16) is always ok.
    """
    rows = [*_software(), *_machine()]
    return pd.DataFrame(rows, columns=["what", "found", "needed", "ok", "mend"])


def package(requirement: str) -> Row:
    """The line of one package, such as "torch>=2.6,<2.15"."""
    wanted = Requirement(requirement)
    needed = ",".join(sorted(map(str, wanted.specifier), reverse=True))  # the floor first
    mend = f'python -m pip install "{wanted.name}{needed}"'
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return wanted.name, "missing", needed, False, mend
    ok = wanted.specifier.contains(found, prereleases=True)
    return wanted.name, found, needed, ok, "" if ok else mend


def _software() -> Iterator[Row]:
    """Python and the packages, against the ranges in minispec's own metadata."""
    try:
        own = metadata.distribution("minispec")
    except metadata.PackageNotFoundError:  # on the path, but never installed
        yield "minispec", "not installed", "", False, 'python -m pip install -e ".[notebooks]"'
        return
    version, needed = ".".join(map(str, sys.version_info[:3])), own.metadata["Requires-Python"]
    ok = SpecifierSet(needed).contains(version, prereleases=True)
    yield "Python", version, needed, ok, "" if ok else "conda env create -f environment.yml"
    for line in own.requires or []:
        marker = Requirement(line).marker
        if marker is None or marker.evaluate({"extra": "notebooks"}):
            yield package(line)


def _machine() -> Iterator[Row]:
    threads, cores = torch.get_num_threads(), _cores()
    mend = "" if threads <= cores else f"export OMP_NUM_THREADS={cores}"
    yield "CPU threads", f"{threads} on {cores} cores", "at most the cores", not mend, mend
    device = pick_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield "accelerator", "none" if name == "cpu" else name, "optional", True, ""
    fast = computes_in_bf16(device)
    yield "bfloat16", "yes" if fast else "no: float32 is used", "optional", True, ""
    state, mend = _model()
    yield "SmolLM2-135M-Instruct", state, "fetched once", not mend, mend
    folder = next(p for p in (cache_dir(), *cache_dir().absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free / 1e9
    ok, mend = state == "fetched" or free >= ROOM, "export MINISPEC_CACHE=/folder/on/a/bigger/disk"
    yield "free disk", f"{free:.1f} GB", f"{ROOM:g} GB to fetch", ok, "" if ok else mend


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _model() -> tuple[str, str]:
    """The state of the bundled target, and the command that mends it."""
    folder = cache_dir() / FOLDER
    if hub_copy() is None:
        if not folder.is_dir():
            return "not fetched yet", "minispec fetch"
        try:
            check_folder(folder)
        except FetchError:
            return "damaged", "minispec fetch --force"
    return "fetched", ""
