"""sparkmoe: make mixture-of-experts models decode faster on a DGX Spark, on a live SGLang engine, and prove it.

The package stays importable without a GPU and without starting anything: `machine` says where we are, `recipe` what to
run, `engine` runs it, `client` asks it, `engagement` proves that what was asked for is on, `stats` says what it gave.
"""

__version__ = "0.1.0"
