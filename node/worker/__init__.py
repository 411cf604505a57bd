"""What runs in the training processes: `atoll.join`, the built-in trainer, its model and data. Imports torch."""
