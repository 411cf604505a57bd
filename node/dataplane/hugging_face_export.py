"""A saved model of the built-in kind as a folder of Hugging Face's transformers: the same values, other names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from atoll.node.dataplane.hugging_face import CONFIG_NAME, INDEX_NAME, Tensor, tensors_of, to_config
from atoll.node.dataplane.safetensors_file import Entry, Reader, write
from atoll.node.dataplane.saved_manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    SavedManifest,
    load_manifest,
    settings_of,
    where_saved,
)
from atoll.protocol.disk import PUBLIC_FILE, REAL_DISK, new_folder
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import DTYPE_BYTES
from atoll.protocol.model_settings import ModelSettings

DTYPE = "F32"
PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Exported:
    num_tensors: int
    num_bytes: int
    num_files: int


def export(saved: Path, to: Path, max_shard_bytes: int) -> Exported:
    """Holds PIECE_BYTES of a tensor in memory, whatever the model's size. `to` is made aside and renamed: it is there
    whole or not at all. A tensor larger than a shard has one of its own.

    Raises ConfigError if `saved` holds no model of the built-in kind or `to` other files, HostError if it cannot be
    written.
    """
    saved = where_saved(saved)
    manifest = load_manifest(saved / MANIFEST_NAME)
    model = settings_of(manifest, saved / MANIFEST_NAME).model
    tensors = tensors_of(model)
    _check_built_in(saved, manifest, tensors)
    with new_folder(to) as folder, closing(Reader(saved / MODEL_NAME)) as reader:
        return _write_all(reader, folder, model, shards(tensors, max_shard_bytes))


def _check_built_in(saved: Path, manifest: SavedManifest, tensors: Sequence[Tensor]) -> None:
    found = {spec.name: (spec.dtype, spec.shape) for spec in manifest.manifest.tensors}
    if found != {tensor.name: (DTYPE, tensor.shape) for tensor in tensors}:
        raise ConfigError(
            f"{saved} holds another model than the built-in one ({len(found)} tensors), whose names in Hugging Face's "
            f"format only its script knows: load {MODEL_NAME} there, and save it from there"
        )


def shards(tensors: Sequence[Tensor], max_shard_bytes: int) -> list[list[Tensor]]:
    """Files of at most so many bytes, in the order of the model."""
    files: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = _num_bytes(tensor)
        if not files or size > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(tensor)
        room -= size
    return files


def _write_all(reader: Reader, folder: Path, model: ModelSettings, files: Sequence[Sequence[Tensor]]) -> Exported:
    names = [MODEL_NAME]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    total = sum(_num_bytes(tensor) for file in files for tensor in file)
    for name, file in zip(names, files, strict=True):
        write(folder / name, (_entry(reader, tensor) for tensor in file), {"format": "pt"})
    if len(files) > 1:
        weight_map = {tensor.hf_name: name for name, file in zip(names, files, strict=True) for tensor in file}
        _write_table(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_table(folder / CONFIG_NAME, to_config(model))
    return Exported(num_tensors=sum(map(len, files)), num_bytes=total, num_files=len(files))


def _write_table(path: Path, table: object) -> None:
    REAL_DISK.write_whole(path, (json.dumps(table, indent=2) + "\n").encode(), fsync=True, mode=PUBLIC_FILE)


def _entry(reader: Reader, tensor: Tensor) -> Entry:
    if reader.num_bytes(tensor.name, DTYPE) != _num_bytes(tensor):
        raise ConfigError(f"{reader.path}: {tensor.name!r} does not have the shape {list(tensor.shape)}")
    return Entry(tensor.hf_name, DTYPE, tensor.shape, _pieces(reader, tensor))


def _pieces(reader: Reader, tensor: Tensor) -> Iterator[bytes]:
    total = _num_bytes(tensor)
    for first in range(0, total, PIECE_BYTES):
        yield reader.read(tensor.name, first, min(PIECE_BYTES, total - first))


def _num_bytes(tensor: Tensor) -> int:
    return DTYPE_BYTES[DTYPE] * math.prod(tensor.shape)
