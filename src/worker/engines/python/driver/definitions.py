"""Source text of top-level definitions: classes above all, which are saved as source and run again.

Owns, by source name (`<exec 7>`), the spans of top-level statements, and by variable name the statement that bound it
last. Runs nothing.
"""
import _ast

from _ryokan import trace

_DEFINING = (_ast.ClassDef, _ast.FunctionDef, _ast.AsyncFunctionDef)
_BLOCKS = (_ast.If, _ast.Try, _ast.With, _ast.AsyncWith, _ast.For, _ast.AsyncFor, _ast.While, _ast.ExceptHandler)

_spans = {}
_latest = {}
_classes = {}
_sequence = 0


class Statement:
    """A top-level statement with the context to run it again."""

    __slots__ = ("file", "first", "last", "columns", "indented", "flags", "_text")

    @property
    def text(self):
        """The source text, extracted at the first request; None if the source was evicted."""
        if self._text is None:
            source = trace.sources.get(self.file)
            if source is not None:
                lines = source.encode("utf-8", "surrogatepass").splitlines(True)[self.first - 1 : self.last]
                if not self.indented and lines:
                    if not lines[-1][self.columns[1] :].lstrip().startswith(b"#"):
                        lines[-1] = lines[-1][: self.columns[1]]
                    lines[0] = lines[0][self.columns[0] :]
                self._text = b"".join(lines).decode("utf-8", "replace").rstrip("\r\n")
        return self._text

    def form(self):
        place = {"file": self.file, "first": self.first, "indented": self.indented}
        return {**place, "text": self.text, "flags": self.flags}

    @classmethod
    def of_form(cls, form):
        made = cls()
        made.file, made.first, made.indented = str(form["file"]), int(form["first"]), bool(form["indented"])
        made._text, made.flags = str(form["text"]), int(form["flags"])
        made.last = made.first + made._text.count("\n")
        return made

    def compile(self):
        """Code with its original file name and line numbers."""
        if self.indented:
            text = "\n" * max(self.first - 2, 0) + "if 1:\n" + self.text
        else:
            text = "\n" * (self.first - 1) + self.text
        return compile(text, self.file, "exec", self.flags, True)


def forget():
    _spans.clear()
    _latest.clear()
    _classes.clear()


def note(tree, name, flags, has_functions):
    """Records the top-level statements of an execution that may define something."""
    found = []
    _collect(tree.body, found, has_functions)
    for node, target in found:
        statement = Statement()
        statement.file, statement.flags, statement._text = name, flags, None
        decorators = getattr(node, "decorator_list", None)
        statement.first = decorators[0].lineno if decorators else node.lineno
        statement.last = node.end_lineno
        statement.indented = node.col_offset > 0 and statement.last > statement.first
        statement.columns = (0 if decorators else node.col_offset, node.end_col_offset)
        if has_functions:
            _spans.setdefault(name, []).append(statement)
        if target is not None:
            _latest[target] = statement
    for gone in [file for file in _spans if file not in trace.sources] if len(_spans) > 1000 else ():
        del _spans[gone]


def _collect(statements, found, has_functions):
    for node in statements:
        kind = type(node)
        if kind in _DEFINING:
            found.append((node, node.name))
        elif kind is _ast.Assign or kind is _ast.AnnAssign:
            targets = node.targets if kind is _ast.Assign else [node.target]
            if has_functions or type(node.value) is _ast.Call:
                name = targets[0].id if len(targets) == 1 and type(targets[0]) is _ast.Name else None
                found.append((node, name))
        elif kind in _BLOCKS or kind.__name__ == "TryStar":
            for part in ("body", "orelse", "finalbody", "handlers"):
                _collect(getattr(node, part, ()), found, has_functions)
        elif has_functions:
            found.append((node, None))


def containing(file, line):
    """The statement that contains a line, or None."""
    best = None
    for statement in _spans.get(file, ()):
        if statement.first <= line <= statement.last and (best is None or statement.first >= best.first):
            best = statement
    return best


def bound(name):
    """The statement that last bound a name, or None."""
    return _latest.get(name)


def class_source(name, kind):
    """(sequence number, Statement) of the class bound to `name`, or None."""
    global _sequence
    known = _classes.get(name)
    if known is not None and known[0] == id(kind):
        return known[1:]
    statement = _latest.get(name)
    if statement is None or statement.text is None:
        return None
    _sequence += 1
    _classes[name] = (id(kind), _sequence, statement)
    return _classes[name][1:]


def is_recorded(name, kind):
    """Whether the class can be rebuilt."""
    known = _classes.get(name)
    return known is not None and known[0] == id(kind)


def restored(name, kind, sequence, statement):
    """Records a loaded class."""
    global _sequence
    _sequence = max(_sequence, sequence)
    _classes[name] = (id(kind), sequence, statement)
    adopt(name, statement)


def adopt(name, statement):
    """A statement of an earlier process: its lines serve tracebacks, too."""
    if name is not None:
        _latest[name] = statement
    spans = _spans.setdefault(statement.file, [])
    if any(known.first == statement.first and known.last == statement.last for known in spans):
        return
    spans.append(statement)
    lines = trace.sources.get(statement.file, "").split("\n")
    added = statement.text.split("\n")
    until = statement.first - 1 + len(added)
    lines += [""] * (until - len(lines))
    lines[statement.first - 1 : until] = added
    trace.remember(statement.file, "\n".join(lines))
