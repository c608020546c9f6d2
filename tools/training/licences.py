"""What an installed distribution's metadata says of its licence, and whether that is permissive.

It reads names, never licence texts: a distribution whose metadata names no licence known here is refused. It
gives no legal advice; it keeps a corpus to packages that call themselves permissive, and says why for the rest.
"""

import re
from collections.abc import Sequence
from email.message import Message
from typing import NamedTuple

# SPDX identifiers, lower case.
PERMISSIVE = frozenset(
    [
        "0bsd",
        "apache-2.0",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsl-1.0",
        "cc0-1.0",
        "cnri-python",
        "hpnd",
        "isc",
        "mit",
        "mit-0",
        "mit-cmu",
        "ncsa",
        "psf-2.0",
        "python-2.0",
        "unlicense",
        "zlib",
    ]
)
# Trove classifiers below "License :: OSI Approved ::" or "License ::".
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
    "CMU License (MIT-CMU)": "MIT-CMU",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
# Free-form License fields, after `_plain`.
_NAMES = {
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "3 clause bsd": "BSD-3-Clause",
    "bsd 3 clause": "BSD-3-Clause",
    "bsd 2 clause": "BSD-2-Clause",
    "modified bsd": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "expat": "MIT",
    "mit": "MIT",
    "isc": "ISC",
    "psf": "PSF-2.0",
    "psf 2.0": "PSF-2.0",
    "python software foundation": "PSF-2.0",
    "zlib": "Zlib",
}
_LONGEST_NAME = 100


class Verdict(NamedTuple):
    """licence: as an SPDX expression where it is known, else as stated. permissive: whether all of it is."""

    licence: str
    permissive: bool


def judge(metadata: Message) -> Verdict:
    """The verdict on a distribution's METADATA: its License-Expression, else its classifiers and License field.

    Several classifiers must all be permissive, and so must a short License field that is understood.
    """
    expression = metadata["License-Expression"]
    if expression:
        return Verdict(expression, is_permissive(expression))
    classifiers = _classified(metadata.get_all("Classifier") or ())
    stated = " ".join((metadata["License"] or "").split())
    named = _NAMES.get(_plain(stated), stated) if len(stated) <= _LONGEST_NAME else ""
    if classifiers:
        restricted = "gpl" in named.lower() or "mpl" in named.lower()
        licence = " AND ".join(classifiers)
        return Verdict(
            f"{licence} AND {named}" if restricted else licence,
            is_permissive(licence) and not restricted,
        )
    if named:
        return Verdict(named, is_permissive(named))
    return Verdict("a licence text without a name" if stated else "no licence stated", False)


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression allows permissive use: one branch of every OR, all branches of every AND."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression)
    try:
        allowed, rest = _either(tokens)
    except IndexError:
        return False
    return allowed and not rest


def _either(tokens: Sequence[str]) -> tuple[bool, Sequence[str]]:
    allowed, tokens = _all_of(tokens)
    while tokens and tokens[0].upper() == "OR":
        other, tokens = _all_of(tokens[1:])
        allowed = allowed or other
    return allowed, tokens


def _all_of(tokens: Sequence[str]) -> tuple[bool, Sequence[str]]:
    allowed, tokens = _term(tokens)
    while tokens and tokens[0].upper() == "AND":
        other, tokens = _term(tokens[1:])
        allowed = allowed and other
    return allowed, tokens


def _term(tokens: Sequence[str]) -> tuple[bool, Sequence[str]]:
    if tokens[0] == "(":
        allowed, tokens = _either(tokens[1:])
        return allowed and tokens[0] == ")", tokens[1:]
    allowed, tokens = tokens[0].lower() in PERMISSIVE, tokens[1:]
    # an exception only ever adds permissions
    if tokens and tokens[0].upper() == "WITH":
        tokens = tokens[2:]
    return allowed, tokens


def _classified(classifiers: Sequence[str]) -> list[str]:
    """The licences that classifiers name; those unknown here under their own name, which is in no list."""
    found = []
    for classifier in classifiers:
        parts = [part.strip() for part in classifier.split("::")]
        if parts[0] == "License" and parts[-1] not in ("License", "OSI Approved"):
            found.append(_CLASSIFIERS.get(parts[-1], parts[-1].replace(" ", "-")))
    return sorted(set(found))


def _plain(name: str) -> str:
    """A licence name in lower case, without the words and signs that people write differently."""
    words = re.sub(r"[-_,()]", " ", name.lower()).split()
    return " ".join(word for word in words if word not in ("the", "license", "licence", "version", "licensed"))
