"""The Dockerfile without Docker: what it copies exists, what it installs is declared, what it runs is Baton."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rpc.version import revision
from tests.integration.dockerfile import Instruction, Stage, read_image, stages

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy" / "Dockerfile"
TEXT = FILE.read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = ("cpu", "cuda")


def own_stages() -> dict[str, Stage]:
    return stages(TEXT)


def instructions(name: str) -> list[Instruction]:
    return [each for stage in own_stages().values() for each in stage.instructions if each.name == name]


def in_context(path: str) -> bool:
    """Whether .dockerignore lets the file into the build: of all lines that match it or a folder above, the last."""
    kept = True
    places = [path, *(str(folder) for folder in Path(path).parents if str(folder) != ".")]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            exception = pattern.startswith("!")
            pattern = pattern.removeprefix("!")
            if any(_matches(place, pattern) for place in places):
                kept = exception
    return kept


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(Path(path).name, pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


def sources_of(source: str) -> list[str]:
    """The files that a COPY of `source` is meant to bring, without what tools have made beside them."""
    place = ROOT / source
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    made = ("__pycache__", "_pb2", ".stamp", ".pyc")
    return [str(file.relative_to(ROOT)) for file in files if not any(each in str(file) for each in made)]


def test_dockerfile_when_it_copies_then_the_sources_exist_and_are_in_the_build_context() -> None:
    for copy in instructions("COPY"):
        *sources, _ = copy.text.split()
        if copy.option("from"):
            assert copy.option("from")[0] in own_stages()
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            files = sources_of(source)
            assert files and all(in_context(file) for file in files), source


def test_dockerfile_when_the_wheel_is_built_then_every_package_of_the_project_was_copied() -> None:
    copied = {copy.text.split()[0] for copy in own_stages()["wheel"].instructions if copy.name == "COPY"}
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied | {""}, "the image would lack a package"
    assert Path(PROJECT["project"]["readme"]).name in next(
        copy.text for copy in own_stages()["wheel"].instructions if copy.name == "COPY"
    )


def test_dockerignore_when_files_are_not_copied_then_they_are_left_out_of_the_context() -> None:
    assert not any(map(in_context, ("tests/conftest.py", "docs/flags.md", ".git/config", ".venv/bin/python")))
    assert not any(map(in_context, ("protos/common_pb2.py", "rpc/__pycache__/x.pyc", "protos/.stamp", "deploy/.env")))
    assert all(map(in_context, ("protos/common.proto", "kernels/cpu/prefill.c", "engine/attention/table.json")))


@pytest.mark.parametrize("target", TARGETS)
def test_image_when_run_then_by_a_user_without_rights_whose_folders_are_its_own(target: str) -> None:
    image = read_image(FILE, target)
    uid, gid = image.user
    assert uid >= 1000 and gid >= 1000
    assert set(image.owned) >= {"/models", "/home/baton", "/home/baton/.cache"}
    assert image.environment["HOME"] == image.workdir == "/home/baton"
    assert image.environment["BATON_MODEL_DIR"] == "/models"
    assert image.environment["PATH"].split(":")[0] == "/opt/baton/bin"
    assert (image.entrypoint, image.stop_signal) == (("baton",), "SIGTERM")
    assert set(image.exposed) == {8000, 8001, 50051, 50052, 50061, 50071, 9101, 9102}
    # As `baton up` starts its servers.
    assert (image.environment["OMP_WAIT_POLICY"], image.environment["PYTHONMALLOC"]) == ("passive", "malloc")


def test_image_when_a_revision_is_given_then_the_process_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    image = read_image(FILE, "cpu", {"REVISION": "abc123"})
    monkeypatch.setenv("BATON_REVISION", image.environment["BATON_REVISION"])
    assert revision() == "abc123"
    assert read_image(FILE, "cpu").environment["BATON_REVISION"] == ""


def test_dockerfile_when_it_installs_then_exactly_the_pinned_versions() -> None:
    installs = [run.text for run in instructions("RUN") if "pip install" in run.text]
    assert len(installs) >= 5
    for install in installs:
        pinned = re.search(r"-c (/src/)?constraints\.txt", install)
        alone = "--no-deps" in install and ("/dist/" in install or "MODEL_PACKAGE" in install)
        assert pinned or alone, install
    package = next(run.text for run in instructions("ARG") if run.text.startswith("MODEL_PACKAGE="))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"MODEL_PACKAGE := {package.partition('=')[2]}\n" in makefile


def test_dockerfile_when_read_then_it_names_no_address_of_a_registry() -> None:
    assert not re.search(r"https?://|[a-z0-9-]+\.(io|com|org|net|dev)\b", TEXT)
    bases = {stage.base for stage in own_stages().values()}
    assert all("latest" not in base and (base in own_stages() or ":" in base) for base in bases)


def test_dockerfile_when_arguments_are_given_then_the_base_images_follow() -> None:
    found = stages(TEXT, {"PYTHON_VERSION": "3.12"})
    assert found["wheel"].base == found["system-cuda"].base == "python:3.12-slim-bookworm"
    assert stages(TEXT, {"CUDA_BASE_IMAGE": "cuda:13"})["system-cuda"].base == "cuda:13"
    assert stages(TEXT, {"BASE_IMAGE": "mine:1"})["system-cpu"].base == "mine:1"


@pytest.mark.parametrize("target", TARGETS)
def test_dockerfile_when_a_target_is_built_then_its_large_layers_come_before_baton_s_own(target: str) -> None:
    """A change of a source file leaves all layers but the last alone."""
    body = [each for each in own_stages()[target].instructions if each.name in ("COPY", "RUN")]
    assert body[0].option("from") == [f"packages-{target}"]
    assert "/dist/" in body[-1].text
    assert not any(each.name == "COPY" and not each.option("from") for each in body)
    packages = own_stages()[f"packages-{target}"]
    [copied] = [each.text for each in packages.instructions if each.name == "COPY"]
    assert copied == "pyproject.toml constraints.txt deploy/requirements.py /src/"


def test_requirements_when_extras_are_named_then_their_packages_are_among_the_lines(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "deploy/requirements.py"):  # as in the image: side by side
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-I", "-S", str(tmp_path / "requirements.py")]
    for place in (tmp_path / "requirements.py", ROOT / "deploy" / "requirements.py"):
        command[-1] = str(place)
        plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert plain == PROJECT["project"]["dependencies"]
        gpu = subprocess.run([*command, "gpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        assert gpu == plain + PROJECT["project"]["optional-dependencies"]["gpu"]
        wrong = subprocess.run([*command, "gpus"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 1
        assert "no extra 'gpus'" in wrong.stderr


@pytest.mark.parametrize(("stage", "default"), [("packages-cpu", "grammar"), ("packages-cuda", "gpu grammar")])
def test_dockerfile_when_extras_are_left_to_it_or_to_compose_then_structured_output_is_among_them(
    stage: str, default: str
) -> None:
    arguments = [shlex.split(each.text)[0] for each in own_stages()[stage].instructions if each.name == "ARG"]
    assert f"EXTRAS={default}" in arguments
    assert set(default.split()) <= set(PROJECT["project"]["optional-dependencies"])
    file = "docker-compose.gpu.yml" if "gpu" in default else "docker-compose.yml"
    assert f"EXTRAS: ${{EXTRAS:-{default}}}\n" in (ROOT / "deploy" / file).read_text(encoding="utf-8")


def test_dockerfile_when_protos_are_built_then_every_module_is_made(tmp_path: Path) -> None:
    [run] = [each.text for each in own_stages()["wheel"].instructions if "grpc_tools" in each.text]
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    command = run.replace("/tools/bin/python", sys.executable)
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, env=os.environ)
    made = {file.name for file in (tmp_path / "protos").glob("*.py")}
    for proto in (ROOT / "protos").glob("*.proto"):
        assert {f"{proto.stem}_pb2.py", f"{proto.stem}_pb2_grpc.py"} <= made


@pytest.mark.parametrize("run", [each.text for each in instructions("RUN")])
def test_dockerfile_when_a_command_is_read_by_the_shell_then_its_syntax_is_right(run: str) -> None:
    checked = subprocess.run(["sh", "-n", "-c", run], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
