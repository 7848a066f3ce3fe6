"""What every stage's process needs, imported once: the flow's launcher forks stages from a process that holds it.

Third-party modules only. The code of this repository is imported anew by each stage, so what runs is what lies on the disk.
"""

from __future__ import annotations

import gc
import importlib
import signal

MODULES = (
    "pydantic",
    "ruamel.yaml",
    "numpy",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "peft",
)

# Ctrl-C, or the end of a job, is for the flow, which stops its stages in order. The second is only put off, in this process for
# ever: a stage that is asked to stop before it can listen (flows/child.py) hears it then.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
_before = gc.get_threshold()
gc.set_threshold(100_000, 50, 50)  # as trainer.processes.importing does
for _name in MODULES:
    importlib.import_module(_name)
gc.set_threshold(*_before)
gc.freeze()  # a stage's collector need not look at what it was forked with, nor copy those pages
