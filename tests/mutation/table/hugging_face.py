"""Folders of Hugging Face's transformers."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        name="an exported model is computed with another epsilon",
        rule="an exported model gives the logits that it gives here",
        where="node.dataplane.hugging_face:to_config",
        old='"rms_norm_eps": model.norm_eps',
        new='"rms_norm_eps": 1e-5',
        tests=("tests/unit/worker/test_hugging_face.py::test_an_independent_llama_computes_the_same_from_the_folder",),
    ),
    Mutation(
        name="gate and up change places in an exported model",
        rule="an exported model gives the logits that it gives here",
        where="node.dataplane.hugging_face:tensors_of",
        old='"mlp.gate_proj", (ffn_dim, dim)),\n        ("feed_forward.up", "mlp.up_proj"',
        new='"mlp.up_proj", (ffn_dim, dim)),\n        ("feed_forward.up", "mlp.gate_proj"',
        tests=("tests/unit/worker/test_hugging_face.py::test_an_independent_llama_computes_the_same_from_the_folder",),
    ),
    Mutation(
        name="a bias is left out of pretrained values in silence",
        rule="what the built-in model cannot compute is refused",
        where="node.dataplane.hugging_face_weights:Weights._add",
        old="if hf_name != HEAD and not hf_name.endswith(NOT_LEARNED):",
        new="if False:",
        tests=("tests/unit/worker/test_hugging_face.py::test_weights_that_are_not_of_the_model_are_refused",),
    ),
    Mutation(
        name="a run starts from pretrained values of other heads",
        rule="a run starts from a model of its own sizes alone",
        where="node.dataplane.hugging_face:check_same",
        old='if item.name != "max_sequence" and theirs != ours:',
        new='if item.name == "dim" and theirs != ours:',
        tests=(
            "tests/unit/worker/test_hugging_face.py::test_the_run_must_have_the_folders_model_but_for_its_longest_sequence",
        ),
    ),
    Mutation(
        name="an older version computes a run with the rotary base that it knows",
        rule="a run says by name what an older version would pass over",
        where="protocol.settings:needs_of",
        old="model.rope_base != usual.rope_base",
        new="False",
        tests=("tests/unit/protocol/test_settings.py",),
    ),
)
