"""Processes of a host that exchange beside its node: each does the part of every exchange that concerns its chunks.

One process of Python moves some 8 Gbit/s at most. How they share one state: docs/decisions/0058-exchange-processes.md.
"""
