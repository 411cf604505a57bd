"""Figures of baselines that were recorded by `python -m benchmarks record`, shown only for equal settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.cli.demo_report import Baselines
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings

FILE_NAME = "recorded.json"
MAX_FILE_BYTES = 1 << 20


def comparison_key(settings: RunSettings, num_sites: int) -> dict[str, Any]:
    """All that decides what the baselines reach: not the syncs, and not the limits of time."""
    table = asdict(settings)
    del table["trainer"]["evaluate_every"]
    return {name: table[name] for name in ("seed", "data", "steps", "model", "trainer")} | {"num_sites": num_sites}


def default_file() -> Path:
    """In the repository; an installed package has none."""
    return Path(__file__).resolve().parents[3] / "benchmarks" / FILE_NAME


def find_recorded(settings: RunSettings, num_sites: int, path: Path) -> Baselines | None:
    """None if nothing was recorded for these settings. Raises ConfigError if the file is damaged."""
    if settings.data != "stdlib" or not path.is_file():
        return None
    key = comparison_key(settings, num_sites)
    for entry in read_entries(path):
        if entry.get("key") == key:
            return Baselines(**entry["figures"])
    return None


def read_entries(path: Path) -> list[dict[str, Any]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        entries = json.loads(path.read_text(encoding="utf-8"))["baselines"]
        for entry in entries:
            Baselines(**entry["figures"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); `python -m benchmarks record` writes it anew") from None
    assert isinstance(entries, list)
    return entries
