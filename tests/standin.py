"""A bench whose engines are fake servers, so that it can be killed a hundred times.

`python tests/standin.py RUN_DIR` measures 3 arms × 3 boots × 4 requests, prints a line before it begins, and goes on
with the run that it finds there. With a model folder behind it, the engines are real ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fake_server import Behaviour, FakeServer
from sparkmoe.bench import bench
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run
from sparkmoe.workload import Prompt, Workload

ARMS = ("baseline", "fp8_head", "nextn")


class QuickMachine(Machine):
    """This machine as a CPU profile; its probe costs nothing."""

    def probe_bandwidth(self, bytes: int = 256 << 20, *, repeats: int = 5) -> float:
        return 12.5


_HERE = Machine.named("cpu")
MACHINE = QuickMachine(**{f.name: getattr(_HERE, f.name) for f in fields(_HERE)})


@dataclass
class StandIn:
    """What a started engine offers, and the fake behind it."""

    fake: FakeServer
    log_path: Path
    evidence_path: Path
    api_key: str = "key"

    @property
    def url(self) -> str:
        return self.fake.url


def boot_with(
    folder: Path,
    behaviour: Callable[[Recipe], Behaviour] = lambda recipe: Behaviour(drafts=recipe.draft_steps, gap_ms=1.0),
    started: list[StandIn] | None = None,
) -> Callable[[Recipe], object]:
    """A way to boot for `bench`: a fake server per boot, its log and evidence in `folder`."""

    @contextmanager
    def start(recipe: Recipe) -> Iterator[StandIn]:
        folder.mkdir(parents=True, exist_ok=True)
        with FakeServer(behaviour(recipe), api_key="key") as fake:
            server = StandIn(fake, folder / f"{recipe.name}.log", folder / f"{recipe.name}.evidence.json")
            server.log_path.write_text("The server is fired up and ready to roll!\n")
            server.evidence_path.write_text(json.dumps({"lm_head": recipe.head}))
            if started is not None:
                started.append(server)
            yield server

    return start


def prompts(folder: Path, n: int = 4, tokens: int = 9) -> Workload:
    made = [Prompt(f"p{i}", "synthetic", chr(97 + i) * 5, (97 + i,) * 5, tokens, ignore_eos=True) for i in range(n)]
    return Workload.write(made, folder / "mine.jsonl")


def main() -> None:
    folder = Path(sys.argv[1])
    run = Run.open(folder) if (folder / "manifest.json").is_file() else Run.create(folder.parent, run_id=folder.name)
    with run:
        print("begun", flush=True)  # noqa: T201
        made = prompts(folder.parent)
        model = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        start = boot_with(folder / "logs", lambda recipe: Behaviour(drafts=recipe.draft_steps, gap_ms=6.0))
        engines: dict[str, Any] = {"model": model} if model else {"boot_with": start}
        for _ in bench(run, ARMS, made, machine=MACHINE, boots=3, seed=5, **engines):
            pass


if __name__ == "__main__":
    main()
