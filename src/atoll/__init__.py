"""atoll trains one model on many islands of compute joined by thin links.

The public API is lazy: importing atoll imports neither torch nor grpc, so the coordinator can be deployed without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.node.worker.join import join
    from atoll.node.worker.optimizers import SGD, AdamW, OneBitAdam, SignSGD, ZeroOneAdam
    from atoll.node.worker.own_model import SharedModel, share
    from atoll.node.worker.site import Site, Step
    from atoll.node.worker.starting import starting

__all__ = [
    "SGD",
    "AdamW",
    "OneBitAdam",
    "SharedModel",
    "SignSGD",
    "Site",
    "Step",
    "ZeroOneAdam",
    "__version__",
    "join",
    "share",
    "starting",
]
_MODULES = {
    "join": "join",
    "share": "own_model",
    "SharedModel": "own_model",
    "starting": "starting",
    **dict.fromkeys(("AdamW", "OneBitAdam", "SGD", "SignSGD", "ZeroOneAdam"), "optimizers"),
}

try:
    from atoll._version import __version__
except ModuleNotFoundError:  # it is written as atoll is built or installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("atoll.data")
    if name in __all__:
        module = _MODULES.get(name, "site")
        return getattr(importlib.import_module(f"atoll.node.worker.{module}"), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
