"""The site's state machine: `handle(event, now) -> outputs`. Pure: no sockets, threads, files, clocks."""
