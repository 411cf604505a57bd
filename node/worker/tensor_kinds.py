"""Tensors that a script may have and no site can share: each is refused by name, with what to do."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from atoll.protocol.errors import ConfigError


def check_kind(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for one without a shape yet, and for one whose values are within a class of a library."""
    if is_lazy(tensor):
        raise ConfigError(
            f"{name!r} has no shape yet (a module of torch.nn.Lazy...): run one batch through the model before "
            "atoll.join, and make the optimizer after that"
        )
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(local):
        return
    kind = type(local).__name__
    advice = "convert it to a plain tensor before atoll.join, or keep it outside of the modules given to it"
    if "float8" in kind.lower():
        advice = (
            "leave out enable_fsdp_float8_all_gather=True of torchao's Float8LinearConfig: products in float8 need no "
            "such parameters"
        )
    raise ConfigError(f"{name!r} is a {kind}, a tensor of a kind of its own, whose values atoll cannot share: {advice}")
