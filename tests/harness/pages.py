"""Commands that pages of docs/ show."""

from __future__ import annotations

import re
from pathlib import Path

TYPED = re.compile(r"^    (?:(hub|gate|north|south|west|you|watch)\$ )?(.+)$", re.MULTILINE)


def typed_on(page: Path) -> list[tuple[str, str]]:
    """On whose machine, where the page says that, and what, in its order."""
    return [(machine, command.partition("  #")[0].rstrip()) for machine, command in TYPED.findall(page.read_text())]
