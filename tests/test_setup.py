"""The project's own files hold together: dependencies, data, notebooks, names."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONDA_NAMES = {"pytorch": "torch"}


def requirements() -> dict[str, Requirement]:
    """Everything that pyproject.toml asks for, extras included, by name."""
    groups = [PROJECT["project"]["dependencies"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    found = [Requirement(line) for group in groups for line in group]
    return {canonicalize_name(r.name): r for r in found}


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_the_lock_pins_every_requirement_within_its_range():
    pins = locked()
    for name, requirement in requirements().items():
        assert name in pins, f"{name} is not in requirements.lock"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]}: {requirement}"


def test_conda_asks_for_the_same_ranges():
    text = (ROOT / "environment.yml").read_text().split("dependencies:")[1]
    entries = [Requirement(e) for e in re.findall(r"^  - ([a-z][^\s:]*)$", text, re.MULTILINE)]
    asked = requirements()
    names = {CONDA_NAMES.get(e.name, e.name) for e in entries}
    assert names >= {"torch", "transformers", "accelerate", "jupyterlab", "matplotlib", "nbval"}
    for entry in entries:
        name = CONDA_NAMES.get(entry.name, entry.name)
        if name == "python":
            assert str(entry.specifier) == PROJECT["project"]["requires-python"]
        elif name != "pip":
            assert entry.specifier == asked[canonicalize_name(name)].specifier, name


def test_no_machine_specific_pin():
    assert "+" not in (ROOT / "requirements.lock").read_text()


def prompts() -> list[dict[str, str]]:
    lines = (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_prompts_cover_six_kinds_evenly():
    found = prompts()
    assert len(found) >= 72
    kinds = Counter(p["kind"] for p in found)
    assert set(kinds) == {
        "conversation",
        "translation",
        "summarisation",
        "question_answering",
        "mathematics",
        "retrieval",
    }
    assert min(kinds.values()) >= 12
    for kind, number in kinds.items():
        splits = Counter(p["split"] for p in found if p["kind"] == kind)
        assert splits == {"dev": number // 2, "test": number // 2}
    assert len({p["id"] for p in found}) == len({p["text"] for p in found}) == len(found)


def test_there_are_notebooks():
    assert {p.stem for p in NOTEBOOKS} >= {"00_start_here", "02_draft_then_verify"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_of_a_notebook_ran_in_order(path):  # pitfall 29
    cells = [
        c
        for c in nbformat.read(path, as_version=4).cells
        if c.cell_type == "code" and c.source.strip()
    ]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c.outputs]
    assert outputs, "the outputs are missing"
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"], "warnings are left in"


WORDS = {  # design words that are code names, and where a reader finds them
    "target": "generate.py",
    "drafter": "generate.py",
    "round": "generate.py",
    "root": "drafters/base.py",
    "num_nodes": "tree.py",
    "bonus token": "verify.py",
    "correction": "verify.py",
    "alpha": "trace.py",
    "n_alpha": "trace.py",
    "accepted": "trace.py",
    "tau": "trace.py",
}


@pytest.mark.parametrize("word", sorted(WORDS))
def test_words_are_found_in_the_code_under_their_name(word):
    assert re.search(rf"\b{word}\b", (ROOT / "minispec" / WORDS[word]).read_text())


def test_imports_do_not_run_upward():
    """Ground floor first; a module imports only from floors below, or its own floor's peers."""
    floors = [
        {"tree", "cache", "sampling", "fetch"},
        {"models", "verify", "trace", "shapes"},
        {"drafters", "show", "graphs", "acceptance", "prompts"},
        {"generate", "plots", "peers", "bench_report", "checkpoints"},
        {"exactness", "environment", "costs"},
        {"heads"},
        {"demo"},
        {"mutants", "head_checks", "bench", "synthetic", "training"},
        {"cli"},
    ]
    level = {name: i for i, floor in enumerate(floors) for name in floor}
    for path in (ROOT / "minispec").rglob("*.py"):
        parts = path.relative_to(ROOT / "minispec").with_suffix("").parts
        if parts[0] not in level:
            continue
        for dots, name in re.findall(r"^\s*from (\.+)(\w+)", path.read_text(), re.MULTILINE):
            if len(dots) < len(parts):
                continue  # a neighbour in the same folder
            assert level.get(name, 0) <= level[parts[0]], f"{path.name} imports {name}"


def test_one_module_calls_into_transformers():  # pitfall 30
    """Loading, passes and caches live in models.py; fetch.py converts, mutants.py builds a toy."""
    users = {
        path.relative_to(ROOT / "minispec").as_posix()
        for path in (ROOT / "minispec").rglob("*.py")
        if re.search(r"^\s*(import|from) transformers", path.read_text(), re.MULTILINE)
    }
    assert users == {"models.py", "fetch.py", "mutants.py"}
