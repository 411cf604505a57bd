"""The outer optimizer of a run, and its rates."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="momentum with error feedback of averages",
        rule="error feedback works against outer momentum",
        where="protocol.outer:chosen",
        old="if settings.sync.error_feedback or settings.sync.error_feedback_down:",
        new="if settings.sync.error_feedback:",
        tests=("tests/unit/protocol/test_outer.py",),
    ),
    Mutation(
        name="auto is chosen at each start",
        rule="the outer optimizer is chosen once and kept",
        where="protocol.outer:resolved",
        old="now = known or chosen(settings)[0]",
        new="now = chosen(settings)[0]",
        tests=("tests/unit/protocol/test_outer.py",),
    ),
    Mutation(
        name="the coordinator keeps auto in its store",
        rule="nothing is left to be chosen in a stored run",
        where="coordinator.store:run_of",
        old="        settings = resolved(settings)\n",
        new="",
        tests=("tests/unit/coordinator/test_store_contract.py::test_what_a_run_leaves_to_be_chosen_is_chosen_once",),
    ),
    Mutation(
        name="the coordinator goes on with auto",
        rule="what counts is what the store has chosen",
        where="coordinator.service:CoordinatorServer.__init__",
        old="settings = self.settings = settings_from_json(persisted.run.settings_json)",
        new="self.settings = settings",
        tests=("tests/process/test_presets.py::test_what_is_left_to_be_chosen_is_said_and_kept",),
    ),
    Mutation(
        name="momentum whatever the length",
        rule="a short run takes a plain mean",
        where="protocol.outer:chosen",
        old="if number < SHORT_SYNCS:",
        new="if False:",
        tests=("tests/unit/protocol/test_outer.py",),
    ),
    Mutation(
        name="a learning rate that decays to nothing",
        rule="a tenth of the outer learning rate is left at the end",
        where="protocol.outer",
        old="FINAL_SHARE = 0.1",
        new="FINAL_SHARE = 0.0",
        tests=("tests/unit/protocol/test_outer.py",),
    ),
    Mutation(
        name="a dispute is settled with the rates of the start",
        rule="the coordinator computes with the rates of the commit",
        where="coordinator.core.log.evidence:_hash_of",
        old="outer=outer_at(run.settings, record.commit, spec.group),",
        new="outer=outer_at(run.settings, replace(record.commit, run_step=0), spec.group),",
        tests=("tests/unit/coordinator/test_disputes.py",),
    ),
    Mutation(
        name="a run begins with settings that have no effect",
        rule="a run does not begin with a setting that has no effect",
        where="coordinator.store:run_of",
        old="        check_effects(settings)\n",
        new="",
        tests=(
            "tests/unit/protocol/test_effects.py::"
            "test_what_has_no_effect_is_refused_where_a_run_begins_and_no_run_that_has_begun_with_it",
        ),
    ),
    Mutation(
        name="AdamW without a momentum, unsaid",
        rule="a run does not begin with AdamW whose beta1 is 0",
        where="protocol.effects:_check_outer",
        old='if outer.optimizer == "adamw" and not outer.momentum:',
        new="if False:",
        tests=(
            "tests/unit/protocol/test_effects.py::"
            "test_what_has_no_effect_is_refused_where_a_run_begins_and_no_run_that_has_begun_with_it",
        ),
    ),
    Mutation(
        name="init says nothing of a run that is too short for its preset",
        rule="a run that is too short for its settings is told so",
        where="src.atoll.cli.init:run",
        old="if advice := too_short(settings):",
        new="if advice := '':",
        tests=("tests/unit/cli/test_run_file.py::test_init_says_that_a_run_is_too_short_for_its_preset",),
    ),
)
