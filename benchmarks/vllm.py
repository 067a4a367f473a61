"""vLLM's CPU build as a process in an environment of its own, extracting the same layers."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.client import BenchmarkError, connect
from engine.device.host import usable_cpus

ROOT = Path(__file__).parent.parent
START_SECONDS = 900.0
MAX_MODEL_LEN = 2048
KV_CACHE_GIB = 2
POLL_SECONDS = 1.0


def environment() -> Path:
    """The environment's folder; made the first time, which takes minutes. Raises `BenchmarkError`."""
    made = subprocess.run([ROOT / "scripts" / "clients", "vllm"], stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        raise BenchmarkError("vLLM's environment could not be made; the reason is above")
    return Path(made.stdout.splitlines()[-1])


class VllmProcess:
    """A vLLM server, ready inside of `with`; its files go to `directory`. What it prints goes to `log`."""

    def __init__(self, folder: Path, model: Path, layers: Sequence[int], dtype: str, directory: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [str(folder / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", str(model), "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
        self._command += ["--speculative-config", json.dumps(_extraction(layers))]
        self._command += ["--kv-transfer-config", json.dumps(_transfer(directory))]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        cores = sorted(os.sched_getaffinity(0))[: usable_cpus()]
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            # Without it all threads can end up on one core.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(self._command, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            self._wait_ready(self._process)
        except BaseException:
            self._end(self._process)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._end(self._process)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if _healthy(self.url):
                return
            time.sleep(POLL_SECONDS)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise BenchmarkError(f"vLLM didn't become ready; its last lines were:\n{tail}")

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Asks first, so that it ends its workers; its session is its own, so what is left of it can be ended too."""
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def _extraction(layers: Sequence[int]) -> dict[str, object]:
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}


def _transfer(directory: Path) -> dict[str, object]:
    return {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "benchmarks.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def _healthy(url: str) -> bool:
    connection = connect(url)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
