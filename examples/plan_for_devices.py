"""What a checkpoint would take on devices that are not here, from its headers alone.

python examples/plan_for_devices.py model.gguf cpu:avx2 cuda:sm90 npu:910b npu:310p

A site without a kernel is a result, not an error; ``on_unsupported`` decides what becomes of it.
"""

from __future__ import annotations

import sys

import qcompile


def main(path: str, *devices: str) -> None:
    """One line a device, then why sites have no kernel there."""
    for device in devices:
        plan = qcompile.plan(path, device=device)
        kernels = sorted({entry.runs_as for entry in plan.entries})
        size = plan.bytes_after + sum(weight.nbytes for weight in plan.floats)
        packed = "-" if plan.refused else f"{size / 2**20:.1f} MiB"
        print(f"{device:<10} {packed:>12}  {', '.join(kernels)}")
        for entry in plan.refused[:1]:
            print(f"  {len(plan.refused)} sites without a kernel; {entry.site.name}:")
            for verdict in entry.verdicts:
                print(f"    {verdict.kernel}: {verdict.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
