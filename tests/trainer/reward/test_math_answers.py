"""Mathematical answers: what is found in a text, and what equals what."""

from __future__ import annotations

import pytest

from trainer.reward.math_answers import find_answer, math_verify_same, same_answer


def right(gold: str, text: str) -> bool:
    found = find_answer(text)
    return found is not None and same_answer(gold, found, math_verify_same)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{41} is wrong, \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4}2}", "4"),
        ("#### 1,200", "1,200"),
        ("10 ...\n#### 11\n#### 12", "12"),
        ("<think>7</think>\n<answer> 9 </answer>", "9"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        (r"<answer>\boxed{3}</answer>", "3"),
        ("The answer is 5.", "5"),
        ("The answer is: **$18**.", "$18"),
        ("Final answer: 3/4", "3/4"),
        ("We get x = 1 + 1 = 2.", "2"),
        ("She has 3 apples and 4 pears left, so 7 in all.", "7"),
        ("first\n$a = 5$", "5"),
        ("so both $1$ and $2$", r"\{1, 2\}"),
        (r"\boxed{1} or \boxed{2}", r"\{1, 2\}"),
        ("", None),
        ("I do not know", None),
        (r"\boxed{}", None),
    ],
)
def test_the_one_answer_is_found(text: str, found: str | None) -> None:
    assert find_answer(text) == found


EQUAL = [
    # fractions and decimals
    ("1/2", r"\boxed{\frac12}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{3}{4}", "#### 0.75"),
    ("1 1/2", "<answer>3/2</answer>"),
    (r"-\frac{1}{3}", r"\boxed{\frac{-1}{3}}"),
    ("0.333333", r"\boxed{1/3}"),
    ("2.50", "2.5"),
    # thousands, money, powers of ten
    ("1200", "#### 1,200"),
    ("1,000,000", r"\boxed{1{,}000{,}000}"),
    ("$1,000,000", "1000000 dollars"),
    ("18", "So she makes $18 every day."),
    ("1e6", r"\boxed{10^6}"),
    (r"3 \times 10^{4}", "30000"),
    # percent
    ("50%", r"\boxed{0.5}"),
    ("50", r"\boxed{50\%}"),
    ("12.5%", r"\boxed{\frac{1}{8}}"),
    # units
    ("5 cm", r"\boxed{5\text{ cm}}"),
    ("5", r"\boxed{5 \text{ centimeters}}"),
    ("5 cm", "5 centimeters"),
    ("90", r"\boxed{90^\circ}"),
    ("42", r"\boxed{42 \text{ cm^2}}"),
    ("10", "10 miles per hour"),
    # sets, tuples, intervals
    (r"\{1,2,3\}", r"\boxed{3, 2, 1}"),
    ("1, 2", r"\boxed{1} and \boxed{2}"),
    ("3, -3", r"\boxed{\pm 3}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"(0.5, 2)", r"\boxed{\left(\frac{1}{2}, 2\right)}"),
    ("[0,1)", "$[0,1)$"),
    (r"(-\infty,2)\cup(3,\infty)", r"\boxed{(-\infty, 2) \cup (3, \infty)}"),
    ("5", r"\boxed{\{5\}}"),
    # expressions
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    (r"2\pi", r"\boxed{\pi \cdot 2}"),
    ("3+4i", r"\boxed{4i+3}"),
    ("5", r"\boxed{x=5}"),
    ("y=2x+1", r"\boxed{y = 1 + 2x}"),
    # words
    ("(A)", r"\boxed{\text{A}}"),
    ("Monday", r"\boxed{\text{Monday}}"),
    ("-7", "It is −7"),
]


@pytest.mark.parametrize(("gold", "text"), EQUAL)
def test_equal_answers(gold: str, text: str) -> None:
    assert right(gold, text)


DIFFERENT = [
    # several answers win nothing
    ("42", r"\boxed{41} or \boxed{42}"),
    ("42", r"\boxed{41, 42}"),
    ("42", r"\boxed{42, 43}"),
    ("42", "the answer is 41 or 42"),
    ("42", r"\boxed{42}, then \boxed{41}"),
    ("42", r"\boxed{\{42, 41\}}"),
    ("42", "1 2 3 42 43"),
    ("42", "<answer>42</answer><answer>43</answer>"),
    ("42", "x = 42 = 43"),
    ("1, 2", r"\boxed{1}"),
    ("1, 2", r"\boxed{1, 2, 3}"),
    # near misses
    ("1000000", "1000001"),
    ("0.5", "0.51"),
    ("1/3", "0.33"),
    ("0.000001", "0.000002"),
    ("5 cm", r"\boxed{5 \text{ m}}"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "$[0,1]$"),
    ("(0,1)", r"\boxed{[0,1]}"),
    ("x^2", r"\boxed{x^3}"),
    ("5", r"\boxed{5x}"),
    ("42", r"\boxed{42 \text{ (or 43)}}"),
    ("42", r"\boxed{}"),
    ("42", ""),
    ("42", "forty-two"),
    ("1200", "1.200,00"),
]


@pytest.mark.parametrize(("gold", "text"), DIFFERENT)
def test_different_answers(gold: str, text: str) -> None:
    assert not right(gold, text)


@pytest.mark.parametrize(
    "form", ["{}", "#### {}", r"So \boxed{{{}}}.", "The answer is {}.", "<answer>{}</answer>", "He pays ${} in total."]
)
def test_gsm8k_gold_answers_are_right_and_shifted_ones_wrong(form: str, gsm8k: list[dict[str, str]]) -> None:
    for row in gsm8k:
        gold = row["answer"].rpartition("####")[2].strip()
        assert right(gold, form.format(gold)), gold
        for shift in (1, -1, 10):
            assert not right(gold, form.format(int(gold.replace(",", "")) + shift)), (gold, shift)
