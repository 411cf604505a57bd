"""`make hashes`: hashes of what atoll installs, in the versions of constraints.txt, for `pip install --require-hashes`.

Without torch, and what comes with it: its builds differ by machine (CPU, CUDA, ROCm), and each has a hash of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
FILES: dict[str, tuple[str, ...]] = {
    "constraints-hashes.txt": (),
    "constraints-hashes-node.txt": ("node", "data"),
    "constraints-hashes-otel.txt": ("otel",),
    "constraints-hashes-postgresql.txt": ("postgresql",),
}
"""With the extras beside what the coordinator needs."""
WHAT = {
    (): "a coordinator",
    ("node", "data"): "a site, without torch,",
    ("otel",): "a coordinator whose syncs are traced",
    ("postgresql",): "a coordinator whose store is in PostgreSQL",
}
HEAD = "# `make hashes` writes this file: all that {what} needs, for pip install --require-hashes -r\n"
PINNED = re.compile(r"^([\w.-]+)==([\w.+!-]+)", re.MULTILINE | re.ASCII)
NO_HASHES = ("torch",)


def requirements(extras: tuple[str, ...]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return [one for one in wanted if re.split(r"[<>=!~ ;\[]", one)[0] not in NO_HASHES]


def pinned(text: str) -> dict[str, str]:
    """Versions by normalized name."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PINNED.findall(text)}


def main(uv: str) -> int:
    for name, extras in FILES.items():
        command = [uv, "pip", "compile", "-", "-c", str(CONSTRAINTS), "--generate-hashes", "--no-header", "--quiet"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--python-version", "3.11"]
        lines = "\n".join(requirements(extras))
        found = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
        (ROOT / name).write_text(HEAD.format(what=WHAT[extras]) + found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
