"""Errors of averages: two-sided error feedback."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

UNIT = ("tests/unit/exchange/test_average_errors.py",)
SITES = ("tests/process/test_two_sided.py",)
SETTINGS = ("tests/unit/protocol/test_settings.py",)

MUTATIONS = (
    Mutation(
        name="the error of any attempt at the last average will do",
        rule="only a commit makes the error of an average count",
        where="node.exchange.sync.average_errors:AverageErrors.of",
        old="found = self._kept.get(attempt, {}).get(chunk) if attempt is not None else None",
        new="found = next((kept[chunk] for kept in reversed(self._kept.values()) if chunk in kept), None)",
        tests=SITES,
    ),
    Mutation(
        name="the error of an average is not added",
        rule="payload = encode(average + beta * e)",
        where="node.dataplane.averages:encode",
        old="kernels.encode(way.down, average, error=error, beta=np.float32(way.error_beta_down))",
        new="kernels.encode(way.down, average)",
        tests=SITES,
    ),
    Mutation(
        name="the error of an average is of the average alone",
        rule="e' = average + beta * e - decode(payload)",
        where="node.dataplane.averages:lose",
        old="leave_over(way.down, payload, error,",
        new="leave_over(way.down, payload, arithmetic.NOTHING,",
        tests=(
            "tests/process/test_two_sided.py::test_each_reducer_adds_what_it_lost_of_its_last_average_that_was_committed",
        ),
    ),
    Mutation(
        name="what is left of an average is not kept",
        rule="what the codec loses of an average comes with the next one of the same reducer",
        where="node.exchange.sync.reducer:Reducer._average",
        old="        self.errors.keep(AttemptKey.of(plan), chunk, left)\n",
        new="",
        tests=SITES,
    ),
    Mutation(
        name="an attempt in force is forgotten with its sync",
        rule="only a commit makes the error of an average count",
        where="node.exchange.sync.average_errors:AverageErrors._forget_void",
        old="if key not in in_force and key.sync not in under_way]",
        new="if key.sync not in under_way]",
        tests=UNIT,
    ),
    Mutation(
        name="an attempt under way is forgotten with another sync",
        rule="what is not over is not forgotten",
        where="node.exchange.sync.average_errors:AverageErrors._forget_void",
        old="if key not in in_force and key.sync not in under_way]",
        new="if key not in in_force]",
        tests=UNIT,
    ),
    Mutation(
        name="the log is asked before the syncs in flight",
        rule="a commit that is made meanwhile keeps its error",
        where="node.exchange.sync.average_errors:AverageErrors._forget_void",
        old="            under_way = set(in_flight)  # first: what is over by now and was committed is in force below\n"
        "            in_force = payloads.attempts_in_force()\n",
        new="            in_force = payloads.attempts_in_force()\n            under_way = set(in_flight)\n",
        tests=UNIT,
    ),
    Mutation(
        name="errors of failed attempts pile up",
        rule="of each chunk there is one error for a sync, however many attempts fail",
        where="node.exchange.sync.average_errors:AverageErrors.keep",
        old="key.sync == attempt.sync and key <= attempt]",
        new="key == attempt]",
        tests=UNIT,
    ),
    Mutation(
        name="a disk without room for an error ends the node",
        rule="an error may be lost, the sync may not",
        where="node.exchange.sync.average_errors:AverageErrors.keep",
        old="            return\n",
        new="            raise\n",
        tests=UNIT,
    ),
    Mutation(
        name="an error that cannot be read ends the node",
        rule="an error may be lost, the sync may not",
        where="node.exchange.sync.average_errors:AverageErrors.of",
        old="            return NOTHING\n        return",
        new="            raise\n        return",
        tests=UNIT,
    ),
    Mutation(
        name="errors take the memory of contributions",
        rule="what a reducer holds in memory is bounded",
        where="node.exchange.hub:Hub.allow",
        old="reduce_buffer_bytes - of_errors",
        new="reduce_buffer_bytes",
        tests=("tests/unit/exchange/test_average_errors.py::test_errors_have_half_of_the_memory_where_they_are_kept",),
    ),
    Mutation(
        name="errors of averages are not counted as retained",
        rule="what a reducer holds is shown",
        where="node.exchange.hub:Hub.retained_bytes",
        old="return of_syncs + self.average_errors.num_bytes",
        new="return of_syncs",
        tests=UNIT,
    ),
    Mutation(
        name="an error that is renewed counts as lost",
        rule="every loss of error feedback is counted, and nothing else",
        where="node.exchange.sync.average_errors:AverageErrors._forget_void",
        old=" for chunk in items} - renewed",
        new=" for chunk in items}",
        tests=UNIT,
    ),
    Mutation(
        name="what is kept twice stays on the disk",
        rule="a sync that is over leaves nothing behind",
        where="node.exchange.sync.average_errors:AverageErrors.keep",
        old="        self._free(void)\n",
        new="",
        tests=UNIT,
    ),
    Mutation(
        name="nobody is told that chunks have changed hands",
        rule="every loss of error feedback is counted and said",
        where="node.exchange.hub:Hub.drop_sync",
        old="            self.average_errors.forget_void(self._log, self._exchanges)\n",
        new="            pass\n",
        tests=(
            "tests/process/test_two_sided.py::test_each_reducer_adds_what_it_lost_of_its_last_average_that_was_committed",
        ),
    ),
    Mutation(
        name="averages of the warm-up leave an error",
        rule="1-bit Adam: error feedback begins with the momenta",
        where="protocol.spec:spec_of",
        old="error_beta_down=0.0 if moves_variance else settings.error_feedback_down",
        new="error_beta_down=settings.error_feedback_down",
        tests=("tests/unit/protocol/test_spec.py",),
    ),
    Mutation(
        name="error feedback of averages that lose nothing",
        rule="settings that contradict each other are refused where they are written",
        where="protocol.sync_settings:check_sync",
        old='if sync.error_feedback_down and sync.codec_down in ("fp32", BUNDLE):',
        new='if sync.error_feedback_down and sync.codec_down == "fp32":',
        tests=("tests/unit/protocol/test_settings.py::test_what_contradicts_is_refused_with_what_to_choose",),
    ),
    Mutation(
        name="error feedback of averages whose commit the log has lost",
        rule="settings that contradict each other are refused where they are written",
        where="protocol.sync_settings:check_sync",
        old="(log_commits := sync.log_commits or USUAL_LOG_COMMITS) <= sync.fragments:\n",
        new="(log_commits := sync.log_commits or USUAL_LOG_COMMITS) < 0:\n",
        tests=("tests/unit/protocol/test_settings.py::test_what_contradicts_is_refused_with_what_to_choose",),
    ),
    Mutation(
        name="an older version averages without the errors",
        rule="who cannot do what the run needs is refused",
        where="protocol.settings:needs_of",
        old='        "error feedback of averages": sync.error_feedback_down > 0,\n',
        new="",
        tests=(
            "tests/unit/protocol/test_settings.py::test_an_older_version_that_would_not_train_on_or_mix_is_told_what_the_run_needs",
        ),
    ),
    Mutation(
        name="errors of averages need no room",
        rule="what cannot fit is refused at the door",
        where="node.dataplane.footprint:_errors",
        old="(2 + num_kept) * sum(sizes)",
        new="sum(sizes)",
        tests=("tests/unit/dataplane/test_footprint.py",),
    ),
)
