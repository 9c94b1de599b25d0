"""One lock for every machine the cookbook runs on, resolved here for each of them without installing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "env" / "requirements.lock"
TARGETS = [
    ("aarch64-manylinux_2_39", "3.12"),
    ("aarch64-manylinux_2_39", "3.11"),
    ("x86_64-manylinux_2_34", "3.12"),
    ("x86_64-manylinux_2_34", "3.11"),
]


def resolve(
    requirements: Path, platform: str, python: str, target: Path, *, dry: bool = True, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Ask the registry for a wheel of every pinned package for that platform; `dry`: nothing is fetched."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        *(["--dry-run"] if dry else ["--no-cache", "--require-hashes"]),
        "--target",
        str(target),
        "--python-platform",
        platform,
        "--python-version",
        python,
        "--only-binary",
        ":all:",
        "--no-deps",
        "-r",
        str(requirements),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def skip_without_registry(result: subprocess.CompletedProcess[str]) -> None:
    if re.search(r"(?i)dns error|connect(ion)? (error|refused|timed out)|network is unreachable", result.stderr):
        pytest.skip("no package registry can be reached")


@pytest.mark.network
@pytest.mark.parametrize(("platform", "python"), TARGETS)
def test_every_package_has_a_wheel(platform: str, python: str, tmp_path: Path) -> None:
    result = resolve(LOCK, platform, python, tmp_path / "target")
    skip_without_registry(result)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "+ sglang==0.5.23" in result.stderr + result.stdout


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3600)
def test_a_spark_can_install_the_lock(tmp_path: Path) -> None:
    """Fetched, hashed and unpacked for aarch64 and CPython 3.12, as on DGX OS."""
    result = resolve(LOCK, *TARGETS[0], tmp_path / "target", dry=False, timeout_s=3000)
    skip_without_registry(result)
    assert result.returncode == 0, result.stderr[-2000:]
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==", LOCK.read_text(), re.M)
    installed = {canonicalize_name(p.name.split("-")[0]) for p in (tmp_path / "target").glob("*.dist-info")}
    assert {"sglang", "torch", "flashinfer-python", "humming-kernels", "nvidia-cuda-nvcc"} <= installed
    assert len(installed) >= 0.9 * len(set(pinned))  # the rest are for x86-64 alone
    tags = {
        (file.parent.name, platform)
        for file in (tmp_path / "target").glob("*.dist-info/WHEEL")
        for platform in re.findall(r"^Tag: \S+-\S+-(\S+)$", file.read_text(), re.M)
    }
    assert any(platform.endswith("aarch64") for _, platform in tags)
    here = ("aarch64", "sbsa", "any")  # NVIDIA's name for Arm servers is in a wheel that is named aarch64
    assert [(name, platform) for name, platform in tags if not platform.endswith(here)] == []


@pytest.mark.network
def test_a_package_without_a_wheel_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("docopt==0.6.2\n")  # published as a source archive only
    result = resolve(tmp_path / "lock", *TARGETS[0], tmp_path / "target")
    skip_without_registry(result)
    assert result.returncode != 0
    assert "docopt" in result.stderr


def test_the_lock_holds_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [Requirement(line) for line in project["project"]["dependencies"] + project["dependency-groups"]["dev"]]
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", LOCK.read_text(), re.M))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    missing = [str(r) for r in asked if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0"))]
    assert missing == [], f"run `make lock`: {missing}"


def test_the_lock_names_no_registry_and_hashes_everything() -> None:
    text = LOCK.read_text()
    assert "://" not in text
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]
    assert [b.splitlines()[0] for b in blocks if "--hash=sha256:" not in b] == []
