"""The run's settings as they arrive in Welcome: every setting, of the right type, within its range; or refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json, validate
from tests.harness.fuzzing import damaged, fuzz

WHOLE = RunSettings(run_id="run")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([1 << 60, -(1 << 70), 1.5, 1e308, "", "int8", "lan"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["sync", "steps", "x"]), inner),
    max_leaves=4,
)


def judge(text: str) -> None:
    try:
        found = settings_from_json(text)
    except InvalidMessage:
        return
    validate(found)
    assert settings_from_json(settings_to_json(found)) == found


@fuzz(300)
@given(st.data())
def test_other_values_are_in_range_or_refused(data: st.DataObject) -> None:
    table = json.loads(settings_to_json(WHOLE))
    for _ in range(data.draw(st.integers(1, 3))):
        part: dict[str, Any] = table
        key = data.draw(st.sampled_from(list(part)))
        if part[key] and isinstance(part[key], dict) and data.draw(st.booleans()):
            part = part[key]
            key = data.draw(st.sampled_from(list(part)))
        if data.draw(st.integers(0, 9)):
            part[key] = data.draw(JSON)
        else:
            del part[key]
    judge(json.dumps(table))


@fuzz(100)
@given(st.one_of(damaged(settings_to_json(WHOLE).encode()).map(lambda b: b.decode("latin-1")), JSON.map(json.dumps)))
def test_any_text_is_settings_or_refused(text: str) -> None:
    judge(text)


def test_a_deep_or_long_text_is_refused() -> None:
    for text in ("[" * 60_000, "x" * (1 << 20), '{"steps": 1' + "0" * 5000 + "}", '{"a":1,"a":1}', '{"seed": 1e999}'):
        try:
            settings_from_json(text)
        except InvalidMessage:
            continue
        raise AssertionError(text[:20])


@fuzz(60)
@given(
    st.lists(st.sampled_from([0, 1, 5, 1 << 10, (1 << 48) - 1]), max_size=3).map(tuple),
    st.sampled_from([0, 1, 4, 1 << 24, 1 << 40]),
    st.sampled_from(list(Role)),
)
def test_any_shape_is_cut_into_chunks_or_refused(shape: tuple[int, ...], chunk_elements: int, role: Role) -> None:
    try:
        layout = Layout(Manifest(tensors=(TensorSpec(name="w", shape=shape, dtype="F32", role=role),)), chunk_elements)
    except (ConfigError, InvalidMessage):
        return
    covered = sum(c.num_elements for c in layout.chunks)
    assert covered == (0 if role is Role.BUFFER_LOCAL else layout.manifest.tensors[0].num_elements)
