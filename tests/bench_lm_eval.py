"""Does this evaluation give the same verdicts as lm-eval? Recorded now and then, not part of the tests.

Both ask the same questions of the same server, greedy, with the same few-shot conversation, and each reads the answers
its own way. What differs then is a server that does not repeat itself, or a reader. lm-eval lives in an environment of
its own, because its dependencies are not this project's:

    python -m venv lm-eval-env && lm-eval-env/bin/pip install "lm-eval[api]==0.4.13"
    python tests/bench_lm_eval.py --url http://127.0.0.1:30000 --lm-eval lm-eval-env/bin/lm-eval --nano instances

The last line is one JSON object. Exit code 1 if fewer than 99 % of the verdicts agree.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkmoe.client import Client
from sparkmoe.errors import SparkmoeError
from sparkmoe.extraction import extract
from sparkmoe.gsm8k import GREEDY, Question, few_shot, load, miniature, shown_solution
from sparkmoe.gsm8k_run import Record, evaluate, read
from sparkmoe.results import Run

TASK = Path(__file__).parent / "data" / "lm_eval" / "sparkmoe_gsm8k.yaml"
REQUIRED = 0.99


def ours(
    options: argparse.Namespace, questions: Sequence[Question], shots: Sequence[Question], folder: Path
) -> list[Record]:
    sampling = replace(GREEDY, max_new_tokens=options.max_new_tokens)
    client, run = Client(options.url, options.api_key), Run.create(folder, name="lm-eval")
    try:
        for progress in evaluate(questions, client, run, arm="ours", sampling=sampling, shots=shots):
            if progress.done % 50 == 0:
                print(progress.text(), file=sys.stderr)  # noqa: T201
    except SparkmoeError as error:  # a truncated answer has a verdict too: compared here is reading, not the model
        print(error, file=sys.stderr)  # noqa: T201
    return read(run, "ours", questions=questions)


def theirs(
    options: argparse.Namespace, questions: Sequence[Question], shots: Sequence[Question], folder: Path
) -> dict[str, Any]:
    """lm-eval's samples by filter name, each in the questions' order."""
    for name, chosen in (("test", questions), ("train", shots or questions[:1])):
        rows = [{"question": q.question, "answer": shown_solution(q.answer)} for q in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copy(TASK, folder)
    where = f"base_url={options.url}/v1/chat/completions,model=default,num_concurrent=1,max_retries=3,timeout=3600"
    command = [*options.lm_eval.split(), "run", "--model", "local-chat-completions", "--model_args", where]
    command += ["--tasks", "sparkmoe_gsm8k", "--include_path", str(folder), "--apply_chat_template"]
    command += ["--num_fewshot", str(len(shots)), "--gen_kwargs", f"max_gen_toks={options.max_new_tokens}"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    environment = os.environ | {"OPENAI_API_KEY": options.api_key or "none", "HF_HOME": str(folder / "hf")}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
    [samples] = (folder / "out").rglob("samples_sparkmoe_gsm8k_*.jsonl")
    found: dict[str, Any] = {}
    for sample in map(json.loads, samples.read_text(encoding="utf-8").splitlines()):
        found.setdefault(sample["filter"], {})[sample["doc_id"]] = sample
    return {name: [by_doc[i] for i in sorted(by_doc)] for name, by_doc in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--lm-eval", default="lm-eval", help="the command, from its own environment")
    parser.add_argument("--questions", type=Path, help="a GSM8K folder; without it and --nano, openai/gsm8k")
    parser.add_argument("--nano", help="a split of the miniature's own problems, asked without examples")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    options = parser.parse_args()
    questions = miniature(options.nano, options.limit) if options.nano else load("test", options.questions)
    questions = questions[: options.limit]
    shots = [] if options.nano else few_shot(options.questions, options.shots)
    with tempfile.TemporaryDirectory() as name:
        records = ours(options, questions, shots, Path(name))
        by_filter = theirs(options, questions, shots, Path(name))
    right = [bool(record.extracted) and record.extracted == record.reference for record in records]
    flexible = by_filter["flexible-extract"]
    texts = [sample["resps"][0][0] or "" for sample in flexible]
    reread = [
        bool(found := extract(text)) and str(found.number) == r.reference
        for text, r in zip(texts, records, strict=True)
    ]
    result: dict[str, Any] = {"questions": len(records), "right_ours": sum(right)}
    for filter_name, samples in by_filter.items():
        verdicts = [sample["exact_match"] == 1.0 for sample in samples]
        result[filter_name] = {
            "right": sum(verdicts),
            "same_verdict": sum(a == b for a, b in zip(right, verdicts, strict=True)) / len(right),
            "same_verdict_on_the_same_text": sum(a == b for a, b in zip(reread, verdicts, strict=True)) / len(right),
        }
    pairs = list(zip(records, texts, flexible, right, strict=True))
    result["same_text"] = sum(r.sample.text.strip() == text.strip() for r, text, _, _ in pairs) / len(pairs)
    result["differing"] = [
        {
            "question": r.question,
            "ours": r.extracted,
            "lm_eval": s["filtered_resps"],
            "reference": r.reference,
            "text": text,
        }
        for r, text, s, ok in pairs
        if ok != (s["exact_match"] == 1.0)
    ]
    print(json.dumps(result, ensure_ascii=False))  # noqa: T201
    return 0 if result["flexible-extract"]["same_verdict"] >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
