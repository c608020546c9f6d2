"""Where the corpus comes from: the Python files of installed distributions and of plain folders, with licences.

A distribution's files are those of its RECORD. What it vendors is left out, since the metadata's licence does not
speak for it.
"""

import csv
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tools.training.command import UsageError
from tools.training.licences import is_permissive, judge

# Small packages of permissive licence, never trained on where they are present.
UNSEEN = (
    "attrs",
    "h11",
    "httpcore",
    "humanize",
    "multipledispatch",
    "patsy",
    "portalocker",
    "seaborn",
    "sortedcontainers",
    "tabulate",
    "toolz",
    "werkzeug",
)
# Code that other people wrote lies below these, whatever the licence of the package around it.
_VENDORED = frozenset(
    [
        "_vendor",
        "_vendored",
        "vendor",
        "vendored",
        "extern",
        "externals",
        "third_party",
        "thirdparty",
        "_externals",
        "packages",
    ]
)
# Below the standard library: other people's packages, and files that are test data rather than code.
_OUTSIDE_STDLIB = frozenset(
    ["site-packages", "dist-packages", "idlelib", "lib2to3", "test", "tests", "__pycache__", "pydoc_data"]
)


class Package(NamedTuple):
    """Python files under one licence."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[str, ...]  # POSIX paths below root, sorted


class Excluded(NamedTuple):
    """A distribution that is not used, and why."""

    name: str
    reason: str


def installed(site: Path) -> tuple[list[Package], list[Excluded]]:
    """The distributions of a site-packages folder: those of permissive licence, and the others.

    Vendor-locked runtimes (`nvidia-*`) are refused by name. Of two versions of one distribution the last counts.
    """
    packages: dict[str, Package] = {}
    excluded = []
    for info in sorted(site.glob("*.dist-info")):
        metadata = info / "METADATA"
        if not metadata.is_file():
            continue
        headers = HeaderParser().parsestr(metadata.read_text(encoding="utf-8", errors="replace"))
        name, version = (headers["Name"] or info.stem).lower(), headers["Version"] or "unknown"
        verdict = judge(headers)
        files = tuple(sorted(_recorded(info)))
        if name.startswith("nvidia"):
            excluded.append(Excluded(name, f"vendor-locked: {verdict.licence}"))
        elif not verdict.permissive:
            excluded.append(Excluded(name, f"licence not on the list: {verdict.licence}"))
        elif files:
            packages[name] = Package(name, version, verdict.licence, site, files)
    return list(packages.values()), excluded


def standard_library() -> Package:
    """This interpreter's standard library, without tests and without what is installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    return Package("python", sysconfig.get_python_version(), "PSF-2.0", root, _python_files(root, _OUTSIDE_STDLIB))


def plain_folder(folder: Path, licence: str) -> list[Package]:
    """All Python files of a folder under the licence that the caller states; each subfolder is a package.

    Raises:
        UsageError: the licence is not on the list of permissive ones.
    """
    if not is_permissive(licence):
        raise UsageError(f"licence {licence!r} is not permissive; the list stands in tools/training/licences.py")
    members: dict[str, list[str]] = {}
    for path in _python_files(folder, frozenset()):
        top, _, below = path.partition("/")
        members.setdefault(top if below else folder.resolve().name, []).append(path)
    return [Package(name, "unversioned", licence, folder, tuple(files)) for name, files in members.items()]


def gather(sources: Sequence[Path], licence: str | None) -> tuple[list[Package], list[Excluded]]:
    """Packages of several folders; a folder with `*.dist-info` in it is read as a site-packages.

    Raises:
        UsageError: a folder does not exist, or a plain one comes without a licence.
    """
    packages: list[Package] = []
    excluded: list[Excluded] = []
    for source in sources:
        if not source.is_dir():
            raise UsageError(f"source folder {source} does not exist")
        if any(source.glob("*.dist-info")):
            found, refused = installed(source)
            packages += found
            excluded += refused
        elif licence is None:
            raise UsageError(f"{source} is a plain folder of files: state their licence with --license NAME")
        else:
            packages += plain_folder(source, licence)
    return packages, excluded


def content_digest(packages: Sequence[Package]) -> str:
    """A short name of everything that packages hold; files that cannot be read count as empty."""
    whole = hashlib.sha256()
    for package in packages:
        whole.update(repr((package.name, package.version, package.licence, package.files)).encode())
        for path in package.files:
            try:
                content = (package.root / path).read_bytes()
            except OSError:
                content = b""
            whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()[:12]


def _recorded(info: Path) -> Iterator[str]:
    record = info / "RECORD"
    if not record.is_file():
        return
    with record.open(encoding="utf-8", newline="") as stream:
        for row in csv.reader(stream):
            path = PurePosixPath(row[0]) if row else PurePosixPath()
            if path.suffix == ".py" and not path.is_absolute() and not _foreign(path):
                yield row[0]


def _foreign(path: PurePosixPath) -> bool:
    return ".." in path.parts or not _VENDORED.isdisjoint(path.parts[1:-1])


def _python_files(root: Path, skipped: frozenset[str]) -> tuple[str, ...]:
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return tuple(sorted(path.as_posix() for path in paths if skipped.isdisjoint(path.parts)))
