"""`make release`: wheel, sdist, notes, a bill of materials and sums of a version, from a clean tree at its tag.

    python -m tests.harness.release              at a tag v1.2.3, of which CHANGELOG.md has a section
    python -m tests.harness.release --untagged   a trial, of whatever is here

The wheel is installed in an empty environment with the hashes of constraints-hashes.txt, and answers there.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?\n", re.MULTILINE | re.ASCII)


class NotReleased(Exception):
    """Says what to do."""


def notes_of(changelog: str, version: str) -> str:
    """The section of that version, which has a date. Raises NotReleased."""
    sections = list(SECTION.finditer(changelog))
    for found, following in zip(sections, [*sections[1:], None], strict=True):
        if found[1] == version and found[2]:
            text = changelog[found.end() : following.start() if following else None].strip()
            if text:
                return text + "\n"
    raise NotReleased(f"CHANGELOG.md has no `## [{version}] - YYYY-MM-DD` with what changed: rename [Unreleased]")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NotReleased(f"{' '.join(str(part) for part in command)} failed with {done.returncode}")
    return done.stdout.strip()


def tagged_version() -> str:
    """Raises NotReleased."""
    if changed := run("git", "status", "--porcelain"):
        raise NotReleased(f"the tree is not clean:\n{changed}")
    tags = [tag for tag in run("git", "tag", "--points-at", "HEAD").split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    if len(tags) != 1:
        raise NotReleased(f"HEAD has {len(tags)} tags like v1.2.3: `git tag v1.2.3` on the commit to be released")
    return tags[0].removeprefix("v")


def built(out: Path) -> tuple[Path, Path]:
    """Sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("atoll-*.tar.gz"), out.glob("atoll-*.whl")
    return sdist, wheel


def installed(archive: Path, folder: Path) -> Path:
    """The Python of an empty environment with that and nothing else than it needs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*install, "--require-hashes", "-r", ROOT / "constraints-hashes.txt")
    run(*install, "--no-deps", archive)
    run(sys.executable, "-m", "pip", "--python", python, "check")
    return python


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="a folder that is made (default: dist)")
    parser.add_argument("--untagged", action="store_true", help="a trial: without tag and notes")
    args = parser.parse_args(argv)
    try:
        version = "" if args.untagged else tagged_version()
        notes = notes_of((ROOT / "CHANGELOG.md").read_text(), version) if version else ""
        if args.out.exists():
            raise NotReleased(f"{args.out} is there already: remove it")
        args.out.mkdir(parents=True)
        sdist, wheel = built(args.out.resolve())
        version = version or wheel.name.split("-")[1]
        with tempfile.TemporaryDirectory() as folder:
            for archive in (sdist, wheel):
                python = installed(archive, Path(folder) / archive.name)
                if (said := run(python.with_name("atoll"), "--version")) != f"atoll {version}":
                    raise NotReleased(f"{archive.name} says that it is {said}, not {version}")
            bill = args.out / f"atoll-{version}.cdx.json"
            run(Path(sys.executable).with_name("cyclonedx-py"), "environment", python, "--output-file", bill.resolve())
    except NotReleased as error:
        print(f"not released: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if notes:
        (args.out / "NOTES.md").write_text(notes)
    files = sorted(path for path in args.out.iterdir() if path.is_file() and not path.name.startswith("."))
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (args.out / "SHA256SUMS").write_text(sums)
    print(f"{args.out}: {', '.join(path.name for path in files)}, SHA256SUMS")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
