"""Nothing that the product reads can run code: no pickle, and nothing like one.

A pickle that somebody has made runs what it names. What reads one, what compiles text,
and what hands text to a shell is looked for in the sources, by the name that it has
where it was imported from.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).resolve().parents[2]

PACKAGES: Final = ("protos", "psserver", "psworker", "psctl", "examples", "deploy")

FORBIDDEN: Final = {
    **dict.fromkeys(
        (
            *("pickle*", "_pickle*", "marshal*", "shelve*", "copyreg*", "dill*"),
            *("cloudpickle*", "joblib*", "jsonpickle*", "torch.package*"),
            *("pandas.read_pickle", "numpy.lib.npyio*", "torch.serialization*"),
            *("multiprocessing.Pipe", "multiprocessing.Queue", "multiprocessing.Pool"),
            *("multiprocessing.Manager", "multiprocessing.connection*"),
            *("multiprocessing.managers*", "multiprocessing.reduction*"),
        ),
        "reads pickles",
    ),
    **dict.fromkeys(
        (
            "torch.distributed.broadcast_object_list",
            "torch.distributed.*_object",
            "torch.distributed.*_object_list",
            "torch.distributed.rpc*",
        ),
        "sends pickles to processes that read them",
    ),
    **dict.fromkeys(
        (
            "torch.distributed.checkpoint.load*",
            "torch.distributed.checkpoint.state_dict_loader*",
            "torch.distributed.checkpoint.filesystem*",
            "torch.distributed.checkpoint.format_utils*",
        ),
        "reads .metadata, which is a pickle",
    ),
    **dict.fromkeys(
        ("torch.jit.load", "torch.hub*", "torch.export.load", "onnx.load"),
        "reads a program",
    ),
    **dict.fromkeys(
        (
            *("builtins.eval", "builtins.exec", "builtins.compile"),
            *("builtins.__import__", "code.*", "codeop.*", "runpy*"),
            *("os.system", "os.popen", "subprocess.getoutput"),
            "subprocess.getstatusoutput",
        ),
        "runs a text",
    ),
    **dict.fromkeys(
        ("xml*", "lxml*", "xmlrpc*", "plistlib*"),
        "reads XML, which may name files and grow without bound",
    ),
    **dict.fromkeys(
        ("yaml.load", "yaml.load_all", "yaml.full_load*", "yaml.unsafe_load*"),
        "makes any object of YAML",
    ),
    "tempfile.mktemp": "names a file that somebody else may make first",
}
"""What may not be named, with what it does."""

SAFE_BY: Final = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
}
"""What may be called only with this argument, written out."""

NEVER: Final = {"shell": True, "allow_pickle": True, "weights_only": False}
"""Arguments that no call may have, unless they say the opposite."""

ADMITTED: Final = {
    ("psctl/bench/torch_rpc.py", "torch.distributed.rpc"): (
        "the benchmark's rival: both of its processes are its own, on loopback"
    ),
}
"""What is named even so, and why no stranger's bytes come there."""


def test_nothing_that_is_read_can_run() -> None:
    found = {
        (str(path.relative_to(REPOSITORY)), name): f"line {line} {what}"
        for path in sources()
        for line, name, what in named_in(path.read_text())
    }
    admitted = {
        (path, name)
        for path, name in found
        if any(
            path == where and (name == what or name.startswith(f"{what}."))
            for where, what in ADMITTED
        )
    }
    assert {place: found[place] for place in found.keys() - admitted} == {}
    used = {(path, what) for path, name in admitted for _, what in ADMITTED}
    assert used == ADMITTED.keys(), "an exception that nothing needs any more"


def test_all_packages_are_looked_at() -> None:
    seen = {path.relative_to(REPOSITORY).parts[0] for path in sources()}
    assert seen >= {"protos", "psserver", "psworker", "psctl", "examples"}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads",
        "def f():\n    from _pickle import loads",
        "import cloudpickle",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch\ntorch.load('x', weights_only=flag)",
        "import torch as t\nread = t.load",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x')",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "from torch import distributed\ndistributed.all_gather_object([], 1)",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "import torch.distributed.checkpoint as dcp\ndcp.load({})",
        "eval('1')",
        "exec('1')",
        "run = eval",
        "import os\nos.system('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import subprocess\nsubprocess.run('x', shell=flag)",
        "from xml.etree import ElementTree",
        "import yaml\nyaml.load('x')",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\nopen_it = torch.serialization.load",
        "from multiprocessing import Queue",
    ],
)
def test_each_way_is_noticed(code: str) -> None:
    assert list(named_in(code))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import subprocess\nsubprocess.run(['x'], shell=False)",
        "import yaml\nyaml.safe_load('x')",
        "import re\nre.compile('x')",
        "import multiprocessing\nmultiprocessing.current_process()",
        "from torch.distributed.checkpoint.state_dict_saver import save",
    ],
)
def test_what_is_safe_is_not(code: str) -> None:
    assert not list(named_in(code))


def sources() -> Iterator[Path]:
    """All but what protobuf has generated, which names messages and their parser."""
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path


def named_in(code: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and deed of all that is forbidden in a text."""
    tree = ast.parse(code)
    names = dict(imported(tree))
    called = {
        id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, name in imported(node):
                yield from judged(node.lineno, name, None)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, names)
            yield from judged(node.lineno, name, called.get(id(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ("pickle", "_pickle", "marshal", "cloudpickle", "dill"):
                yield node.lineno, node.value, "names a module that reads pickles"
        elif isinstance(node, ast.Call):
            for each in node.keywords:
                is_never = each.arg in NEVER and dotted(node.func, names) not in SAFE_BY
                if is_never and not is_constant(each, not NEVER[str(each.arg)]):
                    yield node.lineno, f"{each.arg}=", "may run what it is given"


def judged(
    line: int, name: str, call: ast.Call | None
) -> Iterator[tuple[int, str, str]]:
    if what := deed(name):
        yield line, name, what
    elif name in SAFE_BY:
        argument, value = SAFE_BY[name]
        given = [] if call is None else call.keywords
        if not any(each.arg == argument and is_constant(each, value) for each in given):
            yield line, name, f"reads pickles without {argument}={value}"


@cache
def deed(name: str) -> str:
    """What it does that is forbidden; empty for nothing."""
    for pattern, what in FORBIDDEN.items():
        if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
            return what
    return ""


def is_constant(argument: ast.keyword, value: object) -> bool:
    return isinstance(argument.value, ast.Constant) and argument.value.value is value


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that imports bind, with what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.asname:
                    yield each.asname, each.name
                else:
                    top = each.name.partition(".")[0]
                    yield top, top
                    if each.name != top:
                        yield f" {each.name}", each.name  # to be judged, binds nothing
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of an expression; empty where it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, f"builtins.{node.id}")
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
