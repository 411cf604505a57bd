"""What runs beside the training script."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="checkpoint that crashes workers is named again",
        rule="workers do not go on from a checkpoint with which others crashed before their first step",
        where="node.worker.checkpoint:LocalCheckpoints._offered",
        old="            if gives_up or item in crashed_from:\n",
        new="            if gives_up:\n",
        tests=("tests/unit/worker/test_worker_checkpoint.py::test_one_that_workers_crashed_with_is_not_taken_again",),
    ),
    Mutation(
        name="damaged checkpoint is loaded",
        rule="a checkpoint of the inner optimizer that is torn or damaged is passed over",
        where="node.worker.checkpoint:LocalCheckpoints._load",
        old="if digest.finish().hex() != reader.metadata.get(checkpoint_file.HASH_KEY):",
        new="if False:",
        tests=("tests/unit/worker/test_worker_checkpoint.py::test_a_damaged_file_is_passed_over",),
    ),
    Mutation(
        name="reading a checkpoint counts as hanging",
        rule="a rank that reads a large checkpoint is not killed as one that hangs",
        where="node.worker.checkpoint:LocalCheckpoints._announce",
        old="            self._busy(what, READ_LIMIT_S)\n",
        new="            del what\n",
        tests=(
            "tests/unit/worker/test_worker_checkpoint.py::test_reading_for_longer_than_workers_have_to_start_is_getting_on",
        ),
    ),
    Mutation(
        name="checkpoint is written in place",
        rule="a checkpoint that could not be written to its end is not there, and the one before it is",
        where="node.worker.checkpoint:LocalCheckpoints._write",
        old='aside = path.with_suffix(".new")',
        new="aside = path",
        tests=(
            "tests/unit/worker/test_worker_checkpoint.py::test_a_process_that_dies_at_any_moment_of_a_write_leaves_one_that_can_be_loaded",
        ),
    ),
    Mutation(
        name="checkpoint leaves room for its own rank only",
        rule="checkpoints of all ranks leave the node as much room as they need",
        where="node.worker.checkpoint:LocalCheckpoints._check_room",
        old="site_bytes = need_bytes * self._world",
        new="site_bytes = need_bytes",
        tests=(
            "tests/unit/worker/test_worker_checkpoint.py::test_ranks_that_look_at_the_same_moment_leave_room_for_each_other",
        ),
    ),
    Mutation(
        name="frozen parameter that the script writes to",
        rule="a frozen parameter that the script changes is found and named at the next boundary",
        where="node.worker.frozen:FrozenTensors.check",
        old="for index in dict.fromkeys(due + self._some()):",
        new="for index in dict.fromkeys(due):",
        tests=("tests/unit/worker/test_worker_site.py::test_a_frozen_parameter_that_the_script_changes_is_refused",),
    ),
    Mutation(
        name="one frozen parameter is looked at again and again",
        rule="all frozen parameters are compared in turn",
        where="node.worker.frozen:FrozenTensors._some",
        old="            self._next = (self._next + 1) % len(self._pairs)\n",
        new="            break\n",
        tests=("tests/unit/worker/test_worker_site.py::test_a_frozen_parameter_that_the_script_changes_is_refused",),
    ),
    Mutation(
        name="state of a sharded optimizer is not kept",
        rule="each rank's checkpoint has its part of a ZeroRedundancyOptimizer's state",
        where="node.worker.optimizer_state:_keeper",
        old="    if _is_zero(optimizer):\n",
        new="    if False:\n",
        tests=(
            "tests/unit/worker/test_worker_checkpoint.py::test_each_rank_keeps_its_part_of_a_zero_redundancy_optimizer",
        ),
    ),
    Mutation(
        name="checkpoint of another optimizer is loaded",
        rule="a checkpoint is restored only into an optimizer that keeps the same",
        where="node.worker.optimizer_state:OptimizerState.layout",
        old='            "switches": [[_switches(group) for group in groups] for groups in self._first_groups],\n',
        new="",
        tests=("tests/unit/worker/test_worker_checkpoint.py::test_what_does_not_fit_is_refused_by_name",),
    ),
    Mutation(
        name="weights tied through a transpose",
        rule="tensors that share memory without being the same are refused by name",
        where="node.worker.shared_storage:_share_elements",
        old="return bool(in_b.any())",
        new="return False",
        tests=(
            "tests/unit/worker/test_worker_tensors.py::test_weights_that_share_memory_in_another_shape_are_refused",
        ),
    ),
    Mutation(
        name="buffer without a mean is not said",
        rule="a buffer whose values have no mean is named at join, with the way out",
        where="node.worker.tensors:ModelTensors.mean_buffers_not_finite",
        old="h.spec.role is Role.BUFFER_MEAN and not bool(h.local().isfinite().all())",
        new="h.spec.role is Role.BUFFER_MEAN and bool(h.local().isnan().all())",
        tests=("tests/unit/worker/test_worker_tensors.py::test_buffers_without_a_mean_are_known_by_name",),
    ),
    Mutation(
        name="buffer on the memory of a parameter",
        rule="one memory under two names is refused by name unless both say what is done with it",
        where="node.worker.tensors:find_tensors",
        old="        _check_tied(items)\n",
        new="",
        tests=("tests/unit/worker/test_worker_tensors.py::test_a_buffer_on_the_memory_of_a_parameter_is_refused",),
    ),
)
