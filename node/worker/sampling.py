"""Which samples a site draws: a pure function of its seed (`local_protocol.data_seed`) and an index. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.protocol.errors import ConfigError


def window_offsets(seed: int, index: int, batch_size: int, num_positions: int) -> npt.NDArray[np.int64]:
    """Where the sequences of batch `index` start: `batch_size` draws from [0, num_positions), with replacement.

    The raw stream of Philox is the same for all versions of numpy; the methods of Generator are not.
    """
    if num_positions < 1:
        raise ConfigError("the training data is shorter than one sequence; lower trainer.sequence or add data")
    stream = np.random.Philox(key=[seed, 0], counter=[0, index, 0, 0])
    raw = stream.random_raw(batch_size)
    return (raw % np.uint64(num_positions)).astype(np.int64)
