"""The base: the outer values as the worker really received them, `fp32(cast(outer, the worker's dtype))`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import kernels
from atoll.protocol.errors import ConfigError

Floats = npt.NDArray[np.float32]
BASE_DTYPES = ("F32", "BF16", "F16")


def check_base_dtype(dtype: str, name: str) -> None:
    """Raises ConfigError unless a worker may hold trainable tensors as `dtype`."""
    if dtype not in BASE_DTYPES:
        raise ConfigError(
            f"{name!r} is trained as {dtype}; atoll synchronizes parameters of dtype {', '.join(BASE_DTYPES)}"
        )


def cast_base(values: Floats, dtype: str, out: Floats) -> None:
    """`out = fp32(cast(values, dtype))`, rounded to nearest, ties to even; all 1-D fp32 of one size."""
    if dtype == "F32":
        out[:] = values
    elif dtype == "BF16":
        kernels.round_to_bf16(values, out)
    elif dtype == "F16":
        with np.errstate(over="ignore"):  # an infinite base is refused by the encoder, by name of the tensor
            out[:] = values.astype(np.float16)
    else:
        check_base_dtype(dtype, "a tensor")
