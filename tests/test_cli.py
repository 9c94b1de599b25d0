import os
import subprocess
import sys
import time
from pathlib import Path


def test_help_answers_at_once() -> None:
    """Nothing heavy may be imported for it. The best of three, since the machine may be busy."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", "from sparkmoe.cli import main; main(['--help'])"], capture_output=True
        )
        seconds.append(time.perf_counter() - begun)
        assert done.returncode == 0
    assert min(seconds) < 0.5
    for command in (b"doctor", b"serve", b"stop", b"run"):
        assert command in done.stdout


def test_the_printed_command_is_all_of_stdout() -> None:
    argv = [
        sys.executable,
        "-c",
        "from sparkmoe.cli import main; main()",
        "serve",
        "nextn_k2",
        "--print",
        "--machine",
        "spark",
    ]
    done = subprocess.run([*argv, "--port", "30000"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:1] == ["HF_HUB_OFFLINE=1 \\"]
    assert done.stdout.splitlines()[1].endswith("-m sglang.launch_server \\")
    assert "  --speculative-num-steps 2 \\" in done.stdout
    assert "  --port 30000 \\" in done.stdout
    assert "--api-key" in done.stdout


def test_another_draft_can_be_served() -> None:
    program = "from sparkmoe.cli import main; main()"
    words = "serve nextn_k5 --print --machine spark --draft-model /models/draft"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    assert "  --speculative-draft-model-path /models/draft \\\n  --speculative-dspark-block-size 5" in done.stdout


def test_an_unknown_command_is_told_near_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from sparkmoe.cli import main; main(['serv'])"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_stop_says_how_many_it_stopped(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "from sparkmoe.cli import main; main(['stop'])"]
    environment = os.environ | {"SPARKMOE_HOME": str(tmp_path)}  # not that of this session: its servers are in use
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, '{"stopped": 0}\n')
