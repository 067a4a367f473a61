"""Measures Strata over HTTP against a plain transformers script: `python -m benchmarks --help`."""
