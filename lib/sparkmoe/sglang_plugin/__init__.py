"""The SGLang plugin: what stock SGLang lacks for these models, added from outside."""


def register() -> None:
    """Entry point `sglang.srt.plugins`: called by SGLang in every process of a server."""
