"""How the ranks of a site share a model."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

SETTINGS = "tests/unit/parallel/test_parallel_settings.py"

MUTATIONS = (
    Mutation(
        name="a schedule that divides backward passes goes with zero=3",
        rule="a layout whose gradients would be wrong is refused",
        where="node.parallel.settings:_check",
        old="if settings.pp_schedule in DIVIDING_SCHEDULES and",
        new="if False and",
        tests=(f"{SETTINGS}::test_what_contradicts_is_refused_with_what_to_choose",),
    ),
    Mutation(
        name="copies of the embedding are trained apart",
        rule="a tensor that is tied is trained once",
        where="node.parallel.settings:check_model",
        old="if model.tie_embeddings and settings.pp > 1 and",
        new="if False and",
        tests=(f"{SETTINGS}::test_no_rank_has_the_matrix_of_tied_embeddings_twice",),
    ),
    Mutation(
        name="heads are cut in two",
        rule="a model is shared by whole heads",
        where="node.parallel.settings:check_model",
        old="% settings.tp:",
        new="% 1:",
        tests=(f"{SETTINGS}::test_a_model_that_cannot_be_shared_so_is_refused",),
    ),
    Mutation(
        name="a batch that cannot be shared is cut short",
        rule="the batch of a site does not depend on its layout",
        where="node.parallel.settings:check_batch",
        old="if batch_size % needed:",
        new="if batch_size < needed:",
        tests=(f"{SETTINGS}::test_a_batch_is_shared_equally",),
    ),
    Mutation(
        name="a slice of a slice counts on one rank alone",
        rule="the norm of gradients is that of the whole model",
        where="node.parallel.gradients:clip",
        old="if not placed.is_replicate()",
        new="if placed.is_shard()",
        tests=("tests/unit/parallel/test_gradients.py",),
    ),
    Mutation(
        name="each stage clips its own gradients",
        rule="the norm of gradients is that of the whole model",
        where="node.parallel.gradients:clip",
        old='if mesh is not None and mesh.of("pp") is not None:',
        new="if False:",
        tests=("tests/unit/parallel/test_gradients.py",),
    ),
    Mutation(
        name="the blocks of two stages are taken for copies",
        rule="what only looks alike is asked about",
        where="node.core.ranks.replicas:check_replicas",
        old="if names[other] != names[number] and",
        new="if False and",
        tests=("tests/unit/local/test_pieces.py::test_stages_that_were_cut_out_of_a_list_are_asked_about",),
    ),
    Mutation(
        name="slices of a matrix are taken for copies",
        rule="what only looks alike is asked about",
        where="node.core.ranks.replicas:check_replicas",
        old="if known.first_values != piece.first_values:",
        new="if False:",
        tests=("tests/unit/local/test_pieces.py::test_slices_that_are_tensors_of_their_own_are_asked_about",),
    ),
    Mutation(
        name="what two stages have counts twice",
        rule="the norm of gradients is that of the whole model",
        where="node.parallel.gradients:clip",
        old="        if not is_counted:\n            continue\n",
        new="",
        tests=("tests/unit/parallel/test_gradients.py",),
    ),
    Mutation(
        name="a tied tensor is listed under its name in the stage",
        rule="tied weights across stages give the manifest of one rank",
        where="node.worker.naming:Naming.also",
        old="return {target, *(alias for alias, other in self.tied.items() if other == target)}",
        new="return {name}",
        tests=("tests/unit/worker/test_naming.py",),
    ),
    Mutation(
        name="blocks of a stage are taken for those of the first",
        rule="the first block of a stage is not that of the model",
        where="node.worker.naming:Naming.name",
        old="return found + own[end:]",
        new="return own",
        tests=("tests/unit/worker/test_naming.py",),
    ),
    Mutation(
        name="stages of a rank lie as in a loop, whatever the schedule",
        rule="each block is in one stage",
        where="node.parallel.passes:stages_of",
        old="if settings.pp_schedule in V_SCHEDULES else",
        new="if False else",
        tests=(f"{SETTINGS}::test_each_block_is_in_one_stage_of_one_rank",),
    ),
    Mutation(
        name="ranks of one batch say two losses",
        rule="a data rank has one loss",
        where="node.core.ranks.reports:sealed_by_all",
        old="if not math.isclose(loss, known, rel_tol=SAME_LOSS, abs_tol=SAME_LOSS):",
        new="if False:",
        tests=("tests/unit/local/test_worker_group.py::test_ranks_of_one_batch_have_one_loss",),
    ),
)
