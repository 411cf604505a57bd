"""`atoll plan`: what it prints, and that nothing heavy is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from atoll.cli.main import main
from atoll.cli.plan import quantity
from atoll.protocol.errors import ConfigError

COMMAND = ["plan", "--model", "llama-125m", "--gpus", "4", "--gpu-memory", "24GB", "--link", "200Mbit", "--sites", "3"]


def test_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    out = capsys.readouterr().out
    for words in (
        "model llama-125m: 134.11 million parameters",
        "take --parallel ",
        "a pipeline's bubble by pp_schedule",
        "the node of a site, with default",
        "syncs of 3 sites over 200 Mbit/s",
        "sparseloco",
        "assumed (docs/plan.md)",
    ):
        assert words in out


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(COMMAND) == 0
    out = capsys.readouterr().out
    assert document["recommended"]["parallel"] in out
    sync, num_parameters = document["recommended_sync"], document["parameters"]["total"]
    assert f"  take {sync['name']} with H = {sync['every']}" in out
    assert sync["reason"] in out
    assert f"bytes a parameter: {document['node']['memory_bytes'] / num_parameters:.2f} memory" in out
    for sync in document["syncs"]:
        assert f"{100 * sync['utilization']:.1f} %" in out


def test_a_single_site_sends_nothing_and_is_recommended_none(capsys: pytest.CaptureFixture[str]) -> None:
    alone = [*COMMAND, "--sites", "1", "--gpus", "1", "--batch", "1"]
    assert main(alone) == 0
    out = capsys.readouterr().out
    assert "syncs: one site sends nothing to others, so no strategy is recommended" in out
    assert "inside a site: 1 GPU of 22.4 GiB, 20.1 GiB for training; 1 sequence of 2048 tokens a step, bf16" in out
    assert "sparseloco" not in out
    assert main([*alone, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["syncs"], document["recommended_sync"]) == ([], None)


def test_a_sequence_that_is_longer_than_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--sequence", "4096"]) == 0
    assert "with max_sequence = 4096 in place of its own 2048" in capsys.readouterr().out
    assert main(COMMAND) == 0
    assert "max_sequence" not in capsys.readouterr().out


def test_what_syncs_measured_took_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    assert "syncs measured on links took at least 14 % longer than planned" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--link", "0"], ["--link", "0Mbit"], ["--gpu-memory", "0.0GB"]])
def test_nothing_is_too_little(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *flags]) == ConfigError.exit_code
    assert f"{flags[0]} {flags[1]}: must be more than 0" in capsys.readouterr().err


def test_the_node_is_that_of_the_first_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--strategy", "sign1-ef", "streaming"]) == 0
    out = capsys.readouterr().out
    assert "the node of a site, with sign1-ef" in out
    assert "error feedback" in out
    assert "sparseloco" not in out


def test_nothing_heavy_is_loaded() -> None:
    code = (
        f"import sys; from atoll.cli.main import main; main({COMMAND!r})\n"
        "print(sorted({'torch', 'numpy', 'numba', 'grpc'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("said", "is_bits", "value"),
    [("80GB", False, 80e9), ("24 GiB", False, 24 * 2**30), ("1Gbit", True, 1e9), ("2.5Mbit/s", True, 2.5e6)],
)
def test_quantities(said: str, is_bits: bool, value: float) -> None:
    assert quantity("--x", said, is_bits=is_bits) == value


@pytest.mark.parametrize(
    "wrong",
    [
        ["--link", "1GB"],
        ["--gpu-memory", "80"],
        ["--gpu-memory", "0GB"],
        ["--gpus", "0"],
        ["--every", "0"],
        ["--every", "-3"],
        ["--step-s", "0"],
        ["--flops", "nan"],
        ["--rtt-ms", "-1"],
        ["--strategy", "none"],
    ],
)
def test_what_is_wrong_is_said_in_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *wrong]) == ConfigError.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_demo_takes_no_model_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "llama3-8b"]) == ConfigError.exit_code
    assert "too large for sites on one machine" in capsys.readouterr().err
