"""Averages that contributions which stand out cannot break."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

ROBUST = "tests/unit/dataplane/test_robust.py"
NORMS = "tests/unit/coordinator/test_norms.py"

MUTATIONS = (
    Mutation(
        name="what stands out is not clipped",
        rule="no contribution counts with more than `clip` times the median norm",
        where="node.dataplane.sync_data:SyncData._make_robust",
        old="elif way.clipped and min(factors) < 1:",
        new="elif way.clipped and min(factors) < 0:",
        tests=(ROBUST,),
    ),
    Mutation(
        name="what stands out is added once more",
        rule="an average that is clipped is computed anew",
        where="node.dataplane.sync_data:SyncData._make_robust",
        old="            average.fill(0)\n",
        new="",
        tests=(ROBUST,),
    ),
    Mutation(
        name="the largest norm counts as the median",
        rule="what is clipped is held against the median",
        where="protocol.clipping:factors",
        old="moved[(len(moved) - 1) // 2] + moved[len(moved) // 2]",
        new="moved[-1] + moved[len(moved) // 2]",
        tests=(ROBUST,),
    ),
    Mutation(
        name="of two contributions one stands out",
        rule="of two nobody can say which one stands out",
        where="protocol.clipping",
        old="LEAST_NORMS = 3",
        new="LEAST_NORMS = 2",
        tests=(ROBUST,),
    ),
    Mutation(
        name="who is clipped counts less where an element is divided",
        rule="an element of a bundle is divided by the weights of the sites that sent it",
        where="protocol.codecs.bundles:Bundle.weighed",
        old="Weight(share * factor, share)",
        new="Weight(share * factor, share * factor)",
        tests=("tests/unit/codecs/test_sparse_codecs.py",),
    ),
    Mutation(
        name="the coordinator does not clip a bundle",
        rule="what the coordinator finds in a dispute is what the sites hold",
        where="protocol.codecs.bundles:plain",
        old='array("f", [of_values * value])[0]',
        new='array("f", [of_site * value])[0]',
        tests=("tests/unit/codecs/test_sparse_codecs.py",),
    ),
    Mutation(
        name="a reducer chooses at what a bundle is clipped",
        rule="a bundle is clipped as the settings say",
        where="node.dataplane.sync_data:SyncData.check_payload",
        old="(bundle.codec, found, bundle.clip) != (way.up, way.aggregation, way.clipped)",
        new="(bundle.codec, found) != (way.up, way.aggregation)",
        tests=(ROBUST,),
    ),
    Mutation(
        name="a bundle is clipped at nothing",
        rule="a bundle that is clipped below the median is none",
        where="protocol.codecs.bundles:split",
        old="if clip and not 1 <= clip < math.inf:",
        new="if clip and not clip < math.inf:",
        tests=("tests/unit/codecs/test_sparse_codecs.py",),
    ),
    Mutation(
        name="all contributions are cut",
        rule="a trimmed mean leaves one contribution at least",
        where="node.dataplane.trimming:trimmed_mean",
        old="min(trim, (len(weights) - 1) // 2)",
        new="min(trim, len(weights) // 2)",
        tests=(ROBUST,),
    ),
    Mutation(
        name="of equal values the first is cut twice",
        rule="of equal values the first is the lowest, and the last the highest",
        where="node.dataplane.trimming:trimmed",
        old="values[k * out.size + i] >= values[high * out.size + i]",
        new="values[k * out.size + i] > values[high * out.size + i]",
        tests=(ROBUST,),
    ),
    Mutation(
        name="an older version averages what is to be clipped",
        rule="a run needs what changes its averages",
        where="protocol.settings:needs_of",
        old='        "clipped averages": sync.robust == "clip",\n',
        new="",
        tests=("tests/unit/protocol/test_settings.py",),
    ),
    Mutation(
        name="a reducer says of how many chunks it speaks",
        rule="a reducer's word counts for as many chunks as the plan gave it",
        where="coordinator.core.sync.norms:Norms.note_commit",
        old="number * min(1.0, word.num_high[place] / word.num_chunks)",
        new="word.num_high[place]",
        tests=(NORMS,),
    ),
    Mutation(
        name="who stands out once is named",
        rule="a site is named after several commits in a row",
        where="coordinator.core.sync.norms",
        old="NAMED_AFTER = 3",
        new="NAMED_AFTER = 2",
        tests=(NORMS,),
    ),
    Mutation(
        name="a contribution that does not stand out changes nothing",
        rule="a site is named after several commits in a row",
        where="coordinator.core.sync.norms:Norms.note_commit",
        old="+ 1 if 2 * high > all_chunks else 0",
        new="+ (2 * high > all_chunks)",
        tests=(NORMS,),
    ),
    Mutation(
        name="norms of some contributors are taken for those of all",
        rule="what is no word on all contributors is passed over",
        where="coordinator.core.sync.norms:_is_whole",
        old="lengths == {num_contributors}",
        new="bool(lengths)",
        tests=(NORMS,),
    ),
    Mutation(
        name="norms may be no numbers",
        rule="every float of a message is finite",
        where="protocol.wire:from_proto",
        old='if item.kind == "float" and not all(map(math.isfinite, raw)):',
        new="if False:",
        tests=("tests/unit/protocol/test_wire.py",),
    ),
)
