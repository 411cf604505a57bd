"""How large a payload may be that a site takes from a donor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from atoll.node.exchange.catchup.fetch import Fetch
from atoll.protocol.codecs import bundles
from atoll.protocol.layout import Layout, Role
from tests.harness.data_plane import commit_record, manifest


def test_the_bundle_of_a_commit_with_many_contributors_is_as_large_as_these_make_it() -> None:
    layout = Layout(manifest(), 400)
    site: Any = SimpleNamespace(_layout=layout)
    one = commit_record(1)
    many = replace(one, contributors=one.contributors * 200)
    for chunk in layout.fragments[0]:
        spec = layout.chunks[chunk]
        if spec.role is Role.TRAINABLE:
            bundle_bytes = bundles.max_bundle_bytes("topk2", spec.num_elements, 200, is_clipped=True)
            assert Fetch._payload_bytes(site, many, chunk) >= bundle_bytes > Fetch._payload_bytes(site, one, chunk)
