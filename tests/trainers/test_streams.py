"""Shards of streams in the three forms of docs/data.md, read with the real libraries: each sample once in a pass.

That a shard counts once a pass in a run, whatever is killed, is of no form: `tests/process/test_shards.py`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain, islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

import atoll

wds = pytest.importorskip("webdataset", reason="webdataset is not installed: make test-more")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: make test-more")

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # webdataset does not close what it opens
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_SHARDS, A_SHARD = 3, 5
SAMPLES = [list(range(shard * A_SHARD, (shard + 1) * A_SHARD)) for shard in range(NUM_SHARDS)]


def webdataset(folder: Path) -> Callable[[int], Iterator[int]]:
    urls = []
    for shard, samples in enumerate(SAMPLES):
        urls.append(str(folder / f"{shard}.tar"))
        with tarfile.open(urls[-1], "w") as tar:
            for sample in samples:
                data = str(sample).encode()
                info = tarfile.TarInfo(f"{sample:06}.cls")
                info.size = len(data)
                tar.addfile(info, BytesIO(data))
    options = {"shardshuffle": False, "nodesplitter": None}  # each rank has shards of its own
    return lambda shard: (s for (s,) in wds.WebDataset(urls[shard], **options).decode().to_tuple("cls"))


def parquet_files(folder: Path) -> list[str]:
    files = [str(folder / f"{shard}.parquet") for shard in range(NUM_SHARDS)]
    for file, samples in zip(files, SAMPLES, strict=True):
        pyarrow.parquet.write_table(pyarrow.table({"sample": samples}), file)
    return files


def parquet(folder: Path) -> Callable[[int], Iterator[int]]:
    files = parquet_files(folder)

    def read(shard: int) -> Iterator[int]:
        rows = pyarrow.parquet.ParquetFile(files[shard]).iter_batches(batch_size=2)
        return chain.from_iterable(batch["sample"].to_pylist() for batch in rows)

    return read


def streamed(folder: Path) -> Callable[[int], Iterator[int]]:
    """A streamed data set of Hugging Face's."""
    dataset = datasets.load_dataset(
        "parquet", data_files=parquet_files(folder), split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    return lambda shard: (row["sample"] for row in dataset.shard(num_shards=NUM_SHARDS, index=shard))


@pytest.mark.parametrize("form", [webdataset, parquet, streamed])
def test_each_sample_of_a_stream_comes_once_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[Path], Callable[[int], Iterator[int]]]
) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # scikit-learn sets it, which datasets imports
    read = form(tmp_path)
    model = torch.nn.Linear(1, 1)
    seen: list[list[int]] = []
    with atoll.join(model, torch.optim.SGD(model.parameters(), lr=0.1), data_fingerprint=bytes(32)) as site:
        for shard in islice(site.shards(NUM_SHARDS), 2 * NUM_SHARDS):
            seen.append(list(read(shard)))
            site.step(tokens=A_SHARD)
    for one_pass in (seen[:NUM_SHARDS], seen[NUM_SHARDS:]):
        assert sorted(one_pass) == SAMPLES
