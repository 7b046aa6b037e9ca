"""The files of deploy/, docker/ and the workflow: valid, and what they name exists."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paceline import __version__
from paceline.server.app import build_app
from paceline.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RAY = DEPLOY / "ray"
RULES = DEPLOY / "prometheus" / "rules.yaml"
FROZEN = ROOT / "tests" / "architecture" / "frozen"
FLAGS = {
    line.split()[-1] for line in (FROZEN / "cli_flags.txt").read_text().splitlines() if "--" in line
}
METRICS = {
    line
    for line in (FROZEN / "metrics.txt").read_text().splitlines()
    if line.startswith("paceline")
}


def manifests() -> list[dict[str, Any]]:
    return [
        manifest
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def core_manifests() -> list[dict[str, Any]]:
    """Of kinds whose schemas come with Kubernetes."""
    return [m for m in manifests() if m["kind"] != "LeaderWorkerSet"]


@pytest.mark.parametrize("manifest", core_manifests(), ids=lambda m: str(m["kind"]))
def test_manifests_follow_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def deployed() -> dict[str, Any]:
    manifest = next(m for m in manifests() if m["kind"] == "Deployment")
    container: dict[str, Any] = manifest["spec"]["template"]["spec"]["containers"][0]
    return container


def test_the_pod_runs_with_flags_and_probes_that_exist() -> None:
    container = deployed()
    command, _, *flags = container["args"]
    assert command == "serve"
    assert {flag.split("=")[0] for flag in flags} <= FLAGS
    paths = {route.path for route in build_app(None, ServerOptions()).routes}  # type: ignore[attr-defined]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths


def test_the_nodes_of_a_leader_worker_set_start_one_engine() -> None:
    (lws,) = (m for m in manifests() if m["kind"] == "LeaderWorkerSet")
    template = lws["spec"]["leaderWorkerTemplate"]
    leader, worker = (
        template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")
    )
    values: list[dict[str, Any]] = []
    for container in (leader, worker):
        command, model, *flags = container["args"]
        given = dict(flag.partition("=")[::2] for flag in flags)
        assert command == "serve"
        assert given.keys() <= FLAGS
        assert {"PACELINE_CLUSTER_KEY", "POD_IP"} <= {e["name"] for e in container["env"]}
        values.append({"model": model, **given})
    front, node = values
    assert int(front["--nnodes"]) == int(node["--nnodes"]) == template["size"]
    assert ("--headless" in front, "--headless" in node) == (False, True)
    assert front["--master-addr"] == "$(POD_IP)", "it listens there"
    assert node["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
    shared = ("model", "--data-parallel-size", "--enable-expert-parallel")
    assert [front[name] for name in shared] == [node[name] for name in shared]
    secret = next(m for m in manifests() if m["metadata"]["name"] == "paceline-cluster")
    (reference,) = (
        e["valueFrom"]["secretKeyRef"] for e in worker["env"] if e["name"] == "PACELINE_CLUSTER_KEY"
    )
    assert reference["key"] in secret["stringData"]
    selector = next(m for m in manifests() if m["metadata"]["name"] == "paceline-nodes-http")
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert selector["spec"]["selector"] == labels


def ray_serve() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((RAY / "serve.yaml").read_text(encoding="utf-8"))
    return values


def test_the_ray_serve_application_names_what_its_file_has() -> None:
    (application,) = ray_serve()["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((RAY / f"{module}.py").read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    (deployment,) = application["deployments"]
    assert deployment["name"] in {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    _, *flags = application["args"]["flags"]
    given = dict(flag.partition("=")[::2] for flag in flags)
    assert given.keys() <= FLAGS
    assert deployment["graceful_shutdown_timeout_s"] > int(given["--drain-timeout"])


def test_pod_and_unit_wait_longer_than_the_drain_timeout() -> None:
    spec = next(m for m in manifests() if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    flags = dict(f.split("=", 1) for f in deployed()["args"] if "=" in f)
    assert spec["terminationGracePeriodSeconds"] > int(flags["--drain-timeout"])
    unit = (DEPLOY / "systemd" / "paceline.service").read_text(encoding="utf-8")
    drain = re.search(r"--drain-timeout (\d+)", unit)
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert drain
    assert stop
    assert int(stop[1]) > int(drain[1])
    start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert set(re.findall(r"--[a-z-]+", start)) <= FLAGS


def named(text: str) -> set[str]:
    """Metrics that an expression reads, without the suffixes of histograms."""
    found = set(re.findall(r"paceline:\w+", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana" / "paceline.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_reads_metrics_that_exist() -> None:
    assert len(dashboard_expressions()) > 12
    assert named(" ".join(dashboard_expressions())) <= METRICS
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_rules_read_metrics_that_exist() -> None:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    entries = rules["groups"][0]["rules"]
    recorded = {rule["record"] for rule in entries if "record" in rule}
    assert named(" ".join(rule["expr"] for rule in entries)) - recorded <= METRICS


def run(*command: str | Path) -> None:
    """Skips where the tool is not installed."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: prometheus has promtool)")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    run("promtool", "check", "rules", RULES)


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Series over 40 minutes: a queue of 65, and an engine that dies every ten minutes."""
    labels = 'instance="a", model_name="m"'
    deaths = f'{{{labels}, cause="died"}}'
    series = [
        (f"paceline:num_requests_waiting{{{labels}}}", "65x40"),
        (f"paceline:engine_restarts_total{deaths}", "0x9 1x9 2x9 3x9 4x4"),
        (f"paceline:num_requests_running{{{labels}}}", "0x40"),
    ]
    wanted = {"PacelineQueueGrows": "warning", "PacelineEngineRestarts": "warning"}
    silent = ["PacelineStandsStill", "PacelineKvCacheFull"]
    alerts: list[dict[str, Any]] = [
        {"eval_time": "40m", "alertname": name, "exp_alerts": []} for name in silent
    ]
    for name, severity in wanted.items():
        given = {"severity": severity, "instance": "a", "model_name": "m"}
        if name == "PacelineEngineRestarts":
            given["cause"] = "died"
        alerts.append({"eval_time": "40m", "alertname": name, "exp_alerts": [given]})
    for alert in alerts:
        alert["exp_alerts"] = [{"exp_labels": e} for e in alert["exp_alerts"]]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "alert_rule_test": alerts,
    }
    # Without annotations, which the tool would compare too.
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))
    run("promtool", "test", "rules", path)


def test_promtool_accepts_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    exprs = [re.sub(r"\$__\w+", "5m", expr) for expr in dashboard_expressions()]
    rules = [{"record": f"dashboard:panel_{i}", "expr": expr} for i, expr in enumerate(exprs)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run("promtool", "check", "rules", path)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With another program and user, because those are made at the installation."""
    text = (DEPLOY / "systemd" / "paceline.service").read_text(encoding="utf-8")
    text = text.replace("/opt/paceline/bin/paceline", sys.executable).replace("User=paceline", "")
    unit = tmp_path / "paceline.service"
    unit.write_text(text, encoding="utf-8")
    run("systemd-analyze", "verify", "--man=no", unit)


DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def test_there_are_images_for_both_devices() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_an_image_copies_files_and_gives_flags_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()]
    assert {"pyproject.toml", "constraints.txt", "paceline"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    command = re.search(r"^CMD (\[.+\])$", text, re.M)
    assert command
    assert {word for word in json.loads(command[1]) if word.startswith("--")} <= FLAGS


def test_versions_of_torch_are_those_that_the_project_takes() -> None:
    cpu, cuda = (path.read_text(encoding="utf-8") for path in DOCKERFILES)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"torch==([\d.]+)", cpu)
    assert pinned == re.findall(r"^torch==([\d.]+)$", constraints, re.M)
    found = re.search(r"pytorch/pytorch:2\.(\d+)", cuda)
    limits = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    assert limits
    assert int(limits[1]) <= int(found[1]) < int(limits[2])


def test_images_that_the_files_name_have_this_version() -> None:
    files = [*DOCKERFILES, *(DEPLOY / "kubernetes").glob("*.yaml"), DEPLOY / "README.md"]
    versions = {v for f in files for v in re.findall(r"paceline:(\d[\d.]*\d)", f.read_text())}
    assert versions == {__version__}


def test_compose_builds_an_image_that_exists_and_probes_a_route() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    built = services["paceline"]["build"]
    assert (ROOT / "docker" / built["context"] / built["dockerfile"]).is_file()
    paths = {route.path for route in build_app(None, ServerOptions()).routes}  # type: ignore[attr-defined]
    probed = re.search(r"8000(/\w+)", services["paceline"]["healthcheck"]["test"][-1])
    assert probed
    assert probed[1] in paths
    for volume in services["prometheus"]["volumes"]:
        assert (ROOT / "docker" / volume.split(":")[0]).is_file()


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in steps
    assert any(step.startswith("make docs") for step in steps)
    assert any("python -m build" in step for step in steps)
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    tested = workflow["jobs"]["check-and-test"]["strategy"]["matrix"]["python"]
    assert [supported[0], supported[-1]] == tested
