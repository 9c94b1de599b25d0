"""What one answer was: from the raw stream of arrivals to a `Sample`, parsed after the last byte.

What is counted comes from the server. An event is not a token: with speculative decoding an event brings as many tokens
as the target accepted, so every count here is the server's `completion_tokens`, and TPOT = (last − first arrival) /
(n − n of the first event).

The two endpoints carry the same facts in different places. `/generate` puts them into `meta_info` of each event and
repeats the whole answer each time (unless the server streams increments). The OpenAI chat stream puts running counts
into `usage` (asked for with `continuous_usage_stats`), and accept histogram, cached tokens and token ids into `sglext`,
one event before the last `usage`. SGLang sends the first chat event, which holds only the role, together with the first
token, whose text the reasoning parser may swallow: so that event stands for the first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from sparkmoe.errors import EngineError

Failure = Literal["refused", "rejected", "server_error", "malformed", "stalled", "dropped", "died"]
_COUNT = b'"completion_tokens":'  # cannot occur inside a JSON string, where its quotes would be escaped


@dataclass(frozen=True)
class Sample:
    """One request as it was measured. Times in ms since the request was sent; token counts are the server's.

    `chunk_times_ms[i]` is the arrival of the i-th event that brought tokens, `chunk_tokens[i]` how many it brought
    (empty where a chat server sends no running usage). `accept_histogram[k]` counts verify steps that accepted k
    drafts. `cached_tokens` is None where the server did not say.
    """

    prompt_hash: str
    started_unix_s: float
    text: str = ""
    reasoning: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    chunk_times_ms: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    accept_length: float | None = None
    accept_histogram: tuple[int, ...] | None = None
    spec_verify_ct: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Time between consecutive events that brought tokens, ms."""
        return tuple(b - a for a, b in zip(self.chunk_times_ms, self.chunk_times_ms[1:], strict=False))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Sample:
        """The inverse of `to_json` after a trip through a JSON file; unknown keys are ignored."""
        names = cls.__dataclass_fields__
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k in names}
        return cls(**known)


class RequestFailed(EngineError):
    """A request that gave no whole answer: `kind` names the failure, `sample` holds what was measured until then."""

    def __init__(self, kind: Failure, message: str, sample: Sample | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.sample = sample


@dataclass
class Arrivals:
    """The raw stream of one answer: (perf_counter_ns at arrival, bytes) in order, and how it ended if not well."""

    prompt_hash: str
    started_unix_s: float
    sent_ns: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)  # (arrival, completion_tokens) of events let go
    failure: tuple[Failure, str] | None = None

    def events(self) -> tuple[list[tuple[int, bytes]], bytes]:
        """Whole server-sent events, each with the arrival of its last byte, and the bytes of an unfinished one."""
        events, rest = [], b""
        for at, piece in self.pieces:
            *whole, rest = (rest + piece).split(b"\n\n")
            for block in whole:
                data = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
                if data:
                    events.append((at, b"\n".join(data)))
        return events, rest

    def let_go(self) -> None:
        """Keep only times and counts of the events so far: the next one of a cumulative stream repeats their text."""
        events, rest = self.events()
        for at, data in events:
            where = data.rfind(_COUNT)
            if where >= 0:
                self.counts.append((at, int(data[where + len(_COUNT) :].lstrip().split(b",")[0].split(b"}")[0])))
        self.pieces = [(self.pieces[-1][0], rest)]


@dataclass
class Reading:
    """What a parser gathers: `counts` are (arrival, tokens so far, None where not said)."""

    counts: list[tuple[int, int | None]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    end_ns: int | None = None
    done: bool = False

    def sample(self, arrivals: Arrivals) -> Sample:
        values, times, tokens, total = dict(self.values), [], [], 0
        if any(n is None for _, n in self.counts):
            times = [at for at, _ in self.counts]
        else:
            for at, n in self.counts:
                if n is not None and n > total:
                    times.append(at)
                    tokens.append(n - total)
                    total = n
        total = values.setdefault("completion_tokens", total)
        ms = [(at - arrivals.sent_ns) / 1e6 for at in times]
        after_first = total - (tokens[0] if tokens else 1)
        return Sample(
            prompt_hash=arrivals.prompt_hash,
            started_unix_s=arrivals.started_unix_s,
            ttft_ms=ms[0] if ms else None,
            tpot_ms=(ms[-1] - ms[0]) / after_first if len(ms) > 1 and after_first > 0 else None,
            latency_ms=(self.end_ns - arrivals.sent_ns) / 1e6 if self.end_ns else None,
            chunk_times_ms=tuple(ms),
            chunk_tokens=tuple(tokens),
            **values,
        )


def finish(arrivals: Arrivals, read: Callable[[Arrivals, Reading], None]) -> Sample:
    """Parse what arrived; a failure, of the connection or of the content, is raised with what had been measured."""
    reading = Reading(counts=list(arrivals.counts))
    failure = arrivals.failure
    try:
        read(arrivals, reading)
        if failure is None and (not reading.done or reading.values.get("finish_reason") is None):
            failure = ("dropped", "the answer ended without a finish reason")
    except RequestFailed as error:
        failure = failure or (error.kind, str(error))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        failure = failure or ("malformed", f"the server sent what is no answer ({type(error).__name__}: {error})")
    sample = reading.sample(arrivals)
    if failure is None and not sample.completion_tokens:
        failure = ("malformed", "the answer ended without a token count (`completion_tokens`)")
    if failure is None:
        return sample
    raise RequestFailed(*failure, sample=replace(sample, error=f"{failure[0]}: {failure[1]}"))


def _objects(arrivals: Arrivals, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (arrival, JSON object) of each event; an error sent inside the stream is raised."""
    events, rest = arrivals.events()
    for at, data in events:
        if data == b"[DONE]":
            reading.done = True
            continue
        item = json.loads(data)
        if item.get("error"):
            raise RequestFailed(*refusal(500, data))
        yield at, item
    if rest.strip() and arrivals.failure is None:
        raise RequestFailed("malformed", f"the answer ended inside an event: {rest[:80]!r}")


def read_generate(arrivals: Arrivals, reading: Reading) -> None:
    values, text = reading.values, ""
    ids: list[int] = []
    for at, item in _objects(arrivals, reading):
        meta = item["meta_info"]
        end, n = meta.get("finish_reason") or {}, int(meta["completion_tokens"])
        if end.get("type") == "abort":
            raise RequestFailed("server_error", f"the server aborted the request: {end.get('message') or 'no reason'}")
        new, ids_before = item.get("output_ids") or [], len(ids)
        increment = ids_before > 0 and ids_before + len(new) == n  # otherwise the event repeats the answer so far
        ids, text = (ids + new, text + item["text"]) if increment else (new or ids, item["text"])
        reading.counts.append((at, n))
        values |= {"text": text, "token_ids": tuple(ids) or None, "completion_tokens": n}
        values |= {"prompt_tokens": meta.get("prompt_tokens"), "cached_tokens": meta.get("cached_tokens")}
        if logprobs := meta.get("output_token_logprobs"):
            values["logprobs"] = (values.get("logprobs") or ()) * increment + tuple(entry[0] for entry in logprobs)
        if end:
            values |= {"finish_reason": end["type"]} | _speculation(meta)
            reading.end_ns = at


def read_chat(arrivals: Arrivals, reading: Reading) -> None:
    values, counts, texts = reading.values, reading.counts, {"text": "", "reasoning": ""}
    for at, item in _objects(arrivals, reading):
        usage = item.get("usage") or {}
        for choice in item.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            content = delta.get("content") or ""
            texts["reasoning"] += thought
            texts["text"] += content
            values |= {"text": texts["text"], "reasoning": texts["reasoning"] or None}
            if choice.get("finish_reason"):
                values["finish_reason"] = choice["finish_reason"]
                reading.end_ns = at
            if not counts:
                counts.append((at, usage.get("completion_tokens", 1)))
            elif usage or thought or content:
                counts.append((at, usage.get("completion_tokens")))
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            values |= {"prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": usage["completion_tokens"]}
            if details.get("cached_tokens") is not None:
                values["cached_tokens"] = details["cached_tokens"]
        if extension := item.get("sglext"):
            cached = extension.get("cached_tokens_details") or {}  # left out by SGLang when nothing was cached
            values["cached_tokens"] = sum(cached.get(k) or 0 for k in ("device", "host", "storage"))
            values |= _speculation(extension.get("spec_tokens_details") or {})
            if extension.get("output_ids"):
                values["token_ids"] = tuple(extension["output_ids"][0])
    total = values.get("completion_tokens", 0)
    if counts and reading.end_ns and None not in (n for _, n in counts) and total > (counts[-1][1] or 0):
        counts.append((reading.end_ns, total))  # tokens without text of their own, as the end-of-text token


def _speculation(meta: dict[str, Any]) -> dict[str, Any]:
    if not meta.get("spec_verify_ct"):
        return {}
    histogram = meta.get("spec_correct_drafts_histogram")
    return {
        "accept_length": meta.get("spec_accept_length"),
        "accept_histogram": tuple(histogram) if histogram else None,
        "spec_verify_ct": meta["spec_verify_ct"],
    }


def accepted(histograms: Iterable[Sequence[int] | None]) -> list[int]:
    """Verify steps that accepted exactly 0, 1, … drafts, over all samples; those without a draft count none."""
    return [sum(column) for column in zip_longest(*(h or () for h in histograms), fillvalue=0)]


def accept_length(histograms: Iterable[Sequence[int] | None]) -> float:
    """Tokens that a verify step yields, from the samples' histograms: never above K + 1. (The server's own figure
    counts the first token too, which no verify step made: 4.1 and more at K = 3 on short answers.) NaN without a draft.
    """
    counts = accepted(histograms)
    return 1 + sum(k * n for k, n in enumerate(counts)) / sum(counts) if sum(counts) else float("nan")


def refusal(status: int, content: bytes) -> tuple[Failure, str]:
    """Failure kind and message of an HTTP error or of an error object inside the stream."""
    try:
        found = json.loads(content)
        inner = found.get("error") if isinstance(found.get("error"), dict) else found
        message = inner.get("message") or inner.get("detail") or inner.get("error") or content.decode()
        status = int(inner.get("code") or status) if str(inner.get("code") or status).isdigit() else status
    except (ValueError, AttributeError):
        message = content.decode(errors="replace").strip() or "no reason given"
    if status < 500:
        return "rejected", f"the server refused the request with status {status}: {str(message)[:500]}"
    return "server_error", f"the server failed with status {status}: {str(message)[:500]}"
