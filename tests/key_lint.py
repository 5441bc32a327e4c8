"""A lint for random keys: each is used once, or folded with numbers and used for nothing else.

``split(key, n)[i]`` is ``fold_in(key, i)`` in JAX, and ``normal(key, (n, m))`` begins with the numbers of
``normal(key, (m,))``. So a key that is drawn from twice, or split here and folded there, gives the same noise to things
that should not share it. The lint walks through every function in the order of its statements; the two ways of an
``if`` do not see each other, what a loop holds is walked through twice, and so is what is mapped over an axis.
"""

import ast
import copy
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

#: Names that hold keys.
_KEY = re.compile(r"(^|_)keys?(_|$)")
#: Calls that look at a key without drawing from it, and ``clone``, which says that a second use is meant.
_LOOKS = {"key_data", "wrap_key_data", "clone", "isinstance", "len", "eval_shape", "issubdtype", "zip"}
#: Calls that run a function many times.
_MAPS = {"map", "vmap", "scan", "fori_loop", "while_loop"}


@dataclasses.dataclass(frozen=True)
class Use:
    """A place where a key is used: ``folded`` holds the source of the number it is folded with, if it is."""

    line: int
    column: int
    folded: str | None = None
    varies: bool = False


@dataclasses.dataclass(frozen=True)
class Reuse:
    """A key that is used twice."""

    path: str
    function: str
    name: str
    lines: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[1]}: {self.function} uses {self.name} again, after line {self.lines[0]}"


def check_source(source: str, path: str = "?") -> list[Reuse]:
    """All keys used twice in the functions of a module."""
    found: list[Reuse] = []
    for function in _outermost_functions(ast.parse(source)):
        _Walk(path, function, found)
    return list(dict.fromkeys(found))


def check_package(root: Path) -> list[Reuse]:
    """All keys used twice in the modules of a package that know about keys."""
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if "jax.random" in source or "PRNGKey" in source:
            found += check_source(source, str(path.relative_to(root)))
    return found


def _outermost_functions(tree: ast.AST, prefix: str = "") -> Iterator[ast.FunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _outermost_functions(node)


class _Walk:
    """One function, statement by statement. ``uses`` are those of every key so far; ``None`` after a return."""

    def __init__(self, path: str, function: ast.FunctionDef, found: list[Reuse]):
        self.path, self.name, self.found = path, function.name, found
        self.uses: dict[str, list[Use]] | None = {}
        self.block(function.body)

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self.uses is None:
                return
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Return() | ast.Raise():
                self.children(node)
                self.uses = None
            case ast.If():
                self.expression(node.test)
                self.ways([node.body, node.orelse])
            case ast.For() | ast.While():
                self.expression(node.iter if isinstance(node, ast.For) else node.test)
                for _ in range(2):
                    if isinstance(node, ast.For):
                        self.bind(node.target)
                    self.ways([node.body, []])
                self.block(node.orelse)
            case ast.FunctionDef():
                self.inner(node.args, node.body)
            case ast.With():
                for item in node.items:
                    self.expression(item.context_expr)
                self.block(node.body)
            case ast.Try():
                self.block(node.body)
                self.ways([[], *(handler.body for handler in node.handlers)])
                self.block(node.finalbody)
            case ast.Assign():
                self.expression(node.value)
                for target in node.targets:
                    self.bind(target)
            case ast.AnnAssign() | ast.AugAssign():
                if node.value is not None:
                    self.expression(node.value)
                self.bind(node.target)
            case _:
                self.children(node)

    def ways(self, blocks: list[list[ast.stmt]]) -> None:
        """Ways that do not see each other; what follows sees all that do not return."""
        before, after = self.uses, []
        for block in blocks:
            self.uses = copy.deepcopy(before)
            self.block(block)
            after.append(self.uses)
        left = [uses for uses in after if uses is not None]
        self.uses = None if not left else {}
        for uses in left:
            assert self.uses is not None
            for name, places in uses.items():
                known = self.uses.setdefault(name, [])
                known += [place for place in places if place not in known]

    def bind(self, target: ast.AST) -> None:
        """A name that gets a new value is a new key."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name | ast.Attribute) and self.uses is not None:
                self.uses.pop(ast.unparse(node), None)

    # --- expressions --------------------------------------------------------------------------------------------------

    def expression(self, node: ast.AST | None) -> None:
        match node:
            case None:
                return
            case ast.Call():
                self.call(node)
            case ast.Lambda():
                self.inner(node.args, [ast.Expr(node.body)])
            case ast.IfExp():
                self.expression(node.test)
                self.ways([[ast.Expr(node.body)], [ast.Expr(node.orelse)]])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self.comprehension(node)
            case _:
                self.children(node)

    def children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.expression(child)

    def call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        self.expression(node.func)
        if name == "fold_in":
            number = node.args[1] if len(node.args) > 1 else node.keywords[0].value
            self.expression(number)
            self.use(node.args[0], ast.unparse(number), not isinstance(number, ast.Constant))
            return
        for argument in arguments:
            for _ in range(2 if name in _MAPS and isinstance(argument, ast.Lambda) else 1):
                self.expression(argument)
            if name not in _LOOKS:
                for part in argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]:
                    self.use(part)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.expression(node.generators[0].iter)
        for _ in range(2):
            for generator in node.generators:
                if generator is not node.generators[0]:
                    self.expression(generator.iter)
                self.bind(generator.target)
                for test in generator.ifs:
                    self.expression(test)
            if isinstance(node, ast.DictComp):
                self.expression(node.key)
                self.expression(node.value)
            else:
                self.expression(node.elt)

    def inner(self, arguments: ast.arguments, body: list[ast.stmt]) -> None:
        """A function within: its own names hide those outside, what it uses of these counts as used here."""
        outside = copy.deepcopy(self.uses)
        own = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}
        assert self.uses is not None
        assert outside is not None
        for name in own:
            self.uses.pop(name, None)
        self.ways([body, []])
        uses = self.uses if self.uses is not None else {}
        self.uses = {
            name: (outside.get(name, []) if name in own else uses.get(name, outside.get(name, [])))
            for name in {*uses, *outside}
        }

    def use(self, node: ast.AST, folded: str | None = None, varies: bool = False) -> None:
        """A key is passed on."""
        name = _key_name(node)
        if name is None or self.uses is None:
            return
        new = Use(node.lineno, node.col_offset, folded, varies)
        for old in self.uses.get(name, ()):
            same_fold = old == new and new.varies
            apart = None not in (old.folded, new.folded) and not (old.varies or new.varies) and old.folded != new.folded
            if not (same_fold or apart):
                self.found.append(Reuse(self.path, self.name, name, (old.line, new.line)))
                break
        self.uses.setdefault(name, []).append(new)


def _key_name(node: ast.AST) -> str | None:
    """The name of a key: ``key``, ``self.step_key``, ``keys[0]``."""
    if isinstance(node, ast.Starred):
        return _key_name(node.value)
    if isinstance(node, ast.Subscript):
        inside = _key_name(node.value)
        return None if inside is None else ast.unparse(node)
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) if _KEY.search(node.attr) else None
    return node.id if isinstance(node, ast.Name) and _KEY.search(node.id) else None
