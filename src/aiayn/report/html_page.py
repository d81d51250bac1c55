"""Pages that are one file: style and script inside, named by their hash, and nothing else may run or be fetched."""

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(template: str, **values: Any) -> str:
    """The page that a file of `templates/` makes of `values`, in which every text stays text."""
    loader = PackageLoader("aiayn.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = (loader.get_source(environment, name)[0] for name in ("style.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)};"
        " base-uri 'none'; form-action 'none'"
    )
    # Both are files of ours; their quotes must reach the browser as they are, or the hashes are of something else
    return environment.get_template(template).render(
        policy=policy, style=Markup(style), script=Markup(script), **values
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
