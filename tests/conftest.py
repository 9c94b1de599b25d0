"""Fixtures that several test modules share: a private SPARKMOE_HOME, the random miniature, and live servers.

A server costs some 20 seconds, so `serve` hands out running ones: equal recipes share a server for the whole session,
and at most `ALIVE` run at once (the longest unused is ended first), because each holds some 1.5 GiB.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkmoe.checkpoint import make_miniature
from sparkmoe.engine import Engine
from sparkmoe.processes import OWNER_ENV, end_all
from sparkmoe.recipe import Recipe

ALIVE = 3
Serve = Callable[..., Engine]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With two workers (`-n 2 --dist loadgroup`) one takes all tests that share servers."""
    for item in items:
        if "serve" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("serve"))


@pytest.fixture(scope="session", autouse=True)
def sparkmoe_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State of this test session alone, so that no test sees or stops a user's server."""
    home = tmp_path_factory.mktemp("home")
    before = os.environ.get("SPARKMOE_HOME")
    os.environ["SPARKMOE_HOME"] = str(home)
    yield home
    end_all()
    os.environ.pop("SPARKMOE_HOME") if before is None else os.environ.update(SPARKMOE_HOME=before)


@pytest.fixture
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """State of one test alone; what servers it leaves are ended."""
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(OWNER_ENV, raising=False)
    yield tmp_path / "home"
    end_all()


@pytest.fixture(scope="session")
def miniature(sparkmoe_home: Path) -> Path:
    """The 12-layer random checkpoint, 25 M parameters."""
    return make_miniature(sparkmoe_home / "nano" / "random-miniature")


@pytest.fixture(scope="session")
def serve(miniature: Path) -> Iterator[Serve]:
    """`serve("nextn", model=…, head="bf16", …)`: a running Engine on the CPU; `model` defaults to the miniature.

    Further keywords change the recipe (`Recipe.with_`). Nobody may stop the engine. Where a test failed, its log is
    kept with the session's temporary files.
    """
    engines: dict[tuple[str, Path], Engine] = {}

    def running(recipe: Recipe | str = "baseline", model: Path | None = None, **changes: object) -> Engine:
        chosen = (Recipe.named(recipe) if isinstance(recipe, str) else recipe).with_(**changes)
        key = (repr(chosen.with_(name="")), model or miniature)
        if key in engines:
            engines[key] = engines.pop(key)  # used last
        else:
            while len(engines) >= ALIVE:
                engines.pop(next(iter(engines))).stop()
            engines[key] = Engine(chosen, "cpu", key[1], show=False).start()
        return engines[key]

    yield running
    for engine in engines.values():
        engine.stop()
