"""A hook fits, is not needed any more, or stops the process; nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from sparkmoe import sglang_plugin
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.sglang_plugin import hooks, torch_cpu
from sparkmoe.sglang_plugin.hooks import Hook, Kind, State

MODULE = "fake_upstream"


@pytest.fixture
def upstream(monkeypatch):
    """A module that stands for SGLang, and empty registries."""
    source = """
EMPTY = OTHER_EMPTY = None

def scale(x, factor=2, *, exact=True):
    return x * factor

class Worker:
    def run(self, a, b=None):
        return self.combine(a, b)

    def combine(self, a, b):
        return (a, b)

    @staticmethod
    def make(n):
        return n
"""
    module = types.ModuleType(MODULE)
    exec(compile(source, MODULE, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(hooks, "_registered", [])
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return module


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def hook(target, replacement, kind=Kind.REPLACE, **more) -> Hook:
    return Hook(f"{MODULE}.{target}", replacement, kind, "a test", **more)


def test_replace_around_after_reach_their_targets(upstream):
    def scale(x, factor=2, *, exact=True):
        return x * factor + 1

    def run(original, self, a, b=None):
        return ["around", original(self, a, b)]

    def make(result, n):
        return result + 100

    hooks.register([hook("scale", scale), hook("Worker.run", run, Kind.AROUND), hook("Worker.make", make, Kind.AFTER)])
    with pytest.raises(SystemExit, match="scale is not hooked"):
        hooks.check_applied()  # SGLang has not patched yet
    apply()
    hooks.check_applied()
    assert upstream.scale(3) == 7
    assert upstream.Worker().run(1) == ["around", (1, None)]
    assert upstream.Worker.make(1) == 101


@pytest.mark.parametrize(
    ("target", "replacement", "kind", "detail"),
    [
        ("gone", lambda x: x, Kind.REPLACE, "has no attribute gone"),
        ("Gone.run", lambda self: None, Kind.REPLACE, "does not exist"),
        ("scale", lambda x, factor=3, *, exact=True: x, Kind.REPLACE, "factor=2"),  # another default
        ("scale", lambda x, factor=2: x, Kind.REPLACE, "keyword-only exact=True"),
        ("scale", lambda *args, **kwargs: None, Kind.REPLACE, "parameters are"),  # would swallow any change
        ("Worker.run", lambda original, self, b, a=None: None, Kind.AROUND, "self, a, b=None"),
        ("Worker.combine", lambda self, a, b=None: None, Kind.REPLACE, "self, a, b"),
        ("EMPTY", lambda x: x, Kind.REPLACE, "None here"),
        ("Worker", lambda x: x, Kind.REPLACE, "not a function"),
        ("GONE", lambda x: x, Kind.FILL, "has no attribute GONE"),
    ],
)
def test_misfit_ends_the_process_with_target_and_version(upstream, target, replacement, kind, detail):
    with pytest.raises(SystemExit) as stopped:
        hooks.register([hook(target, replacement, kind)])
    text = str(stopped.value)
    assert f"{MODULE}.{target}" in text
    assert f"SGLang {hooks.sglang_version()}" in text
    assert detail in text
    assert hooks.registered() == ()


def test_nothing_is_patched_when_one_of_several_does_not_fit(upstream):
    with pytest.raises(SystemExit):
        hooks.register([hook("Worker.added", lambda self: 1, Kind.ADD), hook("gone", lambda: None)])
    assert not hasattr(upstream.Worker, "added")


def test_add_and_fill(upstream):
    def added(self):
        return 5

    def filled():
        return 6

    def late(self):
        return 7

    hooks.register(
        [
            hook("Worker.added", added, Kind.ADD),
            hook("EMPTY", filled, Kind.FILL),
            hook("Worker.run", late, Kind.ADD),  # upstream has it: stand aside
            hook("scale", late, Kind.FILL),
        ]
    )
    hooks.check_applied()
    assert upstream.Worker().added() == 5
    assert upstream.EMPTY() == 6
    assert upstream.OTHER_EMPTY is None
    assert upstream.Worker().run(1) == (1, None)
    assert [h.target for h in hooks.registered()] == [f"{MODULE}.Worker.added", f"{MODULE}.EMPTY"]


def test_overwritten_after_load_is_found(upstream):
    hooks.register([hook("Worker.added", lambda self: 5, Kind.ADD)])
    upstream.Worker.added = lambda self: 6
    with pytest.raises(SystemExit, match=r"Worker\.added is not hooked after load"):
        hooks.check_applied()


def test_status_of_each_kind_of_answer(upstream):
    def make(n):
        return n

    assert hooks.status(hook("Worker.make", make)).state is State.NEEDED
    assert hooks.status(hook("Worker.make", make, superseded=lambda: True)).state is State.NOT_NEEDED
    fitting = hook("Worker.make", make, relies_on=((f"{MODULE}.Worker.run", "combine"),))
    assert hooks.status(fitting).state is State.NEEDED
    broken = hooks.status(hook("Worker.make", make, relies_on=((f"{MODULE}.Worker.run", "split"),)))
    assert broken.state is State.MISFIT
    assert "Worker.run using 'split'" in broken.detail


def test_registering_twice_changes_nothing(upstream):
    def scale(x, factor=2, *, exact=True):
        return x * factor + 1

    one = hook("scale", scale)
    hooks.register([one])
    apply()
    hooks.register([one])
    apply()
    assert upstream.scale(3) == 7
    assert hooks.registered() == (one,)


def test_platform_stands_aside_for_a_gpu(monkeypatch):
    import torch
    from sglang.srt import platforms

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA H200")
    assert torch_cpu.activate() is None
    assert type(platforms._resolve_platform()).__name__ == "CudaSRTPlatform"
    monkeypatch.setenv("SGLANG_PLATFORM", "torch_cpu")  # asked for by name: also on a GPU machine
    assert torch_cpu.activate() == torch_cpu.PLATFORM


def test_a_server_of_this_platform_imports_what_it_needs():
    """Ling's two classes are found without SGLang's other models, those are found all the same, FlashInfer is left
    out; a process that merely found no accelerator keeps it."""
    env = Recipe("baseline").command(Machine.named("cpu"), model="/models/ling", port=1).env
    look = (
        "import importlib.util, sys; from sglang.srt.models.registry import ModelRegistry as known\n"
        "print(known.resolve_model_cls(['BailingMoeV3ForCausalLM'])[0].__module__)\n"
        "print(known.is_arch_supported('BailingMoeForCausalLMNextN'), 'sglang.srt.models.qwen3_moe' in sys.modules)\n"
        "print(importlib.util.find_spec('flashinfer'))\n"
        "print(known.resolve_model_cls(['Qwen3MoeForCausalLM'])[0].__module__)\n"
    )
    merely = "import importlib.util, sglang; print(importlib.util.find_spec('flashinfer') is not None)"

    def said(script: str, given: dict[str, str]) -> list[str]:
        argv, environ = [sys.executable, "-c", script], {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
        return subprocess.run(argv, env=environ | given, capture_output=True, text=True, check=True).stdout.split("\n")

    models = "sglang.srt.models."
    assert said(look, env)[:4] == [models + "bailing_moe_v3", "True False", "None", models + "qwen3_moe"]
    assert said(merely, {})[0] == "True"


def test_platform_without_accelerator(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(torch_cpu, "accelerator_present", lambda: False)
    assert torch_cpu.activate() == torch_cpu.PLATFORM
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert torch_cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "ascend")
    assert torch_cpu.activate() is None


def test_blockers_are_put_into_words():
    assert sglang_plugin.blockers({}) == []
    assert sglang_plugin.blockers({"SGLANG_PLATFORM": "torch_cpu", "SGLANG_PLUGINS": "sparkmoe,other"}) == []
    (foreign,) = sglang_plugin.blockers({"SGLANG_PLATFORM": "ascend"})
    assert "SGLANG_PLATFORM=ascend" in foreign
    assert "drop every plugin of sparkmoe" in foreign
    (filtered,) = sglang_plugin.blockers({"SGLANG_PLUGINS": "sparkmoe"})
    assert "leaves out torch_cpu" in filtered
