"""The command line as a process sees it: help, errors in one line, exit codes, what is imported."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.main import VERBS, main, make_parser, split_command
from tests.harness.sockets import free_address

HEAVY = ("torch", "grpc", "numpy", "numba", "rich")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """`atoll coordinator` sets up logging for its whole process, which here is the tests'."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def python(code: str, *, cwd: Path | None = None) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    return result.stdout.strip()


def loaded_after(code: str, names: tuple[str, ...]) -> str:
    return python(f"import sys\n{code}\nprint(sorted(set(sys.modules) & {set(names)!r}))").splitlines()[-1]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*([verb] if verb else []), "--help"])
    assert caught.value.code == 0
    assert "example" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["status"], ["--debug", "status"]])
def test_a_verb_has_its_arguments_without_those_of_others(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([*words, "--help"])
    of_all = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert capsys.readouterr().out == of_all
    assert "--watch" in of_all
    with pytest.raises(SystemExit):
        make_parser("status").parse_args(["top", "--home", "x"])
    assert "unrecognized arguments: --home x" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-upload-mbit", "--monthly-upload-gb", "--max-disk-gb"])
@pytest.mark.parametrize("said", ["0", "-1", "1e-12"])
def test_a_limit_of_nothing_is_not_taken_for_none(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["node", "--run", "run", "--name", "a", flag, said])
    assert caught.value.code == 2
    assert f"argument {flag}: must be more than 0; leave it out for no limit" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-upload-mbit", "--monthly-upload-gb", "--max-disk-gb"])
def test_a_limit_is_a_number(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["node", "--run", "run", "--name", "a", flag, "much"])
    assert f"argument {flag}: invalid" in capsys.readouterr().err


def test_help_of_all_verbs_imports_nothing_heavy() -> None:
    code = f"""
import contextlib, io
from atoll.cli.main import main
for verb in {list(VERBS)!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([verb, "--help"])
"""
    assert loaded_after(code, HEAVY) == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "atoll",
        "atoll.protocol.wire",
        "atoll.protocol.settings",
        "atoll.coordinator.core",
        "atoll.coordinator.main",
        "atoll.cli.coordinator",
        "atoll.cli.config",
        "atoll.cli.client",
        "atoll.node.dataplane.saved_manifest",
    ],
)
def test_a_coordinator_runs_where_torch_is_not_installed(module: str) -> None:
    assert loaded_after(f"import {module}", ("torch", "numpy", "numba", "safetensors")) == "[]"


def test_the_node_daemon_imports_no_torch() -> None:
    assert loaded_after("import atoll.node.daemon.main, atoll.cli.demo_run", ("torch",)) == "[]"


def test_text_is_tokenized_where_torch_is_not_installed() -> None:
    modules = "atoll.node.worker.packing, atoll.node.worker.documents, atoll.node.worker.tokenizer, tokenizers"
    assert loaded_after(f"import {modules}", ("torch", "numba", "safetensors")) == "[]"


def test_public_names() -> None:
    import atoll

    assert sorted(atoll.__all__) == [
        "AdamW",
        "OneBitAdam",
        "SGD",
        "SharedModel",
        "SignSGD",
        "Site",
        "Step",
        "ZeroOneAdam",
        "__version__",
        "join",
        "share",
        "starting",
    ]
    code = "import atoll\nfor name in atoll.__all__: getattr(atoll, name)\nprint('all there')"
    assert python(code).endswith("all there")
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        atoll.jion  # noqa: B018


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from atoll import __version__

    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"atoll {__version__}"


def test_what_stands_behind_two_dashes_is_the_users() -> None:
    own = ["node", "--name", "a"]
    assert split_command([*own, "--", "train.py", "--lr", "1", "--", "x"]) == (
        own,
        ["train.py", "--lr", "1", "--", "x"],
    )
    assert split_command(["sample", "dir", "--", "-x"]) == (["sample", "dir", "--", "-x"], [])


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return code, err


def test_errors_are_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    code, line = failure(capsys, "coordinator", missing)
    assert (code, line) == (2, f"atoll coordinator: {missing}: no such file; `atoll init {missing}` writes one\n")

    code, line = failure(capsys, "status", "--coordinator", free_address())
    assert code == 5
    assert line.startswith("atoll status: no coordinator answers at 127.0.0.1:")
    assert "is `atoll coordinator` running there" in line

    code, line = failure(capsys, "status", "--coordinator", "nowhere")
    assert code == 2
    assert "write HOST:PORT" in line

    code, line = failure(capsys, "sample", str(tmp_path / "none"), "def ")
    assert code == 2
    assert "no such folder" in line

    code, line = failure(capsys, "stop", "--store", str(tmp_path / "none.db"))
    assert code != 0
    assert "none" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "a/b"], '--name "a/b": 1 to 64 letters'),
        (["--name", "a", "--data", "/nowhere/at/all"], "--data /nowhere/at/all: no such file or folder"),
        (["--name", "a", "--ranks", "0"], "--ranks 0: a site has at least one rank"),
        (["--name", "a", "--listen", "x"], "write HOST:PORT"),
        (["--name", "a", "--from", "/nowhere"], "--from /nowhere: no manifest.json in it"),
        (["--name", "a", "--launcher", "slurm"], "--launcher slurm: choose one of python, exec, torchrun"),
        (["--name", "a", "--", "no_such_script.py"], "no_such_script.py: no such script"),
    ],
)
def test_a_node_refuses_wrong_flags_before_it_does_anything(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, line = failure(capsys, "node", "--insecure", "--coordinator", "127.0.0.1:1", *words)
    assert code == 2
    assert message in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--coordinator", "127.0.0.1:1"], "site a is starting; its coordinator is at 127.0.0.1:1\n"),
        (["--site-hosts", "2", "--site-rank", "1", "--site-address", "127.0.0.1:2"], "site a is starting\n"),
        (["--coordinator", "127.0.0.1:1", "--log-format", "json"], ""),
    ],
)
def test_a_node_says_that_it_starts_before_it_loads_and_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    at_first = []

    async def runs(config: object) -> int:
        at_first.append(capsys.readouterr().err)
        return 0

    monkeypatch.setattr("atoll.node.daemon.main.run_node", runs)
    assert main(["node", "--insecure", "--name", "a", *words]) == 0
    assert at_first == [said]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sites", "0"], "--sites 0: choose 1 to 64"),
        (["--model", "tinny"], 'did you mean "tiny"'),
        (["--codec", "int9"], 'did you mean "int8"'),
        (["--sync-every", "0"], "sync.every = 0"),
        (["--steps", "0"], "set one of them"),
        (["--data", "/nowhere"], "--data /nowhere: no such file or folder"),
        (["--kill", "--sites", "1"], "--kill needs at least two sites"),
        (["--kill", "--steps", "40"], "raise --steps or lower --sync-every"),
    ],
)
def test_the_demo_refuses_wrong_flags_before_it_starts(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = failure(capsys, "demo", *words)
    assert code == 2
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["health", "--foo"], "usage: atoll health "),
        (["--debug", "plot", "run.db", "-o", "run.png", "more"], "usage: atoll plot "),
        (["node", "--foo"], "usage: atoll node --run RUN"),
        (["--foo", "health"], "usage: atoll [-h]"),
    ],
)
def test_what_a_verb_does_not_know_is_met_with_its_own_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert "unrecognized arguments: --foo" in err or "unrecognized arguments: more" in err


def test_a_traceback_only_with_debug(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["coordinator", str(tmp_path / "none.toml"), "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("atoll coordinator: ")
    assert main(["--debug", "coordinator", str(tmp_path / "none.toml")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        """An example."""

        __name__ = "stop"

        def add_arguments(self, parser: object) -> None:
            del parser

        def run(self, args: object) -> int:
            del args
            raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "stop", Interrupted())
    assert main(["stop"]) == 130


@pytest.mark.parametrize(("words", "found"), [(["stop"], "NONE"), (["stop", "--debug"], None)])
def test_the_library_of_grpc_says_nothing_by_itself_unless_with_debug(
    monkeypatch: pytest.MonkeyPatch, words: list[str], found: str | None
) -> None:
    seen = []

    class Looks:
        """An example."""

        __name__ = "stop"

        def add_arguments(self, parser: object) -> None:
            del parser

        def run(self, args: object) -> int:
            del args
            seen.append(os.environ.get(name))
            return 0

    name = "GRPC_VERBOSITY"
    monkeypatch.setenv(name, "")  # so that monkeypatch removes it afterwards
    monkeypatch.delenv(name)
    monkeypatch.setitem(VERBS, "stop", Looks())
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    assert main() == 0
    assert seen == [found]


def test_ctrl_c_while_modules_load_leaves_no_traceback() -> None:
    code = """
import builtins, os, signal, sys
import atoll.__main__ as entry
plain = builtins.__import__
def interrupted(name, *args, **kwargs):
    if name == "atoll.cli.main":
        os.kill(os.getpid(), signal.SIGINT)
    return plain(name, *args, **kwargs)
builtins.__import__ = interrupted
sys.exit(entry.run())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["node", flag, value]
            for flag in ("--ranks", "--threads", "--node-threads", "--nice", "--max-retained-mib")
            for value in "x."
        ),
        *(["node", "--bandwidth-mbit", value] for value in ("x", "nan", "inf", "1e300")),
        *(["init", flag, "x"] for flag in ("--steps", "--tokens", "--min-sites", "--sync-every")),
        *(["demo", flag, "x"] for flag in ("--sites", "--steps", "--sync-every", "--seed")),
    ],
    ids=" ".join,
)
def test_a_flag_whose_value_is_no_such_thing_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert f"argument {words[1]}: invalid" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["invite", "--site", "a"], ["token", "--viewer", "a"]], ids=["invite", "token"])
def test_a_time_that_is_none_is_told_what_one_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--expires", "1y"])
    assert caught.value.code == 2
    assert "argument --expires: write 90m, 24h or 7d, not '1y'" in capsys.readouterr().err


def test_nothing_behind_the_two_dashes_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--insecure", "--coordinator", "127.0.0.1:1", "--name", "a", "--"]) == 2
    assert "leave it out for the built-in trainer" in capsys.readouterr().err
