"""Which values ranks can map of the outer file in place of PUBLISH, and whether a run gains by it."""

from __future__ import annotations

import mmap

from atoll.protocol.layout import Chunk, Layout, Role
from atoll.protocol.sync_settings import SyncSettings

PAGE_BYTES = mmap.PAGESIZE


def has_pages(chunk: Chunk) -> bool:
    """Whether its values are whole pages of PUBLISH, as they are of a place in the outer file: large places begin at a
    page, as their sizes are multiples of pages and the largest come first."""
    return (
        chunk.role is Role.TRAINABLE
        and chunk.num_strips == 1
        and chunk.num_bytes > 0
        and chunk.num_bytes % PAGE_BYTES == 0
        and chunk.offset_bytes % PAGE_BYTES == 0
    )


def can_read_in_place(layout: Layout, sync: SyncSettings) -> bool:
    """Whether the run lets ranks read the outer values in place, and most of these fill whole pages."""
    in_place_bytes = sum(chunk.num_bytes for chunk in layout.chunks if has_pages(chunk))
    return sync.may_read_in_place and 2 * in_place_bytes > layout.buffer_bytes
