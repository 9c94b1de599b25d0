import pytest

from sparkmoe.serverlog import STAGES, Progress, last_words, likely_cause, progress, seconds_spent

# A start as SGLang 0.5.23 logs it on a CPU, shortened.
CPU_START = """\
[2026-11-29 19:47:06] server_args={'model_path': '/models/nano', 'skip_server_warmup': False}
[2026-11-29 19:48:16] Init parallel begin.
[2026-11-29 19:48:19] Load weight begin. avail mem=19.68 GB
Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00,  5.19it/s]
[2026-11-29 19:48:20] Load weight end. elapsed=0.85 s, type=BailingMoeV3ForCausalLM, avail mem=19.58 GB
[2026-11-29 19:48:20] Load weight begin. avail mem=19.58 GB
[2026-11-29 19:48:21] KV Cache is allocated. dtype: torch.float32, #tokens: 8192, KV size: 0.01 GB
[2026-11-29 19:48:21] Memory pool end. avail mem=19.54 GB
[2026-11-29 19:48:21] INFO:     Application startup complete.
[2026-11-29 19:48:21] INFO:     Uvicorn running on http://127.0.0.1:31777 (Press CTRL+C to quit)
[2026-11-29 19:48:23] The server is fired up and ready to roll!
""".splitlines()
# The part between memory and warm-up on a GPU.
GPU_GRAPHS = """\
[2026-11-29 10:02:11] Memory pool end. avail mem=30.18 GB
[2026-11-29 10:02:12] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=30.1 GB
Capturing batches (bs=4 avail_mem=29.95 GB):  50%|█████     | 2/4 [00:03<00:03,  1.60s/it]
""".splitlines()


def test_a_start_passes_through_its_stages() -> None:
    seen = [progress(CPU_START[:n]).stage for n in range(len(CPU_START) + 1)]
    assert list(dict.fromkeys(seen)) == ["start", "load", "memory", "warm-up", "ready"]


def test_stages_never_go_back_when_the_draft_loads() -> None:
    order = [progress(CPU_START[:n]).index for n in range(len(CPU_START) + 1)]
    assert order == sorted(order)


def test_the_share_of_a_stage_is_told() -> None:
    assert progress(CPU_START[:4]) == Progress("load", 0)
    assert progress(CPU_START[:5]) == Progress("load", 100)
    assert progress(GPU_GRAPHS) == Progress("graphs", 50)


def test_reading_in_pieces_is_reading_at_once() -> None:
    whole = progress(CPU_START)
    for cut in range(len(CPU_START)):
        assert progress(CPU_START[cut:], progress(CPU_START[:cut])) == whole


def test_where_the_seconds_of_a_start_went() -> None:
    later = [
        "[2026-11-29 10:02:20] Load weight end. elapsed=0.15 s, type=BailingMoeForCausalLMNextN, avail mem=30.1 GB",
        "[2026-11-29 10:02:55] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=43.10 s, mem usage=0.15 GB.",
        "[2026-11-29 10:02:58] Capture draft decode CUDA graph end. elapsed=2.40 s, mem usage=0.1 GB, avail mem=29 GB.",
        "[2026-11-29 10:03:30] Triton kernel 'chunk_kda' took 12.50 s to compile after serving started. Warm it up.",
    ]
    assert seconds_spent([*CPU_START, *later]) == pytest.approx({"load": 1.0, "graphs": 45.5, "compile": 12.5})


def test_the_last_stage_is_ready() -> None:
    assert STAGES[-1] == progress(CPU_START).stage


SHUTDOWN_ECHO = [
    "[2026-11-29 10:00:09] Subprocess scheduler_0 (pid=812) crashed with exit code 1. Triggering SIGQUIT",
    "[2026-11-29 10:00:09] kill_process_tree called: parent_pid=800, include_parent=False, pid=800",
]
DEATHS = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "the GPU ran out of memory"),
    (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "no memory was left for the KV cache",
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
        "machine ran out of memory",
    ),
    (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        "port was taken",
    ),
    ("NVRM: nvAssertFailedNoLog: Assertion failed: rmapiLockAcquire(API_LOCK_FLAGS_NONE)", "driver is wedged"),
    ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "does not know this compute capability"),
    (
        "nvcc error   : 'cudafe++' died due to signal 9 (Kill signal)",
        "building a kernel failed, usually for want of memory",
    ),
    ("RuntimeError: flashinfer-cubin version (0.7.1) does not match flashinfer version (0.7.2).", "different versions"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "a weight file is damaged"),
    (
        "launch_server.py: error: unrecognized arguments: --enable-fp9-lm-head",
        "unrecognized arguments: --enable-fp9-lm-head",
    ),
    (
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
        "no model class for ['FooForCausalLM']",
    ),
    ("OSError: [Errno 28] No space left on device", "disk or /dev/shm is full"),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x256 and 512x256)", "does a draft share an FP8 head"),
    ("Watchdog timeout (self.watchdog_timeout=300)", "longer than SGLang's watchdog allows"),
    (
        "ModuleNotFoundError: No module named 'sgl_kernel'",
        "a Python package is missing or does not fit: No module named 'sgl_kernel'",
    ),
    (
        "RuntimeError: Platform plugin 'torch_cpu' is installed but activate() returned None (hardware?).",
        "refused the platform torch_cpu",
    ),
    (
        "sparkmoe: stopped: available memory fell to 3.1 GiB, below the floor of 4.0 GiB",
        "available memory fell to 3.1 GiB",
    ),
    ("AssertionError", "AssertionError"),
    ("sglang.srt.errors.StrangeError: something new", "StrangeError: something new"),
]


@pytest.mark.parametrize(("line", "meaning"), DEATHS, ids=[meaning[:30] for _, meaning in DEATHS])
def test_the_likely_cause_is_found_behind_the_echo(line: str, meaning: str) -> None:
    log = [*CPU_START[:4], "Traceback (most recent call last):", line, *SHUTDOWN_ECHO]
    assert meaning in (likely_cause(log) or "")


@pytest.mark.parametrize(("line", "meaning"), DEATHS[:-2], ids=[meaning[:30] for _, meaning in DEATHS[:-2]])
def test_a_timestamp_before_the_message_does_not_hide_it(line: str, meaning: str) -> None:
    assert meaning in (likely_cause([f"[2026-11-29 10:00:00 TP0] {line}"]) or "")


def test_the_particular_cause_wins_over_a_later_general_one() -> None:
    log = [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: Initialization failed. Please see the error above.",
    ]
    assert "GPU ran out of memory" in (likely_cause(log) or "")


def test_a_server_that_kills_itself_after_a_child_failed_was_not_killed_for_memory() -> None:
    log = [
        "[2026-11-30 07:26:22] Scheduler hit an exception: Traceback (most recent call last):",
        "triton.compiler.errors.CompilationError: at 233:16:",
        "ValueError('Cannot make_shape_compatible: incompatible dimensions at index 1: 128 and 256')",
        "[2026-11-30 07:26:22] Received sigquit from a child process. It usually means the child failed.",
        "[2026-11-30 07:26:22] kill_process_tree called: parent_pid=3849, include_parent=True, pid=3849",
        "sparkmoe: server ended, exit code -9 after 74 s",
    ]
    assert "a Triton kernel did not compile" in (likely_cause(log) or "")
    del log[1:3]
    assert likely_cause(log) is None
    assert "signal 9" in (likely_cause(log[1:]) or ""), "a child that was killed raises nothing"


def test_a_healthy_log_has_no_cause() -> None:
    assert likely_cause(CPU_START) is None


def test_last_words_leave_the_noise_out() -> None:
    log = [*CPU_START, "  warnings.warn(", "", "ValueError: no", *SHUTDOWN_ECHO, "x" * 500]
    words = last_words(log, 3)
    assert words == ["ValueError: no", SHUTDOWN_ECHO[0], "x" * 200]
