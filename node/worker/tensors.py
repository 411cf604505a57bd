"""The tensors of a model as the other sites know them: canonical names, roles, and which slice of each is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from atoll.node.local_protocol import Piece, piece_hash
from atoll.node.worker.naming import AS_SEEN, Naming
from atoll.node.worker.optimizers import rated_groups
from atoll.node.worker.own_frozen import OwnFrozen
from atoll.node.worker.shared_storage import Place, check_shared_storage
from atoll.node.worker.tensor_kinds import check_kind
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import MAX_GROUPS, Manifest, Role, TensorSpec, TiedName
from atoll.protocol.strict import nearest

BufferPolicy = Literal["mean", "summed", "lowest", "local", "constant"]
BUFFER_ROLES: dict[str, Role] = {
    "mean": Role.BUFFER_MEAN,
    "summed": Role.BUFFER_MEAN,
    "lowest": Role.BUFFER_LOWEST,
    "local": Role.BUFFER_LOCAL,
    "constant": Role.FROZEN,
}
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
NUM_FIRST_VALUES = 1024
"""Of a tensor, that tell it from another one that was drawn at random."""
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRANSPARENT_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and activation checkpointing

OWN_PARAMETERS = {
    "DeepSpeed keeps fp32 masters": ("fp32_groups_flat", "single_partition_of_fp32_groups"),
    "Megatron keeps fp32 masters": ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"),
    "apex keeps fp32 masters": ("fp32_from_fp16_groups", "master_weights"),
    "a look-ahead keeps slow weights": ("slow_param", "slow_buffer", "slow_params"),
    "a schedule-free optimizer keeps averaged weights": ("train_mode",),
    "it keeps averaged weights": ("swa_buffer", "ema", "averaged_model", "averager"),
}
"""What optimizers keep parameters of their own for, and the attributes, state keys and group keys that tell of it: they
hold tensors, or an object that has some, and no number."""
DUAL_AVERAGING = frozenset({"MADGRAD", "MirrorMADGRAD", "DAdaptSGD", "DAdaptAdaGrad"})
"""Classes that with momentum go a part of the way to a point of their own in each step, as training might: what they do
does not tell, and before the first step nothing else does."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of the manifest and the slice of it that this rank holds."""

    spec: TensorSpec
    piece: Piece
    parameter: nn.Parameter | None
    owner: nn.Module  # of a buffer
    key: str
    is_summed: bool = False
    """A buffer that training adds to: what was added since a snapshot is kept on top of the mean."""

    def local(self) -> Tensor:
        """This rank's slice, sharing its storage. A buffer is looked up, as modules may replace it."""
        tensor = self.owner._buffers.get(self.key) if self.parameter is None else self.parameter
        if tensor is None:
            raise ConfigError(f"the buffer {self.spec.name!r} was removed from the model after atoll.join")
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @property
    def is_plain(self) -> bool:
        """A trained tensor that does not say itself which other ranks have copies or parts of it, as a DTensor does."""
        return self.spec.role is Role.TRAINABLE and not isinstance(self.parameter, DTensor)

    def with_first_values(self) -> Piece:
        """The piece, with the hash of some of its values."""
        values = self.local().flatten()
        some = values[:: max(1, values.numel() // NUM_FIRST_VALUES)].to("cpu", torch.float32).contiguous()
        return replace(self.piece, first_values=piece_hash(some.numpy().data.cast("B")))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(offset, offset + size) for offset, size in zip(self.piece.offsets, self.piece.sizes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What this rank offers at join; `held[i]` belongs to `pieces[i]`."""

    manifest: Manifest
    held: tuple[Held, ...]
    modules: tuple[nn.Module, ...]
    tied_here: tuple[str, ...] = ()
    """Of tensors with several names, those that a module here has."""
    own_frozen: OwnFrozen | None = None
    """What every site has by itself."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(held.piece for held in self.held)

    @property
    def device(self) -> torch.device:
        """Where this rank's model is."""
        return next((held.local().device for held in self.held), torch.device("cpu"))

    @torch.no_grad()
    def pieces_with_first_values(self) -> tuple[Piece, ...]:
        """The same, with what tells whether other ranks of the site have copies of them."""
        return tuple(held.with_first_values() if held.is_plain else held.piece for held in self.held)

    def mean_buffers_not_finite(self) -> list[str]:
        """Names of buffers that are to be averaged and have no average as they are (a mask of -inf). While no site
        changes one, none is needed: it keeps every bit."""
        return [
            h.spec.name for h in self.held if h.spec.role is Role.BUFFER_MEAN and not bool(h.local().isfinite().all())
        ]

    def reshard(self) -> None:
        """FSDP2: after a forward without backward, modules hold gathered copies; reads and writes go to the shards."""
        reshard(self.modules)

    def check_trained(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ConfigError, naming it, for a parameter that is trained only since join: it would be in no average."""
        known = {identity(h.parameter) for h in self.held if h.parameter is not None and h.spec.role is Role.TRAINABLE}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not parameter.requires_grad or identity(parameter) in known:
                        continue
                    names = (i.name for m in self.modules for i in _walk(m, "") if i.tensor is parameter)
                    raise ConfigError(
                        f"{next(names, 'a parameter')!r} of shape {list(parameter.shape)} was added or unfrozen after "
                        "atoll.join, so the other sites do not know it; join with every parameter that will be trained "
                        "in the optimizer and requires_grad = True"
                    )


def reshard(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    tensor: Tensor
    owner: nn.Module
    key: str


def find_tensors(
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    buffers: Mapping[str, BufferPolicy] | None = None,
    naming: Naming = AS_SEEN,
    *,
    has_own_frozen: bool = False,
) -> ModelTensors:
    """List what `modules` hold, under names that do not depend on wrappers or parallelism.

    `buffers` maps patterns of names (as in fnmatch; the first that fits counts) to policies; else floating-point
    buffers are averaged and all others taken from the lowest contributor. A frozen parameter that a pattern names is a
    buffer too: else it keeps the run's first values. Buffers that are not persistent are left out.
    `has_own_frozen`: of frozen parameters an empty tensor is listed whose name has their hash.
    Raises ConfigError, naming the tensor, for what could not be kept in step with the other sites.
    """
    if not modules:
        raise ConfigError("atoll.join got no model")
    reshard(modules)
    seen = [item for module in modules for item in _walk(module, "")]
    for item in seen:
        check_kind(item.name, item.tensor)
    naming.check(item.name for item in seen)
    found = [replace(item, name=naming.name(item.name)) for item in seen]
    by_tensor: dict[object, list[_Found]] = {}
    names: dict[str, object] = {}
    for item in found:
        key = identity(item.tensor)
        for name in naming.also(item.name):
            if names.setdefault(name, key) != key:
                raise ConfigError(
                    f"two tensors of the modules given to atoll.join have the name {name!r}; put the modules into one "
                    "torch.nn.ModuleDict and join that, or give them other names= or tied="
                )
        by_tensor.setdefault(key, []).append(item)
    _check_optimizers(optimizers, found)
    trained = {identity(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    groups = _groups(optimizers)
    unmatched = set(buffers or {})
    held: list[Held] = []
    own: dict[str, Tensor] = {}
    tied: list[TiedName] = []
    tied_here = set[str]()
    for key, items in by_tensor.items():
        listed, *aliases = sorted(set[str]().union(*(naming.also(item.name) for item in items)), key=str.encode)
        item = replace(next((item for item in items if item.name == listed), items[0]), name=listed)
        _check_tied(items)
        is_trainable = isinstance(item.tensor, nn.Parameter) and item.tensor.requires_grad
        if is_trainable and key not in trained:
            raise ConfigError(
                f"no optimizer given to atoll.join holds the trainable parameter {listed!r}; "
                "give all optimizers, or set requires_grad = False"
            )
        role = _role(item, is_trainable, buffers or {}, unmatched)
        if role is Role.BUFFER_LOCAL and not _can_be_listed(item.tensor):
            continue  # each site's own affair: complex numbers, sparse layouts
        if role is Role.FROZEN and has_own_frozen:
            own[listed] = item.tensor
            continue
        tied += [TiedName(alias=alias, name=listed) for alias in aliases]
        tied_here |= {each.name for each in items} if aliases else set()
        if role is Role.TRAINABLE and groups and any(id(i.tensor) not in groups for i in items):
            raise ConfigError(
                f"{listed!r} has the memory of another parameter, or the optimizer trains another object in its place; "
                "where the nodes do the steps they have to be one Parameter: assign it, in place of a view of its data"
            )
        policy = next((p for pattern, p in (buffers or {}).items() if fnmatchcase(item.name, pattern)), "")
        is_summed = role is Role.BUFFER_MEAN and policy == "summed"
        held.append(_held(item, role, groups[id(item.tensor)] if groups and role is Role.TRAINABLE else 0, is_summed))
    own_frozen = OwnFrozen(own) if has_own_frozen else None
    if own_frozen is not None:
        stand_in = _Found(own_frozen.name, own_frozen.mark, own_frozen, own_frozen.key)
        held.append(_held(stand_in, Role.BUFFER_LOCAL, 0, False))
    if unmatched:
        pattern = min(unmatched)
        known = [i.name for i in found if not (isinstance(i.tensor, nn.Parameter) and i.tensor.requires_grad)]
        raise ConfigError(f'buffers: no buffer and no frozen parameter is named "{pattern}"; {nearest(pattern, known)}')
    if not any(h.spec.role is Role.TRAINABLE for h in held):
        raise ConfigError("the model given to atoll.join has no trainable parameter")
    check_shared_storage(
        Place(h.spec.name, h.local(), h.spec.role is Role.FROZEN) for h in held if h.spec.role is not Role.BUFFER_LOCAL
    )
    held.sort(key=lambda h: h.spec.name.encode())
    manifest = Manifest.canonical([h.spec for h in held], tied)
    return ModelTensors(manifest, tuple(held), tuple(modules), tuple(sorted(tied_here)), own_frozen)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under their canonical names."""
    return ((item.name, item.tensor) for item in _walk(module, ""))


def _walk(module: nn.Module, prefix: str) -> Iterator[_Found]:
    """Parameters and persistent buffers with canonical names; a wrapper adds nothing to a name."""
    if isinstance(module, AveragedModel):
        raise ConfigError(
            f"{prefix or 'the model'} is an AveragedModel, which the other sites' updates would not reach; "
            "join the model that is trained"
        )
    if isinstance(module, FullyShardedDataParallel):
        raise ConfigError(f"{prefix or 'the model'} is wrapped by FSDP1; shard it with fully_shard (FSDP2) instead")
    inner = next((module._modules[name] for name in TRANSPARENT_CHILDREN if name in module._modules), None)
    if isinstance(module, DistributedDataParallel | DataParallel):
        inner = module.module
    if inner is not None:
        yield from _walk(inner, prefix)
        return
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield _Found(prefix + key, parameter, module, key)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield _Found(prefix + key, buffer, module, key)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def identity(tensor: Tensor) -> object:
    """Equal for tied tensors: the same object, or another one on the same memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    if local.numel() == 0 or local.is_meta or local.layout is not torch.strided:
        return id(tensor)
    place = local.untyped_storage().data_ptr(), local.storage_offset()
    return local.device, place, tuple(local.shape), local.stride(), tuple(tensor.shape), tensor.dtype


def _check_tied(items: Sequence[_Found]) -> None:
    """The same memory under several names is one tensor only if all of them say what is done with it."""
    buffers = [item.name for item in items if not isinstance(item.tensor, nn.Parameter)]
    parameters = [item for item in items if isinstance(item.tensor, nn.Parameter)]
    if buffers and parameters:
        raise ConfigError(
            f"the buffer {min(buffers)!r} is the memory of the parameter {parameters[0].name!r}, and cannot be "
            "synchronized as both; register it with persistent=False, or with .clone() as a buffer of its own"
        )
    frozen = [item.name for item in parameters if not item.tensor.requires_grad]
    if frozen and len(frozen) < len(parameters):
        trained = next(item.name for item in parameters if item.tensor.requires_grad)
        raise ConfigError(
            f"{frozen[0]!r} is frozen (requires_grad = False) and the memory of {trained!r}, which is trained; "
            "make them one Parameter, or give the frozen one memory of its own with .clone()"
        )


def _role(item: _Found, is_trainable: bool, policies: Mapping[str, BufferPolicy], unmatched: set[str]) -> Role:
    if is_trainable:
        return Role.TRAINABLE
    role = Role.BUFFER_MEAN if item.tensor.is_floating_point() else Role.BUFFER_LOWEST
    if isinstance(item.tensor, nn.Parameter):
        role = Role.FROZEN
    fits = [pattern for pattern in policies if fnmatchcase(item.name, pattern)]
    unmatched.difference_update(fits)
    if fits:
        policy = policies[fits[0]]
        if policy not in BUFFER_ROLES:
            raise ConfigError(f'buffers["{fits[0]}"] is {policy!r}; {nearest(str(policy), BUFFER_ROLES)}')
        role = BUFFER_ROLES[policy]
    return role


def _can_be_listed(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPE_NAMES and tensor.layout is torch.strided


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """By the id of each parameter whose rates the node needs, the number of its group among those of all optimizers."""
    rated = [optimizer.param_groups[number] for optimizer, number in rated_groups(optimizers)]
    if len(rated) > MAX_GROUPS:
        raise ConfigError(f"the optimizers have {len(rated)} parameter groups; at most {MAX_GROUPS} are possible")
    return {id(p): number for number, group in enumerate(rated) for p in group["params"]}


def _held(item: _Found, role: Role, group: int, is_summed: bool) -> Held:
    tensor, name = item.tensor, item.name
    if tensor.is_meta:
        raise ConfigError(f"{name!r} is on the meta device; give the model its values before atoll.join")
    if not _can_be_listed(tensor):
        what = f"layout {tensor.layout}" if tensor.layout is not torch.strided else f"dtype {tensor.dtype}"
        is_buffer = not isinstance(tensor, nn.Parameter)
        raise ConfigError(
            f"{name!r} has the {what}, which cannot be synchronized"
            + (f'; leave it to each site: atoll.join(..., buffers={{"{name}": "local"}})' if is_buffer else "")
        )
    dtype = DTYPE_NAMES[tensor.dtype]
    if role is Role.TRAINABLE and tensor.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(f"{name!r} is trained as {tensor.dtype}; use float32, bfloat16 or float16")
    if role is Role.BUFFER_MEAN and tensor.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(
            f"the buffer {name!r} of {tensor.dtype} cannot be averaged; choose another policy: "
            f'atoll.join(..., buffers={{"{name}": "lowest"}}) or "local"'
        )
    offsets, sizes = slice_of(tensor, name)
    shape = tuple(tensor.shape)
    return Held(
        spec=TensorSpec(
            name=name, shape=shape, dtype="F32" if role is Role.TRAINABLE else dtype, role=role, group=group
        ),
        piece=Piece(name=name, offsets=offsets, sizes=sizes, dtype=dtype),
        parameter=tensor if isinstance(tensor, nn.Parameter) else None,
        owner=item.owner,
        key=item.key,
        is_summed=is_summed,
    )


def slice_of(tensor: Tensor, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's slice of the full tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(f"{name!r} is a partial sum over ranks ({tensor.placements}); reduce it before atoll.join")
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * len(shape), (0,) * len(shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(tensor._local_tensor.shape) != tuple(sizes):
        raise ConfigError(
            f"{name!r}: this rank holds {list(tensor._local_tensor.shape)}, its placement says {list(sizes)}"
        )
    # An empty shard's offset may lie behind the end.
    return tuple(min(o, n - s) for o, n, s in zip(offsets, shape, sizes, strict=True)), tuple(sizes)


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], found: Sequence[_Found]) -> None:
    known = {identity(item.tensor) for item in found}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"atoll.join got a {kind} as optimizer; give the torch.optim.Optimizer inside it")
        kept = (*optimizer.state.values(), *optimizer.param_groups)
        for reason, marker in ((reason, marker) for reason, markers in OWN_PARAMETERS.items() for marker in markers):
            values = [of[marker] for of in kept if marker in of]
            is_switch = marker == "train_mode" and values  # off while a model is evaluated
            if is_switch or any(map(_is_used, (*values, getattr(optimizer, marker, None)))):
                raise ConfigError(
                    f"{kind} would overwrite what comes from the other sites ({reason}: {marker!r}); "
                    "use an optimizer that changes the model's parameters in place"
                )
        has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        if has_momentum and not DUAL_AVERAGING.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__):
            raise ConfigError(
                f"{kind} would overwrite what comes from the other sites (dual averaging with momentum: each step goes "
                "on towards a point of its own, which no update reaches); use an optimizer that changes the model's "
                "parameters in place"
            )
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if identity(parameter) not in known:
                    raise ConfigError(
                        f"{kind} trains a parameter of shape {list(parameter.shape)} (group {index}) that is in no "
                        "module given to atoll.join; give all modules, for example as a list"
                    )


def _is_used(value: object) -> bool:
    """Whether it may be parameters, or a switch that says that there are some."""
    if isinstance(value, list | tuple | dict):
        return any(map(_is_used, value.values() if isinstance(value, dict) else value))
    if isinstance(value, Tensor):
        return value.dim() > 0
    return value is True or not (value is None or isinstance(value, bool | int | float | str))
