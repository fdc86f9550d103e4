"""What a Dockerfile says, without Docker: its stages and instructions, and what the image of a stage runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.compose_file import substitute

KNOWN = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DockerfileError(Exception):
    """The file has an instruction or a form that is not known here."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. `options` are those like `--from=wheel`; `text` is the rest, continued lines joined."""

    name: str
    text: str
    options: tuple[tuple[str, str], ...]

    def option(self, name: str) -> list[str]:
        return [value for key, value in self.options if key == name]


@dataclass(frozen=True)
class Stage:
    name: str
    base: str  # the name of a stage, or of an image
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Image:
    """What a container of an image gets when nothing else is said. `owned`: folders that belong to its user."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    user: tuple[int, int] = (0, 0)
    workdir: str = "/"
    owned: tuple[str, ...] = ()
    stop_signal: str = "SIGTERM"
    exposed: tuple[int, ...] = ()


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    while lines:
        line = lines.pop(0)
        while line.rstrip().endswith("\\"):
            line = line.rstrip()[:-1] + " " + lines.pop(0).strip()
        name, _, rest = line.strip().partition(" ")
        options = []
        while match := re.match(r"--([a-z]+)=(\S+)\s+", rest):
            options.append((match[1], match[2]))
            rest = rest[match.end() :]
        if name not in KNOWN or not rest.strip():
            raise DockerfileError(f"unknown instruction {line.strip()!r}")
        found.append(Instruction(name, rest.strip(), tuple(options)))
    return found


def stages(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """The stages in order, by name; `arguments` are build arguments. Raises DockerfileError."""
    values: dict[str, str] = {}
    found: dict[str, Stage] = {}
    name, base, body = "", "", list[Instruction]()
    for instruction in _instructions(text):
        if instruction.name == "ARG" and not name:
            argument, _, default = instruction.text.partition("=")
            values[argument] = (arguments or {}).get(argument, substitute(default, values))
        elif instruction.name == "FROM":
            if name:
                found[name] = Stage(name, base, tuple(body))
            match = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", instruction.text)
            if match is None:
                raise DockerfileError(f"FROM {instruction.text}: every stage needs a name")
            base, name, body = substitute(match[1], values), match[2], []
        elif not name:
            raise DockerfileError(f"{instruction.name} before FROM")
        else:
            body.append(instruction)
    found[name] = Stage(name, base, tuple(body))
    return found


def _exec_form(instruction: Instruction) -> tuple[str, ...]:
    try:
        words = json.loads(instruction.text)
    except ValueError:
        raise DockerfileError(f"{instruction.name} must have the form of a JSON list") from None
    return tuple(words)


def image(text: str, target: str, arguments: Mapping[str, str] | None = None) -> Image:
    """What the image of the stage `target` runs. Raises DockerfileError."""
    all_stages = stages(text, arguments)
    chain = [all_stages[target]]
    while chain[-1].base in all_stages:
        chain.append(all_stages[chain[-1].base])
    environment, variables = {"PATH": BASE_PATH}, dict[str, str]()
    entrypoint, command, owned, exposed = (), (), list[str](), list[int]()
    user, workdir, stop_signal = (0, 0), "/", "SIGTERM"
    for instruction in (each for stage in reversed(chain) for each in stage.instructions):
        filled = substitute(instruction.text, {**variables, **environment}) if instruction.name == "ENV" else ""
        if instruction.name == "ARG":
            name, _, default = instruction.text.partition("=")
            variables[name] = (arguments or {}).get(name, default)
        elif instruction.name == "ENV":
            environment |= dict(each.partition("=")[::2] for each in shlex.split(filled))
        elif instruction.name == "USER":
            uid, _, gid = instruction.text.partition(":")
            user = (int(uid), int(gid))
        elif instruction.name == "WORKDIR":
            workdir = instruction.text
        elif instruction.name == "ENTRYPOINT":
            entrypoint = _exec_form(instruction)
        elif instruction.name == "CMD":
            command = _exec_form(instruction)
        elif instruction.name == "STOPSIGNAL":
            stop_signal = instruction.text
        elif instruction.name == "EXPOSE":
            exposed += [int(port) for port in instruction.text.split()]
        elif instruction.name == "RUN":
            if made := re.search(r"install --directory --owner=\w+ --group=\w+ ([^&]+)", instruction.text):
                owned += made[1].split()
            if user_made := re.search(r"useradd [^&]*--create-home (\w+)", instruction.text):
                owned.insert(0, f"/home/{user_made[1]}")
    return Image(entrypoint, command, environment, user, workdir, tuple(owned), stop_signal, tuple(exposed))


def read_image(file: Path, target: str, arguments: Mapping[str, str] | None = None) -> Image:
    return image(file.read_text(encoding="utf-8"), target, arguments)
