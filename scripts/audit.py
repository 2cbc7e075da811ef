"""Look the installed packages up among known vulnerabilities, by pip-audit.

    python scripts/audit.py                      exit 1 unless all were looked up and are sound
    python scripts/audit.py --allow-unreachable  exit 0 where no service answered, saying so

A package that could not be looked up has not passed: it is named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from typing import Any

OURS = "minfer-cuda"
UNREACHABLE = re.compile(r"ConnectionError|ConnectTimeout|ReadTimeout|NameResolution|ServiceError")


def pip_audit() -> tuple[list[dict[str, Any]], str]:
    """What pip-audit says of each package, and what it says on stderr."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)["dependencies"], done.stderr
    except (ValueError, KeyError):
        return [], done.stderr


def verdict(packages: list[dict[str, Any]], told: str) -> tuple[str, list[str]]:
    """ "vulnerable", "unreachable", "incomplete" or "sound", and the lines that say why."""
    packages = [p for p in packages if p["name"] != OURS]
    known = [p for p in packages if "skip_reason" not in p]
    bad = [f"{p['name']} {p['version']}: {', '.join(v['id'] for v in p['vulns'])}, mended in "
           f"{', '.join(v['fix_versions'][0] for v in p['vulns'] if v['fix_versions']) or 'none'}"
           for p in known if p["vulns"]]  # fmt: skip
    if bad:
        return "vulnerable", bad
    if packages and not known:  # a mirror that has packages, and nothing about them
        return "unreachable", [f"NOT AUDITED: no service knows any of the {len(packages)} packages"]
    if not packages and UNREACHABLE.search(told):
        return "unreachable", [f"NOT AUDITED: no service answers: {told.strip().splitlines()[-1]}"]
    if not packages:
        return "incomplete", ["NOT AUDITED: pip-audit failed:", told.strip()]
    skipped = [f"not audited: {p['name']}: {p['skip_reason']}" for p in packages if p not in known]
    if skipped:
        return "incomplete", skipped
    return "sound", [f"{len(known)} packages audited: no known vulnerability"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-unreachable", action="store_true", help="exit 0 without a service")
    allow = parser.parse_args().allow_unreachable
    found, lines = verdict(*pip_audit())
    print("\n".join(lines))
    sys.exit(0 if found == "sound" or (found == "unreachable" and allow) else 1)


if __name__ == "__main__":
    main()
