"""Facts to one self-contained file of HTML: styles, charts, code and data are inside, and nothing is loaded."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from pathlib import Path
from typing import Any

from ....ir.errors import PlanError

PARTS = Path(__file__).parent
FRAME_HEIGHT = 720  # pixels in a notebook


def page_of(facts: dict[str, Any]) -> str:
    """The page. Its data is compressed, which browsers undo themselves."""
    packed = gzip.compress(json.dumps(facts, separators=(",", ":")).encode(), mtime=0)
    parts = {
        "TITLE": html.escape(f"{facts['verdict']['model']} on {facts['verdict']['hardware']}"),
        "STYLE": (PARTS / "page.css").read_text("utf-8"),
        "SHARED": shared_script(),
        "NOTICE": html.escape((PARTS / "charts" / "NOTICE").read_text("utf-8")),
        "LICENCE": html.escape((PARTS / "charts" / "LICENSE").read_text("utf-8")),
        "SCRIPT": (PARTS / "page.js").read_text("utf-8"),
        "FACTS": base64.b64encode(packed).decode(),
    }
    found = (PARTS / "page.html").read_text("utf-8")
    for name, text in parts.items():
        found = found.replace(f"<!--{name}-->", text)
    return found


def shared_script() -> str:
    """The script that every page includes: the charting library as `charts`, and the words for figures."""
    return "\n".join((PARTS / name).read_text("utf-8") for name in ("charts/charts.js", "words.js"))


def frame_of(page: str) -> str:
    """The page inside of another one, as notebooks show it."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0" '
        'title="Penstock report" sandbox="allow-scripts"></iframe>'
    )


def require_writable(path: str | Path) -> None:
    """Raise `PlanError` where no page could be written."""
    path = Path(path)
    if path.is_dir():
        raise PlanError(f"report: {path} is a folder; name a file in it, such as {path / 'report.html'}")
    if path.exists() and not path.is_file():
        raise _unwritable(path, "it is no file")
    path = path.resolve()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise _unwritable(path, "there is no such folder" if not path.parent.is_dir() else "no permission")


def write_page(path: str | Path, page: str) -> Path:
    """Write it whole or not at all. Raises `PlanError` where that is not possible."""
    require_writable(path)
    path = Path(path)
    whole = path.resolve()  # where a link leads
    part = whole.with_name(f".{whole.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, whole)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritable(path, error.strerror or str(error)) from error
    return path


def _unwritable(path: Path, why: str) -> PlanError:
    near = Path.cwd() / (path.name or "report.html")
    return PlanError(f"report: {path} cannot be written: {why}; name a file in a folder that can be, such as {near}")
