"""Whole runs in which one site has two processes and another has one: the example, and the built-in trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atoll.coordinator import admin
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun, Status

LIMIT_S = 150.0
DIGITS, OWN_MODEL = (Path(__file__).parents[2] / "examples" / name for name in ("digits.py", "own_model.py"))
SETTINGS = RunSettings(
    run_id="ranks", steps=40, min_sites=2, data="local", time_limits="local", sync=SyncSettings(every=10)
)
pytestmark = pytest.mark.timeout(400)


def ends_well(run: LocalRun, tokens_a_sample: int) -> None:
    assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
    hashes = run.hashes(4)
    assert sorted(hashes) == ["one", "two"]
    assert len(set(hashes.values())) == 1, hashes
    status = run.status()
    assert status["state_hash"] == hashes["one"]
    assert {site["num_ranks"] for site in status["sites"]} == {1, 2}
    samples = {line["site"]: line["num_done"] for line in status["data"]}
    assert sorted(samples) == ["one", "two"]
    assert sum(samples.values()) * tokens_a_sample == status["run_tokens"]


def test_the_example_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("one", [str(DIGITS)], launcher="python")
        run.start_node("two", [str(DIGITS)], launcher="python", extra=["--ranks", "2"])
        ends_well(run, 1)
        for name in ("one", "two"):
            log = (run.home(name) / "node.log").read_text()
            found = re.search(r"\[rank 0\] step 40: ([0-9.]+)% of 360 test images are right", log)
            assert found, log
            assert float(found[1]) > 80, "an untrained model has 10"


@pytest.mark.parametrize(
    "layout",
    ["pp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)],
)
def test_a_model_of_a_script_is_shared_as_the_node_is_told(tmp_path: Path, layout: str) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("one", [str(OWN_MODEL)], launcher="python")
        shared = ["--parallel", layout] if layout else ["--ranks", "2"]
        run.start_node("two", [str(OWN_MODEL)], launcher="python", extra=shared)
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        status = run.status()
        assert run.hashes(4) == dict.fromkeys(("one", "two"), status["state_hash"])
        samples = {line["site"]: line["num_done"] for line in status["data"]}
        assert sum(samples.values()) * 64 == status["run_tokens"]
        said = [(run.home(name) / "node.log").read_text() for name in ("one", "two")]
        losses = [float(text) for log in said for text in re.findall(r"step 40: loss ([0-9.]+)", log)]
        assert losses, said
        assert max(losses) < 4.0, "an untrained model has 5.5"


def test_a_script_that_cannot_be_shared_so_ends_its_site_at_once(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("one", [str(OWN_MODEL)], launcher="python", extra=["--parallel", "cp=2"])
        run.start_node("two", [str(DIGITS)], launcher="python", extra=["--parallel", "dp_shard=2"])
        assert run.wait_all(LIMIT_S) == dict.fromkeys(("one", "two"), ConfigError.exit_code)
        logs = {name: (run.home(name) / "node.log").read_text() for name in run.nodes}
        assert "--parallel cp=2 is of the built-in model; leave out cp" in logs["one"]
        assert "the script does not share its model by atoll.share" in logs["two"]


LAYOUTS = {"one": "", "two": "dp_shard=2,offload=1", "four": "tp=2,sequence_parallel=1,pp=2"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return folder


def of_shapes(min_sites: int, steps: int) -> RunSettings:
    """The smallest built-in model that four ranks can share."""
    return replace(
        SETTINGS,
        min_sites=min_sites,
        steps=steps,
        model=ModelSettings(
            dim=32, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=64, max_sequence=32, tie_embeddings=True
        ),
        trainer=TrainerSettings(batch_size=4, sequence=32),
    )


def contributors(status: Status) -> set[str]:
    """Of the newest commit."""
    commits = status["commits"]
    return set(commits[-1]["contributors"]) if commits else set()


def start(run: LocalRun, name: str, text: Path, layout: str) -> None:
    shared = ["--parallel", layout] if layout else []
    run.start_node(name, launcher="python", extra=["--data", str(text), *shared])


def test_sites_of_different_shapes_train_one_model(tmp_path: Path, text: Path) -> None:
    with LocalRun(tmp_path, of_shapes(min_sites=3, steps=40)) as run:
        run.start_coordinator()
        for name, layout in LAYOUTS.items():
            start(run, name, text, layout)
        assert run.wait_all(LIMIT_S) == dict.fromkeys(LAYOUTS, 0)
        status = run.status()
        assert run.hashes(4) == dict.fromkeys(LAYOUTS, status["state_hash"])
        assert {site["name"]: site["num_ranks"] for site in status["sites"]} == {"one": 1, "two": 2, "four": 4}
        # A step of a site is four sequences, however many ranks share it; each is in the account once. How many steps a
        # contribution has is not a matter of shapes: a site that is not waited for brings those of later syncs too.
        samples = {line["site"]: line["num_done"] for line in status["data"]}
        assert {num % 4 for num in samples.values()} == {0}
        assert min(samples.values()) >= 40
        assert sum(samples.values()) * 32 == status["run_tokens"]


def with_experts(settings: RunSettings) -> RunSettings:
    model = replace(settings.model, num_experts=4, num_shared_experts=1, router_bias_rate=0.01)
    return replace(settings, model=model)


def test_experts_are_shared_by_ranks_at_one_site_and_not_at_the_other(tmp_path: Path, text: Path) -> None:
    with LocalRun(tmp_path, with_experts(of_shapes(min_sites=2, steps=40))) as run:
        run.start_coordinator()
        for name, layout in {"one": "", "two": "dp_shard=2,ep=2"}.items():
            start(run, name, text, layout)
        ends_well(run, 32)
        values = load_file(run.home("two") / "model" / "model.safetensors")
        assert values["layers.0.feed_forward.experts.gate"].shape == (4, 64, 32)
        biases = values["layers.1.feed_forward.router.bias"]
        assert biases.any(), "they moved"
        assert biases.abs().max() < 0.4, "less than in each of 40 steps"


SHAPES = {"one": "", "shards": "dp_shard=2", "experts": "dp_shard=2,ep=2", "stages": "tp=2,pp=2"}


def have_contributed(run: LocalRun, names: set[str], after: int) -> None:
    """Each of them to a commit after that one, not all to the same: nine ranks are on the cores of this machine."""
    left = set(names)

    def all_have(status: Status) -> bool:
        left.difference_update(*(c["contributors"] for c in status["commits"] if c["commit"] > after))
        return not left

    run.wait(all_have, LIMIT_S, f"contributions of {sorted(names)} after commit {after}")


@pytest.mark.slow  # nine ranks
@pytest.mark.timeout(900)
def test_sites_of_four_shapes_come_and_go_and_hold_the_same(tmp_path: Path, text: Path) -> None:
    """Two join a run that goes on; of these one leaves and one is killed, and both catch up."""
    with LocalRun(tmp_path, with_experts(of_shapes(min_sites=2, steps=100_000))) as run:
        run.start_coordinator()
        for name in ("one", "shards"):
            start(run, name, text, SHAPES[name])
        have_contributed(run, {"one", "shards"}, after=0)
        joined_after = run.status()["last_commit"]
        for name in ("experts", "stages"):
            start(run, name, text, SHAPES[name])
        have_contributed(run, set(SHAPES), joined_after)
        run.nodes["stages"].interrupt()
        run.nodes["experts"].kill()
        assert run.nodes["stages"].wait(LIMIT_S) == 0
        have_contributed(run, {"one", "shards"}, run.status()["last_commit"] + 1)
        without = run.status()["last_commit"]
        for name in ("experts", "stages"):
            start(run, name, text, SHAPES[name])
        have_contributed(run, set(SHAPES), without)
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == dict.fromkeys(SHAPES, 0)
        last = run.status()["last_commit"]
        held = {commit: run.hashes(commit) for commit in range(1, last + 1)}
        assert not {commit: hashes for commit, hashes in held.items() if len(set(hashes.values())) > 1}
        for name in SHAPES:
            assert any(name in hashes and len(hashes) > 1 for commit, hashes in held.items() if commit > without), name


def test_a_model_that_cannot_be_shared_so_ends_the_node_before_a_rank_is_started(tmp_path: Path, text: Path) -> None:
    with LocalRun(tmp_path, of_shapes(min_sites=1, steps=40)) as run:
        run.start_coordinator()
        start(run, "one", text, "dp_shard=3")
        start(run, "two", text, "tp=4")
        assert run.wait_all(LIMIT_S) == dict.fromkeys(("one", "two"), ConfigError.exit_code)
        logs = {name: (run.home(name) / "node.log").read_text() for name in run.nodes}
        assert "trainer.batch_size = 4 sequences cannot be shared equally by 3 data ranks" in logs["one"]
        assert "--parallel tp=4 does not divide model.num_heads = 2" in logs["two"]
        assert "trains on" not in "".join(logs.values())


def newest_checkpoint(home: Path) -> int:
    """The start of the node by which both ranks have written one."""
    starts: dict[str, int] = {"0": 0, "1": 0}
    for path in (home / "optimizer").glob("*.safetensors"):
        match = re.match(r"rank-([01])-of-2\.(\d+)-", path.name)
        if match is not None:
            starts[match[1]] = max(starts[match[1]], int(match[2]))
    return min(starts.values())


def is_written_after(home: Path, start: int) -> Callable[[Status], bool]:
    return lambda status: newest_checkpoint(home) > start


DENSE = ("dp_replicate=2,zero=1", "tp=2,sequence_parallel=1", "dp_shard=2")


@pytest.mark.parametrize(
    ("has_experts", "layouts"),
    [
        pytest.param(False, DENSE[:2], id="dense"),
        pytest.param(False, DENSE, id="dense, three times", marks=pytest.mark.slow),
        pytest.param(
            False, ("pp=2", "cp=2,cp_ulysses=1", "dp_replicate=2"), id="stages, sequences", marks=pytest.mark.slow
        ),
        pytest.param(True, ("dp_shard=2,ep=2", "tp=2"), id="with experts", marks=pytest.mark.slow),
    ],
)
def test_a_site_that_is_killed_comes_back_in_other_shapes_with_its_optimizer(
    tmp_path: Path, text: Path, has_experts: bool, layouts: tuple[str, ...]
) -> None:
    settings = replace(of_shapes(min_sites=1, steps=100_000), checkpoint_every=4)
    with LocalRun(tmp_path, with_experts(settings) if has_experts else settings) as run:
        run.start_coordinator()
        start(run, "one", text, "")
        both, home = {"one", "other"}, run.home("other")
        for number, layout in enumerate(layouts):
            since = newest_checkpoint(home)
            start(run, "other", text, layout)
            back = run.wait(lambda status: both == contributors(status), LIMIT_S, f"a commit with {layout}")
            log = (home / "node.log").read_text()
            restored = [int(step) for step in re.findall(r"the inner optimizer is restored from step (\d+)", log)]
            assert len(restored) == number, "as often as it came back"
            assert restored == sorted(set(restored))
            if layout != layouts[-1]:
                run.wait(is_written_after(home, since), LIMIT_S, "a checkpoint of its own")
                run.nodes["other"].kill()
                run.wait(lambda status: {"one"} == contributors(status), LIMIT_S, "commits of the other site")
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"one": 0, "other": 0}
        status, of_both = run.status(), run.hashes(back["last_commit"])
        assert run.hashes(status["last_commit"])["one"] == status["state_hash"]
        assert of_both.keys() == both, "the last sync may end without a site that is slower than most"
        assert of_both["one"] == of_both["other"]
