"""What crosses a wire: messages, chunk layout, plans, codecs, transport, credentials, errors.

Imports neither atoll.node nor atoll.coordinator, and never torch.
"""

PROTOCOL_VERSION = 5
"""Of every message. A break of any format raises it, and is refused by this number."""
