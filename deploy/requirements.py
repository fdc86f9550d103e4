"""Prints the packages that Baton needs, one a line: those of pyproject.toml and of the extras that are named.

The image installs them before Baton's own sources come in, so that a change of those leaves the large layer alone.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    here = Path(__file__).resolve()
    # In the image it lies beside pyproject.toml.
    file = next(folder / "pyproject.toml" for folder in here.parents if (folder / "pyproject.toml").is_file())
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in sys.argv[1:]:
        if extra not in project["optional-dependencies"]:
            raise SystemExit(f"requirements.py: pyproject.toml has no extra {extra!r}")
        lines += project["optional-dependencies"][extra]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
