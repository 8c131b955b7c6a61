"""What some benchmarks share: their options, and a result that is taken up again."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch


def options(doc: str, *, features: bool = True) -> argparse.Namespace:
    """--out, --threads and, where a benchmark trains, --features; sets the number of threads."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the result is kept, and taken up again")
    if features:
        parser.add_argument("--features", type=Path, help="a folder for the target's features")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given


class Result:
    """Named values in named parts, written to ``path`` after each; what it holds stays.

    Exits if the file holds a run of another recipe, corpus or machine.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], parts: tuple[str, ...]) -> None:
        self.path, self.facts = path, facts
        held = json.loads(path.read_text()) if path is not None and path.exists() else {}
        if held and held["facts"] != json.loads(json.dumps(facts)):
            raise SystemExit(f"{path} holds another run (recipe, corpus or machine): move it away")
        self.parts: dict[str, dict[str, Any]] = {part: held.get(part, {}) for part in parts}

    def keep(self, part: str, name: str, value: Any) -> None:
        self.parts[part][name] = value
        print(part, name, value, flush=True)
        if self.path is not None:
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps({"facts": self.facts, **self.parts}, indent=1) + "\n")
            os.replace(draft, self.path)
