"""Codecs of contributions and payloads: names and sizes here are pure; kernels are a module of their own."""
