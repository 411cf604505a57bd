"""What a coordinator answers, as a run that people can be shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.coordinator.core.view.document import RunView
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.strict import build, field_types
from atoll.protocol.text import clean, last_line


def parse_status(document: Mapping[str, Any]) -> RunView:
    """Raises InvalidMessage if something is missing or of another type; what is not known here is left alone."""
    # Errors have room for all of a traceback.
    shown = {key: _printable(document[key], key == "errors") for key in field_types(RunView) if key in document}
    try:
        return build(RunView, shown, "status", unknown=[])
    except ConfigError as error:
        raise InvalidMessage(f"{error}; is the coordinator of another version?") from None


def _printable(value: Any, is_long: bool) -> Any:
    """Names and reasons come from other machines: nothing in them may steer a terminal."""
    if isinstance(value, str):
        return clean(value) if is_long else last_line(value)
    if isinstance(value, list):
        return [_printable(item, is_long) for item in value]
    if isinstance(value, dict):
        return {key: _printable(item, is_long) for key, item in value.items()}
    return value
