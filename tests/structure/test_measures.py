"""Each measure of the structure finds what it is for, and nothing else, in small sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import files, imports, purity
from tests.structure.__main__ import (
    MANY_WRITERS,
    MEASURES,
    Code,
    Measure,
    fields_of_many,
    line,
    listed,
    main,
    without_docstring,
)
from tests.structure.code import modules_in, name_of, parsed
from tests.structure.writers import Writers, writers


def circles(sources: dict[str, str], *, for_types: bool = False) -> list[list[str]]:
    return imports.circles([parsed(path, source) for path, source in sources.items()], for_types=for_types)


def test_generated_code_and_links_are_not_measured(tmp_path: Path) -> None:
    for path in ("protocol/v1/a_pb2.py", "node/core/site.py", "src/atoll/cli/main.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("", encoding="utf-8")
    (tmp_path / "src/atoll/node").symlink_to("../../node")
    assert [module.path for module in modules_in(tmp_path)] == ["node/core/site.py", "src/atoll/cli/main.py"]


def test_modules_have_the_names_by_which_they_are_imported() -> None:
    paths = ("src/atoll/__init__.py", "src/atoll/cli/main.py", "node/core/__init__.py", "node/core/site.py")
    assert [name_of(path) for path in paths] == ["atoll", "atoll.cli.main", "atoll.node.core", "atoll.node.core.site"]


def test_modules_that_import_each_other_are_a_circle() -> None:
    sources = {
        "node/__init__.py": "",
        "node/a.py": "from atoll.node import b",
        "node/b.py": "try:\n    from atoll.node.c import x\nexcept ImportError:\n    pass",
        "node/c.py": "import atoll.node.a\nimport os",
        "node/d.py": "from atoll.node import a",
    }
    assert circles(sources) == [["atoll.node.a", "atoll.node.b", "atoll.node.c"]]
    assert circles(sources | {"node/c.py": "def f():\n    import atoll.node.a"}) == []


def test_two_circles_are_two_and_a_module_may_import_itself() -> None:
    sources = {
        "node/a.py": "import atoll.node.b\nimport atoll.node.c",
        "node/b.py": "import atoll.node.a",
        "node/c.py": "import atoll.node.d",
        "node/d.py": "import atoll.node.c",
        "node/e.py": "import atoll.node.e",
    }
    assert sorted(circles(sources)) == [
        ["atoll.node.a", "atoll.node.b"],
        ["atoll.node.c", "atoll.node.d"],
        ["atoll.node.e"],
    ]


def test_imports_for_types_make_circles_of_their_own() -> None:
    sources = {
        "node/a.py": "if TYPE_CHECKING:\n    from atoll.node.b import B",
        "node/b.py": "from atoll.node.a import A",
    }
    assert circles(sources) == []
    assert circles(sources, for_types=True) == [["atoll.node.a", "atoll.node.b"]]
    assert circles(sources | {"node/a.py": "if True:\n    from atoll.node.b import B"}) != []


def test_lines_are_counted() -> None:
    source = (
        '"""Two\nlines."""\n\n# a comment\nX = """\nthree\n"""\n\n\nclass A:\n    x: int  # bits\n    """Of x."""\n'
    )
    module = parsed("node/a.py", source)
    assert files.num_lines(module) == 12
    assert files.size_of(module) == files.Size(lines=5, tokens=9, docstring_lines=3)


@pytest.mark.parametrize(
    ("source", "forwards"),
    [
        ('"""What the package is for."""', False),
        ("from a import b\n\n__all__ = ['b']", True),
        ('"""Names."""\nimport a\n\nb = a.b', True),
        ("import a\n\ndef b(x, *y):\n    '''As a's.'''\n    return a.b(x, *y)", True),
        ("import a\n\nasync def b(x):\n    await a.b(x=x)", True),
        ("import a\n\ndef b(x):\n    return a.b(x + 1)", False),
        ("import a\n\ndef b(x):\n    x += 1\n    return a.b(x)", False),
        ("import a\n\nb = a.b()", False),
        ("class A:\n    pass", False),
    ],
)
def test_a_file_only_forwards(source: str, forwards: bool) -> None:
    assert files.only_forwards(parsed("node/a.py", source)) == forwards


def test_public_functions_without_a_docstring_are_found() -> None:
    source = """
def f(): ...
def said():
    "What it does."
def _own(): ...
class A:
    def method(self):
        def inner(): ...
    def __len__(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, size): ...
    @overload
    def typed(self): ...
class _B:
    def method(self): ...
"""
    assert files.without_docstring(parsed("node/core/a.py", source)) == ["f", "A.method", "A.size"]


PYPROJECT = f"""
[[tool.importlinter.contracts]]
name = "another"
source_modules = ["atoll.protocol"]
forbidden_modules = ["math"]

[[tool.importlinter.contracts]]
name = "{purity.CONTRACT}"
source_modules = ["atoll.node.core"]
forbidden_modules = ["os", "time"]
"""


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("node/core/a.py", "import math\nfrom atoll.node.core import time", []),
        ("node/core/a.py", "import os.path\n\ndef f():\n    from time import monotonic", ["os.path", "time"]),
        ("node/core/a.py", "def f(p):\n    with open(p) as file:\n        p.open(file)", ["open()"]),
        ("node/corex/a.py", "import os", []),
        ("node/b.py", '"""Sizes. Pure."""\nimport os', ["os"]),
        ("node/b.py", '"""Purely sizes."""\nimport os', []),
    ],
)
def test_what_pure_modules_reach_for_is_found(path: str, source: str, found: list[str]) -> None:
    assert purity.impurities(parsed(path, source), purity.contract_of(PYPROJECT)) == found


def test_a_missing_contract_is_an_error() -> None:
    with pytest.raises(KeyError):
        purity.contract_of(PYPROJECT.replace(purity.CONTRACT, "no contract"))


STATE = """
@dataclass(slots=True)
class Sync:
    phase: int
    ready: dict[int, int]
    members: Members
@dataclass
class Run:
    sync: Sync
    phase: int
class Members:
    def __init__(self):
        self.by_id = {}
    def add(self, site):
        self.by_id[site] = 1
@dataclass(frozen=True)
class Plan:
    term: int
"""


def written(**sources: str) -> dict[str, list[str]]:
    """By `Class.field`, the modules of the core that write it, where `state` has the classes."""
    found = found_in(**sources)
    return {f"{class_.name}.{field}": sorted(paths) for (class_, field), paths in found.by_field.items()}


def found_in(**sources: str) -> Writers:
    modules = [parsed(f"node/core/{name}.py", source) for name, source in sources.items()]
    return writers([parsed("node/core/state.py", STATE), *modules])


OWN = {"Members.by_id": ["node/core/state.py"]}


@pytest.mark.parametrize(
    "statement",
    [
        "sync.ready = {}",
        "sync.ready[1] = 2",
        "sync.ready[1][2] += 2",
        "del sync.ready[1]",
        "sync.ready.pop(1)",
        "sync.ready[1].add(2)",
        "run.sync.ready |= {}",
        "x, (y, sync.ready) = 1, (2, {})",
        "whatever().ready.clear()",
        "self.other.ready = {}",
    ],
)
def test_writes_of_a_field_are_found(statement: str) -> None:
    assert written(a=statement) == OWN | {"Sync.ready": ["node/core/a.py"]}


@pytest.mark.parametrize(
    "statement",
    [
        "ready = sync.ready[1]",
        "sync.ready.get(1)",
        "sync.members.add(1)",
        "plan.term = 1",
        "ready.pop(1)",
    ],
)
def test_what_changes_no_field_of_a_state_is_no_write(statement: str) -> None:
    assert written(a=statement) == OWN


def test_what_a_class_writes_of_itself_is_its_own() -> None:
    assert written(a="class A:\n    def f(self):\n        self.ready = 1") == OWN | {"A.ready": ["node/core/a.py"]}


def test_writers_of_a_field_are_all_found() -> None:
    found = written(a="sync.ready = {}", b="def f(sync):\n    sync.ready.clear()")
    assert found == OWN | {"Sync.ready": ["node/core/a.py", "node/core/b.py"]}


@pytest.mark.parametrize(
    ("statement", "owner"),
    [
        ("def f(x: Sync):\n    x.phase = 1", "Sync.phase"),
        ("def f(x: 'Run | None'):\n    x.phase = 1", "Run.phase"),
        ("x: Run = g()\n\ndef f():\n    run.sync.phase = 1", "Sync.phase"),
        ("self._run.phase = 1", "Run.phase"),
        ("class A:\n    now: Sync\n\ndef f(a):\n    a.now.phase = 1", "Sync.phase"),
    ],
)
def test_of_several_classes_with_a_field_the_written_one_is_found(statement: str, owner: str) -> None:
    assert written(a=statement) == OWN | {owner: ["node/core/a.py"]}


def test_a_write_of_no_clear_class_is_said() -> None:
    found = found_in(a="x = 1\nx.phase = 2")
    assert [(write.module.path, write.line, write.field) for write in found.of_no_class] == [
        ("node/core/a.py", 2, "phase")
    ]


def test_outside_of_the_cores_a_write_counts_by_its_annotation_alone() -> None:
    outside = parsed("node/daemon/a.py", "def f(sync, known: Sync):\n    sync.ready = {}\n    known.ready = {}")
    found = writers([parsed("node/core/state.py", STATE), outside]).by_field
    assert [(field, paths) for (_, field), paths in found.items() if field == "ready"] == [
        ("ready", {"node/daemon/a.py"})
    ]


@pytest.mark.parametrize(
    ("figure", "step", "said"),
    [
        (8, 1, "     8 things (bound 7, goal 0): TOO MANY"),
        (7, 1, "     7 things (bound 7, goal 0)"),
        (5, 1, "     5 things (bound 7, goal 0): lower the bound to 5"),
        (5, 3, "     5 things (bound 7, goal 0)"),
        (4, 3, "     4 things (bound 7, goal 0): lower the bound to 6"),
    ],
)
def test_a_figure_is_held_against_its_bound(figure: int, step: int, said: str) -> None:
    assert line(Measure("things", goal=0, bound=7, of=lambda code: listed([]), step=step), figure) == said


def test_a_figure_beyond_its_bound_is_said_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.structure.__main__.IMPURE", {})
    (measure,) = (measure for measure in MEASURES if measure.of is without_docstring)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (tmp_path / "node" / "core").mkdir(parents=True)
    functions = "".join(f"def f{i}(): ...\n" for i in range(measure.bound))
    (tmp_path / "node" / "core" / "site.py").write_text(functions, encoding="utf-8")
    assert main(["--root", str(tmp_path)]) == 0
    assert "TOO MANY" not in capsys.readouterr().out

    (tmp_path / "node" / "core" / "one_more.py").write_text("def f(): ...\n", encoding="utf-8")
    assert main(["--root", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    place = said.index(line(measure, measure.bound + 1))
    assert said[place].endswith("TOO MANY")
    assert "    node/core/one_more.py: f" in said[place:]


def test_fields_of_several_writers_are_found_but_for_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [parsed(f"node/core/{name}.py", "sync.ready = 1") for name in "ab"]
    code = Code([parsed("node/core/state.py", STATE), *modules], PYPROJECT)
    assert fields_of_many(code).offenders == [
        "Sync.ready of node/core/state.py: node/core/a.py, node/core/b.py",
    ]
    monkeypatch.setitem(MANY_WRITERS, "Sync.ready", "a reason")
    assert fields_of_many(code).figure == 0
    monkeypatch.setitem(MANY_WRITERS, "Sync.members", "an old reason")
    assert fields_of_many(code).offenders == ["Sync.members is an exception without need"]
