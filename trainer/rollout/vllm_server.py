"""A vLLM server that the sampler starts for itself, on loopback, from vLLM's own Python environment (`make vllm-env`).

It serves the backbone under a name that nobody else has, so a stranger who took the port in between is never mistaken for it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.config.schema import CampaignConfig
from trainer.errors import ConfigError, StalledError
from trainer.files import write_json
from trainer.policy.versions import PolicyStore
from trainer.processes import free_port
from trainer.rollout.vllm import VllmSampler, introduce
from trainer.rollout.vllm_http import LOST, Garbled, Refused, Server

ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, two servers of one machine share one core
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_LOG = "vllm.log"
_STARTS = 3  # on another port each time
_SHARE_OF_START = 0.8  # so that this process names what is wrong before its supervisor gives up on it


def arguments(
    config: CampaignConfig, base: Path, port: int, max_tokens: int, name: str = "", more: Mapping[str, str] | None = None
) -> list[str]:
    """Return the engine's command line for a campaign.

    Args:
        base: the directory that the engine loads.
        max_tokens: longest prompt plus the length cap.
        name: under which it serves the backbone; empty: the directory.
        more: further options, under those of the recipe.
    """
    train, vllm = config.train, config.train.sampler.vllm
    given = {
        "--model": str(base),
        "--served-model-name": name or str(base),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": config.base.dtype,
        "--max-model-len": str(max_tokens),
        "--max-num-seqs": str(train.sampler.slots),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",  # none of the model's own sampling settings
        "--kv-cache-dtype": vllm.kv_cache_dtype,
        "--tensor-parallel-size": str(vllm.tensor_parallel_size),
    }
    flags = ["--enable-prefix-caching" if vllm.prefix_caching else "--no-enable-prefix-caching"]
    if train.method == "lora" and train.sync.mode != "merge":
        flags.append("--enable-lora")
        given |= {"--max-lora-rank": str(lora_rank(train.lora.rank)), "--max-loras": "2", "--max-cpu-loras": "2"}
    if vllm.kv_offload_bytes:
        given["--kv-offloading-size"] = f"{vllm.kv_offload_bytes / 2**30:.6g}"
    if vllm.eager:
        flags.append("--enforce-eager")
    given |= {**(more or {}), **vllm.arguments}
    if "--enable-lora" in flags and "--lora-target-modules" not in given:
        # Left free, vLLM puts adapters on the head too, and on a CPU it then dies of log-probs of a prompt beside other requests.
        flags += ["--lora-target-modules", *train.lora.target_modules]
    return [*(part for pair in given.items() for part in pair if part), *flags]


def lora_rank(rank: int) -> int:
    """Return the smallest rank that vLLM has kernels for and that holds this one."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


@contextmanager
def served_base(
    config: CampaignConfig, base: Path, directory: Path, max_tokens: int, top_k: int, on_wait: Callable[[], None]
) -> Iterator[VllmSampler]:
    """Have a sampler over servers with the bare base, those of the recipe or one of its own, for the span of a block.

    Args:
        base: the base artifact.
        directory: for the log of a server of its own.
        max_tokens: of the longest request.
        top_k: log-probs wanted at a token.
        on_wait: called while a server is waited for.
    """
    train, vllm = config.train, config.train.sampler.vllm
    server: VllmServer | None = None
    try:
        if vllm.urls:
            servers, model = running_servers(config, on_wait)
        else:
            server = VllmServer(config, base, directory, max_tokens, {"--max-logprobs": str(max(top_k, 20))})
            server.wait(on_wait)
            servers, model = [Server(server.url, train.watchdog.deadline_seconds)], server.name
        nothing = PolicyStore(directory / "policies", train.sync.keep)
        deadline = train.watchdog.deadline_seconds
        sampler = VllmSampler(servers, nothing, base, model, "adapter", vllm.concurrency, deadline, directory / "merged")
        try:
            yield sampler
        finally:
            sampler.close()
    finally:
        if server is not None:
            server.close()


def running_servers(config: CampaignConfig, on_wait: Callable[[], None]) -> tuple[list[Server], str]:
    """Return the servers of the recipe, and what they call the backbone, once they answer.

    Raises:
        StalledError, ModelError: see `introduce`. ConfigError: their key is not in the environment.
    """
    train, vllm = config.train, config.train.sampler.vllm
    variable = vllm.token_variable
    if variable is not None and not os.environ.get(variable):
        raise ConfigError("train.sampler.vllm.token_variable", variable, "is empty or not set in the environment; set it")
    key = os.environ[variable] if variable else ""
    servers = [Server(url.rstrip("/"), train.watchdog.deadline_seconds, key) for url in vllm.urls]
    return servers, introduce(servers, vllm.model, train.watchdog.start_seconds * _SHARE_OF_START, on_wait)


class VllmServer:
    """A running server.

    Args:
        config: the campaign's.
        base: the directory that the engine loads.
        directory: for its log.
        max_tokens: longest prompt plus the length cap.
        more: further options, under those of the recipe.
        threads: of each of its workers on a CPU.

    Raises:
        ConfigError: vLLM's environment is not there.
    """

    def __init__(
        self,
        config: CampaignConfig,
        base: Path,
        directory: Path,
        max_tokens: int,
        more: Mapping[str, str] | None = None,
        threads: int = 1,
    ):
        self.config, self.base, self.max_tokens, self.threads = config, base.resolve(), max_tokens, threads
        self.more = more
        vllm = config.train.sampler.vllm
        root = Path(__file__).resolve().parents[2]
        self.python = Path(vllm.python) if Path(vllm.python).is_absolute() else root / vllm.python
        if not self.python.is_file():
            raise ConfigError(
                "train.sampler.vllm.python", str(self.python), "is no Python with vLLM; run `make vllm-env`, or name urls"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.log, self.name = directory / _LOG, f"tithe-{secrets.token_hex(8)}"
        self.start_seconds = config.train.watchdog.start_seconds * _SHARE_OF_START
        self.starts, self.closing = 0, False
        self._start()

    def _start(self) -> None:
        self.starts += 1
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        line = arguments(self.config, self.base, port, self.max_tokens, self.name, self.more)
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *line]
        guard = [sys.executable, "-m", "trainer.processes", str(os.getpid())]
        own = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": str(self.threads)}
        environment = {**os.environ, **ENVIRONMENT, **own, **self.config.train.sampler.vllm.environment}
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*guard, *command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        write_json(
            self.log.with_suffix(".json"), {"pid": self.process.pid, "url": self.url, "name": self.name, "command": command}
        )

    def wait(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until it answers by its own name; when somebody else took its port, start it on another one.

        Raises:
            StalledError: it ended, or did not answer within the time for a start.
        """
        end = time.monotonic() + self.start_seconds
        while not self._serves():
            reason = self.ended()
            if reason is not None and "address already in use" in self._said().lower() and self.starts < _STARTS:
                self._start()
                continue
            if reason is None and time.monotonic() > end:
                reason = f"did not answer within {self.start_seconds:.0f} s"
            if reason is not None:
                raise StalledError(f"vLLM (pid {self.process.pid})", reason, f"see {self.log}")
            on_wait()
            time.sleep(0.5)

    def _serves(self) -> bool:
        try:
            return any(model["id"] == self.name for model in Server(self.url, 10.0).models())
        except (Refused, Garbled, *LOST):
            return False

    def ended(self) -> str | None:
        """Return how it ended and its last error, or None while it runs."""
        code = self.process.poll()
        if code is None or self.closing:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        errors = re.findall(r"^.*?\b((?:\w+Error|Exception): .+)$", self._said(), re.MULTILINE)
        return f"{how} ({errors[-1][:200]})" if errors else how

    def _said(self) -> str:
        return self.log.read_bytes()[self.log_start :].decode(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """End it and all that it started."""
        self.closing = True
        for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
