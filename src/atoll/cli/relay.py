"""Join sites that nobody can dial, on a host that all of them reach.

Sites dial out to it (`atoll node --relay HOST:PORT`), and it joins two of their connections where one calls the other.
By the same port it leads to the coordinator: with `atoll invite --address HOST:PORT`, a site needs no other.
What goes through is encrypted between the sites: the relay sees who calls whom, and how much. It needs neither torch
nor a GPU, and one port that is open.

examples:
  atoll invite --relay hub --file hub.invite             on the coordinator's machine
  atoll join hub.invite --home /var/lib/atoll-hub        on the relay's
  atoll relay --home /var/lib/atoll-hub --listen 0.0.0.0:7800 --quota-gb 500
"""

from __future__ import annotations

import argparse

from atoll.cli.flags import Flag, add_flags, log_format

FLAGS = {
    "home": Flag("DIR"),
    "listen": Flag("HOST:PORT"),
    "http_listen": Flag("HOST:PORT"),
    "quota_gb": Flag("GB"),
    "log_format": Flag("text|json", read=log_format),
}
"""Of fields of RelayConfig."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from atoll.node.relay.config import RelayConfig

    add_flags(parser, RelayConfig, FLAGS)


def run(args: argparse.Namespace) -> int:
    import logging
    import sys

    from atoll.node.relay.config import RelayConfig
    from atoll.node.relay.main import serve
    from atoll.protocol import transport
    from atoll.protocol.text import CleanFormatter, JsonFormatter
    from atoll.protocol.trust.names import Subject

    handler = logging.StreamHandler(sys.stderr)
    in_words = CleanFormatter("%(asctime)s %(levelname).1s %(message)s")
    handler.setFormatter(JsonFormatter() if args.log_format == "json" else in_words)
    logging.basicConfig(level=logging.DEBUG if args.debug else logging.INFO, handlers=[handler], force=True)

    def known_as(relay: Subject) -> None:
        if args.log_format == "json":
            handler.setFormatter(JsonFormatter(run=relay.run_id, relay=relay.name))

    transport.run(serve(RelayConfig(**{name: getattr(args, name) for name in FLAGS}), known_as))
    return 0
