"""Two minutes of what `make soak` does for 20,000 requests; and what `sparkmoe serve --keep` promises a client."""

import http.client
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from soak import MAX_GROWTH, MAX_RECOVERY_S, Soak
from sparkmoe import recorded
from sparkmoe.client import Client
from sparkmoe.sample import RequestFailed

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
# Nano Ling never learned to call tools, so its answer is bound to the form in which Ling-3.0 writes a call.
CALL = r"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[0-9]</arg_value>\n</tool_call>"  # noqa: E501
QUESTION: Any = [{"role": "user", "content": "Ann has 3 apples and buys 4 more. How many apples has she?"}]


def as_openai_would(client: Client, key: str) -> None:
    """Reasoning apart from the answer, streamed or not; a tool call; metrics; no entry with a wrong key."""
    api = openai.OpenAI(base_url=f"{client.url}/v1", api_key=key, max_retries=0)
    model = api.models.list().data[0].id
    whole = api.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=200)
    message: Any = whole.choices[0].message
    assert "7" in message.reasoning_content
    assert message.content.endswith("#### 7")
    stream = api.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=200, stream=True)
    deltas: list[Any] = [event.choices[0].delta for event in stream if event.choices]
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == message.reasoning_content

    called = api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=200, tools=[ADD], extra_body={"regex": CALL}
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)["a"]) == ("add", 3)

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{client.url}/v1", api_key="wrong" * 5, max_retries=0).models.list()
    with pytest.raises(RequestFailed, match="401"):
        Client(client.url, "wrong" * 5).generate("a", max_new_tokens=1)
    connection = http.client.HTTPConnection(client.url.removeprefix("http://"), timeout=30)
    connection.request("GET", "/metrics")
    assert b"sglang:generation_tokens_total" in connection.getresponse().read()
    connection.close()


@pytest.mark.server
def test_two_minutes_of_use_with_two_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path))
    soak = Soak(tmp_path, minutes=1.5, requests=20_000, kills=2, questions=8, spared_s=10)
    record = soak.run(as_openai_would)
    said = (tmp_path / "serve.log").read_text()
    assert record["ok"], f"{record}\n{said}"
    assert record["requests"] >= 100
    assert max(record["recovered_s"]) <= MAX_RECOVERY_S
    assert said.count("the server ended (") == 2
    assert list((tmp_path / "servers").glob("*-*.json")) == []


def test_the_recorded_soak_is_the_one_that_the_readme_quotes() -> None:
    found = recorded.load("soak-cpu").findings
    recovered = [seconds for kind in found["recovered_s"].values() for seconds in kind]
    assert (len(recovered), found["wrong"], found["failed"]) == (20, 0, 0)
    assert found["requests"] >= 20_000
    assert max(found["memory"]["pss_growth"], found["memory"]["own_growth"]) <= MAX_GROWTH
    assert max(recovered) <= MAX_RECOVERY_S
    assert all(found["checks"].values())
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for quoted in (f"{found['requests']:,} answers", f"{min(recovered)}–{max(recovered)} s"):
        assert quoted in readme
