"""A saved model: readable by safetensors, whole or not there, and a resumed run starts from it to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from atoll.node.dataplane import best_model, saved_model
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.safetensors_file import Reader
from atoll.node.dataplane.saved_manifest import place_for
from atoll.node.dataplane.saved_model import load_manifest, restore
from atoll.protocol import disk
from atoll.protocol.disk import exchange_names, sync_folder
from atoll.protocol.errors import ConfigError, HostError, StateError
from atoll.protocol.layout import Layout, Role
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import settings_to_json
from tests.harness.chunks import elements_of
from tests.harness.data_plane import (
    RUN,
    an_optimizer,
    apply_all,
    filled,
    layout,
    manifest,
    payloads,
    save,
    seeded,
    tensor,
    update_of,
    values_of,
)

SLOTS = ("momentum",)
INFO: dict[str, Any] = {"run_step": 40, "run_tokens": 2000, "settings": {"run_id": RUN, "seed": 3}}


@pytest.fixture(name="used")
def _used() -> Layout:
    return layout()


@pytest.fixture(name="outer")
def _outer(tmp_path: Path, used: Layout) -> OuterState:
    outer = seeded(tmp_path / "outer", used)
    apply_all(outer, payloads(outer), 1)
    apply_all(outer, payloads(outer, (5, 6)), 2)
    return outer


def fresh(tmp_path: Path, used: Layout, slots: tuple[str, ...] = SLOTS, name: str = "fresh") -> OuterState:
    return OuterState.create(tmp_path / name, used, slots, "next")


def test_it_comes_back_to_the_bit(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "model.safetensors", "outer.safetensors"]
    saved = load_manifest(folder / "manifest.json")
    assert (saved.run_id, saved.commit, saved.run_step, saved.run_tokens) == (RUN, 2, 40, 2000)
    assert saved.state_hash == outer.state_hash()
    assert saved.manifest == manifest()
    assert saved.slots == SLOTS
    assert saved.info["settings"] == INFO["settings"]
    assert load_manifest(folder) == saved
    other = fresh(tmp_path, used)
    restore(folder, other)
    assert other.commit == 0
    assert other.state_hash() == outer.state_hash(), "the hash covers no commit numbers"


def momenta_of(strategy: str, **sync: Any) -> OuterOptimizer:
    return an_optimizer(OuterSettings(optimizer="adamw", momentum=0.9, beta2=0.999), strategy=strategy, **sync)


@pytest.mark.parametrize(
    ("before", "scale"),
    [
        (momenta_of("gradient"), 1.0),
        (momenta_of("momentum", warmup_commits=4), (1 - 0.999**20) / (1 - 0.999**4)),
        (momenta_of("momentum", warmup_commits=9, gradient_doubling=1), (1 - 0.999**20) / (1 - 0.999**4)),
    ],
)
def test_a_variance_that_moved_seldom_is_made_one_that_moved_at_each_step(
    tmp_path: Path, used: Layout, before: OuterOptimizer, scale: float
) -> None:
    """To the run that goes on from it all steps before have moved it: else the first step would be far too long."""
    outer = seeded(tmp_path / "before", used, slots=before.slots)
    for chunk in used.chunks:
        record = outer.read(chunk.index).data
        if chunk.role is Role.TRAINABLE:
            record = np.random.default_rng(chunk.index).random(3 * chunk.num_elements, np.float32).tobytes()
        outer.put(chunk.index, 0 if chunk.role is Role.FROZEN else 20, record)
    info = {"run_step": 20, "run_tokens": 1, "settings": json.loads(settings_to_json(before.settings))}
    save(tmp_path / "model", outer, used, before.slots, info)
    again = fresh(tmp_path, used, before.slots)
    restore(tmp_path / "model", again)
    for chunk in used.chunks:
        was, now = (np.frombuffer(state.read(chunk.index).data, np.uint8) for state in (outer, again))
        if chunk.role is not Role.TRAINABLE:
            assert np.array_equal(was, now)
            continue
        values, momentum, variance = was.view(np.float32).reshape(3, -1)
        restored = now.view(np.float32).reshape(3, -1)
        assert np.array_equal(restored[:2], [values, momentum])
        assert np.array_equal(restored[2], variance * np.float32(scale))


@pytest.mark.parametrize(("strategy", "is_refused"), [("gradient", False), ("momentum", True)])
def test_settings_that_cannot_be_read_are_needed_of_a_run_of_momenta_alone(
    tmp_path: Path, used: Layout, strategy: str, is_refused: bool
) -> None:
    before = momenta_of(strategy, warmup_commits=4 * is_refused)
    settings = json.loads(settings_to_json(before.settings)) | {"needs": ["something of tomorrow"]}
    outer = seeded(tmp_path / "before", used, slots=before.slots)
    save(tmp_path / "model", outer, used, before.slots, {"run_step": 0, "run_tokens": 0, "settings": settings})
    again = fresh(tmp_path, used, before.slots)
    if is_refused:
        with pytest.raises(ConfigError, match=r"does not say how often the variance .* something of tomorrow"):
            restore(tmp_path / "model", again)
        assert again.commit is None, "nothing of it counts"
    else:
        restore(tmp_path / "model", again)
        assert again.state_hash() == outer.state_hash()


def test_safetensors_reads_it(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    save(tmp_path / "model", outer, used, SLOTS, INFO)
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        assert set(file.keys()) == {t.name for t in used.manifest.tensors if t.role is not Role.BUFFER_LOCAL}
        assert json.loads(file.metadata()["tied"]) == {"head": "weight"}
        assert file.metadata()["format"] == "pt"
        weight = file.get_tensor("weight")
        assert weight.shape == (30, 50)
        for chunk in (c for c in used.chunks if used.name_of(c.index) == "weight"):
            assert weight.ravel()[elements_of(chunk)].tobytes() == values_of(outer, chunk.index).tobytes()
        assert file.get_tensor("weight.scale").shape == ()
        assert file.get_tensor("zero").shape == (0, 4)
        assert file.get_tensor("count").dtype == np.int64
        for name, shape in (("mean", [33]), ("frozen", [7, 100])):
            assert file.get_slice(name).get_dtype() == "BF16"
            assert file.get_slice(name).get_shape() == shape
    with safe_open(tmp_path / "model" / "outer.safetensors", "np") as file:
        momentum = file.get_tensor("slot/momentum/weight")
        assert np.abs(momentum).max() > 0
        assert file.get_tensor("value/mean").dtype == np.float32


@pytest.mark.parametrize("chunk_elements", [4, 60, 1000])
def test_a_tensor_has_its_elements_in_order_however_it_is_cut(tmp_path: Path, chunk_elements: int) -> None:
    """Blocks of 2 x 2, 7 x 7 with rests at both edges, and 30 rows by 31 columns."""
    used = layout(chunk_elements)
    outer = seeded(tmp_path / "outer", used)
    save(tmp_path / "model", outer, used, SLOTS, INFO)
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        assert file.get_tensor("weight").tobytes() == tensor(used, filled(used), "weight").tobytes()
    other = fresh(tmp_path, used)
    restore(tmp_path / "model", other)
    assert other.state_hash() == outer.state_hash()


def test_averaged_buffers_are_rounded_in_the_model_and_exact_beside_it(
    tmp_path: Path, used: Layout, outer: OuterState
) -> None:
    save(tmp_path / "model", outer, used, SLOTS, INFO)
    reader = Reader(tmp_path / "model" / "model.safetensors")
    halves = np.frombuffer(reader.read("mean", 0, 66), np.uint16)
    reader.close()
    (mean,) = (c.index for c in used.chunks if c.role is Role.BUFFER_MEAN)
    exact = values_of(outer, mean)
    rounded = (halves.astype(np.uint32) << 16).view(np.float32)
    assert (rounded != exact).any()
    assert np.abs(rounded - exact).max() <= np.abs(exact).max() / 256


def test_saving_again_replaces_the_whole_folder(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO)
    (folder / "stray").write_text("x")
    apply_all(outer, payloads(outer, (9,)), 3)
    save(folder, outer, used, SLOTS, INFO | {"run_step": 60})
    assert load_manifest(folder).commit == 3
    assert not (folder / "stray").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".model")] == []


def test_so_many_earlier_models_stay_beside_the_newest_and_those_of_void_commits_do_not(
    tmp_path: Path, used: Layout, outer: OuterState
) -> None:
    def there() -> dict[str, int]:
        return {path.name: load_manifest(path).commit for path in (tmp_path / "models").iterdir()}

    folder = tmp_path / "models" / "model"
    others = folder.with_name("model.commit-9")
    folder.parent.mkdir()
    others.mkdir()
    (others / "notes").write_text("not a model")
    save(folder.with_name("of_run_2"), seeded(tmp_path / "run 2", used), used, SLOTS, INFO)
    manifest_of_2 = folder.with_name("of_run_2") / "manifest.json"
    manifest_of_2.write_text(manifest_of_2.read_text().replace(RUN, "another"))
    folder.with_name("of_run_2").rename(folder.with_name("model.commit-0"))
    for commit in (3, 4, 5, 6):
        save(folder, outer, used, SLOTS, INFO, 2)
        apply_all(outer, payloads(outer, (commit,)), commit)
    assert (others / "notes").read_text() == "not a model"
    shutil.rmtree(others)
    assert there() == {"model": 5, "model.commit-4": 4, "model.commit-3": 3, "model.commit-0": 0}
    assert load_manifest(folder.with_name("model.commit-0")).run_id == "another"

    again = seeded(tmp_path / "again", used)  # the run went back to commit 3, and commit 4 is another one
    for commit in (1, 2, 3, 4):
        apply_all(again, payloads(again, (commit + 7,)), commit)
    save(folder, again, used, SLOTS, INFO, 2)
    assert there() == {"model": 4, "model.commit-3": 3, "model.commit-0": 0}
    restore(folder, seeded(tmp_path / "restored", used, seed=4))
    save(folder, outer, used, SLOTS, INFO)
    assert there() == {"model": 6, "model.commit-3": 3, "model.commit-0": 0}, "without it nothing else is touched"


@pytest.mark.parametrize("in_the_way", ["notes", "a file", "another run"])
def test_what_lies_where_an_earlier_model_goes_and_is_none_of_the_run_stays(
    tmp_path: Path, used: Layout, outer: OuterState, caplog: pytest.LogCaptureFixture, in_the_way: str
) -> None:
    """A run that goes on from a saved model counts its commits from 0 again, and may save to the same place."""
    folder, place = tmp_path / "model", tmp_path / "model.commit-2"
    if in_the_way == "another run":
        save(place, outer, used, SLOTS, INFO)
        manifest = place / "manifest.json"
        manifest.write_text(manifest.read_text().replace(RUN, "another"))
    elif in_the_way == "notes":
        place.mkdir()
        (place / "notes").write_text("not a model")
    else:
        place.write_text("not a model")

    def there() -> dict[str, bytes]:
        files = [place] if place.is_file() else list(place.iterdir())
        return {path.name: path.read_bytes() for path in files}

    before = there()
    save(folder, outer, used, SLOTS, INFO, 2)
    apply_all(outer, payloads(outer, (3,)), 3)
    save(folder, outer, used, SLOTS, INFO, 2)
    assert there() == before
    restore(folder, seeded(tmp_path / "restored", used, seed=4))
    assert f"the model of commit 2 is not kept: {place} is no saved model of run" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model", "model.commit-2"]


def test_a_model_counts_where_earlier_ones_cannot_be_put_in_order(
    tmp_path: Path, used: Layout, outer: OuterState, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(former: Path, folder: Path, num_earlier: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder.parent))

    monkeypatch.setattr(saved_model, "retire", refuse)
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO, 2)
    assert load_manifest(folder).commit == 2
    assert f"{folder}: the model is there; earlier ones beside it are not as they should be: " in caplog.text


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_model_stays_under_its_own_name_until_another_one_is_or_its_commit_is_void(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    folder, best = tmp_path / "models" / "model", tmp_path / "models" / "model.best"
    saved = {}
    for commit in (2, 3, 4):
        save(folder, outer, used, SLOTS, INFO)
        saved[commit] = (folder / "model.safetensors").read_bytes()
        assert best_model.keep(folder, 9, RUN) is None, "no model of that commit is here"
        assert best_model.keep(folder, 2, RUN) == best, "once it is, the next ones change nothing"
        apply_all(outer, payloads(outer, (commit + 1,)), commit + 1)
    assert (best / "model.safetensors").read_bytes() == saved[2] != saved[4]
    assert best_model.keep(folder, 4, RUN) == best
    assert (best / "model.safetensors").read_bytes() == saved[4]
    restore(best, seeded(tmp_path / "restored", used, seed=4))
    best_model.drop(folder, 4, RUN)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "model.best"]
    best_model.drop(folder, 3, RUN)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_an_interrupted_save_leaves_the_former_one(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO)
    before = load_manifest(folder)
    apply_all(outer, payloads(outer, (9,)), 3)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk.Disk, "write_whole", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(folder, outer, used, SLOTS, INFO)
    assert load_manifest(folder) == before
    save(folder, outer, used, SLOTS, INFO)
    assert load_manifest(folder).commit == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_that_cannot_be_put_in_place_is_named_where_it_lies(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    folder = tmp_path / "model"
    if not is_first:
        save(folder, outer, used, SLOTS, INFO)

    replace = os.replace

    def fails(first: Path, second: Path) -> None:
        if folder in {first, second}:
            raise PermissionError(errno.EPERM, "not permitted")
        replace(first, second)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        patch.setattr(saved_model, "exchange_names", fails)
        says = r"not permitted; the model that was to be there is whole in .*/\.model\.new"
        with pytest.raises(HostError, match=says):
            save(folder, outer, used, SLOTS, INFO)
    os.replace(tmp_path / ".model.new", tmp_path / "found")
    assert load_manifest(tmp_path / "found").commit == outer.commit


class Killed(BaseException):
    pass


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_between_any_two_steps_leaves_a_model_that_every_reader_finds(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(saved_model.log, "warning", lambda text, *_: warned.append(text))
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO)
    if not can_exchange:
        monkeypatch.setattr(disk, "_renameat2", None)
    commit, num_saved, found = 2, 0, set()
    while num_saved == commit - 2:
        commit += 1
        apply_all(outer, payloads(outer, (9,)), commit)
        steps_left = commit - 3  # of this save, before it is killed

        def step(real: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps_left
                if steps_left == 0:
                    raise Killed
                steps_left -= 1
                return real(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step(os.replace))
            patch.setattr(shutil, "rmtree", step(shutil.rmtree))
            patch.setattr(saved_model, "exchange_names", step(exchange_names))
            patch.setattr(saved_model, "sync_folder", step(sync_folder))
            try:
                save(folder, outer, used, SLOTS, INFO)
            except Killed:
                num_saved += 1
        for name in (folder, folder / "manifest.json"):
            assert load_manifest(name).commit in (2, commit - 1, commit)
        restored = fresh(tmp_path, used, name=f"fresh-{commit}")
        restore(folder, restored)
        found.add(folder.exists())
    assert found == ({True} if can_exchange else {True, False}), "each state in between was seen"
    assert num_saved > 4
    assert any("cannot exchange two names" in text for text in warned) is not can_exchange
    place_for(folder)
    assert folder.exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".model")] == []


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    folder = tmp_path / "everything"
    folder.mkdir()
    save(folder, outer, used, SLOTS, INFO)  # an empty folder may go
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter-1").write_text("three years")
    (other / "manifest.json").write_text("{}")  # of something else
    with pytest.raises(ConfigError, match="thesis holds other files than a saved model"):
        save(other, outer, used, SLOTS, INFO)
    assert (other / "chapter-1").read_text() == "three years"
    with pytest.raises(ConfigError, match="chapter-1"):
        save(other / "chapter-1", outer, used, SLOTS, INFO)
    with pytest.raises(ConfigError, match="/proc"):
        save(Path("/proc"), outer, used, SLOTS, INFO)


def test_a_save_through_a_link_and_to_here_goes_where_it_points(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    big, link = tmp_path / "big" / "model", tmp_path / "link"
    big.mkdir(parents=True)
    link.symlink_to(big)
    for step in (1, 2):
        save(link, outer, used, SLOTS, INFO | {"run_step": step})
    assert link.is_symlink()
    assert load_manifest(big).run_step == 2
    monkeypatch.chdir(big)
    save(Path(), outer, used, SLOTS, INFO | {"run_step": 3})
    assert load_manifest(big).run_step == 3


def test_a_save_that_fails_gives_its_room_back(
    tmp_path: Path, used: Layout, outer: OuterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(HostError, match="no space is left"):
        save(tmp_path / "model", outer, used, SLOTS, INFO)
    assert sorted(tmp_path.iterdir()) == before


def test_a_state_between_commits_is_not_saved(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    with pytest.raises(ConfigError, match="settings"):
        save(tmp_path / "model", outer, used, SLOTS, {"run_step": 1, "run_tokens": 1})
    outer.apply(0, payloads(outer, (9,))[0], update_of(3))
    with pytest.raises(StateError, match="not complete"):
        save(tmp_path / "model", outer, used, SLOTS, INFO)


def test_another_model_chunk_size_or_optimizer_is_refused(tmp_path: Path, used: Layout, outer: OuterState) -> None:
    save(tmp_path / "model", outer, used, SLOTS, INFO)
    with pytest.raises(ConfigError, match="slots"):
        restore(tmp_path / "model", fresh(tmp_path, used, ()))
    other = layout(333)
    with pytest.raises(ConfigError, match="chunk_elements"):
        restore(tmp_path / "model", fresh(tmp_path, other, name="other"))


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors"])
def test_damage_is_found_and_named(tmp_path: Path, used: Layout, outer: OuterState, name: str) -> None:
    folder = tmp_path / "model"
    save(folder, outer, used, SLOTS, INFO)
    path = folder / name
    whole = path.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    for damaged in (bytes(data), whole[:-1], whole[:100], b"", b"\xff" * 8 + whole[8:], whole[:8] + b"[]" + whole[10:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged|truncated|not a \.safetensors|lies outside|size"):
            restore(folder, fresh(tmp_path, used))
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigError, match=r"not a \.safetensors file"):
        restore(folder, fresh(tmp_path, used))
    path.unlink()
    with pytest.raises(ConfigError, match="not complete"):
        restore(folder, fresh(tmp_path, used))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "format"),
        ({"commit": -1}, "commit"),
        ({"run_tokens": 1 << 64}, "run_tokens"),
        ({"commit": True}, "commit"),
        ({"run_step": "1"}, "run_step"),
        ({"tensors": 3}, "tensors"),
        ({"tensors": [{"name": "x"}]}, "shape"),
        ({"tensors": []}, "digest"),
        ({"state_hash": "00"}, "state_hash"),
        ({"state_hash": "zz"}, "non-hexadecimal"),
        ({"slots": [1]}, "slots"),
        ({"tied": {"a": 1}}, "tied"),
        ({"run_id": None}, "run_id"),
    ],
)
def test_manifests_that_are_wrong_are_refused(
    tmp_path: Path, used: Layout, outer: OuterState, change: dict[str, Any], text: str
) -> None:
    save(tmp_path / "model", outer, used, SLOTS, INFO)
    path = tmp_path / "model" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"not the manifest of a saved model.*{text}"):
        load_manifest(path)


def test_files_that_are_no_manifest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_manifest(tmp_path / "manifest.json")
    with pytest.raises(ConfigError, match="interrupted save"):
        load_manifest(tmp_path)
    for text in ("", "[]", "{", "3", '{"format": 1}', "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match="not the manifest"):
            load_manifest(tmp_path)


def test_the_manifest_is_read_without_numpy() -> None:
    code = "import sys, atoll.node.dataplane.saved_manifest; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
