"""Run a job's tests against a candidate's proxies and count.

A test is any of: a piece of source (each entry of `tests` is one; names that it does not define are the candidate's), a
`check(candidate)` function as in HumanEval, a `test_*` function, a method of a unittest.TestCase. Asserts that stand inside
one `check` or one piece of source are counted one by one where they can be (`count_asserts`), for partial credit.
"""

from __future__ import annotations

import ast
import builtins
import socket
import sys
import unittest
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

from . import codec
from .remote import Candidate, CandidateGoneError
from .wire import frame

COUNTER = "__count_assert__"


class Tally:
    """Counts asserts and whole tests; the first failure keeps its reason.

    An assert that ran many times weighs as one: a candidate may decide how often a test's loop turns.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0
        self.reason = ""
        self._sites: dict[str, list[int]] = {}  # of each assert or whole test: how often it held, how often it ran

    def note(self, held: bool, reason: str = "", site: str = "") -> None:
        counts = self._sites.setdefault(site or f"whole {len(self._sites)}", [0, 0])
        counts[0] += held
        counts[1] += 1
        if held:
            self.passed += 1
        else:
            self.failed += 1
            self.reason = self.reason or reason[:200]

    def share(self, num_asserts: int) -> float:
        """Return the mean share of each assert and test that held; what never ran counts as 0."""
        total = max(len(self._sites), num_asserts)
        return sum(held / ran for held, ran in self._sites.values()) / total if total else 0.0


class CountAsserts(ast.NodeTransformer):
    """Wrap every assert so that it is counted and the next one still runs.

    Args:
        source: of several, to tell their asserts apart.
    """

    def __init__(self, source: int):
        self.source = source
        self.seen = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        said = f"{ast.unparse(node)[:120]!r} + f' {{type(__e__).__name__}} {{__e__}}'"
        site = repr(f"assert {self.source}.{self.seen}")
        self.seen += 1
        source = (
            f"try:\n    pass\nexcept Exception as __e__:\n    {COUNTER}(False, {said}, {site})\n"
            f"else:\n    {COUNTER}(True, '', {site})"
        )
        (statement,) = ast.parse(source).body
        assert isinstance(statement, ast.Try)
        statement.body = [node]
        return ast.fix_missing_locations(ast.copy_location(statement, node))


def free_names(trees: list[ast.Module], known: set[str]) -> list[str]:
    """Return the names that the tests read and nobody defines: the candidate's."""
    read: set[str] = set()
    bound: set[str] = set(known) | set(dir(builtins))
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    return sorted(read - bound)


def load_preamble(preamble: str, namespace: dict[str, Any]) -> None:
    """Define the prompt's imports and helpers for the tests; a preamble that is no program defines nothing."""
    for text in (preamble, preamble + "\n    pass\n"):
        try:
            code = compile(text, "preamble.py", "exec")
        except (SyntaxError, ValueError):
            continue
        exec(code, namespace)
        return


def judge(job: dict[str, Any], stream: socket.socket) -> tuple[str, float, str, bool]:
    """Return status, share of tests passed, the first failure's reason, and whether the candidate's process is gone."""
    try:
        trees = [ast.parse(source) for source in job["tests"]]
    except (SyntaxError, ValueError) as error:
        return "error", 0.0, f"the tests are not Python: {error}", False
    candidate = Candidate(stream)
    tally = Tally()
    try:
        stream.sendall(frame(codec.dumps({key: job[key] for key in ("style", "text", "preamble", "entry_point")})))
        greeting = candidate.receive()
        if "unparsable" in greeting:
            return "unparsable", 0.0, str(greeting["unparsable"])[:200], False
        if "raise" in greeting:
            return "wrong", 0.0, f"while loading: {greeting['raise']}"[:200], False
        run_all(job, trees, candidate, tally)
    except (CandidateGoneError, OSError) as gone:
        tally.note(False, str(gone))
    if candidate.gone or tally.failed or not tally.passed:
        share = min(tally.share(count_asserts(trees)), 1 - 1e-6)
        reason = candidate.gone or tally.reason or "no test ran"
        return "wrong", 0.0 if candidate.gone else share, reason, bool(candidate.gone)
    return "ok", 1.0, f"{tally.passed} passed", False


def run_all(job: dict[str, Any], trees: list[ast.Module], candidate: Candidate, tally: Tally) -> None:
    """Run every test there is, in the order of the sources."""
    entry_point = job["entry_point"]
    namespace: dict[str, Any] = {"__name__": "tests", COUNTER: tally.note}
    load_preamble(job["preamble"], namespace)
    wanted = free_names(trees, set(namespace))
    for name in [n for n in wanted if n in sys.stdlib_module_names]:  # never the candidate's own `math`
        namespace[name] = import_module(name)
        wanted.remove(name)
    namespace |= candidate.describe(sorted({*wanted, *([entry_point] if entry_point else [])}))
    main = namespace.get(entry_point)
    if "candidate" in wanted and main is not None:
        namespace.setdefault("candidate", main)
    for number, tree in enumerate(trees):
        code = compile(CountAsserts(number).visit(tree), "tests.py", "exec")
        run_counted(lambda code=code: exec(code, namespace), tally, is_test=any(acts(node) for node in tree.body))  # type: ignore[misc]
    for name, value in list(namespace.items()):
        if name.startswith("test_") and isinstance(value, FunctionType):
            run_counted(value, tally)
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            run_unittest(value, tally)
    check = namespace.get("check")
    if isinstance(check, FunctionType) and not any(calls(tree, "check") for tree in trees):
        if main is None:
            tally.note(False, f"{entry_point or 'the function'} is not defined")
        else:
            run_counted(lambda: check(main), tally)


def acts(statement: ast.stmt) -> bool:
    """Whether a top-level statement tests something, and does not only define."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(
        statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Pass
    )


def calls(tree: ast.Module, name: str) -> bool:
    """Whether a source calls a function of that name at its top level."""
    found = [node.value.func for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == name for function in found)


def run_counted(test: Callable[[], object], tally: Tally, is_test: bool = True) -> None:
    """Run a test whose asserts count themselves: it adds a failure when it raises, a pass when it held without asserting."""
    before = tally.passed + tally.failed
    try:
        test()
    except CandidateGoneError:
        raise
    except BaseException as error:  # noqa: BLE001  (a failing test raises what it likes)
        tally.note(False, f"{type(error).__name__}: {error}"[:200])
    else:
        if is_test and tally.passed + tally.failed == before:
            tally.note(True)


def run_unittest(kind: type[unittest.TestCase], tally: Tally) -> None:
    """Run a TestCase's methods, each as one test, between its class's set-up and tear-down."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    bad = [text.strip().split("\n")[-1][:200] for _, text in result.failures + result.errors]
    bad += ["passed against expectation" for _ in result.unexpectedSuccesses]
    for reason in bad:
        tally.note(False, reason)
    for _ in range(result.testsRun - len(bad)):
        tally.note(True)


def count_asserts(trees: list[ast.Module]) -> int:
    """Return how many assert statements the tests hold."""
    return sum(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree))
