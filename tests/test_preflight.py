"""A GB10 in every trouble that its owners report, as text: none was at hand, so the answers below are written from
public reports and known formats, and each condition changes one of them."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkmoe import gpus, spark_load
from sparkmoe.findings import Finding, verdict
from sparkmoe.preflight import examine
from sparkmoe.spark_facts import (
    Recorded,
    ask,
    assemblers,
    collect,
    compiled_objects,
    read_apps,
    read_gpu,
    read_load,
    read_meminfo,
    read_ptxas,
    read_swaps,
)

MEMINFO = """\
MemTotal:       125489508 kB
MemFree:        71808412 kB
MemAvailable:   117201344 kB
Buffers:          412080 kB
Cached:         45122004 kB
SwapCached:            0 kB
Active(file):   20071844 kB
SwapTotal:      16777212 kB
SwapFree:       16777212 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
SWAPS = """\
Filename				Type		Size		Used		Priority
/swap.img                               file		16777212	0		-2
"""
PTXAS = """\
ptxas: NVIDIA (R) Ptx optimizing assembler
Copyright (c) 2005-2026 NVIDIA Corporation
Cuda compilation tools, release 13.5, V13.5.37
"""
LOAD = {
    "free_bytes": 73 << 30, "total_bytes": 128501256192, "gb_s": 232.4, "sm_mhz": 2411, "power_w": 46.2,
    "temperature_c": 61, "humming_gb_s": 273.0,
}  # fmt: skip
FLASH: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "lib/sparkmoe/models/ling-3.0-flash-fp4.json").read_text()
)
SOUND = Recorded(
    smi="NVIDIA GB10, 12.1, 580.95.05, 208, 3003, 4.53, 41, [N/A]\n",
    apps="",
    meminfo=MEMINFO,
    swaps=SWAPS,
    kernel_log="NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05\n",
    load=json.dumps(LOAD),
    cxx="c++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0",
    python_h=True,
    ptxas={"/lock/ptxas": PTXAS, "/triton/ptxas-blackwell": PTXAS.replace("13.5", "13.3")},
    packages={"flashinfer-python": "0.7.2", "humming-kernels": "0.1.12", "triton": "3.8.0", "torch": "2.14.1"},
    objects=(96, 96),
    config=FLASH,
)


def load(**changes: Any) -> str:
    return json.dumps({k: v for k, v in (LOAD | changes).items() if v is not None})


def smi(**changes: str) -> str:
    fields = {"name": "NVIDIA GB10", "cc": "12.1", "driver": "580.95.05", "sm": "208", "max": "3003", "w": "4.53",
              "c": "41", "mem": "[N/A]"} | changes  # fmt: skip
    return ", ".join(fields.values()) + "\n"


def meminfo(**kb: int) -> str:
    lines = [line for line in MEMINFO.splitlines() if line.split(":")[0] not in kb]
    return "\n".join([*lines, *(f"{name}: {value} kB" for name, value in kb.items())])


# name → (what is different, the finding it must show in, its state, words that must be in found or advice)
CONDITIONS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "nvidia-smi is not there": ({"smi": ""}, "driver answers", "fail", "there is no nvidia-smi"),
    "driver not loaded": (
        {"smi": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
                "latest NVIDIA driver is installed and running.\n"}, "driver answers", "fail", "install the driver"),
    "driver updated without a restart": (
        {"smi": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126\n"},
        "driver answers", "fail", "restart: the driver was updated"),
    "nvidia-smi hangs": ({"smi": "nvidia-smi: no answer in 15 s"}, "driver answers", "fail", "pull the power plug"),
    "rmapiLockAcquire in the kernel log": (
        {"kernel_log": "NVRM: rmapiLockAcquire: timed out waiting for the API lock\n"}, "driver wedge", "fail",
        "pull the power plug"),
    "another GPU": ({"smi": smi(name="NVIDIA RTX PRO 6000", cc="12.0")}, "GPU", "fail", "SPARKMOE_MACHINE"),
    "driver too old for CUDA 13": ({"smi": smi(driver="570.133.20")}, "driver", "fail", "update DGX OS"),
    "driver with reported hangs": ({"smi": smi(driver="590.48.01")}, "driver", "warn", "CUDA graphs"),
    "driver later than any seen": ({"smi": smi(driver="610.12")}, "driver", "ok", "610.12"),
    "memory reported as Not Supported": ({"smi": smi(mem="[Not Supported]")}, "GPU memory", "ok", "as expected"),
    "memory reported after all": ({"smi": smi(mem="122570")}, "GPU memory", "ok", "122,570 MiB"),
    "another program computes on the GPU": (
        {"apps": "4711, /usr/local/bin/ollama, [N/A]\n"}, "GPU processes", "warn", "ollama (4711)"),
    "two models at once": (
        {"apps": "811, sglang::scheduler, 68204\n912, VLLM::EngineCore, [N/A]\n"}, "GPU processes", "warn",
        "sglang::scheduler (811), VLLM::EngineCore (912)"),
    "process names cannot be seen": (
        {"apps": "4711, [Insufficient Permissions], [N/A]\n"}, "GPU processes", "warn", "4711"),
    "a container with a memory limit": ({"meminfo": meminfo(MemTotal=67108864)}, "memory total", "warn", "64.0 GiB"),
    "/proc/meminfo unreadable": ({"meminfo": ""}, "memory total", "fail", "is /proc mounted?"),
    "page cache counted as used": (
        {"load": load(free_bytes=7 << 30), "meminfo": meminfo(Cached=100_000_000)}, "page cache", "ok",
        "believe MemAvailable"),
    "huge pages reserved": (
        {"meminfo": MEMINFO.replace("HugePages_Total:       0", "HugePages_Total:    8192")}, "huge pages", "warn",
        "16.0 GiB reserved"),
    "swap in use": ({"swaps": SWAPS.replace("16777212	0", "16777212	9437184")}, "swap", "warn", "9.0 of 16.0 GiB"),
    "no swap file, meminfo alone": (
        {"swaps": "", "meminfo": meminfo(SwapFree=4194304)}, "swap", "warn", "12.0 of 16.0 GiB"),
    "no swap at all": ({"swaps": SWAPS.splitlines()[0]}, "swap", "ok", "0.0 of 0.0 GiB"),
    "power supply at 30 W": (
        {"load": load(sm_mhz=507, power_w=9.8, gb_s=64.0)}, "clock", "warn", "507 MHz under load, 3003 at most, 10 W"),
    "clock at 850 MHz": ({"load": load(sm_mhz=850)}, "clock", "warn", "original adapter"),
    "low clock and low power": ({"load": load(sm_mhz=1300, power_w=18.0)}, "clock", "warn", "1300 MHz"),
    "clock and power not reported": ({"load": load(sm_mhz=None, power_w=None)}, "clock", "ok", "power not reported"),
    "hot": ({"load": load(temperature_c=91)}, "temperature", "warn", "air inlets"),
    "slow memory": ({"load": load(gb_s=171.0)}, "bandwidth", "warn", "171 GB/s"),
    "flashinfer and its cubins differ": (
        {"packages": SOUND.packages | {"flashinfer-cubin": "0.6.4"}}, "flashinfer", "fail", "flashinfer-cubin 0.6.4"),
    "a jit cache of the same version for another CUDA": (
        {"packages": SOUND.packages | {"flashinfer-jit-cache": "0.7.2+cu130"}}, "flashinfer", "ok", "0.7.2"),
    "flashinfer missing": ({"packages": {}}, "flashinfer", "fail", "missing"),
    "a ptxas without sm_121a": (
        {"ptxas": {"/usr/local/cuda/bin/ptxas": PTXAS.replace("13.5", "12.8")}}, "ptxas", "fail", "TRITON_PTXAS_PATH"),
    "a ptxas that does not run": (
        {"ptxas": {"/opt/ptxas": "cannot execute binary file: Exec format error"}}, "ptxas", "fail", "Exec format"),
    "no compiler": ({"cxx": ""}, "compiler", "fail", "no c++"),
    "Python without its headers": ({"python_h": False}, "compiler", "fail", "python3-dev"),
    "no ptxas": ({"ptxas": {}}, "ptxas", "fail", "none found"),
    "Humming asks for a memory clock": (
        {"load": load(humming_gb_s=None, humming_error="NVMLError_NotSupported: Not Supported")}, "humming bandwidth",
        "fail", "memory clock"),
    "Humming takes it for another machine": (
        {"load": load(humming_gb_s=0.0001)}, "humming bandwidth", "warn", "the lock's version"),
    "kernels never built": ({"objects": (0, 0)}, "kernels", "warn", "sparkmoe precompile"),
    "kernels half built": ({"objects": (41, 96)}, "kernels", "warn", "41 of 96"),
    "an older config with YaRN": (
        {"config": FLASH | {"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn"}}}, "config", "warn",
        "download config.json anew"),
    "a short context": ({"config": FLASH | {"max_position_embeddings": 32768}}, "config", "warn", "262,144 tokens"),
    "not quantized": ({"config": FLASH | {"quantization_config": None}}, "config", "warn", "not MXFP4"),
    "no draft layer": ({"config": FLASH | {"num_nextn_predict_layers": 0}}, "config", "warn", "cannot draft"),
}  # fmt: skip


def test_a_sound_machine_is_healthy() -> None:
    findings = examine(SOUND)
    assert [f for f in findings if f.state != "ok"] == []
    assert verdict(findings) == "healthy"
    assert {"GPU", "driver", "memory total", "swap", "clock", "bandwidth", "ptxas", "kernels", "config"} <= {
        f.what for f in findings
    }


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_named_with_what_to_do(name: str) -> None:
    changes, what, state, words = CONDITIONS[name]
    findings = examine(replace(SOUND, **changes))
    found = [f for f in findings if f.what == what and words in f"{f.found} {f.advice}"]
    assert [f.state for f in found] == [state], [f for f in findings if f.what == what]
    if state != "ok":
        assert found[0].advice
        assert what in verdict(findings)
    others = [f for f in findings if f.state == "fail" and f.what != what]
    assert others == []


def test_there_are_twenty_conditions_and_each_check_has_a_bad_one() -> None:
    assert len(CONDITIONS) >= 20
    bad = {what for _, what, state, _ in CONDITIONS.values() if state != "ok"}
    shown = {f.what for f in examine(SOUND)}
    assert shown - bad <= {"GPU memory", "page cache"}  # the two that only inform


def test_the_verdict_names_the_cause_and_not_its_effects() -> None:
    wedged = replace(SOUND, smi="nvidia-smi: no answer in 15 s", load="", kernel_log="rmapiLockAcquire", objects=(0, 0))
    assert verdict(examine(wedged)).startswith("a run would fail: driver answers: nvidia-smi: no answer in 15 s; ")
    assert verdict(examine(wedged)).endswith("(also: driver wedge)")
    slow = replace(SOUND, load=load(sm_mhz=507, power_w=9.8, gb_s=64.0))
    assert verdict(examine(slow)).startswith("a run would work, but: clock: 507 MHz under load")
    assert verdict(examine(slow)).endswith("(also: bandwidth)")
    left = [Finding("memory", "fail", "20 GiB"), Finding("other SGLang", "fail", "process 7", "", "end it")]
    assert verdict(left) == "a run would fail: other SGLang: process 7; end it (also: memory)"


def test_our_own_server_on_the_gpu_is_no_stranger() -> None:
    busy = replace(SOUND, apps="811, sglang::scheduler, [N/A]\n", load="")
    assert verdict(examine(busy, mine=frozenset({811}))) == "healthy"


def test_readers_of_recorded_text() -> None:
    gpu = read_gpu(SOUND.smi)
    assert gpu is not None
    assert (gpu.memory_mib, gpu.sm_max_mhz, gpu.power_w) == (None, 3003.0, 4.53)
    assert read_gpu("No devices were found") is None
    assert read_apps("No running processes found\n") == {}
    assert read_meminfo(MEMINFO)["Active(file)"] == 20071844 * 1024
    assert read_swaps(SWAPS) == (16777212 * 1024, 0)
    assert read_ptxas(PTXAS) == (13, 5)
    assert read_ptxas("") is None
    assert read_load("Traceback\nRuntimeError: no CUDA\n") == {}
    assert read_load("a warning\n" + SOUND.load)["gb_s"] == 232.4


def test_a_command_that_hangs_or_is_missing_is_an_answer_too() -> None:
    assert ask("sleep", "5", timeout_s=0.2) == "sleep: no answer in 0 s"
    assert ask("sparkmoe-no-such-command") == ""
    assert "cannot access" in ask("ls", "/no/such/folder")


def test_what_is_collected_here_can_be_examined() -> None:
    seen = collect(FLASH, load=False)
    assert read_meminfo(seen.meminfo)["MemTotal"] > 0
    assert any("nvidia/cu13" in str(path) for path in assemblers())
    assert {f.what: f.state for f in examine(seen)}["ptxas"] == "ok"  # the lock's own


def test_objects_are_counted_in_flashinfers_cache(tmp_path: Path) -> None:
    assert compiled_objects(tmp_path, version="0.7.2") == (0, 0)
    module = tmp_path / ".cache/flashinfer/0.7.2/121a/cached_ops/fused_moe_120"
    module.mkdir(parents=True)
    made, missing = module / "a.cuda.o", module / "b.cuda.o"
    made.touch()
    rules = [f"build {o}: cuda_compile /src/{o.stem}.cu" for o in (made, missing)]
    (module / "build.ninja").write_text("\n".join([*rules, f"build {module / 'm.so'}: link {made} {missing}"]))
    assert compiled_objects(tmp_path, version="0.7.2") == (1, 2)


def test_the_load_measures_what_the_checks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch, NVML and Humming's own look at it: a GB10 without a memory clock."""

    def not_supported() -> float:
        raise RuntimeError("Not Supported")

    device = SimpleNamespace(sum=lambda: None)
    cuda = SimpleNamespace(mem_get_info=lambda: (7 << 30, 120 << 30), synchronize=lambda: time.sleep(0.002))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ones=lambda *_, **__: device, float32=None, cuda=cuda))
    asked = SimpleNamespace(calculate_gpu_bandwidth=not_supported)
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.utils.device", asked)
    facts = iter([{"sm_mhz": 2400, "power_w": 40.0}, {"sm_mhz": 2410, "power_w": 50.0}] * 99)
    monkeypatch.setattr(gpus, "nvml_facts", lambda: {"gpus": [next(facts)]})
    monkeypatch.setattr(spark_load, "_SECONDS", 0.1)
    seen = spark_load.measure()
    assert (seen["free_bytes"], seen["humming_error"]) == (7 << 30, "RuntimeError: Not Supported")
    assert 2400 <= seen["sm_mhz"] <= 2410
    assert "temperature_c" not in seen
    states = {f.what: f.state for f in examine(replace(SOUND, load=json.dumps(seen)))}
    assert (states["clock"], states["humming bandwidth"]) == ("ok", "fail")
