"""Trainers that people have, as sites of a run: a module each, imported by those who have the library."""
