"""What a run of the built-in model would need and how fast it would be, before anything is started: `atoll plan`.

Formulas alone, each on docs/plan.md. It imports `protocol`, the settings of `parallel` and the footprint of
`dataplane`, and neither torch nor numpy.
"""
