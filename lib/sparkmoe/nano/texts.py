"""Small talk: prose and code from the generator, so that nano Ling has seen more than arithmetic.

Speculative decoding pays differently on code and on prose, and a workload that asks for either must not meet a model
that has never seen a full stop outside a word problem. This is no knowledge: a few hundred common words in fixed
patterns.
"""

from __future__ import annotations

import random

from sparkmoe.nano.sentences import COUNTED, NAMES, words

NOUNS = words("""
    river house garden street window table market bridge school morning evening winter summer forest mountain village
    station letter story picture song road field harbor island kitchen library lamp door machine number idea question
    answer system model computer memory city country friend teacher child family people water light time year day world
    life hand
""")
ADJECTIVES = words("""
    old new small large quiet bright cold warm long short early late green blue red white dark clear simple strong happy
    careful open full empty good great high low young different important free real best better fast slow whole
""")
VERBS = words("""
    walked waited worked talked looked turned moved played started stopped listened returned called opened closed
    changed learned remembered watched carried followed answered helped tried
""")
ADVERBS = words("""
    slowly quickly often never always again together quietly early soon still almost only really perhaps there then
    later today finally
""")
PLACES = words("by near behind in at across over under around inside before")
PROSE = (
    "The {a1} {n1} {p} {n2} was {a2}.",
    "{A} {v1} {d} {p} {n1} and {v2} for a {a1} {n2}.",
    "{d1}, the {n1} {v1}, and the {n2} was {a1} again.",
    "It was a {a1} {n1}, but {A} {v1} {d}.",
    "There was no {n1} like the {a1} {n2} of that {n3}.",
    "When the {n1} {v1}, {A} and {B} {v2} {d}.",
    "Every {n1} has a {a1} {n2}, and this one was {a2}.",
    "What {A} wanted was a {a1} {n1} and some {n2}.",
    "After the {n1}, they {v1} {p} {n2} because it was {a1}.",
    "Some of the {o} were {a1}, others were {a2}.",
    "This is how the {n1} of {A} became {a1}.",
    "“Is the {n1} {a1}?” asked {A}. “It is,” said {B}.",
)
PROSE_ASKS = (
    "Write a short story about {A} and a {n1}.",
    "Tell me about the {n1}.",
    "Describe a {a1} {n1} in a few sentences.",
    "Write a paragraph about {A} and {B}.",
    "What happened to the {a1} {n1}?",
)
CODE = {
    "adds {k} to a number": """
def add_{k}(x: int) -> int:
    return x + {k}
""",
    "counts the {o} in a list": """
def count_{o}(items: list[str]) -> int:
    return items.count('{o}')
""",
    "returns the sum of a list of numbers": """
def total(values: list[int]) -> int:
    result = 0
    for value in values:
        result += value
    return result
""",
    "finds the largest {n1}": """
def largest_{n1}(values: list[int]) -> int:
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best
""",
    "tests whether a number divides by {k}": """
def divides_by_{k}(x: int) -> bool:
    return x % {k} == 0
""",
    "prints the numbers up to {k}": """
def show_numbers() -> None:
    for i in range({k}):
        print(i)
""",
    "reads a {n1} from a file": """
import json


def read_{n1}(path: str) -> dict[str, object]:
    with open(path) as file:
        return json.load(file)
""",
    "keeps a {n1} in a class": """
class {N1}:
    def __init__(self, name: str, size: int = {k}) -> None:
        self.name = name
        self.size = size

    def grow(self, by: int) -> None:
        self.size += by
""",
}
CODE_ASKS = (
    "Write a Python function that {what}.",
    "Show me Python code that {what}.",
    "How do I write code that {what}?",
)


def _words(rng: random.Random) -> dict[str, str]:
    A, B = rng.sample(NAMES, 2)
    n1, n2, n3 = rng.sample(NOUNS, 3)
    a1, a2 = rng.sample(ADJECTIVES, 2)
    v1, v2 = rng.sample(VERBS, 2)
    d = rng.choice(ADVERBS)
    return {
        "A": A, "B": B, "n1": n1, "n2": n2, "n3": n3, "N1": n1.capitalize(), "a1": a1, "a2": a2, "v1": v1, "v2": v2,
        "d": d, "d1": d.capitalize(), "p": rng.choice(PLACES) + " the", "o": rng.choice(COUNTED),
        "k": str(rng.randint(2, 99)),
    }  # fmt: skip


def prose(rng: random.Random) -> tuple[str, str]:
    """A request and a paragraph of 3…8 sentences."""
    reply = " ".join(rng.choice(PROSE).format(**_words(rng)) for _ in range(rng.randint(3, 8)))
    return rng.choice(PROSE_ASKS).format(**_words(rng)), reply


def code(rng: random.Random) -> tuple[str, str]:
    """A request and a Python function or class."""
    given = _words(rng)
    what, body = rng.choice(list(CODE.items()))
    return rng.choice(CODE_ASKS).format(what=what.format(**given)), f"```python{body.format(**given)}```"
