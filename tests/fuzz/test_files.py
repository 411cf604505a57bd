"""Files of a node's and a coordinator's disk, damaged in any way: what is read is what was written, or it is an error
that says so."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.node.daemon.home import Home
from atoll.node.dataplane import safetensors_file, saved_manifest, saved_model
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.worker.token_index import open_packed
from atoll.protocol.errors import AtollError, ConfigError, HostError, StateError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import data_plane as dp
from tests.harness.coordinator_story import Story, ranges_of, some_settings
from tests.harness.fuzzing import damaged, fuzz
from tests.harness.packed import make_tokenizer, write_packed

LAYOUT = dp.layout()


@contextmanager
def scratch() -> Iterator[Path]:
    """hypothesis calls a test many times; pytest makes one folder for all."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        yield Path(folder)


def damage(data: st.DataObject, path: Path) -> None:
    path.write_bytes(data.draw(damaged(path.read_bytes())))


@st.composite
def spots(draw: st.DrawFn, size: int) -> tuple[int, bytes]:
    return draw(st.integers(0, size - 1)), draw(st.binary(min_size=1, max_size=40))


def overwrite(data: st.DataObject, path: Path) -> None:
    """A few bytes anywhere, or a torn end: cheaper than `damage` for large files."""
    with path.open("r+b") as file:
        at, written = data.draw(spots(max(1, path.stat().st_size)))
        if data.draw(st.integers(0, 4)) == 0:
            file.truncate(at)
        else:
            file.seek(at)
            file.write(written)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`state`, `log` and `model` of a site at commit 1."""
    folder = tmp_path_factory.mktemp("whole")
    outer = dp.seeded(folder / "state", LAYOUT)
    log = PayloadLog(folder / "log", LAYOUT, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
    found = dp.payloads(outer)
    dp.logged(log, outer, 1, found)
    dp.apply_all(outer, found, 1)
    dp.save(folder / "model", outer, LAYOUT, ("momentum",), {"run_step": 20, "run_tokens": 5, "settings": {}})
    log.close()
    return folder


@fuzz(60)
@given(data=st.data())
def test_a_payload_log_gives_whole_payloads_or_none(whole: Path, data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(whole / "log", folder / "log")
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(sorted((folder / "log").iterdir())))
            if path.stat().st_size:
                overwrite(data, path)
        original = PayloadLog(whole / "log", LAYOUT, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
        log = PayloadLog(folder / "log", LAYOUT, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
        try:
            for commit in log.commits():
                assert commit in original.commits()
                for chunk in [c.index for c in LAYOUT.chunks[: LAYOUT.num_sync_chunks] if c.num_elements]:
                    try:
                        assert log.read(commit.commit, chunk) == original.read(commit.commit, chunk)
                    except StateError:
                        pass
        finally:
            log.close()
            original.close()


@fuzz(60)
@given(data=st.data())
def test_an_outer_state_holds_only_chunks_that_have_their_hash(whole: Path, data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(whole / "state", folder / "state")
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(sorted((folder / "state").iterdir())))
            if path.stat().st_size:
                overwrite(data, path)
        reference = OuterState.open(whole / "state", LAYOUT, ("momentum",), dp.RUN)
        written = {chunk: reference.read(chunk) for chunk in range(len(LAYOUT.chunks))}
        try:
            outer = OuterState.open(folder / "state", LAYOUT, ("momentum",), dp.RUN)
        except StateError:
            return
        for chunk in range(len(LAYOUT.chunks)):
            if chunk not in outer.missing:
                found = outer.read(chunk)
                assert found == written[chunk] or found.version < written[chunk].version


@fuzz(100)
@given(data=st.data())
def test_a_saved_model_is_restored_whole_or_refused(whole: Path, data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(whole / "model", folder / "model")
        for _ in range(data.draw(st.integers(0, 2))):
            overwrite(data, data.draw(st.sampled_from(sorted((folder / "model").iterdir()))))
        outer = OuterState.create(folder / "state", LAYOUT, ("momentum",), dp.RUN)
        try:
            saved_model.restore(folder / "model", outer)
        except ConfigError:
            return
        assert outer.commit == 0
        assert outer.state_hash() == saved_manifest.load_manifest(whole / "model").state_hash


JSON = st.recursive(
    st.none() | st.integers(-1, 3) | st.sampled_from(["", "F32", float("inf"), float("nan"), 1 << 70, "\ud800", True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "shape"]), inner),
    max_leaves=3,
)


@fuzz(200)
@given(data=st.data())
def test_any_manifest_file_is_understood_or_refused(whole: Path, data: st.DataObject) -> None:
    table: Any = json.loads((whole / "model" / saved_manifest.MANIFEST_NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        part = data.draw(st.sampled_from([table, *table["tensors"]]) if table.get("tensors") else st.just(table))
        if isinstance(part, dict) and part:
            part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
        if not isinstance(table.get("tensors"), list):
            break
    with scratch() as folder:
        path = folder / saved_manifest.MANIFEST_NAME
        path.write_text(json.dumps(table))
        if data.draw(st.booleans()):
            damage(data, path)
        try:
            saved_manifest.load_manifest(path)
        except ConfigError:
            pass


OFFSETS = st.lists(
    st.sampled_from([0, 4, 8, -1, 1 << 70, float("inf"), float("nan"), "4", None, True, 2.5]), max_size=3
)


@fuzz(200)
@given(st.dictionaries(st.sampled_from(["w", "__metadata__", ""]), JSON | st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "", 3, None]), "shape": JSON, "data_offsets": OFFSETS | JSON}
)), st.sampled_from([0, 0, 0, 1, -1, 1 << 62, 99]))  # fmt: skip
def test_any_safetensors_header_is_understood_or_refused(header: dict[str, Any], longer: int) -> None:
    text = json.dumps(header).encode()
    with scratch() as folder:
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", max(0, len(text) + longer)) + text + bytes(8))
        try:
            reader = safetensors_file.Reader(path)
        except ConfigError:
            return
        try:
            for name in header:
                try:
                    size = reader.num_bytes(name, "F32")
                    assert 0 <= size <= 8
                    assert len(reader.read(name, 0, size)) == size
                except ConfigError:
                    pass
        finally:
            reader.close()


SMALL_FILES = st.one_of(
    st.sampled_from(
        [b"", b"7", b"-5", b"0", b"1" * 25, b"1" * 5000, b" 3\n", b"atoll-\0", b"atoll-x", b"\xff", bytes(32)]
    ),
    st.binary(max_size=40),
)


@fuzz(150)
@given(
    st.fixed_dictionaries({}, optional={"incarnation": SMALL_FILES, "socket_folder": SMALL_FILES, "lock": SMALL_FILES}),
    st.none() | SMALL_FILES,
)
def test_any_home_folder_opens_with_a_usable_identity_or_is_an_error(
    files: dict[str, bytes], key: bytes | None
) -> None:
    with scratch() as folder:
        (folder / "home").mkdir(0o700)
        for name, content in (files if key is None else files | {"key": key}).items():
            (folder / "home" / name).write_bytes(content)
        try:
            home = Home(folder / "home")
        except HostError:
            return
        try:
            assert len(home.key) == 32
            assert 0 < home.incarnation < 1 << 63
        finally:
            home.close()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Persisted]:
    """The store of a coordinator that was killed in the second sync, as a file without its log; what is read of it."""
    path = tmp_path_factory.mktemp("store") / "run.db"
    store = SqliteStore(path)
    story = Story(some_settings(), store=store)
    story.start("a", "b")
    story.wants("a", 50)
    story.wants("b", 50)
    story.ready("a", data=ranges_of("0-9"))
    story.ready("b", data=ranges_of("50-59"))
    story.done("a", "s0")
    story.done("b", "s0")
    story.ready("a", data=ranges_of("10-19"))
    story.ready("b", data=ranges_of("60-69"))
    store.close()
    copy = SqliteStore(Path(shutil.copy(path, path.with_name("copy.db"))))
    persisted = copy.begin(some_settings())
    copy.close()
    return path, persisted


@fuzz(100)
@given(data=st.data())
def test_a_damaged_store_is_what_was_written_or_refused(database: tuple[Path, Persisted], data: st.DataObject) -> None:
    written, wanted = database
    with scratch() as folder:
        path = folder / "run.db"
        shutil.copy(written, path)
        overwrite(data, path)
        empty = path.stat().st_size == 0  # no store yet: the sites refuse what is begun there
        store = None
        try:
            store = SqliteStore(path)
            assert empty or store.begin(some_settings()) == wanted
        except AtollError:
            pass
        finally:
            if store is not None:
                store.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    tokenizer = make_tokenizer(folder)
    write_packed(folder / "tokens", tokenizer, shard_tokens=1000)
    return folder / "tokens"


@fuzz(200)
@given(data=st.data())
def test_a_damaged_index_of_tokens_fits_its_files_or_is_refused(packed: Path, data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(packed, folder / "tokens")
        damage(data, folder / "tokens" / "index.json")
        if data.draw(st.integers(0, 3)) == 0:
            overwrite(data, data.draw(st.sampled_from(sorted((folder / "tokens").glob("*.bin")))))
        try:
            found = open_packed(folder / "tokens")
        except ConfigError:
            return
        assert len(found.index.fingerprint) == 32
        for shard in found.index.shards:
            assert (folder / "tokens" / shard.name).stat().st_size == 2 * shard.num_tokens
