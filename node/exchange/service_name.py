"""Names of PeerService's methods, as they travel."""

from atoll.protocol.v1 import peer_pb2

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
FETCH_STATE_METHOD = f"/{SERVICE}/FetchState"
FETCH_PAYLOADS_METHOD = f"/{SERVICE}/FetchPayloads"
DONATE_METHOD = f"/{SERVICE}/Donate"
PROBE_METHOD = f"/{SERVICE}/Probe"
