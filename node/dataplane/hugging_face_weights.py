"""First values of a run from a folder of Hugging Face's transformers, of the family of the built-in model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from atoll.node.dataplane.hugging_face import HEAD, INDEX_NAME, Tensor, check_same, read_table, tensors_of
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.safetensors_file import Reader
from atoll.node.dataplane.saved_manifest import MODEL_NAME
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import DTYPE_BYTES
from atoll.protocol.model_settings import ModelSettings

DTYPES = ("F32", "BF16", "F16")
NOT_LEARNED = ".rotary_emb.inv_freq"
"""A table that older versions of transformers stored."""


def restore(folder: Path, model: ModelSettings, outer: OuterState) -> None:
    """Commit 0 of `outer` from the folder's values, with slots of zero; one chunk in memory at a time.

    Raises ConfigError if the folder is not whole, or is not of this model, or the run trains a script's own.
    """
    check_same(folder, model)
    tensors = tensors_of(model)
    layout = outer.layout
    if {spec.name: spec.shape for spec in layout.manifest.tensors} != {t.name: t.shape for t in tensors}:
        raise ConfigError(f"{folder}: only the built-in trainer starts from a folder of Hugging Face's; load it there")
    with Weights(folder, tensors) as weights:
        for chunk in layout.chunks:
            parts = [weights.read(layout.name_of(chunk.index), s, chunk.strip_elements) for s in chunk.strip_starts]
            outer.seed(chunk.index, b"".join(parts))


class Weights:
    """The values of all `tensors`, by the built-in model's names, as fp32. Leave it as a context to close its files.

    Raises ConfigError if a tensor lacks, has another shape or dtype, or there is one more: a bias, for example.
    """

    def __init__(self, folder: Path, tensors: tuple[Tensor, ...]) -> None:
        self._wanted = {tensor.hf_name: tensor for tensor in tensors}
        self._found: dict[str, tuple[Reader, str]] = {}
        with ExitStack() as files:
            for path in _files(folder):
                reader = Reader(path)
                files.callback(reader.close)
                self._add(reader)
            if missing := [tensor.hf_name for tensor in tensors if tensor.name not in self._found]:
                raise ConfigError(f"{folder}: {missing[0]!r} and {len(missing) - 1} more tensors are not there")
            self._files = files.pop_all()

    def _add(self, reader: Reader) -> None:
        for hf_name, stored in reader.tensors.items():
            tensor = self._wanted.get(hf_name)
            if tensor is None:
                if hf_name != HEAD and not hf_name.endswith(NOT_LEARNED):
                    raise ConfigError(f"{reader.path}: the built-in model has no {hf_name!r}")
                continue
            if stored.dtype not in DTYPES:
                raise ConfigError(f"{reader.path}: {hf_name!r} is of {stored.dtype}, expected {' or '.join(DTYPES)}")
            size = int(np.prod(stored.shape)) * DTYPE_BYTES[stored.dtype]
            if stored.shape != tensor.shape or stored.end - stored.begin != size:
                raise ConfigError(f"{reader.path}: {hf_name!r} does not have the shape {list(tensor.shape)}")
            if tensor.name in self._found:
                raise ConfigError(f"{reader.path}: {hf_name!r} is in {self._found[tensor.name][0].path.name} too")
            self._found[tensor.name] = reader, hf_name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str, first_element: int, num_elements: int) -> bytes:
        reader, hf_name = self._found[name]
        dtype = reader.tensors[hf_name].dtype
        itemsize = DTYPE_BYTES[dtype]
        data = reader.read(hf_name, first_element * itemsize, num_elements * itemsize)
        if dtype == "F16":
            values = np.frombuffer(data, np.float16).astype(np.float32)
        elif dtype == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"{reader.path}: {hf_name!r} holds values that are not finite")
        return values.tobytes()


def _files(folder: Path) -> list[Path]:
    """Those that the index names, or the one. Raises ConfigError."""
    path = folder / INDEX_NAME
    if path.is_file() and (folder / MODEL_NAME).is_file():
        raise ConfigError(f"{folder}: {MODEL_NAME} and {INDEX_NAME} are both there; leave the one that is meant")
    if not path.is_file():
        if not (folder / MODEL_NAME).is_file():
            raise ConfigError(f"{folder}: neither {MODEL_NAME} nor {INDEX_NAME} is there; other formats are not read")
        return [folder / MODEL_NAME]
    weight_map = read_table(path).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{path}: its weight_map does not name files of this folder")
    return [folder / name for name in sorted(names)]
