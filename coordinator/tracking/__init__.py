"""A run for tools that draw curves: one run, with its sites as series of it. `curves_told` finds what is new,
`feed` hands it to a tool in a thread of its own, and each tool is a `Tracker` in a module of its name. Imports the
protocol and the coordinator's configuration; a tool's own library only when it is used."""
