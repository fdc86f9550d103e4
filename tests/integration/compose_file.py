"""Compose files as Docker Compose reads them: variables filled in, overlays merged, every value understood.

    project = load([Path("deploy/docker-compose.yml")], {"ROUTER_PORT": "8000"})
    project.services["router"].environment["BATON_HOST"]

A key that this reader does not know is an error, so that nothing stands in a compose file that no test looks at.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class ComposeError(Exception):
    """The files say something that Docker Compose refuses, or that this reader does not know."""


# -- variables -----------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME:+other}` and `${NAME:?message}` filled in, also
    without the colon and one within another; `$$` is a dollar sign. Raises ComposeError."""
    found, position = "", 0
    while position < len(text):
        if text[position] != "$":
            found += text[position]
            position += 1
        elif text[position : position + 2] == "$$":
            found += "$"
            position += 2
        elif text[position : position + 2] == "${":
            end = _closing(text, position + 2)
            found += _expand(text[position + 2 : end], variables)
            position = end + 1
        else:
            name = _NAME.match(text, position + 1)
            if name is None:
                raise ComposeError(f"invalid use of $ in {text!r}")
            found += variables.get(name[0], "")
            position = name.end()
    return found


def _closing(text: str, start: int) -> int:
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{" and text[position - 1] == "$":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    raise ComposeError(f"no closing brace in {text!r}")


def _expand(inner: str, variables: Mapping[str, str]) -> str:
    name = _NAME.match(inner)
    rest = inner[name.end() :] if name else inner
    operator = re.match(r":?[-+?]", rest)
    if name is None or (rest and operator is None):
        raise ComposeError(f"invalid variable ${{{inner}}}")
    value = variables.get(name[0])
    if operator is None:
        return value or ""
    there = bool(value) if operator[0].startswith(":") else value is not None
    other = rest[operator.end() :]
    kind = operator[0][-1]
    if kind == "+":
        return substitute(other, variables) if there else ""
    if there:
        return value or ""
    if kind == "?":
        raise ComposeError(f"required variable {name[0]} is missing: {substitute(other, variables)}")
    return substitute(other, variables)


def variables_in(text: str) -> dict[str, set[str]]:
    """Every variable of a file's text, with the defaults that are given for it ("" for none)."""
    found: dict[str, set[str]] = {}
    for match in re.finditer(r"(?<!\$)\$(?:(\w+)|\{(\w+)(?::?([-+?])((?:[^{}]|\$\{[^}]*\})*))?\})", text):
        name, default = match[1] or match[2], match[4] if match[3] == "-" else ""
        found.setdefault(name, set()).add(default or "")
        if match[4]:
            for inner, defaults in variables_in(match[4]).items():
                found.setdefault(inner, set()).update(defaults)
    return found


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reset:
    """`!reset`: the value of the files before is taken away."""


@dataclass(frozen=True)
class _Override:
    """`!override`: the value replaces that of the files before as a whole."""

    value: Any


class _Loader(yaml.SafeLoader):
    pass


def _construct(loader: _Loader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


_Loader.add_constructor("!reset", lambda loader, node: _Reset())
_Loader.add_constructor("!override", lambda loader, node: _Override(_construct(loader, node)))

_WHOLE = {("command",), ("entrypoint",), ("healthcheck", "test")}  # lists that replace what was there


def _fill(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return substitute(value, variables)
    if isinstance(value, dict):
        return {key: _fill(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_fill(each, variables) for each in value]
    if isinstance(value, _Override):
        return _Override(_fill(value.value, variables))
    return value


def _merge(below: Any, above: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(above, _Override):
        return above.value
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            if isinstance(value, _Reset):
                merged.pop(key, None)
            else:
                merged[key] = _merge(merged.get(key), value, (*path, key))
        return merged
    # Paths within a service begin after ("services", its name).
    if isinstance(below, list) and isinstance(above, list) and path[2:] not in _WHOLE:
        return [*below, *(each for each in above if each not in below)]
    return above


# -- values --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A bind of a host's folder or file (`source` is absolute), or a named volume."""

    source: str
    target: str
    read_only: bool
    named: bool


@dataclass(frozen=True)
class Port:
    """TCP `target` of the container at `address`:`published` of the host."""

    address: str
    published: int
    target: int


@dataclass(frozen=True)
class HealthCheck:
    test: tuple[str, ...]  # without CMD; a CMD-SHELL is `sh -c`
    interval_s: float
    timeout_s: float
    retries: int
    start_period_s: float
    start_interval_s: float


@dataclass(frozen=True)
class Dependency:
    condition: str
    required: bool


@dataclass(frozen=True)
class Config:
    """A file that compose puts into the container."""

    target: str
    content: str


@dataclass(frozen=True)
class Service:
    name: str
    image: str
    build: Mapping[str, Any]
    command: tuple[str, ...] | None
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    configs: tuple[Config, ...]
    ports: tuple[Port, ...]
    health: HealthCheck | None
    depends_on: Mapping[str, Dependency]
    profiles: tuple[str, ...]
    restart: str
    stop_grace_s: float
    init: bool
    ulimits: Mapping[str, tuple[int, int]]
    shm_bytes: int
    cap_drop: tuple[str, ...]
    security_opt: tuple[str, ...]
    host_network: bool
    host_ipc: bool
    host_pid: bool
    cpus: float
    memory_bytes: int
    devices: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Project:
    name: str
    services: Mapping[str, Service]
    volumes: tuple[str, ...] = field(default=())

    def active(self, profiles: Sequence[str] = ()) -> dict[str, Service]:
        """The services that `--profile` switches on, and those without a profile."""
        return {
            name: service
            for name, service in self.services.items()
            if not service.profiles or set(service.profiles) & set(profiles)
        }


_SERVICE_KEYS = {
    "image", "build", "command", "environment", "env_file", "volumes", "configs", "ports", "healthcheck", "depends_on",
    "profiles", "restart", "stop_grace_period", "init", "ulimits", "shm_size", "cap_drop", "security_opt",
    "network_mode", "ipc", "pid", "cpus", "mem_limit", "deploy", "logging",
}  # fmt: skip
_BUILD_KEYS = {"context", "dockerfile", "target", "args"}
_CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """Of `1m30s`. Raises ComposeError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ComposeError(f"{text!r} is no duration like 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def size_bytes(value: Any) -> int:
    """Of `512m` or `1gb`. Raises ComposeError."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", str(value).lower())
    if match is None:
        raise ComposeError(f"{value!r} is no size like 512m")
    return int(match[1]) << 10 * " kmgt".index(match[2] or " ")


def _known(where: str, found: Mapping[str, Any], known: set[str]) -> None:
    if unknown := set(found) - known:
        raise ComposeError(f"{where}: unknown {', '.join(sorted(unknown))}")


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ComposeError(f"{where}: {value!r} must be true or false")
    return value


def _words(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(shlex.split(value)) if isinstance(value, str) else tuple(str(each) for each in value)


def _environment(where: str, value: Any) -> dict[str, str]:
    if isinstance(value, list):
        value = dict(each.partition("=")[::2] for each in value)
    for name, each in value.items():
        if isinstance(each, bool) or each is None:
            raise ComposeError(f"{where}: the variable {name} must be a text or a number")
    return {name: str(each) for name, each in value.items()}


def _env_files(where: str, value: Any, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in value:
        _known(f"{where}: env_file", entry, {"path", "required"})
        file = folder / entry["path"]
        if not file.is_file():
            if _flag(f"{where}: required", entry.get("required", True)):
                raise ComposeError(f"{where}: env_file {file} does not exist")
            continue
        found |= read_env_file(file)
    return found


def read_env_file(file: Path) -> dict[str, str]:
    """The variables of lines NAME=value; comments and empty lines are left out."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))


def _mounts(where: str, value: Sequence[str], folder: Path, volumes: Sequence[str]) -> tuple[Mount, ...]:
    found: dict[str, Mount] = {}
    for text in value:
        source, target, *mode = text.split(":")
        if mode not in ([], ["ro"], ["rw"]) or not target.startswith("/"):
            raise ComposeError(f"{where}: volume {text!r} must have the form source:/target[:ro]")
        named = not source.startswith(("/", "."))
        if named and source not in volumes:
            raise ComposeError(f"{where}: volume {source!r} is not among the volumes of the file")
        place = source if named else str((folder / source).resolve())
        found[target] = Mount(place, target, mode == ["ro"], named)
    return tuple(found.values())


def _ports(where: str, value: Sequence[Any]) -> tuple[Port, ...]:
    found = []
    for text in value:
        match = re.fullmatch(r"(\d+\.\d+\.\d+\.\d+):(\d+):(\d+)", str(text))
        if match is None:
            raise ComposeError(f"{where}: port {text!r} must have the form address:published:target")
        found.append(Port(match[1], int(match[2]), int(match[3])))
    return tuple(found)


def _health(where: str, value: Mapping[str, Any] | None) -> HealthCheck | None:
    if value is None:
        return None
    keys = {"test", "interval", "timeout", "retries", "start_period", "start_interval"}
    _known(f"{where}: healthcheck", value, keys)
    kind, *words = value["test"]
    if kind not in ("CMD", "CMD-SHELL") or not words:
        raise ComposeError(f"{where}: healthcheck.test must begin with CMD or CMD-SHELL")
    return HealthCheck(
        test=tuple(words) if kind == "CMD" else ("sh", "-c", *words),
        interval_s=seconds(value.get("interval", "30s")),
        timeout_s=seconds(value.get("timeout", "30s")),
        retries=int(value.get("retries", 3)),
        start_period_s=seconds(value.get("start_period", "0s")),
        start_interval_s=seconds(value.get("start_interval", "5s")),
    )


def _dependencies(where: str, value: Mapping[str, Any], services: Mapping[str, Any]) -> dict[str, Dependency]:
    found = {}
    for name, entry in value.items():
        _known(f"{where}: depends_on", entry, {"condition", "required"})
        if name not in services or entry["condition"] not in _CONDITIONS:
            raise ComposeError(f"{where}: depends_on {name}: no such service, or no such condition")
        if entry["condition"] == "service_healthy" and "healthcheck" not in services[name]:
            raise ComposeError(f"{where}: depends_on {name} being healthy, which has no health check")
        found[name] = Dependency(entry["condition"], _flag(where, entry.get("required", True)))
    return found


def _ulimits(value: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {
        name: (int(each["soft"]), int(each["hard"])) if isinstance(each, dict) else (int(each), int(each))
        for name, each in value.items()
    }


def _configs(where: str, value: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> tuple[Config, ...]:
    found = []
    for entry in value:
        _known(f"{where}: configs", entry, {"source", "target"})
        source = known.get(entry["source"])
        if source is None or set(source) != {"content"}:
            raise ComposeError(f"{where}: config {entry['source']!r} must be among the configs and have a content")
        found.append(Config(entry["target"], source["content"]))
    return tuple(found)


def _service(name: str, raw: Mapping[str, Any], content: Mapping[str, Any], folder: Path) -> Service:
    where = f"service {name}"
    _known(where, raw, _SERVICE_KEYS)
    build = raw.get("build", {})
    _known(f"{where}: build", build, _BUILD_KEYS)
    if raw.get("restart", "no") not in ("no", "always", "on-failure", "unless-stopped"):
        raise ComposeError(f"{where}: restart {raw['restart']!r}")
    for key in ("network_mode", "ipc", "pid"):
        if raw.get(key, "host") != "host":
            raise ComposeError(f"{where}: {key} {raw[key]!r} is not known here")
    if raw.get("network_mode") and raw.get("ports"):
        raise ComposeError(f"{where}: the network of the host publishes no ports")
    reserved = raw.get("deploy", {}).get("resources", {}).get("reservations", {})
    return Service(
        name=name,
        image=raw["image"],
        build={**build, **({"context": str((folder / build["context"]).resolve())} if build else {})},
        command=_words(raw.get("command")),
        environment={
            **_env_files(where, raw.get("env_file", []), folder),
            **_environment(where, raw.get("environment", {})),
        },
        mounts=_mounts(where, raw.get("volumes", []), folder, content.get("volumes", {})),
        configs=_configs(where, raw.get("configs", []), content.get("configs", {})),
        ports=_ports(where, raw.get("ports", [])),
        health=_health(where, raw.get("healthcheck")),
        depends_on=_dependencies(where, raw.get("depends_on", {}), content["services"]),
        profiles=tuple(raw.get("profiles", ())),
        restart=raw.get("restart", "no"),
        stop_grace_s=seconds(raw.get("stop_grace_period", "10s")),
        init=_flag(where, raw.get("init", False)),
        ulimits=_ulimits(raw.get("ulimits", {})),
        shm_bytes=size_bytes(raw.get("shm_size", "64m")),
        cap_drop=tuple(raw.get("cap_drop", ())),
        security_opt=tuple(raw.get("security_opt", ())),
        host_network="network_mode" in raw,
        host_ipc="ipc" in raw,
        host_pid="pid" in raw,
        cpus=float(raw.get("cpus", 0)),
        memory_bytes=size_bytes(raw.get("mem_limit", 0)),
        devices=tuple(reserved.get("devices", ())),
    )


def parse(texts: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Project:
    """The project of the files' texts, the first below the others; relative paths begin at `folder`.

    Raises ComposeError.
    """
    content: Any = {}
    for text in texts:
        content = _merge(content, _fill(yaml.load(text, _Loader), variables))
    _known("compose file", {k: v for k, v in content.items() if not k.startswith("x-")},
           {"name", "services", "configs", "volumes"})  # fmt: skip
    services = {name: _service(name, raw, content, folder) for name, raw in content["services"].items()}
    return Project(content["name"], services, tuple(content.get("volumes", {})))


def load(files: Sequence[Path], variables: Mapping[str, str] | None = None) -> Project:
    """The project of compose files as `docker compose -f … -f …` sees it, with no `.env` but these variables."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return parse(texts, files[0].resolve().parent, variables or {})
