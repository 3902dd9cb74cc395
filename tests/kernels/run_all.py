"""A small run of every kernel on a CUDA device, for a tool to watch; run as a script:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/kernels/run_all.py
"""

import torch
from cases import make

from hotrow.kernels import Rule, TableSpec, ops
from hotrow.kernels.host import HostRows
from hotrow.kernels.steps import Members, group_numbers

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def main() -> None:
    whole = [([(0, "sum"), (1, "mean"), (0, "sequence")], 37, None)]
    for kind in KINDS:  # rows as wide as a block, which are read without masks
        for hot in (0.0, 0.6):
            make("cuda", [TableSpec(50, 128, Rule(kind)), TableSpec(9, 128, Rule(kind))], whole, hot=hot).step()
        rule = Rule(kind, clip_value=0.5, clip_norm=1.0, bound=0.9)
        specs = [TableSpec(40, 20, rule), TableSpec(5, 24, staged=9), TableSpec(300, 32), TableSpec(7, 128)]
        features = [(0, "sum"), (1, "mean"), (2, "sum"), (3, "sequence")]
        groups = [(features, 31, 60), (features[1:], 29, None)]
        make("cuda", specs, groups, weighted=True, longest=9, hot=0.5).step()
    make("cuda", [TableSpec(50, 256)], [([(0, "sum")], 20, 41)], hot=0.9, longest=20).step()
    make("cuda", [TableSpec(20, 128)], [([(0, "sum")], 5, None)], longest=1, dtype=torch.bfloat16).step()
    case = make("cuda", [TableSpec(20, 16)], [([(0, "sum")], 9, None)])
    group_numbers(case.tables, case.shape, case.slots.long(), case.offsets)
    values = torch.randn(5, 4, device="cuda", requires_grad=True)
    inverse = torch.tensor([1, 0, 1], device="cuda")
    members, starts = Members.of(inverse, 2)
    offsets, expanded = torch.tensor([0, 2, 5], device="cuda"), torch.tensor([0, 3, 5, 8], device="cuda")
    ops.jagged_select(values, offsets, expanded, inverse, members, starts, 8).sum().backward()
    ops.run(ops.unique, torch.randint(0, 9, (100,), device="cuda"), torch.zeros(100, device="cuda").int(), None)
    rows, numbers = HostRows(torch.randn(500, 24).pin_memory(), "cuda"), torch.randperm(500)[:99].pin_memory()
    rows.scatter(numbers, rows.gather(numbers, "direct"), "direct")
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
