"""What the tests of tests/fuzz share: bounded, repeatable hypothesis settings, and strategies for messages and bytes.

The examples are the same at every run, whatever else is loaded (`same_draws`). `ATOLL_FUZZ_TIMES=50 pytest tests/fuzz`
draws that many times more, and others each time; hypothesis prints what repeats a failure.
"""

from __future__ import annotations

import dataclasses
import os
import tracemalloc
import types
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.layout import Manifest, Role, TensorSpec

_TIMES = int(os.environ.get("ATOLL_FUZZ_TIMES", "0"))
_UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

T = TypeVar("T")


def fuzz(max_examples: int = 100, **more: Any) -> settings:
    return settings(
        max_examples=max_examples * max(1, _TIMES),
        derandomize=not _TIMES,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=_UNHURRIED,
        **more,
    )


# --- values: mostly small ones, which meet those that are in use, and the ends of each type

SMALL = st.integers(0, 4)
UINT32 = st.one_of(SMALL, SMALL, st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 32) - 1]))
UINT64 = st.one_of(SMALL, SMALL, st.sampled_from([1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
SINT32 = st.one_of(st.integers(-2, 4), st.sampled_from([-(1 << 31), (1 << 31) - 1]))
SINT64 = st.one_of(st.integers(-2, 4), st.sampled_from([-(1 << 63), (1 << 63) - 1]))
FLOATS = st.one_of(
    st.sampled_from([0.0, 1.0, 0.25, -1.0, 1e300, -1e300, 5e-324]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
ANY_FLOATS = st.one_of(FLOATS, st.sampled_from([float("nan"), float("inf"), float("-inf")]))
TEXTS = st.one_of(st.sampled_from(["", "a", "b", "run", "a:1"]), st.text(max_size=8))
HASHES = st.sampled_from([b"", bytes(32), b"\1" * 32, b"\2" * 31])

MANIFESTS = st.sampled_from(
    [
        Manifest(tensors=()),
        Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)]),
        Manifest.canonical([TensorSpec(name="f", shape=(2,), dtype="BF16", role=Role.FROZEN)]),
        Manifest.canonical([TensorSpec(name="w", shape=(1 << 40,), dtype="F32", role=Role.TRAINABLE)]),
    ]
)

_TYPES = {13: "uint32", 7: "uint32", 4: "uint64", 17: "sint32", 5: "int32", 3: "int64", 18: "sint64",
          1: "double", 2: "float", 8: "bool", 9: "string", 12: "bytes", 14: "enum", 11: "message"}  # fmt: skip


def instances(cls: type[T], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Any `cls` of messages.py that can be written to the wire; `fixed` replaces the strategy of fields by name."""
    hints = get_type_hints(cls)
    kinds = {f.name: _TYPES[f.type] for f in wire._proto_class(cls.__name__).DESCRIPTOR.fields}
    return st.builds(cls, **{n: fixed[n] if n in fixed else _field(hints[n], kind) for n, kind in kinds.items()})


def _field(hint: Any, kind: str) -> st.SearchStrategy[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (a for a in get_args(hint) if a is not type(None))
        return st.none() | _field(hint, kind)
    if get_origin(hint) is tuple:
        return st.lists(_field(get_args(hint)[0], kind), max_size=3).map(tuple)
    if hint is Manifest:
        return MANIFESTS
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return instances(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return {"uint32": UINT32, "sint32": SINT32, "uint64": UINT64, "int64": SINT64, "sint64": SINT64}[kind]
    if hint is float:
        return FLOATS
    if hint is str:
        return TEXTS
    if hint is bytes:
        return HASHES
    assert issubclass(hint, IntEnum), hint
    return st.sampled_from(list(hint))


# --- protobuf messages with any content, whether a dataclass could hold it or not

_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "uint32": UINT32,
    "uint64": UINT64,
    "sint32": SINT32,
    "int32": SINT32,
    "int64": SINT64,
    "sint64": SINT64,
    "double": ANY_FLOATS,
    "float": ANY_FLOATS,
    "bool": st.booleans(),
    "string": TEXTS,
    "bytes": st.one_of(HASHES, st.binary(max_size=40)),
    "enum": st.integers(0, 12),
}


@st.composite
def protos(draw: st.DrawFn, cls: type[Message]) -> Any:
    """Any message of a generated class."""
    out = cls()
    _fill(draw, out)
    return out


def _fill(draw: st.DrawFn, out: Message) -> None:
    chosen = {o.name: draw(st.sampled_from([f.name for f in o.fields])) for o in out.DESCRIPTOR.oneofs}
    for field in out.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and chosen[oneof.name] != field.name:
            continue
        kind = _TYPES[field.type]
        if kind == "message":
            if field.is_repeated:
                for _ in range(draw(st.integers(0, 2))):
                    _fill(draw, getattr(out, field.name).add())
            elif oneof is not None or draw(st.booleans()):
                getattr(out, field.name).SetInParent()
                _fill(draw, getattr(out, field.name))
        elif field.is_repeated:
            getattr(out, field.name).extend(draw(st.lists(_SCALARS[kind], max_size=3)))
        else:
            setattr(out, field.name, draw(_SCALARS[kind]))


# --- bytes


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with some bytes changed, cut out, repeated, or its end torn off; sometimes quite other bytes."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "end", "other"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if data:
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "cut":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "end":
                del data[at:]
            case "other":
                data = bytearray(draw(st.binary(max_size=64)))
    return bytes(data)


# --- memory


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that Python objects and arrays took while `call` ran, beyond what was there."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def messages_of(said_by: type[Any]) -> tuple[type[Any], ...]:
    """Those of one side of a session."""
    known = (cls for cls in vars(m).values() if isinstance(cls, type) and issubclass(cls, said_by))
    return tuple(cls for cls in known if cls is not said_by)


SITE_MESSAGES = messages_of(m.SiteMessage)
COORDINATOR_MESSAGES = messages_of(m.CoordinatorMessage)
