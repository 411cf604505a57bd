"""What is installed: a wheel holds real files, and everything that is read at run time."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness import hashes, release
from tests.harness.once import once_a_run

ROOT = Path(__file__).parents[3]


VERSION = "1.2.3"
BUILD = "from setuptools.build_meta import build_sdist; import sys; print(build_sdist(sys.argv[1]))"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(folder: Path) -> None:
    # A copy, because setuptools leaves build/ and egg-info behind.
    source, out = folder / "source", folder / "out"
    source.mkdir()
    out.mkdir()
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in", ".gitignore", "Makefile"):
        shutil.copy(ROOT / name, source / name)
    for name in ("src", "node", "protocol", "coordinator", "tests/released"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_version.py")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    git = (
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "init.defaultBranch=m",
    )
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all"), ("tag", f"v{VERSION}")):
        run(*git, *command, cwd=source)
    sdist = out / run(sys.executable, "-c", BUILD, out, cwd=source).split()[-1]
    install = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*install, "-w", out, sdist)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a commit with a tag, and the wheel that is built from it, where there is no git any more."""
    out = once_a_run(tmp_path_factory.getbasetemp(), "archives", build) / "out"
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(archives: tuple[Path, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(archives[1])


def test_the_version_is_that_of_the_tag(archives: tuple[Path, Path], wheel: zipfile.ZipFile) -> None:
    assert [path.name for path in archives] == [f"atoll-{VERSION}.tar.gz", f"atoll-{VERSION}-py3-none-any.whl"]
    assert f"__version__ = version = '{VERSION}'" in wheel.read("atoll/_version.py").decode()
    metadata = wheel.read(f"atoll-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in metadata


def test_an_sdist_holds_the_packages_once_and_no_links(archives: tuple[Path, Path], wheel: zipfile.ZipFile) -> None:
    with tarfile.open(archives[0]) as tar:
        members = tar.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src"}
    assert {name for name in wheel.namelist() if name.startswith("atoll/")} <= {n.removeprefix("src/") for n in names}


def test_what_is_built_from_the_sdist_works_where_nothing_else_of_atoll_is(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    """In an environment of its own, with what constraints-hashes.txt has and no more: links to what is here."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in hashes.pinned((ROOT / "constraints-hashes.txt").read_text()):
        files = importlib.metadata.distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site_packages / top).symlink_to(sysconfig.get_path("purelib") + f"/{top}")
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*install, archives[1])
    atoll = python.with_name("atoll")
    assert run(atoll, "--version", cwd=tmp_path).strip() == f"atoll {VERSION}"
    said = run(python, "-c", "import atoll.coordinator.service as c; print(c.__file__)", cwd=tmp_path).strip()
    assert Path(said).is_relative_to(site_packages)
    run(atoll, "init", "run.toml", cwd=tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "check")
    node = subprocess.run([atoll, "node"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "pip install 'atoll[node]'" in node.stderr, "a site needs torch, and a coordinator does not"


@pytest.mark.slow
def test_a_release_is_built_and_installed_from_an_index_by_its_hashes(tmp_path: Path) -> None:
    """In `make test-all`: it needs an index, and the tools of a release."""
    run("make", "release", f"ARGS=--untagged --out {tmp_path / 'dist'}", cwd=ROOT)
    assert (tmp_path / "dist" / "SHA256SUMS").is_file()


@pytest.mark.parametrize("name", hashes.FILES)
def test_hashes_are_of_the_versions_that_everything_is_tested_with(name: str) -> None:
    found = hashes.pinned((ROOT / name).read_text())
    exact = hashes.pinned(hashes.CONSTRAINTS.read_text())
    assert found == {package: exact[package] for package in found}
    wanted = {re.split(r"[<>=!~ ;\[]", one)[0].lower() for one in hashes.requirements(hashes.FILES[name])}
    assert wanted <= found.keys()
    assert not found.keys() & set(hashes.NO_HASHES)
    blocks = re.split(r"^(?=[\w.-]+==)", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]
    assert len(blocks) == len(found)
    for block in blocks:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", block), block[:80]


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n\n### Added\n\n- One.\n\n"
        "## [0.1.0] - 2025-01-02\n- Two.\n"
    )
    assert release.notes_of(changelog, "0.2.0") == "### Added\n\n- One.\n"
    assert release.notes_of(changelog, "0.1.0") == "- Two.\n"
    for version in ("0.3.0", "Unreleased", "0.2"):
        with pytest.raises(release.NotReleased, match=rf"no `## \[{version}\] - YYYY"):
            release.notes_of(changelog, version)


def test_the_wheel_holds_what_the_repository_has(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder in ("node", "protocol", "coordinator"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".proto", ".pyi", ".sql", ".html"):
                assert f"atoll/{path.relative_to(ROOT)}" in names
    assert "atoll/py.typed" in names
    assert "atoll/cli/main.py" in names


def test_the_wheel_has_data_of_each_kind_and_no_links(wheel: zipfile.ZipFile) -> None:
    for suffix in (".proto", ".sql", ".html", "py.typed"):
        assert any(name.endswith(suffix) for name in wheel.namelist()), suffix
    for info in wheel.infolist():
        assert (info.external_attr >> 16) & 0o170000 in (0, 0o100000), f"{info.filename} is not a plain file"
    assert wheel.read("atoll/protocol/errors.py") == (ROOT / "protocol" / "errors.py").read_bytes()
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"atoll"}
