"""Hooks on SGLang that cannot go missing in silence.

SGLang's own `HookRegistry` patches a dotted name when the plugins are loaded. It is forgiving: a plugin that raises
is logged and skipped, a target that no longer exists is logged and skipped, and a target whose parameters have
changed is patched all the same. Each of these leaves a server that answers, and measures something else than its
recipe says.

A `Hook` here is declared data. `register` resolves every target and compares parameter lists before anything is
patched; what does not fit ends the process with a sentence that names the target and the SGLang version
(`SystemExit`, because SGLang swallows every `Exception`). Once the model is loaded `check_applied` looks at each
target again. Two kinds go beyond the registry: ADD gives a class or module an attribute that it lacks, FILL replaces
a name whose value is `None` (the registry would replace every `None` of every module). `status` asks the same
questions without patching, for `sparkmoe doctor --sglang`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType
from typing import Any

logger = logging.getLogger(__name__)

_MISSING = object()


class Kind(StrEnum):
    """How a hook joins its target. The replacement repeats the target's parameter list, after one extra where noted."""

    REPLACE = "replace"  # replacement(*parameters)
    AROUND = "around"  # replacement(original, *parameters)
    AFTER = "after"  # replacement(result, *parameters); None keeps the result
    ADD = "add"  # the attribute is missing upstream
    FILL = "fill"  # the attribute is None upstream


class State(StrEnum):
    """What the installed SGLang says about a hook."""

    NEEDED = "needed"
    NOT_NEEDED = "not needed any more"
    MISFIT = "does not fit"


@dataclass(frozen=True)
class Hook:
    """One change to SGLang.

    `target` is a dotted name. `reason` says in a few words what goes wrong without the hook. `relies_on` lists pairs
    (dotted name of a function, identifier that its code must mention): what the hook assumes about code that it does
    not replace. `superseded` answers True where the installed SGLang does the job itself.
    """

    target: str
    replacement: Callable[..., Any]
    kind: Kind
    reason: str
    relies_on: tuple[tuple[str, str], ...] = ()
    superseded: Callable[[], bool] | None = None


@dataclass(frozen=True)
class HookStatus:
    """State of one hook with the installed SGLang; `detail` is empty where there is nothing to add."""

    hook: Hook
    state: State
    detail: str = ""


_registered: list[Hook] = []


def sglang_version() -> str:
    """Version of the installed SGLang, or "not installed"."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def status(hook: Hook) -> HookStatus:
    """Compare a hook with the installed SGLang; patches nothing. Imports the target's module."""
    try:
        parent, name = _parent(hook.target)
    except (ImportError, AttributeError, ValueError) as exc:
        return HookStatus(hook, State.MISFIT, f"the target does not exist ({exc})")
    current = _attribute(parent, name)
    if current is hook.replacement:  # an ADD or FILL of our own
        return HookStatus(hook, State.NEEDED)
    if hook.superseded is not None and hook.superseded():
        return HookStatus(hook, State.NOT_NEEDED, "this version does it itself")
    if hook.kind is Kind.ADD:
        if current is not _MISSING:
            return HookStatus(hook, State.NOT_NEEDED, "the attribute exists now")
    elif current is _MISSING:
        return HookStatus(hook, State.MISFIT, f"{hook.target.rpartition('.')[0]} has no attribute {name}")
    elif hook.kind is Kind.FILL:
        if current is not None:
            return HookStatus(hook, State.NOT_NEEDED, "the placeholder has a value now")
    elif (fault := _signature_fault(hook, current)) is not None:
        return HookStatus(hook, State.MISFIT, fault)
    for dotted, identifier in hook.relies_on:
        try:
            code = _code(pkgutil.resolve_name(dotted))
        except (ImportError, AttributeError, TypeError) as exc:
            return HookStatus(hook, State.MISFIT, f"it relies on {dotted}, which is not there ({exc})")
        if identifier not in set(_identifiers(code)):
            return HookStatus(hook, State.MISFIT, f"it relies on {dotted} using {identifier!r}, which it does not")
    return HookStatus(hook, State.NEEDED)


def register(hooks: Iterable[Hook]) -> None:
    """Check all hooks, then hand them to SGLang. Hooks that are not needed any more are left out, with a log line.

    Raises SystemExit naming every target that does not fit. Calling it again with the same hooks changes nothing.
    """
    new = [hook for hook in hooks if hook not in _registered]
    found = [status(hook) for hook in new]
    misfits = [item for item in found if item.state is State.MISFIT]
    _stop_on([f"{item.hook.target} does not fit: {item.detail}. Purpose: {item.hook.reason}" for item in misfits])
    for item in found:
        if item.state is State.NOT_NEEDED:
            logger.info("hook on %s left out: %s", item.hook.target, item.detail)
            continue
        _apply(item.hook)
        _registered.append(item.hook)


def registered() -> tuple[Hook, ...]:
    """The hooks that this process has handed to SGLang, in order of registration."""
    return tuple(_registered)


def check_applied() -> None:
    """Raise SystemExit unless the target of every registered hook still leads to its replacement."""
    faults = []
    for hook in _registered:
        parent, name = _parent(hook.target)
        if not _leads_to(_attribute(parent, name), hook.replacement):
            faults.append(f"{hook.target} is not hooked after load. Purpose: {hook.reason}")
    _stop_on(faults)


def _check_after_load(result: Any, self: Any) -> None:
    check_applied()


AFTER_LOAD = Hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    _check_after_load,
    Kind.AFTER,
    "hooks are checked once more when the model is loaded",
)


def _stop_on(faults: list[str]) -> None:
    if faults:
        listing = "\n".join(f"  {fault}" for fault in faults)
        raise SystemExit(
            f"sparkmoe: hooks and SGLang {sglang_version()} do not match:\n{listing}\n"
            "Install the SGLang version of this sparkmoe's lock, or a sparkmoe made for the installed one "
            "(`sparkmoe doctor --sglang` lists all hooks)."
        )


def _apply(hook: Hook) -> None:
    if hook.kind in (Kind.ADD, Kind.FILL):
        parent, name = _parent(hook.target)
        setattr(parent, name, hook.replacement)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(hook.target, hook.replacement, HookType(hook.kind.value))


def _parent(target: str) -> tuple[Any, str]:
    path, _, name = target.rpartition(".")
    if not path:
        raise ValueError(f"{target!r} is no dotted name")
    return pkgutil.resolve_name(path), name


def _attribute(parent: Any, name: str) -> Any:
    """The attribute as stored, without binding; inherited attributes of a class count as its own."""
    value = inspect.getattr_static(parent, name, _MISSING)
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _signature_fault(hook: Hook, current: Any) -> str | None:
    """None if the replacement takes exactly the target's parameters: names, order, kinds and defaults."""
    if current is None:
        return "the target is None here"
    if not callable(current) or isinstance(current, type):
        return f"the target is {type(current).__name__}, not a function"
    theirs = _parameters(current)
    ours = _parameters(hook.replacement)[0 if hook.kind is Kind.REPLACE else 1 :]
    if theirs == ours:
        return None
    return f"its parameters are ({', '.join(map(_show, theirs))}), expected ({', '.join(map(_show, ours))})"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters without annotations; the names of *args and **kwargs do not matter."""
    result = []
    for p in inspect.signature(function).parameters.values():
        name = "args" if p.kind is p.VAR_POSITIONAL else "kwargs" if p.kind is p.VAR_KEYWORD else p.name
        result.append(p.replace(name=name, annotation=p.empty))
    return result


def _show(parameter: inspect.Parameter) -> str:
    return ("keyword-only " if parameter.kind is parameter.KEYWORD_ONLY else "") + str(parameter)


def _code(function: Any) -> CodeType:
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        raise TypeError(f"{function!r} is no function")
    return function.__code__  # type: ignore[union-attr]


def _identifiers(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):  # keyword names of a call
            yield from (c for c in constant if isinstance(c, str))
        elif isinstance(constant, CodeType):
            yield from _identifiers(constant)


def _leads_to(current: Any, replacement: Callable[..., Any]) -> bool:
    """Whether a chain of wrappers holds the replacement: SGLang's wrappers are closures over their hook."""
    while current is not None and current is not _MISSING:
        if current is replacement:
            return True
        if any(cell.cell_contents is replacement for cell in getattr(current, "__closure__", None) or ()):
            return True
        current = getattr(current, "__wrapped__", None)
    return False
