"""atoll trains one model on many islands of compute joined by thin links.

The public API is lazy: importing atoll imports neither torch nor grpc, so the coordinator can be deployed without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.node.worker.site import Site, Step, join

__all__ = ["Site", "Step", "__version__", "join"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("join", "Site", "Step"):
        return getattr(importlib.import_module("atoll.node.worker.site"), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
