"""What figures that live in a page have in common: their data and their script, and a sentence that keeps its place."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path


def as_json(data: object) -> str:
    """Data for a `<script>`: nothing in it can end the script."""
    return json.dumps(data, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "\\u003c!--")


def caption(sentence: str, sentences: Iterable[str]) -> str:
    """The sentence shown first, with room for the longest of all, so that nothing below it moves."""
    return (
        f'<figcaption><span class="pbh-longest" aria-hidden="true">{escape(max(sentences, key=len))}</span>'
        f'<span aria-live="polite">{escape(sentence)}</span></figcaption>'
    )


def scripts(identity: str, data: str, script: Path, function: str, element: str = "figure") -> str:
    """The data, and the script whose function is called with each figure of this identity."""
    return (
        f'<script type="application/json">{data}</script>'
        f"<script>(function () {{\n{script.read_text(encoding='utf-8')}"
        f"document.querySelectorAll('{element}[data-pbh=\"{identity}\"]').forEach({function});\n"
        "})();</script>"
    )
