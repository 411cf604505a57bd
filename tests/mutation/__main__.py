"""Applies every mutation to a copy of the tree and runs its tests there. Exit code 1 if one survives."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutation.mutation import DoesNotFit, Mutation
from tests.mutation.table import FILE_OF, MUTATIONS
from tests.mutation.warm_pytest import WarmPytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
"""Of pytest, beside its own; to load the others takes as long as many a test."""
COPIED = (
    "protocol",
    "coordinator",
    "node",
    "src",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "deploy",
    "pyproject.toml",
    "README.md",
)
NUMBERS = itertools.count(1)
LIMIT_S = 660.0
"""More than any test has by a limit of its own: what hangs is told from what does not end."""
ALL_LIMIT_S = 3600.0
"""Of all their tests once, without a mutation."""
INLINED = ("blocks", "picking")
HUNG = "+ Timeout +"
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


class Tree:
    """A copy of the repository, and a process that runs pytest in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():  # what is compiled too: it is found by the time, or the bytes, of the file beside it
                shutil.copytree(source, folder / name, symlinks=True)
            else:
                shutil.copy2(source, folder / name)
        self._pytest = WarmPytest()

    def pytest(self, *arguments: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
        options = ["-q", "-x", "--no-header", "--tb=line", "--disable-plugin-autoload", "-pno:cacheprovider"]
        options += [f"-p{name}" for name in PLUGINS]
        options += ["--hypothesis-profile=mutation"]
        # A mutation may let a test hang; tests that take long have a limit of their own. A signal in the middle of
        # grpc's polling may end the process without a word.
        options += ["-o", "timeout=20", "-o", "timeout_method=thread"]
        options += [
            "-W",
            "ignore:Module already imported so cannot be rewritten",
        ]  # libraries, which assert nothing here
        code, output = self._pytest.run(
            self.folder, [*options, f"--basetemp={self.folder / 'tmp'}", *arguments], limit_s
        )
        return (-1, f"the tests did not end within {limit_s:.0f} s") if code is None else (code, output)

    def close(self) -> None:
        self._pytest.close()


def judge(tree: Tree, mutation: Mutation) -> Verdict:
    began = time.monotonic()
    path = tree.folder / mutation.file
    caught_by, problem = "", ""
    try:
        mutated = mutation.source_in(tree.folder)
    except DoesNotFit as error:
        problem = f"{FILE_OF[mutation.name]}: {error}"
    else:
        before = {file: (file.read_text(encoding="utf-8"), file.stat()) for file in (path, *_compiled_with(path))}
        compiled = [Path(cache_from_source(file)) for file in before]
        as_it_was = {cache: cache.read_bytes() for cache in compiled if cache.is_file()}
        for file, (text, stat) in before.items():
            number = next(NUMBERS)
            file.write_text(mutated if file == path else f"{text}# {number}\n", encoding="utf-8")
            # Python knows compiled modules by the second and the size of their source: no two may have the same.
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + number * 1_000_000_000))
        try:
            code, output = tree.pytest(*mutation.tests)
        finally:
            for file, (text, stat) in before.items():
                file.write_text(text, encoding="utf-8")
                os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            for cache, code_as_it_was in as_it_was.items():  # else the next run compiles it again
                cache.write_bytes(code_as_it_was)
        failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
        hangs = code == TESTS_FAILED and not failed and HUNG in output
        if code == 0:
            problem = f"SURVIVED {' '.join(mutation.tests)}"
        elif hangs:
            caught_by = f"a hang of {' '.join(mutation.tests)}"
        elif code != TESTS_FAILED or not failed:
            problem = "no test could say anything:\n" + "\n".join(output.splitlines()[-8:])
        elif lacks := lacking(tree.folder, output):
            problem = f"no test could say anything: COPIED has no {lacks}"
        else:
            caught_by = failed[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1]
    return Verdict(mutation=mutation, problem=problem, caught_by=caught_by, wall_s=time.monotonic() - began)


def lacking(folder: Path, output: str) -> str:
    """A file of the repository that a test wanted, and this copy of it has not; empty if there is none."""
    found = re.findall(rf"No such file or directory: '{re.escape(str(folder))}/([^']+)'", output)
    return next((name for name in found if not name.startswith("tmp/") and (ROOT / name).exists()), "")


def _compiled_with(path: Path) -> list[Path]:
    """Codecs that have functions of this one inlined in their kernels, which are known by their own source alone."""
    if path.stem not in INLINED:
        return []
    return [
        file for file in path.parent.glob("*.py") if f"codecs.{path.stem} import" in file.read_text(encoding="utf-8")
    ]


def run_all(trees: list[Tree], mutations: tuple[Mutation, ...]) -> list[Verdict]:
    """In as many processes as there are trees, each with a tree of its own."""
    waiting = deque(mutations)
    verdicts: dict[str, Verdict] = {}

    def work(tree: Tree) -> None:
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
    parser.add_argument("--processes", type=int, default=6, help="default: 6, since tests that hang need no core")
    parser.add_argument("--tests-pass", action="store_true", help="they did just now: do not run them unmutated first")
    options = parser.parse_args()
    chosen = tuple(m for m in MUTATIONS if not options.names or any(word in m.name for word in options.names))
    with tempfile.TemporaryDirectory(prefix="atoll-mutation-") as folder:
        trees = [Tree(Path(folder) / str(i)) for i in range(options.processes)]
        if not options.tests_pass:  # tests that fail anyway would seem to catch everything
            code, output = trees[0].pytest(*sorted({test for m in chosen for test in m.tests}), limit_s=ALL_LIMIT_S)
            if code:
                print(output)
                print("these tests fail without any mutation")
                return 1
        verdicts = run_all(trees, chosen)
        for tree in trees:
            tree.close()
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
