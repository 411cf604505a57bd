"""Every error that atoll raises on purpose. Pure; `status.py` maps it to gRPC codes.

AtollError
|- ConfigError            a setting, flag or file of the user is wrong
|- HostError              this host cannot do it: port taken, memory, disk, shared memory
|  '- SelfTestFailed      this host computes other bits than the protocol asks for
|- RefusedError           the other side will never accept this (wrong run, model, data, version ...)
|  |- StaleError          from an older term, attempt, incarnation or generation
|  |- NoRoomError         a plan asks a reducer to hold more than it has memory and disk for
|  '- InvalidMessage      malformed, truncated or over a bound
|     |- UnsupportedError a run needs what this version of atoll cannot do
|     '- DigestMismatch   the bytes are not the ones their digest names
|- NotYetError            early by one sync or attempt: send again
|- PeerError              a peer could not be reached or made no progress
|- NonFiniteError         a NaN or infinity, with the name of the tensor
|  '- ScriptNonFinite     it looks as if steps of the site's own script made it, not a commit
|- AverageError           a tensor that cannot be averaged, and no fault of the site that finds that out
|- StateError             the outer state or the log on this disk cannot be used
'- WorkerError            the site's training processes failed
"""


class AtollError(Exception):
    """Base of all of atoll's errors. `str(error)` is one line for a person: what, where, what to do."""

    exit_code = 1


class ConfigError(AtollError):
    exit_code = 2


class HostError(AtollError):
    exit_code = 3


class SelfTestFailed(HostError):
    pass


class RefusedError(AtollError):
    exit_code = 4


class StaleError(RefusedError):
    pass


class NoRoomError(RefusedError):
    pass


class InvalidMessage(RefusedError):
    pass


class UnsupportedError(InvalidMessage):
    pass


class DigestMismatch(InvalidMessage):
    pass


class NotYetError(AtollError):
    pass


class PeerError(AtollError):
    """`peer_site_id` is 0 where the site is not known; `sending` and `phase` say which way and when it failed."""

    exit_code = 5

    def __init__(self, text: str, peer_site_id: int = 0, *, sending: bool = False, phase: str = "") -> None:
        super().__init__(text)
        self.peer_site_id = peer_site_id
        self.sending = sending
        self.phase = phase


class NonFiniteError(AtollError):
    exit_code = 6


class ScriptNonFinite(NonFiniteError):
    pass


class AverageError(AtollError):
    """`tensor` has no average that may be applied, because of these contributions, if any are named: of each its site
    (or its place among them, where sites are not known), its norm and the limit that this is above."""

    def __init__(self, text: str, tensor: str = "", outliers: tuple[tuple[int, float, float], ...] = ()) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.outliers = outliers


class StateError(AtollError):
    exit_code = 7


class WorkerError(AtollError):
    exit_code = 8
