"""Scripts with trainers of others, loops over epochs, and what every site has by itself."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="an optimizer that accelerate wraps is taken for torch's own",
        rule="the ramp of a late joiner needs the hooks of the optimizer inside",
        where="node.worker.wrapped:unwrapped",
        old="        optimizer = inner",
        new="        break",
        tests=("tests/unit/worker/test_trainers.py::test_a_wrapped_optimizer_joins_a_run_that_is_under_way",),
    ),
    Mutation(
        name="a trainer's tokens are not begun anew at a step",
        rule="a step counts what was trained on since the last one",
        where="src.atoll.integrations.training:Training.step",
        old="self._tokens, self._loss = 0, None",
        new="self._loss = None",
        tests=("tests/unit/worker/test_trainers.py::test_a_trainer_counts_what_it_trained_on_and_ends_with_the_run",),
    ),
    Mutation(
        name="what a trainer knows goes before what the script says",
        rule="options of a script count",
        where="src.atoll.integrations.training:Training.begin",
        old="{**options, **self._options}",
        new="{**self._options, **options}",
        tests=("tests/unit/worker/test_trainers.py::test_what_a_script_says_goes_before_what_the_trainer_knows",),
    ),
    Mutation(
        name="a schedule that went on is not set back",
        rule="a schedule is at the step of the run",
        where="src.atoll.integrations.training:follow",
        old="if scheduler.last_epoch != step:",
        new="if scheduler.last_epoch < step:",
        tests=("tests/unit/worker/test_trainers.py::test_a_schedule_follows_the_steps_of_the_run",),
    ),
    Mutation(
        name="a loop over an epoch goes into the next pass",
        rule="a loop by pass ends with the pass",
        where="node.worker.loader:Loader.__iter__",
        old="if self._by_pass and number_of_pass is not None",
        new="if not self._by_pass and number_of_pass is not None",
        tests=("tests/unit/worker/test_loader_by_pass.py::test_each_loop_is_a_pass_and_nothing_is_drawn_twice",),
    ),
    Mutation(
        name="the first batch of the next pass is drawn twice",
        rule="what was given out in a pass counts, and nothing is trained on twice",
        where="node.worker.loader:Loader.__iter__",
        old="if waiting is None:\n            self._batches.rewind()",
        new="if True:\n            self._batches.rewind()",
        tests=("tests/unit/worker/test_loader_by_pass.py",),
    ),
    Mutation(
        name="samples that come back of an earlier pass end an epoch",
        rule="what a lost site had is trained on within the pass of then",
        where="node.worker.loader:Loader.__iter__",
        old="self._batches.next_pass > number_of_pass",
        new="self._batches.next_pass != number_of_pass",
        tests=(
            "tests/unit/worker/test_loader_by_pass.py::test_what_comes_back_of_an_earlier_pass_does_not_end_this_one",
        ),
    ),
    Mutation(
        name="ranks of a site take the same items of a stream",
        rule="an item of a stream is one rank's",
        where="node.worker.site:Site.shard",
        old="self.index * num_readers + self._reader",
        new="self.index * num_readers",
        tests=("tests/unit/worker/test_loader_by_pass.py::test_a_stream_is_divided_by_sites_and_their_ranks",),
    ),
    Mutation(
        name="a site does not count itself among those that train",
        rule="the number of sites is of the contributors of a commit, and the site itself",
        where="node.core.lanes.answers:_apply",
        old="sorted({*site.contributors, site.site_id})",
        new="sorted(site.contributors or (site.site_id,))",
        tests=(
            "tests/unit/node_core/test_overlap.py::test_a_newer_commit_that_comes_while_one_is_written_is_taken_in_its_place",
        ),
    ),
    Mutation(
        name="the base of an adapter is hashed in its first piece alone",
        rule="sites with another base are refused",
        where="node.worker.own_frozen:_pieces",
        old="range(0, flat.numel(), num_at_once)",
        new="range(0, min(flat.numel(), 1), num_at_once)",
        tests=("tests/unit/worker/test_own_frozen.py",),
    ),
    Mutation(
        name="a base that a script changed is not looked at",
        rule="a change of what every site has by itself is named",
        where="node.worker.joined_site:JoinedSite._write_snapshot",
        old="self._tensors.own_frozen.check()",
        new="pass",
        tests=("tests/unit/worker/test_own_frozen.py::test_a_base_that_the_script_changes_is_named",),
    ),
    Mutation(
        name="a long absence is not noticed",
        rule="the learning rate rises again where the run went on without a site",
        where="node.worker.joined_site:JoinedSite._apply",
        old="num_missed > self._ramp_steps",
        new="False",
        tests=("tests/unit/worker/test_ramp_again.py",),
    ),
    Mutation(
        name="any missed step lets the learning rate rise again",
        rule="a short absence changes nothing",
        where="node.worker.joined_site:JoinedSite._apply",
        old="num_missed > self._ramp_steps",
        new="num_missed > 0",
        tests=("tests/unit/worker/test_ramp_again.py",),
    ),
    Mutation(
        name="a script's loss that rises is no failure of the demo",
        rule="the demo judges what it shows",
        where="src.atoll.cli.demo_script:loss_failures",
        old="losses.last < losses.first:",
        new="True:",
        tests=("tests/unit/cli/test_demo_report.py",),
    ),
)
