"""The files in `deploy` and the page about production: what they name exists, and a drain fits in the time to stop."""

import argparse
import configparser
import re
from pathlib import Path

import pytest
import yaml

from vllm_mp.cli import serve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs/operating/production.md"
_FOREIGN = {"--build", "--build-arg", "--cpus", "--from-literal", "--gpus", "--init", "--ready", "--rm", "--slowdown"}
"""Flags of other programs than `vllm-mp serve`."""


@pytest.fixture(scope="module")
def server_parser():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser


def deployed_texts() -> dict[str, str]:
    """Return the texts that name flags of the server, by file."""
    names = ("compose.yaml", "kubernetes.yaml", "nginx.conf", "serve.env.example", "vllm-mp.service")
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    entry = "\n".join(re.findall(r"(?m)^(?:ENTRYPOINT|CMD) .*|^# .*docker (?:build|run) .*", dockerfile))
    return {name: (DEPLOY / name).read_text() for name in names} | {PAGE.name: PAGE.read_text(), "Dockerfile": entry}


def known_options() -> set[str]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return {"--help-all", *(flag for action in parser._actions for flag in action.option_strings)}


def services() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def pod() -> dict:
    deployment, *_ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment["spec"]["template"]["spec"]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(DEPLOY / "vllm-mp.service")
    return parser["Service"]


def test_every_flag_that_the_files_and_the_page_name_is_one_of_the_server():
    for name, text in deployed_texts().items():
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - _FOREIGN
        assert flags <= known_options(), f"{name} names flags that do not exist"


def test_arguments_that_the_files_pass_are_valid(server_parser):
    compose = [argument.replace("${MODEL:-smollm2-135m-instruct}", "M") for argument in services()["server"]["command"]]
    [options] = re.findall(r"(?m)^OPTIONS=(.*)$", (DEPLOY / "serve.env.example").read_text())
    for arguments in (compose, pod()["containers"][0]["args"], ["M", *options.split()]):
        serve.ServerOptions.from_cli_args(server_parser.parse_args(arguments))


def test_service_managers_wait_longer_than_the_drain(server_parser):
    default = server_parser.get_default("drain_timeout")
    assert int(unit()["TimeoutStopSec"]) > default
    server = services()["server"]
    assert int(server["stop_grace_period"].rstrip("s")) > server_parser.parse_args(server["command"]).drain_timeout
    container = pod()["containers"][0]
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = server_parser.parse_args(container["args"]).drain_timeout
    assert pod()["terminationGracePeriodSeconds"] > int(seconds) + drain


def test_systemd_signals_the_server_alone_and_lets_it_replace_a_core_that_was_killed():
    service = unit()
    assert service["KillMode"] == "mixed"
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "on-failure"


def test_probes_ask_health_for_liveness_and_ready_for_traffic(server_parser):
    container = pod()["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    readiness = container["readinessProbe"]
    assert readiness["httpGet"]["path"] == "/ready"
    assert readiness["timeoutSeconds"] > server_parser.get_default("ready_timeout")
    # The service has left the pod out before it refuses requests.
    assert int(container["lifecycle"]["preStop"]["exec"]["command"][1]) >= readiness["periodSeconds"]


def test_pods_are_scraped_at_the_port_that_needs_no_key(server_parser):
    container = pod()["containers"][0]
    port = server_parser.parse_args(container["args"]).metrics_port
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    deployment, _, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    template = deployment["spec"]["template"]["metadata"]
    assert template["annotations"]["prometheus.io/port"] == str(port) == str(ports["metrics"])
    assert [each["targetPort"] for each in service["spec"]["ports"]] == ["http"]
    monitor = yaml.safe_load((DEPLOY / "podmonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]


@pytest.mark.extended
def test_schemas_of_kubernetes_accept_the_objects():
    import kubernetes_validate

    for kubernetes_object in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(kubernetes_object, "1.37", strict=True)
        kubernetes_object["spec"]["unknown"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(kubernetes_object, "1.37", strict=True)


def alerts() -> list[dict]:
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return group["rules"]


def test_alerts_have_what_prometheus_expects_and_name_metrics_that_exist():
    listed = set(re.findall(r"`(vllm(?:_mp)?:\w+)`", (ROOT / "docs/operating/metrics.md").read_text()))
    for rule in alerts():
        required = {"alert", "expr", "labels", "annotations"}
        assert required <= rule.keys() <= required | {"for"}
        named = re.findall(r"\bvllm(?:_mp)?:\w+", rule["expr"])
        assert named or rule["alert"] == "ServerDown"
        assert {re.sub("_(?:total|bucket)$", "", name) for name in named} <= listed
        options = re.findall(r"--[a-z-]+", rule["annotations"]["description"])
        assert set(options) <= known_options()
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    assert yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


@pytest.mark.extended
def test_expressions_of_the_alerts_are_promql():
    import promql_parser

    for rule in alerts():
        promql_parser.parse(rule["expr"])
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("rate(up[5m]")


def test_compose_mounts_files_that_exist():
    mounts = [volume.split(":")[0] for service in services().values() for volume in service["volumes"]]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert "./prometheus.yml" in files
    assert [file for file in files if not (DEPLOY / file).exists()] == []
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/vllm_mp.yaml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services()["grafana"]["volumes"]


def test_prometheus_scrapes_the_server_with_its_key():
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/api-key"
    assert "--api-key-file=/run/secrets/api-key" in services()["server"]["command"]
    assert all("api-key" in services()[name]["secrets"] for name in ("server", "prometheus"))
