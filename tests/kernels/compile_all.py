"""Compiles every kernel for an H100 or H200, which needs no such device: run as a script, without the interpreter.

The interpreter takes some things that the compiler does not, such as a variable that changes its type in a loop.
"""

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hotrow.kernels.backward import join_kernel, update_kernel
from hotrow.kernels.chunks import chunk_kernel
from hotrow.kernels.expand import contract_kernel, select_backward_kernel, select_kernel
from hotrow.kernels.host import gather_kernel, scatter_kernel
from hotrow.kernels.places import places_kernel
from hotrow.kernels.pooling import lookup_kernel
from hotrow.kernels.unique import runs_kernel

TYPES = {"f": "*fp32", "b": "*bf16", "h": "*fp16", "i": "*i32", "l": "*i64", "n": "i32"}
ONE = {"BLOCKS": (128,), "VECTORS": (8,), "FULL": (True,)}
TWO = {"BLOCKS": (32, 128), "VECTORS": (4, 8), "FULL": (False, True)}
BARE = {"WEIGHTED": False, "STAGED": False, "EXPANDED": False}
RICH = {"WEIGHTED": True, "STAGED": True, "EXPANDED": True}
SEGMENT = {"KINDS": (2,), "TILES": ((1, 2, 4),), "FIRSTS": (0,), "COUNTS": (1,), "ALL": 1}
SEGMENTS = {"KINDS": (3, 1), "TILES": ((4, 4, 8), (1, 1, 2)), "FIRSTS": (0, 2), "COUNTS": (2, 1), "ALL": 4}
LOOKUP = {"FEATURES": 4, "UNROLL": 2, "OUT_VECTOR": 4}
UPDATE = {"WIDTH": 128, "UNROLL": 2, "UNIT": 4}
PLAIN = {"PLAIN": True, "STAGED": False}
CLIPPED = {"PLAIN": False, "STAGED": True}
LISTS = {"EACH": 8, "SEGMENTS": 4, "CLASSES": 2}
TILE = {"TILE": 4, "BLOCK": 128, "VECTOR": 8}

CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (lookup_kernel, "ffflilfiilinn", {**LOOKUP, **ONE, **BARE, "TILES": (4,)}),
    (lookup_kernel, "bbfliifiilinn", {**LOOKUP, **TWO, **RICH, "TILES": (8, 2)}),
    (
        places_kernel,
        "iifllflin",
        {"FEATURES": 4, "TILE": 128, "WIDE": 8, "UNIT": 4, "WEIGHTED": True, "FACTORS": True, "NUMBERS": True},
    ),
    (chunk_kernel, "ilififiiiiiilnn", {**LISTS, "FACTORS": True, "WRITE": True}),
    (chunk_kernel, "ilififiiiiiilnn", {**LISTS, "CLASSES": 1, "FACTORS": False, "WRITE": False}),
    (update_kernel, "fifiiiiiffffllfln", {**UPDATE, **ONE, **SEGMENT, **PLAIN, "FACTORS": False}),
    (update_kernel, "bifiiiiifbffllfln", {**UPDATE, **TWO, **SEGMENTS, **CLIPPED, "FACTORS": True}),
    (join_kernel, "iiiinnffffllfl", {"WIDTH": 128, **ONE, **PLAIN, "KINDS": (2,), "MANY": 32, "SEGMENTS": 1}),
    (join_kernel, "iiiinnfhffllfl", {"WIDTH": 128, **TWO, **CLIPPED, "KINDS": (0, 2), **LISTS, "MANY": 32}),
    (contract_kernel, "fbiil", {"SEGMENTS": 2, "UNROLL": 4, "WHOLE": True, **TILE}),
    (contract_kernel, "fbiil", {"SEGMENTS": 1, "UNROLL": 4, "WHOLE": False, **TILE}),
    (select_kernel, "fflllnn", TILE),
    (select_backward_kernel, "bblliinn", TILE),
    (runs_kernel, "lliiliiiin", {"TILE": 1024, "TABLES": True}),
    (gather_kernel, "fflnn", TILE),
    (scatter_kernel, "fflnn", TILE),
]


def compiled(kernel: Any, types: str, given: dict[str, Any]) -> Any:
    """The kernel compiled for arguments of `types`, in order, and constants, of which it takes those it has."""
    names = kernel.arg_names
    given = {"EARLY": True, **given}
    constants = {name: given[name] for name in names[len(types) :]}
    signature = {n: TYPES[t] for n, t in zip(names, types, strict=False)} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind != "n"}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})


def check_waits(name: str, ptx: str) -> None:
    """A kernel that starts early waits first, then lets the next one start. The join reads lists before it waits."""
    entry = ptx[ptx.index(".entry") :]
    waits = [m.start() for m in re.finditer(r"griddepcontrol\.wait", entry)]
    lets = [m.start() for m in re.finditer(r"griddepcontrol\.launch_dependents", entry)]
    assert len(waits) == len(lets) and all(w < t for w, t in zip(waits, lets, strict=True)), (
        f"{name} does not wait first"
    )
    if name == "join_kernel":  # in its loop, and at its end
        assert len(waits) == 2, f"{name} waits {len(waits)} times"
    else:
        first = re.search(r"(ld|st|atom)\.global", entry)
        assert first is None or waits[0] < first.start(), f"{name} touches memory before it has waited"


if __name__ == "__main__":
    for kernel, types, given in CASES:
        name, ptx = kernel.jit.fn.__name__, compiled(kernel.jit, types, given).asm["ptx"]
        if "EARLY" in kernel.jit.arg_names:
            check_waits(name, ptx)
        print(name, "wide loads:", len(re.findall(r"ld\.global\S*\.v4", ptx)))
