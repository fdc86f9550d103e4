"""Settings of a process: one typed model, read from command line, environment and a YAML file, in this
precedence.

A field `block_size` has the flag `--block-size`, the variable `BATON_BLOCK_SIZE` and the key `block-size` (or
`block_size`) in the file named by `--config`. Booleans are `--flag` and `--no-flag`; lists are repeated or
separated by commas; structured fields take JSON, or one part at a time (`--speculative-config.method ngram`).
A value that does not fit ends the process with status 2 and one line that names the flag, variable or key,
and the value.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rpc import faults

ENV_PREFIX = "BATON_"


@dataclass(frozen=True)
class Flag:
    """What the command line knows about a field beyond its type; stands in `Annotated[type, Flag(...)]`.

    `aliases` are further spellings with their dashes. A `secret` value is masked wherever settings are shown.
    With `split` False a list flag takes its value whole, commas included.
    """

    aliases: tuple[str, ...] = ()
    secret: bool = False
    split: bool = True
    metavar: str = ""


class SettingsError(Exception):
    """A setting that cannot be used; the text names it and its value."""


@dataclass(frozen=True)
class _Option:
    field: str
    shape: str  # bool, list, object, scalar
    optional: bool
    spec: Flag
    info: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()

    def default_text(self) -> str:
        if self.info.is_required():
            return "required"
        value = self.info.get_default(call_default_factory=True)
        if self.shape == "bool" and value is not None:
            return "on" if value else "off"
        if value is None or value in ("", (), [], {}):
            return "none"
        if isinstance(value, list | tuple):
            return ",".join(str(item) for item in value)
        return str(value)


def _shape(annotation: Any) -> tuple[str, bool]:
    """The shape of a field's value on the command line, and whether None is allowed."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = typing.get_args(annotation)
        rest = [part for part in parts if part is not type(None)]
        shape = _shape(rest[0])[0] if len(rest) == 1 else "scalar"
        return shape, len(rest) < len(parts)
    if origin is typing.Annotated:
        return _shape(typing.get_args(annotation)[0])
    if annotation is bool:
        return "bool", False
    if origin in (list, tuple, set, frozenset) or annotation in (list, tuple):
        return "list", False
    if origin is dict or annotation is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "object", False
    return "scalar", False


class Settings(BaseSettings):
    """Base of every settings model. Constructed directly, or from JSON, it reads neither environment nor
    files."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` reads the sources itself, because it has to name where a wrong value came from.
        return (init_settings,)

    @classmethod
    def options(cls) -> list[_Option]:
        found = []
        for name, info in cls.model_fields.items():
            shape, optional = _shape(info.annotation)
            spec = next((item for item in info.metadata if isinstance(item, Flag)), Flag())
            found.append(_Option(name, shape, optional, spec, info))
        return found

    @classmethod
    def load(
        cls,
        argv: Sequence[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        prog: str = "",
        description: str = "",
    ) -> Self:
        """The settings of this process. Ends it on `--help` (status 0) and on a wrong value (status 2, one
        line)."""
        argv = sys.argv[1:] if argv is None else argv
        prog = prog or Path(sys.argv[0]).name
        if any(arg in ("-h", "--help") for arg in argv):
            sys.stdout.write(cls.help_text(prog, description))
            raise SystemExit(0)
        if faults.mistake():
            _fail(prog, faults.mistake())
        try:
            return cls.parse(argv, os.environ if environ is None else environ)
        except SettingsError as error:
            _fail(prog, str(error))

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Like `load`, but raises SettingsError in place of ending the process."""
        options = cls.options()
        cli, cli_origin = _from_argv(options, argv)
        config_path = cli.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        if config_path:
            _merge(values, origins, *_from_yaml(options, str(config_path)))
        _merge(values, origins, *_from_environ(options, environ))
        _merge(values, origins, cli, cli_origin)
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError(_explain(error, options, values, origins)) from _cause(error)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The settings that `to_json` wrote. Raises SettingsError naming an unknown key or a wrong value."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SettingsError(_explain(error, cls.options(), {}, {})) from None

    def to_json(self) -> str:
        return self.model_dump_json()

    def public_dict(self) -> dict[str, Any]:
        """Every setting by its flag's name, secrets masked: what `/server_info` shows."""
        values = self.model_dump(mode="json")
        for option in type(self).options():
            if option.spec.secret and values[option.field]:
                values[option.field] = "***"
        return values

    @classmethod
    def help_text(cls, prog: str, description: str = "") -> str:
        # What must be given comes first, so that nobody has to look for it.
        options = sorted(cls.options(), key=lambda option: not option.info.is_required())
        required = [f" {o.flag} {o.spec.metavar or _metavar(o)}" for o in options if o.info.is_required()]
        lines = [f"usage: {prog}{''.join(required)} [--config file.yaml] [--flag value ...]", ""]
        if description:
            lines += [description, ""]
        lines += [
            "Command line over environment over file. Lists are repeated or separated by commas.",
            "",
            "  -h, --help",
            "  --config PATH  (env BATON_CONFIG)",
            "      YAML file of settings; its keys are the flags without dashes in front",
        ]
        for option in options:
            names = ", ".join((*option.spec.aliases, option.flag))
            if option.shape == "bool":
                head = f"  {names}, --no-{option.field.replace('_', '-')}"
            else:
                head = f"  {names} {option.spec.metavar or _metavar(option)}"
            lines.append(f"{head}  (env {option.variable}, default: {option.default_text()})")
            if option.info.description:
                lines.append(f"      {option.info.description}")
        return "\n".join(lines) + "\n"


def _fail(prog: str, text: str) -> NoReturn:
    sys.stderr.write(f"{prog}: error: {text}\n")
    raise SystemExit(2)


def _metavar(option: _Option) -> str:
    args = typing.get_args(option.info.annotation)
    if typing.get_origin(option.info.annotation) is typing.Literal:
        return "{" + ",".join(str(arg) for arg in args) + "}"
    return option.field.rsplit("_", 1)[-1].upper()


def _merge(
    values: dict[str, Any],
    origins: dict[str, str],
    newer: Mapping[str, Any],
    newer_origins: Mapping[str, str],
) -> None:
    for field, value in newer.items():
        old = values.get(field)
        # Dotted parts of a structured flag refine what a lower source gave; anything else replaces it.
        if isinstance(value, _Parts) and isinstance(old, dict):
            value = {**old, **value}
        values[field] = dict(value) if isinstance(value, _Parts) else value
        origins[field] = newer_origins[field]


class _Parts(dict[str, Any]):
    """An object given part by part, as opposed to whole."""


def _scalar(text: str) -> Any:
    """The value of a dotted sub-key: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _convert(option: _Option, text: str, origin: str) -> Any:
    """`text` of a flag or variable in the shape that the model takes."""
    if option.optional and text.strip().lower() in ("none", "null"):
        return None
    if option.shape == "list":
        return [part.strip() for part in text.split(",") if part.strip()] if option.spec.split else [text]
    if option.shape == "object":
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{origin} {text!r}: not JSON ({error.msg})") from None
        if not isinstance(value, dict):
            raise SettingsError(f"{origin} {text!r}: must be a JSON object")
        return value
    return text


def _names(options: Sequence[_Option]) -> tuple[dict[str, _Option], dict[str, _Option]]:
    """Flags that take a value or stand alone, and the `--no-` forms of booleans."""
    positive: dict[str, _Option] = {}
    negative: dict[str, _Option] = {}
    for option in options:
        for name in (option.flag, *option.spec.aliases):
            positive[name] = option
            if option.shape == "bool" and name.startswith("--"):
                negative["--no-" + name[2:]] = option
    return positive, negative


def _suggest(name: str, known: Sequence[str]) -> str:
    bare = {_bare(each): each for each in known}  # what all of them begin with makes none more alike
    close = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=0.6)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    return name.lstrip("-").removeprefix("BATON_")


def _is_flag(arg: str) -> bool:
    return len(arg) > 1 and arg[0] == "-" and not (arg[1].isdigit() or arg[1] == ".")


def _from_argv(options: Sequence[_Option], argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    positive, negative = _names(options)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not _is_flag(arg):
            raise SettingsError(f"unexpected argument {arg!r}; settings are flags")
        name, equals, inline = arg.partition("=")
        name = name if not name.startswith("--") else "--" + name[2:].replace("_", "-")
        base, dot, sub = name.partition(".")
        if name == "--config":
            values["config"] = inline if equals else _next_value(name, rest)
            continue
        if name in negative and name not in positive:
            if equals:
                raise SettingsError(f"{name} takes no value, got {inline!r}")
            option = negative[name]
            values[option.field], origins[option.field] = False, name
            continue
        option_ = positive.get(base if dot else name)
        if option_ is None or (dot and option_.shape != "object"):
            raise SettingsError(f"unknown flag {name}{_suggest(name, [*positive, *negative, '--config'])}")
        field = option_.field
        origins[field] = base
        if dot:
            parts = values.setdefault(field, _Parts())
            parts[sub.replace("-", "_")] = _scalar(inline if equals else _next_value(name, rest))
        elif option_.shape == "bool":
            values[field] = inline if equals else True
        elif option_.shape == "list":
            found = values.setdefault(field, [])
            found += _convert(option_, inline if equals else _next_value(name, rest), name)
            while not equals and rest and not _is_flag(rest[0]):
                found += _convert(option_, rest.pop(0), name)
        else:
            values[field] = _convert(option_, inline if equals else _next_value(name, rest), name)
    return values, origins


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or _is_flag(rest[0]):
        raise SettingsError(f"{name} needs a value")
    return rest.pop(0)


def _from_environ(options: Sequence[_Option], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options:
        text = environ.get(option.variable)
        if text is None:
            continue
        values[option.field] = _convert(option, text, option.variable)
        origins[option.field] = option.variable
    return values, origins


def _from_yaml(options: Sequence[_Option], path: str) -> tuple[dict[str, Any], dict[str, str]]:
    import yaml  # only when a file is given: it costs start-up time

    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _yaml_loader())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"--config {path!r}: cannot be read ({reason})") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path!r}: not YAML ({' '.join(str(error).split())})") from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path!r}: must be a mapping of settings, got {type(content).__name__}")
    fields = {option.field: option for option in options}
    for option in options:
        for alias in option.spec.aliases:
            fields.setdefault(alias.lstrip("-").replace("-", "_"), option)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in content.items():
        found = fields.get(str(key).replace("-", "_"))
        if found is None:
            known = [option.flag[2:] for option in options]
            raise SettingsError(f"unknown key {str(key)!r} in {path}{_suggest(str(key), known)}")
        origin = f"key {key} in {path}"
        if isinstance(value, str) and found.shape in ("list", "object"):
            value = _convert(found, value, origin)
        values[found.field] = value
        origins[found.field] = origin
    return values, origins


def _yaml_loader() -> Any:
    """The safe loader without YAML 1.1's numbers in base 60: `1600:100` is a text, and not 96100."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    kinds = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    integer = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
    real = re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)"
    )
    Loader.yaml_implicit_resolvers = {
        first: [resolver for resolver in resolvers if resolver[0] not in kinds]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for kind, pattern in zip(kinds, (integer, real), strict=True):
        Loader.add_implicit_resolver(kind, re.compile(f"^(?:{pattern.pattern})$"), list("-+.0123456789"))
    return Loader


def _cause(error: ValidationError) -> BaseException | None:
    """The exception that a field's own check raised for the first mistake."""
    found = error.errors(include_url=False)[0].get("ctx", {}).get("error")
    return found if isinstance(found, BaseException) else None


def _explain(
    error: ValidationError,
    options: Sequence[_Option],
    values: Mapping[str, Any],
    origins: Mapping[str, str],
) -> str:
    """One line about the first mistake: where it came from, the value, what is wrong."""
    by_field = {option.field: option for option in options}
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    option = by_field.get(field)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:]
    if option is None:
        if first["type"] == "extra_forbidden":
            return f"unknown key {field!r}{_suggest(field, list(by_field))}"
        return message
    if first["type"] == "missing":
        return f"{option.flag} (or {option.variable}) is required"
    origin = origins.get(field, option.flag)
    sub = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, int))
    value = values.get(field, first["input"]) if not sub else first["input"]
    shown = "***" if option.spec.secret else repr(value)
    if isinstance(value, str) and not option.spec.secret:
        shown = repr(value)
    elif isinstance(value, list) and not option.spec.secret:
        shown = repr(first["input"])
    return f"{origin}{'.' + sub if sub else ''} {shown}: {message}"
