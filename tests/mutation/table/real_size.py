"""Models of real size: what is hashed, held and synced."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CUTS = "tests/unit/local/test_power_cut.py"

MUTATIONS = (
    Mutation(
        name="a record from others is hashed again",
        rule="bytes of a record are hashed once",
        where="node.dataplane.chunk_store:ChunkStore.replace",
        old="hash or chunk_hash(record.data)",
        new="chunk_hash(record.data)",
        tests=("tests/unit/dataplane/test_outer_state.py::test_bytes_of_a_record_are_hashed_once",),
    ),
    Mutation(
        name="a power cut may take what Done was said of",
        rule="payloads are on the disk for good before Done is said, unless the run has it otherwise",
        where="src.atoll.cli.template",
        old='"sync": {"fsync": True}',
        new='"sync": {}',
        tests=("tests/unit/cli/test_run_file.py::test_what_init_writes_are_the_defaults",),
    ),
    Mutation(
        name="payloads are sealed and not synced",
        rule="payloads are on the disk for good before Done is said, unless the run has it otherwise",
        where="node.dataplane.payload_log:PayloadLog._file",
        old="is_new=is_new, fsync=fsync)",
        new="is_new=is_new, fsync=False)",
        tests=(CUTS,),
    ),
    Mutation(
        name="each thread of the disk keeps what it computed in",
        rule="of the disk's threads, of which there are many, none keeps arrays of chunks",
        where="protocol.codecs.scratch:freed",
        old='_local.__dict__.pop("arrays", None)',
        new="pass",
        tests=("tests/unit/local/test_computing.py",),
    ),
    Mutation(
        name="memory that threads compute in is not counted",
        rule="the memory of a node counts all of its parts",
        where="node.dataplane.footprint:Footprint.memory_bytes",
        old=" + self.thread_bytes",
        new="",
        tests=("tests/unit/cli/test_dry_run.py::test_memory_follows_the_formula",),
    ),
)
