"""Bounds written into the syntax tree of a template.

Jinja compiles comparisons, `~`, literals of lists, slices and loops to Python's own, which nothing
counts: here they become filters that do.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from yocolm.template.bounds import STEP


def bound(tree: nodes.Template) -> nodes.Template:
    """The program with what counts its work; the tree itself is changed."""
    environment = tree.environment
    assert environment is not None
    _Bounds().visit(tree)
    tree.set_environment(environment)
    return tree


class _Bounds(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """`a < b < c` is `a < b and b < c`."""
        self.generic_visit(node)
        pairs, left = [], node.expr
        for operand in node.ops:
            name = nodes.Const(operand.op, lineno=node.lineno)
            pairs.append(_filter("_compare", left, name, operand.expr))
            left = operand.expr
        return reduce(lambda one, two: nodes.And(one, two, lineno=node.lineno), pairs)

    def _made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # what is assigned to
        return _filter("_made", node)

    visit_List = visit_Tuple = visit_Dict = _made

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        step = _step(node.lineno, STEP + written)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_step(node.lineno, STEP), node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted


def _step(line: int, cost: int) -> nodes.Filter:
    return _filter("_step", nodes.Const(None, lineno=line), nodes.Const(cost, lineno=line))


def _filter(name: str, node: Any, *args: Any) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
