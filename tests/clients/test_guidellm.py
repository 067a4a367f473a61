"""guidellm as released, in an environment of its own: a benchmark of streamed chats and completions, none of which fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.cli.launcher import ServiceProcess
from tests.clients.conftest import ClientPython, client_output

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 16, 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_of_a_benchmark_are_answered_with_their_usage(
    path: str, client_python: ClientPython, service: ServiceProcess, model_id: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    client_output(
        client_python("guidellm"),
        *("-m", "guidellm", "run", "--disable-console", "--profile", "kind=synchronous"),
        *("--backend", f"kind=openai_http,target={service.url},model={model_id},request_format={path}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_id}", "--output", f"kind=json,path={report}"),
        cwd=tmp_path,
        settings={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (REQUESTS, [], [])
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["prompt_tokens"] >= PROMPT_TOKENS
        assert request["output"]
        assert request["time_to_first_token_ms"] > 0
