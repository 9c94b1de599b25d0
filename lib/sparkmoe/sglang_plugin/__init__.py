"""The SGLang plugin: what stock SGLang lacks for these models, added from outside.

SGLang calls `register` in every process of a server. It hands over the hooks of the CPU platform, where that
platform is active, and those of every lever that the environment asks for. Each lever is a module of this package
with `HOOKS` (all that it could need: `sparkmoe doctor --sglang` lists them) and `register()` (reads the environment,
registers what is wanted).

Two variables can keep SGLang from calling us at all, without a word in its log; `blockers` puts them into words.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from sparkmoe.sglang_plugin import hooks

PLUGIN_NAME = "sparkmoe"
PLATFORM_NAME = "torch_cpu"

LEVERS: tuple[str, ...] = (
    "fp8_lm_head", "draft_head", "humming_clamp", "evidence", "prompt_ids", "random_weights", "accept_length"
)  # fmt: skip
"""Names of the lever modules in this package, in the order in which they register. `prompt_ids` makes nothing faster:
it keeps a server alive. The last two serve measurements of a shape whose weights are not at hand."""


def register() -> None:
    """Entry point `sglang.srt.plugins`. Raises SystemExit where a hook does not fit."""
    import setproctitle
    from sglang.srt.platforms import current_platform

    if setproctitle.getproctitle().startswith("sglang::detokenizer"):
        return  # runs no model; resolving the hooks would import all of its code
    if current_platform.device_name == PLATFORM_NAME:
        _module("torch_cpu.hooks").register()
    for lever in LEVERS:
        _module(lever).register()
    if hooks.registered():
        hooks.register([hooks.AFTER_LOAD])


def declared_hooks() -> list[hooks.Hook]:
    """All hooks that this package knows, wanted or not, the CPU platform's first."""
    found = [hook for name in ("torch_cpu.hooks", *LEVERS) for hook in _module(name).HOOKS]
    return [*found, hooks.AFTER_LOAD]


def report() -> list[hooks.HookStatus]:
    """State of every declared hook with the installed SGLang. Imports SGLang's model code: some 10 seconds."""
    return [hooks.status(hook) for hook in declared_hooks()]


def blockers(environ: Mapping[str, str] | None = None) -> list[str]:
    """Why SGLang would ignore this plugin or its platform under `environ`: one sentence each, [] if all is well."""
    environ = os.environ if environ is None else environ
    found = []
    platform = environ.get("SGLANG_PLATFORM")
    if platform and platform != PLATFORM_NAME:
        found.append(
            f"SGLANG_PLATFORM={platform} makes SGLang drop every plugin of sparkmoe, its levers included; "
            f"unset it, or set it to {PLATFORM_NAME} to serve on the CPU"
        )
    wanted = environ.get("SGLANG_PLUGINS")
    if wanted:
        names = {name.strip() for name in wanted.split(",")}
        absent = {PLUGIN_NAME} - names if platform else {PLUGIN_NAME, PLATFORM_NAME} - names
        if absent:
            names_text = ", ".join(sorted(absent))
            found.append(f"SGLANG_PLUGINS={wanted} leaves out {names_text}; add it, or unset the variable")
    return found


def _module(name: str):  # type: ignore[no-untyped-def]  # a module with HOOKS and register()
    return importlib.import_module(f"{__name__}.{name}")
