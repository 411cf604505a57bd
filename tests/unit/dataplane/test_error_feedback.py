"""What the codec loses of a contribution comes with the next one, and is advanced by a commit alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.node.dataplane.bases import cast_base
from atoll.node.dataplane.error_feedback import ErrorFeedback
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.codecs.table import CODECS
from atoll.protocol.disk import REAL_DISK, Disk
from atoll.protocol.errors import NonFiniteError, StateError
from atoll.protocol.layout import Layout, Role
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunks import cut_out
from tests.harness.data_plane import DTYPES, RUN, apply_all, filled, layout, payloads, seeded

BETA = np.float32(0.9)


def trained_chunks(used: Layout) -> list[int]:
    return [c.index for c in used.chunks if c.role is Role.TRAINABLE and c.num_elements]


def site(
    folder: Path, used: Layout, codec: str, snapshot: memoryview, beta: float = 0.9
) -> tuple[SyncData, ErrorFeedback]:
    sync = SyncSettings(codec=codec, error_feedback=beta)
    errors = ErrorFeedback.create(folder / "errors", used, RunSettings(run_id=RUN, sync=sync), REAL_DISK)
    travels, outer = spec_of(sync, 0, 0), seeded(folder / "outer", used)
    return SyncData(used, travels, outer, snapshot, DTYPES, errors=errors, error_commits=(0,)), errors


def at(data: SyncData, *commits: int) -> SyncData:
    return SyncData(
        data.layout, data.travels, data.outer, data.snapshot, DTYPES, errors=data.errors, error_commits=commits
    )


def through(codec: str, values: Floats) -> Floats:
    out = np.empty_like(values)
    kernels.decode(kernels.encode(codec, values), codec, values.size, out)
    return out


def delta_of(data: SyncData, chunk: int) -> Floats:
    with data.outer.pinned(chunk) as record:
        base = np.array(record.values)
    name = data.layout.name_of(chunk)
    if DTYPES[name] == "BF16":
        cast_base(base.copy(), "BF16", base)
    return base - np.frombuffer(cut_out(data.snapshot, data.layout.chunks[chunk]), np.float32)


def decoded(data: SyncData, chunk: int, codec: str) -> Floats:
    out = np.empty(data.layout.chunks[chunk].num_elements, np.float32)
    kernels.decode(data.contribution(chunk), codec, out.size, out)
    return out


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "fp32"])
def test_what_is_left_over_comes_with_the_next_contribution(tmp_path: Path, codec: str) -> None:
    used = layout()
    data, errors = site(tmp_path, used, codec, filled(used, 1))
    expected: dict[int, Floats] = {}
    for chunk in trained_chunks(used):
        delta = delta_of(data, chunk)
        assert decoded(data, chunk, codec).tobytes() == through(codec, delta).tobytes()
        expected[chunk] = delta - through(codec, delta)
    share = errors.advance(data.chunks, 1, data.left_over, None)
    wanted = np.concatenate([delta_of(data, chunk).astype(np.float64) for chunk in expected])
    lost = np.concatenate([values.astype(np.float64) for values in expected.values()])
    assert share == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(wanted), rel=1e-5)
    then = at(data, 1)
    for chunk, left in expected.items():
        with errors.of(chunk, 1) as found:
            assert found.tobytes() == left.tobytes()
        whole = delta_of(data, chunk) + BETA * left
        assert decoded(then, chunk, codec).tobytes() == through(codec, whole).tobytes()
        expected[chunk] = whole - through(codec, whole)
    errors.advance(then.chunks, 3, then.left_over, None)
    for chunk, left in expected.items():
        with errors.of(chunk, 3) as found:
            assert found.tobytes() == left.tobytes()


def test_a_contribution_is_the_same_until_a_commit_advances_the_error(tmp_path: Path) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "sign1", filled(used, 1))
    first = [data.contribution(chunk) for chunk in trained_chunks(used)]
    assert [data.contribution(chunk) for chunk in trained_chunks(used)] == first
    errors.advance(data.chunks, 1, data.left_over, None)
    assert [data.contribution(chunk) for chunk in trained_chunks(used)] == first, "without the error it is asked for"
    then = [at(data, 1).contribution(chunk) for chunk in trained_chunks(used)]
    assert then != first
    assert [at(data, 1).contribution(chunk) for chunk in trained_chunks(used)] == then


def test_the_error_of_another_commit_is_refused(tmp_path: Path) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "int4", filled(used, 1))
    errors.advance(data.chunks, 2, data.left_over, None)
    chunk = trained_chunks(used)[0]
    for commit in (1, 3):
        with pytest.raises(StateError, match=f"is of commit 2, that of commit {commit} is needed"):
            at(data, commit).contribution(chunk)
    with pytest.raises(StateError):
        errors.advance(data.chunks, 4, at(data, 3).left_over, None)
    at(data, 2).contribution(chunk)


def test_buffers_have_none(tmp_path: Path) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "int8", filled(used, 1))
    buffers = [c for c in data.chunks if used.chunks[c].role is not Role.TRAINABLE]
    before = [data.contribution(chunk) for chunk in buffers]
    errors.advance(data.chunks, 1, data.left_over, None)
    assert [at(data, 1).contribution(chunk) for chunk in buffers] == before


def test_an_error_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    used = layout()
    _, errors = site(tmp_path, used, "int8", filled(used, 1))

    def left_over(chunk: int, out: Floats) -> float:
        out[:] = np.inf
        return 1.0

    with pytest.raises(NonFiniteError, match="'weight' is not finite"):
        errors.advance([0], 1, left_over, None)


def found(errors: ErrorFeedback, sync: SyncSettings, used: Layout, run_id: str = RUN) -> ErrorFeedback | None:
    """What a later start of the node finds."""
    settings = RunSettings(run_id=run_id, sync=sync)
    return ErrorFeedback.found(errors.store.folder, used, settings, REAL_DISK, num_threads=1)


SYNC = SyncSettings(codec="sign1", error_feedback=0.9)


def test_a_later_start_finds_the_error_as_it_was(tmp_path: Path) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "sign1", filled(used, 1))
    errors.advance(data.chunks, 3, data.left_over, None)
    left = {}
    for chunk in trained_chunks(used):
        with errors.of(chunk, 3) as values:
            left[chunk] = values.tobytes()
    again = found(errors, SYNC, used)
    assert again is not None
    assert again.commits() == (3,)
    for chunk, expected in left.items():
        with again.of(chunk, 3) as values:
            assert values.tobytes() == expected


def test_an_error_that_is_not_of_one_commit_counts_for_none(tmp_path: Path) -> None:
    """The node was killed while it advanced it, or a power cut took a part."""
    used = layout()
    data, errors = site(tmp_path, used, "sign1", filled(used, 1))
    assert errors.commits() == (0,)
    errors.advance(data.chunks, 1, data.left_over, None)
    assert errors.commits() == (1,)
    errors.advance(trained_chunks(used)[:1], 2, at(data, 1).left_over, None)
    again = found(errors, SYNC, used)
    assert again is not None
    assert again.commits() == errors.commits() == (None,)


def test_of_files_that_are_not_whole_or_of_another_run_nothing_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "sign1", filled(used, 1))
    errors.advance(data.chunks, 1, data.left_over, None)
    assert found(errors, SyncSettings(codec="sign1"), used) is None, "the run has no error feedback"
    assert not caplog.text
    assert found(errors, SYNC, used, "another") is None
    assert "is not whole, or of another run: it begins anew" in caplog.text
    assert found(errors, SYNC, used) is not None
    (errors.store.folder / "error.index").unlink()
    assert found(errors, SYNC, used) is None


@pytest.mark.parametrize(("commit", "left"), [(2, {1, 2}), (1, {0, 1}), (0, {0}), (-1, {0})])
def test_what_is_of_later_commits_goes_when_the_run_goes_back(tmp_path: Path, commit: int, left: set[int]) -> None:
    """For good: a later start does not find it either, nor after a power cut."""
    used, synced = layout(), list[str]()

    class Watched(Disk):
        def sync(self, path: Path) -> None:
            super().sync(path)
            synced.append(path.name)

    data, errors = site(tmp_path, used, "sign1", filled(used, 1))
    errors.disk = Watched()
    errors.advance(data.chunks, 1, data.left_over, None)
    errors.advance(trained_chunks(used)[:1], 2, at(data, 1).left_over, None)
    errors.roll_back(commit)
    again = found(errors, SYNC, used)
    assert again is not None
    for which in (errors, again):
        assert {which.store.versions[chunk] for chunk in trained_chunks(used)} == left
        assert which.commits() == ((0,) if left == {0} else (None,))
    assert synced == ["error.index"] * (commit < 2)


def test_over_many_syncs_nothing_is_lost(tmp_path: Path) -> None:
    """The sum of what arrives differs from the sum of what was to arrive by one error, however coarse the codec."""
    used = layout()
    data, errors = site(tmp_path, used, "sign1", filled(used, 1), beta=1.0)
    chunk = trained_chunks(used)[0]
    delta = delta_of(data, chunk).astype(np.float64)
    total = np.zeros_like(delta)
    for commit in range(1, 40):
        now = at(data, commit - 1)
        total = total + decoded(now, chunk, "sign1").astype(np.float64)
        errors.advance([chunk], commit, now.left_over, None)
    with errors.of(chunk, 39) as left:
        assert np.allclose(39 * delta - total, left, atol=1e-3 * np.abs(delta).max())
    assert np.linalg.norm(39 * delta - total) < 0.25 * np.linalg.norm(39 * delta)


def test_nothing_is_left_over_of_a_base_that_is_gone(tmp_path: Path) -> None:
    used = layout()
    data, errors = site(tmp_path, used, "int4", filled(used, 1))
    assert isinstance(data.outer, OuterState)
    apply_all(data.outer, payloads(data.outer), 1)
    with pytest.raises(StateError, match="at commit 1 already, and its base is gone"):
        errors.advance(data.chunks, 1, data.left_over, None)
    with errors.of(trained_chunks(used)[0], 0) as left:
        assert not left.size
