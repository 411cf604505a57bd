"""Ranks that read the outer values where they lie."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

CORE = "tests/unit/node_core/test_in_place.py"
FILES = "tests/unit/dataplane/test_in_place.py"
PIECES = "tests/unit/worker/test_worker_pieces.py"

MUTATIONS = (
    Mutation(
        name="what a late site's difference starts from is let go",
        rule="the old outer values stay for ranks whose snapshot the commit does not hold",
        where="node.core.state:SiteState.nobody_reads",
        old="snapshot.is_sealed and snapshot.committed_in == commit",
        new="True",
        tests=(CORE,),
    ),
    Mutation(
        name="ranks that were told to train on read nothing",
        rule="the old outer values stay for ranks that go on from their snapshot",
        where="node.core.state:SiteState.nobody_reads",
        old="(snapshot.generation, snapshot.step) == (workers.generation, workers.ask.step)",
        new="snapshot.generation == workers.generation",
        tests=(f"{CORE}::test_they_stay_where_ranks_were_told_to_train_on",),
    ),
    Mutation(
        name="a commit is applied while ranks take the one before",
        rule="the outer state stays while ranks take it where it lies",
        where="node.core.state:SiteState.publish_is_in_use",
        old="if self.workers.running and self.workers.read_in_place and self.workers.is_taking:",
        new="if False:",
        tests=(f"{CORE}::test_the_outer_state_stays_while_ranks_take_it",),
    ),
    Mutation(
        name="ranks go on from values that are gone",
        rule="ranks whose outer values were let go wait until values are published",
        where="node.core.lanes.answers:decide",
        old="if goes_on and site.disk.has_let_go else decision",
        new="if False else decision",
        tests=(f"{CORE}::test_ranks_that_go_on_from_values_that_went_wait_until_these_are_published_again",),
    ),
    Mutation(
        name="a record that loses its place is not kept for ranks",
        rule="what ranks may still read is moved to PUBLISH before its place is given away",
        where="node.dataplane.in_place:InPlace.move_away",
        old="        scatter(pin.data[: spec.num_bytes], self._values, spec)\n",
        new="",
        tests=(FILES,),
    ),
    Mutation(
        name="what was moved to PUBLISH stays mapped",
        rule="what a node moved to PUBLISH is no memory of its process",
        where="node.dataplane.in_place:InPlace.move_away",
        old="        self._map.madvise(mmap.MADV_DONTNEED, spec.offset_bytes, spec.num_bytes)\n",
        new="",
        tests=(f"{FILES}::test_what_is_moved_away_is_not_memory_of_the_node",),
    ),
    Mutation(
        name="what was copied to PUBLISH stays mapped",
        rule="what a node moved to PUBLISH is no memory of its process",
        where="node.daemon.published:Published.fill",
        old="            self._in_place.unmap()\n",
        new="            pass\n",
        tests=("tests/unit/local/test_plane.py::test_what_a_node_has_published_in_a_file_is_not_memory_of_the_node",),
    ),
    Mutation(
        name="what is let go is read on",
        rule="values that are gone are an error to who reads them",
        where="node.worker.in_place:PublishInPlace.refresh",
        old="if entry == GONE:",
        new="if False:",
        tests=(f"{FILES}::test_what_is_let_go_is_not_copied_and_no_rank_reads_it",),
    ),
    Mutation(
        name="a rank does not look a second time",
        rule="what a rank read was whole if the table says the same after it",
        where="node.worker.in_place:PublishInPlace.is_current",
        old="return self._table.tolist() == self._mapped",
        new="return True",
        tests=(f"{FILES}::test_what_is_read_in_place_is_what_was_published",),
    ),
    Mutation(
        name="outer values that moved are evaluated",
        rule="outer values that are moved while a rank reads them are read again",
        where="node.worker.pieces:SharedTensors._looks",
        old="if self._in_place is None or self._in_place.is_current:",
        new="if True:",
        tests=(PIECES,),
    ),
    Mutation(
        name="a rank that has evaluated for long takes what lies where its values lay",
        rule="outer values that are moved while a rank reads them are read again",
        where="node.worker.pieces:SharedTensors.swap_back",
        old="for _ in self._looks():",
        new="for _ in (None,):",
        tests=(PIECES,),
    ),
    Mutation(
        name="what was trained is lost where outer values cannot be swapped in",
        rule="the local values come back",
        where="node.worker.pieces:SharedTensors.swap_in",
        old="            self._put_back(saved)\n            raise",
        new="            raise",
        tests=(f"{PIECES}::test_what_cannot_be_swapped_in_leaves_what_was_trained",),
    ),
    Mutation(
        name="copies are looked for in empty shards",
        rule="a rank may have no element of a parameter",
        where="node.worker.optimizer_copies:OptimizerCopies.__init__",
        old=" and held.local().numel()",
        new="",
        tests=("tests/unit/worker/test_scripts.py::test_a_rank_without_an_element_of_a_parameter_takes_updates",),
    ),
    Mutation(
        name="masters are forgotten where a merge has rounded them and the parameter apart",
        rule="copies that an optimizer has of parameters take each update",
        where="node.worker.optimizer_copies:OptimizerCopies._learn",
        old=" or (key in known and _is_near(value, held))",
        new="",
        tests=(
            "tests/unit/worker/test_scripts.py::test_masters_take_each_update_though_the_casts_of_sums_are_no_sums_of_casts",
        ),
    ),
    Mutation(
        name="masters beside the state are left as they were after a crash",
        rule="copies that an optimizer has of parameters take each update",
        where="node.worker.optimizer_copies:OptimizerCopies.find",
        old="            if searches:\n                for parameter, other",
        new="            if searches and not is_restored:\n                for parameter, other",
        tests=("tests/unit/worker/test_script_state.py::test_masters_take_the_runs_values_after_a_crash",),
    ),
    Mutation(
        name="what damage has spoilt in PUBLISH stays",
        rule="a record that is mended is mended where ranks read it, too",
        where="node.daemon.plane:DataPlane._mend.work",
        old="self.published.mended(outer, damaged, self._pool)",
        new="pass",
        tests=("tests/unit/local/test_plane.py::test_what_ranks_read_in_place_is_mended_with_it",),
    ),
    Mutation(
        name="an outer file that is made anew stays with its node",
        rule="blocks of a state that is discarded are free for the next one",
        where="node.dataplane.in_place:InPlace.leave",
        old="self._outer = None",
        new="pass",
        tests=(f"{FILES}::test_a_file_that_is_made_anew_is_held_by_no_node",),
    ),
)
