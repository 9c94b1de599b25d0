from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkmoe.sglang_plugin import draft_head
from sparkmoe.sglang_plugin.draft_head import MODE_ENV, DraftHead, build, mode, padded_ids
from sparkmoe.sglang_plugin.fp8_lm_head import E4M3, Fp8HeadMethod, Refused

N, K = 160, 32


def weight(seed: int = 0) -> torch.Tensor:
    rows = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return (rows * torch.linspace(0.2, 4, N)[:, None]).to(torch.bfloat16)


def bf16_head() -> Any:
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(weight(), requires_grad=False)
    return head


def fp8_head(scale: Any = "channel") -> Any:
    head = bf16_head()
    Fp8HeadMethod(scale).process_weights_after_loading(head)
    return head


X = torch.randn(3, K, generator=torch.Generator().manual_seed(9))
IDS = torch.tensor([5, 159, 0, 77, *range(10, 22)])


def logits(head: Any) -> torch.Tensor:
    method = getattr(head, "quant_method", None)
    return method.apply(head, X) if method else X.to(head.weight.dtype) @ head.weight.t()


def test_a_shared_head_is_the_target_s_module() -> None:
    for head in (bf16_head(), fp8_head()):
        assert build(head, "shared", None) is head


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_rows_of_an_fp8_head_keep_their_numbers(scale: str) -> None:
    target = fp8_head(scale)
    hot = build(target, "shared", IDS)
    assert hot.weight.dtype == E4M3
    assert tuple(hot.weight.shape) == (K, len(IDS))
    assert torch.equal(logits(hot), logits(target)[:, IDS])


def test_rows_of_a_bf16_head_keep_their_numbers() -> None:
    target = bf16_head()
    hot = build(target, "shared", IDS)
    assert isinstance(hot, DraftHead)
    assert hot.quant_method is None
    assert torch.equal(logits(hot), logits(target)[:, IDS])


@pytest.mark.parametrize("ids", [None, IDS])
def test_an_fp8_head_for_the_draft_alone_leaves_the_target_s(ids: torch.Tensor | None) -> None:
    target = bf16_head()
    before = target.weight
    draft = build(target, "fp8", ids)
    assert target.weight is before
    assert draft.weight.dtype == E4M3
    wanted = logits(fp8_head()) if ids is None else logits(fp8_head())[:, ids]
    assert torch.equal(logits(draft), wanted)  # as if the target's head had been quantized
    assert build(fp8_head(), "fp8", None).weight.dtype == E4M3


def test_lost_scales_change_the_winner() -> None:
    target = fp8_head()
    lost = build(target, "unscaled", None)
    assert lost.weight.dtype == torch.bfloat16
    assert tuple(lost.weight.shape) == (N, K)
    x = torch.randn(200, K, generator=torch.Generator().manual_seed(3))
    kept = target.quant_method.apply(target, x).argmax(dim=1)
    assert (kept == (x.to(torch.bfloat16) @ lost.weight.t()).argmax(dim=1)).float().mean() < 0.2
    for head, ids in ((bf16_head(), None), (target, IDS)):
        with pytest.raises(Refused, match="needs an FP8 target head and no token map"):
            build(head, "unscaled", ids)


def test_the_count_is_padded_with_a_row_that_cannot_change_a_draft() -> None:
    ids = padded_ids(torch.tensor([7, 3, 9]), N)
    assert ids.tolist() == [7, 3, 9] + [7] * 13
    assert padded_ids(IDS, N).tolist() == IDS.tolist()
    target = fp8_head()
    few = torch.tensor([7, 3, 9])
    winner = padded_ids(few, N)[logits(build(target, "shared", padded_ids(few, N))).argmax(dim=1)]
    assert winner.tolist() == few[logits(target)[:, few].argmax(dim=1)].tolist()


@pytest.mark.parametrize("ids", [[], [1, N], [-1, 3], [4, 4]])
def test_a_map_that_does_not_fit_is_refused(ids: list[int]) -> None:
    with pytest.raises(Refused, match="token map does not fit"):
        padded_ids(torch.tensor(ids, dtype=torch.int64), N)


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode() == "shared"
    monkeypatch.setenv(MODE_ENV, "half")
    with pytest.raises(Refused, match="SPARKMOE_DRAFT_HEAD='half' is none of shared, fp8, weight_only, unscaled"):
        mode()


class Worker:
    """The parts of SGLang's EagleDraftWorker that the hook touches."""

    def __init__(self, target_head: Any, hot: list[int] | None = None) -> None:
        self.bound: list[Any] = []
        draft = SimpleNamespace(lm_head=bf16_head(), set_embed_and_head=lambda e, h: self.bound.append((e, h)))
        target = SimpleNamespace(lm_head=target_head, config=SimpleNamespace(vocab_size=N))
        self.draft_runner = SimpleNamespace(model=draft)
        self.target_worker = SimpleNamespace(model_runner=SimpleNamespace(model=target))
        self.hot_token_id = torch.tensor(hot) if hot else None
        self.speculative_algorithm = SimpleNamespace(is_eagle3=lambda: False)

    def _resolve_shared_embed_and_head(self) -> tuple[str, Any]:
        return "embedding", self.target_worker.model_runner.model.lm_head.weight


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Any:
    import sglang.srt.runtime_context as context

    found = SimpleNamespace(tp_size=1)
    monkeypatch.setattr(context, "get_parallel", lambda: found)
    return found


def run(worker: Worker) -> list[Any]:
    called: list[Any] = []
    draft_head._around_init_lm_head(called.append, worker)
    return called


def test_the_draft_gets_the_module_and_the_embedding(shards: Any) -> None:
    target = fp8_head()
    worker = Worker(target)
    assert run(worker) == []
    assert worker.draft_runner.model.lm_head is target
    assert worker.bound == [("embedding", target.weight)]


def test_a_hot_vocabulary_gives_small_heads_and_padded_ids(shards: Any) -> None:
    worker = Worker(fp8_head(), hot=[7, 3, 9])
    run(worker)
    assert worker.hot_token_id is not None
    assert worker.hot_token_id.tolist() == [7, 3, 9] + [7] * 13
    assert tuple(worker.draft_runner.model.lm_head.weight.shape) == (K, 16)
    shards.tp_size = 2
    with pytest.raises(Refused, match="one of 2 shards"):
        run(Worker(bf16_head(), hot=[7, 3, 9]))


def test_sglang_s_own_way_where_it_is_asked_for_or_enough(shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    knows = Worker(fp8_head())
    knows.draft_runner.model.set_lm_head_from_target = print  # a draft that SGLang can give a module
    assert run(knows) == [knows]
    other = Worker(fp8_head())
    other.speculative_algorithm = SimpleNamespace(is_eagle3=lambda: True)
    assert run(other) == [other]
    monkeypatch.setenv(MODE_ENV, "weight_only")
    worker = Worker(fp8_head())
    assert run(worker) == [worker]
    assert worker.bound == []
