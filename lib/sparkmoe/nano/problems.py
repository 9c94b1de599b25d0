"""Grade-school arithmetic word problems from a seed, with worked solutions and three kinds of test.

A benchmark is worth something only if its answers cannot have been learned by heart, so what is held out is decided by
the problem itself, not by who drew it first. Every problem has a *shape*, the sequence of its kinds of sentences. A
hash of the shape decides whether it is a training shape, and a hash of the question's text whether it is a training
question; training rejects what the tests accept. The splits are:

- `instances`: training shapes and training wording, but questions that training rejects;
- `combinations`: shapes that training rejects, in training wording;
- `templates`: every sentence in a wording that training never uses (`unseen` in `sentences`).

One line of reasoning does one operation, and every operation is easy: factors stay small, divisions come out even,
numbers stay below 10,000. Records look like GSM8K's: `question`, and `answer` ending in `#### N`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkmoe.errors import DataError
from sparkmoe.nano import sentences as s

SPLITS = ("instances", "combinations", "templates")
MAX_STEPS, MAX_NUMBER = 6, 9999
MAX_SEED = 2**31 - 1
_LINES = {
    "+": ("{w} {a}+{b}={r} {t}.", "{a}+{b}={r} {t}.", "That makes {a}+{b}={r}."),
    "-": ("{w} {a}-{b}={r} {t}.", "{a}-{b}={r} {t}.", "That leaves {a}-{b}={r}."),
    "*": ("{w} {a}*{b}={r} {t}.", "{a}*{b}={r} {t}.", "That is {a}*{b}={r}."),
    "/": ("{w} {a}/{b}={r} {t}.", "{a}/{b}={r} {t}.", "That gives {a}/{b}={r}."),
}


@dataclass(frozen=True)
class Problem:
    question: str
    reasoning: str  # one operation a line
    result: int
    shape: tuple[str, ...]  # kinds of start, events, end
    steps: int

    @property
    def answer(self) -> str:
        """GSM8K's form: the worked solution, then `#### N`."""
        return f"{self.reasoning}\n#### {self.result}"

    @property
    def reply(self) -> str:
        """What nano Ling says after thinking."""
        return f"The answer is {self.result}.\n#### {self.result}"


def held_out_shape(shape: tuple[str, ...]) -> bool:
    """True for one shape in six: those of the split `combinations`."""
    return hashlib.sha256("/".join(shape).encode()).digest()[0] % 6 == 0


def held_out_question(question: str) -> bool:
    """True for one question in sixteen: those of the test splits."""
    return hashlib.sha256(question.encode()).digest()[0] % 16 == 0


def _shape(rng: random.Random) -> tuple[tuple[str, ...], int]:
    """A random shape of 1…6 operations."""
    want = rng.randint(1, MAX_STEPS)
    while True:
        start, end = rng.choice(list(s.START)), rng.choice(list(s.END))
        steps = len(s.START[start].ops) + len(s.END[end].ops)
        events: list[str] = []
        while steps < want:
            event = rng.choice(list(s.EVENT))
            steps += len(s.EVENT[event].ops)
            events.append(event)
            if len(events) > 5:
                break
        if steps == want and len(events) <= 5:
            return (start, *events, end), want


def _number(rng: random.Random) -> int:
    """2…999, as many of one, two and three digits as a shop needs."""
    return rng.randint(*rng.choices([(2, 9), (10, 99), (100, 999)], (1, 4, 2))[0])


def _draw(
    rng: random.Random, ops: tuple[str, ...], x: int
) -> tuple[dict[str, int], list[tuple[int, str, int, int]]] | None:
    """Numbers for one sentence and its operations (a, sign, b, result), or None if these numbers do not work out."""
    v = {"x": x, "n": _number(rng), "m": _number(rng), "k": rng.randint(2, 9)}
    text = " ".join(ops)
    if "k*m" in text:
        v["m"] = rng.randint(2, 99)
    if "/k" in text and "x" in text:
        divisors = [k for k in range(2, 6 if len(ops) == 2 or ops == ("x/k",) else 10) if x % k == 0]
        if not divisors:
            return None
        v["k"] = rng.choice(divisors)
    if "n/k" in text:
        v["n"] = v["k"] * rng.randint(2, 99)
    if "n*k" in text:
        v["n"] = rng.randint(2, 99)
    if "n-x" in text:
        v["n"] = x + _number(rng)
    elif "-n" in text and x > 2:
        v["n"] = rng.randint(2, min(x, 999))
    done = []
    for op in ops:
        a, sign, b = v[op[0]], op[1], v[op[2]]
        if sign == "*" and (a * b > 1999 or max(a, b) > 299):
            return None
        if sign == "/" and (a % b or a > 999):
            return None
        r = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        if not 1 < r <= MAX_NUMBER:
            return None
        done.append((a, sign, b, r))
        v["p"] = r
    return v, done


def _realize(rng: random.Random, shape: tuple[str, ...], wording: str) -> Problem | None:
    A, B = rng.sample(s.NAMES, 2)
    thing = rng.choice(s.COUNTED) if rng.random() < 0.75 or shape[-1] == "price" else rng.choice(s.MEASURED)
    c, c1 = rng.choice(s.CONTAINERS)
    kinds = [s.START[shape[0]], *(s.EVENT[e] for e in shape[1:-1]), s.END[shape[-1]]]
    told, lines, x = [], [], 0
    for i, kind in enumerate(kinds):
        drawn = _draw(rng, kind.ops, x)
        if drawn is None:
            return None
        v, done = drawn
        if i == 0 and not kind.ops:
            x = v["n"]
        k = v["k"]
        fraction = s.FRACTIONS.get(k, f"1/{k} of")
        words = {"A": A, "B": B, "t": thing, "c": c, "c1": c1, "w": s.TIMES.get(k, f"{k} times"), "f": fraction}
        words["f1"] = fraction[0].upper() + fraction[1:]
        told.append(rng.choice(getattr(kind, wording)).format(**words, **v))
        for a, sign, b, r in done:
            who = A if r == done[-1][3] else rng.choice(("First", "So"))
            has = f"{A} has" if who == A else f"{who},"
            unit = "dollars" if shape[-1] == "price" and i == len(kinds) - 1 else thing
            unit = c if shape[-1] == "boxes" and i == len(kinds) - 1 else unit
            lines.append(rng.choice(_LINES[sign]).format(w=has, a=a, b=b, r=r, t=unit))
        if done:
            x = done[-1][3]
    return Problem(" ".join(told), "\n".join(lines), x, shape, len(lines))


def _problems(seed: str, wording: str, unseen_shape: bool, unseen_question: bool) -> Iterator[Problem]:
    rng = random.Random(seed)
    while True:
        shape, _ = _shape(rng)
        if held_out_shape(shape) != unseen_shape:
            continue
        for _ in range(20):  # the same shape with other numbers, so that even divisions are not rare
            problem = _realize(rng, shape, wording)
            if problem is None:
                continue
            if held_out_question(problem.question) == unseen_question:
                yield problem
                break


def training(seed: int) -> Iterator[Problem]:
    """Training problems without end; the same seed gives the same ones. Never one that a test split can hold."""
    _check_seed(seed)
    return _problems(f"train-{seed}", "told", False, False)


def split(name: str, count: int = 500, seed: int = 0) -> list[Problem]:
    """`count` different problems of one of `SPLITS`. Raises DataError for another name or a seed outside 0…2^31-1."""
    _check_seed(seed)
    if name not in SPLITS:
        raise DataError(f"There is no test split '{name}'; the splits are {', '.join(SPLITS)}.")
    if not 1 <= count <= 20_000:
        raise DataError(f"{count} problems were asked for; a test split holds 1…20000.")
    wording = "unseen" if name == "templates" else "told"
    found: dict[str, Problem] = {}
    for problem in _problems(f"{name}-{seed}", wording, name == "combinations", True):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def write_jsonl(problems: list[Problem], path: Path) -> None:
    """One `{"question": …, "answer": …}` a line, as GSM8K's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        f.writelines(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems)


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise DataError(f"seed {seed} is out of range; problems have seeds 0…{MAX_SEED}.")
