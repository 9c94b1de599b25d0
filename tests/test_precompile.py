"""The build with ninja and small scripts in place of nvcc; FlashInfer's own plan with the lock's compiler. The real
compilers' time and memory are recorded in data/precompile-sm121.json."""

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import psutil
import pytest

from lifetimes import until
from sparkmoe import precompile
from sparkmoe.errors import MachineError
from sparkmoe.gates import server_environment
from sparkmoe.machine import GIB
from sparkmoe.precompile import (
    FLOOR_BYTES,
    Built,
    build,
    build_environment,
    jobs,
    kind,
    missing,
    objects,
    plan,
    project,
    sample,
    toolkit,
)

# Like a compiler: `job.py SOURCE -o OBJECT`; the source is a Python expression that may take time, memory, or fail.
COMPILER = "import sys; eval(open(sys.argv[1]).read()); open(sys.argv[3], 'w').close()"


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def module(folder: Path, *sources: str) -> Path:
    (folder / "job.py").write_text(COMPILER)
    lines = ["rule compile", f"  command = {sys.executable} {folder}/job.py $in -o $out ", "rule link"]
    lines += ["  command = cat $in > $out"]
    made = [folder / f"{n}.cuda.o" for n in range(len(sources))]
    for path, source in zip(made, sources, strict=True):
        path.with_name(f"{path.stem}.cu").write_text(source)
        lines.append(f"build {path}: compile {path.with_name(f'{path.stem}.cu')}")
    lines += [f"build {folder}/module.so: link {' '.join(map(str, made))}", f"default {folder}/module.so", ""]
    (folder / "build.ninja").write_text("\n".join(lines))
    return folder / "build.ninja"


def test_each_object_is_told_with_its_time_and_memory(tmp_path: Path) -> None:
    ninja = module(tmp_path, "__import__('time').sleep(0.5) or b'x' * (200 << 20)", "__import__('time').sleep(0.6)")
    built = {each.name: each for each in build(ninja)}
    assert set(built) == {"0.cuda.o", "1.cuda.o"}
    assert 0.5 <= built["1.cuda.o"].seconds < 5
    assert 0 < built["1.cuda.o"].peak_bytes < 100 << 20
    assert (tmp_path / "module.so").exists()
    assert missing(ninja) == []


def test_an_interrupted_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ninja = module(tmp_path, "1", "2", "__import__('time').sleep(60)")
    running = build(ninja)
    assert [next(running).name, next(running).name] == ["0.cuda.o", "1.cuda.o"]
    until(lambda: compilers(tmp_path))
    running.close()
    assert compilers(tmp_path) == []
    assert [path.name for path in missing(ninja)] == ["2.cuda.o"]
    (tmp_path / "2.cuda.cu").write_text("3")
    assert [each.name for each in build(ninja, at_once=4)] == ["2.cuda.o"]


def compilers(folder: Path) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if f"{folder}/job.py" in (p.info["cmdline"] or ())]


def test_a_failing_compiler_is_quoted_and_what_is_built_stays(tmp_path: Path) -> None:
    ninja = module(tmp_path, "1", "sys.exit('kernel.cu(12): error: too much shared memory')")
    with pytest.raises(MachineError, match=r"fused MoE failed: .*too much shared memory"):
        list(build(ninja))
    assert [path.name for path in missing(ninja)] == ["1.cuda.o"]


def test_compilers_are_ended_before_the_memory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ninja = module(tmp_path, "1", "__import__('time').sleep(60)")
    monkeypatch.setattr(precompile, "available_bytes", lambda: GIB)
    with pytest.raises(MachineError, match=r"only 1.0 GiB of memory were left.*fewer jobs: what is built stays"):
        list(build(ninja))
    assert compilers(tmp_path) == []


def test_without_the_drivers_library_only_the_link_is_missing(tmp_path: Path) -> None:
    ninja = module(tmp_path, "1")
    ninja.write_text(ninja.read_text().replace("cat $in > $out", "echo 'ld: cannot find -lcuda'; exit 1"))
    with pytest.raises(MachineError, match=r"all objects are built, but to link them the driver's libcuda.so"):
        list(build(ninja))


def test_jobs_are_counted_by_memory() -> None:
    assert jobs(112 * GIB, 20) == 15
    assert jobs(30 * GIB, 20) == 4
    assert jobs(FLOOR_BYTES, 20) == 1
    assert jobs(112 * GIB, 2) == 2


def test_a_sample_holds_every_kind_and_a_projection_weighs_them() -> None:
    names = [f"90_cutlass_kernel_file_gemm_sm90_M64_group{n}.generated.cuda.o" for n in range(6)]
    names += ["120_cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group0.generated.cuda.o"]
    names += ["moe_gemm_moe_gemm_kernels_bf16_fp4.cuda.o", "lora_lora.o"]
    paths = [Path(name) for name in names]
    assert {kind(path.name) for path in sample(paths, 4)} == {
        "generated for sm_90", "generated for sm_120", "moe_gemm", "other",
    }  # fmt: skip
    assert len(set(sample(paths, 9))) == len(sample(paths, 9)) >= 5
    cost = {"generated for sm_90": 2.0, "generated for sm_120": 100.0, "moe_gemm": 60.0, "other": 1.0}
    built = [Built(path.name, cost[kind(path.name)], GIB) for path in sample(paths, 4)]
    assert project(built, paths, 4, 112 * GIB) == {"objects": 9, "work_s": 173, "jobs": 4, "wall_s": 100}
    with pytest.raises(MachineError, match="nothing was built of moe_gemm"):
        project([b for b in built if kind(b.name) != "moe_gemm"], paths, 4, 112 * GIB)


def test_servers_are_started_with_what_the_build_was_made_with(own_home: Path) -> None:
    assert build_environment() == {}
    assert "CUDA_HOME" not in server_environment({})
    root = toolkit()
    assert root == own_home / "cuda"
    for name in ("libcudart.so", "libnvrtc.so"):
        assert (root / "lib64" / name).is_file()
    said = subprocess.run([root / "bin" / "nvcc", "--list-gpu-code"], capture_output=True, text=True)
    assert "sm_121" in said.stdout
    environment = server_environment({"PATH": "/bin"})
    assert (environment["CUDA_HOME"], environment["FLASHINFER_CUDA_ARCH_LIST"]) == (str(root), "12.1a")
    toolkit()  # a second time: the links are right already


def test_no_other_gpu_gets_this_builds_environment(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = {"compute_capability": (9, 0), "gpu_name": "NVIDIA H200"}
    monkeypatch.setattr(precompile, "read_gpu", lambda: h200)
    with pytest.raises(MachineError, match=r"for a GB10 .*this machine has NVIDIA H200"):
        plan()
    assert build_environment() == {}


def test_flashinfer_plans_ninety_six_objects_for_sm_121a(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    ninja = plan()
    assert "121a" in ninja.parts
    assert "arch=compute_121a,code=sm_121a" in ninja.read_text()
    assert len(objects(ninja)) == len(missing(ninja)) == 96


def test_the_recorded_build_is_of_this_lock() -> None:
    record = json.loads((resources.files("sparkmoe") / "data" / "precompile-sm121.json").read_text())
    assert len(record["objects"]) >= 10
    assert all(each["seconds"] >= 0 and each["peak_gib"] >= 0 for each in record["objects"])
    lock = (Path(__file__).parents[1] / "env" / "requirements.lock").read_text()
    for package in ("flashinfer-python", "nvidia-cuda-nvcc"):
        assert re.search(rf"^{package}=={re.escape(record['conditions']['versions'][package])} ", lock, re.M)
