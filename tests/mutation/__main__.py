"""Applies every mutation to a copy of the tree and runs its tests there. Exit code 1 if one survives."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutation.mutation import DoesNotFit, Mutation
from tests.mutation.table import FILE_OF, MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("protocol", "coordinator", "node", "src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md")
LIMIT_S = 180.0
ALL_LIMIT_S = 900.0
"""Of all their tests once, without a mutation."""
TESTS_FAILED = 1  # pytest's exit code; 2 and above: no test was run
MAX_TRIES = 3
"""Of tests that meet real clocks and threads, one may miss a mutation once. That is said, and named at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    mutation: Mutation
    problem: str
    """Empty if the tests caught it."""
    caught_by: str
    wall_s: float
    num_tries: int = 1


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():  # compiled kernels too: numba finds them by the time of the file beside them
            shutil.copytree(source, target / name, symlinks=True)
        else:
            shutil.copy2(source, target / name)


def pytest(tree: Path, *arguments: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    command += ["-o", "timeout=30"]  # a mutation may let a test hang
    command += [f"--basetemp={tree / 'tmp'}", *arguments]
    # A mutated file and its original may have the same size and second: no compiled form of it may stay.
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"the tests did not end within {limit_s:.0f} s"
    return done.returncode, done.stdout + done.stderr


def judge(tree: Path, mutation: Mutation) -> Verdict:
    began = time.monotonic()
    path = tree / mutation.file
    caught_by, problem = "", ""
    try:
        mutated = mutation.source_in(tree)
    except DoesNotFit as error:
        problem = f"{FILE_OF[mutation.name]}: {error}"
    else:
        before, stat = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutated, encoding="utf-8")
        try:
            code, output = pytest(tree, *mutation.tests)
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
        if code == 0:
            problem = f"SURVIVED {' '.join(mutation.tests)}"
        elif code != TESTS_FAILED or not failed:
            problem = "no test could say anything:\n" + "\n".join(output.splitlines()[-8:])
        else:
            caught_by = failed[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1]
    return Verdict(mutation=mutation, problem=problem, caught_by=caught_by, wall_s=time.monotonic() - began)


def run_all(trees: list[Path], mutations: tuple[Mutation, ...]) -> list[Verdict]:
    """In as many processes as there are trees, each with a tree of its own."""
    waiting = deque(mutations)
    verdicts: dict[str, Verdict] = {}

    def work(tree: Path) -> None:
        while waiting:
            try:
                mutation = waiting.popleft()
            except IndexError:
                return
            verdict = judge(tree, mutation)
            for num_tries in range(2, MAX_TRIES + 1):
                if not verdict.problem:
                    break
                verdict = replace(judge(tree, mutation), num_tries=num_tries)
            verdicts[mutation.name] = verdict
            result = f"SURVIVES: {verdict.problem}" if verdict.problem else verdict.caught_by
            print(f"{mutation.name:48} {verdict.wall_s:5.1f} s  {result}", flush=True)

    threads = [threading.Thread(target=work, args=(tree,)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [verdicts[m.name] for m in mutations]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutations whose name contains one of these words")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tests-pass", action="store_true", help="they did just now: do not run them unmutated first")
    options = parser.parse_args()
    chosen = tuple(m for m in MUTATIONS if not options.names or any(word in m.name for word in options.names))
    with tempfile.TemporaryDirectory(prefix="atoll-mutation-") as folder:
        trees = [Path(folder) / str(i) for i in range(options.processes)]
        for tree in trees:
            tree.mkdir()
            copy_tree(tree)
        if not options.tests_pass:  # tests that fail anyway would seem to catch everything
            code, output = pytest(trees[0], *sorted({test for m in chosen for test in m.tests}), limit_s=ALL_LIMIT_S)
            if code:
                print(output)
                print("these tests fail without any mutation")
                return 1
        verdicts = run_all(trees, chosen)
    survived = [v for v in verdicts if v.problem]
    for verdict in survived:  # again: they are lost among the others
        print(f"{verdict.mutation.name}: {verdict.problem}")
    for verdict in verdicts:
        if verdict.num_tries > 1 and not verdict.problem:
            print(f"{verdict.mutation.name}: caught at try {verdict.num_tries} only, by {verdict.caught_by}")
    print(f"{len(verdicts) - len(survived)} of {len(verdicts)} mutations are caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
