"""Writes the dashboards: `python -m deploy.grafana`. Files of boards that are no more are removed."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.boards import BOARDS

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Contents of each file by its name."""
    return {f"{board.name}.json": json.dumps(board.as_json(), indent=1, ensure_ascii=False) + "\n" for board in BOARDS}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    written = texts()
    for path in FOLDER.glob("*.json"):
        if path.name not in written:
            path.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
