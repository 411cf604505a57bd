"""The ranks of a site, seen as one: in lock-step, with equal reports, and alive. Pure, like all of the core."""
