"""All the classic ways to break one line of a file: an operator swapped, a bound moved by one, a branch that is gone.

A break is one edit of one line inside a function, and the file still compiles. Left alone is what no test should have
to hold: type hints, default values, docstrings, texts, what is raised, and the conditions of `while`, which would hang.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
_COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls whose order of arguments says nothing, or whose swap is a mistake of typing and none of thinking.
_ANY_ORDER = {*_OPPOSITE, "isinstance", "zip", "print", "getattr", "hasattr", "setattr", "cast", "gcd", "lcm", "hypot"}


@dataclass(frozen=True)
class Break:
    """One edit: the kind, the function and the line (from 1), and the line before and after without its indentation."""

    kind: str
    function: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class _Edit:
    """Columns of one line, in bytes as ast counts them, and what stands there instead."""

    kind: str
    line: int
    start: int
    end: int
    text: str


def breaks(source: str) -> list[Break]:
    """Every break of a file, in the order of its lines; a line that its function has twice has none."""
    lines = source.encode().split(b"\n")
    found = []
    for name, function in functions(ast.parse(source)):
        texts = [line.strip() for line in lines[function.lineno - 1 : function.end_lineno]]
        for edit in _of_function(function, lines):
            before = lines[edit.line - 1]
            after = before[: edit.start] + edit.text.encode() + before[edit.end :]
            if texts.count(before.strip()) == 1 and _compiles(lines, edit.line, after):
                found.append(Break(edit.kind, name, edit.line, before.decode().strip(), after.decode().strip()))
    return sorted(set(found), key=lambda b: (b.line, b.kind, b.after))


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; one inside another is a part of the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{inside}{node.name}", node
        else:
            yield from functions(node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside)


def _compiles(lines: list[bytes], number: int, text: bytes) -> bool:
    try:
        compile(b"\n".join([*lines[: number - 1], text, *lines[number:]]), "broken", "exec")
    except SyntaxError:
        return False
    return True


def _of_function(function: ast.FunctionDef, lines: list[bytes]) -> Iterator[_Edit]:
    for statement in function.body:
        for node in _nodes(statement):
            if isinstance(node, ast.comprehension) or getattr(node, "lineno", 0) == getattr(node, "end_lineno", 1):
                yield from _of_node(node, lines)
            elif isinstance(node, ast.If):
                yield from _of_branch(node, lines)
    yield from _of_returns(function, lines)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it that may be broken."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
        return
    if isinstance(node, ast.Call) and _name(node.func).endswith(("Error", "refuse", "echo")):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or (field == "test" and isinstance(node, ast.While)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _of_node(node: ast.AST, lines: list[bytes]) -> Iterator[_Edit]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _between("comparison", left, right, *_COMPARED[type(op)], lines)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED and not _texts(left, right):
            yield from _between("operator", left, right, *_COMPUTED[type(op)], lines)
        case ast.BoolOp(op=op, values=[left, right]):
            words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield from _between("and, or", left, right, *words, lines)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _Edit("condition", node.lineno, node.col_offset, operand.col_offset, "")
        case ast.IfExp(test=test) if _plain(test):
            yield _wrapped("condition", test, "not (", ")", lines)
        case ast.comprehension(ifs=[test]) if _plain(test):
            yield _wrapped("condition", test, "not (", ")", lines)
        case ast.Constant(value=bool(value)):
            yield _instead("flag", node, str(not value))
        case ast.Constant(value=int(value) | float(value)):
            yield _instead("constant", node, repr(value + 1))
        case ast.Call(func=ast.Name(id=name)) if name in _OPPOSITE:
            yield _instead("extreme", node.func, _OPPOSITE[name])
        case ast.Call(func=called, args=[first, second, *_]) if _swappable(called, first, second):
            yield _swapped(first, second, lines)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield _instead("dropped", node, "pass")


def _of_branch(node: ast.If, lines: list[bytes]) -> Iterator[_Edit]:
    """An if of several lines whose condition is on the first: never taken, or taken where it was not."""
    if node.test.lineno == node.test.end_lineno == node.lineno:
        yield _wrapped("branch", node.test, "False and (", ")", lines)
        if _plain(node.test):
            yield _wrapped("condition", node.test, "not (", ")", lines)


def _of_returns(function: ast.FunctionDef, lines: list[bytes]) -> Iterator[_Edit]:
    """A value that is returned, by what the function is annotated with: one more, the contrary, the first one lost."""
    kind = ast.unparse(function.returns) if function.returns else ""
    ways = {"int": ("", " + 1"), "float": ("", " + 1"), "bool": ("not ", "")}
    many = ("", "[1:]") if re.match(r"(list|tuple)\[", kind) else None
    way = ways.get(kind) or many
    for node in ast.walk(function):
        value = node.value if isinstance(node, ast.Return) else None
        nothing = (isinstance(value, ast.Constant) and value.value is None) or getattr(value, "elts", None) == []
        if way and value and not nothing and value.lineno == value.end_lineno:
            yield _wrapped("return", value, f"{way[0]}(", f"){way[1]}", lines)


def _plain(test: ast.expr) -> bool:
    """Its comparison, `and` or `not` is broken already."""
    return not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp) and test.lineno == test.end_lineno


def _texts(*sides: ast.expr) -> bool:
    """A sum of texts or of lists, `A | B` of types: another operator would not run at all."""
    words = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)
    return any(
        isinstance(side, words)
        or (isinstance(side, ast.Constant) and not isinstance(side.value, int | float))
        or (isinstance(side, ast.Name | ast.Attribute) and _name(side)[:1].isupper())
        for side in sides
    )


def _swappable(called: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    plain = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
    one_line = first.lineno == second.end_lineno
    differ = ast.dump(first) != ast.dump(second) and _name(called) not in _ANY_ORDER
    return one_line and differ and isinstance(first, plain) and isinstance(second, plain)


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _between(kind: str, left: ast.expr, right: ast.expr, old: str, new: str, lines: list[bytes]) -> Iterator[_Edit]:
    """The operator between two operands, on a line with the end of one and the start of the other."""
    if left.end_lineno != right.lineno:
        return
    start = left.end_col_offset or 0
    text = lines[right.lineno - 1][start : right.col_offset].decode()
    pattern = re.escape(old).replace(r"\ ", r"\s+")
    yield _Edit(kind, right.lineno, start, right.col_offset, re.sub(pattern, lambda _: new, text, count=1))


def _swapped(first: ast.expr, second: ast.expr, lines: list[bytes]) -> _Edit:
    text, start, end = lines[first.lineno - 1], first.col_offset, second.end_col_offset or 0
    a, comma, b = text[start : first.end_col_offset], text[first.end_col_offset : second.col_offset], text[:end]
    return _Edit("arguments", first.lineno, start, end, (b[second.col_offset :] + comma + a).decode())


def _wrapped(kind: str, node: ast.expr, before: str, after: str, lines: list[bytes]) -> _Edit:
    text = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
    return _instead(kind, node, f"{before}{text}{after}")


def _instead(kind: str, node: ast.expr | ast.stmt, text: str) -> _Edit:
    return _Edit(kind, node.lineno, node.col_offset, node.end_col_offset or 0, text)
