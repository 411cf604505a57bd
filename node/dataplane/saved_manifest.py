"""`manifest.json` of a saved model. Needs no numpy, so the coordinator's host can read it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import Manifest, Role, TensorSpec, TiedName

MANIFEST_NAME = "manifest.json"
MODEL_NAME = "model.safetensors"
OUTER_NAME = "outer.safetensors"
FORMAT = "atoll/saved-model/2"
MAX_MANIFEST_BYTES = 1 << 28
_NUMBERS = ("commit", "run_step", "run_tokens", "chunk_elements")
"""Fields of `SavedManifest` that are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedManifest:
    run_id: str
    commit: int
    run_step: int
    run_tokens: int
    state_hash: bytes
    chunk_elements: int
    slots: tuple[str, ...]
    manifest: Manifest
    info: Mapping[str, Any]
    """Everything that was handed to `save`: run_step, run_tokens, settings, and what else the caller noted."""


def to_json(saved: SavedManifest) -> str:
    manifest = saved.manifest
    table = {
        **saved.info,
        "format": FORMAT,
        "run_id": saved.run_id,
        **{key: getattr(saved, key) for key in _NUMBERS},
        "state_hash": saved.state_hash.hex(),
        "slots": list(saved.slots),
        "manifest_digest": manifest.digest.hex(),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "role": t.role.name} for t in manifest.tensors
        ],
        "tied": {t.alias: t.name for t in manifest.tied},
    }
    return json.dumps(table, indent=1)


def place_for(folder: Path) -> Path:
    """Where a save to `folder` goes: what it replaces as a whole is not there, empty, or a saved model.

    Raises ConfigError for anything else: it would be removed.
    """
    try:
        folder = folder.resolve()
        if (found := where_saved(folder)) != folder:
            os.replace(found, folder)
        is_used = next(folder.iterdir(), None) is not None
    except FileNotFoundError:
        return folder
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{folder}: no place for a saved model: {error}") from None
    if is_used and not all((folder / name).is_file() for name in (MANIFEST_NAME, MODEL_NAME)):
        raise ConfigError(
            f"{folder} holds other files than a saved model, and saving replaces the whole folder; name one of its own"
        )
    if folder.is_mount():
        raise ConfigError(f"{folder} is a mount point, and saving replaces the whole folder; name a folder in it")
    return folder


def former_of(folder: Path) -> Path:
    """Where the model before is between the two renames of a save that cannot exchange names."""
    return folder.with_name(f".{folder.name}.old")


def where_saved(folder: Path) -> Path:
    """The saved model that `folder` names: there, or where a save was killed between its two renames."""
    former = former_of(folder) if folder.name else folder
    return former if former.is_dir() and not folder.exists() else folder


def load_manifest(path: Path) -> SavedManifest:
    """The manifest of a saved model: `path` is the file or its folder.

    Raises ConfigError: no such file, too large, not a manifest, or one that contradicts itself.
    """
    path = where_saved(path.parent) / path.name if path.name == MANIFEST_NAME else where_saved(path)
    path = path / MANIFEST_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name the {MANIFEST_NAME} of a saved model (an interrupted save has none)"
        ) from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MiB, which no manifest is")
    try:
        table = json.loads(data)
        if _get(table, "format", str) != FORMAT:
            raise ValueError(f"format {table['format']!r}, this version reads {FORMAT!r}")
        saved = _parse(table)
        if saved.manifest.digest.hex() != _get(table, "manifest_digest", str):
            raise ValueError("the tensors do not have the digest it names")
    except (ValueError, TypeError, RecursionError, InvalidMessage) as error:
        raise ConfigError(f"{path}: not the manifest of a saved model: {error}") from None
    return saved


def _parse(table: dict[str, Any]) -> SavedManifest:
    tensors = []
    for item in _get(table, "tensors", list):
        shape = tuple(_number(n, "shape") for n in _get(item, "shape", list))
        role = _get(item, "role", str)
        if role not in Role.__members__:
            raise ValueError(f"role {role!r} is not known")
        dtype = _get(item, "dtype", str)
        tensors.append(TensorSpec(name=_get(item, "name", str), shape=shape, dtype=dtype, role=Role[role]))
    tied = _get(table, "tied", dict)
    if not all(isinstance(name, str) for name in tied.values()):
        raise ValueError("tied must map names to names")
    slots = _get(table, "slots", list)
    if not all(isinstance(slot, str) for slot in slots):
        raise ValueError("slots must be names")
    state_hash = bytes.fromhex(_get(table, "state_hash", str))
    if len(state_hash) != DIGEST_BYTES:
        raise ValueError(f"state_hash must have {DIGEST_BYTES} bytes")
    return SavedManifest(
        run_id=_get(table, "run_id", str),
        **{key: _number(table.get(key), key) for key in _NUMBERS},
        state_hash=state_hash,
        slots=tuple(slots),
        manifest=Manifest(
            tensors=tuple(tensors), tied=tuple(TiedName(alias=alias, name=name) for alias, name in sorted(tied.items()))
        ),
        info=table,
    )


def _get(table: Any, key: str, kind: type) -> Any:
    if not isinstance(table, dict) or not isinstance(table.get(key), kind):
        raise ValueError(f"{key} is missing or not a {kind.__name__}")
    return table[key]


def _number(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{key} is not a whole number of at least 0")
    return value
