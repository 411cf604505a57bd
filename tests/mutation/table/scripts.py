"""Training scripts that go wrong in silence."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

SCRIPTS = "tests/unit/worker/test_scripts.py"
STATE = "tests/unit/worker/test_script_state.py"

MUTATIONS = (
    Mutation(
        name="tensors of a script whose keys read alike are one",
        rule="what a script keeps comes back as it was",
        where="node.worker.script_state:_encode",
        old='f"state/{len(tensors)}/{path}"',
        new='f"state/{path}"',
        tests=("tests/unit/worker/test_script_state.py::test_tensors_whose_keys_read_alike_are_kept_apart",),
    ),
    Mutation(
        name="masters that were found do not take the update",
        rule="what comes from the other sites reaches the copies that an optimizer trains",
        where="node.worker.pieces:SharedTensors._take_all",
        old="                self._take(mode, copy, snapshot, publish)\n",
        new="                pass\n",
        tests=(f"{SCRIPTS}::test_masters_that_are_found_take_the_update",),
    ),
    Mutation(
        name="an update that is taken back is chance for ever",
        rule="an optimizer that takes back what comes from the other sites is refused by name",
        where="node.worker.taken_back:TakenBack._close",
        old="self._strikes = struck",
        new="self._strikes = set()",
        tests=(f"{SCRIPTS}::test_an_optimizer_that_takes_updates_back_is_refused_by_name",),
    ),
    Mutation(
        name="momentum after an average is taken for weights of its own",
        rule="a site whose optimizer only goes on as before is not ended",
        where="node.worker.taken_back:TakenBack._close",
        old="(change.square().sum(1) < MIN_TIMES**2 * usual) | ",
        new="",
        tests=(f"{SCRIPTS}::test_momentum_that_goes_on_with_what_an_average_has_undone_takes_nothing_back",),
    ),
    Mutation(
        name="an expert that rests has no step like others",
        rule="a site whose optimizer only goes on as before is not ended",
        where="node.worker.taken_back:TakenBack._close",
        old="moved = squares > 0",
        new="moved = squares >= 0",
        tests=(f"{SCRIPTS}::test_an_expert_that_rests_in_most_steps_and_goes_on_with_its_momentum_takes_nothing_back",),
    ),
    Mutation(
        name="masters of a checkpoint are left as they were",
        rule="after a crash the copies of parameters get the run's values, as the checkpoint names them",
        where="node.worker.optimizer_state:OptimizerState.restore",
        old="            keys.update(stored.copies(index))\n",
        new="            pass\n",
        tests=(f"{STATE}::test_masters_take_the_runs_values_after_a_crash",),
    ),
    Mutation(
        name="a replaced parameter is sent on",
        rule="a parameter that the model does not have any more is refused by name before a snapshot",
        where="node.worker.script_checks:ScriptChecks.check",
        old="        check_in_place(self._tensors)\n",
        new="",
        tests=(f"{SCRIPTS}::test_a_parameter_that_was_replaced_after_join_is_refused",),
    ),
    Mutation(
        name="a call without a step counts",
        rule="steps are those of the optimizer, and tokens of no step have no weight",
        where="node.worker.step_count:StepCount.is_step",
        old="self._is_believed or self._stepped or not",
        new="self._is_believed or self._stepped or True or not",
        tests=(f"{SCRIPTS}::test_calls_without_a_step_count_nothing_and_that_is_said_once",),
    ),
    Mutation(
        name="calls without a step go on for ever",
        rule="calls of site.step without a step are an error when they go on",
        where="node.worker.step_count:StepCount.is_step",
        old="if goes_on or self._in_a_row >= self._max_in_a_row:",
        new="if False:",
        tests=(f"{SCRIPTS}::test_a_call_at_each_microbatch_is_an_error",),
    ),
    Mutation(
        name="a scheduler goes on from another learning rate",
        rule="a scheduler that is kept keeps the learning rates of its optimizer",
        where="node.worker.script_state:ScriptState.restore",
        old="                    _set_rates(group, rates)\n",
        new="                    pass\n",
        tests=(f"{STATE}::test_a_scheduler_and_an_ema_go_on_after_a_crash",),
    ),
    Mutation(
        name="a frozen parameter has no policy",
        rule="patterns of buffers= may name frozen parameters",
        where="node.worker.tensors:_role",
        old="        role = Role.FROZEN\n",
        new="        return Role.FROZEN\n",
        tests=(f"{SCRIPTS}::test_a_frozen_parameter_with_a_policy_is_averaged_and_comes_to_joiners",),
    ),
    Mutation(
        name="each row of microbatches is said",
        rule="calls without a step are said once",
        where="node.worker.step_count:StepCount.is_step",
        old="if self.num_idle == 1:",
        new="if self._in_a_row == 1:",
        tests=("tests/unit/worker/test_scripts.py::test_calls_without_a_step_count_nothing_and_that_is_said_once",),
    ),
    Mutation(
        name="a schedule of a trainer is said to begin again",
        rule="a schedule that is set to the run's step need not be kept",
        where="src.atoll.integrations.training:follow",
        old="    follows_the_run(scheduler.optimizer)\n",
        new="",
        tests=("tests/unit/worker/test_script_state.py::test_a_scheduler_that_is_not_kept_is_said_once",),
    ),
    Mutation(
        name="a scheduler that is not kept begins again without a word",
        rule="a scheduler that no checkpoint has is said",
        where="node.worker.checkpoint:LocalCheckpoints.write",
        old="            self._say(text)\n        self._has_looked",
        new="            pass\n        self._has_looked",
        tests=("tests/unit/worker/test_script_state.py::test_a_scheduler_that_is_not_kept_is_said_once",),
    ),
)
