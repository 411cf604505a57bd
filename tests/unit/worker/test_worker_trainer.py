"""The built-in trainer against a node in memory, and how a worker ends."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from atoll.node.core.events import MergeMode
from atoll.node.worker import connection as connection_module
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site, trainer
from atoll.node.worker.connection import Connection, show_errors_in_one_line
from atoll.node.worker.token_index import ShardRole
from atoll.protocol.errors import ConfigError, HostError, NonFiniteError, RefusedError, StaleError, WorkerError
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply
from tests.harness.packed import make_tokenizer, write_packed

SETTINGS = RunSettings(
    run_id="r",
    steps=4,
    data="mine",
    model=ModelSettings(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, max_sequence=16),
    trainer=TrainerSettings(batch_size=4, sequence=16, warmup_steps=2),
)


def start(
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    paths: tuple[str, ...],
    world: int = 1,
    settings: RunSettings = SETTINGS,
) -> Connection:
    connection = node.connection(settings)
    connection.greeting = dataclasses.replace(connection.greeting, data_paths=paths)
    connection.world = world
    for module in (join_module, trainer):
        monkeypatch.setattr(module, "connect", lambda: connection)
    for module in (joined_site, trainer):
        monkeypatch.setattr(module, "disconnect", node.close)
    return connection


def test_it_trains_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    node = FakeNode()
    start(node, monkeypatch, (str(tmp_path / "text"),))

    def seeded() -> object:
        node.publish[:] = node.snapshot
        return apply(MergeMode.REPLACE, 4, fresh=True)

    node.script = [(0, SNAPSHOT), (0, seeded), (4, SNAPSHOT), (4, STOP)]  # type: ignore[list-item]
    trainer.main()
    assert len(node.said("join")[0]["fingerprint"]) == 32
    sealed = node.said("sealed")[1]
    assert (sealed["tokens"], sealed["num_steps"]) == (4 * 4 * 16, 4)
    assert 2 < sealed["loss_sum"] / 4 < 8
    weights = torch.frombuffer(node.snapshot, dtype=torch.float32)
    assert not torch.equal(weights, torch.frombuffer(node.publish, dtype=torch.float32))
    assert node.said("goodbye") == [{"run_over": True}]


def test_it_trains_on_packed_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index = write_packed(tmp_path / "packed", make_tokenizer(tmp_path))
    for vocab_size, said in ((300, ""), (299, "begin the run with model.vocab_size = 300 or more")):
        node = FakeNode()
        settings = dataclasses.replace(SETTINGS, model=dataclasses.replace(SETTINGS.model, vocab_size=vocab_size))
        start(node, monkeypatch, (str(tmp_path / "packed"),), settings=settings)
        node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, SNAPSHOT), (2, STOP)]
        if said:
            with pytest.raises(SystemExit):
                trainer.main()
        else:
            trainer.main()
            assert node.said("join")[0]["fingerprint"] == index.fingerprint
            assert node.said("data")[0]["num_samples"] == (index.totals([ShardRole.TRAINING])[0] - 1) // 16
            (sealed,) = node.said("sealed")
            assert sealed["tokens"] == 2 * 4 * 16
            assert abs(sealed["loss_sum"] / 2 - math.log(300)) < 2, "of tokens, not of bytes"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "world", "text"),
    [((), 1, "--data PATH"), (("nowhere.txt",), 1, "nowhere.txt")],
)
def test_a_wrong_configuration_is_one_line_and_fatal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paths: tuple[str, ...], world: int, text: str
) -> None:
    node = FakeNode()
    start(node, monkeypatch, paths, world)
    with pytest.raises(SystemExit) as ended:
        trainer.main()
    assert ended.value.code == ConfigError.exit_code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert text in err
    (fatal,) = node.said("fatal")
    assert fatal["kind"] == "config"
    assert text in fatal["text"]


def test_it_is_not_started_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    with pytest.raises(SystemExit):
        trainer.main()
    assert "atoll demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "config"),
        (NonFiniteError("x"), "non_finite"),
        (StaleError("x"), "refused"),
        (HostError("x"), None),
        (WorkerError("x"), None),
        (ZeroDivisionError("x"), None),
    ],
)
def test_what_a_restart_would_not_cure(error: Exception, kind: str | None) -> None:
    node = FakeNode()
    connection = node.connection(SETTINGS)
    connection.tell(error)
    connection.tell(error)  # once only
    assert [f["kind"] for f in node.said("fatal")] == ([kind] if kind else [])


def test_a_node_that_refused_needs_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()

    def refuse(kind: str, text: str) -> None:
        raise RefusedError("go away")

    monkeypatch.setattr(node, "fatal", refuse)
    node.connection(SETTINGS).tell(RefusedError("go away"))


def test_uncaught_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    show_errors_in_one_line()
    sys.excepthook(ConfigError, ConfigError("lower it"), None)
    assert capsys.readouterr().err == "atoll: lower it\n"
    other = ValueError("a bug")
    sys.excepthook(ValueError, other, None)
    monkeypatch.setenv("ATOLL_WORKER_DEBUG", "1")
    sys.excepthook(ConfigError, ConfigError("lower it"), None)
    assert shown[0] is other
    assert len(shown) == 2


def test_no_node_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    assert connection_module.connect() is None
    monkeypatch.setenv("ATOLL_SOCKET", "/nowhere/node.sock")
    monkeypatch.setenv("ATOLL_GENERATION", "1")
    with pytest.raises(WorkerError, match=r"/nowhere/node\.sock"):
        connection_module.connect()
