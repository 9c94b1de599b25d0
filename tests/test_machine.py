import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkmoe.errors import MachineError
from sparkmoe.gpus import nominal_gb_s, read_gpu, visible_gpus
from sparkmoe.machine import Machine, available_bytes


class FakeNvml:
    """NVML as a machine answers it: `memory=None` is the "not supported" of a GPU without memory of its own."""

    class NVMLError(Exception):
        pass

    def __init__(self, name: str = "", cc: tuple[int, int] = (0, 0), memory: int | None = None, count: int = 1) -> None:
        self.gpu, self.cc, self.memory, self.count, self.open = name, cc, memory, count, 0

    def nvmlInit(self) -> None:
        if self.count < 0:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}2b7"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.gpu.encode()

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.cc

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.memory is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=self.memory)


GB10 = FakeNvml("NVIDIA GB10", (12, 1))
H200 = FakeNvml("NVIDIA H200", (9, 0), 150_754_820_096, count=2)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SPARKMOE_MACHINE", "SPARKMOE_MODEL"):
        monkeypatch.delenv(name, raising=False)


def test_a_gb10_is_a_spark_with_unified_memory() -> None:
    machine = Machine.detect(GB10)
    assert (machine.profile, machine.unified_memory, machine.gpu_memory_bytes) == ("spark", True, None)
    assert machine.nominal_gb_s == 273.0
    assert "shared with the GPU" in machine.describe()
    assert GB10.open == 0


def test_an_h200_is_a_hopper_with_its_own_memory() -> None:
    machine = Machine.detect(H200)
    assert (machine.profile, machine.gpu_count, machine.compute_capability) == ("hopper", 2, (9, 0))
    assert machine.gpu_memory_bytes == H200.memory
    assert not machine.unified_memory


@pytest.mark.parametrize("nvml", [FakeNvml(count=-1), FakeNvml(count=0)], ids=["no driver", "no device"])
def test_without_a_gpu_it_is_a_cpu(nvml: FakeNvml) -> None:
    machine = Machine.detect(nvml)
    assert machine.profile == "cpu"
    assert machine.gpu_name is None
    assert machine.default_model is not None


VISIBLE = {"": [], "-1": [], "1": [1], "0,1": [0, 1], "1,0": [1, 0], "GPU-1,GPU-02b7": [1, 0], "MIG-1": [0],
           "7": [], "0,7,1": [0], "0,0": [0], "NoDevFiles": [], "GPU-9": []}  # fmt: skip


@pytest.mark.parametrize(("visible", "shown"), VISIBLE.items())
def test_cuda_visible_devices_counts(monkeypatch: pytest.MonkeyPatch, visible: str, shown: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = read_gpu(H200)
    assert (gpu["gpu_count"] if gpu else 0) == len(shown)
    assert visible_gpus(H200) == shown


def test_the_profile_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_MACHINE", "cpu")
    assert Machine.detect(H200).profile == "cpu"
    monkeypatch.setenv("SPARKMOE_MACHINE", "laptop")
    with pytest.raises(MachineError, match=r"'laptop'.*spark, hopper, cpu"):
        Machine.detect(H200)


def test_reference_machines_can_be_named_anywhere() -> None:
    assert Machine.named("spark").compute_capability == (12, 1)
    assert Machine.named("hopper").gpu_name == "NVIDIA H200"
    assert Machine.named("cpu").gpu_count == 0


@pytest.mark.parametrize(
    ("machine", "what", "reason"),
    [
        ("cpu", "humming", "Humming needs an NVIDIA GPU; this machine runs on its CPU"),
        ("cpu", "fp8_head", None),
        ("cpu", "nextn", None),
        ("spark", "humming", None),
        ("spark", "flashinfer_mxfp4", None),
        ("hopper", "flashinfer_mxfp4", None),
        ("hopper", "cuda_graphs", None),
    ],
)
def test_what_it_can_do(machine: str, what: str, reason: str | None) -> None:
    assert Machine.named(machine).why_not(what) == reason
    assert Machine.named(machine).can(what) is (reason is None)


def test_an_ampere_has_no_mxfp4_kernels_of_flashinfer() -> None:
    machine = Machine.detect(FakeNvml("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30))
    assert machine.why_not("flashinfer_mxfp4") == (
        "FlashInfer's MXFP4 MoE has no kernels for compute capability 8.0 (NVIDIA A100-SXM4-80GB)"
    )
    assert machine.why_not("fp8_activations") is not None
    assert machine.can("marlin")


def test_an_unknown_capability_is_an_error() -> None:
    with pytest.raises(MachineError, match="flash_attention"):
        Machine.named("cpu").why_not("flash_attention")


def test_the_longest_name_gives_the_bandwidth() -> None:
    assert nominal_gb_s("NVIDIA H100 PCIe") == 2000.0
    assert nominal_gb_s("NVIDIA H100 80GB HBM3") == 3350.0
    assert nominal_gb_s("NVIDIA GH200 480GB") == 4900.0
    assert nominal_gb_s("Unknown 9000") is None


def test_the_bandwidth_probe_measures_something_possible() -> None:
    assert 0.5 < Machine.named("cpu").probe_bandwidth(64 << 20, repeats=2) < 2000.0


def test_a_containers_limit_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    free = available_bytes(tmp_path)  # no cgroup files: the machine's own figure
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 200000\n")
    assert available_bytes(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == pytest.approx(free, rel=0.2)


def test_detection_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sparkmoe.machine import Machine; Machine.detect();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'sglang')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
