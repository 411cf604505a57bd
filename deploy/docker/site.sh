#!/bin/sh
# What a site's container runs: joins with the invite at first, and starts the node each time.
# INVITE: its file. HOME_DIR: the node's home. What follows are options of `atoll node`.
set -eu
home=${HOME_DIR:-/var/lib/atoll/home}
if [ ! -e "$home/trust/identity.pem" ]; then
    atoll join --enrol-only --home "$home" "$INVITE"
fi
exec atoll node --home "$home" "$@"
