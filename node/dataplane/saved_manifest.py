"""`manifest.json` of a saved model. Needs no numpy, so the coordinator's host can read it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import Manifest, TensorSpec, TiedName
from atoll.protocol.settings import RunSettings, settings_from_json
from atoll.protocol.strict import build, check

MANIFEST_NAME = "manifest.json"
MODEL_NAME = "model.safetensors"
OUTER_NAME = "outer.safetensors"
FORMAT = "atoll/saved-model/2"
MAX_MANIFEST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a manifest says in plain values."""

    run_id: str
    commit: int
    run_step: int
    run_tokens: int
    chunk_elements: int
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedManifest(Figures):
    state_hash: bytes
    manifest: Manifest
    info: Mapping[str, Any]
    """Everything that was handed to `save`: run_step, run_tokens, settings, and what else the caller noted."""


def to_json(saved: SavedManifest) -> str:
    manifest = saved.manifest
    table = {
        **saved.info,
        "format": FORMAT,
        **{item.name: getattr(saved, item.name) for item in fields(Figures)},
        "state_hash": saved.state_hash.hex(),
        "manifest_digest": manifest.digest.hex(),
        "tensors": [asdict(t) | {"role": t.role.name} for t in manifest.tensors],
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


def aside_of(folder: Path) -> Path:
    """Where a model is written before it is put in place."""
    return folder.with_name(f".{folder.name}.new")


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
        return _parse(json.loads(data))
    except (ConfigError, ValueError, TypeError, RecursionError, InvalidMessage) as error:
        raise ConfigError(f"{path}: not the manifest of a saved model: {error}") from None


def settings_of(saved: SavedManifest, path: Path) -> RunSettings:
    """Of the run that saved it. Raises ConfigError, naming `path`, if the manifest there does not say them."""
    try:
        return settings_from_json(json.dumps(saved.info.get("settings")))
    except InvalidMessage as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse(table: Any) -> SavedManifest:
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}, which this version reads")
    figures = build(Figures, table, "it", unknown=[])
    numbers = figures.commit, figures.run_step, figures.run_tokens, figures.chunk_elements
    if not 0 <= min(numbers) <= max(numbers) < 1 << 64:
        raise ValueError("commit, run_step, run_tokens and chunk_elements are from 0 to 2^64 - 1")
    tied = check(dict, table.get("tied"), "tied")
    manifest = Manifest(
        tensors=check(tuple[TensorSpec, ...], table.get("tensors"), "tensors"),
        tied=tuple(build(TiedName, {"alias": alias, "name": tied[alias]}, "tied") for alias in sorted(tied)),
    )
    if manifest.digest.hex() != table.get("manifest_digest"):
        raise ValueError("the tensors do not have the digest it names")
    state_hash = bytes.fromhex(check(str, table.get("state_hash"), "state_hash"))
    if len(state_hash) != DIGEST_BYTES:
        raise ValueError(f"state_hash must have {DIGEST_BYTES} bytes")
    return SavedManifest(**asdict(figures), state_hash=state_hash, manifest=manifest, info=table)
