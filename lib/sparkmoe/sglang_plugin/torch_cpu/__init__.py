"""A plain-PyTorch CPU platform for SGLang: no sgl_kernel, no Triton, no GPU."""


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`."""
    return None
