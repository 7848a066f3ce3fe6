"""A vLLM server that the sampler starts for itself, on loopback, from vLLM's own Python environment (`make vllm-env`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.config.schema import CampaignConfig
from trainer.errors import ConfigError, StalledError
from trainer.policy.versions import PolicyStore
from trainer.rollout.vllm import Server, VllmSampler

ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_LOG = "vllm.log"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def arguments(config: CampaignConfig, base: Path, port: int, max_tokens: int, more: Mapping[str, str] | None = None) -> list[str]:
    """Return the engine's command line for a campaign.

    Args:
        max_tokens: longest prompt plus the length cap.
        more: further options, under those of the recipe.
    """
    train, vllm = config.train, config.train.sampler.vllm
    given = {
        "--model": str(base),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": config.base.dtype,
        "--max-model-len": str(max_tokens),
        "--max-num-seqs": str(train.sampler.slots),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",  # none of the model's own sampling settings
        "--kv-cache-dtype": vllm.kv_cache_dtype,
        "--tensor-parallel-size": str(vllm.tensor_parallel_size),
        **(more or {}),
        **vllm.arguments,
    }
    flags = ["--enable-prefix-caching" if vllm.prefix_caching else "--no-enable-prefix-caching"]
    if train.sync.mode == "adapter":
        flags.append("--enable-lora")
        given |= {"--max-lora-rank": str(lora_rank(train.lora.rank)), "--max-loras": "2", "--max-cpu-loras": "2"}
    if vllm.kv_offload_bytes:
        given["--kv-offloading-size"] = f"{vllm.kv_offload_bytes / 2**30:.6g}"
    if vllm.eager:
        flags.append("--enforce-eager")
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
        on_wait: called while the server starts.
    """
    train, vllm = config.train, config.train.sampler.vllm
    server, urls, model = None, list(vllm.urls), vllm.model
    try:
        if not urls:
            server = VllmServer(config, base, directory, max_tokens, {"--max-logprobs": str(max(top_k, 20))})
            server.wait(on_wait)
            urls, model = [server.url], str(base)
        elif not model:
            model = Server(urls[0], 30.0).ask("/v1/models")["data"][0]["id"]
        nothing = PolicyStore(directory / "policies", train.sync.keep)
        deadline = train.watchdog.deadline_seconds
        sampler = VllmSampler(urls, nothing, base, model, "adapter", vllm.concurrency, deadline, directory / "merged")
        try:
            yield sampler
        finally:
            sampler.close()
    finally:
        if server is not None:
            server.close()


class VllmServer:
    """A running server.

    Args:
        config: the campaign's.
        base: the base artifact.
        directory: for its log.
        max_tokens: longest prompt plus the length cap.
        more: further options, under those of the recipe.

    Raises:
        ConfigError: vLLM's environment is not there.
    """

    def __init__(
        self, config: CampaignConfig, base: Path, directory: Path, max_tokens: int, more: Mapping[str, str] | None = None
    ):
        vllm = config.train.sampler.vllm
        python = Path(vllm.python) if Path(vllm.python).is_absolute() else Path(__file__).resolve().parents[2] / vllm.python
        if not python.is_file():
            raise ConfigError(
                "train.sampler.vllm.python", str(python), "is no Python with vLLM; run `make vllm-env`, or name urls"
            )
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", directory / _LOG
        command = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *arguments(config, base.resolve(), port, max_tokens, more),
        ]
        guard = [sys.executable, "-m", "trainer.processes", str(os.getpid())]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **vllm.environment}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*guard, *command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.start_seconds = config.train.watchdog.start_seconds

    def wait(self, on_wait: object = None) -> None:
        """Wait until it answers.

        Raises:
            StalledError: it ended, or did not answer within the time for a start.
        """
        server, end = Server(self.url, 10.0), time.monotonic() + self.start_seconds
        while not server.is_well():
            code = self.process.poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with exit code {code}" if code is not None else f"did not answer within {self.start_seconds:.0f} s"
                raise StalledError(f"vLLM (pid {self.process.pid})", what, f"see {self.log}")
            if callable(on_wait):
                on_wait()
            time.sleep(0.5)

    def close(self) -> None:
        """End it and all that it started."""
        for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
