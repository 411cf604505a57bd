"""What a coordinator may say that makes no sense to a site. Each of these was found by tests/fuzz."""

from __future__ import annotations

from atoll.node.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.errors import RefusedError
from tests.unit.node_core.test_site import Driver


def test_settings_that_this_version_does_not_understand_end_the_node_with_words() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json='{"run_id": "run"}'))
    ended = drive.wants(e.Exit)
    assert isinstance(ended, e.Exit)
    assert ended.code == RefusedError.exit_code
    assert "settings" in ended.text
    assert "is missing" in ended.text
