r"""Find the final number in an answer that a model wrote for people.

More accuracy is lost to the reader than to the model: a checker that takes "$1,450,000" for 1, "18.00" for something
other than 18, or the exponent of "20 m^2" for the answer measures itself. And because a faster arm may also phrase its
answers differently, such a fault does not cancel between two arms. So there are three rules and no more, in this order:

1. what follows `####`, the data set's own mark, unless that line is a Markdown heading of level four;
2. what stands in the last `\boxed{…}`;
3. the last number of the text.

Only the content is read, never the reasoning: thinking text is full of numbers that were considered and dropped.
Numbers are exact (`fractions.Fraction`), so 3/4, 0.75 and .750 are equal, and 33.33 is not 33.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from sparkmoe.errors import DataError

Rule = Literal["####", "boxed", "last"]


@dataclass(frozen=True)
class Extracted:
    """A number read from an answer, the characters it was read from, and the rule that found it."""

    number: Fraction
    text: str
    rule: Rule


_LONGEST = 100  # characters of one number
_CANDIDATES = 8  # marks or boxes looked at, from the last one: bounds the work on degenerate text
_CURRENCY = "$€£¥₹"
_SCALES = {
    "k": 10**3,
    "thousand": 10**3,
    "m": 10**6,
    "million": 10**6,
    "b": 10**9,
    "billion": 10**9,
    "trillion": 10**12,
}

_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]%])-)?  (?P<currency>[{_CURRENCY}]\ ?)?  (?P<inner_sign>(?<=[{_CURRENCY}\ ])-)?
    (?<![A-Za-z_^0-9])(?<!\d\.)                      # not the 2 of ft2, of x_2, of 10^2, of 1.5.2
    (?:                                              # 3/4 and 1 1/2, else a plain number and what may follow it
        (?:(?P<whole>\d+)\ )?(?P<over>\d{{1,3}}(?:,\d{{3}})+|\d+)\ ?/\ ?(?P<under>0*[1-9]\d*)(?![\d/]|[.,]\d)
      | (?P<plain>(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?!\d)|\d+)(?:\.\d+)?|\.\d+)
        (?:
            \ ?[×x*]\ ?10\ ?\^\ ?\{{?(?P<times_ten_to>-?\d{{1,3}})\}}?
          | [eE](?P<exponent>[+-]?\d{{1,3}})(?![\w.])
          | \ ?\^\ ?\{{?(?P<power>\d{{1,2}})\}}?
          | \ (?P<scale>thousand|million|billion|trillion)\b
          | (?P<short_scale>(?<=\d)[kKmMbB])\b
        )?
    )
    """,
    re.VERBOSE,
)

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!", ""),
        (r"\\([$%#&_])", r"\1"),
        (r"\\(?:boxed|fbox|left|right|displaystyle)\b", ""),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:times|cdot)\b", "×"),
        (r"(?<=\d)(?:\{,\}|\\[,;: ]|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))", ","),
        (r"\\[,;: ]|[\u00a0\u2009\u202f~]", " "),
        (r"(?<=\d)\s*\\[dtc]?frac\s*", r" \\frac"),
        (r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2"),
        (r"(?<=\d)\*\*(?=\d)", "^"),
        (r"\*\*|`", ""),
        (r"(?<![A-Za-z0-9])_(?=[-$\d])", ""),
        (r"_\s?\{[^{}]*\}", ""),
        (r"(?<=[A-Za-z)}])\s?\^\s?\{?-?\d+\}?", ""),
        (r"\b(?:US\$|USD|EUR|GBP|INR|Rs\.?)\s?(?=-?\d)", "$"),
        (r"(?<!\d)(\d{1,2}):00(?!\d)", r"\1"),
    )
)
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | {"²": "^2", "³": "^3", "\u2044": "/", "．": ".", "％": "%", "＄": "$", "：": ":", "＝": "="}
)
_VULGAR_FRACTION = re.compile("(?<=[0-9]) ?([¼-¾⅐-⅞])|([¼-¾⅐-⅞])")
_LABEL = re.compile(r"[\s*_#>:=(\[{\\]*(?:(?:the\s+)?(?:final\s+)?(?:answer|result)(?:\s+is)?\b[\s*_:=(\[{\\]*)?", re.I)
_NUMBERED_HEADING = re.compile(r"\d+[.)]\s+\S")


def content_of(text: str) -> str:
    """The answer without reasoning that a server without `--reasoning-parser` left in it.

    A reasoning block that never closes is all reasoning: the answer is then empty."""
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return text.partition("<think>")[0]


def _vulgar(match: re.Match[str]) -> str:
    """`2½` is the mixed number 2 1/2, `½` alone is 1/2."""
    mixed, alone = match.groups()
    fraction = unicodedata.normalize("NFKC", mixed or alone).replace("\u2044", "/")
    return f" {fraction}" if mixed else fraction


def _normalise(text: str) -> str:
    """Write LaTeX, Markdown and typography as plain characters, so that one pattern can read every number."""
    text = _VULGAR_FRACTION.sub(_vulgar, text).translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str]) -> Fraction:
    """The exact value of one match of `_NUMBER`. A percent sign or a unit does not change it: the data set's own
    answers to "what percent" are 25, not 0.25."""
    found = match.groupdict()
    if found["over"] is not None:
        number = Fraction(int(found["over"].replace(",", "")), int(found["under"])) + int(found["whole"] or 0)
    else:
        number = Fraction(found["plain"].replace(",", ""))
        if found["power"] is not None:
            number **= int(found["power"])
        exponent = found["times_ten_to"] or found["exponent"]
        if exponent is not None:
            number *= Fraction(10) ** int(exponent)
        if found["scale"] is not None:
            number *= _SCALES[found["scale"]]
        if found["short_scale"] is not None and found["currency"] is not None:  # $5k is money, 5k may be a race
            number *= _SCALES[found["short_scale"].lower()]
    return -number if found["sign"] or found["inner_sign"] else number


def _extracted(match: re.Match[str], rule: Rule) -> Extracted:
    return Extracted(_value(match), match.group().strip(), rule)


def _numbers(text: str) -> list[re.Match[str]]:
    """All numbers of a normalised text, without the endless digit strings of a model that got stuck."""
    return [found for found in _NUMBER.finditer(text) if len(found.group()) <= _LONGEST]


def _stated(line: str) -> re.Match[str] | None:
    """The number a short statement gives: the first after its last `=` if there is one, else its first."""
    numbers = _numbers(line)
    after_equals = [found for found in numbers if found.start() > line.rfind("=")]
    return next(iter(after_equals or numbers), None)


def _after_mark(content: str) -> Extracted | None:
    """What the last `####` states. `#### 18` does, `#### Step 2: add` with a text below it is a heading."""
    for mark in list(re.finditer(r"(?<!#)####(?!#)", content))[: -_CANDIDATES - 1 : -1]:
        rest = _normalise(content[mark.end() :])
        label = _LABEL.match(rest)
        rest = rest[label.end() :] if label else rest
        line, _, below = rest.partition("\n")
        last_line = not below.strip()
        if _NUMBERED_HEADING.match(line) and not last_line:
            continue
        at_start = _NUMBER.match(line)
        if at_start or last_line:
            found = _stated(line) if at_start or "=" in line else next(reversed(_numbers(line)), None)
            if found:
                return _extracted(found, "####")
    return None


def _in_box(content: str) -> Extracted | None:
    r"""What the last `\boxed{…}` holds; braces may nest."""
    for box in list(re.finditer(r"\\(?:boxed|fbox)\s*\{", content))[: -_CANDIDATES - 1 : -1]:
        start = box.end()
        depth, end = 1, start
        while end < len(content) and depth:
            depth += {"{": 1, "}": -1}.get(content[end], 0)
            end += 1
        if found := _stated(_normalise(content[start : end - 1 if depth == 0 else end])):
            return _extracted(found, "boxed")
    return None


def extract(text: str) -> Extracted | None:
    """The final number of a model's answer, or None if it gives none.

    `text` is the content of the reply; reasoning that leaked into it is dropped first (see `content_of`)."""
    content = content_of(text)
    if marked := _after_mark(content) or _in_box(content):
        return marked
    last = next(reversed(_numbers(_normalise(content))), None)
    return _extracted(last, "last") if last else None


def reference_number(answer: str) -> Fraction:
    """The number that a worked solution in GSM8K's format ends with; DataError if there is none after `####`."""
    _, mark, final = answer.rpartition("####")
    try:
        return Fraction(final.strip().replace(",", "")) if mark else Fraction("")
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"a reference answer must end with '#### ' and a number, this one ends with {answer[-40:]!r}"
        ) from error
