"""Settings that have no effect beside the others. Pure.

A run does not begin with one; a run that has begun with one, before it was refused, goes on.
"""

from __future__ import annotations

from atoll.protocol.errors import ConfigError
from atoll.protocol.outer import chosen
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings

USUAL_BETA1 = 0.9


def check_effects(settings: RunSettings) -> None:
    """Of a run that begins, before `auto` is resolved. Raises ConfigError, naming the key and what to choose."""
    _check_sync(settings.sync)
    _check_outer(settings)


def _check_sync(sync: SyncSettings) -> None:
    usual = SyncSettings()
    if sync.strategy != "momentum" and sync.warmup_codec != usual.warmup_codec:
        raise ConfigError(
            f'sync.warmup_codec = "{sync.warmup_codec}" with sync.strategy = "{sync.strategy}", without warm-up: leave '
            'it out, or choose "momentum"'
        )
    if not sync.local_doubling and sync.most_local_steps != usual.most_local_steps:
        raise ConfigError(
            f"sync.most_local_steps = {sync.most_local_steps} without sync.local_doubling, where no site does steps by "
            "itself: leave it out, or choose a local_doubling"
        )
    if sync.robust in ("off", "gram") and sync.clip != usual.clip:
        raise ConfigError(
            f'sync.clip = {sync.clip} with sync.robust = "{sync.robust}", which has no such limit: leave it out, or '
            'choose "warn" or "clip"'
        )


def _check_outer(settings: RunSettings) -> None:
    outer, usual = settings.outer, OuterSettings()
    found = chosen(settings)[0].optimizer if outer.optimizer == AUTO else outer.optimizer
    name = f'outer.optimizer = "{outer.optimizer}"' + (f" chooses {found}, which" if outer.optimizer == AUTO else "")
    if outer.optimizer == AUTO and found == "adamw" and outer.beta2 != usual.beta2:
        raise ConfigError(
            f'outer.beta2 = {outer.beta2}: outer.optimizer = "auto" takes trainer.beta2; leave it out, or choose '
            f'outer.optimizer = "adamw" with outer.momentum = {USUAL_BETA1}'
        )
    for key in ("beta2", "epsilon"):
        if found != "adamw" and (value := getattr(outer, key)) != getattr(usual, key):
            raise ConfigError(f'outer.{key} = {value}: {name} has none; leave it out, or choose "adamw"')
    for key in ("momentum_warmup", "momentum_decay"):
        if outer.optimizer == AUTO and found == "sgd" and (value := getattr(outer, key)):
            raise ConfigError(f'outer.{key} = {value}: {name} has no momentum; leave it out, or choose "nesterov"')
    if outer.optimizer == "adamw" and not outer.momentum:
        raise ConfigError(
            f"outer.momentum = 0 with {name}, whose beta1 that is: choose {USUAL_BETA1}, or for none of it a value "
            "near 0"
        )
