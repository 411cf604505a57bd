"""What of a mapping is in memory as pages of this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def mapped_bytes(buffer: memoryview) -> int:
    """Of it, in this process."""
    start = f"{np.frombuffer(buffer, np.uint8).ctypes.data:x}-"
    _, _, entry = ("\n" + Path("/proc/self/smaps").read_text()).partition("\n" + start)
    return int(entry.split("Rss:", 1)[1].split()[0]) << 10
