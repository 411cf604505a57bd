"""Training scripts that fail raw."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

OUTPUT = "tests/unit/local/test_rank_output.py"
LOSSES = "tests/unit/worker/test_losses.py"

MUTATIONS = (
    Mutation(
        name="ranks of a site draw alike",
        rule="ranks of a site that see other batches have another seed",
        where="node.worker.joined_site:JoinedSite.__init__",
        old="told.data_seed ^ told.reader",
        new="told.data_seed",
        tests=(
            "tests/unit/worker/test_scripts_at_work.py::test_a_loop_that_draws_its_batches_itself_draws_those_of_its_site",
        ),
    ),
    Mutation(
        name="a loss that is not finite is in the mean",
        rule="a step whose loss is not finite is left out of the mean",
        where="node.worker.losses:Losses.take",
        old="finite = [loss for loss in losses if math.isfinite(loss)]",
        new="finite = losses",
        tests=(f"{LOSSES}::test_a_step_with_a_loss_that_is_not_finite_is_left_out_counted_and_said",),
    ),
    Mutation(
        name="a row of bad losses ends at a boundary",
        rule="steps in a row count over boundaries",
        where="node.worker.losses:Losses._judge",
        old="        self._in_a_row = row\n",
        new="        self._in_a_row = 0\n",
        tests=(f"{LOSSES}::test_so_many_in_a_row_end_the_site_also_over_a_boundary",),
    ),
    Mutation(
        name="parameters that a bad step reached are contributed",
        rule="after a loss that is not finite the parameters are looked at before they are contributed",
        where="node.worker.losses:Losses._judge",
        old="if (name := _not_finite(held)) is not None:",
        new="if (name := None) is not None:",
        tests=(f"{LOSSES}::test_a_step_that_reached_the_parameters_ends_the_site_by_name",),
    ),
    Mutation(
        name="the last rank that failed is taken for the first",
        rule="of a crash the rank that failed first is shown",
        where="node.daemon.rank_output:_first",
        old="return min(signs)[1]",
        new="return max(signs)[1]",
        tests=(f"{OUTPUT}::test_the_first_that_failed_is_shown_and_the_others_are_a_line_each",),
    ),
    Mutation(
        name="a handled traceback is taken for the crash",
        rule="a traceback that many lines follow was handled",
        where="node.daemon.rank_output:RankOutput._follow",
        old="            self._traceback = None\n",
        new="            pass\n",
        tests=(f"{OUTPUT}::test_what_a_script_has_handled_is_no_crash",),
    ),
    Mutation(
        name="a traceback of any length is kept",
        rule="what is kept of a traceback has a bound",
        where="node.daemon.rank_output:_Traceback.add",
        old="        while self.tail_bytes > TAIL_BYTES:",
        new="        while False:",
        tests=(f"{OUTPUT}::test_a_traceback_has_a_bound_and_keeps_both_ends",),
    ),
    Mutation(
        name="a script has no time to clean up",
        rule="when its node goes, a script's own clean-up runs",
        where="node.worker.node_gone:end_process",
        old="    threading.Event().wait(CLEAN_UP_S)\n",
        new="",
        tests=(
            "tests/process/test_worker_processes.py::test_a_script_cleans_up_when_its_node_goes_and_ends_whatever_hangs",
        ),
    ),
    Mutation(
        name="a script of a killed node has no time to clean up",
        rule="when its node is killed, a script's own clean-up runs",
        where="node.daemon.child:_guard",
        old="            signal.alarm(CLEAN_UP_S)\n            continue\n",
        new="            return int(signal.SIGKILL)\n",
        tests=("tests/process/test_worker_processes.py::test_a_script_cleans_up_when_its_node_is_killed",),
    ),
    Mutation(
        name="the node's own limit of a start is not heard",
        rule="--start-limit-s takes the place of the run's limit",
        where="node.core.ranks.generations:Generations.watch",
        old="self._start_limit_s or limits",
        new="limits",
        tests=("tests/unit/node_core/test_generations.py",),
    ),
    Mutation(
        name="copies of ranks with other batches may begin differently",
        rule="copies that begin differently are refused by name, and none is overwritten in silence",
        where="node.core.ranks.replicas:check_replicas",
        old="first_plain.setdefault(piece.name, (number, piece))",
        new="first_plain.setdefault(f'{rank.data_rank} {piece.name}', (number, piece))",
        tests=("tests/unit/local/test_pieces.py::test_slices_that_are_tensors_of_their_own_are_asked_about",),
    ),
    Mutation(
        name="the length of a run in tokens jumps with each commit",
        rule="the estimate of a run's length is held until it is off by a tenth",
        where="node.worker.run_length:RunLength.in_steps",
        old="if num_tokens != self._of_tokens or abs(found - self._steps) > SLACK * self._steps:",
        new="if True:",
        tests=("tests/unit/worker/test_worker_site.py::test_run_length_in_tokens_is_estimated",),
    ),
    Mutation(
        name="the part of a run that is done falls",
        rule="the part of the run that is done does not fall",
        where="node.worker.run_length:RunLength.share",
        old="max(self._share, min(1.0, done / length))",
        new="min(1.0, done / length)",
        tests=("tests/unit/worker/test_worker_site.py::test_run_length_in_tokens_is_estimated",),
    ),
    Mutation(
        name="a constant buffer may change",
        rule="a constant buffer that changes is refused by name",
        where="node.worker.frozen:FrozenTensors.check",
        old="                if held.parameter is None:\n",
        new="                if held.parameter is None:\n                    continue\n",
        tests=(
            "tests/unit/worker/test_scripts.py::test_a_constant_buffer_travels_once_and_a_change_of_it_is_refused_by_name",
        ),
    ),
    Mutation(
        name="a lazy module fails raw",
        rule="parameters without a shape are refused by name",
        where="node.worker.tensor_kinds:check_kind",
        old="    if is_lazy(tensor):",
        new="    if False:",
        tests=(
            "tests/unit/worker/test_scripts.py::test_a_lazy_module_is_refused_by_name_until_a_batch_went_through_it",
        ),
    ),
    Mutation(
        name="a commit that makes losses rise seems not at fault",
        rule="losses are as before where none is higher than those of the window before, by as much as these differ",
        where="node.worker.losses:Losses._num_as_before",
        old="<= 2 * highest - least",
        new="<= math.inf",
        tests=("tests/unit/worker/test_losses.py",),
    ),
    Mutation(
        name="steps before a commit speak for it",
        rule="only losses since a commit was taken say that it may not be at fault",
        where="node.worker.losses:Losses.took_commit",
        old="self._num_before_commit = len(self._steps)",
        new="pass",
        tests=("tests/unit/worker/test_losses.py",),
    ),
    Mutation(
        name="a step within outer parameters is lost",
        rule="within outer parameters no optimizer does a step",
        where="node.worker.script_checks:ScriptChecks.no_steps",
        old="            yield\n",
        new="            for handle in handles:\n                handle.remove()\n            yield\n",
        tests=("tests/unit/worker/test_calls_out_of_place.py",),
    ),
    Mutation(
        name="what is logged too late is lost without a word",
        rule="what is logged after a site has left is said to be lost",
        where="node.worker.logged_values:LoggedValues.close",
        old="self._is_closed = True",
        new="pass",
        tests=("tests/unit/worker/test_calls_out_of_place.py",),
    ),
)
