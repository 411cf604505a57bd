"""The node process: session with the coordinator, workers, shared memory, metrics. No torch."""
