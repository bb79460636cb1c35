"""Parse PTX as nvcc writes it into kernels and instructions. An unknown statement raises."""

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
    """[base + offset], where the base is a register, a variable or a parameter."""
    base: str
    offset: int


@dataclass(frozen=True)
class Instruction:
    """guard: (register, whether it is negated), or None."""
    opcode: str
    operands: tuple
    guard: tuple[str, bool] | None
    text: str


@dataclass(frozen=True)
class Variable:
    """size 0: dynamic shared memory."""
    space: str
    align: int
    size: int
    data: bytes | None = None


@dataclass
class Kernel:
    """parameters: name -> (offset, bytes); registers: name -> type; code: instructions, and labels as strings."""
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
    """variables: those of module scope."""
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]


def type_bytes(type_name: str) -> int:
    return int(re.match(r"[busf](\d+)$", type_name)[1]) // 8


def parse_variable(statement: str) -> tuple[str, Variable]:
    space, align, type_name, name, count, values = VARIABLE.match(statement).groups()
    size = type_bytes(type_name) * (1 if count is None else int(count or 0))
    data = None
    if values is not None:
        items = [int(x) for x in values.strip("{} \n").split(",")]
        data = b"".join((x & (1 << 8 * type_bytes(type_name)) - 1).to_bytes(type_bytes(type_name), "little") for x in items).ljust(size, b"\0")
    return name, Variable(space, int(align or type_bytes(type_name)), size, data)


def parse(text: str) -> Module:
    """Parse a module's variables and kernel headers; `load` parses a kernel's code on demand."""
    text = COMMENT.sub("", text)
    first = text.find(".entry")
    module = Module({}, {})
    for statement in re.findall(r"^(?:\.extern |\.visible |\.weak )*\.(?:global|shared|const) [^;]*", text[: first if first >= 0 else None], re.M):
        name, variable = parse_variable(statement)
        module.variables[name] = variable
    for entry in ENTRY.finditer(text):
        depth, position = 1, entry.end()
        for brace in BRACE.finditer(text, position):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                position = brace.start()
                break
        parameters, offset = {}, 0
        for align, type_name, name, size in PARAMETER.findall(entry[2]):
            n_bytes = int(size or 1) * type_bytes(type_name)
            step = int(align or type_bytes(type_name))
            offset = (offset + step - 1) // step * step
            parameters[name] = (offset, n_bytes)
            offset += n_bytes
        limit = re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", entry[3])
        threads = None if not limit else int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1)
        module.kernels[entry[1]] = Kernel(entry[1], parameters, threads, module, text[entry.end():position])
    return module


def load(kernel: Kernel) -> Kernel:
    """Parse the kernel's code if necessary and return the kernel."""
    if not kernel.code:
        Body(kernel).parse()
    return kernel


class Body:
    """A parser of a kernel's body. Statements end with a semicolon; braces open scopes with their own names, as inline assembly has them."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.text, self.position = kernel, kernel.body, 0
        self.scopes: list[dict[str, str]] = [{}]
        self.n_scopes = 0

    def parse(self) -> None:
        while self.skip_space():
            c = self.text[self.position]
            if c in "{}":
                self.position += 1
                if c == "{":
                    self.scopes.append({})
                    self.n_scopes += 1
                else:
                    self.scopes.pop()
            elif label := LABEL.match(self.text, self.position):
                self.kernel.code.append(self.resolve_name(label[1]))
                self.position = label.end()
            else:
                end = self.text.index(";", self.position)
                self.parse_statement(self.text[self.position:end].strip())
                self.position = end + 1

    def skip_space(self) -> bool:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position < len(self.text)

    def resolve_name(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def parse_statement(self, statement: str) -> None:
        if statement.startswith(".reg"):
            self.declare_registers(*re.match(r"\.reg \.(\w+)\s+(.*)", statement, re.S).groups())
        elif VARIABLE.match(statement):
            name, variable = parse_variable(statement)
            self.kernel.variables[name] = variable
        elif statement.startswith(".param"):  # parameters of a call; calls are not executed
            pass
        elif statement.startswith("."):
            if not statement.startswith(IGNORED):
                raise NotImplementedError(f"{self.kernel.name}: {statement}")
        elif statement:
            self.parse_instruction(statement)

    def declare_registers(self, type_name: str, names: str) -> None:
        for name in (n.strip() for n in names.split(",")):
            if group := re.match(r"(%\w+)<(\d+)>", name):
                self.kernel.registers.update({f"{group[1]}{i}": type_name for i in range(int(group[2]))})
            else:
                self.scopes[-1][name] = f"{name}@{self.n_scopes}" if len(self.scopes) > 1 else name
                self.kernel.registers[self.scopes[-1][name]] = type_name

    def parse_instruction(self, text: str) -> None:
        guard, statement = None, text
        if statement[0] == "@":
            negated, name, statement = GUARD.match(statement).groups()
            guard = (self.resolve_name(name), negated == "!")
        opcode, *rest = statement.split(None, 1)
        self.kernel.code.append(Instruction(opcode, self.parse_operands(rest[0] if rest else ""), guard, " ".join(text.split())))

    def parse_operands(self, text: str) -> tuple:
        """Split operands into strings, Vector and Address. a|b gives two operands, !a one that starts with "!"."""
        tokens = [self.resolve_name(t) for t in TOKEN.findall(text)]
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
                    out.append(Address(self.resolve_name(base), int(offset or "0", 0)))
                i = end
            elif t == "!":
                out.append("!" + tokens[i + 1])
                i += 1
            elif t not in ",|()":
                out.append(t)
            i += 1
        return tuple(out)
