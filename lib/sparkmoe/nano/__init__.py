"""Nano Ling: the bundled miniature of Ling-3.0 and how it is made."""
