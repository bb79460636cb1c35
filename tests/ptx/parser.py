"""PTX as nvcc writes it, to kernels and instructions. Only what nvcc writes is read: a statement this does not know raises."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
ENTRY = re.compile(r"\.entry\s+(\S+?)\((.*?)\)\s*((?:\.\w+[^\n{]*\n)*)\s*\{", re.S)
PARAMETER = re.compile(r"\.param(?: \.align (\d+))? \.(\w+)(?: \.ptr[^,\[]*?)? (\w+)(?:\[(\d+)\])?\s*(?:,|$)")
VARIABLE = re.compile(r"(?:\.extern |\.visible |\.weak )*\.(global|shared|local|const)(?:\s+\.align (\d+))?\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?: = (.*))?$", re.S)
LABEL = re.compile(r"([$\w]+):(?!:)")
GUARD = re.compile(r"@(!?)(\S+)\s+(.*)", re.S)
BRACE = re.compile(r"[{}]")
TOKEN = re.compile(r"[\[\]{},|!]|[^\s\[\]{},|!]+")
ADDRESS = re.compile(r"([%$\w@]+)(?:\+(-?\w+))?$")
IGNORED = (".loc", ".pragma", ".file", ".callseq", ".section")


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""
    items: tuple[str, ...]


@dataclass(frozen=True)
class Address:
    """[base + offset]: base is a register, a variable or a parameter."""
    base: str
    offset: int


@dataclass(frozen=True)
class Instruction:
    """guard: (register, whether it must be false), or None."""
    opcode: str
    operands: tuple
    guard: tuple[str, bool] | None
    text: str


@dataclass(frozen=True)
class Variable:
    """size 0: as many bytes of shared memory as the launch asks for."""
    space: str
    align: int
    size: int
    data: bytes | None = None


@dataclass
class Kernel:
    """parameters: name to (offset, bytes); registers: name to type; code: instructions, and labels as strings."""
    name: str
    parameters: dict[str, tuple[int, int]]
    max_threads: int | None
    module: Module
    body: str
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction | str] = field(default_factory=list)


@dataclass
class Module:
    """variables: those of the whole module."""
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]


def bytes_of(type_name: str) -> int:
    return int(re.match(r"[busf](\d+)$", type_name)[1]) // 8


def variable(statement: str) -> tuple[str, Variable]:
    space, align, type_name, name, count, values = VARIABLE.match(statement).groups()
    size = bytes_of(type_name) * (1 if count is None else int(count or 0))
    data = None
    if values is not None:
        items = [int(x) for x in values.strip("{} \n").split(",")]
        data = b"".join((x & (1 << 8 * bytes_of(type_name)) - 1).to_bytes(bytes_of(type_name), "little") for x in items).ljust(size, b"\0")
    return name, Variable(space, int(align or bytes_of(type_name)), size, data)


def parse(text: str) -> Module:
    """The module's kernels with their parameters; code is parsed by `load` when it is wanted."""
    text = COMMENT.sub("", text)
    first = text.find(".entry")
    module = Module({}, {})
    for statement in re.findall(r"^(?:\.extern |\.visible |\.weak )*\.(?:global|shared|const) [^;]*", text[: first if first >= 0 else None], re.M):
        name, found = variable(statement)
        module.variables[name] = found
    for entry in ENTRY.finditer(text):
        depth, at = 1, entry.end()
        for brace in BRACE.finditer(text, at):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                at = brace.start()
                break
        parameters, offset = {}, 0
        for align, type_name, name, size in PARAMETER.findall(entry[2]):
            n_bytes = int(size or 1) * bytes_of(type_name)
            step = int(align or bytes_of(type_name))
            offset = (offset + step - 1) // step * step
            parameters[name] = (offset, n_bytes)
            offset += n_bytes
        limit = re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", entry[3])
        threads = None if not limit else int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1)
        module.kernels[entry[1]] = Kernel(entry[1], parameters, threads, module, text[entry.end():at])
    return module


def load(kernel: Kernel) -> Kernel:
    """The kernel with its code."""
    if not kernel.code:
        Body(kernel).parse()
    return kernel


class Body:
    """Statements end with a semicolon; a brace that begins one opens a scope, whose names are its own (inline assembly has such)."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.text, self.at = kernel, kernel.body, 0
        self.scopes: list[dict[str, str]] = [{}]
        self.n_scopes = 0

    def parse(self) -> None:
        while self.skip_space():
            c = self.text[self.at]
            if c in "{}":
                self.at += 1
                if c == "{":
                    self.scopes.append({})
                    self.n_scopes += 1
                else:
                    self.scopes.pop()
            elif label := LABEL.match(self.text, self.at):
                self.kernel.code.append(self.renamed(label[1]))
                self.at = label.end()
            else:
                end = self.text.index(";", self.at)
                self.statement(self.text[self.at:end].strip())
                self.at = end + 1

    def skip_space(self) -> bool:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at < len(self.text)

    def renamed(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def statement(self, s: str) -> None:
        if s.startswith(".reg"):
            self.declare_registers(*re.match(r"\.reg \.(\w+)\s+(.*)", s, re.S).groups())
        elif VARIABLE.match(s):
            name, found = variable(s)
            self.kernel.variables[name] = found
        elif s.startswith(".param"):  # of a call, which nothing that runs here does
            pass
        elif s.startswith("."):
            if not s.startswith(IGNORED):
                raise NotImplementedError(f"{self.kernel.name}: {s}")
        elif s:
            self.instruction(s)

    def declare_registers(self, type_name: str, names: str) -> None:
        for name in (n.strip() for n in names.split(",")):
            if many := re.match(r"(%\w+)<(\d+)>", name):
                self.kernel.registers.update({f"{many[1]}{i}": type_name for i in range(int(many[2]))})
            else:
                self.scopes[-1][name] = f"{name}@{self.n_scopes}" if len(self.scopes) > 1 else name
                self.kernel.registers[self.scopes[-1][name]] = type_name

    def instruction(self, text: str) -> None:
        guard, s = None, text
        if s[0] == "@":
            negated, name, s = GUARD.match(s).groups()
            guard = (self.renamed(name), negated == "!")
        opcode, *rest = s.split(None, 1)
        self.kernel.code.append(Instruction(opcode, self.operands(rest[0] if rest else ""), guard, " ".join(text.split())))

    def operands(self, text: str) -> tuple:
        """Strings, Vector, Address; a|b gives two, !a one that begins with "!"."""
        tokens = [self.renamed(t) for t in TOKEN.findall(text)]
        out, i = [], 0
        while i < len(tokens):
            t = tokens[i]
            if t in "{[":
                end = tokens.index({"{": "}", "[": "]"}[t], i)
                inner = tokens[i + 1:end]
                if t == "{":
                    out.append(Vector(tuple(x for x in inner if x != ",")))
                else:
                    base, offset = ADDRESS.match("".join(inner)).groups()
                    out.append(Address(self.renamed(base), int(offset or "0", 0)))
                i = end
            elif t == "!":
                out.append("!" + tokens[i + 1])
                i += 1
            elif t not in ",|()":
                out.append(t)
            i += 1
        return tuple(out)
