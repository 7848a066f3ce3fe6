"""`make docs-check`: every command that README.md and docs/ show is one that works, and every link leads somewhere.

    ```console run         its `$ ` lines are run, one after the other
    ```console tiny        the same, with the campaign made small (TINY)
    ```console fails       the same, each has to fail and to say the line that stands below it
    ```console elsewhere   needs what a test machine lacks (a GPU, a cluster, a download): looked at like all the rest
    anything else          each line that is a command of tithe or make, in a block or between backticks: the command, its
                           options, the target and the recipe that it names are there

All blocks of all files run in one copy of the repository, in the order README, tutorial, the rest; `tithe up` runs until it says
that it is ready, then gets Ctrl-C. `make` is only asked whether it could (`make -n`): CI calls its targets itself.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = (
    "base.scratch.steps=30 base.scratch.decay_steps=10 base.scratch.warmup_steps=5 prepare.sources.0.num_rows=2000 "
    "train.stages.0.steps=2 train.batch.prompts_per_step=8 train.heldout.num_prompts=16 evaluate.num_prompts=16 "
    "evaluate.samples_per_prompt=2 evaluate.pass_at=[1,2] anchors.num_prompts=8"
)
OWN = """
campaign: {name: mine}
prepare: {sources: [{source: "jsonl:data/mine.jsonl", prompt_template: "{question}"}]}
reward: {verifier: python, function: "my_rewards:score", partial_credit: true, timeout_seconds: 20}
"""
OPEN, WORD = re.compile(r"^```(.*)$"), re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNNABLE = ("run", "tiny", "fails")
LIMIT_SECONDS = 600


@dataclass
class Block:
    """A fenced block: where it starts, what stands behind the fence, its lines."""

    file: Path
    line: int
    info: str
    lines: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(REPOSITORY)}:{self.line}"

    @property
    def kind(self) -> str:
        language, _, kind = self.info.partition(" ")
        return kind.strip() if language == "console" else ""

    @property
    def commands(self) -> list[str]:
        """The commands it shows: its `$ ` lines, or, in a block without a language, lines that start with a program of ours."""
        if self.info.startswith("console"):
            return [line.removeprefix("$ ") for line in self.lines if line.startswith("$ ")]
        if self.info:
            return []
        return [line.partition(" # ")[0].strip() for line in self.lines if is_ours(line)]


def is_ours(text: str) -> bool:
    words = text.split()
    return len(words) > 1 and (words[0] == "make" or Path(words[0]).name in ("tithe", "dvc"))


def pages() -> list[Path]:
    first = [REPOSITORY / "README.md", REPOSITORY / "docs" / "tutorial.md"]
    return [*first, *(page for page in sorted((REPOSITORY / "docs").glob("*.md")) if page not in first)]


def blocks(page: Path) -> tuple[list[Block], str]:
    """Return a page's fenced blocks, and its text without them."""
    found: list[Block] = []
    inside, text = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = OPEN.match(line.strip())
        if fence and not inside:
            inside = True
            found.append(Block(page, number, fence.group(1).strip()))
        elif fence:
            inside = False
        elif inside:
            found[-1].lines.append(line)
        else:
            text.append(line)
    return found, "\n".join(text)


# --- what can be said without running anything ------------------------------------------------------------------------


def problems() -> list[str]:
    """Return what is wrong with commands and links, one line each."""
    said = []
    for page in pages():
        found, text = blocks(page)
        name = str(page.relative_to(REPOSITORY))
        for block in found:
            if block.info.startswith("console") and block.kind not in (*RUNNABLE, "elsewhere", ""):
                said.append(f"{block.place}: console {block.kind}: no such kind")
            said += [f"{block.place}: {command}: {wrong}" for command in block.commands if (wrong := mistake(command))]
        shown = [span for span in WORD.findall(text) if is_ours(span) and not re.search(r"[<…]|\.\.\.|\b[A-Z]{3,}\b", span)]
        said += [f"{name}: `{command}`: {wrong}" for command in shown if (wrong := mistake(command))]
        for target in LINK.findall(text):
            if "://" in target or target.startswith("#"):
                continue
            if not (page.parent / target.partition("#")[0]).exists():
                said.append(f"{name}: link to {target}, which is not there")
    return said


def mistake(command: str) -> str:
    """Return what is wrong with a command, or nothing."""
    words = shlex.split(command.partition(" # ")[0])
    words = list(takewhile(lambda word: word not in ("&&", "|", ";"), words))
    while words and "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]
    if not words:
        return ""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        benchmarks = {f"bench-{path.stem}" for path in (REPOSITORY / "benchmarks").glob("*.py")}
        unknown = [word for word in arguments if "=" not in word and word not in targets | benchmarks]
        return f"no such target: {unknown[0]}" if unknown else ""
    return tithe_mistake(arguments) if program == "tithe" else ""


def tithe_mistake(arguments: list[str]) -> str:
    """Return what is wrong with a command of tithe: its name, its options, a recipe that is not there."""
    import typer.main

    from flows.cli import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "anchors" and rest[:1] == ["show"]:
        name, rest = "anchors-show", rest[1:]
    if name.startswith("-"):
        return ""
    if name not in known:
        return f"no such command: {name}"
    options = {option for parameter in known[name].params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for word in rest:
        if word.startswith("-") and word.partition("=")[0] not in options:
            return f"no such option: {word}"
        if word.startswith("recipes/") and not (REPOSITORY / word).exists() and word != "recipes/mine.yaml":
            return f"no such recipe: {word}"
    return ""


# --- what is run ------------------------------------------------------------------------------------------------------


def copy_repository(target: Path) -> None:
    """Copy the files that git knows, with their times, and lend the environment."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    (target / ".venv").symlink_to(sys.prefix)
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=target, check=True)


def words_of(command: str, kind: str, place: Path) -> list[str]:
    """Return the words to run: a glob resolved, a campaign made small, make only asked."""
    words = [
        match for word in shlex.split(command, comments=True) for match in (sorted(glob.glob(word, root_dir=place)) or [word])
    ]
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if kind == "tiny" and Path(words[0]).name == "tithe" and words[1] != "replay":
        words += [part for override in TINY.split() for part in ("-S", override)]
    return words


def run(command: str, kind: str, place: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command and return its exit code and what it said."""
    words = words_of(command, kind, place)
    if Path(words[0]).name == "tithe" and words[1] == "up":
        return run_up(words, place, environment)
    done = subprocess.run(
        words,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def run_up(words: list[str], place: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run `tithe up` until it is ready, then press Ctrl-C."""
    from flows.server import free_port

    for option in ("--prefect-port", "--mlflow-port"):
        if option in words:
            words[words.index(option) + 1] = str(free_port())
        else:
            words += [option, str(free_port())]
    process = subprocess.Popen(words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if "Ctrl-C" in line:
            process.send_signal(signal.SIGINT)
    return process.wait(LIMIT_SECONDS), said


def check_runs() -> int:
    """Run every block that is marked so, and return how many commands did not do what they should."""
    failures = commands = 0
    with tempfile.TemporaryDirectory(prefix="tithe-docs-") as folder:
        place = Path(folder)
        copy_repository(place)
        environment = {**os.environ, "PYTHONPATH": str(place), "DO_NOT_TRACK": "true", "DVC_NO_ANALYTICS": "1", "COLUMNS": "120"}
        for name in ("TITHE_STATE", "TITHE_CAMPAIGNS", "TITHE_DATABASE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            environment.pop(name, None)
        shrink_default(place)
        write_own(place)
        for block in (block for page in pages() for block in blocks(page)[0] if block.kind in RUNNABLE):
            for command in block.commands:
                started = time.monotonic()
                code, said = run(command, block.kind, place, environment)
                expected = [line for line in block.lines if line and not line.startswith("$ ")]
                good = code == 0 if block.kind != "fails" else code != 0 and all(line in said for line in expected)
                print(f"{'ok  ' if good else 'FAIL'} {time.monotonic() - started:5.1f} s  {block.place}  {command}", flush=True)
                commands += 1
                if not good:
                    failures += 1
                    print(
                        "\n".join(f"       {line}" for line in said.splitlines()[-25:]) + f"\n       exit code {code}", flush=True
                    )
    print(f"{commands} commands run, {failures} failed")
    return failures


def shrink_default(place: Path) -> None:
    """Make the default campaign of the copy small."""
    code = (
        "import sys; from pathlib import Path; from ruamel.yaml import YAML; from trainer.config import load_config, as_tree;"
        "path = Path('params.yaml'); tree = as_tree(load_config(path, sys.argv[1:])); YAML().dump(tree, path)"
    )
    subprocess.run(
        [sys.executable, "-c", code, *TINY.split()], cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, check=True
    )


def write_own(place: Path) -> None:
    """Write what the pages call a person's own: prompts (sums), a recipe, and the reward function that how-to.md shows."""
    (place / "data").mkdir()
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(20)]
    (place / "data" / "mine.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    code = next(block for block in blocks(place / "docs" / "how-to.md")[0] if block.info == "python")
    (place / "my_rewards.py").write_text("\n".join(code.lines) + "\n", encoding="utf-8")
    (place / "recipes" / "mine.yaml").write_text(OWN, encoding="utf-8")


def main() -> int:
    said = problems()
    print("\n".join(said) or "every command and link is there")
    return 1 if said or check_runs() else 0


if __name__ == "__main__":
    sys.exit(main())
