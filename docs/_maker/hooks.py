"""What MkDocs asks while it builds the site: pages made from the registry and from the texts at the repository's root,
links that lead into the repository, and Markdown as GitHub reads it.

MkDocs loads this file by its path, and finds the modules beside it (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import commands
import dialect
import hardware
import operations
import repository
import sections
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

AT_THE_ROOT = {
    "PORTING.md": "reference/porting.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Texts of the repository that are pages of the site, whole."""
HERE = AT_THE_ROOT | {"README.md": "index.md", "LICENSE": "source/LICENSE"}
"""Where a link to a text leads in the site; README's sections stand on several pages."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of ops take their places in the navigation."""
    for part in config.nav or ():
        for entry in next(iter(part.values())) if isinstance(part, dict) else ():
            if isinstance(entry, dict) and "Ops" in entry:
                entry["Ops"] = [*operations.navigation()]
    return config


@event_priority(50)  # before who checks links asks which files there are
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made: an op's page, the command line's, the hardware's, texts of the root, and sources linked to."""
    made = {
        **operations.made(ROOT).pages,
        "reference/command-line.md": commands.page(),
        "reference/hardware.md": hardware.page(),
    }
    made |= {there: (ROOT / name).read_text(encoding="utf-8") for name, there in AT_THE_ROOT.items()}
    for uri, text in (made | operations.made(ROOT).data).items():
        files.append(File.generated(config, uri, content=text))
    texts = [
        (Path(config.docs_dir) / f.src_uri, f.content_string) for f in files.documentation_pages() if not f.generated_by
    ]
    texts += [(ROOT / name, (ROOT / name).read_text(encoding="utf-8")) for name in (*AT_THE_ROOT, "README.md")]
    texts += [(ROOT / operations.NOMINAL, text) for text in (*made.values(), *operations.made(ROOT).tables.values())]
    for uri, content in repository.pages(ROOT, texts, HERE).items():
        if isinstance(content, Path):
            files.append(File.generated(config, uri, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Sections of other texts come to where they are named, links into the repository become links within the site, and
    lists are laid out as Python-Markdown reads them.
    """

    def relink(text: str, folder: str) -> str:
        return repository.relinked(text, page.file.src_uri, folder, ROOT, HERE)

    def table(name: str) -> str:
        return operations.made(ROOT).tables[name]

    folder = _folder(page.file.src_uri)
    return dialect.adapted(sections.included(markdown, ROOT, folder, relink, table))


def _folder(uri: str) -> str:
    """The folder of the repository from which a page's links start."""
    at_root = {there: name for name, there in AT_THE_ROOT.items()}
    if uri in at_root or uri.startswith("reference/ops/"):
        return ""
    if uri.startswith(repository.SOURCES):
        return uri.removeprefix(repository.SOURCES).rpartition("/")[0]
    return f"docs/{uri}".rpartition("/")[0]
