"""What stands in the compose files is right, also where no container is started with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli import health
from cli.flags_doc import ROLES
from rpc.settings import SettingsError
from tests.integration.compose_file import (
    ComposeError,
    Project,
    Service,
    load,
    parse,
    read_env_file,
    substitute,
    variables_in,
)
from tests.integration.dockerfile import read_image
from tests.unit.engine.tiny_models import tiny_model

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
BASE = DEPLOY / "docker-compose.yml"
GPU = DEPLOY / "docker-compose.gpu.yml"
HOSTS = DEPLOY / "docker-compose.hosts.yml"
HOST = {"HOST_ADDRESS": "10.0.0.1"}
ROLE_OF = {"router": "R", "prefill": "P", "decode": "D"}


def role(service: Service) -> str:
    """The role that a service's command starts; empty for others."""
    return service.command[0] if service.command and service.command[0] in ROLE_OF else ""


def settings(service: Service) -> Any:
    """The settings that the process gets from its environment. Raises SettingsError."""
    environment = {**service.environment, "BATON_MODEL": str(tiny_model("llama"))}
    return ROLES[ROLE_OF[role(service)]].parse([], environment)


def problems(project: Project) -> list[str]:
    """What does not go together in a project; empty when all does."""
    found: list[str] = []
    processes = {name: service for name, service in project.services.items() if role(service)}
    at: dict[str, Any] = {}
    for name, service in processes.items():
        known = {option.variable for option in ROLES[ROLE_OF[role(service)]].options()}
        unknown = {variable for variable in service.environment if variable.startswith("BATON_")} - known
        if unknown:
            found.append(f"{name}: {', '.join(unknown)} is no setting of its role")
        try:
            at[name] = settings(service)
        except SettingsError as error:
            found.append(f"{name}: {error}")
    if found:
        return found
    for name, service in processes.items():
        found += _about_process(name, service, at[name])
    wanted = {f"{name}:{at[name].port if role(service) == 'router' else at[name].metrics_port}"
              for name, service in processes.items()}  # fmt: skip
    [targets] = project.services["prometheus"].configs
    if set(yaml.safe_load(targets.content)[0]["targets"]) != wanted:
        found.append(f"prometheus scrapes {targets.content!r} and not {wanted}")
    for kind in ("prefill", "decode"):
        there = {f"{name}:{at[name].port}" for name, service in processes.items() if role(service) == kind}
        if set(getattr(at["router"], kind)) != there:
            found.append(f"the router is told {getattr(at['router'], kind)} and not {there}")
    return found


def _about_process(name: str, service: Service, values: Any) -> list[str]:
    found = []
    if values.drain_grace_secs >= values.drain_timeout_secs or values.drain_timeout_secs >= service.stop_grace_s:
        found.append(f"{name}: grace, drain and stop are out of order")
    if values.advertised_host != name:
        found.append(f"{name}: advertises {values.advertised_host}")
    check = service.health
    if check is None or check.test != ("baton", "health", role(service)):
        found.append(f"{name}: asks for the health of another role")
    elif health.address_of(role(service), service.environment)[1] not in (values.port, values.metrics_port):
        found.append(f"{name}: its health is asked at another port")
    mount = next((mount for mount in service.mounts if mount.target == "/models"), None)
    if mount is None or not mount.read_only or not service.environment["BATON_MODEL"].startswith("/models/"):
        found.append(f"{name}: the model is not where it is looked for")
    listening = {values.port, values.grpc_port} if role(service) == "router" else set()
    if {port.target for port in service.ports} != listening:
        found.append(f"{name}: other ports are published than it listens on")
    if service.restart != "unless-stopped" or not service.init:
        found.append(f"{name}: without init or restart")
    return found


def test_compose_when_defaults_then_everything_goes_together() -> None:
    assert problems(load([BASE])) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("command: [decode]", "command: [prefill]"),
        ("test: [CMD, baton, health, router]", "test: [CMD, baton, health, decode]"),
        ("BATON_ADVERTISE_HOST: decode-1", "BATON_ADVERTISE_HOST: decode-0"),
        ("prefill-0:50051,prefill-1:50051", "prefill-0:50051,prefill-1:50052"),
        ("decode-0:50052,decode-1:50052", "decode-0:50052"),
        ("${ROUTER_GRPC_PORT:-8001}:8001", "${ROUTER_GRPC_PORT:-8001}:8002"),
        ("- ${MODEL_VOLUME:-models}:/models:ro", "- ${MODEL_VOLUME:-models}:/model:ro"),
        ("BATON_DTYPE: ${DTYPE:-auto}", "BATON_DTYPES: ${DTYPE:-auto}"),
        ("BATON_THREADS: ${PREFILL_THREADS:-none}", "BATON_THREADS: ${PREFILL_THREADS:-}"),
        ("stop_grace_period: ${STOP_GRACE_PERIOD:-150s}", "stop_grace_period: ${STOP_GRACE_PERIOD:-10s}"),
        ("          - decode-1:9102\n", "          - decode-1:9101\n"),
        ("  init: true\n", ""),
    ],
)
def test_compose_when_a_line_is_wrong_then_it_is_noticed(line: str, wrong: str) -> None:
    text = BASE.read_text(encoding="utf-8")
    assert line in text
    assert problems(parse([text.replace(line, wrong)], DEPLOY, {}))


@pytest.mark.parametrize("wrong", ["    restarts: always\n", "    tmpfs: /x\n"])
def test_compose_when_a_key_is_unknown_then_it_is_refused(wrong: str) -> None:
    text = BASE.read_text(encoding="utf-8").replace("  grafana:\n", f"  grafana:\n{wrong}", 1)
    with pytest.raises(ComposeError):
        parse([text], DEPLOY, {})


def test_compose_when_files_are_mounted_then_they_exist_and_prometheus_has_all_it_reads() -> None:
    project = load([BASE])
    for service in project.services.values():
        assert all(Path(mount.source).exists() for mount in service.mounts if not mount.named), service.name
    mounts = {mount.target: mount.source for mount in project.services["prometheus"].mounts if not mount.named}
    configured = yaml.safe_load(Path(mounts["/etc/prometheus/prometheus.yml"]).read_text())
    assert {f"/etc/prometheus/{name}" for name in configured["rule_files"]} <= set(mounts)
    [place] = [config.target for config in project.services["prometheus"].configs]
    patterns = configured["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert any(Path(place).match(f"/etc/prometheus/{pattern}") for pattern in patterns)
    used = {mount.source for service in project.services.values() for mount in service.mounts if mount.named}
    assert used == set(project.volumes), "a volume that nobody mounts"


def test_compose_when_grafana_starts_then_it_finds_its_data_source_and_dashboards() -> None:
    grafana = load([BASE]).services["grafana"]
    provisioning, boards = "/etc/grafana/provisioning", "/var/lib/grafana/dashboards"
    mounts = {mount.target: Path(mount.source) for mount in grafana.mounts if not mount.named}
    assert set(mounts) == {provisioning, boards}
    assert len(list(mounts[boards].glob("*.json"))) >= 5
    [source_file] = (mounts[provisioning] / "datasources").glob("*.yml")
    url = yaml.safe_load(source_file.read_text())["datasources"][0]["url"]
    assert substitute(url, grafana.environment) == "http://prometheus:9090"
    [board_file] = (mounts[provisioning] / "dashboards").glob("*.yml")
    assert yaml.safe_load(board_file.read_text())["providers"][0]["options"]["path"] == boards


def test_env_example_when_compared_then_it_has_every_variable_with_the_default_of_the_files() -> None:
    used: dict[str, set[str]] = {}
    for file in (BASE, GPU, HOSTS):
        for name, defaults in variables_in(file.read_text(encoding="utf-8")).items():
            used.setdefault(name, set()).update(defaults)
    example = DEPLOY / ".env.example"
    given = read_env_file(example)
    commented = set(re.findall(r"^# ([A-Z][A-Z0-9_]+)=", example.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(given) | commented == set(used)
    assert not set(given) & commented
    for name, value in given.items():
        assert {substitute(default, given) for default in used[name] if default} == {substitute(value, given)}, name
    # As a file of variables it changes nothing.
    filled = {name: substitute(value, given) for name, value in given.items()}
    assert load([BASE], filled) == load([BASE])
    assert load([BASE, GPU], filled) == load([BASE, GPU])


def test_env_example_when_a_variable_is_set_then_it_reaches_the_process() -> None:
    variables = {"PREFILL_THREADS": "3", "DECODE_KV_CACHE_MEMORY": "2GiB", "MAX_MODEL_LEN": "4096",
                 "DECODE_CPUS": "2.5", "PREFILL_MEMORY": "8gb", "ROUTER_POLICY": "least_load", "ROUTER_PORT": "80",
                 "ROUTER_API_KEY": "k", "MODEL_NAME": "m", "MODEL_VOLUME": "/srv/models"}  # fmt: skip
    services = load([BASE], variables).services
    assert settings(services["prefill-1"]).threads == 3
    assert settings(services["decode-0"]).threads is None
    assert settings(services["decode-0"]).kv_cache_memory_bytes == 2 << 30
    assert settings(services["decode-1"]).max_model_len == 4096
    assert (services["decode-1"].cpus, services["prefill-0"].memory_bytes) == (2.5, 8 << 30)
    assert (settings(services["router"]).policy, settings(services["router"]).api_key) == ("least_load", "k")
    assert services["router"].ports[0].published == 80
    assert services["model"].command == ("model", "prepare", "--quiet", "/models/m")
    assert [mount.source for mount in services["router"].mounts] == ["/srv/models"]


def test_baton_env_when_there_then_its_settings_reach_every_process_and_the_file_s_own_win(tmp_path: Path) -> None:
    (tmp_path / "baton.env").write_text("# more\nBATON_KV_LEASE_SECONDS=60\nBATON_HOST=127.0.0.1\n")
    services = parse([BASE.read_text(encoding="utf-8")], tmp_path, {}).services
    for name in ("router", "prefill-0", "decode-1"):
        assert services[name].environment["BATON_KV_LEASE_SECONDS"] == "60"
        assert services[name].environment["BATON_HOST"] == "0.0.0.0"


def test_images_when_named_then_with_a_version_and_no_registry() -> None:
    for service in load([BASE]).services.values():
        repository, _, tag = service.image.rpartition(":")
        assert tag not in ("", "latest")
        assert "." not in repository and repository.count("/") <= 1


@pytest.mark.parametrize("files", [[BASE], [BASE, GPU], [BASE, HOSTS], [BASE, HOSTS, GPU]])
def test_images_when_built_then_each_by_one_service_that_starts_with_those_that_run_it(files: list[Path]) -> None:
    """Docker refuses two builds of a tag at the same time, as they happen where it is not there yet."""
    project = load(files, HOST)
    builders = [service for service in project.services.values() if service.build]
    assert len({service.image for service in builders}) == len(builders)
    for profile in ("prefill", "prefill-1", "decode", "decode-1", "router"):
        active = project.active((profile,))
        built = {service.image for service in active.values() if service.build}
        assert {service.image for service in active.values() if role(service)} <= built


# -- overlays ------------------------------------------------------------------------------------------------------


def test_gpu_when_laid_over_then_servers_have_devices_and_see_each_other_s_memory() -> None:
    services = load([BASE, GPU], {"DECODE_1_GPU": "3"}).services
    assert services["model"].build["target"] == "cuda"
    assert read_image(DEPLOY / "Dockerfile", "cuda").entrypoint == ("baton",)
    for name, service in services.items():
        assert (service.image == "baton:cuda") == bool(service.name == "model" or role(service))
        if role(service) in ("prefill", "decode"):
            [device] = service.devices
            assert device["device_ids"] == ["3" if name == "decode-1" else "0"]
            assert device["capabilities"] == ["gpu"]
            assert service.host_ipc and service.host_pid
            assert settings(service).device == "cuda"
            # Four of them fit beside each other.
            assert 4 * settings(service).gpu_memory_utilization < 0.9
        else:
            assert not service.devices
    assert problems(load([BASE, GPU])) == []


def test_hosts_when_the_address_is_missing_then_the_variable_is_named() -> None:
    with pytest.raises(ComposeError, match="HOST_ADDRESS"):
        load([BASE, HOSTS], {})


@pytest.mark.parametrize(
    ("profiles", "names"),
    [
        (("prefill",), {"model", "prefill-0"}),
        (("decode",), {"model", "decode-0"}),
        (("prefill", "prefill-1", "decode-1"), {"model", "prefill-0", "prefill-1", "decode-1"}),
        (("router",), {"model", "router", "prometheus", "grafana"}),
    ],
)
def test_hosts_when_a_profile_is_chosen_then_its_services_start(profiles: tuple[str, ...], names: set[str]) -> None:
    active = load([BASE, HOSTS], HOST).active(profiles)
    assert set(active) == names
    for service in active.values():
        missing = {name for name, each in service.depends_on.items() if name not in active and each.required}
        assert not missing, f"{service.name} cannot start without {missing}"


def test_hosts_when_laid_over_then_processes_listen_on_and_advertise_the_host_s_address() -> None:
    services = load([BASE, HOSTS], HOST).services
    ports: list[int] = []
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        values = settings(services[name])
        assert services[name].host_network
        assert (values.host, values.advertised_host) == ("10.0.0.1", "10.0.0.1")
        assert health.address_of(role(services[name]), services[name].environment) == ("10.0.0.1", values.metrics_port)
        ports += [values.port, values.cache_store_port, values.metrics_port]
    assert len(set(ports)) == len(ports), "two servers of one host want the same port"
    router = services["router"]
    assert router.host_network and not router.ports
    variables = {**HOST, "ADVERTISE_ADDRESS": "a.example", "ROUTER_PORT": "80", "ROUTER_LISTEN_ADDRESS": "0.0.0.0",
                 "PREFILL_ADDRESSES": "10.0.0.2:50051,10.0.0.2:50151", "DECODE_ADDRESSES": "10.0.0.3:50052",
                 "SCRAPE_TARGETS": "10.0.0.1:80, 10.0.0.2:9101"}  # fmt: skip
    services = load([BASE, HOSTS], variables).services
    values = settings(services["router"])
    assert (values.host, values.port, values.advertised_host) == ("0.0.0.0", 80, "a.example")
    assert (values.prefill, values.decode) == (["10.0.0.2:50051", "10.0.0.2:50151"], ["10.0.0.3:50052"])
    assert settings(services["prefill-0"]).advertised_host == "a.example"
    [targets] = services["prometheus"].configs
    assert yaml.safe_load(targets.content) == [{"targets": ["10.0.0.1:80", "10.0.0.2:9101"]}]


def test_hosts_when_laid_over_with_gpus_then_both_hold() -> None:
    for files in ([BASE, HOSTS, GPU], [BASE, GPU, HOSTS]):
        service = load(files, HOST).services["decode-1"]
        values = settings(service)
        assert (values.device, values.host, values.port) == ("cuda", "10.0.0.1", 50152)
        assert service.host_network and service.host_ipc


# -- variables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$A-${A}-$$A", "1-1-$A"),
        ("${B:-x}${B-x}${N:-x}${N-x}", "x" + "" + "x" + "x"),
        ("${A:+y}${B:+y}${B+y}${N+y}", "yy"),
        ("${N:-${A}:2}", "1:2"),
        ("${N:+${A}}", ""),
        ("${A:?no}", "1"),
    ],
)
def test_substitute_when_filled_in_then_as_compose_does(text: str, filled: str) -> None:
    variables: Mapping[str, str] = {"A": "1", "B": ""}
    assert substitute(text, variables) == filled


@pytest.mark.parametrize("text", ["${A", "${A!x}", "$", "${N:?needed}", "${}"])
def test_substitute_when_it_cannot_then_refused(text: str) -> None:
    with pytest.raises(ComposeError):
        substitute(text, {"A": "1"})
