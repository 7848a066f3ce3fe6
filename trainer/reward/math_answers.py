"""Mathematical answers: find the one final answer in a text, and decide whether it equals the gold one.

    find_answer("... #### 1,200")   "1,200"     tags, \\boxed, "####", "the answer is", the last line: the last of the first kind
    same_answer("1200", "1,200")    True        numbers by exact arithmetic, lists, tuples and intervals piece by piece,
                                                everything else by math-verify

One answer counts: the last. Boxes that are joined by "and", "or" or a comma are one answer with several values, which equals
only a gold answer with just these values, so naming many values wins nothing. Left out: prose ("twelve"), and arithmetic on
units (5 m is not 500 cm).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_ANSWER_CHARACTERS = 400
MAX_DIGITS = 60
TOLERANCE = Fraction(1, 10**6)

TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)
PHRASE = re.compile(r"\b(?:answer|result)\b(?:[ \t]*(?:is|are|equals|=|:)[ \t]*:?)+[ \t*]*([^\n]+)", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=\d|\\frac))")
BOX_JOINT = re.compile(r"^[\s$,;.*]*(?:\\text\{)?\s*(?:and|or|,|;)?\s*\}?[\s$*\\(\[]*$", re.IGNORECASE)
DOLLARS = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NUMBER_IN_PROSE = re.compile(r"(?<![\w.])[-+]?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:\s*/\s*\d+)?%?(?<=[\d%])(?![\w])")

SAME_UNIT = {
    "feet": "foot", "ft": "foot", "inches": "inch", "in": "inch", "children": "child", "people": "person", "lbs": "pound",
    "lb": "pound", "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "kg": "kilogram", "g": "gram",
    "mg": "milligram", "ml": "milliliter", "l": "liter", "hr": "hour", "hrs": "hour", "h": "hour", "min": "minute",
    "mins": "minute", "sec": "second", "s": "second", "metre": "meter", "metres": "meter", "percentage": "percent",
}  # fmt: skip
UNIT_WORD = re.compile(
    r"(?:\s*(?:\\text|\\mathrm|\\mbox|\\textrm)\s*\{\s*([^{}]*?)\s*\}(\^\{?\d\}?)?"
    r"|\s+([A-Za-z]+(?:[ /][A-Za-z]+){0,3})(\^\{?\d\}?)?|(?<=\d)\s*(km|cm|mm|kg|mg|ml|mph|m|g)(\^\{?\d\}?)?)\.?$"
)
NUMBER_IN_UNIT = re.compile(r"(?<![\w^])\d")  # "42 (or 43)" is no quantity, "42 cm^2" is
HIDDEN_NUMBER = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*(?<![\w^{])\d")
DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)\s*$")
THOUSANDS = re.compile(r"^([-+]?)(\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\s){1,2}\d{3})+)(\.\d+)?$")
DECIMAL = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)$")
SCIENTIFIC = re.compile(
    r"^([-+]?(?:\d+\.?\d*|\.\d+))(?:\s*(?:\\times|\\cdot|×|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d{1,3})\s*\}?|[eE]([-+]?\d{1,3}))$"
)
POWER_OF_TEN = re.compile(r"^10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d{1,3})\s*\}?$")
SLASH = re.compile(r"^([-+]?)\s*\(?([-+]?[\d.]+)\)?\s*/\s*\(?([-+]?[\d.]+)\)?$")
LATEX_FRACTION = re.compile(r"^([-+]?)\s*(\d*)\s*\\frac\s*(?:\{\s*([-+]?[\d.]+)\s*\}|(\d))\s*(?:\{\s*([-+]?[\d.]+)\s*\}|(\d))$")
MIXED = re.compile(r"^([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)$")
ASSIGNMENT = re.compile(r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in)\s*(.+)$", re.DOTALL)
CHOICE = re.compile(r"^\(?([A-Za-z])\)?[.:]?$")


def find_answer(text: str) -> str | None:
    """Return the final answer as it stands in the text, or None where there is none."""
    text = text.strip().replace("−", "-")
    tags = TAG.findall(text)
    if tags:
        inside = tags[-1].strip()
        return _clip(find_boxed(inside) or _hashed(inside) or inside)
    found = find_boxed(text)
    if found is None:
        found = _hashed(text)
    if found is None:
        phrases = PHRASE.findall(text)
        found = _from_line(phrases[-1]) if phrases else _from_line(text.split("\n")[-1])
    return _clip(found)


def _clip(found: str | None) -> str | None:
    found = found.strip() if found else None
    return found if found and len(found) <= MAX_ANSWER_CHARACTERS else None


def _hashed(text: str) -> str | None:
    found = HASHES.findall(text)
    return found[-1] if found else None


def find_boxed(text: str) -> str | None:
    """Return the content of the last box; boxes joined by `and`, `or` or a comma count as one list."""
    boxes: list[tuple[int, int, str]] = []
    for match in BOX.finditer(text):
        if match.group(1):
            end = _closing_brace(text, match.end())
            if end is not None:
                boxes.append((match.start(), end + 1, text[match.end() : end]))
        else:
            rest = re.match(r"\\frac\{[^{}]*\}\{[^{}]*\}|[\d.,]*\d", text[match.end() :])
            if rest:
                boxes.append((match.start(), match.end() + rest.end(), rest.group()))
    if not boxes:
        return None
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not BOX_JOINT.match(text[box[1] : joined[0][0]]):
            break
        joined.insert(0, box)
    values = list(dict.fromkeys(content.strip() for _, _, content in joined))
    return values[0] if len(values) == 1 else r"\{" + ", ".join(values) + r"\}"


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, min(len(text), start + 4 * MAX_ANSWER_CHARACTERS)):
        character = text[position]
        if text[position - 1] == "\\":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return None


def _from_line(line: str) -> str | None:
    """Return the answer that a final line gives: its mathematics, what follows its last `=`, all of it, or its last number."""
    line = line.strip().rstrip(".!").replace("**", "").strip()
    if not line:
        return None
    formulas = [next(part for part in groups if part) for groups in DOLLARS.findall(line)]
    if formulas:
        return _after_equals(formulas[-1]) if len(formulas) == 1 else _joined_formulas(line, formulas)
    tail = _after_equals(line)
    if to_number(tail) is not None or looks_mathematical(tail):
        return tail
    numbers = [found.strip() for found in NUMBER_IN_PROSE.findall(line) if found.strip()]
    return numbers[-1] if numbers else None


def _joined_formulas(line: str, formulas: list[str]) -> str:
    """Return the last formula, or all of them where the line lists them: `$1$ and $2$`."""
    between = DOLLARS.split(line)
    gaps = [gap for gap in between[5:-1:5] if gap is not None]
    if all(BOX_JOINT.match(gap) for gap in gaps):
        return r"\{" + ", ".join(_after_equals(formula) for formula in formulas) + r"\}"
    return _after_equals(formulas[-1])


def _after_equals(text: str) -> str:
    return re.split(r"(?<![<>!\\])=", text)[-1].strip()


def looks_mathematical(text: str) -> bool:
    """Whether a text is a formula rather than prose: no word of three letters outside LaTeX commands."""
    bare = re.sub(r"\\[A-Za-z]+|\{[A-Za-z ]*\}", "", text)
    return re.search(r"[A-Za-z]{3,}|[A-Za-z] [A-Za-z]", bare) is None and re.search(r"[\dA-Za-z]", text) is not None


@dataclass(frozen=True)
class Number:
    """An exact number and what was written beside it."""

    value: Fraction
    is_exact: bool  # False for a decimal with a fractional part, which may be rounded
    is_percent: bool = False
    unit: str = ""


def normalise(text: str) -> str:
    """Return an answer without what never carries meaning: dollars, blanks, `\\left`, `\\displaystyle`, a full stop."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|!|,|;|:|quad|qquad)(?![A-Za-z])", " ", text).strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = text.replace("−", "-").replace("–", "-").replace("\\%", "%").replace("\\$", "$").replace("~", " ")
    text = text.strip().rstrip(".").strip()
    whole = re.fullmatch(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", text)
    return whole.group(1).strip() if whole else text


@lru_cache(maxsize=4096)
def to_number(text: str) -> Number | None:
    """Return a plain number: integer, decimal, fraction, mixed, scientific, with percent, currency or unit; else None."""
    text, unit = split_unit(normalise(text))
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    if len(text) > MAX_DIGITS or not text or not any(c.isdigit() for c in text):
        return None
    found = _read_number(text)
    if found is None:
        return None
    return Number(found[0], found[1], percent or unit == "percent", "" if unit == "percent" else unit)


def _read_number(text: str) -> tuple[Fraction, bool] | None:
    thousands = THOUSANDS.match(text)
    if thousands:
        text = thousands.group(1) + re.sub(r"\D", "", thousands.group(2)) + (thousands.group(3) or "")
    if DECIMAL.match(text):
        return Fraction(text), "." not in text
    try:
        if match := POWER_OF_TEN.match(text):
            return Fraction(10) ** int(match.group(1)), True
        if match := SCIENTIFIC.match(text):
            return Fraction(match.group(1)) * Fraction(10) ** int(match.group(2) or match.group(3)), "." not in text
        if match := MIXED.match(text):
            sign, whole, over, under = match.groups()
            return (-1 if sign == "-" else 1) * (int(whole) + Fraction(int(over), int(under))), True
        if match := LATEX_FRACTION.match(text):
            sign, mixed = match.group(1), match.group(2)
            over, under = match.group(3) or match.group(4), match.group(5) or match.group(6)
            value = Fraction(mixed or 0) + Fraction(over) / Fraction(under)
            return (-value if sign == "-" else value), "." not in over + under
        if match := SLASH.match(text):
            value = Fraction(match.group(2)) / Fraction(match.group(3))
            return (-value if match.group(1) == "-" else value), "." not in match.group(2) + match.group(3)
    except (ValueError, ZeroDivisionError):
        return None
    return None


def split_unit(text: str) -> tuple[str, str]:
    """Return a quantity's number and its unit, singular and lower case; words that follow a number are its unit."""
    text = re.sub(r"^([-+]?)\s*(?:\\\$|[$€£¥])\s*", r"\1", text)
    if DEGREES.search(text):
        return DEGREES.sub("", text).strip(), "degree"
    match = UNIT_WORD.search(text)
    if not match or not any(c.isdigit() for c in text[: match.start()]):
        return text, ""
    word = next((match.group(i) for i in (1, 3, 5) if match.group(i)), "").lower().strip()
    if NUMBER_IN_UNIT.search(word):
        return text, ""
    power = next((match.group(i) for i in (2, 4, 6) if match.group(i)), "")
    singular = SAME_UNIT.get(word) or SAME_UNIT.get(word.removesuffix("s")) or word.removesuffix("s")
    return text[: match.start()].strip(), singular + power.strip("^{}")


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers agree: exactly, or to 1e-6 where a decimal takes part; 50%, 50 and 0.5 fit a gold of 50%."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    golds = {gold.value, gold.value / 100} if gold.is_percent else {gold.value}
    answers = {answer.value, answer.value / 100} if answer.is_percent else {answer.value}
    if golds & answers:
        return True
    if gold.is_exact and answer.is_exact and not (gold.is_percent or answer.is_percent):
        exact = gold.value.denominator == answer.value.denominator == 1
        return not exact and gold.value == answer.value
    return any(abs(a - g) <= min(TOLERANCE, 10 * TOLERANCE * abs(g)) for g in golds for a in answers)


@dataclass(frozen=True)
class Collection:
    opening: str  # "{" unordered; "(" or "[" ordered, or an interval
    closing: str
    items: tuple[str, ...]


def to_collection(text: str) -> Collection | None:
    """Return a list, set, tuple or interval, or None; the thousands of `1,200` are no list."""
    text = re.sub(r"\\(?:lbrace|\{)", "{", re.sub(r"\\(?:rbrace|\})", "}", normalise(text)))
    text = (
        re.sub(r"\\pm\s*([\d.]+|\\sqrt\s*\{[^{}]*\}|\\frac\{[^{}]*\}\{[^{}]*\})", r"\1, -\1", text)
        if text.startswith(r"\pm")
        else text
    )
    opening, closing = text[:1], text[-1:]
    if opening in "([{" and closing in ")]}" and len(text) > 1 and _matches(text):
        return Collection(opening, closing, tuple(_split(text[1:-1]))) if opening != "(" or "," in text or ";" in text else None
    parts = _split(text)
    return Collection("{", "}", tuple(parts)) if len(parts) > 1 else None


def _matches(text: str) -> bool:
    """Whether the first bracket of a text is closed by its last character; an interval may mix `(` and `]`."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Split at commas, semicolons and the words and/or that stand outside brackets."""
    text = re.sub(r"\\text\s*\{\s*(?:,\s*)?(and|or)\s*\}|,?\s+\b(and|or)\b\s+", " , ", text)
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ",;":
            parts.append(text[start:position])
            start = position + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def same_collection(gold: Collection, answer: Collection, same: Callable[[str, str], bool]) -> bool:
    """Whether two collections agree: braces in any order, each item once; round and square ones in order, brackets alike."""
    if gold.opening == "{":
        if answer.opening != "{":
            return False
        return _covers(gold.items, answer.items, same) and _covers(answer.items, gold.items, lambda a, g: same(g, a))
    return (gold.opening, gold.closing, len(gold.items)) == (answer.opening, answer.closing, len(answer.items)) and all(
        same(g, a) for g, a in zip(gold.items, answer.items, strict=True)
    )


def _covers(wanted: tuple[str, ...], given: tuple[str, ...], same: Callable[[str, str], bool]) -> bool:
    return len(wanted) <= 64 and len(given) <= 64 and all(any(same(w, g) for g in given) for w in wanted)


def same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same words, or the same choice letter."""
    a, b = (re.sub(r"[\s$]+", "", normalise(text)).casefold() for text in (gold, answer))
    if a == b:
        return bool(a)
    first, second = CHOICE.match(normalise(gold)), CHOICE.match(normalise(answer))
    return bool(first and second and first.group(1).casefold() == second.group(1).casefold())


def same_answer(gold: str, answer: str, symbolic: Callable[[str, str], bool], depth: int = 0) -> bool:
    """Whether an answer equals the gold one.

    Args:
        symbolic: decides what neither numbers nor collections do; `math_verify_same` in use.
    """
    if same_text(gold, answer):
        return True
    left, right = ASSIGNMENT.match(normalise(gold)), ASSIGNMENT.match(normalise(answer))
    if right and not left:
        return same_answer(gold, right.group(1), symbolic, depth)
    gold_number, answer_number = to_number(gold), to_number(answer)
    if gold_number and answer_number:
        return same_number(gold_number, answer_number)
    gold_many, answer_many = to_collection(gold), to_collection(answer)
    if gold_many and answer_many and depth < 4:
        return same_collection(gold_many, answer_many, lambda g, a: same_answer(g, a, symbolic, depth + 1))
    if gold_many or answer_many:
        return _single(gold_many, answer_many, gold, answer, symbolic, depth)
    if HIDDEN_NUMBER.search(answer) and not HIDDEN_NUMBER.search(gold):
        return False  # math-verify drops the text, and with it the second guess
    return symbolic(_formula(gold, gold_number), _formula(answer, answer_number))


def _formula(text: str, number: Number | None) -> str:
    """Return the LaTeX of an answer; a plain number as integer or fraction, without what stood beside it."""
    if number is None:
        return normalise(text)
    value = number.value
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _single(
    gold_many: Collection | None,
    answer_many: Collection | None,
    gold: str,
    answer: str,
    symbolic: Callable[[str, str], bool],
    depth: int,
) -> bool:
    """Whether a set of one is the one, `{5}` and `5`; an interval against an inequality goes to the symbolic comparison."""
    if gold_many and gold_many.opening == "{" and len(gold_many.items) == 1:
        return same_answer(gold_many.items[0], answer, symbolic, depth + 1)
    if answer_many and answer_many.opening == "{" and len(answer_many.items) == 1:
        return same_answer(gold, answer_many.items[0], symbolic, depth + 1)
    relation = re.compile(r"[<>]|\\l[et]|\\g[et]|\\cup|\\leq|\\geq")
    if relation.search(gold) or relation.search(answer):
        return symbolic(normalise(gold), normalise(answer))
    return False


def math_verify_same(gold: str, answer: str) -> bool:
    """Whether math-verify finds two formulas equal. Never evaluates text as Python; may take for ever."""
    from math_verify import verify

    wanted, found = _parsed(gold), _parsed(answer)
    return bool(wanted and found and verify(list(wanted), list(found), strict=True, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parsed(formula: str) -> tuple[Any, ...]:
    from math_verify import LatexExtractionConfig, parse

    return tuple(
        parse(
            rf"\boxed{{{formula}}}",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )
