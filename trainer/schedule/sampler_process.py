"""The entry of a sampler process: `python -m trainer.schedule.sampler_process <run>/samplers/<name>.json`.

The file says all there is to know (Assignment). Torch is imported after the number of threads is set.
Exit codes: trainer/errors.py.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.config import validate
from trainer.config.load import Tree
from trainer.errors import StopRequested, TitheError
from trainer.files import read_json, write_json
from trainer.metrics import RunWriter
from trainer.processes import die_with_parent, fit_malloc

if TYPE_CHECKING:
    from trainer.schedule.sampling import SamplerLoop

SAMPLERS, STARTING = "samplers", "starting"


@dataclass(frozen=True)
class Assignment:
    """All that a sampler process needs to know."""

    name: str
    run: str  # the stage's run directory
    identity: str  # of the run
    base: str  # the base artifact
    prompts: str  # the prompts artifact
    threads: int
    config: Tree
    parent_pid: int = 0  # end when this process ends; 0: started by hand

    @property
    def path(self) -> Path:
        return Path(self.run) / SAMPLERS / f"{self.name}.json"

    @property
    def directory(self) -> Path:
        return Path(self.run) / SAMPLERS / self.name

    def write(self) -> Path:
        write_json(self.path, asdict(self))
        return self.path


def _stop(number: int, frame: FrameType | None) -> None:
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    raise StopRequested(f"stopped by {signal.Signals(number).name}")


def main(arguments: list[str]) -> int:
    assignment = Assignment(**read_json(Path(arguments[0])))
    os.environ["OMP_NUM_THREADS"] = str(assignment.threads)
    loop: SamplerLoop | None = None
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN if assignment.parent_pid else _stop)  # Ctrl-C is for the learner
        signal.signal(signal.SIGTERM, _stop)
        if assignment.parent_pid:
            die_with_parent(lambda: os.getppid() == assignment.parent_pid)
        writer = RunWriter(assignment.directory)
        writer.heartbeat(STARTING)
        fit_malloc(Path(assignment.base))
        from trainer.schedule.sampling import build

        loop = build(assignment, validate(assignment.config), writer)
        loop.run()
    except TitheError as error:
        print(f"{'stopped' if isinstance(error, StopRequested) else 'error'}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if loop is not None:
            loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
