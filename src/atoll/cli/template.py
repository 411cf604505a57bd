"""A commented run.toml, written from the settings' own types, defaults and docstrings so that it cannot drift."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from typing import Any

from atoll.cli.config import SECTIONS, Tables, sections
from atoll.cli.flags import field_docs
from atoll.protocol.outer_settings import AUTO
from atoll.protocol.presets import PRESETS

WIDTH = 100
AT_FIRST: Tables = {"outer": {"optimizer": AUTO}, "sync": {"fsync": True}}
"""What a new file has in the place of a field's default, but for what its preset decides."""
HEADINGS = {
    "run": "What is trained, for how long, and by how many.",
    "model": None,  # the class's own docstring
    "trainer": None,
    "sync": "When and how the sites exchange what they learned.",
    "outer": "The optimizer of the outer step.",
    "coordinator": "The coordinator itself. Not sent to the nodes.",
    "track": None,
}


def defaults(cls: type) -> dict[str, Any]:
    """Fields with a plain default value."""
    return {item.name: item.default for item in dataclasses.fields(cls) if item.default is not dataclasses.MISSING}


def toml_value(value: str | int | float | bool) -> str:
    if isinstance(value, str):
        # JSON's strings are TOML's, but for DEL and for escapes of halves of a character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = re.sub(r"e([+-])0*(\d)", r"e\1\2", repr(value))
        return text if "." in text or "e" in text else f"{text}.0"
    return str(value)


def render(values: Tables) -> str:
    """The text of a run.toml: every key with its meaning, `values` in place of the defaults."""
    of_preset = PRESETS[preset].tables if (preset := values.get("run", {}).get("preset", "")) else {}
    lines = [
        "# A run of atoll. Start it with `atoll coordinator run.toml`; the nodes get these settings when they join.",
    ]
    for section, keys in sections().items():
        cls = SECTIONS[section]
        docs = field_docs(cls)
        first = AT_FIRST.get(section, {}) if "strategy" not in of_preset.get("sync", {}) else {}
        known = defaults(cls) | first | values.get(section, {})
        lines += ["", f"[{section}]", *_comment(HEADINGS[section] or inspect.getdoc(cls) or "")]
        for key in keys:
            if key in docs:
                lines += ["", *_comment(docs[key])]
            is_decided = key in values.get(section, {}) or (key in first and key not in of_preset.get(section, {}))
            if section in of_preset and not is_decided:
                found = {**defaults(cls), **of_preset[section]}[key]
                by = "  # by the preset" if key in of_preset[section] else ""
                lines.append(f"# {key} = {toml_value(found)}{by}")
            else:
                lines.append(f"{key} = {toml_value(known[key])}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")
