"""A trained model in a folder: `model.safetensors`, `outer.safetensors` (slots and what else a resumed run needs to
the bit), and `manifest.json`, written last. The folder is made aside and renamed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atoll.node.dataplane import hugging_face, hugging_face_weights
from atoll.node.dataplane.bases import cast_base
from atoll.node.dataplane.earlier_models import retire
from atoll.node.dataplane.frozen_state import FrozenState
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.safetensors_file import Entry, Reader, write
from atoll.node.dataplane.saved_manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    OUTER_NAME,
    SavedManifest,
    aside_of,
    former_of,
    load_manifest,
    place_for,
    to_json,
    where_saved,
)
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.disk import PUBLIC_FILE, REAL_DISK, Disk, disk_error, exchange_names, sync_folder
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage, UnsupportedError
from atoll.protocol.layout import DTYPE_BYTES, Chunk, Layout, Role, TensorSpec, chunk_hash, state_hash
from atoll.protocol.model_settings import ModelSettings
from atoll.protocol.outer import variance_scale
from atoll.protocol.settings import read_settings

__all__ = ["discard", "load_manifest", "put_in_place", "restore", "take_back", "write_aside"]

log = logging.getLogger(__name__)

_HASHES = "chunk_hashes"  # in outer.safetensors: U8 of (num_chunks, 32)


def write_aside(
    folder: Path,
    frozen: FrozenState,
    layout: Layout,
    slots: tuple[str, ...],
    info: Mapping[str, Any],
    *,
    disk: Disk = REAL_DISK,
) -> None:
    """All of a saved model, on the disk beside `folder`, for `put_in_place` or `discard`.

    `info` has at least run_step, run_tokens and settings (a table), and goes into the manifest as it is. Raises
    ConfigError if one of these is missing or `folder` holds other files, HostError if the disk is full.
    """
    for key, kind in (("run_step", int), ("run_tokens", int), ("settings", dict)):
        if not isinstance(info.get(key), kind):
            raise ConfigError(f"{folder}: a saved model's {key} must be a {kind.__name__}, not {info.get(key)!r}")
    folder = place_for(folder)
    saved = SavedManifest(
        run_id=frozen.run_id,
        commit=frozen.commit,
        run_step=info["run_step"],
        run_tokens=info["run_tokens"],
        state_hash=frozen.state_hash,
        chunk_elements=layout.chunk_elements,
        slots=slots,
        manifest=layout.manifest,
        info=info,
    )
    aside = aside_of(folder)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise disk_error(error, aside) from error
    try:
        tied = {"tied": json.dumps({t.alias: t.name for t in layout.manifest.tied})} if layout.manifest.tied else {}
        tensors = _Tensors(frozen, layout)
        write(aside / MODEL_NAME, tensors.model(), {"format": "pt", "run": frozen.run_id, **tied})
        write(aside / OUTER_NAME, tensors.outer(slots), {"run": frozen.run_id})
        disk.write_whole(aside / MANIFEST_NAME, to_json(saved).encode(), fsync=True, mode=PUBLIC_FILE)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk would stay full
        raise


def discard(folder: Path) -> None:
    """What `write_aside` wrote."""
    shutil.rmtree(aside_of(place_for(folder)), ignore_errors=True)


def take_back(folder: Path) -> None:
    """A saved model that turned out to be wrong."""
    folder = place_for(folder)
    try:
        os.replace(folder, aside_of(folder))
    except OSError as error:
        raise disk_error(error, folder) from error
    discard(folder)


def begin_from(folder: Path, model: ModelSettings, outer: OuterState) -> None:
    """Commit 0 of `outer` from a saved model, or from a folder of Hugging Face's. Raises ConfigError."""
    if hugging_face.is_folder(folder):
        hugging_face_weights.restore(folder, model, outer)
    else:
        restore(folder, outer)


def restore(folder: Path, outer: OuterState) -> None:
    """Commit 0 of `outer` from a saved model, each chunk checked against its saved hash.

    Raises ConfigError if the folder is not whole, or holds another model, chunk size or outer optimizer.
    """
    folder, layout = where_saved(folder), outer.layout
    saved = load_manifest(folder)
    for what, theirs, ours in (
        ("model (manifest)", saved.manifest.digest.hex(), layout.manifest.digest.hex()),
        ("slots of the outer optimizer", saved.slots, outer.slots),
        ("sync.chunk_elements", saved.chunk_elements, layout.chunk_elements),
    ):
        if theirs != ours:
            raise ConfigError(f"{folder}: saved with {what} {theirs}, this run has {ours}; make them equal to resume")
    scale = _variance_scale(folder, saved)
    with closing(Reader(folder / MODEL_NAME)) as model, closing(Reader(folder / OUTER_NAME)) as more:
        _restore(folder, model, more, outer, _hashes(folder, more, saved), scale)


def _variance_scale(folder: Path, saved: SavedManifest) -> float:
    """Of a run of momenta, whose variance has not moved at each step. Raises ConfigError if the saved model does not
    say how often it has."""
    settings = saved.info.get("settings")
    sync = settings.get("sync") if isinstance(settings, dict) else None
    if not isinstance(sync, dict) or sync.get("strategy") != "momentum":
        return 1.0
    try:
        before, _ = read_settings(json.dumps(settings))
    except (InvalidMessage, UnsupportedError) as error:
        raise ConfigError(
            f"{folder} does not say how often the variance of its optimizer has moved ({error}); install the version "
            "that saved it"
        ) from None
    return variance_scale(before, saved.commit, saved.run_step)


def _hashes(folder: Path, more: Reader, saved: SavedManifest) -> list[bytes]:
    """Of the chunks, as they were saved."""
    num_bytes = more.num_bytes(_HASHES, "U8")
    found = more.read(_HASHES, 0, num_bytes)
    hashes = [found[i : i + DIGEST_BYTES] for i in range(0, num_bytes, DIGEST_BYTES)]
    if state_hash(saved.manifest, saved.slots, hashes) != saved.state_hash:
        raise ConfigError(
            f"{folder}: it is damaged: not of the state hash that {MANIFEST_NAME} names; take another copy"
        )
    return hashes


def _scaled(record: bytes, chunk: Chunk, row: int, scale: float) -> bytes:
    rows = np.frombuffer(record, np.float32).reshape(-1, chunk.num_elements).copy()
    rows[row] *= np.float32(scale)
    return rows.tobytes()


def _restore(  # noqa: PLR0917
    folder: Path, model: Reader, more: Reader, outer: OuterState, hashes: list[bytes], scale: float
) -> None:
    """`scale`: of the variance, if there is one."""
    layout = outer.layout
    if len(hashes) != len(layout.chunks):
        raise ConfigError(f"{folder / OUTER_NAME}: {_HASHES} is of {len(hashes)} chunks and not {len(layout.chunks)}")
    for chunk in layout.chunks:
        spec = layout.manifest.tensors[chunk.tensor]
        in_outer = _is_rounded(spec)
        file, name = (more, f"value/{spec.name}") if in_outer else (model, spec.name)
        sources = [(file, name, "F32" if in_outer else spec.dtype)]
        if chunk.role is Role.TRAINABLE:
            sources += [(more, f"slot/{slot}/{spec.name}", "F32") for slot in outer.slots]
        record = b""
        for reader, key, dtype in sources:
            if reader.num_bytes(key, dtype) != spec.num_elements * spec.carried_itemsize:
                raise ConfigError(f"{reader.path}: {key!r} does not have the shape {list(spec.shape)}")
            record += _read(reader, key, chunk, spec.carried_itemsize)
        whole = not in_outer or _rounded(record, spec.dtype) == _stored(model, spec, chunk)
        if not whole or chunk_hash(record) != hashes[chunk.index]:
            raise ConfigError(f"{folder}: {spec.name!r} is damaged (chunk {chunk.index}); take another copy")
        if scale != 1.0 and chunk.role is Role.TRAINABLE and chunk.num_elements:
            record = _scaled(record, chunk, 1 + outer.slots.index("variance"), scale)
        outer.put(chunk.index, 0, record)


def _stored(model: Reader, spec: TensorSpec, chunk: Chunk) -> bytes:
    itemsize = DTYPE_BYTES[spec.dtype]
    model.num_bytes(spec.name, spec.dtype)
    return _read(model, spec.name, chunk, itemsize)


def _read(file: Reader, key: str, chunk: Chunk, itemsize: int) -> bytes:
    return b"".join(file.read(key, start * itemsize, chunk.strip_elements * itemsize) for start in chunk.strip_starts)


class _Tensors:
    """The bytes of whole tensors from their chunks, one chunk in memory at a time."""

    def __init__(self, frozen: FrozenState, layout: Layout) -> None:
        self._frozen = frozen
        self._carried = [t for t in layout.manifest.tensors if t.role is not Role.BUFFER_LOCAL]
        self._chunks: dict[str, list[Chunk]] = {t.name: [] for t in self._carried}
        for chunk in layout.chunks:
            self._chunks[layout.name_of(chunk.index)].append(chunk)

    def model(self) -> Iterator[Entry]:
        for spec in self._carried:
            parts = self._parts(spec.name, 0)
            if _is_rounded(spec):
                parts = map(partial(_rounded, dtype=spec.dtype), parts)
            yield Entry(spec.name, spec.dtype, spec.shape, parts)

    def outer(self, slots: tuple[str, ...]) -> Iterator[Entry]:
        hashes = self._frozen.hashes
        yield Entry(_HASHES, "U8", (len(hashes), DIGEST_BYTES), hashes)
        for spec in self._carried:
            if spec.role is Role.TRAINABLE:
                for row, slot in enumerate(slots, 1):
                    yield Entry(f"slot/{slot}/{spec.name}", "F32", spec.shape, self._parts(spec.name, row))
            elif _is_rounded(spec):
                yield Entry(f"value/{spec.name}", "F32", spec.shape, self._parts(spec.name, 0))

    def _parts(self, name: str, row: int) -> Iterator[bytes]:
        for chunk, strip in _in_order(self._chunks[name]):
            num_bytes = chunk.num_bytes // chunk.num_strips
            yield self._frozen.read(chunk.index, row * chunk.num_bytes + strip * num_bytes, num_bytes)


def _in_order(chunks: list[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """The strips of a tensor's chunks as they lie in the tensor: (chunk, number of its strip)."""
    in_order = sorted(chunks, key=lambda c: c.first_element)
    for _, beside in itertools.groupby(in_order, key=lambda c: c.first_element // c.stride_elements):
        blocks = list(beside)  # that begin in one row, and so have equally many strips
        for strip in range(blocks[0].num_strips):
            yield from ((chunk, strip) for chunk in blocks)


def _is_rounded(spec: TensorSpec) -> bool:
    """An averaged buffer in half precision: the model file has it rounded, so the exact value goes beside it."""
    return spec.role is Role.BUFFER_MEAN and spec.dtype != "F32"


def _rounded(part: bytes, dtype: str) -> bytes:
    """fp32 -> F16 or BF16, to nearest, ties to even."""
    values = np.empty(len(part) // 4, np.float32)
    cast_base(np.frombuffer(part, np.float32), dtype, values)
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def put_in_place(folder: Path, num_earlier: int = 0) -> None:
    """What `write_aside` wrote, instead of what `folder` held: at any moment it is the one or the other. Where a file
    system cannot do that, see `where_saved`. Of earlier models `num_earlier` are kept beside it."""
    folder = place_for(folder)
    aside = aside_of(folder)
    try:
        sync_folder(aside)
        if not folder.exists():
            os.replace(aside, folder)
        elif not exchange_names(aside, folder):
            former = former_of(folder)
            log.warning(
                "%s: this file system cannot exchange two names; a kill now would leave the model before in %s",
                folder,
                former,
            )
            shutil.rmtree(former, ignore_errors=True)
            os.replace(folder, former)
            os.replace(aside, folder)
            aside = former
        sync_folder(folder.parent)
    except OSError as error:
        failed = disk_error(error, folder)
        if (written := aside_of(folder)).is_dir():
            failed = HostError(f"{failed}; the model that was to be there is whole in {written}")
        raise failed from error
    try:
        retire(aside, folder, num_earlier)
    except OSError as error:
        log.warning("%s: the model is there; earlier ones beside it are not as they should be: %s", folder, error)
