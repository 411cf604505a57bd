"""`atoll tokenize` and what it writes: packing, the index, what is refused."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import atoll
from atoll.cli.demo import DemoOptions
from atoll.cli.demo_setup import demo_settings
from atoll.cli.main import main
from atoll.data import PackedTokens
from atoll.node.worker import data, packing, token_index
from atoll.node.worker.data import is_held_out
from atoll.node.worker.token_index import PackedFolder, Shard, ShardRole, TokenIndex, dtype_of, open_packed
from atoll.node.worker.tokenizer import end_token, load_tokenizer, vocab_size_of
from atoll.protocol.errors import AtollError, ConfigError
from tests.harness.fuzzing import fuzz
from tests.harness.packed import END, TEXTS, make_tokenizer, write_packed

Table = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def packed(tmp_path: Path, tokenizer: Path) -> Path:
    write_packed(tmp_path / "packed", tokenizer, shard_tokens=1000)
    return tmp_path / "packed"


def tokens_in(folder: Path, role: ShardRole) -> list[int]:
    index = open_packed(folder).index
    return [int(t) for s in index.of_role(role) for t in np.fromfile(folder / s.name, "<u2")]


def encoded(tokenizer: Path, texts: list[str]) -> list[int]:
    """Each document and its end, by the library alone."""
    plain = Tokenizer.from_file(str(tokenizer))
    end = plain.token_to_id(END)
    assert end is not None
    return [t for text in texts for t in (*plain.encode(text).ids, end)]


# --- what is written


def test_documents_are_packed_in_their_order_and_some_are_held_out(packed: Path, tokenizer: Path) -> None:
    held_out = [text for text in TEXTS if is_held_out(text)]
    training = [text for text in TEXTS if not is_held_out(text)]
    assert 1 <= len(held_out) <= 20
    assert tokens_in(packed, ShardRole.TRAINING) == encoded(tokenizer, training)
    assert tokens_in(packed, ShardRole.HELD_OUT) == encoded(tokenizer, held_out)
    index = open_packed(packed).index
    assert (index.dtype, index.vocab_size, index.end_token) == ("uint16", 300, 0)
    assert index.tokenizer_hash == blake3(tokenizer.read_bytes()).hexdigest()
    for role, texts in ((ShardRole.TRAINING, training), (ShardRole.HELD_OUT, held_out)):
        num_tokens = len(encoded(tokenizer, texts))
        assert index.totals([role]) == (num_tokens, len(texts), sum(len(text.encode()) for text in texts))
        assert [shard.num_tokens for shard in index.of_role(role)][:-1] == [1000] * ((num_tokens - 1) // 1000)
    assert len(index.of_role(ShardRole.TRAINING)) > 2
    assert sorted(path.name for path in packed.iterdir()) == sorted(["index.json", *(s.name for s in index.shards)])


def test_a_document_that_ends_with_a_shard_counts_in_it(tmp_path: Path, tokenizer: Path) -> None:
    first, second = TEXTS[:2]
    num_tokens = len(encoded(tokenizer, [first]))
    index = write_packed(tmp_path / "out", tokenizer, [first, second, TEXTS[2]], shard_tokens=num_tokens)
    shard = index.shards[0]
    assert (shard.num_tokens, shard.num_documents, shard.text_bytes) == (num_tokens, 1, len(first))


def test_windows_go_over_the_ends_of_shards_and_documents(packed: Path) -> None:
    whole = tokens_in(packed, ShardRole.TRAINING)
    windows = PackedTokens(packed, 37)
    assert len(windows) == (len(whole) - 1) // 37
    assert windows.vocab_size == 300
    for place in range(len(windows)):
        assert windows[place].dtype == torch.int64
        assert windows[place].tolist() == whole[37 * place : 37 * place + 38]
    held_out = tokens_in(packed, ShardRole.HELD_OUT)
    assert PackedTokens(str(packed), 37, held_out=True)[0].tolist() == held_out[:38]
    with pytest.raises(ConfigError, match=r"lower trainer\.sequence"):
        PackedTokens(packed, len(whole))


def test_a_process_that_is_spawned_maps_the_files_anew(packed: Path) -> None:
    windows = PackedTokens(packed, 16, held_out=True)
    assert len(pickle.dumps(windows)) < 1000
    same = copy.copy(windows)
    assert same.fingerprint == windows.fingerprint
    assert torch.equal(same[1], windows[1])


def test_atoll_data_is_there_without_an_import_of_its_own() -> None:
    assert atoll.data.PackedTokens is PackedTokens


@pytest.mark.parametrize(("num_words", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_the_smallest_type_that_has_all_tokens(tmp_path: Path, num_words: int, dtype: str) -> None:
    words = {END: 0, **{f"w{i}": i for i in range(1, num_words)}}
    Tokenizer(models.WordLevel(words, unk_token=END)).save(str(tmp_path / "tokenizer.json"))
    last = f"w{num_words - 1}"
    index = write_packed(tmp_path / "out", tmp_path / "tokenizer.json", [last] * 3)
    assert (index.dtype, index.vocab_size) == (dtype, num_words)
    assert PackedTokens(tmp_path / "out", 1)[0].tolist() == [num_words - 1, 0]


def test_what_of_a_vocabulary_has_holes_counts_to_its_highest_token(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({END: 0, "far": 70_000}, unk_token=END)).save(str(tmp_path / "tokenizer.json"))
    index = write_packed(tmp_path / "out", tmp_path / "tokenizer.json", ["far"] * 3)
    assert (index.dtype, index.vocab_size) == ("uint32", 70_001)


def test_a_text_that_names_the_end_does_not_end(tmp_path: Path, tokenizer: Path) -> None:
    index = write_packed(tmp_path / "out", tokenizer, [f"one {END} two", "three"])
    tokens = np.concatenate([np.fromfile(tmp_path / "out" / s.name, "<u2") for s in index.shards])
    assert np.count_nonzero(tokens == index.end_token) == 2
    assert index.totals(ShardRole)[1] == 2


def test_nothing_is_cut_off_or_added(tmp_path: Path, tokenizer: Path) -> None:
    """Many a tokenizer.json says how its model wants single texts."""
    plain = Tokenizer.from_file(str(tokenizer))
    plain.enable_truncation(8)
    plain.enable_padding(length=64)
    plain.save(str(tmp_path / "tokenizer.json"))
    index = write_packed(tmp_path / "out", tmp_path / "tokenizer.json", TEXTS)
    assert index.totals(ShardRole)[0] == len(encoded(tokenizer, TEXTS))


def test_a_long_document_is_encoded_in_pieces_and_ends_once(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE", 100)
    monkeypatch.setattr(packing, "BATCH", 250)
    index = write_packed(tmp_path / "out", tokenizer, ["".join(TEXTS), "short"])
    assert [shard.num_documents for shard in index.shards] == [1, 1]
    loaded, _ = load_tokenizer(tokenizer)
    text = loaded.decode(tokens_in(tmp_path / "out", ShardRole.TRAINING), skip_special_tokens=False)
    assert text == "".join(TEXTS) + END


@fuzz(40)
@given(texts=st.lists(st.text("ab \n\u00fc", min_size=1, max_size=40), min_size=2, max_size=9), size=st.integers(1, 50))
def test_whatever_the_shards_the_tokens_are_those_of_the_documents(
    tokenizer: Path, texts: list[str], size: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        index = write_packed(out, tokenizer, texts, shard_tokens=size)
        found = Counter(tokens_in(out, ShardRole.TRAINING) + tokens_in(out, ShardRole.HELD_OUT))
        assert found == Counter(encoded(tokenizer, texts))
        assert index.totals(ShardRole)[1:] == (len(texts), sum(len(text.encode()) for text in texts))
        assert all(shard.num_tokens <= size for shard in index.shards)
        open_packed(out).verify()


def test_what_the_tokenizer_does_not_take_is_said(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({END: 0}, unk_token="none")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"cannot encode a document: .*UNK"):
        write_packed(tmp_path / "out", tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("texts", [["one", "two"], [text for text in TEXTS if is_held_out(text)][:2]])
def test_of_few_documents_the_last_one_goes_where_there_is_none(
    tmp_path: Path, tokenizer: Path, texts: list[str]
) -> None:
    index = write_packed(tmp_path / "out", tokenizer, texts)
    assert sorted(shard.role.name for shard in index.shards) == ["HELD_OUT", "TRAINING"]


def test_of_one_document_nothing_is_held_out(tmp_path: Path, tokenizer: Path) -> None:
    write_packed(tmp_path / "out", tokenizer, [next(text for text in TEXTS if is_held_out(text))])
    assert len(PackedTokens(tmp_path / "out", 8)) > 1
    with pytest.raises(ConfigError, match="the data has 0"):
        PackedTokens(tmp_path / "out", 8, held_out=True)


# --- the index


def index_of(**changes: Any) -> TokenIndex:
    shard = Shard(
        name="tokens-00000.bin",
        role=ShardRole.TRAINING,
        num_tokens=5,
        num_documents=1,
        text_bytes=9,
        hash="ab" * 32,
    )
    given: Table = {"tokenizer_hash": "cd" * 32, "vocab_size": 300, "dtype": "uint16", "end_token": 0}
    return TokenIndex(**given | {"shards": (shard,)} | changes)


def test_the_fingerprint_is_of_specified_bytes() -> None:
    """All sites of a run must come to the same, whatever version wrote their index."""
    index = index_of()
    assert index.fingerprint.hex() == "95bff5818e0c2df872be48b3ae34fea01f23241a743097ee4bdd355d020223bf"
    (shard,) = index.shards
    changes: Table = {
        "name": "tokens-00001.bin",
        "role": ShardRole.HELD_OUT,
        "num_tokens": 6,
        "num_documents": 2,
        "text_bytes": 8,
        "hash": "00" * 32,
    }
    others = [
        index_of(tokenizer_hash="00" * 32),
        index_of(vocab_size=301),
        index_of(end_token=1),
        index_of(vocab_size=1 << 17, dtype="uint32"),
        *(index_of(shards=(replace(shard, **{name: value}),)) for name, value in changes.items()),
    ]
    assert len({index.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_an_index_is_read_as_it_was_written(packed: Path) -> None:
    index = open_packed(packed).index
    table = json.loads((packed / "index.json").read_text())
    assert json.loads(index.to_json()) == table
    (packed / "index.json").write_text(json.dumps(dict(reversed(table.items()))))
    assert open_packed(packed).index == index, "order and white space say nothing"


def a_shard(**changes: Any) -> Callable[[Table], None]:
    return lambda table: table["shards"][0].update(changes)


def the_index(**changes: Any) -> Callable[[Table], None]:
    return lambda table: table.update(changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (a_shard(name="../tokens-00000.bin"), r"shards\[0\]: name"),
        (a_shard(name="/etc/passwd"), "name"),
        (a_shard(name="tokens-00000.bin\n"), "name"),
        (a_shard(name="index.json"), "name"),
        (a_shard(name="tokens-\u0660\u0660\u0660\u0660\u0660.bin"), "name"),
        (a_shard(name="held-out-00000.bin"), "the same name"),
        (a_shard(role="training"), "role must be one of TRAINING, HELD_OUT"),
        (a_shard(num_tokens=0), "num_tokens must be from 1"),
        (a_shard(num_tokens=-1), "num_tokens must be from 1"),
        (a_shard(num_tokens=1 << 70), "num_tokens must be from 1"),
        (a_shard(num_tokens=True), "num_tokens must be an integer"),
        (a_shard(num_tokens=10.0), "num_tokens must be an integer"),
        (a_shard(num_tokens=999), "has 2000 bytes, and 1998"),
        (a_shard(text_bytes=-1), "text_bytes must be from 0"),
        (a_shard(num_documents=1 << 64), "num_documents and text_bytes"),
        (a_shard(hash="AB" * 32), "64 hexadecimal"),
        (a_shard(hash="ab"), "64 hexadecimal"),
        (a_shard(size=3), 'unknown key "size"'),
        (the_index(dtype="uint32"), "dtype must be uint16"),
        (the_index(dtype="float64"), "dtype must be uint16"),
        (the_index(vocab_size=1 << 17), "dtype must be uint32"),
        (the_index(vocab_size=0), "vocab_size must be from 1"),
        (the_index(vocab_size=1 << 33), "vocab_size must be from 1"),
        (the_index(end_token=300), "end_token"),
        (the_index(end_token=-1), "end_token"),
        (the_index(format="atoll/tokens/2"), 'format is "atoll/tokens/2"'),
        (the_index(tokenizer_hash="x" * 64), "64 hexadecimal"),
        (the_index(shards=[]), "0 shards"),
        (the_index(shards=[1]), "shards"),
        (the_index(shards={}), "must be a list"),
        (lambda table: table.pop("end_token"), '"end_token" is missing'),
        (lambda table: table["shards"][0].pop("hash"), '"hash" is missing'),
        (lambda table: table["shards"].extend(table["shards"] * (1 << 14)), "shards; from 1 to 65536"),
    ],
)
def test_a_hostile_index_is_refused_by_what_is_wrong(packed: Path, change: Callable[[Table], None], text: str) -> None:
    table = json.loads((packed / "index.json").read_text())
    change(table)
    (packed / "index.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=text) as refused:
        PackedTokens(packed, 8)
    assert str(packed) in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b'{"format": 1}', b"\xff", b"9" * 10_000])
def test_what_is_no_index_is_refused(packed: Path, content: bytes) -> None:
    (packed / "index.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        PackedTokens(packed, 8)


def test_a_torn_folder_is_refused(packed: Path) -> None:
    shard = packed / "tokens-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin has 1999 bytes, and 2000"):
        PackedTokens(packed, 8)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin is not there"):
        PackedTokens(packed, 8)
    shard.mkdir()
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin is not there"):
        PackedTokens(packed, 8)
    (packed / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"index\.json.*atoll tokenize"):
        PackedTokens(packed, 8)


def test_a_changed_shard_is_found_by_its_hash(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "--verify", str(packed)]) == 0
    assert main(["tokenize", "--verify", str(packed), "--tokenizer", "another"]) == ConfigError.exit_code
    assert "shards are as they were written" in capsys.readouterr().out
    content = bytearray((packed / "tokens-00001.bin").read_bytes())
    content[77] ^= 1
    (packed / "tokens-00001.bin").write_bytes(content)
    windows = PackedTokens(packed, 8)
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin has changed"):
        windows.verify()
    assert main(["tokenize", "--verify", str(packed)]) == ConfigError.exit_code
    assert "tokens-00001.bin has changed" in capsys.readouterr().err


def test_the_border_of_the_types() -> None:
    assert [dtype_of(size) for size in (1, 65_536, 65_537, 1 << 20)] == ["uint16", "uint16", "uint32", "uint32"]


# --- the command


def tokenize(*words: object) -> int:
    return main(["tokenize", *map(str, words)])


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def test_the_same_text_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path, tokenizer: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    found = []
    for jobs in (1, 3):
        out = tmp_path / f"out-{jobs}"
        words = ["tokenize", "--tokenizer", str(tokenizer), "--out", str(out), "--jobs", str(jobs), str(folder)]
        subprocess.run([sys.executable, "-m", "atoll", *words, "--shard-tokens", "700"], check=True)
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]
    assert len(found[0]) > 4
    write_packed(tmp_path / "other", tokenizer, shard_tokens=350)
    for role in ShardRole:
        assert tokens_in(tmp_path / "other", role) == tokens_in(tmp_path / "out-1", role)


def test_what_it_says(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("--tokenizer", tokenizer.parent, "--out", tmp_path / "out", write_texts(tmp_path / "texts")) == 0
    said = capsys.readouterr().out
    assert f"of {len(TEXTS)} documents, each ended by {END}; " in said
    assert "model.vocab_size = 300 or more" in said
    assert not (tmp_path / "out" / "index.json").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--end", "<stop>"], '--end "<stop>": the tokenizer has no such token'),
        (["--shard-tokens", "0"], "--shard-tokens 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["--tokenizer", "nowhere.json"], "--tokenizer nowhere.json: No such file"),
        (["--tokenizer", __file__], "not a tokenizer.json"),
        (["nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_what_it_refuses(
    tmp_path: Path, tokenizer: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_texts(tmp_path / "texts")
    code = tokenize("--tokenizer", tokenizer, "--out", tmp_path / "out", folder, *words)
    assert code == ConfigError.exit_code
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_what_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("text.txt") == ConfigError.exit_code
    assert "give --tokenizer PATH, --out DIR" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_left_alone(
    tmp_path: Path, packed: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    assert tokenize("--tokenizer", tokenizer, "--out", packed, write_texts(tmp_path / "texts")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_a_tokenizer_without_a_usual_end_needs_one(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "stop": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer, _ = load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="name what ends a document with --end"):
        end_token(tokenizer, None)
    assert end_token(tokenizer, "stop") == ("stop", 1)
    assert vocab_size_of(tokenizer) == 2
    Tokenizer(models.WordLevel({}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="vocabulary is empty"):
        load_tokenizer(tmp_path)


def test_without_the_extra_it_says_how_to_install_it(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[data\]"'):
        load_tokenizer(tokenizer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ConfigError("bad row")])
def test_what_is_broken_off_leaves_nothing(tmp_path: Path, tokenizer: Path, error: Any) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS * 3
        raise error

    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises((KeyboardInterrupt, AtollError)):
        write_packed(place / "out", tokenizer, texts(), shard_tokens=100)
    assert list(place.iterdir()) == []


def sleeps_for_more(pid: int, pipe: int) -> bool:
    """A signal just before a blocking read would not end it."""
    unread = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return unread == bytes(4) and state == "S"


def test_ctrl_c_ends_it_with_nothing_half_done(tmp_path: Path, tokenizer: Path) -> None:
    """A real one, while it reads from a pipe that gives no more."""
    place = tmp_path / "place"
    place.mkdir()
    os.mkfifo(tmp_path / "rows.jsonl")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    code = f"""
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
from atoll.node.worker import data
from atoll.cli.main import main
data.list_files = lambda *_: (data.SourceFile("rows.jsonl", Path({str(tmp_path / "rows.jsonl")!r}), 1),)
sys.exit(main(["tokenize", "--tokenizer", {str(tokenizer)!r}, "--out", {str(place / "out")!r}, "rows"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    with open(tmp_path / "rows.jsonl", "w") as pipe:
        pipe.write(rows)
        pipe.flush()
        while not sleeps_for_more(process.pid, pipe.fileno()):
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""
    assert list(place.iterdir()) == []


# --- what trains on it


def test_packed_tokens_among_paths(tmp_path: Path, packed: Path) -> None:
    found = data.source_for_run("mine", [str(packed)])
    assert isinstance(found, PackedFolder)
    assert data.fingerprint_for_run("mine", found) == PackedTokens(packed, 8).fingerprint
    assert data.fingerprint_for_run("local", found) == b""
    folder = write_texts(tmp_path / "texts")
    with pytest.raises(ConfigError, match="name it alone"):
        data.source_for_run("mine", [str(folder), str(packed)])
    (folder / token_index.INDEX_NAME).write_text("{}")
    assert isinstance(data.source_for_run("mine", [str(folder)]), tuple), "a folder of text with a file of that name"
    corpus = data.load(found)
    assert (len(corpus.training), corpus.vocab_size) == (len(tokens_in(packed, ShardRole.TRAINING)), 300)
    num_tokens, _, num_bytes = found.index.totals([ShardRole.HELD_OUT])
    assert corpus.bytes_a_token == num_bytes / num_tokens > 1


def test_a_demo_on_tokens_has_a_model_for_all_of_them(packed: Path) -> None:
    assert demo_settings(DemoOptions(data=(packed,))).model.vocab_size == 300
    assert demo_settings(DemoOptions()).model.vocab_size == 256
