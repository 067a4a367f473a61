"""What `docker stop` and `docker kill` leave behind of a save that was running."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from safetensors import safe_open

from tests.container.docker import Docker, running

STOP_SECONDS = 600
PATIENT = {"STRATA_DRAIN_SECONDS": str(STOP_SECONDS - 15)}


def test_a_save_that_runs_when_the_container_is_stopped_is_completed(docker: Docker, image: str, place: Path) -> None:
    with running(docker, image, place / "saves", settings=PATIENT) as container:
        save_id = container.start_save(300)
        stopped = time.time()
        docker("stop", "--time", str(STOP_SECONDS), container.name)

        assert container.inspect(".State.ExitCode") == 0
        assert container.unfinished() == []
        [path] = container.finished()
        with safe_open(path, framework="pt") as file:
            assert file.get_slice("hidden_states").get_shape()[0] == file.get_tensor("token_ids").numel() > 300
            assert file.metadata()["save_id"] == save_id

        docker("start", container.name)
        container.wait_until_ready()
        record = container.record(save_id)
        assert record["status"] == "completed"
        assert datetime.fromisoformat(record["finished"]).timestamp() > stopped
        assert container.here(record["hidden_states_path"]) == path


def test_a_save_that_runs_when_the_container_is_killed_has_failed_after_the_next_start(
    docker: Docker, image: str, place: Path, smollm2_folder: Path
) -> None:
    """With a model from outside of the image, and no folder for temporary files."""
    mounted = ("--volume", f"{smollm2_folder}:/models/mounted:ro")
    with running(docker, image, place / "saves", *mounted, settings={"STRATA_MODEL": "/models/mounted"}) as container:
        kept = container.complete(prompt="Kept", max_tokens=0, kv_transfer_params={})["kv_transfer_params"]
        assert container.complete(prompt="x", max_tokens=1)["model"] == "/models/mounted"
        save_id = container.start_save(4000)
        docker("kill", container.name)

        assert container.inspect(".State.ExitCode") == 128 + 9
        assert len(container.unfinished()) == 1

        docker("start", container.name)
        container.wait_until_ready()
        record = container.record(save_id)
        assert (record["status"], record["error"]["code"]) == ("failed", "interrupted")
        assert container.unfinished() == []
        assert container.finished() == [container.here(kept["hidden_states_path"])]
        assert container.record(kept["save_id"])["status"] == "completed"
