"""The manifests of deploy/kubernetes: Kubernetes' own schemas where kubernetes-validate is installed, and what no
schema knows: that paths, ports, metrics and times are those of the server."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import graft
from graft.cli.app import app
from graft.cli.generate.serve_sources import options_of
from graft.serve.app import ROUTES
from graft.serve.metrics import Metrics
from graft.serve.options import options_from
from graft.serve.run import CLOSING
from graft.serve.wire import EngineLoad

FOLDER = Path(graft.__file__).parents[2] / "deploy" / "kubernetes"
LISTED = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
COMMAND = get_command(app).commands["serve"]
SPARE = 5  # seconds for the process to end


def read(name):
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def pod():
    return read("deployment.yaml")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    (found,) = pod["containers"]
    return found


@pytest.fixture
def options():
    found = options_of(COMMAND, yaml.safe_load(read("configmap.yaml")["data"]["serve.yaml"]), "serve.yaml")
    found.pop("replicas")
    return options_from(found)


def test_kustomize_has_all_manifests():
    assert {*LISTED, "kustomization.yaml", "prometheus-adapter.yaml"} == {one.name for one in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", LISTED)
def test_kubernetes_knows_every_field(name, version):
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    schemas.validate(read(name), version, strict=True)


def test_the_schemas_find_a_field_that_is_none():
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wrong = copy.deepcopy(read("deployment.yaml"))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.37", strict=True)


def test_probes_ask_what_the_server_answers(container, options):
    asked = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    served = {path for method, path, _ in ROUTES if method == "GET"}
    assert {one["path"] for one in asked.values()} <= served
    assert (asked["readinessProbe"]["path"], asked["livenessProbe"]["path"]) == ("/ready", "/health")
    (port,) = container["ports"]
    assert {one["port"] for one in asked.values()} == {port["name"]}
    assert port["containerPort"] == options.port and options.host == "0.0.0.0"


def test_a_pod_has_the_time_to_drain(pod, container, options):
    """preStop counts: it is within the grace period."""
    _, before = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= int(before) + options.drain_timeout + CLOSING + SPARE
    probe = container["readinessProbe"]
    assert int(before) > probe["periodSeconds"] * probe["failureThreshold"]
    assert read("deployment.yaml")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_gpus_are_asked_for_as_many_as_the_model_needs(container, options):
    asked = container["resources"]
    gpus = {asked[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")}
    assert gpus == {options.load.tensor_parallel or 1}


def test_pods_are_scaled_by_metrics_that_the_server_has():
    shown = Metrics().text("m", EngineLoad(), 0)
    rules = {one["name"]["as"]: one for one in read("prometheus-adapter.yaml")["rules"]["custom"]}
    asked = [one["pods"]["metric"]["name"] for one in read("hpa.yaml")["spec"]["metrics"]]
    assert asked and set(asked) == set(rules)
    for rule in rules.values():
        (series,) = set(re.findall(r'__name__="([^"]+)"', rule["seriesQuery"] + rule["metricsQuery"]))
        assert f"# TYPE {series} gauge" in shown


def test_all_of_it_is_one_application(pod):
    labels = read("deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    deployment = read("deployment.yaml")
    assert deployment["spec"]["selector"]["matchLabels"] == labels == read("service.yaml")["spec"]["selector"]
    assert read("pdb.yaml")["spec"]["selector"]["matchLabels"] == labels
    target = read("hpa.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == volumes
    assert {"configMap": {"name": read("configmap.yaml")["metadata"]["name"]}, "name": "config"} in pod["volumes"]


def test_the_service_does_not_set_options_of_the_server(pod):
    """GRAFT_SERVE_PORT=tcp://… would be refused as a port."""
    assert read("service.yaml")["metadata"]["name"] != "graft-serve" or not pod["enableServiceLinks"]
    assert pod["enableServiceLinks"] is False


def test_the_image_runs_as_the_user_that_it_has(pod):
    image = (FOLDER.parents[1] / "Dockerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']}" in image and '"graft", "serve"' in image
