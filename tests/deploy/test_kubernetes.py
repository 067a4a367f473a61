"""The manifests: as the API server's own schemas have them, in themselves, and against the service's settings.

The base is read as it lies there, and rendered as kubectl does it; the overlay only exists rendered.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from service.config.settings import ENV_PREFIX, Settings, load_settings
from service.http.server import LAST_RESPONSES_SECONDS
from service.saves.paths.protected import check_roots
from tests.deploy.monitoring import DEPLOY, PROMETHEUS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = DEPLOY / "kubernetes"
BASE, GPU = HERE / "base", HERE / "overlays" / "gpu"
KUSTOMIZATIONS = [BASE, HERE / "monitoring", GPU]
OPERATORS = {"ServiceMonitor"}
"""Kinds that are not Kubernetes' own, which its schemas don't have."""
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
PORT = Settings.model_fields["port"].default
MARGIN_SECONDS = 15


@dataclass(frozen=True)
class Manifests:
    """Everything that one kustomization applies."""

    all: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [manifest for manifest in self.all if manifest["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (manifest,) = self.of(kind)
        return manifest

    @property
    def pod(self) -> dict[str, Any]:
        template: dict[str, Any] = self.one("Deployment")["spec"]["template"]
        return template

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def environment(self) -> dict[str, str]:
        return {variable["name"]: variable["value"] for variable in self.container["env"]}


def kustomization(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


def as_it_lies_there() -> Manifests:
    return Manifests([yaml.safe_load((BASE / name).read_text()) for name in kustomization(BASE)["resources"]])


def rendered(folder: Path) -> Manifests:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: what the overlay becomes is not looked at")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Manifests(list(yaml.safe_load_all(done.stdout)))


@pytest.fixture(scope="module", params=["base", "base, rendered", "gpu, rendered"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return {"base": as_it_lies_there, "base, rendered": lambda: rendered(BASE), "gpu, rendered": lambda: rendered(GPU)}[request.param]()


def referenced(folder: Path) -> Iterator[Path]:
    """What a kustomization names: files, folders of others."""
    named = kustomization(folder)
    for name in [*named.get("resources", []), *named.get("components", []), *(patch["path"] for patch in named.get("patches", []))]:
        yield folder / name


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_a_kustomization_names_what_is_there_and_all_of_it(folder: Path) -> None:
    names = {path.resolve() for path in referenced(folder)}
    assert [path for path in names if not path.exists()] == []
    assert {path for path in folder.glob("*.yaml") if path.name != "kustomization.yaml"} <= names


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(manifests: Manifests, version: str) -> None:
    for manifest in manifests.all:
        if manifest["kind"] not in OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_would_be_found() -> None:
    misspelled = as_it_lies_there()
    misspelled.pod["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(misspelled.one("Deployment"), VERSIONS[-1], strict=True)


def test_selectors_find_the_pods(manifests: Manifests) -> None:
    labels = manifests.pod["metadata"]["labels"].items()
    selectors = [manifests.one("Service")["spec"]["selector"]]
    selectors += [manifests.one(kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels


def test_ports_lead_to_the_port_that_the_service_listens_on(manifests: Manifests) -> None:
    (port,) = manifests.container["ports"]
    (outer,) = manifests.one("Service")["spec"]["ports"]
    assert (port["containerPort"], outer["port"], outer["targetPort"]) == (PORT, PORT, port["name"])
    assert "STRATA_PORT" not in manifests.environment
    for kind in ("startup", "readiness", "liveness"):
        assert manifests.container[f"{kind}Probe"]["httpGet"]["port"] == port["name"]


def test_the_services_name_does_not_become_its_port(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes tells pods about a Service of this name by a variable that is also a setting."""
    monkeypatch.setenv(f"{manifests.one('Service')['metadata']['name'].upper()}_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(Exception, match="STRATA_PORT"):
        load_settings({})
    assert manifests.pod["spec"]["enableServiceLinks"] is False


def test_variables_are_settings_and_have_values_that_work(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: value for name, value in manifests.environment.items() if name.startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in ours} <= set(Settings.model_fields)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({})
    assert settings.host == "0.0.0.0"
    assert (settings.log_format, settings.drain_seconds) == ("json", Settings.model_fields["drain_seconds"].default)


def test_no_folder_of_the_service_lies_in_the_save_root(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_SAVE_ROOT", "STRATA_STATE_DIR", "HOME"):
        monkeypatch.setenv(name, manifests.environment[name])
    check_roots(load_settings({}))


def test_only_pods_that_are_marked_as_clients_reach_the_service(manifests: Manifests) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in manifests.of("NetworkPolicy")}
    (port,) = manifests.container["ports"]
    for spec in policies.values():
        assert spec["podSelector"]["matchLabels"].items() <= manifests.pod["metadata"]["labels"].items()
        assert spec["policyTypes"] == ["Ingress"]
        [rule] = spec["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": port["name"]}]
    assert policies["strata"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"strata-client": "true"}}}]
    assert "strata-client" not in manifests.pod["metadata"]["labels"]


def test_prometheus_may_scrape_where_it_is_to() -> None:
    policy = yaml.safe_load((HERE / "monitoring" / "network-policy.yaml").read_text())
    [source] = policy["spec"]["ingress"][0]["from"]
    assert set(source) == {"namespaceSelector", "podSelector"}, "one source, of which both are true"
    for version in VERSIONS:
        kubernetes_validate.validate(policy, version, strict=True)


def test_every_mount_has_its_volume_and_every_volume_its_claim(manifests: Manifests) -> None:
    mounts = {mount["name"] for mount in manifests.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in manifests.pod["spec"]["volumes"]}
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume}
    assert mounts == set(volumes)
    assert claims == {claim["metadata"]["name"] for claim in manifests.of("PersistentVolumeClaim")}


def test_what_is_written_lies_on_a_volume(manifests: Manifests) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in manifests.container["volumeMounts"]}
    environment = manifests.environment

    def volume_of(path: str) -> str:
        return next(name for mount, name in mounts.items() if path == mount or path.startswith(mount + "/"))

    assert manifests.container["securityContext"]["readOnlyRootFilesystem"] is True
    assert volume_of(environment["STRATA_SAVE_ROOT"]) == "saves"
    assert {volume_of(environment[name]) for name in ("STRATA_STATE_DIR", "HOME", "HF_HOME")} == {"state"}
    assert volume_of("/tmp") == "tmp"


def test_nothing_is_allowed_that_is_not_needed(manifests: Manifests) -> None:
    pod, container = manifests.pod["spec"]["securityContext"], manifests.container["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] != 0
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert manifests.pod["spec"]["automountServiceAccountToken"] is False


def test_probes_ask_what_they_are_for_and_bear_with_a_long_start(manifests: Manifests) -> None:
    probes = {kind: manifests.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/health/live"}
    start_seconds = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert 1800 <= start_seconds < manifests.one("Deployment")["spec"]["progressDeadlineSeconds"]


def test_a_pod_has_time_to_drain_before_it_is_killed(manifests: Manifests) -> None:
    drain = float(manifests.environment["STRATA_DRAIN_SECONDS"])
    _, pause = manifests.container["lifecycle"]["preStop"]["exec"]["command"]
    grace = manifests.pod["spec"]["terminationGracePeriodSeconds"]
    assert grace == drain + MARGIN_SECONDS
    assert float(pause) + drain + LAST_RESPONSES_SECONDS < grace


def test_two_pods_never_share_a_state_directory(manifests: Manifests) -> None:
    spec = manifests.one("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_a_node_can_be_drained(manifests: Manifests) -> None:
    budget = manifests.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] >= 1


def test_the_overlay_runs_on_a_gpu() -> None:
    overlay = rendered(GPU)
    resources = overlay.container["resources"]
    assert overlay.pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert overlay.environment["STRATA_DEVICE"] == "cuda"
    assert overlay.container["image"] == "strata:cuda"
    assert as_it_lies_there().environment.items() <= overlay.environment.items()


def test_prometheus_finds_the_service_under_the_name_that_alerts_go_by() -> None:
    monitor = yaml.safe_load((HERE / "monitoring" / "service-monitor.yaml").read_text())
    service = as_it_lies_there().one("Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert set(endpoint) == {"port", "path", "interval"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert endpoint["interval"] == config["global"]["scrape_interval"]
    assert service["metadata"]["name"] == config["scrape_configs"][0]["job_name"]
