"""The base: the outer values as the worker really received them, `fp32(cast(outer, the worker's dtype))`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import kernels
from atoll.protocol.codecs import scratch
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, Role

Floats = npt.NDArray[np.float32]
BASE_DTYPES = ("F32", "BF16", "F16")


def check_base_dtypes(manifest: Manifest, dtypes: Mapping[str, str]) -> None:
    """Raises ConfigError unless a worker may hold each trainable tensor as its dtype."""
    for spec in manifest.tensors:
        if spec.role is Role.TRAINABLE and (dtype := dtypes[spec.name]) not in BASE_DTYPES:
            known = ", ".join(BASE_DTYPES)
            raise ConfigError(f"{spec.name!r} is trained as {dtype}; atoll synchronizes parameters of dtype {known}")


def base_of(values: Floats, dtype: str, buffer: str = "base") -> Floats:
    """Of 1-D fp32 values: themselves, or a copy in a `buffer` of this thread, valid until its next one."""
    if dtype == "F32":
        return values
    base = scratch.floats(buffer, values.size)
    cast_base(values, dtype, base)
    return base


def cast_base(values: Floats, dtype: str, out: Floats) -> None:
    """`out = fp32(cast(values, dtype))`, rounded to nearest, ties to even; all 1-D fp32 of one size."""
    if dtype == "F32":
        out[:] = values
    elif dtype == "BF16":
        kernels.round_to_bf16(values, out)
    else:
        with np.errstate(over="ignore"):  # an infinite base is refused by the encoder, by name of the tensor
            out[:] = values.astype(np.float16)
