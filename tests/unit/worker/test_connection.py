"""The one connection of a rank to its node."""

from __future__ import annotations

import pytest

from atoll.node.local_protocol import ENV_SOCKET
from atoll.node.worker import connection as module
from atoll.protocol.errors import ConfigError


def test_a_rank_that_has_left_its_run_is_told_so_and_does_not_wait_for_a_node_that_has_let_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script with a second `with atoll.join(...)`."""

    class Client:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    client = Client()
    monkeypatch.setenv(ENV_SOCKET, "/there")
    monkeypatch.setattr(module, "_connection", module.Connection(client, None, None, 0, 1))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_left", "")
    module.disconnect()
    assert client.is_closed
    with pytest.raises(ConfigError, match="this process has left its run: a script joins once"):
        module.connect()
    monkeypatch.setenv(ENV_SOCKET, "")
    assert module.connect() is None, "alone a script joins as often as it likes"
