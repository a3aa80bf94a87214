"""Imports point down only, floor by floor (architecture, section 2), and a start stays light."""

import ast
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tokenmill"

# Lowest first. A room may import its own floor and the floors below. engine.messages is plain structs over core, the
# border that text/ fills and the engine reads, and so stands on its own, low.
FLOORS = [
    {"errors", "core", "config"},
    {"engine.messages"},
    {"program"},
    {"models", "quant", "backends"},
    {"text", "grammar", "spec", "lora", "sampling", "weights", "cache"},
    {"engine"},
    {"cluster"},
    {"server", "llm", "outputs"},
    {"platform"},
    {"bench"},
    {"cli", "__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOT = "tokenmill"  # the package itself holds the version and lazy names; every floor may import it


def room_of(module: str) -> str:
    parts = module.split(".")
    inner = ".".join(parts[1:3])
    return inner if inner in FLOOR_OF else parts[1] if len(parts) > 1 else ROOT


class ImportWalker(ast.NodeVisitor):
    """Absolute names of the tokenmill modules a file imports, wherever in the file; TYPE_CHECKING blocks do not count.

    `eager` holds those that run when the module is imported: only they can make a circle.
    """

    def __init__(self, module: str, is_package: bool):
        self.package = module if is_package else module.rpartition(".")[0]
        self.imports: set[str] = set()
        self.eager: set[str] = set()
        self.outside: set[str] = set()
        self.depth = 0

    def add(self, name: str) -> None:
        if name.split(".")[0] != ROOT:
            self.outside.add(name.split(".")[0])
            return
        self.imports.add(name)
        if not self.depth:
            self.eager.add(name)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)
        else:
            for other in node.orelse:
                self.visit(other)

    def visit_FunctionDef(self, node) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            prefix = ".".join(parts[: len(parts) - node.level + 1])
            base = f"{prefix}.{base}" if base else prefix
        for alias in node.names:  # `from . import x` may name a module or a thing in the package
            self.add(f"{base}.{alias.name}" if (SOURCE.parent / base.replace(".", "/")).is_dir() else base)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def walk() -> dict[str, ImportWalker]:
    walkers = {}
    for path in sorted(SOURCE.rglob("*.py")):
        walker = ImportWalker(module_name(path), path.name == "__init__.py")
        walker.visit(ast.parse(path.read_text(), str(path)))
        walkers[module_name(path)] = walker
    return walkers


MODULES = walk()


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name in MODULES} - {ROOT}
    assert rooms <= set(FLOOR_OF), f"give these rooms a floor: {sorted(rooms - set(FLOOR_OF))}"


def test_no_import_points_up():
    upward = [
        f"{name} imports {target}"
        for name, walker in MODULES.items()
        for target in walker.imports
        if room_of(name) != ROOT
        and room_of(target) != ROOT
        and FLOOR_OF.get(room_of(target), 0) > FLOOR_OF[room_of(name)]
    ]
    assert not upward, "\n".join(upward)


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph.get(node, ())):
            if circle := visit(target, [*path, node]):
                return circle
        done.add(node)
        return None

    for node in graph:
        if circle := visit(node, []):
            return circle
    return None


def test_no_circle_between_rooms():
    graph: dict[str, set[str]] = {}
    for name, walker in MODULES.items():
        rooms = {room_of(target) for target in walker.imports} - {ROOT, room_of(name)}
        graph.setdefault(room_of(name), set()).update(rooms)
    graph.pop(ROOT, None)
    assert find_circle(graph) is None


def test_no_circle_between_modules():
    def resolve(target: str) -> str:
        return target if target in MODULES else target.rpartition(".")[0]

    graph = {
        # a package's __init__ imports its own modules, and they may name the package: not a circle of files
        name: {resolve(t) for t in walker.eager if not name.startswith(resolve(t) + ".") and resolve(t) != name}
        for name, walker in MODULES.items()
    }
    assert find_circle(graph) is None


def test_the_walker_sees_what_it_should():
    walker = ImportWalker("tokenmill.engine.engine", False)
    walker.visit(
        ast.parse(
            "from ..core import Request\nfrom . import messages\nif TYPE_CHECKING:\n    from ..server import app\n"
            "def f():\n    import tokenmill.cli.main\n"
        )
    )
    assert walker.imports == {"tokenmill.core", "tokenmill.engine.messages", "tokenmill.cli.main"}
    assert walker.eager == {"tokenmill.core", "tokenmill.engine.messages"}
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_help_answers_at_once():
    """Under 0.3 s with the interpreter's own start; the best of five, since the machine is shared."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "tokenmill.cli.main", "--help"], capture_output=True, text=True)
        times.append(time.perf_counter() - started)
        assert done.returncode == 0 and "serve" in done.stdout, done.stderr
    assert min(times) < 0.3, times


def test_help_imports_nothing_heavy():
    code = "import sys, tokenmill.cli.main; print({'numpy', 'rich', 'tokenizers', 'msgspec'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_no_module_imports_torch():
    """numpy is the only heavy import of a CPU start; torch and its kin belong to tests and to a GPU backend."""
    heavy = {"torch", "transformers", "scipy", "pandas", "gguf"}
    guilty = {
        name: found
        for name, walker in MODULES.items()
        if (found := walker.outside & heavy) and not name.startswith("tokenmill.backends.gpu")
    }
    assert not guilty
