"""``python -m minispec``, as ``accelerate launch -m minispec train ...`` calls it."""

from .cli import app

app()
