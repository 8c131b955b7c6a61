"""The project's prompts: six kinds, a split to choose by (dev) and one to report (test)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from .models import LanguageModel


@dataclass
class Prompt:
    """One line of data/prompts.jsonl."""

    id: str
    kind: str
    split: str
    text: str

    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    def ids(self, target: LanguageModel) -> list[int]:
        """By the chat template; models that have none read it as it is."""
        chats = getattr(target.tokenizer, "chat_template", None)
        return target.encode(self.chat() if chats else self.text)


def data_dir() -> Path:
    """MINISPEC_DATA, else data/ of the checkout that the package lies in."""
    folder = Path(os.environ.get("MINISPEC_DATA") or Path(__file__).parent.parent / "data")
    if not (folder / "prompts.jsonl").is_file():
        raise FileNotFoundError(
            f"no prompts.jsonl in {folder}: run from a checkout of minispec, or set MINISPEC_DATA"
        )
    return folder


def load_prompts(split: str | None = None, kind: str | None = None) -> list[Prompt]:
    """The project's prompts; split "dev" or "test", kind one of the six; None: all."""
    lines = (data_dir() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [Prompt(**json.loads(line)) for line in lines]
    return [p for p in prompts if split in (None, p.split) and kind in (None, p.kind)]
