"""Device files that try to run code of their author's: a canary is written where one succeeds.

Every payload is put at every place of the small model's file. `control` is what the file does when it is trusted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

# Expressions that write the file CANARY.
PAYLOADS = {
    "open": 'open("CANARY", "w").close()',
    "import": '__import__("os").system("touch CANARY")',
    "exec": "exec(\"open('CANARY', 'w')\")",
    "eval": "eval(\"open('CANARY', 'w')\")",
    "save": 'torch.save(torch.ones(1), "CANARY")',
    "from_file": 'torch.from_file("CANARY", shared=True, size=4)',
    "torch.os": 'torch.os.system("touch CANARY")',
    "through F": 'F.warnings.sys.modules["os"].system("touch CANARY")',
    "getattr": 'getattr(torch, "save")(torch.ones(1), "CANARY")',
    "subclasses": '[k for k in ().__class__.__base__.__subclasses__() if k.__name__ == "Popen"][0]("true >CANARY", -1, '
    "None, None, None, None, None, True, True).wait()",
    "globals": 'nn.Module.__init__.__globals__["torch"].save(torch.ones(1), "CANARY")',
    "lambda": '(lambda: open("CANARY", "w"))()',
    "f-string": "f\"{open('CANARY', 'w')}\"",
    "walrus": '(c := open("CANARY", "w"))',
    "comprehension": '[open("CANARY", "w") for _ in range(1)]',
}

_TOP, _BLOCK, _STAGE = "\n\nclass TinyBlock(Scope):", "class TinyBlock(Scope):", "class Stage0(Stage):"
_FORWARD, _STEP = "def forward(self, ids, labels):", "def step(rt, batch):"
_RETURN = "        return cross_entropy, logits "
_FIRST, _INIT = "        mask = ids.ne(0)", "        self.blocks = Scope()"
_BASES = "from penstock.runtime.modules import Scope, Stage, draw_at\n"
_OTHERS = _BASES.replace("Scope, ", "")

# Where an expression, {}, is put: a piece of the file, and what stands in its place. Each piece occurs once.
PLACES = {
    "a statement of the file": (_TOP, "\n{}\n" + _TOP),
    "an assignment of the file": (_TOP, "\nVALUE = {}\n" + _TOP),
    "an annotation of the file": (_TOP, "\nvalue: {}\n" + _TOP),
    "behind the programs": ("    return {}\n", "    return {}\n\n\n{E}\n"),
    "a condition of the file": (_TOP, "\nif {}:\n    pass\n" + _TOP),
    "try": (_TOP, "\ntry:\n    {}\nexcept Exception:\n    pass\n" + _TOP),
    "with": (_TOP, "\nwith torch.no_grad():\n    {}\n" + _TOP),
    "a function of its own": (_TOP, "\ndef more(x={}):\n    return x\n" + _TOP),
    "a class of its own": (_TOP, "\nclass More:\n    x = {}\n" + _TOP),
    "a class's decorator": (_STAGE, "@({} or (lambda k: k))\nclass Stage0(Stage):"),
    "a class's base": (_STAGE, "class Stage0(Stage if {} else Stage):"),
    "a class's metaclass": (_STAGE, "class Stage0(Stage, metaclass=type({} and Stage or Stage)):"),
    "a class's body": (_STAGE, _STAGE + "\n    x = {}\n"),
    "a method of its own": (_STAGE, _STAGE + "\n    def more(self, x={}):\n        return x\n"),
    "a forward's decorator": ("    " + _FORWARD, "    @({} or (lambda f: f))\n    " + _FORWARD),
    "a forward's default": (_FORWARD, "def forward(self, ids, labels, x={}):"),
    "a forward's annotation": (_FORWARD, "def forward(self, ids: ({}), labels):"),
    "a forward's return type": (_FORWARD, "def forward(self, ids, labels) -> ({}):"),
    "a statement of forward": (_FIRST, "        {}\n" + _FIRST),
    "an assignment of forward": (_FIRST, "        value = {}\n" + _FIRST),
    "an argument in forward": ("self.embed(ids)", "self.embed(ids, *[{}][:0])"),
    "an index in forward": ("[:, None] * self", "[:, None, ({}, None)[1]][:, :, 0] * self"),
    "a loop in forward": ("for i in range(3):\n            x =", "for i in range(({}, 3)[1]):\n            x ="),
    "a choice in forward": (_FIRST, "        value = 1 if {} else 2\n" + _FIRST),
    "a with in forward": ("with torch.no_grad():", "with torch.set_grad_enabled(bool({} and 0)):"),
    "a function in forward": (_FIRST, "        def more():\n            {}\n        more()\n" + _FIRST),
    "a tile in forward": (_FIRST, "        def tile(x):\n            return {}\n        tile(ids)\n" + _FIRST),
    "a return of forward": (_RETURN, "        return ({}, cross_entropy)[1], logits "),
    "a statement of __init__": ("        self.blocks = Scope()", "        {}\n        self.blocks = Scope()"),
    "a member of __init__": ("        self.blocks = Scope()", "        self.x = {}\n        self.blocks = Scope()"),
    "a layer's argument": ("nn.Embedding(8, 4)", "nn.Embedding(8, ({}, 4)[1])"),
    "a buffer's argument": ("torch.empty(4)", "torch.empty(({}, 4)[1])"),
    "a loop of __init__": ("for i in range(3):\n            self", "for i in range(({}, 3)[1]):\n            self"),
    "STAGES": ('{"stage0": Stage0}', '{"stage0": ({}, Stage0)[1]}'),
    "a step's decorator": (_STEP, "@({} or (lambda f: f))\n" + _STEP),
    "a step's default": (_STEP, "def step(rt, batch={}):"),
    "a step's annotation": (_STEP, "def step(rt: ({}), batch):"),
    "a second step": (_STEP, "def step(rt, batch):\n    return {}\n\n\ndef step(rt, batch, x={E}):"),
    "an evaluate": (_STEP, "def evaluate(rt, batch, x={}):\n    return {E}\n\n\n" + _STEP),
    "a step's body": ("    return {}\n", "    {E}\n    return {}\n"),
    "a step's return": ("    return {}\n", '    return {"loss": [{E}]}\n'),
}

# Statements put at the beginning of the stage's forward. C() stands for the payload that opens CANARY.
IN_FORWARD = {
    "import in forward": "import os\nos.system('touch CANARY')",
    "async": "async def more():\n    C()\nmore().send(None)",
    "match": "match C():\n    case _:\n        pass",
    "while": "while C() is None:\n    pass",
    "assert": "assert C()",
    "raise": "raise ValueError(C())",
    "global": "global torch\ntorch = C()",
    "yield": "yield C()",
    "del": "x = [C()]\ndel x[0]",
    "finally": "try:\n    pass\nfinally:\n    C()",
    "with as": "with C() as f:\n    pass",
    "format": "name = '{0.__class__.__init__.__globals__}'.format(self)\nC()",
    "apply_": "torch.ones(1).apply_(lambda v: C() and v)",
    "map_": "torch.ones(1).map_(torch.ones(1), lambda a, b: C() and a)",
    "a tensor's hook": "torch.ones(1, requires_grad=True).register_hook(C().write)",
    "a module's hook": "self.embed.register_forward_hook(lambda *a: C() and None)",
    "apply of a module": "self.apply(lambda m: C() and None)",
    "torch assigned": "torch.tanh = C()",
    "a local called torch": "torch = __import__('os')\ntorch.system('touch CANARY')",
    "load_library": "torch.ops.load_library('x') if C() is None else 0",
    "hub": "torch.hub.os.system('touch CANARY')",
    "an op of TorchScript": "torch.ops.aten.save(torch.ones(1), 'CANARY')",
    "an op from a file": "torch.ops.aten.from_file('CANARY', True, 4)",
    "torch.compile": "torch.compile(lambda: C(), backend='eager')()",
    "vmap": "torch.vmap(lambda v: (C(), v)[1])(torch.ones(1))",
    "a distance function": "F.triplet_margin_with_distance_loss(ids, ids, ids, distance_function=C())",
    "a key function": "max([1, 2], key=lambda v: C() and v)",
    "a numpy file": "torch.ones(1).numpy().tofile('CANARY')",
}
# Statements put into the stage's class.
IN_STAGE = {
    "import in a class": "import os\nos.system('touch CANARY')",
    "__getattr__ of a stage": "def __getattr__(self, name):\n    C()\n    return super().__getattr__(name)",
    "__call__ of a stage": "def __call__(self, *a):\n    C()\n    return self.forward(*a)",
    "__del__ of a stage": "def __del__(self):\n    C()",
    "a property": "training = property(lambda s: C())",
}
# Statements put at the beginning of the stage's __init__.
IN_INIT = {
    "a hook in __init__": "self.register_forward_pre_hook(lambda *a: C() and None)",
    "forward replaced": "self.forward = lambda *a: C()",
    "the class replaced": "self.__class__ = C()",
    "setattr": "setattr(torch, 'tanh', C())",
}
# What stands in place of pieces of the file.
REPLACED = {
    "import os": ("import torch\n", "import os\nimport torch\nos.system('touch CANARY')\n"),
    "an alias": ("import torch\n", "import os as torch\nimport torch\n"),
    "relative import": ("import torch\n", "from . import payload\nimport torch\n"),
    "a module's __getattr__": (_TOP, "\ndef __getattr__(name):\n    C()\n" + _TOP),
    "a class called range": (_STAGE, "class range:\n    def __new__(cls, n):\n        C()\n\n\n" + _STAGE),
    "Scope redefined": (_BLOCK, "class Scope(Scope):\n    def __init__(self):\n        C()\n\n\n" + _BLOCK),
    # A profiler runs texts; cProfile is there because torch imports it.
    "Scope is another class": (
        _BASES,
        f"from cProfile import Profile as Scope\n{_OTHERS}",
        _BLOCK,
        "class TinyBlock(Stage):",
        _INIT,
        "        self.evil = Scope()\n        self.run = nn.Identity()\n        self.blocks = Stage()",
        _FIRST,
        f'        self.evil.run("C()")\n{_FIRST}',
    ),
    "a base is another class": (
        _BASES,
        f"from cProfile import Profile as Stage\n{_BASES.replace('Stage, ', '')}",
        _FIRST,
        f'        self.run("C()")\n{_FIRST}',
    ),
    "an imported class is called": (
        _BASES,
        f"from cProfile import Profile\n{_BASES}",
        _FIRST,
        f'        Profile().run("C()")\n{_FIRST}',
    ),
    "a class called step": (
        _STEP + "\n    return {}\n",
        _STEP + "\n    return {}\n\n\nclass step(Stage):\n"
        "    def __init__(self):\n        super().__init__()\n\n    def forward(self):\n        return C()\n",
    ),
    "a list of modules": ("nn.Embedding(8, 4)", "nn.ModuleList([C()])"),
    "a layer's own method": (
        "nn.Embedding(8, 4)",
        "nn.Embedding(8, 4)\n        self.from_pretrained = nn.Identity()",
        _FIRST,
        f"        self.embed.from_pretrained(C())\n{_FIRST}",
    ),
    "__init_subclass__": (_BLOCK, "class Base(Stage):\n    def __init_subclass__(cls):\n        C()\n\n\n" + _BLOCK),
    "a draw's place": ("draw_at(self)", "draw_at(self, C())"),
    "a draw's scope": ("draw_at(self)", "draw_at(C(), 'x')"),
    "draw_at redefined": (_BLOCK, "class draw_at:\n    def __init__(self, scope):\n        C()\n\n\n" + _BLOCK),
    "a draw's number": ("__init__()\n        self.blocks", "__init__(draws={'x': (C(),)})\n        self.blocks"),
    "a path's name": ("__init__()\n        self.blocks", "__init__(unread=[C()])\n        self.blocks"),
    "a place's name": ("__init__()\n        self.blocks", "__init__(draws={C(): (1,)})\n        self.blocks"),
    "super's argument": ("__init__()\n        self.blocks", "__init__(C() and None)\n        self.blocks"),
    "a layer that takes a function": ("nn.Embedding(8, 4)", "nn.TripletMarginWithDistanceLoss(distance_function=C())"),
    "DataParallel": ("nn.Embedding(8, 4)", "nn.DataParallel(C())"),
    "nn.Module's own": ("nn.Embedding(8, 4)", "nn.modules.module.torch.os.popen('touch CANARY')"),
    "a step of os": ("    return {}\n", "    rt.__class__.__init__.__globals__['os'].system('touch CANARY')\n"),
    "an op of another module": ("    return {}\n", "    torch.free()\n    return {}\n"),
    "a step that unpacks": ("    return {}\n", "    rt.free(*[C()])\n    return {}\n"),
    "a step with keywords": ("    return {}\n", "    rt.free(**{'x': C()})\n    return {}\n"),
    "a step with an f-string": ("    return {}\n", "    rt.free(f'{C()}')\n    return {}\n"),
    "a step that names rt": ("    return {}\n", "    rt = C()\n    return {}\n"),
    "a step as a class": (_STEP + "\n    return {}\n", "class step:\n    def __new__(cls, rt, batch):\n        C()\n"),
    "a step as a lambda": (_STEP + "\n    return {}\n", "step = lambda rt, batch: C()\n"),
    "an async step": (_STEP, "async " + _STEP),
    "an encoding": ('"""a model', "# coding: unicode_escape\n\\nC()\n" + '"""a model'),
    "a star import": (
        "import torch\n",
        "from os import *\nimport torch\n",
        "self.embed(ids)",
        "system('touch CANARY')",
    ),
    "an imported name": (
        "import torch\n",
        "from os import system\nimport torch\n",
        "torch.tanh(h)",
        "system('touch CANARY')",
    ),
}


@dataclass(frozen=True)
class Hostile:
    """One file: what it tries, and its text."""

    name: str
    text: str


def tricks(text: str, canary: str) -> Iterator[Hostile]:
    """The file `text` with one trick each."""
    places = ((IN_FORWARD, _FIRST, 8), (IN_STAGE, "    def forward(self, ids, labels):", 4), (IN_INIT, _INIT, 8))
    for statements, place, depth in places:
        for name, statement in statements.items():
            put = textwrap.indent(statement, " " * depth)
            yield Hostile(name, _replace_pairs(text, (place, f"{put}\n{place}"), canary))
    for name, pairs in REPLACED.items():
        yield Hostile(name, _replace_pairs(text, pairs, canary))


def payloads(text: str, canary: str) -> Iterator[Hostile]:
    """The file `text` with every payload at every place."""
    for place, (old, new) in PLACES.items():
        for payload, expression in PAYLOADS.items():
            put = new.replace("{E}", expression) if "{E}" in new else new.replace("{}", expression)
            yield Hostile(f"{payload}, {place}", _replace_pairs(text, (old, put), canary))


def _replace_pairs(text: str, pairs: tuple[str, ...], canary: str) -> str:
    for old, new in zip(pairs[::2], pairs[1::2]):
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text.replace("C()", "open('CANARY', 'w')").replace("CANARY", canary)
