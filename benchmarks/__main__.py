"""`python -m benchmarks [--list] [NAME ...]`: runs the modules of this folder that have `main(argv)`, all by default.

Options behind one NAME go to it: `python -m benchmarks sync --help`. Each runs in a process of its own.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
_RUN = (
    "import sys; from importlib import import_module as module; module('benchmarks.__main__').end_at_sigterm(); "
    "sys.exit(module('benchmarks.' + sys.argv[1]).main(sys.argv[2:]))"
)


def find(folder: Path = FOLDER) -> dict[str, str]:
    """Names of the benchmarks and the first line of what each says of itself."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        mains = [item for item in module.body if isinstance(item, ast.FunctionDef) and item.name == "main"]
        if path.stem != "__main__" and mains and [a.arg for a in mains[0].args.args] == ["argv"]:
            found[path.stem] = (ast.get_docstring(module) or "").split("\n", maxsplit=1)[0]
    return found


def end_at_sigterm() -> None:
    """As by Ctrl-C: what was started is ended, and networks are taken away. `timeout` says it twice."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def run(name: str, options: Sequence[str]) -> int:
    """Its exit code. It ends before this does, however this ends."""
    with subprocess.Popen([sys.executable, "-c", _RUN, name, *options]) as process:
        try:
            return process.wait()
        except SystemExit:
            process.terminate()
            raise
        except KeyboardInterrupt:  # which it hears too
            process.wait()
            raise


def main(argv: Sequence[str]) -> int:
    known = find()
    cut = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    names, options = list(argv[:cut]), list(argv[cut:])
    if not names and options in (["--list"], ["-h"], ["--help"]):
        print(__doc__)
        for name, line in known.items():
            print(f"  {name:<18} {line}")
        return 0
    unknown = [name for name in names if name not in known]
    if unknown or (options and len(names) != 1):
        wrong = f"no benchmark {unknown[0]!r}" if unknown else f"{' '.join(options)}: name one benchmark for options"
        print(f"benchmarks: {wrong}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        print(f"\n# {name}: {known[name]}", flush=True)
        if run(name, options) != 0:
            failed.append(name)
    if failed:
        print(f"benchmarks: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
