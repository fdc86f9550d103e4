"""The pages about flags and operation name what exists."""

from __future__ import annotations

import re
from pathlib import Path

from bench.serve import parser as bench_parser
from cli import flags_doc
from cli.up import parser as up_parser
from rpc.errors import ErrorCode
from rpc.metrics import FAMILIES

DOCS = Path(__file__).resolve().parents[3] / "docs"
README = DOCS.parent / "README.md"
DEPLOY = DOCS.parent / "deploy" / "README.md"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def known_flags() -> set[str]:
    options = [option for model in flags_doc.ROLES.values() for option in model.options()]
    return {name for option in options for name in (option.flag, *option.spec.aliases)}


def test_flags_page_is_what_its_generator_writes() -> None:
    text = (DOCS / "flags.md").read_text(encoding="utf-8")
    assert text == flags_doc.render(), "run: python -m cli.flags_doc > docs/flags.md"


def test_flags_when_a_setting_is_new_then_it_must_be_put_into_a_group() -> None:
    assert flags_doc.ungrouped() == set()


def test_flags_page_has_each_setting_once() -> None:
    text = flags_doc.render()
    for model in flags_doc.ROLES.values():
        for option in model.options():
            assert text.count(f"\n| `{option.flag}`") == 1, option.flag


def test_pages_name_only_flags_that_exist() -> None:
    pages = (DOCS / "operations.md", DOCS / "architecture.md", README, DEPLOY)
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    parsers = (up_parser(), bench_parser())
    own = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    # Of `baton status`, `baton health`, Docker, Prometheus and `--config`, which is no setting.
    others = {
        "--live",
        "--build",
        "--detach",
        "--follow",
        "--profile",
        "--secret",
        "--target",
        "--watch",
        "--json",
        "--storage",
    }
    unknown = set(FLAG.findall(text)) - known_flags() - own - others - {"--help", "--config"}
    assert unknown == set()


def test_operations_page_names_only_metrics_that_exist() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(baton_[a-z0-9_]+)", text)) <= set(FAMILIES)


def test_operations_page_names_codes_with_their_numbers() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z][A-Z_]+)` (\d+)", text)
    assert len(named) > 20
    for name, number in named:
        assert int(ErrorCode[name]) == int(number), name


def anchors(page: Path) -> set[str]:
    """Those that a viewer of Markdown makes of the headings: small letters, no punctuation, dashes for blanks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_and_headings_that_are_linked_exist() -> None:
    found = 0
    for page in (*DOCS.glob("*.md"), README, DEPLOY):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            assert linked.is_file(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"
            found += 1
    assert found > 20
