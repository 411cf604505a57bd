"""Commands that pages of docs/ show."""

from __future__ import annotations

import re
from pathlib import Path

TYPED = re.compile(r"^    (?:(hub|gate|north|south|west|you|watch)\$ )?(.+)$", re.MULTILINE)
LINE = re.compile(r"^    .*$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")


def typed_on(page: Path) -> list[tuple[str, str]]:
    """On whose machine, where the page says that, and what, in its order."""
    return [(machine, command.partition("  #")[0].rstrip()) for machine, command in TYPED.findall(page.read_text())]


def named_on(page: Path) -> list[str]:
    """Commands of atoll, in lines that are typed and within sentences."""
    text = page.read_text().replace("\\\n", "")
    typed = [command for _, command in TYPED.findall(text)]
    spans = [" ".join(span.split()) for span in SPAN.findall(LINE.sub("", text))]
    return [found.partition(" #")[0] for found in (*typed, *spans) if found.startswith("atoll ")]
